"""What candidate plans are expected to cost, all of them at once, as NumPy arrays.

On a GPU this is the cost model of Osama et al., "Stream-K" (2023), section 5: the busiest worker takes
``a + b*[it fixes up] + c*iterations + d*(peers - 1)``, under floors of the bytes that must come from memory and of the power that
tensor cores may draw. ``c`` follows from the tile: what tensor cores, the SM's loads and the L2 cache need for one MAC iteration.
All times are in microseconds. benchmarks/fit_cost_model.py fits the constants of a ``Machine``.
"""

import dataclasses

import numpy as np

from jax_streamk import _ffi
from jax_streamk.problem import BYTES


@dataclasses.dataclass(frozen=True)
class Machine:
    """Constants of one kind of GPU. Times in microseconds; rates in bytes or FLOPs per microsecond."""

    launch: float  # of a kernel, its first loads and its last stores included
    memory_rate: float  # DRAM to all SMs
    cache_rate: float  # L2 to all SMs, a multicast counted once
    load_rate_sm: float  # into the shared memory of one SM
    wgmma_rate_sm: float  # tensor cores of one SM at boost clock, 16-bit operands
    wgmma_sustained: float  # all SMs together, by power
    mma_rate_sm: dict  # of mma.sync on large tiles: by (operand bytes, math)
    narrow: float  # columns of tile_n that a MAC iteration loses where two warpgroups share the tile
    uneven: float  # factor on wgmma of a tile_n that is no multiple of 64, B being contiguous along n
    misaligned: float  # factor on loads of rows that do not start on 128-byte lines
    epilogue: float  # of a tile of 128 x 128
    fix_up: float  # fences and ticket at a shared tile
    partial_rate_sm: float  # partials that one SM writes or reads
    memset: float  # the node that zeroes tickets
    reduction: float  # the kernel that adds the slices of a separate split-K
    reduction_slice: float  # ... more for each slice, which its threads add one after another
    reduction_rate: float  # ... partials it reads


# Fitted by benchmarks/fit_cost_model.py to plain CUTLASS kernels on an H200, but for mma_rate_sm and from fix_up on, which are
# estimates.
H200 = Machine(
    launch=3.46,
    memory_rate=4.2e6,
    cache_rate=1.19e7,
    load_rate_sm=1.77e5,
    wgmma_rate_sm=8.13e6,
    wgmma_sustained=1.21e9,
    mma_rate_sm={
        (2, _ffi.Math.native): 4.0e6,
        (4, _ffi.Math.tf32): 2.0e6,
        (4, _ffi.Math.tf32x3): 0.65e6,
        (8, _ffi.Math.native): 0.35e6,
    },
    narrow=17.6,
    uneven=1.30,
    misaligned=1.48,
    epilogue=0.84,
    fix_up=1.5,
    partial_rate_sm=6.0e4,
    memset=1.6,
    reduction=2.2,
    reduction_slice=0.04,
    reduction_rate=4.0e6,
)

# From the A100 SXM 80 GB datasheet at usual efficiencies; never fitted. It also stands in for GPUs that nobody measured.
A100 = dataclasses.replace(
    H200,
    launch=4.0,
    memory_rate=1.7e6,
    cache_rate=5.0e6,
    load_rate_sm=8.0e4,
    mma_rate_sm={
        (2, _ffi.Math.native): 2.5e6,
        (4, _ffi.Math.tf32): 1.2e6,
        (4, _ffi.Math.tf32x3): 0.4e6,
        (8, _ffi.Math.native): 0.16e6,
    },
    partial_rate_sm=3.0e4,
    reduction_rate=1.5e6,
)


def machine_of(device):
    return H200 if device.arch == 90 else A100


