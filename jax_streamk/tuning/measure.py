"""Times kernels on a device of this process, launched outside XLA on rotating operands."""

import collections
import math
import threading
from typing import Any

import jax
import numpy as np

from jax_streamk import _ffi, text
from jax_streamk.device import jax_device_of

# What launches read and write before operands repeat: several times a GPU's L2. CPU caches vary widely in size, and a
# pass over a larger set would take long.
ROTATED_BYTES = {"cuda": 220e6, "cpu": 32e6}
MOST_SETS = 1024
LONGEST_PASS = 20e3  # microseconds
_ALIGNMENT = 256  # as XLA aligns buffers
_OTHERS = ("results", "workspace")  # names of buffers; those of operands are named by their type


class Memory:
    """Random operands, and space for results, on a device of this process; kept from one problem to the next.

    Raises:
      ValueError: this process has no such device.
    """

    def __init__(self, device):
        self.device = device
        self.stopped = threading.Event()  # once it is set, nothing more is launched
        self._on = jax_device_of(device)
        if self._on is None:
            raise ValueError(f"{device} is not a device of this process")
        self._held = {}
        self._integers: dict[str, Any] = {}

    def rotation(self, problem):
        """The ``Rotation`` of a ``GemmProblem``, valid until the next call."""
        sizes = {role: (type_, -(-type_.bits * count // 8)) for role, (type_, count) in spans(problem).items()}
        _, d = sizes.pop("d")
        self._integers = {role: self.put(make(problem)) for role, make in _INTEGERS.items() if role in sizes}
        # Where each operand of a set lies among those of its type, and how long all of these are.
        places: dict[str, tuple[_ffi.Type, int]] = {}
        strides: collections.Counter[_ffi.Type] = collections.Counter()
        for role, (type_, size) in sizes.items():
            if role not in self._integers:
                places[role] = type_, strides[type_]
                strides[type_] += _aligned(size)
        rotated = ROTATED_BYTES[self.device.platform]
        # Buffers of an unusually large product, or of other types, are not kept.
        self._held = {
            name: held
            for name, held in self._held.items()
            if held.nbytes <= 2 * rotated and (name in strides or name in _OTHERS)
        }
        count = max(1, min(MOST_SETS, math.ceil(rotated / (strides.total() + _aligned(d)))))
        operands = {type_: self._operands(type_, max(count * strides[type_], int(rotated))) for type_ in strides}
        results = self.address("results", count * _aligned(d))

        def address(role, i):
            """Where the operand of a role is in set i; 0 if the problem has none."""
            if role == "d":
                return results + i * _aligned(d)
            if role in self._integers:
                return self._integers[role].unsafe_buffer_pointer()
            type_, offset = places.get(role, (None, 0))
            return 0 if type_ is None else operands[type_] + offset + i * strides[type_]

        return Rotation(self, problem, [{role: address(role, i) for role in _ffi.roles} for i in range(count)], d)

    def address(self, name, size):
        """The address of the buffer ``name``, one of ``_OTHERS``, with at least ``size`` bytes."""
        return self._address(name, size, lambda size: np.zeros(size, np.uint8))

    def _operands(self, type_, size):
        dtype = type_.dtype if type_.bits >= 8 else np.dtype(np.uint8)  # two numbers to a byte
        return self._address(type_, size, lambda size: random_bytes(dtype, size))

    def _address(self, name, size, content):
        if name not in self._held or self._held[name].nbytes < size:
            self._held.pop(name, None)
            self._held[name] = self.put(content(size))
        return self._held[name].unsafe_buffer_pointer()

    def check_running(self):
        """Raises RuntimeError once measuring was stopped."""
        if self.stopped.is_set():
            raise RuntimeError("measuring was stopped")

    def as_default(self):
        """A context in which the device is JAX's default."""
        return jax.default_device(self._on)

    def put(self, array):
        return jax.block_until_ready(jax.device_put(array, self._on))


class Rotation:
    """Sets of operands of one problem, which launches take in turn."""

    def __init__(self, memory, problem, sets, result_bytes):
        self._memory, self._problem, self._sets, self._result_bytes = memory, problem.native(), sets, result_bytes
        self._dtype = problem.type_d.dtype

    def shorten(self, kernel, schedule, policy):
        """Drops sets until a pass of this kernel over them takes at most ``LONGEST_PASS``."""
        (microseconds,) = self._time(kernel, schedule, policy, self._sets[:1], repeats=1)
        self._sets = self._sets[: max(1, int(LONGEST_PASS / microseconds))]

    def time(self, kernel, schedule, policy, repeats=3):
        """Microseconds per launch, for each of ``repeats`` passes over the operands.

        Args:
          kernel: its name.
          schedule: an ``_ffi.Schedule``.
          policy: a ``LaunchPolicy``.
          repeats: number of passes.

        Raises:
          ValueError: the kernel cannot run the problem under this schedule and policy.
          RuntimeError: a launch failed, or the device has no memory left.
        """
        return self._time(kernel, schedule, policy, self._sets, repeats)

    def result(self, kernel, schedule, policy):
        """D of the first set of operands, flat; elements that are not written are NaN or -1. Raises as ``time``."""
        d = self._memory.put(np.full(self._result_bytes, 0xFF, np.uint8))
        self._time(kernel, schedule, policy, [self._sets[0] | dict(d=d.unsafe_buffer_pointer())], 1)
        return np.asarray(d).view(self._dtype)

    def launch(self, kernel, schedule, policy):
        """One launch on the first set of operands, for a profiler; returns once it has ended. Raises as ``time``."""
        what, device = (kernel, self._problem, schedule), self._memory.device.native()
        workspace = self._memory.address("workspace", max(1, _ffi.workspace_bytes(*what, device)))
        _ffi.launch(*what, policy.native(), device, _in_order(self._sets[0]), workspace)
        if self._memory.device.platform == "cuda":
            _ffi.synchronize()

    def _time(self, kernel, schedule, policy, sets, repeats):
        self._memory.check_running()
        what, device = (kernel, self._problem, schedule), self._memory.device.native()
        workspace = self._memory.address("workspace", max(1, _ffi.workspace_bytes(*what, device)))
        return _ffi.time_launches(*what, policy.native(), device, [*map(_in_order, sets)], workspace, repeats)


def spans(problem):
    """{role: (its ``_ffi.Type``, elements from first to last)} of every operand that is there, in order."""
    return {role: span for role, span in zip(_ffi.roles, problem.native().spans(), strict=True) if span[1]}


def _in_order(addresses):
    return tuple(addresses[role] for role in _ffi.roles)


def group_sizes(problem):
    """The sizes of the groups of a ragged problem, as if each row, or element of K, chose one by chance."""
    count, extent = problem.batch + problem.leading_rows, problem.m if problem.ragged == _ffi.Ragged.m else problem.k
    return np.random.default_rng(0).multinomial(extent, np.full(count, 1 / count)).astype(np.int32)


def lhs_indices(problem):
    """Which row of A each row of a gathered problem is, drawn by chance."""
    return np.random.default_rng(0).integers(problem.gathered_rows, size=problem.m, dtype=np.int32)


# What operands of integers hold, which kernels read as data.
_INTEGERS = dict(group_sizes=group_sizes, indices=lhs_indices)


def _aligned(size):
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def check_memory(size):
    """Raises MemoryError if ``size`` bytes are not available on the host: Linux would rather kill the process later."""
    with open("/proc/meminfo") as file:
        available = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:"))
    if size > available:
        raise MemoryError(f"this needs {text.size(size)} of memory, and {text.size(available)} are available")


def random_bytes(dtype, size):
    """Bytes of random numbers of a dtype: normally distributed, or integers of eight bits uniformly.

    They repeat after a prime number of elements, so that the rows of a matrix differ.

    Raises:
      MemoryError: the host has not the memory for them and, on a CPU, for JAX's copy.
    """
    check_memory(2 * size)
    rng, count = np.random.default_rng(), (1 << 22) - 3
    if dtype in (np.int8, np.uint8):
        return np.resize(rng.integers(0, 256, count, np.uint8), size)
    if dtype == "float8_e8m0fnu":  # powers of two around one
        return np.resize(rng.integers(120, 135, count, np.uint8), size)
    return np.resize(rng.standard_normal(count, dtype=np.float32).astype(dtype).view(np.uint8), size)
