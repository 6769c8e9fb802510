"""What can go wrong only on a GPU: hangs, capture in command buffers, streams and devices that disturb each other."""

import concurrent.futures
import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_streamk import Auto, DataParallel, SplitK, StreamK, _ffi, dot_general, machines, matmul, plan
from jax_streamk.device import HOPPER

pytestmark = pytest.mark.gpu

DETERMINISTIC = [DataParallel(), SplitK(2), SplitK(7), SplitK(4, "separate"), StreamK(), StreamK(max_sms=40)]
SCHEDULES = [Auto(), *DETERMINISTIC, SplitK(4, "atomic"), StreamK("atomic"), StreamK("separate"), StreamK(max_sms=1)]


def operands(m, n, k, seed=0):
    """Operands whose products are about 1 in size."""
    keys = jax.random.split(jax.random.key(seed))
    a, b = jax.random.normal(keys[0], (m, k)), jax.random.normal(keys[1], (k, n)) / k**0.5
    return a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)


def is_served(a, b, schedule, **params):
    try:
        return plan(a, b, schedule=schedule, **params).kernel is not None
    except ValueError:
        return False


def assert_close(got, wanted, label):
    error = float(jnp.sqrt(jnp.mean((got.astype(jnp.float32) - wanted) ** 2)))
    assert error < 2.0**-7, f"{label}: error {error:.3g}"  # NaN fails too


class Launch:
    """A product with its own memory, launched outside XLA on any stream."""

    def __init__(self, a, b, kernel, problem, schedule, policy, device):
        self.what = kernel, problem, schedule, policy, device
        self.a, self.b = a, b
        workspace_bytes = _ffi.workspace_bytes(kernel, problem, schedule, device)
        self.d = jnp.full((a.shape[0], b.shape[1]), jnp.nan, a.dtype)
        self.workspace = jnp.full((workspace_bytes + 1,), 255, jnp.uint8)
        jax.block_until_ready((self.a, self.b, self.d, self.workspace))

    @classmethod
    def planned(cls, a, b, schedule):
        made = plan(a, b, schedule=schedule)
        how = made.native_schedule(), made.policy.native(), made.device.native()
        return cls(a, b, made.kernel, made.problem.native(), *how)

    def __call__(self, stream=0):
        *addresses, workspace = (x.unsafe_buffer_pointer() for x in (self.a, self.b, self.d, self.workspace))
        _ffi.launch(*self.what, (*addresses, 0, 0, 0, 0), workspace, stream)

    def product(self):
        # A copy made by XLA: an array that was read once caches its value.
        return np.asarray(jnp.copy(self.d))


@contextlib.contextmanager
def streams(count):
    """CUDA streams that do not wait for the default stream, of the context that JAX uses."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def check(result):
        assert result == 0, f"CUDA error {result}"

    context, device = ctypes.c_void_p(), ctypes.c_int()
    check(cuda.cuDeviceGet(ctypes.byref(device), 0))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    check(cuda.cuCtxSetCurrent(context))
    made = [ctypes.c_void_p() for _ in range(count)]
    for stream in made:
        check(cuda.cuStreamCreate(ctypes.byref(stream), 1))
    try:
        yield [stream.value for stream in made]
    finally:
        for stream in made:
            check(cuda.cuStreamSynchronize(stream))
            check(cuda.cuStreamDestroy_v2(stream))
        check(cuda.cuDevicePrimaryCtxRelease_v2(device))


# Shapes on which Stream-K kernels were reported to hang. The limit ends the process, since a thread that waits for a
# GPU cannot be interrupted.

HANGS = [(16, 2560, 8192), (8, 8192, 8192), (512, 1024, 4096)]


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("m, n, k", HANGS)
def test_reported_hangs(m, n, k, schedule):
    a, b = operands(m, n, k)
    if not is_served(a, b, schedule):
        pytest.skip("no kernel has this reduction")
    wanted = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    f = jax.jit(functools.partial(matmul, schedule=schedule))
    for _ in range(20):
        got = f(a, b)
    assert_close(got, wanted, schedule)


@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("m, n, k", HANGS)
def test_reported_hangs_on_every_kernel(m, n, k):
    a, b = operands(m, n, k)
    wanted = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    made = plan(a, b)
    problem, device = made.problem.native(), made.device.native()
    kinds = _ffi.ScheduleKind
    ran = 0
    for kernel in _ffi.kernels():
        if kernel.family == _ffi.Family.host or kernel.scaled:
            continue
        ways = [(kinds.data_parallel, 1, _ffi.Reduction.ordered, 0)]
        ways += [
            (kinds.split_k, splits, reduction, 0) for splits in (2, 5, 16) for reduction in kernel.split_k_reductions
        ]
        ways += [
            (kinds.stream_k, 1, reduction, limit) for limit in (0, 7, 130) for reduction in kernel.stream_k_reductions
        ]
        for way in ways:
            schedule = _ffi.Schedule(*way)
            if _ffi.can_implement(kernel.name, problem, schedule, device) is None:
                machine = machines.machine_of(HOPPER).native
                policy = _ffi.launch_policy(kernel, problem, schedule, _ffi.Raster.along_m, 1, device, machine)
                launch = Launch(a, b, kernel.name, problem, schedule, policy, device)
                launch()
                _ffi.synchronize()
                assert_close(jnp.copy(launch.d), wanted, f"{kernel.name} {way}")
                ran += 1
    assert ran > 0


# Command buffers. The flags are read when the backend starts, so each setting has a process of its own.

CHAIN = """
import hashlib, json, sys
import jax, jax.numpy as jnp, numpy as np
from jax_streamk import DataParallel, SplitK, StreamK, matmul

