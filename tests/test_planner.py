"""Which plan is chosen. GPU kernels are described here, so that neither a GPU nor a CUDA build is needed."""

import dataclasses
import functools
import itertools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streamk
from jax_streamk import DataParallel, SplitK, StreamK, _ffi, machines
from jax_streamk.device import HOPPER, Device
from jax_streamk.plan import alternatives, described, planner
from jax_streamk.plan.plan import native_schedule
from jax_streamk.plan.problem import GemmProblem
from jax_streamk.product.dense import Dense
from jax_streamk.schedules import Auto
from jax_streamk.tuning import fit

BF16, F32, F64 = _ffi.Type.bf16, _ffi.Type.f32, _ffi.Type.f64
NATIVE, TF32, TF32X3 = _ffi.Math.native, _ffi.Math.tf32, _ffi.Math.tf32x3
ORDERED, SEPARATE = _ffi.Reduction.ordered, _ffi.Reduction.separate
ROW, COLUMN = _ffi.Major.row, _ffi.Major.column
SM80, SM90, SKINNY = _ffi.Family.sm80, _ffi.Family.sm90, _ffi.Family.skinny
A100, BLACKWELL, CPU = Device("cuda", 80, 108), Device("cuda", 120, 170), Device("cpu", 0, 4)
H200 = machines.machine_of(HOPPER)


def gemm(m, n, k, type_ab=BF16, math=NATIVE, batch=1, majors=(ROW, ROW)):
    lda, ldb = k if majors[0] == ROW else m, n if majors[1] == ROW else k
    return GemmProblem(batch, m, n, k, type_ab, type_ab, type_ab, math, *majors, lda, ldb, n, m * k, k * n, m * n)


def fake_kernel(
    family, type_ab, type_d, tile, cluster=(1, 1), warps="cooperative", swap_ab=False, align=8, math=NATIVE,
    major_b=ROW, align_b=None, scales_sums=False
):  # fmt: skip
    reductions = [] if warps in ("pingpong", "single") else [ORDERED]
    parts = family, type_ab, type_d, *tile, *cluster, warps, swap_ab, align, math, major_b, align_b
    return _ffi.KernelInfo(
        name="_".join(str(getattr(part, "name", part)) for part in parts), family=family, type_a=type_ab,
        type_b=type_ab, type_d=type_d, math=math, major_a=ROW, major_b=major_b, tile_m=tile[0], tile_n=tile[1],
        tile_k=tile[2], cluster_m=cluster[0], cluster_n=cluster[1], align_a=align, align_b=align_b or align,
        align_d=align if family == SM80 else 1, warp_schedule=_ffi.WarpSchedule[warps], swap_ab=swap_ab,
        split_k_reductions=reductions + [SEPARATE] * (type_d == (F64 if type_ab == F64 else F32)),
        stream_k_reductions=reductions, scales_sums=scales_sums,
    )  # fmt: skip


def fake_kernels():
    found = []
    for type_d in (BF16, F32):
        for tile, cluster in [((64, 64, 128), (1, 1)), ((64, 128, 64), (1, 1)), ((128, 128, 64), (2, 1))]:
            found.append(fake_kernel(SM90, BF16, type_d, tile, cluster, "pingpong"))
        for tile in [(128, 64, 64), (128, 128, 64), (128, 256, 64)]:
            found.append(fake_kernel(SM90, BF16, type_d, tile))
        for tile, warps in [((64, 16, 128), "pingpong"), ((64, 16, 64), "single"), ((128, 16, 128), "cooperative")]:
            found.append(fake_kernel(SM90, BF16, type_d, tile, warps=warps, swap_ab=True))
        for tile, align in [((128, 128, 32), 8), ((128, 64, 32), 1), ((128, 64, 32), 2)]:
            found.append(fake_kernel(SM80, BF16, type_d, tile, warps="multistage", align=align))
    for math, tile in itertools.product((TF32, TF32X3), [(128, 128, 16), (64, 64, 32)]):
        found.append(fake_kernel(SM80, F32, F32, tile, warps="multistage", align=4, math=math))
    found.append(fake_kernel(SM90, F32, F32, (128, 128, 32), swap_ab=True, align=4, math=TF32X3, major_b=COLUMN))
    for tile in [(128, 64, 16), (64, 64, 16)]:
        found.append(fake_kernel(SM80, F64, F64, tile, warps="multistage", align=1))
    return sorted(found, key=lambda kernel: kernel.name)


