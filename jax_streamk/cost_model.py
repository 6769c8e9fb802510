"""What GPUs can do, as the constants of the cost model in cutlass_kernels/cost_model.cc.

All times are in microseconds. benchmarks/fit_cost_model.py fits the constants of a ``Machine``.
"""

import dataclasses
import functools

from jax_streamk import _ffi


@dataclasses.dataclass(frozen=True)
class Machine:
    """Constants of one kind of GPU. Times in microseconds; rates in bytes or FLOPs per microsecond."""

    launch: float  # of a kernel, its first loads and its last stores included
    cluster: float  # more of it where 128 columns of a CTA's B are multicast
    relaunch: float  # of each further kernel of a call
    memory_rate: float  # DRAM to all SMs
    idle: float  # exponent of the share of a schedule's workers that have work, which memory's rate falls with
    beyond: float  # share by which it falls with 64 rows that A's tile has beyond the problem
    gang: float  # share by which it falls with each further CTA of a cluster
    cache_rate: float  # L2 to all SMs, a multicast counted once
    gpc_rate: float  # L2 to all GPCs, what SMs of one load together counted once
    drift: float  # share of what SMs load together in the first wave that they load apart in later ones
    misaligned_drift: float  # ... in every wave, of an operand whose rows do not start on 128-byte lines
    load_rate_sm: float  # into the shared memory of one SM
    line: float  # per CTA that wants the same 128-byte line at once, and 64 of K
    first_line: float  # ... once a call
    wgmma_rate_sm: float  # tensor cores of one SM at boost clock, 16-bit operands
    wgmma_sustained: float  # all SMs together, by power
    mma_16bit: float  # mma.sync of one SM on large tiles
    mma_tf32: float
    mma_tf32x3: float
    mma_f64: float
    narrow: float  # columns of tile_n that a MAC iteration of wgmma loses
    from_registers: float  # factor on wgmma's time where one operand comes from registers
    narrow_loads: float  # 32 of K of a CTA that is alone on its SM and loads 8 bytes at a time
    misaligned_k: float  # factor on loads of an operand contiguous along K whose rows do not start on sectors of 32 bytes
    misaligned_mn: float  # ... of one contiguous along m or n whose rows do not start on 128-byte lines
    skinny_launch: float  # of a kernel of few rows
    skinny_rate_sm: float  # what kernels of few rows load into the shared memory of one SM
    skinny_rate_16bit: float  # ... of 16-bit operands, of which the same bytes are more to multiply
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


# Fitted by benchmarks/fit_cost_model.py to benchmarks/results/plans_h200_2026-11-20.csv.gz as it was at commit f15b64a; reduction_* to
# the file as it was later, of a slower reduction than there is now. launch, relaunch, reduction and misaligned_d are such that estimates of
# plans_h200_2026-11-21.csv.gz had no bias when all operands were copied at rearrange_rate, and skinny_fix_up is what lowered its regret.
# from_registers, mma_tf32 and mma_f64 are what lowered the regret of plans_dtypes_h200_2026-11-21.csv.gz, cluster that of
# plans_more_h200_2026-11-21.csv.gz, memory_rate, idle, beyond, gang and memset that of plans_large_h200_2026-11-21.csv.gz and of all
# others, misaligned_k and misaligned_mn that of plans_tiles_h200_2026-11-21.csv.gz, and copy_rate that of
# plans_misaligned_h200_2026-11-23.csv.gz. mma_16bit, mma_tf32x3, fused, narrow_loads and half_lines are estimates.
# Most of them were then moved, by forerunners of --choices, by what the planner's choices take alone: plans_alone_decode_ and
# plans_alone_streamk_h200_2026-11-23, plans_alone_strong_ and plans_losing_h200_2026-11-24, and what bench measured of each,
# plans_pairs_h200_2026-11-24, within what tests/test_planner.py asks of the other tables, and with first_line once more; mma_f64,
# from_registers and rearrange_rate by plans_dtypes_h200_2026-11-21. reduction_sharing is what reduction_h200_2026-11-24.csv says of the
# kernel alone, and reduction nearly so. partial_rate_sm is such that 128 x 18432 by 12288 is not shared, which took an eighth longer
# (plans_numbered_decode_h200_2026-11-25).
H200 = Machine(
    launch=2.487,
    cluster=0.2164,
    relaunch=2.126,
    memory_rate=4.454e6,
    idle=0.1043,
    beyond=0.1101,
    gang=0.015,
    cache_rate=9.512e7,
    gpc_rate=1.101e7,
    drift=0.257,
    misaligned_drift=0.6085,
    load_rate_sm=5.2e5,
    line=0.0006122,
    first_line=0.00203,
    wgmma_rate_sm=9.23e6,
    wgmma_sustained=8.517e8,
    mma_16bit=4.0e6,
    mma_tf32=1.6e6,
    mma_tf32x3=0.65e6,
    mma_f64=3.95e5,
    narrow=44.01,
    from_registers=1.25,
    narrow_loads=0.37,
    misaligned_k=1.465,
    misaligned_mn=1.296,
    skinny_launch=2.49,
    skinny_rate_sm=3.793e5,
    skinny_rate_16bit=1.387e5,
    skinny_mma=1.478e6,
    skinny_alone=0.1746,
    skinny_fix_up=1.1,
    skinny_peer=0.1685,
    half_lines=1.9,
    epilogue=0.9403,
    misaligned_d=0.81,
    fused=1.2,
    overlapped=0.8799,
    copy_rate=3.424e6,
    rearrange_rate=2.639e6,
    fix_up=2.263,
    partial_rate_sm=6.2e4,
    memset=2.343,
    reduction=1.0,
    reduction_sharing=0.043,
    reduction_rate=3.34e6,
)

# An H100 SXM has the SMs of an H200, and nearly three quarters of its memory's rate: so estimates of large weights by few rows have no bias
# in plans_alone_h100_2026-11-24, and others are 7% too long. Fitting more constants to it made choices no better. An H100 PCIe, with
# slower memory, is not told apart.
H100 = dataclasses.replace(H200, memory_rate=3.25e6, copy_rate=2.5e6, rearrange_rate=1.93e6)

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


def describe(cost):
    """One line about a ``_ffi.Cost``."""
    extra = f", {cost.extra:.1f} to zero tickets or add slices" if cost.extra else ""
    extra += f", {cost.repack:.1f} to copy operands as TMA and wgmma take them" if cost.repack else ""
    fix_up = f", {cost.fix_up:.1f} of them to fix up tiles of {cost.peers:.0f} peers" if cost.peers > 1 else ""
    floor = f", over which memory needs {cost.floor:.1f}" if cost.floor else ""
    return (
        f"{cost.microseconds:.1f} us: {cost.launches:.1f} to launch{extra}, {cost.work:.1f} of the busiest worker "
        f"({cost.waves:.2f} waves, {cost.iterations:.0f} MAC iterations{fix_up}){floor}"
    )
