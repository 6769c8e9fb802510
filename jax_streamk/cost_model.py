"""What GPUs can do, as the constants of the cost model in cutlass_kernels/planner/cost_model.cc.

All times are in microseconds. benchmarks/fit_cost_model.py fits the constants of a ``Machine``.
"""

import dataclasses
import functools

from jax_streamk import _ffi
from jax_streamk.text import duration, durations


@dataclasses.dataclass(frozen=True)
class Machine:
    """Constants of one kind of GPU. Times in microseconds; rates in bytes or FLOPs per microsecond."""

    launch: float  # of a kernel, its first loads and its last stores included
    cluster: float  # more of it where 128 columns of a CTA's B are multicast
    relaunch: float  # of each further kernel of a call
    memory_rate: float  # DRAM to all SMs
    memory_rate_sm: float  # ... to the CTA of one
    written: float  # how many bytes read a byte of D that is written counts as
    idle: float  # exponent of the share of workers at work, which it falls with in other families than sm90, and in last waves of several lines of tiles
    beyond: float  # share by which it falls with 64 rows that A's tile has beyond the problem
    gang: float  # share by which it falls with each further CTA of a cluster, of sm90 for what is loaded
    handshake: float  # of the CTAs of a cluster for 64 of K: a stage waits until all have read it
    cache_rate: float  # L2 to all SMs, a multicast counted once
    gpc_rate: float  # L2 to all GPCs, what SMs of one load together counted once
    drift: float  # share of what SMs load together in the first wave that they load apart in later ones
    misaligned_drift: float  # ... in every wave, of an operand whose rows do not start on 128-byte lines
    load_rate_sm: float  # into the shared memory of one SM
    line: float  # per CTA that wants the same 128-byte line at once, and 64 of K
    first_line: float  # ... once a call
    wgmma_rate_sm: float  # tensor cores of one SM at boost clock, 16-bit operands
    wgmma_sustained: float  # all SMs together, by power
    tf32_rate_sm: float  # both of TF32, in operations of 16 bits
    tf32_sustained: float
    shared_tile: float  # factor on what power allows warpgroups that have a tile each, for those that share one
    mma_16bit: float  # mma.sync of one SM on large tiles
    mma_tf32: float
    mma_tf32x3: float
    mma_f64: float
    narrow: float  # columns of tile_n that a MAC iteration of wgmma loses
    from_registers: float  # factor on wgmma's time of TF32 where one operand comes from registers
    narrow_loads: float  # 32 of K of a CTA that is alone on its SM and loads 8 bytes at a time
    misaligned_k: (
        float  # factor on loads of an operand contiguous along K whose rows do not start on sectors of 32 bytes
    )
    misaligned_mn: float  # ... of one contiguous along m or n whose rows do not start on 128-byte lines
    off_sectors_mn: float  # ... nor on sectors, by TMA
    skinny_launch: float  # of a kernel of few rows
    skinny_rate_sm: float  # what kernels of few rows load into the shared memory of one SM
    skinny_rate_16bit: float  # ... of 16-bit operands, of which the same bytes are more to multiply
    skinny_memory: float  # factor on what memory needs where few warps of an SM wait for it, but for float64
    skinny_mma: float  # mma.sync of one SM in them, 16-bit operands
    skinny_alone: float  # a MAC iteration of 64 columns of a CTA of them that is alone on its SM
    skinny_fix_up: float  # of the CTAs of a cluster that share a tile
    skinny_peer: float  # ... for each of them, in a tile of 16 rows of f32 sums
    half_lines: float  # factor on what they load where B is contiguous along K
    epilogue: float  # of a tile of 128 x 128
    misaligned_d: float  # ... more of it to a D whose rows do not start on 16 bytes
    fused: float  # ... more of it with a bias, a residual or an activation
    overlapped: float  # share of it that a pingpong kernel's other warpgroup hides
    copy_rate: float  # operands with misaligned rows, read and written
    rearrange_rate: float  # ... that are transposed, too, or split into TF32 numbers
    fix_up: float  # fences and ticket at a shared tile
    partial_rate_sm: float  # partials that one SM writes or reads
    memset: float  # the node that zeroes tickets
    reduction: float  # the kernel that adds the slices of a separate split-K
    reduction_sharing: float  # ... more for twice as many threads that share an output
    reduction_rate: float  # ... partials it reads

    @functools.cached_property
    def native(self):
        native = _ffi.Machine()
        for field in dataclasses.fields(self):
            setattr(native, field.name, getattr(self, field.name))
        return native


