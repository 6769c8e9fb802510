"""The handlers refuse custom calls whose attributes no plan would have: they are changed by hand here."""

import copy
import dataclasses
import enum
import pathlib
import pickle
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streamk
from jax_streamk import DataParallel, SplitK, StreamK, _ffi, plan
from jax_streamk.plan import custom_call

ON_GPU = jax.default_backend() == "gpu"
TARGET = "jax_streamk_cuda_gemm" if ON_GPU else "jax_streamk_host_gemm"
M, N, K = 1000, 1000, 640
A, B = (np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32) for shape in ((M, K), (K, N)))
PLAN = plan(A, B, schedule=SplitK(2))
assert PLAN.workspace_bytes > 16, "the tests change what a plan says of its workspace"
SEVEN_MILLION = 7_000_000


def call(changed=(), workspace=PLAN.workspace_bytes, attributes=None, others=()):
    """Compiles and runs a call with the attributes of the plan, or those given, some of them changed.

    `others` are the operands after A and B.
    """
    attributes = (attributes or custom_call.attributes(PLAN)) | dict(changed)
    out = (jax.ShapeDtypeStruct((M, N), jnp.float32), jax.ShapeDtypeStruct((workspace,), jnp.uint8))
    product = jax.ffi.ffi_call(TARGET, out)(
        A, B, *others, **{name: value for name, value in attributes.items() if value is not None}
    )[0]
    return product.block_until_ready()


def test_the_untouched_call():
    np.testing.assert_array_equal(call(), A @ B)


def test_a_larger_workspace_serves():
    room = PLAN.workspace_bytes + 4096
    np.testing.assert_array_equal(call({"workspace_bytes": np.int64(room)}, workspace=room), A @ B)


i32, i64 = np.int32, np.int64
ATTRIBUTES = len(custom_call.attributes(PLAN))
NAME = re.escape(PLAN.kernel)
REFUSED = rf"INVALID_ARGUMENT: jax_streamk: {NAME} cannot run \(batch, m, n, k\) = \(1, {M}, {N}, {K}\): "

CHOICES = "held_back", "held_back_last", "idle_clusters", "cluster_order"
# The message depends on which parts of a launch policy the kernel has.
LAUNCH = "(of launch choices it has the order of tiles|it cannot h|it does not number clusters)"


