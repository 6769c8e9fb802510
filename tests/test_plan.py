"""``plan`` reports what lowering emits, and products are arranged for kernels without copies where strides allow."""

import copy
import dataclasses
import functools
import io
import itertools
import math
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sanitize
from jax import lax

import jax_streamk
from jax_streamk import Auto, DataParallel, Device, Plan, SplitK, StreamK, _ffi, machines, matmul, plan, text
from jax_streamk.device import device_of
from jax_streamk.plan import custom_call, described, planner, problem
from jax_streamk.plan.launch_policy import LaunchPolicy
from jax_streamk.plan.plan import native_schedule
from jax_streamk.product import primitive
from jax_streamk.product.dense import Dense

PLATFORM = "cuda" if jax.default_backend() == "gpu" else "cpu"
TARGET = "jax_streamk_cuda_gemm" if PLATFORM == "cuda" else "jax_streamk_host_gemm"
ROW, COLUMN = _ffi.Major.row, _ffi.Major.column


def shaped(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def emitted_attributes(f, *operands):
    """The attributes of every call of ours in the lowered program, as text."""
    found = re.findall(
        rf"custom_call @{TARGET}\(.*?backend_config = \{{(.*?)\}}", jax.jit(f).lower(*operands).as_text()
    )
    return [
        {name: value.strip('"') for name, value in re.findall(r'(\w+) = ("[^"]*"|[^\s,}]+)', text)} for text in found
    ]


@pytest.mark.parametrize("schedule", [Auto(), DataParallel(), SplitK(3), StreamK(), StreamK(max_sms=2)], ids=str)
@pytest.mark.parametrize(
    "shape_a, shape_b, dtype, preferred",
    [
        ((100, 333), (333, 77), jnp.float32, None),
        ((256, 1024), (1024, 512), jnp.bfloat16, None),
        ((256, 1024), (1024, 512), jnp.bfloat16, jnp.float32),
        ((3, 64, 520), (520, 40), jnp.float16, None),
        ((64, 520), (3, 520, 40), jnp.float16, None),
        ((5, 1, 520), (5, 520, 40), jnp.bfloat16, None),
        ((520,), (520, 40), jnp.bfloat16, None),
        ((2, 1, 64, 520), (1, 520, 40), jnp.float32, None),
    ],
)
def test_lowering_emits_the_plan(shape_a, shape_b, dtype, preferred, schedule):
    a, b = shaped(shape_a, dtype), shaped(shape_b, dtype)
    made = plan(a, b, schedule=schedule, preferred_element_type=preferred)
    calls = emitted_attributes(functools.partial(matmul, schedule=schedule, preferred_element_type=preferred), a, b)
    attributes = custom_call.attributes(made)
    as_text = {np.float64: "{:.6e}".format, np.bool_: lambda value: str(value).lower()}
    assert calls == [{name: as_text.get(type(value), str)(value) for name, value in attributes.items()}]


def test_a_given_schedule_is_in_the_plan():
    a, b = shaped((128, 2048)), shaped((2048, 128))
    for schedule in (DataParallel(), SplitK(7), SplitK(4, "separate"), StreamK(), StreamK(max_sms=2)):
        made = plan(a, b, schedule=schedule)
        assert made.schedule == schedule
        assert "the schedule was given" in made.reasons


def test_auto_resolves_to_a_schedule():
    made = plan(shaped((128, 2048)), shaped((2048, 128)))
    assert isinstance(made.schedule, (DataParallel, SplitK, StreamK))
    assert made.kernel in {kernel.name for kernel in jax_streamk.kernels()}
    assert made.microseconds > 0 and len(made.reasons) > 1


def test_arrays_and_shapes_make_the_same_plan():
    a, b = np.ones((64, 300), np.float32), jnp.ones((300, 70))
    assert plan(a, b) == plan(shaped(a.shape), shaped(b.shape))
    assert plan(a, b) == plan(a, b, dimension_numbers=(((1,), (0,)), ((), ())))


def test_operands_promote():
    assert plan(shaped((64, 300), jnp.bfloat16), shaped((300, 70))).problem.type_a == _ffi.Type.f32
    assert plan(shaped((64, 300), jnp.bfloat16), jnp.full((300, 70), 2.0)).problem.type_a == _ffi.Type.bf16, (
        "a weak type gives way"
    )
    # float64 is float32 where 64-bit types are disabled, with dimension numbers or without.
    a, b = np.ones((64, 300)), np.ones((300, 70))
    for dimension_numbers in (None, (((1,), (0,)), ((), ()))):
        assert plan(a, b, dimension_numbers).problem.type_a == _ffi.Type.f32
        with jax.enable_x64(True):
            assert plan(a, b, dimension_numbers).problem.type_a == _ffi.Type.f64


def test_dimension_numbers():
    made = plan(shaped((300, 2, 64)), shaped((2, 70, 300)), dimension_numbers=(((0,), (2,)), ((1,), (0,))))
    assert (made.problem.batch, made.problem.m, made.problem.n, made.problem.k) == (2, 64, 70, 300)
    assert (made.problem.major_a, made.problem.major_b) == (COLUMN, COLUMN)


def test_devices():
    a, b = shaped((64, 300)), shaped((300, 70))
    here = plan(a, b)
    assert here.device.platform == PLATFORM
    assert plan(a, b, device=jax.devices()[0]) == here == plan(a, b, device=here.device)
    many = Device("cpu", 0, 64)
    assert plan(a, b, device=many).device == many
    cpu = plan(a, b, device=jax.devices("cpu")[0])
    assert cpu.device.platform == "cpu" and cpu.device.arch == 0 and cpu.device.sms >= 1
    for default in ("cpu", jax.devices("cpu")[0]):
        with jax.default_device(default):
            assert plan(a, b) == cpu
    assert plan(a, b, device="cpu") == cpu
    describes = r"jax_streamk\.Device\(\.\.\.\) describes a device that this process lacks, as jax_streamk.H100, H200"
    for absent in ("abacus", "h200"):
        with pytest.raises(ValueError, match=rf"device='{absent}': .*{absent}.*: {describes}"):
            plan(a, b, device=absent)
    with pytest.raises(
        TypeError, match=r"device=0: must be None, a jax\.Device, a platform such as 'cpu', or a jax_streamk\.Device"
    ):
        plan(a, b, device=0)


# A build without CUDA kernels plans with descriptions of them, a build for some GPUs with its own kernels.
NEEDS_SM90 = pytest.mark.skipif(
    all(kernel.family != _ffi.Family.sm90 for kernel in planner.kernels_for("cuda")),
    reason="this build is for GPUs other than Hopper",
)


@NEEDS_SM90
@pytest.mark.parametrize("device", [Device("cuda", 90, 132), jax_streamk.H100, jax_streamk.H200], ids=str)
def test_a_gpu_that_is_not_here(device):
    a, b = shaped((64, 320), jnp.bfloat16), shaped((320, 80), jnp.bfloat16)
    made = plan(a, b, device=device)
    assert made.device == device and made.kernel.startswith(("sm", "skinny"))
    for schedule in (DataParallel(), SplitK(2), StreamK()):
        assert plan(a, b, schedule=schedule, device=device).schedule == schedule
    assert plan(shaped((2, 5120)), shaped((5120, 1792)), precision="high", device=device).kernel.startswith("skinny")
    # Large f32 products at "high" use copies in two parts, whatever the majornesses.
    for dims in itertools.product((0, 1), repeat=2):
        large = plan(
            shaped((4096, 4096)),
            shaped((4096, 4096)),
            (((dims[0],), (dims[1],)), ((), ())),
            precision="high",
            device=device,
        )
        assert large.kernel.startswith("sm90") and large.workspace_bytes >= 2 * 2 * 4 * 4096**2
    # If TF32 operands are contiguous along m and n, one is transposed where that pays more than doing so in the kernel.
    gradient = plan(shaped((4096, 4096)), shaped((4096, 4096)), (((0,), (0,)), ((), ())), device=device)
    assert gradient.kernel.startswith("sm90") and gradient.workspace_bytes >= 4 * 4096**2
    tall = plan(shaped((10**6, 512)), shaped((10**6, 512)), (((0,), (0,)), ((), ())), device=device)
    assert tall.kernel.startswith("sm90_f32_f32_cr_") and planner.copying(tall) == 0
    odd = shaped((1001, 1003), jnp.bfloat16), shaped((1003, 1001), jnp.bfloat16)
    assert plan(*odd, device=device).kernel.startswith("sm90")
    # Atomic kernels are for aligned matrices, or for their copies.
    assert plan(*odd, schedule=SplitK(4, "atomic"), device=device).kernel.startswith("sm90")
    with pytest.raises(ValueError, match='no split-K with reduction "atomic"'):
        plan(*odd, schedule=SplitK(4, "atomic"), device=jax_streamk.A100)


@pytest.mark.parametrize("device", [jax_streamk.A100, Device("cuda", 86, 84), Device("cuda", 120, 170)], ids=str)
def test_gpus_other_than_hopper_run_what_every_gpu_does(device):
    for m, dtype in itertools.product((2, 16, 500), (jnp.bfloat16, jnp.float16, jnp.float32)):
        made = plan(shaped((m, 4096), dtype), shaped((4096, 1024), dtype), device=device)
        assert made.kernel.startswith(("sm80", "skinny")) and made.microseconds > 0
    # These kernels cannot share tiles of a batch in one launch, and skinny ones share K in clusters, which need Hopper.
    batch = shaped((3, 64, 4096), jnp.bfloat16), shaped((3, 4096, 64), jnp.bfloat16)
    assert plan(*batch, device=device).schedule in (
        DataParallel(),
        *(SplitK(splits, "separate") for splits in range(2, 129)),
    )
    with pytest.raises(ValueError, match="schedule=StreamK.* cannot run .*batch"):
        plan(*batch, schedule=StreamK(), device=device)
    row = plan(shaped((1, 4096), jnp.bfloat16), shaped((4096, 64), jnp.bfloat16), schedule=SplitK(4), device=device)
    assert row.kernel.startswith("skinny") == (device.arch >= 90)


def test_named_gpus():
    """Their names are JAX's, under which plans are tuned; and each has its constants."""
    assert [(d.platform, d.arch, d.sms) for d in (jax_streamk.A100, jax_streamk.H100, jax_streamk.H200)] == [
        ("cuda", 80, 108), ("cuda", 90, 132), ("cuda", 90, 132)
    ]  # fmt: skip
    found = [machines.machine_of(getattr(jax_streamk, name)) for name in ("A100", "H100", "H200")]
    assert [machine.name for machine in found] == ["generic", "h100", "h200"]
    assert [machine.is_measured for machine in found] == [False, True, True]
    here = jax.devices()[0]
    if PLATFORM == "cuda" and any(name in here.device_kind for name in ("A100-SXM4-80GB", "H100 80GB HBM3", "H200")):
        assert device_of(here) in (jax_streamk.A100, jax_streamk.H100, jax_streamk.H200)


def test_described_kernels_are_those_of_a_build_that_has_all():
    """``python -m jax_streamk kernels --csv --device h200`` prints them, in a build for 8.0 and 9.0."""
    built = [kernel for kernel in jax_streamk.kernels() if kernel.family != _ffi.Family.host]
    kernels = built if any(kernel.family == _ffi.Family.sm90 for kernel in built) else described.cuda_kernels()
    written = io.StringIO()
    described.write(kernels, written)
    assert written.getvalue() == described.text()
    assert len(kernels) > 100 and {kernel.family.name for kernel in kernels} == {"sm80", "sm90", "skinny"}


@NEEDS_SM90
def test_kernels_can_run_what_compute_sanitizer_looks_at():
    kernels = {kernel.name: kernel for kernel in planner.kernels_for("cuda")}
    device, machine = jax_streamk.H200.native(), machines.machine_of(jax_streamk.H200).native
    for name, extents, schedule, epilogue, *majors in sanitize.LAUNCHES:
        made = sanitize.problem_of(kernels[name], *extents, epilogue, majors).native()
        wanted = native_schedule(schedule)
        choice = _ffi.choose(_ffi.Kernels([kernels[name]]), made, wanted, device, machine)
        assert choice.candidates, f"{name}, {extents}: {choice.refusal}"


@NEEDS_SM90
def test_a_separate_reduction_counts_in_31_bits():
    huge = shaped((2**16, 64), jnp.bfloat16), shaped((64, 2**16), jnp.bfloat16)
    with pytest.raises(ValueError, match="D has too many elements for a separate reduction"):
        plan(*huge, schedule=SplitK(2, "separate"), preferred_element_type=jnp.float32, device=jax_streamk.A100)


@pytest.mark.parametrize("device", [jax_streamk.H200, jax_streamk.Device("cpu", 0, 4)], ids=str)
def test_operands_of_two_types_have_no_kernel_yet(device):
    bf16 = next(each for each in problems_to_plan() if each.type_a == _ffi.Type.bf16 and each.m > 64)
    mixed = dataclasses.replace(bf16, type_b=_ffi.Type.s8)
    assert planner.make_plan(mixed, Auto(), device).reasons == ("falls back to XLA: no kernel multiplies bf16 by s8",)
    with pytest.raises(ValueError, match="no kernel multiplies bf16 by s8"):
        planner.make_plan(mixed, StreamK(), device)


def test_a_problem_is_a_frozen_dataclass_of_the_fields_of_its_native_side():
    made = plan(shaped((64, 300)), shaped((300, 70)), activation="silu", alpha=0.1).problem
    assert pickle.loads(pickle.dumps(made)) == made == dataclasses.replace(made) and hash(made) == hash(copy.copy(made))
    assert repr(made).startswith("GemmProblem(batch=1, m=64, n=70, k=300, type_a=")
    native = made.native()
    assert {name: getattr(native, name) for name, *_ in native.fields} == made.attributes() == dataclasses.asdict(made)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.m = 65
    with pytest.raises(AttributeError):
        native.m = 65
    with pytest.raises(TypeError, match="missing"):
        problem.GemmProblem(1, 64)


def problems_to_plan():
    types = [
        (_ffi.Type.bf16, _ffi.Math.native),
        (_ffi.Type.f32, _ffi.Math.tf32),
        (_ffi.Type.f32, _ffi.Math.tf32x3),
        (_ffi.Type.f64, _ffi.Math.native),
    ]
    shapes = [(1, 4096, 4096), (16, 14336, 4096), (200, 1001, 1003), (512, 320, 131072), (4096, 4096, 4096)]
    for (type_, math_), (m, n, k), batch in itertools.product(types, shapes, (1, 3)):
        for major_a, lda in ((ROW, k), (COLUMN, m)):
            strides = lda, n, n, m * k, k * n, m * n
            yield problem.GemmProblem(batch, m, n, k, type_, type_, type_, math_, major_a, ROW, *strides)


@pytest.mark.skipif(
    all(kernel.family != _ffi.Family.sm90 for kernel in jax_streamk.kernels()),
    reason="this build lacks kernels to compare with",
)
@pytest.mark.parametrize("device", [jax_streamk.A100, jax_streamk.H200], ids=str)
@pytest.mark.parametrize("schedule", [Auto(), DataParallel(), SplitK(4), SplitK(6, "separate"), StreamK()], ids=str)
def test_a_description_plans_as_the_kernel_does(device, schedule, monkeypatch):
    """Described under other names, since the build's own kernels are preferred to descriptions."""
    wanted = None if isinstance(schedule, Auto) else native_schedule(schedule)
    found = [planner.choose(each, wanted, device) for each in problems_to_plan()]
    text = re.sub("^(?=sm|skinny)", "described_", described.text(), flags=re.MULTILINE)
    monkeypatch.setattr(planner, "kernels_for", lambda platform: described.read(io.StringIO(text)))
    planner._registry.cache_clear()
    try:
        for each, real in zip(problems_to_plan(), found):
            choice = planner.choose(each, wanted, device)
            assert [(x.kernel, x.cost.microseconds) for x in choice.candidates] == [
                ("described_" + x.kernel, x.cost.microseconds) for x in real.candidates
            ]
            assert choice.workspace_bytes in (real.workspace_bytes, None)
    finally:
        planner._registry.cache_clear()


@pytest.mark.skipif(_ffi.has_cuda, reason="this build has CUDA kernels")
def test_a_build_without_cuda_plans_for_gpus_and_says_what_it_does_not_know():
    a, b = shaped((256, 65536), jnp.bfloat16), shaped((65536, 256), jnp.bfloat16)
    whole, cut = (
        plan(a, b, schedule=schedule, device=jax_streamk.H200) for schedule in (SplitK(8, "separate"), StreamK())
    )
    for made in (whole, cut):
        assert "this build has no CUDA kernels: planned from a description of them" in str(made)
        assert made.kernel not in {kernel.name for kernel in jax_streamk.kernels()}
    # Eight slices of D in float32. Stream-K's workspace depends on the kernel's decomposition.
    assert whole.workspace_bytes == 8 * 4 * 256**2 and "workspace 2.1 MB" in str(whole)
    assert cut.workspace_bytes is None and "which does not give the workspace of this one" in str(cut)
    with pytest.raises(RuntimeError, match=r"To (build|have) them: pip install "):
        jax.jit(matmul).trace(a, b).lower(lowering_platforms=("cuda",))


@NEEDS_SM90
@pytest.mark.parametrize(
    "m, n, k, operands",
    [(1001, 1021, 1003, "AB"), (1024, 1024, 1003, "A"), (1024, 1001, 1024, "B"), (1024, 1024, 1024, "")],
)
@pytest.mark.parametrize("out", [jnp.bfloat16, jnp.float32])
def test_misaligned_matrices_have_copies_in_the_workspace(m, n, k, operands, out):
    device = Device("cuda", 90, 132)
    product = plan(
        shaped((m, k), jnp.bfloat16), shaped((k, n), jnp.bfloat16), preferred_element_type=out, device=device
    ).problem
    choice = planner.choose(product, native_schedule(DataParallel()), device)
    assert choice.candidates[0].kernel.startswith("sm90") and bool(choice.candidates[0].cost.repack) == bool(operands)
    round_up = lambda x, to: -(-x // to) * to
    copies = ("A" in operands) * 2 * m * round_up(k, 64) + ("B" in operands) * 2 * k * round_up(n, 64)
    assert copies <= choice.workspace_bytes <= copies + 2 * 256


@pytest.mark.parametrize(
    "a, b, kwargs, reason",
    [
        (
            shaped((4, 8), jnp.int32),
            shaped((8, 4), jnp.int32),
            {},
            r"^Plan: int32\[4, 8\] @ int32\[8, 4\]\n(.*\n)+.* to XLA: int32 x int32: no kernel multiplies int32",
        ),
        (
            shaped((4, 8)),
            shaped((8, 4)),
            {"preferred_element_type": jnp.bfloat16},
            r"^Plan: float32\[4, 8\] @ .*\n(.*\n)+  - falls back to XLA: .*result of float32 operands must be float32",
        ),
        (
            shaped((2**20, 2**30)),
            shaped((2**30, 2**44)),
            {},
            "falls back to XLA: .* have more elements than 64 bits can count",
        ),
        (shaped((0, 8)), shaped((8, 4)), {}, "the result is empty or zero"),
        (shaped((4, 0)), shaped((0, 4)), {}, "the result is empty or zero"),
    ],
)
def test_reasons_of_products_without_a_kernel(a, b, kwargs, reason):
    made = plan(a, b, **kwargs)
    assert made.kernel is None and made.schedule is None and made.workspace_bytes == 0
    assert re.search(reason, str(made))
    assert emitted_attributes(functools.partial(matmul, **kwargs), a, b) == []


def test_mixed_operands_fall_back():
    made = plan(shaped((40, 80), jnp.bfloat16), shaped((80, 40)), dimension_numbers=(((1,), (0,)), ((), ())))
    assert "lhs is converted from bfloat16 to float32 first: kernels need operands of one dtype" in made.reasons


def test_plans_are_frozen_and_hashable():
    made = plan(shaped((64, 3000)), shaped((3000, 70)), schedule=SplitK(5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.kernel = "another"
    again = plan(shaped((64, 3000)), shaped((3000, 70)), schedule=SplitK(5))
    assert {made: 1}[again] == 1 and isinstance(made, Plan)


# What a plan prints.

HERE, GPUS = device_of(jax.devices("cpu")[0]), (jax_streamk.A100, jax_streamk.H100, jax_streamk.H200)
PRODUCTS = [
    (1, 4096, 4096),
    (16, 14336, 4096),
    (100, 1001, 1003),
    (256, 256, 65536),
    (4096, 4096, 4096),
    (20000, 20000, 20000),
]


def planned(m, n, k, device, dtype=jnp.bfloat16, **options):
    return plan(shaped((m, k), dtype), shaped((k, n), dtype), device=device, **options)


def test_a_plan_prints_the_product_the_device_the_kernel_the_schedule_and_the_workspace():
    made = planned(64, 70, 3000, HERE, jnp.float32, schedule=SplitK(5))
    first, device, kernel, schedule, launch, *reasons = str(made).splitlines()
    assert "[64, 3000] @ [3000, 70]" in first
    assert device == f"  on {HERE.kind} ({HERE.sms} threads)"
    assert kernel == f"  {made.kernel}"
    assert schedule == f"  {made.schedule}, workspace {made.workspace_bytes / 1e3:.1f} KB"
    assert launch == f"  launch: {made.policy}" == f"  launch: raster along {made.raster}"
    assert reasons == [f"  - {reason}" for reason in made.reasons]


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.kind)
def test_gpus_are_printed_by_their_kind(device):
    assert f"on {device.kind} (sm_{device.arch}, {device.sms} SMs)" in str(planned(16, 64, 4096, device))
    assert f"on cuda (sm_{device.arch}, {device.sms} SMs)" in str(
        planned(16, 64, 4096, dataclasses.replace(device, kind=""))
    )


@pytest.mark.parametrize("device", [HERE, *GPUS], ids=lambda device: device.kind)
@pytest.mark.parametrize("schedule", [Auto(), SplitK(4), SplitK(4, "separate"), StreamK()], ids=str)
def test_the_parts_of_an_estimate_add_up_in_one_unit(device, schedule):
    for shape in PRODUCTS:
        made = planned(*shape, device, schedule=schedule)
        (line,) = (reason for reason in made.reasons if reason.startswith("estimated "))
        total, unit, parts = re.fullmatch(
            r"estimated ([\d.]+) (us|ms|s): (.*?)(?:, including .* to fix up.*)?", line
        ).groups()
        assert f"{total} {unit}" == text.duration(made.microseconds)
        numbers = [float(part.split(" ", 1)[0]) for part in parts.split(" + ")]
        assert sum(numbers) == pytest.approx(float(total), abs=1e-6) and min(numbers) > 0
        if schedule == SplitK(4):
            assert " to fix up tiles that 4 workers share" in line
        elif schedule == SplitK(4, "separate") and device.arch:
            assert "fix up" not in line and " adding slices of K + " in line + " + "


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.kind)
def test_what_memory_and_arithmetic_need_at_least(device):
    machine = machines.machine_of(device)
    row, square = planned(1, 8192, 8192, device), planned(8192, 8192, 8192, device)
    assert (row.bound, square.bound) == ("memory", "arithmetic")
    assert (
        row.limit.amount == 2 * (8192 + 8192**2 + 8192)
        and row.limit.microseconds == row.limit.amount / machine.dram_bytes_per_us
    )
    assert square.limit.amount == 2 * 8192**3
    # On Hopper TF32 takes twice as long as 16 bits, and three TF32 three times as long as one. Operands that a batch
    # shares are read once.
    if device.arch == 90:
        single, three = (
            planned(8192, 8192, 8192, device, jnp.float32, precision=precision).limit for precision in (None, "high")
        )
        assert (
            three.microseconds == pytest.approx(3 * single.microseconds)
            and single.microseconds > 1.5 * square.limit.microseconds
        )
    shared = plan(shaped((8, 4096), jnp.bfloat16), shaped((3, 4096, 512), jnp.bfloat16), device=device)
    assert shared.limit.amount == 2 * (8 * 4096 + 3 * 4096 * 512 + 3 * 8 * 512)
    for made in (row, square):
        least = made.limit.microseconds
        share = f"{least / made.microseconds:.0%} of the {made.bound} limit, {text.duration(least)} "
        assert sum(reason.startswith(share) for reason in made.reasons) == 1
    # No estimate is below the limit.
    for shape in PRODUCTS:
        made = planned(*shape, device)
        assert made.limit.microseconds < 1.01 * made.microseconds


def test_a_cpu_has_no_limit():
    made = planned(64, 64, 4096, HERE)
    assert made.limit is None and made.bound is None and "limit" not in str(made)


@pytest.mark.parametrize("threads", [1, 3, 4, 16])
@pytest.mark.parametrize("schedule", [DataParallel(), SplitK(3), SplitK(7), StreamK()], ids=str)
@pytest.mark.parametrize("shape", [(1000, 777, 555), (130, 1000, 520), (300, 300, 20000)], ids=str)
def test_waves_and_quantization_efficiency_are_those_of_the_decomposition(shape, schedule, threads):
    made = planned(*shape, Device("cpu", 0, threads), schedule=schedule)
    parts = made.kernel, made.problem.native(), made.native_schedule(), made.device.native()
    workers = _ffi.decomposition(*parts)
    iterations = [sum(count for _, _, count, _, _ in pieces) for pieces in workers]
    assert made.efficiency == pytest.approx(sum(iterations) / threads / max(iterations))
    tiles = len({tile for pieces in workers for tile, *_ in pieces})
    assert made.waves == pytest.approx(tiles * getattr(schedule, "splits", 1) / threads)
    assert f"{made.waves:.2f} waves, quantization efficiency {made.efficiency:.0%}" in made.reasons


@pytest.mark.parametrize("device", [HERE, *GPUS], ids=lambda device: device.kind)
def test_candidates_are_distinct_and_in_order_of_their_estimates(device):
    for shape in PRODUCTS:
        made = planned(*shape, device)
        best, *others = made.candidates
        assert (best.kernel, best.schedule, best.microseconds) == (made.kernel, made.schedule, made.microseconds)
        times = [candidate.microseconds for candidate in made.candidates]
        assert times == sorted(times) and len(set(map(text.duration, times))) == len(times)
        lines = [
            f"instead of {other.kernel}, {other.schedule}: {text.duration(other.microseconds)}" for other in others
        ]
        assert [reason for reason in made.reasons if reason.startswith("instead of ")] == lines


@pytest.mark.parametrize(
    "args, params, error, message",
    [
        (((4, 8), (8, 4)), dict(residual=np.ones(4), group_sizes=True), TypeError, "plan: residual is ndarray"),
        (((4, 8), (8, 4)), dict(alpha=np.ones(3), gate=True), TypeError, "plan: alpha is ndarray of dtype float64"),
        (((4, 8), (7, 4)), dict(gate=True), ValueError, r"plan: .* with gate=True they must be \(..., k\) and"),
        (((-1, 8), (8, 4)), {}, ValueError, r"plan: lhs has shape \(-1, 8\); no size may be negative"),
        (((4, 8), (8, 4)), dict(dtype=np.int32, activation="silu"), TypeError, "plan: the result's dtype is int32"),
        (((4, 8), (8, 4)), dict(dtype=np.complex64, gate=True), TypeError, "plan: the result's dtype is complex64"),
        (((4, 8), (2, 8, 4)), dict(dtype=np.int32, activation="relu", group_sizes=True), TypeError, "dtype is int32"),
    ],
)
def test_plan_refuses_what_functions_refuse(args, params, error, message):
    params = dict(params)
    dtype = params.pop("dtype", np.float32)
    if "group_sizes" in params:
        params["group_sizes"] = shaped((2,), np.int32)
    with pytest.raises(error, match=message):
        plan(*(shaped(shape, dtype) for shape in args), **params)


def test_refused_arguments():
    with pytest.raises(TypeError, match="plan: rhs is list; it must have a shape and a dtype"):
        plan(shaped((4, 8)), [[1.0]])
    with pytest.raises(TypeError, match="plan: lhs is PRNGKeyArray of dtype .*; it must have a numeric dtype"):
        plan(jax.random.key(0), shaped((8, 4)))
    shapes = r"plan: lhs of shape \(4, 8\) and rhs of shape \(7, 4\)"
    with pytest.raises(ValueError, match=f"{shapes} contract sizes 8 and 7; they must be equal"):
        plan(shaped((4, 8)), shaped((7, 4)))
    with pytest.raises(TypeError, match="schedule='auto': must be None"):
        plan(shaped((4, 8)), shaped((8, 4)), schedule="auto")
    for name in ("bias", "residual"):
        for value, what in ((np.ones(4), "ndarray of dtype float64"), ("no", "str"), (1, "int"), (None, "NoneType")):
            with pytest.raises(TypeError, match=f"plan: {name} is {what}; it must be True or False"):
                plan(shaped((4, 8)), shaped((8, 4)), **{name: value})
    assert plan(shaped((4, 8)), shaped((8, 4)), bias=np.True_) == plan(shaped((4, 8)), shaped((8, 4)), bias=True)
    with pytest.raises(
        ValueError, match=r"schedule=SplitK\(splits=9.*cannot run \[40, 8\] @ \[8, 40\].*exceeds its 1 k-tiles"
    ):
        plan(shaped((40, 8)), shaped((8, 40)), schedule=SplitK(9))


def test_symbolic_shapes_are_left_to_xla():
    (size,) = jax.export.symbolic_shape("size")
    a = shaped((size, 32))
    for params in ({}, dict(gate=True), dict(bias=True)):
        assert "symbolic" in plan(a, shaped((32, 8)), **params).reasons[-1]
    exported = jax.export.export(jax.jit(lambda a: matmul(a, a.T)))(a)
    x = np.arange(96, dtype=np.float32).reshape(3, 32) % 5
    np.testing.assert_array_equal(exported.call(x), x @ x.T)
    with pytest.raises(ValueError, match=r"schedule=StreamK.*cannot run this product: .*symbolic"):
        jax.export.export(jax.jit(lambda a: matmul(a, a.T, schedule=StreamK())))(a)


# How products are arranged.


def arrange(shape_a, shape_b, dimension_numbers, permutation=None):
    return problem.arrange(
        shaped(shape_a), shaped(shape_b), dimension_numbers, None, None, "cpu", permutation=permutation
    )


@pytest.mark.parametrize(
    "shape_a, shape_b, dimension_numbers, majors, leading, batch_strides",
    [
        # The four majornesses.
        ((4, 8), (8, 5), (((1,), (0,)), ((), ())), (ROW, ROW), (8, 5, 5), (0, 0, 20)),
        ((4, 8), (5, 8), (((1,), (1,)), ((), ())), (ROW, COLUMN), (8, 8, 5), (0, 0, 20)),
        ((8, 4), (8, 5), (((0,), (0,)), ((), ())), (COLUMN, ROW), (4, 5, 5), (0, 0, 20)),
        ((8, 4), (5, 8), (((0,), (1,)), ((), ())), (COLUMN, COLUMN), (4, 8, 5), (0, 0, 20)),
        # Batch dimensions in front, between, and of size 1.
        ((3, 4, 8), (3, 8, 5), (((2,), (1,)), ((0,), (0,))), (ROW, ROW), (8, 5, 5), (32, 40, 20)),
        ((4, 3, 8), (8, 3, 5), (((2,), (0,)), ((1,), (1,))), (ROW, ROW), (24, 15, 5), (8, 5, 20)),
        ((8, 3, 4), (5, 3, 8), (((0,), (2,)), ((1,), (1,))), (COLUMN, COLUMN), (12, 24, 5), (4, 8, 20)),
        ((2, 3, 4, 8), (2, 3, 8, 5), (((3,), (2,)), ((0, 1), (0, 1))), (ROW, ROW), (8, 5, 5), (32, 40, 20)),
        ((4, 1, 8), (8, 5, 1), (((2,), (0,)), ((1,), (2,))), (ROW, ROW), (8, 5, 5), (0, 0, 20)),
        # Dimensions of one role that are contiguous in memory.
        ((2, 3, 8), (8, 5), (((2,), (0,)), ((), ())), (ROW, ROW), (8, 5, 5), (0, 0, 30)),
        ((4, 2, 8), (2, 8, 5), (((1, 2), (0, 1)), ((), ())), (ROW, ROW), (16, 5, 5), (0, 0, 20)),
        ((4, 2, 8), (2, 8, 5), (((2, 1), (1, 0)), ((), ())), (ROW, ROW), (16, 5, 5), (0, 0, 20)),
        # Free dimensions around the contraction are a batch that the other operand broadcasts over.
        ((3, 8, 4), (8, 5), (((1,), (0,)), ((), ())), (COLUMN, ROW), (4, 5, 5), (32, 0, 20)),
        ((4, 8), (3, 8, 5), (((1,), (1,)), ((), ())), (ROW, ROW), (8, 5, 15), (0, 40, 5)),
        ((3, 2, 8, 4), (5, 8), (((2,), (1,)), ((), ())), (COLUMN, COLUMN), (4, 8, 5), (32, 0, 20)),
        ((1, 3, 8, 4), (8, 5, 1), (((2,), (0,)), ((0,), (2,))), (COLUMN, ROW), (4, 5, 5), (32, 0, 20)),
    ],
)  # fmt: skip
def test_orders_that_need_no_transpose(shape_a, shape_b, dimension_numbers, majors, leading, batch_strides):
    arranged = arrange(shape_a, shape_b, dimension_numbers)
    assert arranged.permute_lhs is None and arranged.permute_rhs is None
    gemm = arranged.problem
    assert (gemm.major_a, gemm.major_b) == majors
    assert (gemm.lda, gemm.ldb, gemm.ldd) == leading
    assert (gemm.batch_stride_a, gemm.batch_stride_b, gemm.batch_stride_d) == batch_strides


def test_only_the_operand_that_needs_it_is_transposed():
    arranged = arrange((4, 8, 3), (3, 8, 5), (((1,), (1,)), ((2,), (0,))))
    assert arranged.permute_lhs == (2, 0, 1) and arranged.permute_rhs is None
    arranged = arrange((3, 4, 8), (8, 5, 3), (((2,), (0,)), ((0,), (2,))))
    # The batch moves to the front; the innermost other dimension stays innermost.
    assert arranged.permute_lhs is None and arranged.permute_rhs == (2, 0, 1)
    assert arranged.problem.major_b == ROW


@pytest.mark.parametrize(
    "shape_a, shape_b, dimension_numbers, permutation, swapped, extents, leading, batch_stride",
    [
        ((4, 8), (8, 5), (((1,), (0,)), ((), ())), (1, 0), True, (1, 5, 4), 4, 20),
        # A batch between rows and columns, either of which may be innermost; and two batches that merge.
        ((3, 4, 8), (3, 8, 5), (((2,), (1,)), ((0,), (0,))), (1, 0, 2), False, (3, 4, 5), 15, 5),
        ((3, 4, 8), (3, 8, 5), (((2,), (1,)), ((0,), (0,))), (2, 0, 1), True, (3, 5, 4), 12, 4),
        ((3, 4, 8), (3, 8, 5), (((2,), (1,)), ((0,), (0,))), (0, 2, 1), True, (3, 5, 4), 4, 20),
        ((2, 3, 4, 8), (2, 3, 8, 5), (((3,), (2,)), ((0, 1), (0, 1))), (2, 0, 1, 3), False, (6, 4, 5), 30, 5),
        # Rows and columns of two dimensions, and of a size of 1 that lies anywhere.
        ((3, 4, 2, 8), (3, 8, 5), (((3,), (1,)), ((0,), (0,))), (1, 2, 0, 3), False, (3, 8, 5), 15, 5),
        ((3, 4, 8), (3, 8, 5, 2), (((2,), (1,)), ((0,), (0,))), (2, 3, 0, 1), True, (3, 10, 4), 12, 4),
        ((3, 4, 1, 8), (3, 8, 5), (((3,), (1,)), ((0,), (0,))), (1, 0, 3, 2), False, (3, 4, 5), 15, 5),
        ((3, 4, 8), (3, 8, 1), (((2,), (1,)), ((0,), (0,))), (1, 0, 2), False, (3, 4, 1), 3, 1),
        # One column is stored as a row.
        ((4, 8), (8, 1), (((1,), (0,)), ((), ())), (1, 0), True, (1, 1, 4), 4, 4),
        ((4, 8), (8,), (((1,), (0,)), ((), ())), None, True, (1, 1, 4), 4, 4),
        ((3, 4, 8), (3, 8, 1), (((2,), (1,)), ((0,), (0,))), None, True, (3, 1, 4), 4, 4),
        # A batch borrowed from either operand.
        ((4, 8), (3, 8, 5), (((1,), (1,)), ((), ())), (1, 0, 2), False, (3, 4, 5), 5, 20),
        ((3, 8, 4), (8, 5), (((1,), (0,)), ((), ())), (1, 0, 2), False, (3, 4, 5), 15, 5),
        ((4, 8), (3, 8, 5), (((1,), (1,)), ((), ())), (1, 2, 0), True, (3, 5, 4), 4, 20),
    ],
)  # fmt: skip
def test_orders_of_results_that_need_no_transpose(
    shape_a, shape_b, dimension_numbers, permutation, swapped, extents, leading, batch_stride
):
    arranged = arrange(shape_a, shape_b, dimension_numbers, permutation)
    assert not arranged.copies(shaped(shape_a), shaped(shape_b))
    gemm = arranged.problem
    assert arranged.swapped == swapped and (gemm.batch, gemm.m, gemm.n) == extents
    assert (gemm.ldd, gemm.batch_stride_d) == (leading, batch_stride)


@pytest.mark.parametrize("permutation", [(1, 2, 0), (2, 1, 0)])
def test_a_result_that_needs_a_transpose(permutation):
    """No kernel stores D with the batch innermost."""
    a, b = shaped((3, 4, 8)), shaped((3, 8, 5))
    arranged = arrange(a.shape, b.shape, (((2,), (1,)), ((0,), (0,))), permutation)
    assert arranged.permute_result == permutation
    assert arranged.copies(a, b) == [
        f"the result is transposed by {permutation} afterwards: no kernel stores dimensions in that order"
    ]


def test_one_column_with_a_bias_stays_one():
    for bias in (False, True):
        made = plan(shaped((40, 64), jnp.bfloat16), shaped((64, 1), jnp.bfloat16), bias=bias, residual=True).problem
        assert (made.m, made.n) == ((40, 1) if bias else (1, 40))


def test_a_plan_tells_of_the_results_transpose():
    reason = "the result is transposed by (1, 0, 2, 3) afterwards"
    assert reason in str(plan(shaped((5, 3, 4, 8)), shaped((3, 8, 6))))
    assert "transposed" not in str(plan(shaped((4, 8)), shaped((3, 8, 6))))


def random_product(rng):
    """Shapes, dimension numbers, and half of the time a permutation of the result, else None.

    There are up to two dimensions of each role, anywhere, some of size 1 and few of size 0.
    """

    def sizes(least, most):
        return [
            int(rng.choice([0, 1, 1, 2, 3, 4, 5], p=[0.02, *[0.98 / 6] * 6]))
            for _ in range(rng.integers(least, most + 1))
        ]

    batch, contract = sizes(0, 2), sizes(0, 2)

    def operand(free):
        roles = [("b", i, s) for i, s in enumerate(batch)] + [("k", i, s) for i, s in enumerate(contract)]
        roles += [("f", i, s) for i, s in enumerate(free)]
        order = rng.permutation(len(roles)) if rng.random() < 0.8 else range(len(roles))
        placed = [roles[i] for i in order]
        where = {(role, i): at for at, (role, i, _) in enumerate(placed)}
        return tuple(size for _, _, size in placed), where

    (shape_a, where_a), (shape_b, where_b) = operand(sizes(0, 3)), operand(sizes(0, 3))
    dims = [
        [tuple(where[role, i] for i in range(len(of))) for where in (where_a, where_b)]
        for role, of in (("k", contract), ("b", batch))
    ]
    rank = len(shape_a) + len(shape_b) - len(batch) - 2 * len(contract)
    permutation = tuple(map(int, rng.permutation(rank))) if rng.random() < 0.5 else None
    return shape_a, shape_b, tuple(map(tuple, dims)), permutation


def exact_product(a, b, dimension_numbers, permutation):
    """dot_general of NumPy arrays, by einsum, transposed."""
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers
    letters_a, letters_b = list("ABCDEFGHI"[: a.ndim]), list("abcdefghi"[: b.ndim])
    for i, j in zip(contract_a + batch_a, contract_b + batch_b):
        letters_b[j] = letters_a[i]
    out = [letters_a[i] for i in batch_a]
    out += [x for i, x in enumerate(letters_a) if i not in contract_a + batch_a]
    out += [x for i, x in enumerate(letters_b) if i not in contract_b + batch_b]
    product = np.einsum(f"{''.join(letters_a)},{''.join(letters_b)}->{''.join(out)}", a, b)
    return product if permutation is None else np.ascontiguousarray(product.transpose(permutation))


def run_arranged(arranged, a, b, out_shape):
    """What a kernel computes from an arrangement, using strides only."""
    gemm = arranged.problem

    def matrices(x, permutation, major, ld, batch_stride, rows, columns):
        flat = np.ascontiguousarray(x if permutation is None else x.transpose(permutation)).reshape(-1)
        strides = (batch_stride, ld, 1) if major == ROW else (batch_stride, 1, ld)
        last = sum((extent - 1) * stride for extent, stride in zip((gemm.batch, rows, columns), strides))
        assert last < flat.size, "reads past the operand"
        return np.lib.stride_tricks.as_strided(flat, (gemm.batch, rows, columns), [s * flat.itemsize for s in strides])

    operands = (a, arranged.permute_lhs), (b, arranged.permute_rhs)
    (a, permute_a), (b, permute_b) = operands[::-1] if arranged.swapped else operands
    a = matrices(a, permute_a, gemm.major_a, gemm.lda, gemm.batch_stride_a, gemm.m, gemm.k)
    b = matrices(b, permute_b, gemm.major_b, gemm.ldb, gemm.batch_stride_b, gemm.k, gemm.n)
    d = np.full(math.prod(out_shape), np.nan)
    at = (
        np.arange(gemm.batch)[:, None, None] * gemm.batch_stride_d
        + np.arange(gemm.m)[:, None] * gemm.ldd
        + np.arange(gemm.n)
    )
    d[at] = a @ b
    d = d.reshape(arranged.stored(shaped(out_shape)).shape)
    return d if arranged.permute_result is None else d.transpose(arranged.permute_result)


def random_operands(rng, *shapes):
    return [rng.integers(-3, 4, shape).astype(np.float64) for shape in shapes]


def test_random_dimension_orders_by_strides():
    rng = np.random.default_rng(7)
    transposed = borrowed = in_order = out_of_order = swapped = 0
    for _ in range(3000):
        shape_a, shape_b, dimension_numbers, permutation = random_product(rng)
        a, b = random_operands(rng, shape_a, shape_b)
        arranged = arrange(shape_a, shape_b, dimension_numbers, permutation)
        wanted = exact_product(a, b, dimension_numbers, permutation)
        gemm = arranged.problem
        assert gemm.batch * gemm.m * gemm.n == wanted.size
        if 0 in (gemm.batch, gemm.m, gemm.n, gemm.k):
            continue
        label = f"{shape_a} {shape_b} {dimension_numbers} {permutation} {arranged}"
        np.testing.assert_array_equal(run_arranged(arranged, a, b, wanted.shape), wanted, label)
        transposed += arranged.permute_lhs is not None or arranged.permute_rhs is not None
        borrowed += gemm.batch > 1 and 0 in (gemm.batch_stride_a, gemm.batch_stride_b)
        if permutation is not None and list(permutation) != sorted(permutation):
            in_order += arranged.permute_result is None
            out_of_order += arranged.permute_result is not None
            swapped += arranged.swapped
    assert transposed > 300 and borrowed > 100 and in_order > 200 and out_of_order > 200 and swapped > 100


@pytest.mark.parametrize("seed", range(4))
def test_random_dimension_orders_by_kernels(seed):
    rng = np.random.default_rng(seed)
    for _ in range(30):
        shape_a, shape_b, dimension_numbers, permutation = random_product(rng)
        a, b = random_operands(rng, shape_a, shape_b)
        # Kernels of the sm80 family cut no batches.
        cut = rng.random() < 0.5 and (
            PLATFORM == "cpu" or arrange(shape_a, shape_b, dimension_numbers).problem.batch == 1
        )
        precision = None if PLATFORM == "cpu" else lax.DotAlgorithmPreset.TF32_TF32_F32
        product = Dense(dimension_numbers, precision, None, permutation=permutation)
        operands = (jnp.asarray(x, jnp.float32) for x in (a, b))
        got = primitive.bind(product, *operands, schedule=StreamK() if cut else DataParallel())
        wanted = exact_product(a, b, dimension_numbers, permutation)
        np.testing.assert_array_equal(got, wanted, f"{shape_a} {shape_b} {dimension_numbers} {permutation}")


def test_a_problem_tells_its_epilogue():
    plain = plan(shaped((4, 64, 128)), shaped((4, 128, 32))).problem
    assert "D =" not in str(plain)
    whole = dataclasses.replace(
        plain, activation=_ffi.Activation.silu, has_bias=True, has_residual=True, alpha=0.5, beta=-2.0
    )
    assert str(whole).endswith(", D = silu(0.5 A @ B + -2 residual + bias)")
    assert str(dataclasses.replace(plain, has_residual=True)).endswith(", D = A @ B + residual")
    assert str(dataclasses.replace(plain, has_residual=True, beta=0.5)).endswith(", D = A @ B + 0.5 residual")


def shapes_of_a_long_sum():
    rng = np.random.default_rng()
    yield from (
        (46, 260, 7903),
        (16, 4096, 14336),
        (512, 512, 16384),
        (1, 4096, 2048),
        (300, 1, 4096),
        (2000, 2000, 513),
    )
    for _ in range(40):
        yield tuple(int(2**x) for x in (*rng.uniform(0, 11, 2), rng.uniform(8, 15)))


@pytest.mark.parametrize("schedule", [Auto(), DataParallel(), SplitK(2), SplitK(4, "separate"), StreamK()], ids=str)
@pytest.mark.parametrize("device", [jax_streamk.H200, jax_streamk.A100], ids=lambda device: device.kind)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
def test_tensor_cores_sum_little_of_k_for_a_float32_result(device, schedule, dtype):
    """Every addition truncates. Rounding to 16 bits hides it, and XLA's products that fill the GPU do the same."""
    kernels = {kernel.name: kernel for kernel in planner.kernels_for("cuda")}
    for m, n, k in shapes_of_a_long_sum():
        try:
            made = plan(
                shaped((m, k), dtype),
                shaped((k, n), dtype),
                schedule=schedule,
                device=device,
                preferred_element_type=jnp.float32,
            )
        except ValueError:
            continue  # no kernel has the schedule for such rows, or as many k-tiles
        kernel, splits = kernels.get(made.kernel), getattr(made.schedule, "splits", 1)
        if kernel is not None:
            tiles = -(-k // kernel.tile_k)
            run = -(-tiles // splits) * kernel.tile_k
            slices = max(device.sms * 128 * 256 // (m * n), 1)  # XLA's of TF32: enough to fill the GPU once
            most = 16 if 1 in (m, n) or m * n < 2**14 else 128
            most = max(1024, k // slices + 64) if dtype == jnp.float32 else most
            assert min(kernel.promotion_k or run, run, k) <= most, (m, n, k, made.kernel, made.schedule)


IN_FLOAT32 = [
    ((4096,), (64,), (((), ()), ((), ()))),
    ((512, 100), (512, 100), (((), ()), ((0, 1), (0, 1)))),
    ((512, 4096), (512, 4096), (((1,), (1,)), ((0,), (0,)))),
    ((3, 3), (3, 3), (((1,), (0,)), ((), ()))),
    ((100, 4, 4), (100, 4, 4), (((2,), (1,)), ((0,), (0,)))),
    ((64, 1), (1, 100), (((1,), (0,)), ((), ()))),
    ((4, 5, 2), (3, 2), (((2,), (1,)), ((), ()))),
    ((300, 4096), (4096,), (((1,), (0,)), ((), ()))),
    ((1, 4096), (4096, 14336), (((1,), (0,)), ((), ()))),
]


@pytest.mark.parametrize("precision", [None, "high", lax.DotAlgorithmPreset.DEFAULT], ids=str)
@pytest.mark.parametrize("case", IN_FLOAT32, ids=str)
def test_what_xla_multiplies_in_float32_is_left_to_it_on_a_gpu(case, precision):
    lhs, rhs, numbers = case
    made = plan(shaped(lhs), shaped(rhs), numbers, device=jax_streamk.H200, precision=precision)
    assert made.kernel is None and "float32" in made.reasons[0]
    with pytest.raises(ValueError, match="TF32_TF32_F32 asks for TF32"):
        plan(shaped(lhs), shaped(rhs), numbers, device=jax_streamk.H200, precision=precision, schedule=DataParallel())


@pytest.mark.parametrize("m, n, k", [(2, 50, 2), (10, 3, 8), (64, 64, 64), (2, 4096, 4096)])
def test_larger_products_of_float32_are_tf32_on_a_gpu_as_xlas(m, n, k):
    made = plan(shaped((m, k)), shaped((k, n)), device=jax_streamk.H200, schedule=DataParallel())
    assert made.problem.math == _ffi.Math.tf32


def test_tf32_that_is_asked_for_by_name_is_had():
    precision = lax.DotAlgorithmPreset.TF32_TF32_F32
    made = plan(
        shaped((300, 4096)), shaped((4096,)), device=jax_streamk.H200, precision=precision, schedule=DataParallel()
    )
    assert made.problem.math == _ffi.Math.tf32


def products(*extents, dtype=jnp.bfloat16):
    """Shapes and dimension numbers of [m, k] by [k, n], with a batch if there are four extents."""
    *batch, m, n, k = extents
    lead = len(batch)
    return (
        shaped((*batch, m, k), dtype),
        shaped((*batch, k, n), dtype),
        (((lead + 1,), (lead,)), (tuple(range(lead)),) * 2),
    )


@pytest.mark.left_to_xla
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
def test_a_cpu_leaves_elementwise_and_tiny_products_to_xla(dtype):
    device = Device("cpu", 0, 2)
    for extents in (
        (1000, 1000, 1, 1, 1),
        (100_000, 1, 1, 16),
        (512, 1, 1, 4096),
        (4, 4, 1, 160, 32),
        (1000, 1, 1000, 1),
        (3, 4, 5),
        (300, 200, 1),
    ):
        made = plan(*products(*extents, dtype=dtype), device=device)
        assert made.kernel is None and "falls back to XLA" in made.reasons[0], extents
        assert plan(*products(*extents, dtype=dtype), device=device, schedule=DataParallel()).kernel is not None
    for extents in ((64, 64, 1797), (1, 4096, 4096), (1, 1, 100_000), (8, 64, 64, 512)):
        assert plan(*products(*extents, dtype=dtype), device=device).kernel is not None, extents


@pytest.mark.left_to_xla
@NEEDS_SM90
def test_a_gpu_leaves_products_that_fill_no_tile_to_xla():
    for extents in (
        (8192, 3, 128),
        (512, 1, 512),
        (8191, 3, 2047),
        (4096, 4096, 8),
        (1000, 16, 16, 256),
        (1000, 1, 1, 4096),
        (300, 200, 1),
    ):
        made = plan(*products(*extents), device=jax_streamk.H200)
        assert made.kernel is None and "falls back to XLA" in made.reasons[0], extents
    for extents in (
        (1, 4096, 4096),
        (8, 1024, 512),
        (8192, 64, 128),
        (8, 512, 512, 64),
        (4096, 4096, 64),
        (65536, 8, 256),
        (14336, 4, 128),
    ):
        assert plan(*products(*extents), device=jax_streamk.H200).kernel is not None, extents
    # A row by float64 columns is ours where kernels for few rows can load these.
    with jax.enable_x64(True):
        row, even, odd = (shaped(x, jnp.float64) for x in ((1, 10**5), (10**5, 432), (10**5, 433)))
        assert plan(row, even, device=jax_streamk.H200).kernel.startswith("skinny_f64_")
        assert plan(row, odd, device=jax_streamk.H200).kernel is None


@pytest.mark.left_to_xla
@NEEDS_SM90
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("extents", [(6144, 4, 2048), (14336, 4, 128), (512, 6, 8192), (20000, 3, 1000)])
def test_few_columns_stream_a(extents, dtype):
    """B is read as it is, or transposed by a copy of its own size, and A at about the speed of memory."""
    made = plan(*products(*extents, dtype=dtype), device=jax_streamk.H200)
    assert re.fullmatch(r"skinny_.*_rr_64x8x128.*_narrow|sm90_.*_rc_.*", made.kernel) and made.policy.evict_first_a
    launch = machines.machine_of(made.device).launch_us
    assert made.microseconds < 2 * (launch + made.limit.microseconds)
    by_columns = plan(
        *(shaped(x, dtype) for x in (extents[::2], extents[1:])),
        dimension_numbers=(((1,), (1,)), ((), ())), device=jax_streamk.H200,
    )  # fmt: skip
    assert by_columns.kernel is not None and "copies" not in str(by_columns)


@NEEDS_SM90
@pytest.mark.parametrize("columns", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=["rr", "rc", "cr", "cc"])
@pytest.mark.parametrize("n", range(2, 9))
def test_narrow_kernels_run_every_majorness(n, columns):
    m, k = 4096, 2048
    a, b = ((k, m) if columns[0] else (m, k)), ((n, k) if columns[1] else (k, n))
    made = plan(
        shaped(a, jnp.bfloat16), shaped(b, jnp.bfloat16), device=jax_streamk.H200,
        dimension_numbers=(((1 - columns[0],), (columns[1],)), ((), ())),
    )  # fmt: skip
    letters = "".join("rc"[column] for column in columns)
    name = f"skinny_bf16_bf16_{letters}_64x8x128_narrow"
    parts = made.problem.native(), _ffi.Schedule(_ffi.ScheduleKind.split_k, 3), made.device.native()
    kernel = planner._registry("cuda")[0][name]
    problem, schedule, device = parts
    assert _ffi.estimate(kernel, *parts, machines.machine_of(made.device).native).microseconds > 0
    found = _ffi.choose(_ffi.Kernels([kernel]), problem, schedule, device, machines.machine_of(made.device).native)
    assert found.candidates and found.workspace_bytes == 0


@NEEDS_SM90
def test_kernels_of_a_column_major_b_transpose_few_columns():
    kernels = planner._registry("cuda")[0]
    for name in ("sm90_bf16_bf16_rc_64x16x128_1x1_pingpong_swap", "sm90_f16_f16_cc_64x64x128_1x1_pingpong"):
        kernel = kernels[name]
        lda = 520 if kernel.major_a == _ffi.Major.row else 1000
        for n in (1, 7, 8, 64):
            problem = _ffi.GemmProblem(
                1, 1000, n, 520, kernel.type_a, kernel.type_a, kernel.type_a, _ffi.Math.native, kernel.major_a,
                _ffi.Major.row, lda, n, n, 0, 0, 0,
            )  # fmt: skip
            schedule, device = _ffi.Schedule(_ffi.ScheduleKind.data_parallel), jax_streamk.H200
            machine = machines.machine_of(device).native
            found = _ffi.choose(_ffi.Kernels([kernel]), problem, schedule, device.native(), machine)
            if n < 8:
                assert found.candidates and 2 * 520 * n <= found.workspace_bytes <= 2 * 576 * n + 256
            else:
                assert not found.candidates and "B column-major" in found.refusal


@pytest.mark.left_to_xla
def test_accelerate_leaves_what_is_too_small_to_xla():
    angles = jax_streamk.accelerate(lambda x, y: jnp.einsum("i,j->ij", x, y) @ jnp.ones((64, 256)))
    text = jax.jit(angles).lower(shaped((4096,)), shaped((64,))).as_text()
    assert text.count(TARGET) == 1 and text.count("dot_general") == 1


def test_tuning_tries_no_kernel_that_the_planner_would_not():
    """Kernels on a CPU sum in float32; on a GPU, digits lost by truncated sums are another reason."""
    made = plan(shaped((64, 4096), jnp.bfloat16), shaped((4096, 64), jnp.bfloat16), preferred_element_type=jnp.float32)
    parts = made.problem.native(), made.native_schedule(), made.device.native()
    assert _ffi.may_serve(made.kernel, *parts) is None
    if PLATFORM == "cuda":
        for kernel in planner.kernels_for("cuda"):
            if kernel.promotion_k == 0 and _ffi.can_implement(kernel.name, *parts) is None:
                assert "truncate digits of a float32 result" in _ffi.may_serve(kernel.name, *parts)


# Launch policies


def sm90_kernel(tile=(64, 16, 128), cluster=(1, 1), swap_ab=True, major_a=ROW, major_b=ROW, warp_schedule="pingpong"):
    """A made-up kernel with 16-bit operands and eight stages."""
    bf16, native = _ffi.Type.bf16, _ffi.Math.native
    majors, ways = (major_a, major_b), ([_ffi.Reduction.ordered], [_ffi.Reduction.ordered])
    warps = _ffi.WarpSchedule[warp_schedule]
    return _ffi.KernelInfo(
        "a kernel", _ffi.Family.sm90, bf16, bf16, bf16, native, *majors, *tile, *cluster, warps, swap_ab, *ways,
        align_a=8, align_b=8, align_d=1, stages=8,
    )  # fmt: skip


PAIRS = dict(tile=(128, 256, 64), cluster=(1, 2), swap_ab=False)


def policy_of(kernel, m, n, k, schedule=DataParallel(), device=jax_streamk.H200, order=("m", 1)):
    """A problem of the kernel's and a schedule, and the planner's ``LaunchPolicy`` for it."""
    lda, ldb = k if kernel.major_a == ROW else m, n if kernel.major_b == ROW else k
    types = kernel.type_a, kernel.type_b, kernel.type_d, kernel.math, kernel.major_a, kernel.major_b
    made = problem.GemmProblem(1, m, n, k, *types, lda, ldb, n, 0, 0, 0).native()
    native = native_schedule(schedule)
    raster = {"m": _ffi.Raster.along_m, "n": _ffi.Raster.along_n}[order[0]]
    parts = raster, order[1], device.native(), machines.machine_of(device).native
    policy = LaunchPolicy.of(_ffi.launch_policy(kernel, made, native, *parts))
    assert (policy.raster, policy.swizzle) == order
    assert _ffi.check_policy(kernel, made, native, policy.native(), device.native()) is None
    return (kernel, made, native), policy


@pytest.mark.parametrize("m, n", [(16, 8192), (16, 1000), (30, 4000), (1000, 777)])
def test_a_policy_is_of_the_problems_operands_whichever_way_round_a_kernel_takes_them(m, n):
    """D^T = B^T A^T by the kernel of the same tile."""
    n = -(-n // 8) * 8
    _, policy = policy_of(sm90_kernel(), m, n, 4096)
    turned = sm90_kernel(swap_ab=False, major_a=COLUMN, major_b=COLUMN)
    _, other = policy_of(turned, n, m, 4096, order=("n", 1))
    exchanged = dict(
        evict_first_a=other.evict_first_b,
        evict_first_b=other.evict_first_a,
        extend_a=other.extend_b,
        extend_b=other.extend_a,
    )
    assert dataclasses.replace(other, raster="m", **exchanged) == policy


def test_a_policy_goes_by_the_device():
    """A GPU's launch policy depends on how many bytes its memory needs in flight, and on its SMs."""
    of = [policy_of(sm90_kernel(), 16, 8192, 4096, device=device)[1].held_back for device in GPUS[1:]]
    assert all(held > 0 for held in of)
    assert policy_of(sm90_kernel(), 16, 132 * 64, 4096)[1].idle_clusters == 0
    assert policy_of(sm90_kernel(), 16, 66 * 64, 4096)[1].idle_clusters > 0


def test_clusters_are_numbered_by_gpc_or_spread_over_them():
    assert policy_of(sm90_kernel(**PAIRS), 4096, 4096, 4096)[1].cluster_order == "by_gpc"
    assert policy_of(sm90_kernel(), 16, 4096, 4096)[1].cluster_order == "as_launched"
    assert policy_of(sm90_kernel(), 16, 200 * 64, 4096)[1].cluster_order == "spread"  # in one wave and a half


def test_what_ends_within_a_tile_is_extended():
    assert policy_of(sm90_kernel(**PAIRS), 4096, 4096 + 8, 4096)[1].extend_b
    assert not policy_of(sm90_kernel(**PAIRS), 4096, 4096, 4096)[1].extend_b


def test_families_have_what_they_have_of_a_policy():
    """Host and sm80 kernels take an order of tiles only, skinny ones a hint for what they read once."""
    order = dict(raster="n", swizzle=2)
    others = [
        dict(evict_first_a=True), dict(evict_first_b=True), dict(held_back=1), dict(idle_clusters=1),
        dict(cluster_order="by_gpc"), dict(extend_a=True), dict(extend_b=True),
    ]  # fmt: skip
    cases = [
        (planned(64, 70, 3000, HERE, jnp.float32), []) if PLATFORM == "cpu" else None,
        (planned(512, 512, 512, jax_streamk.A100, schedule=DataParallel()), []),
        (planned(4, 8192, 8192, jax_streamk.A100, schedule=DataParallel()), [dict(evict_first_b=True)]),
        (planned(8192, 4, 8192, jax_streamk.A100, schedule=DataParallel()), [dict(evict_first_a=True)]),
    ]
    for made, allowed in filter(None, cases):
        kernel = planner._registry(made.device.platform)[0][made.kernel]
        assert kernel.family != _ffi.Family.sm90 and (kernel.family == _ffi.Family.skinny) == bool(allowed)
        parts = made.problem.native(), made.native_schedule()
        for changes in others:
            policy = LaunchPolicy(**order, **changes).native()
            why = _ffi.check_policy(kernel, *parts, policy, made.device.native())
            assert (why is None) == (changes in allowed), (kernel.name, changes)
            assert why is None or "of launch choices it has the order of tiles" in why


@pytest.mark.parametrize(
    "changes, why",
    [
        (dict(swizzle=0), "swizzle must be at least 1"),
        (dict(swizzle=2**31 - 1), "swizzle=2147483647 is too wide"),
        (dict(held_back=99), "cannot hold back 99 stages"),
        (dict(held_back=1, held_back_last=2), "no more in the last wave than before"),
        (dict(held_back=0, held_back_last=-1), "cannot hold back"),
        (dict(idle_clusters=9), "cannot have 9 idle clusters"),
        (dict(idle_clusters=-1), "cannot have -1 idle clusters"),
        (dict(cluster_order="spread"), None),
        (dict(evict_first_a=True, evict_first_b=False), None),
        (dict(held_back=0, held_back_last=0, idle_clusters=0), None),
        (dict(extend_a=True, extend_b=True), None),
    ],
    ids=str,
)
def test_a_launch_is_refused_what_it_cannot_do(changes, why):
    parts, policy = policy_of(sm90_kernel(), 16, 100 * 64, 4096)
    changed = dataclasses.replace(policy, **changes).native()
    found = _ffi.check_policy(*parts, changed, jax_streamk.H200.native())
    assert found is None if why is None else "a kernel cannot run" in found and why in found


def test_clusters_beside_those_that_share_an_sm_are_not_listed():
    parts, policy = policy_of(sm90_kernel(warp_schedule="single"), 16, 200 * 64, 4096)
    assert policy.idle_clusters > 0 and policy.cluster_order == "as_launched"
    by_gpc = dataclasses.replace(policy, cluster_order="by_gpc").native()
    assert "does not number clusters" in _ffi.check_policy(*parts, by_gpc, jax_streamk.H200.native())


def test_stream_k_holds_nothing_back():
    parts, policy = policy_of(sm90_kernel(**PAIRS), 1000, 4096, 4096, StreamK())
    assert policy.held_back == policy.held_back_last == 0
    held = dataclasses.replace(policy, held_back=1).native()
    assert "at most 0" in _ffi.check_policy(*parts, held, jax_streamk.H200.native())


def test_a_policy_is_printed_in_one_line():
    assert str(LaunchPolicy()) == "raster along m"
    everything = LaunchPolicy("n", 4, True, True, 3, 1, 8, "by_gpc", True, False)
    assert str(everything) == (
        "raster along n, swizzle 4, A and B evict first, 3 stages held back (1 in the last wave), 8 idle clusters, "
        "clusters by GPC, A extended to whole tiles"
    )
    assert "1 stage held back, 1 idle cluster, clusters spread over GPCs, B extended" in str(
        LaunchPolicy(held_back=1, held_back_last=1, idle_clusters=1, cluster_order="spread", extend_b=True)
    )
    made = planned(16, 8192, 4096, jax_streamk.H200, schedule=DataParallel())
    assert f"\n  launch: {made.policy}\n" in str(made) and "B evict first" in str(made.policy)


def test_a_program_carries_the_whole_policy():
    (found,) = emitted_attributes(lambda a, b: matmul(a, b), shaped((64, 2048)), shaped((2048, 96)))
    made = plan(shaped((64, 2048)), shaped((2048, 96)))
    for name, value in made.policy.attributes().items():
        assert found[name] == (str(value).lower() if isinstance(value, bool) else str(int(value))), name