@pytest.fixture
def plan(monkeypatch):
    """A function that returns (plan, kernel or None) for the kernels above, ``more``, and this build's for CPUs."""
    host = planner.kernels_for("cpu")

    def forget():
        planner._registry.cache_clear()
        planner.plan_with.cache_clear()

    def plan(problem, schedule=Auto(), device=HOPPER, more=()):
        kernels = {kernel.name: kernel for kernel in (*host, *fake_kernels(), *more)}
        monkeypatch.setattr(_ffi, "kernels", lambda: list(kernels.values()))
        forget()
        made = planner.make_plan(problem, schedule, device)
        return made, kernels.get(made.kernel)

    yield plan
    forget()


def estimates(problem, schedule):
    """The estimates of the 16-bit kernels above on an H200, in microseconds."""
    parts = problem.native(), native_schedule(schedule), HOPPER.native(), H200.native
    return [_ffi.estimate(kernel, *parts).microseconds for kernel in fake_kernels() if kernel.type_a == BF16]


@pytest.mark.parametrize("schedule", [DataParallel(), SplitK(4), SplitK(4, "separate")])
@pytest.mark.parametrize("extent", ["m", "n", "k"])
def test_estimate_grows_with_every_extent(schedule, extent):
    sizes = (1024, 2048, 4096, 8192, 65536)
    problems = [dataclasses.replace(gemm(512, 1024, 2048), **{extent: size}) for size in sizes]
    assert (np.diff([estimates(problem, schedule) for problem in problems], axis=0) >= 0).all()


def test_rows_that_start_within_a_sector_cost_more():
    """Rows of A start on cache lines of 128 bytes, on sectors of 32, or on 16."""
    problems = [dataclasses.replace(gemm(512, 4096, 4096), lda=lda) for lda in (4096, 4112, 4104)]
    times = [min(estimates(problem, DataParallel())) for problem in problems]
    assert times[0] < times[1] < times[2]


@pytest.mark.parametrize("cluster, at_once", [((1, 1), 132), ((2, 1), 66), ((1, 2), 66), ((2, 2), 30), ((4, 1), 30)])
def test_clusters_of_four_leave_sms_idle(cluster, at_once):
    """The numbers are from cudaOccupancyMaxActiveClusters on an H200."""
    kernel = fake_kernel(SM90, BF16, BF16, (128, 128, 64), cluster, "pingpong")
    parts = native_schedule(DataParallel()), HOPPER.native(), H200.native
    m, n = 128 * cluster[0] * at_once, 128 * cluster[1]
    one, two = (_ffi.estimate(kernel, gemm(rows, n, 512).native(), *parts) for rows in (m, m + 1))
    assert one.waves == 1 and two.waves > 1 and two.iterations == 2 * one.iterations


def test_every_product_of_a_batch_costs_a_cpu_something():
    """A million products of two numbers take many times as long as one product with a million results."""
    batched = planner.make_plan(gemm(1, 1, 1, F32, batch=10**6), Auto(), CPU)
    outer = planner.make_plan(gemm(1000, 1000, 1, F32), Auto(), CPU)
    assert batched.microseconds > 10 * outer.microseconds


def test_an_empty_problem_has_an_empty_wave():
    """A division by zero would end the process."""
    order, schedule = (_ffi.Raster.along_m, 1), native_schedule(DataParallel())
    for m, n in ((0, 8), (8, 0)):
        kernel = fake_kernel(SM90, BF16, BF16, (128, 128, 64))
        _ffi.first_wave(kernel, gemm(m, n, 8).native(), schedule, order, HOPPER.native(), H200.native)