@pytest.mark.parametrize(
    "changed, message",
    [
        (
            {"kernel": "another"},
            "FAILED_PRECONDITION: jax_streamk: this build has no kernel another; "
            "the program was lowered by another build",
        ),
        ({"kernel": PLAN.kernel[:-1]}, "FAILED_PRECONDITION: jax_streamk: this build has no kernel"),
        ({"kernel": ""}, "FAILED_PRECONDITION: jax_streamk: this build has no kernel"),
        (
            {"workspace_bytes": i64(PLAN.workspace_bytes - 1)},
            rf"FAILED_PRECONDITION: .*{NAME} needs \d+ bytes of workspace and was given \d+",
        ),
        ({"workspace_bytes": i64(-1)}, rf"FAILED_PRECONDITION: .*{NAME} needs \d+ bytes of workspace and was given -1"),
        ({"splits": i32(SEVEN_MILLION)}, REFUSED + rf"splits={SEVEN_MILLION} exceeds its \d+ k-tiles of \d+"),
        ({"splits": i32(0)}, REFUSED + "splits must be at least 1"),
        ({"splits": i32(-5)}, REFUSED + "splits must be at least 1"),
        ({"reduction": i32(9)}, REFUSED + r'it has no split-K with reduction \\?"\?'),
        ({"schedule": i32(2), "reduction": i32(9)}, REFUSED + r'it has no Stream-K with reduction \\?"\?'),
        ({"type_a": i32(_ffi.Type.f64.value)}, REFUSED + "it multiplies f32 by f32 into f32"),
        ({"type_b": i32(_ffi.Type.bf16.value)}, REFUSED + "it multiplies f32 by f32 into f32"),
        ({"type_d": i32(77)}, REFUSED + "it multiplies f32 by f32 into f32"),
        ({"math": i32(-1)}, REFUSED + "it multiplies f32 by f32 into f32"),
        ({"major_a": i32(7)}, REFUSED + "A must be row-major and B row-major"),
        ({"major_b": i32(5)}, REFUSED + "A must be row-major and B row-major"),
        ({"swizzle": i32(0)}, REFUSED + "swizzle must be at least 1"),
        *[({name: i32(value)}, REFUSED + LAUNCH) for name in CHOICES for value in (-1, 99)],
        ({"sms": i32(2**31 - 1)}, REFUSED + "it has too many tiles or MAC iterations to count in 32 bits"),
        ({"m": i64(-1)}, r"INVALID_ARGUMENT: .* = \(1, -1, .*every extent must be at least 1"),
        ({"k": i64(0)}, "INVALID_ARGUMENT: .*every extent must be at least 1"),
        ({"batch": i64(0)}, "INVALID_ARGUMENT: .*every extent must be at least 1"),
        *[({"inner_batch": i64(x)}, "INVALID_ARGUMENT: .*inner_batch must divide batch") for x in (0, -1, 2)],
        ({"n": i64(2**40)}, r"INVALID_ARGUMENT: .*every extent must be below 2\^31"),
        # As the attributes of another version would be.
        ({"splits": i64(3)}, "INVALID_ARGUMENT: .*expected S32 but got S64"),
        ({"splits": None}, f"INVALID_ARGUMENT: .*expected {ATTRIBUTES} attributes but got {ATTRIBUTES - 1}"),
        ({"epilogue": i32(0)}, f"INVALID_ARGUMENT: .*expected {ATTRIBUTES} attributes but got {ATTRIBUTES + 1}"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)  # fmt: skip
def test_changed_attributes(changed, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s){message}"):
        call(changed)


def test_a_buffer_smaller_than_the_plan_says():
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=rf"FAILED_PRECONDITION: .*{NAME} was given a workspace of 16 bytes; its plan says",
    ):
        call(workspace=16)


@pytest.mark.parametrize(
    "changed, operand",
    [
        ({"m": i64(M + 8)}, "A"),
        ({"lda": i64(K + 8)}, "A"),
        ({"ldb": i64(-8)}, "B"),
        ({"n": i64(N + 8)}, "B"),
        ({"ldd": i64(2 * N)}, "D"),
        ({"batch": i64(2)}, "D"),
        ({"batch": i64(2), "batch_stride_b": i64(2**50)}, "B"),
        ({"inner_stride_b": i64(-1)}, "B"),
    ],
    ids=str,
)
def test_operands_that_do_not_hold_what_the_plan_says(changed, operand):
    # Data-parallel: what is refused must not be the workspace.
    attributes = custom_call.attributes(plan(A, B, schedule=DataParallel()))
    message = f"INVALID_ARGUMENT: .* was given a buffer for {operand} of another type, or smaller, than its plan says"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(changed, workspace=2**24, attributes=attributes | {"workspace_bytes": i64(2**24)})


@pytest.mark.parametrize("name", ["lda", "batch_stride_b", "inner_stride_d", "batch_stride_bias", "up_offset"])
@pytest.mark.parametrize("stride", [2**62, -(2**63), 2**63 - 1])
def test_strides_that_positions_overflow_by(name, stride):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"was given strides beyond 2\^61 elements"):
        call({name: i64(stride)})


BIAS, RESIDUAL = (np.random.default_rng(1).integers(-3, 4, shape).astype(np.float32) for shape in ((N,), (M, N)))
WITH_BIAS, WITH_RESIDUAL = {"has_bias": np.bool_(True)}, {"has_residual": np.bool_(True)}


@pytest.mark.parametrize(
    "changed, others, expected",
    [
        (WITH_BIAS, (BIAS,), A @ B + BIAS),
        (WITH_RESIDUAL, (RESIDUAL,), A @ B + RESIDUAL),
        (WITH_BIAS | WITH_RESIDUAL, (BIAS, RESIDUAL), A @ B + RESIDUAL + BIAS),
        (
            WITH_BIAS | WITH_RESIDUAL | {"activation": i32(1), "alpha": np.float64(0.5), "beta": np.float64(-2)},
            (BIAS, RESIDUAL),
            np.maximum(0.5 * (A @ B) - 2 * RESIDUAL + BIAS, 0),
        ),
    ],
    ids=["bias", "residual", "both", "everything"],
)
def test_an_epilogue(changed, others, expected):
    np.testing.assert_array_equal(call(changed, others=others), expected)


