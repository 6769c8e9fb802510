"""Readable results of the cost model in cutlass_kernels/planner/. Times are in microseconds."""

import dataclasses

from jax_streamk import _ffi
from jax_streamk.machines import machine_of
from jax_streamk.text import duration, durations


@dataclasses.dataclass(frozen=True)
class Limit:
    """The least time that any kernel needs, by the constants of a ``Machine``.

    Attributes:
      bound: "memory" (each operand read once, the result written once) or "arithmetic", whichever takes longer.
      microseconds: its time.
      amount: bytes moved, or FLOPs of the product.
    """

    bound: str
    microseconds: float
    amount: float


def limit_of(problem, device):
    """The ``Limit`` of a problem on a GPU; None on a CPU, whose memory is not modelled."""
    if device.platform != "cuda":
        return None
    machine, moved, operations = machine_of(device), moved_bytes(problem), flop_count(problem)
    memory = moved / machine.dram_bytes_per_us
    arithmetic = operations / _arithmetic_rate(machine, device.arch, device.sms, problem)
    return Limit("memory", memory, moved) if memory >= arithmetic else Limit("arithmetic", arithmetic, operations)


def moving(size, device, launches=1):
    """The expected time, in microseconds, of moving ``size`` bytes by ``launches`` of XLA's kernels."""
    machine = machine_of(device)
    return launches * machine.launch_us + size / machine.dram_bytes_per_us


def moved_bytes(problem):
    """Bytes of every operand, each read once, and of the result."""
    batches = lambda stride: problem.batch if stride else 1
    m, n, k = problem.m, problem.n, problem.k
    matrices = 2 if problem.gated else 1
    results = (1 if problem.ragged == _ffi.Ragged.m else problem.batch) * m * n * (2 if problem.has_residual else 1) + (
        matrices * n * batches(problem.batch_stride_bias) if problem.has_bias else 0
    )
    rows = min(problem.gathered_rows, m) or m * batches(problem.batch_stride_a)
    moved = rows * k * problem.type_a.bits // 8
    moved += matrices * k * n * batches(problem.batch_stride_b) * problem.type_b.bits // 8
    return moved + results * problem.type_d.bits // 8


def flop_count(problem):
    """Multiplications and additions of the product, or of both."""
    products = 1 if problem.is_ragged else problem.batch
    return (4 if problem.gated else 2) * products * problem.m * problem.n * problem.k


def _arithmetic_rate(machine, arch, sms, problem):
    """FLOPs per microsecond of all tensor cores."""
    if problem.type_a == _ffi.Type.f64:
        return sms * machine.mma_f64_flops_per_us_sm
    if arch != 90:
        rate = sms * machine.wgmma_flops_per_us_sm / 2  # mma.sync
    else:
        rate = min(machine.wgmma_flops_per_us, sms * machine.wgmma_flops_per_us_sm)
    # Eight bits take half as long as 16, TF32 twice as long, three TF32 six times.
    return rate * 16 / problem.type_a.bits / (3 if problem.math == _ffi.Math.tf32x3 else 1)


def describe(cost):
    """One line with the parts of an ``_ffi.Cost``."""
    fix_up = (
        f", including {duration(cost.fix_up)} to fix up tiles that {cost.peers:.0f} workers share"
        if cost.peers > 1
        else ""
    )
    return f"estimated {durations(parts_of(cost))}{fix_up}"


def parts_of(cost):
    """The parts of an ``_ffi.Cost`` that add up to its microseconds, by name."""
    return {
        "launch": cost.launches,
        "operand copies": cost.repack,
        "clearing counters" if cost.peers > 1 else "adding slices of K": cost.extra,
        MAIN_LOOP: cost.microseconds - cost.launches - cost.repack - cost.extra,
    }


MAIN_LOOP = "main loop and epilogue"

# What the main loop and the epilogue need, by the name that ``_ffi.Parts`` has for it.
RESOURCES = {
    "memory": "memory",
    "tensor_cores": "tensor cores",
    "shared_memory": "loads into shared memory",
    "l2": "loads from L2",
    "waits": "waits for vectors",
    "epilogue": "epilogues",
    "fix_up": "fix-ups",
}


def resources_of(parts):
    """Microseconds that each resource is needed, by what ``RESOURCES`` calls it; what is not needed is left out."""
    return {words: time for name, words in RESOURCES.items() if (time := getattr(parts, name)) > 0}