TABLES = pathlib.Path(__file__).parents[1] / "benchmarks" / "tables"


@functools.cache
def measured_tables():
    """(``fit.Table``, machine) for every set of the committed tables."""
    found = []
    for path in sorted(TABLES.glob("*.csv.gz")):
        device = jax_streamk.H100 if path.name.startswith("h100") else jax_streamk.H200
        machine = machines.machine_of(device)
        found += [
            (table, machine) for table in fit.tables_of(fit.read(path), fit.kernels_beside(path), machine, device)
        ]
    return found


def test_choices_are_near_the_best_that_was_measured():
    """Regret: the time of the plan ranked first over the best plan's, as the geometric mean over a table's shapes."""
    regrets = [fit.regret([table], machine) for table, machine in measured_tables()]
    assert len(regrets) > 30 and np.mean(regrets) <= 1.03


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_choices_are_near_the_best_of_shapes_that_no_constant_was_fitted_to(name):
    tables, (machine, *_) = zip(*((t, m) for t, m in measured_tables() if m.name == name), strict=True)
    assert fit.regret(tables, machine, held_out=True) <= 1.04


def test_machines_have_few_constants_that_all_have_a_meaning():
    of_gpus = _ffi.GPU_CONSTANTS | _ffi.POLICY_CONSTANTS
    assert len(_ffi.GPU_CONSTANTS) + len(_ffi.POLICY_CONSTANTS) <= 30 and len(_ffi.HOST_CONSTANTS) <= 10
    for machine in (*machines.measured(), machines.derived(A100)):
        native = {name: getattr(machine.native, name) for name in of_gpus}
        assert native == dict(machine.constants) | dict(machine.launch_policy) and min(native.values()) > 0
        again = machines.parse(machine.name, machine.text())
        assert again.topology == machine.topology and again.launch_policy == machine.launch_policy
    assert all(of_gpus.values()) and all(_ffi.HOST_CONSTANTS.values())


def test_a_cpus_estimates_are_of_the_operands_type(monkeypatch):
    def microseconds(type_):
        types = type_, type_, _ffi.Type.s32 if type_ == _ffi.Type.s8 else type_
        asked = dataclasses.replace(gemm(1024, 1024, 1024), **dict(zip(("type_a", "type_b", "type_d"), types)))
        made = planner.make_plan(asked, DataParallel(), CPU)
        assert made.explain().microseconds == made.microseconds == sum(made.explain().parts.values())
        return made.microseconds

    planner.plan_with.cache_clear()
    for by_instruction in (False, True):
        monkeypatch.setattr(machines, "_has_avx512_bf16", lambda by=by_instruction: by)
        planner.plan_with.cache_clear()
        times = {type_.name: microseconds(type_) for type_ in (BF16, _ffi.Type.f16, F32, F64, _ffi.Type.s8)}
        assert times["f64"] > 1.5 * times["f32"], "a vector has half as many"
        assert times["f16"] > times["f32"], "which it is converted to"
        assert (times["bf16"] < times["f32"]) == by_instruction, times
    planner.plan_with.cache_clear()