schedules = [DataParallel(), SplitK(3), StreamK(), SplitK(4, "separate")]
schedules += [StreamK(max_sms=50), SplitK(2), StreamK(), SplitK(7)]
keys = jax.random.split(jax.random.key(0), len(schedules) + 2)
widths = [1024, 1024, 1023, 1024, 1024, 1023, 1023, 1024, 1024]  # misaligned matrices may be copied
shapes = zip(widths, widths[1:])
weights = [(jax.random.normal(key, shape) / 32).astype(jnp.bfloat16) for key, shape in zip(keys[2:], shapes)]
inputs = [jax.random.normal(key, (96, 1024)).astype(jnp.bfloat16) for key in keys[:2]]

def chain(x, weights):
    for w, schedule in zip(weights, schedules):
        x = matmul(x, w, schedule=schedule)
    return x

def bits(x):
    assert np.isfinite(np.asarray(x).astype(np.float32)).all()
    return hashlib.sha256(np.asarray(x).tobytes()).hexdigest()

program = jax.jit(chain)
runs = [[bits(program(x, weights)) for x in inputs] for _ in range(20)]  # replays, with buffers that move
copies = [[jnp.copy(w) for w in weights] for _ in range(5)]
runs += [[bits(program(jnp.copy(x), held)) for x in inputs] for held in copies]
queued = [program(inputs[0], weights) for _ in range(50)]
runs += [[bits(y), runs[0][1]] for y in queued]
print(json.dumps({"runs": runs, "singly": [bits(chain(x, weights)) for x in inputs]}))
"""


def run_chain(folder, *flags):
    """What the program above prints, and the thunks of its executables after XLA's passes."""
    flags = (*flags, f"--xla_dump_to={folder}", "--xla_dump_hlo_module_re=.*chain.*")
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    done = subprocess.run(
        [sys.executable, "-c", CHAIN], env=environment, capture_output=True, text=True, timeout=280, cwd="/"
    )
    assert done.returncode == 0, done.stderr[-4000:]
    thunks = "\n".join(path.read_text() for path in folder.glob("*thunk_sequence_after_thunk_passes*"))
    return json.loads(done.stdout.splitlines()[-1]), thunks


def test_capture_and_replay_give_the_same_bits(tmp_path):
    (tmp_path / "captured").mkdir(), (tmp_path / "launched").mkdir()
    captured, thunks = run_chain(tmp_path / "captured", "--xla_gpu_graph_min_graph_size=1")
    launched, plain = run_chain(tmp_path / "launched", "--xla_gpu_enable_command_buffer=")
    assert "kCommandBuffer" in thunks and "kCommandBuffer" not in plain, "the handler's calls are not captured"
    wanted = launched["singly"]
    assert captured["singly"] == wanted
    assert all(run == wanted for run in launched["runs"])
    assert all(run == wanted for run in captured["runs"]), [run == wanted for run in captured["runs"]]