class Kernels:
    """Kernels and the numbers of them that a cost depends on, as columns of shape (kernels, 1)."""

    def __init__(self, infos):
        self.infos = tuple(infos)

        def column(of):
            return np.array([of(info) for info in self.infos], float).reshape(-1, 1)

        self.tile_m, self.tile_n, self.tile_k = (column(lambda i, x=x: getattr(i, f"tile_{x}")) for x in "mnk")
        self.cluster_m, self.cluster_n = column(lambda i: i.cluster_m), column(lambda i: i.cluster_n)
        self.vector = column(lambda i: i.align_a)
        self.swap_ab = column(lambda i: i.swap_ab) > 0
        self.wgmma = column(lambda i: i.family == _ffi.Family.sm90) > 0
        self.pingpong = column(lambda i: i.warp_schedule == "pingpong") > 0
        self.uneven = column(_is_uneven) > 0


def _is_uneven(info):
    b_along_n = info.major_a == _ffi.Major.column if info.swap_ab else info.major_b == _ffi.Major.row
    return info.tile_n % 64 != 0 and b_along_n


@dataclasses.dataclass(frozen=True)
class Schedules:
    """Schedules as arrays that broadcast against ``Kernels``: ``splits`` is 1 where K is not split by number."""

    splits: np.ndarray
    stream_k: np.ndarray
    separate: np.ndarray


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """What cutlass_kernels/decomposition.h makes of candidates, in numbers.

    Attributes:
      rows, columns: extents that the kernel's own tile_m and tile_n run along.
      tiles: output tiles, a cluster's being one.
      workers: clusters or threads that work at once.
      busy: of them, with work.
      pieces: of the busiest worker.
      iterations: of the busiest worker, MAC iterations.
      peers: of a shared tile, at most; 1 where none is shared.
      launches: kernels that a separate split-K launches before its reduction, each on slices of one length; else 1.
    """

    rows: np.ndarray
    columns: np.ndarray
    tiles: np.ndarray
    workers: np.ndarray
    busy: np.ndarray
    pieces: np.ndarray
    iterations: np.ndarray
    peers: np.ndarray
    launches: np.ndarray