@pytest.mark.parametrize(
    "changed, others, message",
    [
        ({}, (BIAS,), "was given 3 operands; its plan says 2"),
        (WITH_BIAS, (), "was given 2 operands; its plan says 3"),
        (WITH_BIAS, (BIAS, RESIDUAL), "was given 4 operands; its plan says 3"),
        (WITH_BIAS | WITH_RESIDUAL, (BIAS,), "was given 3 operands; its plan says 4"),
        (WITH_BIAS, (BIAS[:-1],), "was given a buffer for the bias of another type, or smaller, than its plan says"),
        (WITH_BIAS, (BIAS.astype(jnp.bfloat16),), "was given a buffer for the bias of another type"),
        (
            WITH_RESIDUAL,
            (RESIDUAL[:-1],),
            "was given a buffer for the residual of another type, or smaller, than its plan says",
        ),
        (WITH_RESIDUAL, (RESIDUAL.astype(np.float16),), "was given a buffer for the residual of another type"),
        (
            WITH_BIAS | WITH_RESIDUAL,
            (RESIDUAL, BIAS),
            "was given a buffer for the residual of another type, or smaller",
        ),
        ({"activation": i32(7)}, (), "cannot run .*: there is no activation 7"),
        ({"activation": i32(-1)}, (), "cannot run .*: there is no activation -1"),
    ],
)
def test_operands_of_an_epilogue(changed, others, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s)INVALID_ARGUMENT: .*jax_streamk: {NAME} {message}"):
        call(changed, others=others)


@pytest.mark.skipif(ON_GPU, reason="a GPU's kernels gather rows of 16-bit elements")
def test_gathered_rows():
    sizes, indices = np.array([M], np.int32), np.random.default_rng(2).integers(M - 3, size=M, dtype=np.int32)
    made = plan(A, B[None], group_sizes=sizes, schedule=DataParallel())
    room = {"workspace_bytes": i64(2**24)}
    attributes = custom_call.attributes(made) | room | {"gathered_rows": i64(M - 3)}
    np.testing.assert_array_equal(call((), 2**24, attributes, (sizes, indices)), A[indices] @ B)
    smaller = "was given a buffer for lhs_indices of another type, or smaller"
    for changed, others, message in (
        ({}, (sizes,), "was given 3 operands; its plan says 4"),
        ({}, (sizes, indices[:-1]), smaller),
        ({}, (sizes, indices.astype(np.float32)), smaller),
        ({"gathered_rows": i64(M + 1)}, (sizes, indices), "was given a buffer for A of another type, or smaller"),
        ({"gathered_rows": i64(-1)}, (sizes,), r"the rows of A to gather must be below 2\^31"),
        ({"gathered_rows": i64(2**31)}, (sizes, indices), r"the rows of A to gather must be below 2\^31"),
        ({"ragged": i32(0)}, (indices,), "rows are gathered only where groups cut them"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call(changed, 2**24, attributes, others)


def test_a_bias_of_every_batch_does_not_fit_that_of_one():
    changed = WITH_BIAS | {
        "batch": i64(2),
        "batch_stride_bias": i64(N),
        "lda": i64(K),
        "batch_stride_a": i64(0),
        "batch_stride_b": i64(0),
    }
    attributes = custom_call.attributes(plan(A, B, schedule=DataParallel())) | {
        "batch_stride_d": i64(0),
        "workspace_bytes": i64(2**24),
    }
    with pytest.raises(jax.errors.JaxRuntimeError, match="was given a buffer for the bias of another type, or smaller"):
        call(changed, 2**24, attributes, (BIAS,))


def test_operands_of_another_type():
    a, b = A.astype(jnp.bfloat16), B.astype(jnp.bfloat16)
    attributes = custom_call.attributes(plan(a, b, schedule=DataParallel()))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: .* was given a buffer for A of another type"
    ):
        call({"workspace_bytes": i64(2**24)}, workspace=2**24, attributes=attributes)


@pytest.mark.parametrize(
    "changed", [{"schedule": i32(9)}, {"raster": i32(8)}, {"max_sms": i32(-2)}, {"swizzle": i32(2**31 - 1)}], ids=str
)
def test_values_without_a_meaning(changed):
    try:
        product = call(changed)
    except jax.errors.JaxRuntimeError as error:
        assert "jax_streamk: " in str(error)
    else:
        np.testing.assert_array_equal(product, A @ B)


@pytest.mark.skipif(ON_GPU, reason="a GPU has the SMs that it has")
@pytest.mark.parametrize("threads", [-4, 0, 1, 3, 64, 1000])
@pytest.mark.parametrize("schedule", [StreamK(), StreamK("separate"), StreamK("atomic"), SplitK(10)], ids=str)
def test_any_number_of_threads_serves(threads, schedule):
    """A program may come from a machine with another number of cores."""
    made = plan(A, B, schedule=schedule)
    native = _ffi.Device(0, threads)
    needed = _ffi.workspace_bytes(made.kernel, made.problem.native(), made.native_schedule(), native)
    product = call({"sms": i32(threads), "workspace_bytes": i64(needed)}, needed, custom_call.attributes(made))
    np.testing.assert_array_equal(product, A @ B)


@pytest.mark.gpu
@pytest.mark.parametrize("name, change", [("arch", -10), ("sms", -1), ("sms", 1)])
def test_another_gpu(name, change):
    attributes = custom_call.attributes(PLAN)
    # Room for what a wider machine needs: the device is what must be refused.
    room = PLAN.workspace_bytes * 2
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match=rf"FAILED_PRECONDITION: .*(the plan of {NAME} is for sm_\d+ with \d+ SMs, "
        r"but this device is sm_\d+ with \d+ SMs: lower"
        rf"|{NAME} is compiled for sm_90a; the device is sm_)",
    ):
        call({"workspace_bytes": i64(room), name: i32(attributes[name] + change)}, room)