# At once.


@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("schedule", DETERMINISTIC, ids=str)
def test_two_streams_do_not_disturb_each_other(schedule):
    pairs = [operands(200, 1000, 4096, seed=1), operands(264, 512, 8192, seed=2)]
    alone = []
    for a, b in pairs:
        launch = Launch.planned(a, b, schedule)
        launch()
        _ffi.synchronize()
        alone.append(launch.product().tobytes())
        assert_close(jnp.copy(launch.d), jnp.matmul(a, b, preferred_element_type=jnp.float32), schedule)
    with streams(2) as both:
        for _ in range(50):
            launches = [Launch.planned(a, b, schedule) for a, b in pairs]
            for _ in range(4):
                for launch, stream in zip(launches, both):
                    launch(stream)
            _ffi.synchronize()
            assert [launch.product().tobytes() for launch in launches] == alone


@pytest.mark.timeout(300, method="thread")
def test_two_threads_do_not_disturb_each_other():
    def program(schedule, seed):
        a, b = operands(200, 1000, 4096, seed)
        f = jax.jit(functools.partial(matmul, schedule=schedule))
        wanted = np.asarray(f(a, b)).tobytes()
        return lambda: [np.asarray(f(a, b)).tobytes() == wanted for _ in range(50)]

    programs = [
        program(schedule, seed)
        for seed, schedule in enumerate((StreamK(), SplitK(5), StreamK(), SplitK(4, "separate")))
    ]
    with concurrent.futures.ThreadPoolExecutor(len(programs)) as pool:
        assert all(all(same) for same in pool.map(lambda run: run(), programs))


@pytest.mark.timeout(300, method="thread")
@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_two_devices_do_not_disturb_each_other():
    first, second = jax.devices()[:2]
    if (first.compute_capability, first.core_count) != (second.compute_capability, second.core_count):
        pytest.skip("devices of different kinds")
    a, b = operands(200, 1000, 4096)
    on = [tuple(jax.device_put(x, device) for x in (a, b)) for device in (first, second)]
    for schedule in DETERMINISTIC:
        f = jax.jit(functools.partial(matmul, schedule=schedule))
        wanted = np.asarray(f(*on[0])).tobytes()
        for _ in range(50):
            products = [f(*pair) for pair in on]
            assert [product.devices() for product in products] == [{first}, {second}]
            assert all(np.asarray(product).tobytes() == wanted for product in products), schedule


@pytest.fixture(scope="module")
def busy_gpu():
    """Another thread keeps a part of the GPU busy on its own stream, so that CTAs of a launch start at odd times."""
    stop = threading.Event()
    noise = Launch.planned(*operands(640, 640, 8192, seed=9), StreamK(max_sms=90))
    failures = []

    def keep_busy(stream):
        cuda = ctypes.CDLL("libcuda.so.1")
        try:
            while not stop.is_set():
                for _ in range(8):
                    noise(stream)
                if cuda.cuStreamSynchronize(ctypes.c_void_p(stream)):
                    raise RuntimeError("the busy stream failed")
        except RuntimeError as error:
            failures.append(error)

    with streams(1) as (stream,):
        thread = threading.Thread(target=keep_busy, args=(stream,))
        thread.start()
        yield
        stop.set()
        thread.join()
    assert not failures


@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("schedule", DETERMINISTIC, ids=str)
@pytest.mark.parametrize("m, n, k", [(129, 264, 8192), (16, 512, 16384), (1000, 1000, 1000)])
def test_a_hundred_runs_on_a_busy_gpu_give_the_same_bits(m, n, k, schedule, busy_gpu):
    a, b = operands(m, n, k)
    f = jax.jit(functools.partial(matmul, schedule=schedule))
    runs = [f(a, b) for _ in range(100)]
    assert_close(runs[0], jnp.matmul(a, b, preferred_element_type=jnp.float32), schedule)
    assert len({np.asarray(run).tobytes() for run in runs}) == 1