def test_the_machine_of_a_device_was_measured_or_is_derived():
    assert machines.machine_of(dataclasses.replace(HOPPER, kind="NVIDIA H200")) is machines.machine_of(HOPPER) is H200
    for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA H800"):
        device = dataclasses.replace(HOPPER, kind=kind)
        assert machines.is_measured(device) and machines.machine_of(device).name == "h100"
        # A PCIe model or a MIG slice has fewer SMs, and was not measured.
        slower = dataclasses.replace(device, sms=66)
        assert not machines.is_measured(slower)
        derived, whole = machines.machine_of(slower), machines.derived(device)
        assert derived.dram_bytes_per_us == whole.dram_bytes_per_us / 2 and derived.topology.sms == 66
        assert derived.wgmma_flops_per_us_sm == whole.wgmma_flops_per_us_sm
    assert not machines.is_measured(A100) and machines.machine_of(A100).name == "generic"


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda x: x["constants"].pop("launch_us"), "constants differ .* in launch_us"),
        (lambda x: x["constants"].update(launch_us=-1), "launch_us is not positive"),
        (lambda x: x["launch_policy"].pop("extend_rows"), "constants differ .* in extend_rows"),
        (lambda x: x.pop("kinds"), "kinds"),
    ],
)
def test_a_machine_file_that_does_not_serve_is_refused(change, why):
    fields = json.loads(H200.text())
    change(fields)
    with pytest.raises(ValueError, match=f"machine file mine: .*{why}"):
        machines.parse("mine", json.dumps(fields))