NATIVES = (_ffi.GemmProblem, _ffi.Schedule, _ffi.LaunchPolicy, _ffi.Device)
# A device's optional fields are for the planner only.
FIELDS = [field for native in NATIVES for field in native.fields if native is not _ffi.Device or field[3] is None]


def test_every_field_is_an_attribute_of_the_call():
    attributes = custom_call.attributes(PLAN)
    names = [name for name, *_ in FIELDS]
    assert sorted([*names, "kernel", "workspace_bytes"]) == sorted(attributes)
    assert [type(attributes[name]) for name in names] == [np.dtype(dtype).type for _, _, dtype, _ in FIELDS]
    assert names[: len(_ffi.GemmProblem.fields)] == [field.name for field in dataclasses.fields(PLAN.problem)]


def test_every_field_is_decoded_where_it_belongs():
    """Each attribute of a lowered program has a number of its own, so that none can be mistaken for another."""
    jax.ffi.register_ffi_target("jax_streamk_echo", _ffi.echo_handler(), platform="cpu")

    def distinct(place, type_, dtype):
        # Flags have two values: neighbours differ.
        return np.bool_(place % 2) if type_ is bool else np.dtype(dtype).type(1000 + place)

    attributes = {name: distinct(place, type_, dtype) for place, (name, type_, dtype, _) in enumerate(FIELDS)}
    attributes |= dict(kernel=PLAN.kernel, workspace_bytes=np.int64(0))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        out = jax.ShapeDtypeStruct((len(FIELDS),), np.float64)
        echo = jax.jit(lambda: jax.ffi.ffi_call("jax_streamk_echo", out)(**attributes))
        decoded = np.asarray(echo()).tolist()
    assert decoded == [float(attributes[name]) for name, *_ in FIELDS]


@pytest.mark.parametrize("native", NATIVES, ids=lambda native: native.__name__)
def test_every_field_is_bound_to_its_own_place(native):
    def distinct(place, type_):
        if issubclass(type_, enum.Enum):
            return list(type_)[-1 - place % 2]
        return type_(place % 2 if type_ is bool else 100 + place)

    values = {name: distinct(place, type_) for place, (name, type_, *_) in enumerate(native.fields)}
    for made in (native(**values), native(*values.values())):
        assert {name: getattr(made, name) for name in values} == values
    required = {name: values[name] for name, *_, default in native.fields if default is None}
    made = native(**required)
    assert {name: getattr(made, name) for name in values} == {
        name: required.get(name, default) for name, *_, default in native.fields
    }


def test_handlers_of_both_stages():
    handlers = [_ffi.host_handler()] + ([_ffi.cuda_handler()] if _ffi.has_cuda else [])
    for stages in handlers:
        assert set(stages) == {"instantiate", "execute"}


def test_kernels_may_be_pickled_and_copied():
    for kernel in jax_streamk.kernels():
        for other in (pickle.loads(pickle.dumps(kernel)), copy.deepcopy(kernel)):
            members = [name for name, *_ in kernel.fields]
            assert [getattr(other, name) for name in members] == [getattr(kernel, name) for name in members]
            assert repr(other) == f"<kernel {kernel.name}>"


def test_calls_that_no_plan_would_make():
    """In another process, which must not end early."""
    fuzz = pathlib.Path(__file__).with_name("fuzz.py")
    ended = subprocess.run(
        [sys.executable, fuzz, "--count", "200"], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert ended.stdout.splitlines()[-1].startswith("200 calls, ")