def assert_as_exact_as_xlas(lhs, rhs, numbers, schedules=(Auto(),), **params):
    """At most twice the error of ``lax.dot_general`` against float64, relative to sums of random numbers."""
    theirs = jax.jit(functools.partial(jax.lax.dot_general, dimension_numbers=numbers, **params))(lhs, rhs)
    wide = [np.asarray(x, np.float64) for x in (lhs, rhs)]
    with jax.enable_x64(True):
        exact = np.asarray(jax.lax.dot_general(*wide, numbers))
    depth = np.prod([lhs.shape[i] for i in numbers[0][0]])
    size = np.sqrt(depth * exact.size * np.prod([np.mean(x**2) for x in wide]))
    xlas = float(np.linalg.norm(np.asarray(theirs, np.float64) - exact)) / size
    if xlas > 2.0**-16 and theirs.dtype == np.float32:
        xlas = max(xlas, 2.0**-12)  # TF32, where a few results may be better by chance
    for schedule in schedules:
        got = jax.jit(functools.partial(dot_general, dimension_numbers=numbers, schedule=schedule, **params))(lhs, rhs)
        assert (got.shape, got.dtype) == (theirs.shape, theirs.dtype)
        ours = float(np.linalg.norm(np.asarray(got, np.float64) - exact)) / size
        label = f"{lhs.dtype} {lhs.shape} by {rhs.shape}, {numbers} {params} {schedule}"
        assert ours <= 2 * xlas + 2.0**-24, f"{label}: {ours:.1e}, XLA's {xlas:.1e}"


def random_product(rng):
    """Operands of float32, few or no dimensions of each role in any order, and dimension numbers."""
    counts = dict(batch=rng.integers(2), lhs=rng.integers(3), rhs=rng.integers(3), contract=rng.integers(3))
    most = dict(batch=20, lhs=600, rhs=600, contract=3000)
    sizes = {
        (role, i): max(1, round(most[role] ** (rng.uniform() / count)))
        for role, count in counts.items()
        for i in range(count)
    }
    names = [[name for name in sizes if name[0] in ("batch", side, "contract")] for side in ("lhs", "rhs")]
    names = [[side[i] for i in rng.permutation(len(side))] for side in names]
    shared = [[name for name in sizes if name[0] == role] for role in ("contract", "batch")]
    numbers = tuple(tuple(tuple(map(side.index, role)) for side in names) for role in shared)
    return *(rng.standard_normal([sizes[name] for name in side]).astype(np.float32) for side in names), numbers


@pytest.mark.left_to_xla
@pytest.mark.parametrize("precision", [None, "high"])
@pytest.mark.parametrize("part", range(10))
def test_float32_is_as_exact_as_xlas(part, precision):
    rng = np.random.default_rng()
    for _ in range(25):
        assert_as_exact_as_xlas(*random_product(rng), precision=precision)


@pytest.mark.left_to_xla
def test_harnesses_of_jax_are_as_exact_as_xlas():
    harnesses = pytest.importorskip("jax._src.internal_test_util.test_harnesses")
    found = 0
    for harness in harnesses.all_harnesses:
        if harness.group_name == "dot_general":
            lhs, rhs, *_ = harness.dyn_args_maker(np.random.RandomState(found))
            if all(jnp.issubdtype(x.dtype, jnp.floating) for x in (lhs, rhs)):
                params = {name: harness.params[name] for name in ("precision", "preferred_element_type")}
                assert_as_exact_as_xlas(lhs, rhs, harness.params["dimension_numbers"], **params)
                found += 1
    assert found >= 50


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize(
    "m, n, k",
    [(16, 4096, 14336), (46, 260, 7903), (512, 512, 16384), (1, 4096, 2048), (300, 300, 512), (1024, 1024, 8192)],
)
def test_a_long_sum_of_16_bits_is_as_exact_as_xlas(m, n, k, dtype):
    rng = np.random.default_rng()
    lhs, rhs = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((m, k), (k, n)))
    served = [
        x
        for x in (DataParallel(), SplitK(4), SplitK(4, "separate"), StreamK())
        if is_served(lhs, rhs, x, preferred_element_type=jnp.float32)
    ]
    numbers = (((1,), (0,)), ((), ()))
    assert_as_exact_as_xlas(lhs, rhs, numbers, (Auto(), *served), preferred_element_type=jnp.float32)