@pytest.mark.parametrize("device", [A100, Device("cuda", 89, 142), Device("cuda", 90, 66, "slice"), BLACKWELL])
def test_a_foreign_gpu_plans_sensibly(plan, device):
    few, much = (plan(gemm(*shape), device=device)[0] for shape in ((64, 64, 65536), (8192, 8192, 8192)))
    assert isinstance(few.schedule, (SplitK, StreamK)) and few.efficiency > 0.5 and much.efficiency > 0.8
    for made in (few, much):
        assert made.limit.microseconds < made.microseconds < 1e5
    twice = plan(gemm(8192, 8192, 8192), device=dataclasses.replace(device, sms=device.sms // 2))[0]
    assert 1.5 < twice.microseconds / much.microseconds < 2.5


SHAPES = [(16, 4096, 4096), (64, 64, 65536), (96, 1000, 1000), (512, 512, 4096), (1000, 3000, 6144), (4096, 4096, 4096)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("device", [HOPPER, A100, BLACKWELL])
@pytest.mark.parametrize("epilogue", [{}, dict(has_bias=True, activation=_ffi.Activation.silu)], ids=["plain", "fused"])
def test_the_cheapest_of_all_candidates_is_chosen(plan, shape, device, epilogue):
    """Compared with the estimates of all kernels under all schedules, one by one: the search misses nothing better."""
    problem = dataclasses.replace(gemm(*shape), **epilogue)
    parts = device.native(), machines.machine_of(device).native
    splits = {*range(2, 17), 32, 64, 128, *(min(device.sms // tiles, 128) for tiles in range(1, device.sms // 16 + 1))}
    tried = [DataParallel(), StreamK(), *itertools.starmap(SplitK, itertools.product(splits, ("ordered", "separate")))]
    least = min(
        candidate.cost.microseconds
        for kernel, schedule in itertools.product(fake_kernels(), tried)
        if kernel.type_a == BF16
        for candidate in _ffi.choose(
            _ffi.Kernels([kernel]), problem.native(), native_schedule(schedule), *parts
        ).candidates
    )
    made, _ = plan(problem, device=device)
    assert made.microseconds == least
    again, _ = plan(problem, made.schedule, device=device)
    assert dataclasses.replace(again, notes=made.notes, figures=made.figures, candidates=made.candidates) == made


def loop():
    """A loop in Python of about 100 us on an idle machine; a slow or busy one takes longer for it and for planning."""
    return sum(at * 3 for at in range(2000))


def median_times(of, problems):
    """Median CPU seconds of ``of`` and of ``loop`` over ``problems``, of each the fastest of five runs in turn.

    The first one after other work finds cold caches.
    """
    times = []
    for problem in problems:
        runs = []
        for _ in range(5):
            planner.plan_with.cache_clear()
            started = time.process_time()
            of(problem)
            between = time.process_time()
            loop()
            runs.append((between - started, time.process_time() - between))
        times.append(np.min(runs, axis=0))
    return np.median(times, axis=0)


def test_the_search_takes_about_100_microseconds():
    """Among all kernels for 16-bit row-major operands, with a schedule for each."""
    shapes = itertools.product((16, 200, 1000, 4096), (1024, 4096), (512, 4096))
    planner.choose(gemm(8, 8, 8), None, HOPPER)
    search, of_loop = median_times(lambda problem: planner.choose(problem, None, HOPPER), [gemm(*x) for x in shapes])
    # Half of it on an idle machine. Tests beside it that fill caches slow the search more than the loop.
    assert search < 2 * of_loop


def test_a_plan_takes_less_than_three_times_as_long():
    """What is said of a plan is made with it, too."""
    problems = [gemm(m, n, k) for m in range(16, 784, 16) for n, k in ((1024, 512), (4096, 4096), (2000, 1000))]
    planner.make_plan(gemm(8, 8, 8), Auto(), jax_streamk.H200)
    planning, of_loop = median_times(lambda problem: planner.make_plan(problem, Auto(), jax_streamk.H200), problems)
    assert planning < 3 * of_loop


def test_an_uncached_plan_takes_less_than_a_millisecond(plan, monkeypatch):
    monkeypatch.setattr(_ffi, "has_cuda", True)
    plan(gemm(8, 8, 8))
    product = Dense((((1,), (0,)), ((), ())), None, None)
    b, plans, times = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16), [], []
    for m in range(64, 1088, 8):
        a = jax.ShapeDtypeStruct((m, 4096), jnp.bfloat16)
        started = time.process_time()
        plans.append(alternatives.plan(product, dict(lhs=a, rhs=b), Auto(), HOPPER).plan)
        between = time.process_time()
        loop()
        times.append((between - started, time.process_time() - between))
    assert len(set(plans)) == len(plans) and all(made.kernel for made in plans)
    uncached, of_loop = np.median(times, axis=0)
    assert uncached < 10 * of_loop


def test_a_plan_is_made_once():
    problems = gemm(96, 80, 1000, F32), gemm(96, 80, 1000, F32)
    assert planner.make_plan(problems[0], Auto(), CPU) is planner.make_plan(problems[1], Auto(), Device("cpu", 0, 4))


def test_gathered_rows():
    """Of the shipped kernels those that gather are chosen, and by threads their rows arrive more slowly."""
    kernels = {kernel.name: kernel for kernel in described.cuda_kernels() if kernel.ragged == _ffi.Ragged.m}
    lists = dataclasses.replace(gemm(65536, 2048, 768, batch=128), ragged=_ffi.Ragged.m, batch_stride_a=0)
    ask = None, HOPPER.native(), H200.native
    for gated in (False, True):
        problem = dataclasses.replace(lists, gated=gated)
        of_plain, of_gathered = (
            _ffi.choose(_ffi.Kernels(list(kernels.values())), p.native(), *ask).candidates
            for p in (problem, dataclasses.replace(problem, gathered_rows=8192))
        )
        assert all(kernels[found.kernel].gathers for found in of_gathered)
        plain = {found.kernel: found.cost.microseconds for found in of_plain}
        gathered = {found.kernel: found.cost.microseconds for found in of_gathered}
        assert len(both := plain.keys() & gathered.keys()) >= 2
        assert all(1.02 < gathered[name] / plain[name] < 1.3 for name in both)
    wide = next(kernel for kernel in kernels.values() if kernel.tile_n == 256 and kernel.major_b == ROW)
    problem = dataclasses.replace(lists, gathered_rows=8192)
    refusal = _ffi.choose(_ffi.Kernels([wide]), problem.native(), *ask).refusal
    assert "it gathers no rows" in refusal


def test_a_candidate_outlives_what_it_was_chosen_from():
    def chosen():
        kernels = _ffi.Kernels(fake_kernels())
        return _ffi.choose(kernels, gemm(512, 512, 512).native(), None, HOPPER.native(), H200.native).candidates[0]

    name = chosen().kernel
    for _ in range(20):
        candidate = chosen()
        others = [bytes(size) for size in range(4096)]  # where the kernels were
        assert candidate.kernel == name and len(others) == 4096


@pytest.mark.parametrize(
    "problem, device, kinds",
    [
        (gemm(512, 128, 16384), HOPPER, (SplitK, StreamK)),
        (gemm(80, 72, 65536), HOPPER, (SplitK, StreamK)),
        (gemm(64, 64, 100_000, F32), CPU, (SplitK, StreamK)),
        (gemm(8192, 8192, 8192), HOPPER, (DataParallel, StreamK)),
        (gemm(8, 8, 64, F32), CPU, DataParallel),
    ],
)
def test_few_tiles_and_a_long_k_are_split_and_others_are_not(plan, problem, device, kinds):
    assert isinstance(plan(problem, device=device)[0].schedule, kinds)


@pytest.mark.parametrize("k", [8, 64, 200, 1024, 65536])
def test_splits_never_exceed_k_tiles(plan, k):
    for m, n in [(64, 64), (16, 8), (256, 512)]:
        made, kernel = plan(gemm(m, n, k))
        if isinstance(made.schedule, SplitK):
            assert 2 <= made.schedule.splits <= -(-k // kernel.tile_k)


@pytest.mark.parametrize("m", [1, 4, 16])
def test_tiles_for_few_rows_are_not_mostly_empty(plan, m):
    _, kernel = plan(gemm(m, 4096, 4096))
    assert kernel.swap_ab and kernel.tile_n == 16


@pytest.mark.parametrize("shape", [(16384, 16384, 4096), (8192, 24000, 4096), (2176, 24000, 4096)])
def test_the_tiles_of_a_wave_share_operands(shape):
    """In the chosen order a wave reads nearly as little as in the best order, and far less than in the worst."""
    kernel, problem = fake_kernel(SM90, BF16, BF16, (128, 256, 64)), gemm(*shape).native()
    schedule, device = native_schedule(DataParallel()), HOPPER.native()
    policy = _ffi.choose(_ffi.Kernels([kernel]), problem, schedule, device, H200.native).candidates[0].policy
    reads = {
        (raster, swizzle): _ffi.first_wave(kernel, problem, schedule, (raster, swizzle), device, H200.native).footprint
        for raster in (_ffi.Raster.along_m, _ffi.Raster.along_n)
        for swizzle in (1, 2, 4, 8, 16)
    }
    chosen = reads[policy.raster, policy.swizzle]
    assert chosen <= 1.5 * min(reads.values()) and chosen < max(reads.values()) / 2


@pytest.mark.parametrize(
    "problem, device, family",
    [
        (gemm(512, 512, 8192, F32, TF32), HOPPER, SM80),
        (gemm(512, 512, 8192, F32, TF32X3), A100, SM80),
        (gemm(333, 100, 1000, F64), HOPPER, SM80),
        (gemm(2048, 2048, 2048), A100, SM80),
        (gemm(2048, 2048, 2048), BLACKWELL, SM80),
        # Kernels that copy operands in two parts accept any majorness.
        (gemm(4096, 4096, 4090, F32, TF32X3), HOPPER, SM90),
        (gemm(4096, 4096, 4090, F32, TF32X3, majors=(COLUMN, ROW)), HOPPER, SM90),
        (gemm(4096, 4096, 4090, F32, TF32X3, majors=(COLUMN, COLUMN)), HOPPER, SM90),
    ],
)
def test_a_family_serves_what_others_do_not(plan, problem, device, family):
    made, kernel = plan(problem, device=device)
    assert kernel.family == family and made.microseconds > 0


@pytest.mark.parametrize(
    "m, n, k, copies",
    [(1000, 1001, 999, True), (1000, 1024, 999, True), (1000, 1001, 1024, True), (1000, 1024, 1000, False)],
)
def test_copies_of_misaligned_operands_are_in_the_plan(plan, m, n, k, copies):
    made, kernel = plan(gemm(m, n, k))
    assert kernel.family == SM90 and ("operand copies" in made.reasons[0]) == copies


@pytest.mark.parametrize("k, streams", [(768, True), (769, False)])
def test_few_rows_do_not_wait_for_a_copy_of_a_misaligned_b(plan, k, streams):
    """A kernel that reads B at any offset still needs aligned rows of A."""
    shifted = fake_kernel(SKINNY, BF16, BF16, (64, 16, 128), warps="streaming", swap_ab=True, align_b=1)
    assert (plan(gemm(16, 50257, k), more=[shifted])[1] == shifted) == streams


@pytest.mark.parametrize("problem, device", [(gemm(512, 512, 4096), HOPPER), (gemm(64, 64, 1797, F32), CPU)])
@pytest.mark.parametrize("schedule", [DataParallel(), SplitK(7), SplitK(16, "separate"), StreamK(), StreamK(max_sms=3)])
def test_a_given_schedule_is_obeyed(plan, problem, device, schedule):
    made, _ = plan(problem, schedule, device)
    assert made.schedule == schedule and made.reasons[0] == "the schedule was given"


def test_a_given_schedule_is_refused_with_the_limit(plan):
    with pytest.raises(ValueError, match=r"splits=1000 exceeds its 29 k-tiles of 64"):
        planner.make_plan(gemm(64, 64, 1797, F32), SplitK(1000), CPU)
    with pytest.raises(ValueError, match=r"SplitK\(splits=100.*exceeds its \d+ k-tiles"):
        plan(gemm(64, 64, 640), SplitK(100))
    with pytest.raises(ValueError, match='no Stream-K with reduction "atomic"'):
        plan(gemm(64, 64, 640), StreamK("atomic"))


def test_sums_of_integers_that_32_bits_do_not_hold_are_refused(plan):
    kernel = fake_kernel(SM90, _ffi.Type.s8, F32, (128, 64, 128), swap_ab=True, align=16, scales_sums=True)

    def of_depth(k):
        scales = dict(scale_rows=k, scale_columns=1, scale_rows_of_a=1, scale_columns_of_a=k)
        return dataclasses.replace(gemm(64, 64, k, _ffi.Type.s8), type_d=F32, **scales)

    assert plan(of_depth(2**17 - 16), DataParallel(), more=[kernel])[0].kernel == kernel.name
    with pytest.raises(ValueError, match="has at most 131071 of k, whose sums fit 32 bits"):
        plan(of_depth(2**17), DataParallel(), more=[kernel])


@pytest.mark.parametrize("shape", [(35, 8457, 2048), (64, 50257, 1600), (1024, 700, 512), (2000, 1000, 132)])
def test_auto_leaves_to_xla_what_it_was_measured_to_be_faster_at(plan, shape):
    """Plain products on Hopper with rows aligned to 2 or 4 bytes. Our kernels run similar products that differ."""
    made, _ = plan(gemm(*shape))
    assert made.kernel is None and "our kernels would copy" in str(made)
    m, n, k = shape
    aligned = gemm(m, -(-n // 64) * 64, -(-k // 8) * 8)
    for other in (gemm(*shape, batch=2), dataclasses.replace(gemm(*shape), has_bias=True), aligned, gemm(m, n, 4099)):
        assert plan(other)[0].kernel
    assert plan(gemm(*shape), DataParallel())[0].kernel and plan(gemm(*shape), device=A100)[0].kernel


def test_auto_falls_back_where_no_kernel_runs(plan):
    made, _ = plan(gemm(64, 64, 64), device=Device("cuda", 75, 40))
    assert made.kernel is None and "need compute capability 8.0 or later" in made.reasons[0]
    made, _ = plan(gemm(64, 64, 64, _ffi.Type.f16))
    assert made.kernel is None and "no kernel of this build" in made.reasons[0]
    for empty in ("batch", "m", "n", "k"):
        made, _ = plan(dataclasses.replace(gemm(64, 64, 64), **{empty: 0}))
        assert made.kernel is None and "nothing to multiply" in made.reasons[0]