# Fitted to times by the profiler (plans_alone_decode_h200_2026-11-23, plans_alone_strong_h200_2026-11-24 and the plans_ tables of 2026-11-25), but for plans
# that launches with idle CTAs or spread last waves have made faster since, of which plans_even_decode_, plans_even_strong_ and
# plans_even_streamk_h200_2026-11-25 tell; then all but those of the skinny family moved, by random steps, by what choices among the plans of the
# latter and of plans_alone_strong_ lose, and those of float32 and float64 by plans_dtypes_h200_2026-11-21 (benchmarks/results/even_h200_2026-11-25.md).
# Those of the skinny family are fitted to the choices and its times in plans_dtypes_, plans_misaligned_h200_2026-11-23, plans_even_decode_ and
# plans_alone_decode_h200_2026-11-23 (benchmarks/results/hopper_2026-11-25.md). By hand: beyond, which products of 1 to 8 rows by large weights tell,
# off_sectors_mn, by choices in all tables of H200s and H100s (begin_h100_2026-11-26.md), so gpc_rate and overlapped, by 3 to 4% when few stages were
# given their price (stages_h200_2026-11-26.md), shared_tile, misaligned_mn and the rates of wgmma (reach_h200_2026-11-27.md), and reduction_rate and
# drift by 1 and 3%, which keep 1024 x 512 x 131072 from seven splits.
# memset is as it was fitted before, copy_rate as a fit of this kind left it that was not taken (eights_h200_2026-11-25.md); mma_16bit, mma_tf32x3, fused
# and narrow_loads are estimates.
H200 = Machine(
    launch=2.11,
    cluster=0.2751,
    relaunch=2.508,
    memory_rate=4.506e6,
    memory_rate_sm=1.882e5,
    written=1.336,
    idle=0.164,
    beyond=0.11,
    gang=0.02367,
    handshake=0.01801,
    cache_rate=9.42e7,
    gpc_rate=1.543e7,
    drift=0.478,
    misaligned_drift=0.8879,
    load_rate_sm=3.873e5,
    line=0.0005938,
    first_line=0.004848,
    wgmma_rate_sm=9.02e6,
    wgmma_sustained=8.06e8,
    tf32_rate_sm=8.14e6,
    tf32_sustained=8.565e8,
    shared_tile=0.985,
    mma_16bit=4.0e6,
    mma_tf32=1.829e6,
    mma_tf32x3=0.65e6,
    mma_f64=4.363e5,
    narrow=48.85,
    from_registers=0.891,
    narrow_loads=0.37,
    misaligned_k=1.449,
    misaligned_mn=1.32,
    off_sectors_mn=1.5,
    skinny_launch=1.93,
    skinny_rate_sm=6.063e5,
    skinny_rate_16bit=1.09e5,
    skinny_memory=1.03,
    skinny_mma=1.079e6,
    skinny_alone=0.345,
    skinny_fix_up=0.3,
    skinny_peer=0.463,
    half_lines=2.042,
    epilogue=1.015,
    misaligned_d=0.8191,
    fused=1.2,
    overlapped=0.887,
    copy_rate=3.285e6,
    rearrange_rate=1.375e6,
    fix_up=3.283,
    partial_rate_sm=3.916e04,
    memset=2.343,
    reduction=0.9712,
    reduction_sharing=0.2083,
    reduction_rate=2.62e6,
)

# An H100 SXM has the SMs of an H200, and seven tenths of its memory's rate: so the estimates of decode_llm's 308 shapes have no bias, and are right
# within 3% (decode_llm_h100_2026-11-25). What its GPCs load is fitted to all sets measured there (benchmarks/results/hopper_2026-11-25.md), and what tensor
# cores sustain to choices among what 128 shapes of more than 64 rows took there (eights_h100_2026-11-25.md). Fitting more constants made choices no better.
# An H100 PCIe, with slower memory, is not told apart.
H100 = dataclasses.replace(
    H200,
    memory_rate=3.15e6,
    gpc_rate=1.39e7,
    wgmma_rate_sm=9.63e6,
    wgmma_sustained=8.8e8,
    tf32_sustained=8.8e8,
    shared_tile=1.0,
    misaligned_mn=1.251,
    copy_rate=2.5e6,
    rearrange_rate=1.93e6,
)