def decompose(kernels, problem, schedules, width):
    """The ``Decomposition`` of every candidate on a machine `width` SMs or threads wide."""
    rows = np.where(kernels.swap_ab, problem.n, problem.m)
    columns = np.where(kernels.swap_ab, problem.m, problem.n)
    tiles_m = np.ceil(rows / (kernels.tile_m * kernels.cluster_m))
    tiles = problem.batch * tiles_m * np.ceil(columns / (kernels.tile_n * kernels.cluster_n))
    k_tiles = np.ceil(problem.k / kernels.tile_k)
    workers = np.maximum(width // (kernels.cluster_m * kernels.cluster_n), 1)
    splits = np.minimum(schedules.splits, k_tiles)

    # Data-parallel is split-K in one. The first k_tiles % splits runs of a tile are one iteration longer, and come first.
    base, longer = k_tiles // splits, k_tiles % splits
    pieces, pieces_longer = np.ceil(tiles * splits / workers), np.ceil(tiles * longer / workers)
    iterations = pieces * base + pieces_longer
    busy = np.minimum(workers, tiles * splits)
    peers = np.where(schedules.separate, 1, splits)

    # Separate: the longer slices, the shorter ones, and one that K cuts short are launched one after another.
    cut_short = (problem.k % kernels.tile_k != 0) & (splits > 1)
    shorter = splits - longer - cut_short
    launches = np.minimum(((longer > 0) * 1 + (shorter > 0) + cut_short) * problem.batch, splits)
    launches = np.where(schedules.separate, launches, 1)
    pieces_shorter = np.ceil(tiles * shorter / workers) + np.ceil(tiles * cut_short / workers)
    pieces = np.where(schedules.separate, pieces_longer + pieces_shorter, pieces)
    iterations = np.where(schedules.separate, pieces_longer * (base + 1) + pieces_shorter * base, iterations)

    # Stream-K cuts the tiles of the last, partial wave and of a full one before it.
    whole_waves = np.maximum(tiles // workers - 1, 0)
    cut = (tiles - whole_waves * workers) * k_tiles
    share = np.ceil(cut / np.minimum(workers, cut))
    sharing = np.where(share >= k_tiles, 2, np.ceil(k_tiles / share) + (k_tiles % share != 0))
    streams = schedules.stream_k & (tiles % workers != 0) & (workers > 1)
    pieces = np.where(streams, whole_waves + np.ceil(share / k_tiles) + (share % k_tiles != 0), pieces)
    iterations = np.where(streams, whole_waves * k_tiles + share, iterations)
    busy = np.where(streams, np.minimum(workers, tiles * k_tiles), busy)
    peers = np.where(streams, sharing, peers)
    return Decomposition(rows, columns, tiles, workers, busy, pieces, iterations, peers, launches)


@dataclasses.dataclass(frozen=True)
class Cost:
    """One candidate's estimate and what it is made of; times in microseconds.

    Attributes:
      microseconds: of the whole call.
      waves: output tiles, times splits, over workers.
      iterations: MAC iterations of the busiest worker.
      peers: workers that share a tile, at most.
      work: the busiest worker's time, fix-up included.
      fix_up: of that, storing and adding partial tiles.
      floor: what memory or power needs for the problem whatever the tile; it overlaps with `work`.
      launches: kernel launches.
      extra: the memset, and the reduction kernel.
    """

    microseconds: float
    waves: float
    iterations: float
    peers: float
    work: float
    fix_up: float
    floor: float
    launches: float
    extra: float

    def __str__(self):
        extra = f", {self.extra:.1f} to zero tickets or add slices" if self.extra else ""
        fix_up = f", {self.fix_up:.1f} of them to fix up tiles of {self.peers:.0f} peers" if self.peers > 1 else ""
        floor = f", over which memory or power needs {self.floor:.1f}" if self.floor else ""
        return (
            f"{self.microseconds:.1f} us: {self.launches:.1f} to launch{extra}, {self.work:.1f} of the busiest worker "
            f"({self.waves:.2f} waves, {self.iterations:.0f} MAC iterations{fix_up}){floor}"
        )


@dataclasses.dataclass(frozen=True)
class Costs:
    """The ``Cost`` of every candidate: the same fields, as arrays that broadcast to (kernels, schedules)."""

    microseconds: np.ndarray
    waves: np.ndarray
    iterations: np.ndarray
    peers: np.ndarray
    work: np.ndarray
    fix_up: np.ndarray
    floor: np.ndarray
    launches: np.ndarray
    extra: np.ndarray

    def at(self, kernel, schedule):
        values = (np.broadcast_to(getattr(self, field.name), self.microseconds.shape) for field in dataclasses.fields(Cost))
        return Cost(*(float(value[kernel, schedule]) for value in values))


# How nearly the slowest of several overlapping things hides the others: exponents of the norm that joins them.
_OVERLAP_ITERATION, _OVERLAP_CALL = 3, 4


def predict_gpu(kernels, problem, schedules, sms, machine):
    """The ``Costs`` of a ``GemmProblem`` on every kernel under every schedule."""
    d = decompose(kernels, problem, schedules, sms)
    size, accumulator = BYTES[problem.type_a], 8 if problem.type_a == _ffi.Type.f64 else 4
    tile_bytes = kernels.tile_m * kernels.tile_n * accumulator
    area = kernels.tile_m * kernels.tile_n / (128 * 128)

    c = _iteration(kernels, problem, d, size, machine)
    fix_up = machine.fix_up + (1 + d.peers) * tile_bytes / machine.partial_rate_sm
    fix_up = np.where(d.peers > 1, fix_up, 0.0)
    work = c * d.iterations + machine.epilogue * area * d.pieces + fix_up

    power = np.where(kernels.wgmma, problem.flops / machine.wgmma_sustained, 0.0)
    floor = np.maximum(problem.bytes / machine.memory_rate, power)

    partials = schedules.splits * (problem.batch * problem.m * problem.n * accumulator)
    reduction = machine.reduction + machine.reduction_slice * schedules.splits + partials / machine.reduction_rate
    extra = np.where(schedules.separate, reduction, np.where(d.peers > 1, machine.memset, 0.0))
    launches = machine.launch * d.launches
    overlapped = (work**_OVERLAP_CALL + floor**_OVERLAP_CALL) ** (1 / _OVERLAP_CALL)
    waves = d.tiles * schedules.splits / d.workers
    return Costs(launches + overlapped + extra, waves, d.iterations, d.peers, work, fix_up, floor, launches, extra)


def _iteration(kernels, problem, d, size, machine):
    """Microseconds of one MAC iteration of one worker."""
    # Cooperating warpgroups lose a fixed time per iteration, as if the tile were wider; mma.sync loses where warps reuse little.
    narrow = np.where(kernels.pingpong, 0.0, machine.narrow)
    wgmma = 2 * kernels.tile_m * (kernels.tile_n + narrow) * kernels.tile_k / machine.wgmma_rate_sm
    wgmma = wgmma * np.where(kernels.uneven, machine.uneven, 1.0)
    area = kernels.tile_m * kernels.tile_n
    rate = machine.mma_rate_sm[size, problem.math] * np.minimum(area / (128 * 128), 1.0) ** 0.35
    math = np.where(kernels.wgmma, wgmma, 2 * area * kernels.tile_k / rate)

    # Rows and columns beyond the problem are not loaded. Vectors below 16 bytes take more requests for the same bytes.
    tile_rows, tile_columns = np.minimum(kernels.tile_m, d.rows), np.minimum(kernels.tile_n, d.columns)
    lines = (problem.lda * size % 128 != 0) | (problem.ldb * size % 128 != 0)
    panel = kernels.tile_k * size * np.where(lines, machine.misaligned, 1.0) / np.minimum(kernels.vector * size / 16, 1.0) ** 0.5
    loads = (tile_rows + tile_columns) * panel / machine.load_rate_sm
    multicast = tile_rows / kernels.cluster_n + tile_columns / kernels.cluster_m
    ctas = d.busy * kernels.cluster_m * kernels.cluster_n
    # CTAs of the first wave run in step, so that L2 joins their requests; later they drift apart.
    drifted = 1 - 1 / d.pieces
    cache = drifted * ctas * multicast * panel / machine.cache_rate
    p = _OVERLAP_ITERATION
    return (math**p + loads**p + cache**p) ** (1 / p)


# A CPU thread: microseconds a multiply-add, an element of an operand's tile packed, an element of a partial tile stored or added.
# Waking other threads costs a small product more than its arithmetic. Only ratios matter.
_HOST_MULTIPLY_ADD, _HOST_PACK, _HOST_PARTIAL, _HOST_WAKE = 1.2e-5, 2e-4, 5e-4, 20.0


def predict_host(kernels, problem, schedules, threads):
    """The ``Costs`` on CPU threads: MAC iterations of the busiest one, and the partials it shares."""
    d = decompose(kernels, problem, dataclasses.replace(schedules, separate=np.zeros_like(schedules.separate)), threads)
    rows, columns = np.minimum(kernels.tile_m, d.rows), np.minimum(kernels.tile_n, d.columns)
    c = np.minimum(kernels.tile_k, problem.k) * (_HOST_MULTIPLY_ADD * rows * columns + _HOST_PACK * (rows + columns))
    fix_up = np.where(d.peers > 1, _HOST_PARTIAL * rows * columns * (1 + d.peers), 0.0)
    work = c * d.iterations + fix_up
    launch = np.where(d.busy > 1, _HOST_WAKE, 1.0)
    waves, none = d.tiles * schedules.splits / d.workers, np.array(0.0)
    return Costs(launch + work, waves, d.iterations, d.peers, work, fix_up, none, launch, none)