# From the A100 SXM 80 GB datasheet at usual efficiencies; never fitted. It also stands in for GPUs that nobody measured.
A100 = dataclasses.replace(
    H200,
    launch=4.0,
    memory_rate=1.7e6,
    cache_rate=5.0e6,
    gpc_rate=4.0e6,
    load_rate_sm=8.0e4,
    skinny_launch=3.8,
    skinny_rate_sm=8.0e4,
    skinny_rate_16bit=8.0e4,
    skinny_alone=0.4,
    copy_rate=9.0e5,
    rearrange_rate=9.0e5,
    mma_16bit=2.5e6,
    mma_tf32=1.2e6,
    mma_tf32x3=0.4e6,
    mma_f64=0.16e6,
    partial_rate_sm=3.0e4,
    reduction_rate=1.5e6,
)


def machine_of(device):
    if device.arch != 90:
        return A100
    return H100 if "H100" in device.kind or "H800" in device.kind else H200


def under_way(device):
    """About how many bytes of an operand that streams past should be under way at once (launch_policy.h); 0: any.

    As measured on H100s and an H200 (benchmarks/results/under_way_2026-11-26.md), for which all others of compute capability 9.0 are taken.
    """
    machine = machine_of(device)
    return 9_300_000 if machine is H100 else 11_200_000 if machine is H200 else 0


@dataclasses.dataclass(frozen=True)
class Limit:
    """What no kernel undercuts by the constants of a ``Machine``.

    Attributes:
      bound: "memory", which reads each operand and writes the result once, or "arithmetic", whichever takes longer.
      microseconds: what that takes.
      amount: bytes that memory moves, or FLOPs of the product.
    """

    bound: str
    microseconds: float
    amount: float


def limit_of(problem, device):
    """The ``Limit`` of a problem on a GPU; None on a CPU, of whose memory the model knows nothing."""
    if device.platform != "cuda":
        return None
    machine, sms, size = machine_of(device), device.sms, _SIZES.__getitem__
    batches = lambda stride: problem.batch if stride else 1  # noqa: E731
    m, n, k = problem.m, problem.n, problem.k
    results = problem.batch * m * n * (2 if problem.has_residual else 1) + (
        n * batches(problem.batch_stride_bias) if problem.has_bias else 0
    )
    moved = m * k * batches(problem.batch_stride_a) * size(problem.type_a)
    moved += k * n * batches(problem.batch_stride_b) * size(problem.type_b) + results * size(problem.type_d)
    flops = 2 * problem.batch * m * n * k
    memory, arithmetic = moved / machine.memory_rate, flops / _arithmetic_rate(machine, device.arch, sms, problem)
    return Limit("memory", memory, moved) if memory >= arithmetic else Limit("arithmetic", arithmetic, flops)


_SIZES = {_ffi.Type.f64: 8, _ffi.Type.f32: 4, _ffi.Type.s32: 4, _ffi.Type.bf16: 2, _ffi.Type.f16: 2, _ffi.Type.s8: 1}


def _arithmetic_rate(machine, arch, sms, problem):
    """FLOPs per microsecond of all tensor cores."""
    if problem.type_a == _ffi.Type.f64:
        return sms * machine.mma_f64
    tf32, three = problem.type_a == _ffi.Type.f32, problem.math == _ffi.Math.tf32x3
    if arch == 90:  # wgmma, whose TF32 is counted as operations of 16 bits, which take half as long
        rate = (
            min(machine.tf32_sustained, sms * machine.tf32_rate_sm) / 2
            if tf32
            else min(machine.wgmma_sustained, sms * machine.wgmma_rate_sm)
        )
        return rate / 3 if three else rate
    return sms * (machine.mma_tf32x3 if three else machine.mma_tf32 if tf32 else machine.mma_16bit)


def describe(cost):
    """One line about a ``_ffi.Cost``: what it adds up from."""
    shares = cost.peers > 1
    parts = {
        "to launch": cost.launches,
        "to copy operands": cost.repack,
        "to clear counters" if shares else "to add slices of K": cost.extra,
        "for the main loop and epilogue": cost.microseconds - cost.launches - cost.repack - cost.extra,
    }
    fix_up = f", of which fix-up of tiles that {cost.peers:.0f} workers share {duration(cost.fix_up)}" if shares else ""
    return f"estimated {durations(parts)}{fix_up}"
