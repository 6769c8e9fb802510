"""What candidate plans are expected to cost, all of them at once, as NumPy arrays.

On a GPU this is the cost model of Osama et al., "Stream-K" (2023), section 5: the busiest worker takes
``a + b*[it fixes up] + c*iterations + d*(peers - 1)``, over a floor of the bytes that must come from memory. ``c`` follows from the
tile and from which tiles run together: what tensor cores, the SM's loads and the L2 cache need for one MAC iteration.
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
    relaunch: float  # of each further kernel of a call
    memory_rate: float  # DRAM to all SMs
    cache_rate: float  # L2 to all SMs, a multicast counted once
    gpc_rate: float  # L2 to all GPCs, what SMs of one load together counted once
    drift: float  # share of what SMs load together in the first wave that they load apart in later ones
    misaligned_drift: float  # ... in every wave, of an operand whose rows do not start on 128-byte lines
    load_rate_sm: float  # into the shared memory of one SM
    line: float  # per CTA that wants the same 128-byte line at once, and 64 of K
    wgmma_rate_sm: float  # tensor cores of one SM at boost clock, 16-bit operands
    wgmma_sustained: float  # all SMs together, by power
    mma_rate_sm: dict  # of mma.sync on large tiles: by (operand bytes, math)
    narrow: float  # columns of tile_n that a MAC iteration of wgmma loses
    uneven: float  # factor on wgmma of a tile_n that is no multiple of 64, B being contiguous along n
    misaligned_k: float  # factor on loads of an operand contiguous along K whose rows do not start on 128-byte lines
    misaligned_mn: float  # ... of one contiguous along m or n
    epilogue: float  # of a tile of 128 x 128
    fix_up: float  # fences and ticket at a shared tile
    partial_rate_sm: float  # partials that one SM writes or reads
    memset: float  # the node that zeroes tickets
    reduction: float  # the kernel that adds the slices of a separate split-K
    reduction_slice: float  # ... more for each slice, which its threads add one after another
    reduction_rate: float  # ... partials it reads


# Fitted by benchmarks/fit_cost_model.py to benchmarks/results/plans_h200_2026-11-20.csv.gz, but for mma_rate_sm, an estimate.
H200 = Machine(
    launch=3.55,
    relaunch=3.0,
    memory_rate=5.03e6,
    cache_rate=4.54e7,
    gpc_rate=1.18e7,
    drift=0.27,
    misaligned_drift=0.52,
    load_rate_sm=6.95e5,
    line=0.0006,
    wgmma_rate_sm=9.87e6,
    wgmma_sustained=8.51e8,
    mma_rate_sm={
        (2, _ffi.Math.native): 4.0e6,
        (4, _ffi.Math.tf32): 2.0e6,
        (4, _ffi.Math.tf32x3): 0.65e6,
        (8, _ffi.Math.native): 0.35e6,
    },
    narrow=51.2,
    uneven=1.62,
    misaligned_k=1.14,
    misaligned_mn=1.49,
    epilogue=1.23,
    fix_up=2.77,
    partial_rate_sm=1.14e5,
    memset=1.0,
    reduction=2.26,
    reduction_slice=0.083,
    reduction_rate=5.36e6,
)

# From the A100 SXM 80 GB datasheet at usual efficiencies; never fitted. It also stands in for GPUs that nobody measured.
A100 = dataclasses.replace(
    H200,
    launch=4.0,
    memory_rate=1.7e6,
    cache_rate=5.0e6,
    gpc_rate=4.0e6,
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
      floor: what memory needs for the problem whatever the tile; it overlaps with `work`.
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
        floor = f", over which memory needs {self.floor:.1f}" if self.floor else ""
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


# Which tiles run side by side: what a wave of them needs of A and B.

ORDERS = tuple((raster, swizzle) for swizzle in (1, 2, 4, 8, 16) for raster in ("m", "n"))
# Which workers of a wave sit on one GPC, so that what they load together is fetched once. Measured by ordering tiles in many ways:
# CTAs launched without clusters behave as if sixteen neighbours did, clusters as if every eighth or, about as often, ninth did.
_NEIGHBOURS, _STARTS, _STRIDES = 16, (0, 40), (8, 9)


@dataclasses.dataclass(frozen=True)
class Wave:
    """Rows of A and columns of B that one wave of whole tiles needs at once.

    Attributes:
      rows, columns: of all GPCs added up, a GPC's own CTAs sharing what they load.
      footprint: rows and columns of the whole wave, which shares them in L2.
      tiles: output tiles of one batch, a cluster's being one.
    """

    rows: np.ndarray
    columns: np.ndarray
    footprint: np.ndarray
    tiles: np.ndarray


def first_wave(kernels, problem, width, along_m, swizzle):
    """The ``Wave`` of every kernel under orders of tiles: arrays that broadcast against (kernels, 1)."""
    rows = np.where(kernels.swap_ab, kernels.tile_n * kernels.cluster_n, kernels.tile_m * kernels.cluster_m)
    columns = np.where(kernels.swap_ab, kernels.tile_m * kernels.cluster_m, kernels.tile_n * kernels.cluster_n)
    tiles_m, tiles_n = np.ceil(problem.m / rows), np.ceil(problem.n / columns)
    tiles = tiles_m * tiles_n
    workers = np.minimum(np.maximum(width // (kernels.cluster_m * kernels.cluster_n), 1), tiles)
    fast, slow = np.where(along_m, tiles_m, tiles_n), np.where(along_m, tiles_n, tiles_m)
    panel_width = np.minimum(swizzle, slow)

    # TileOrder::coordinate of the workers of one GPC, or of two that stand for all.
    deep = [np.expand_dims(x, -1).astype(np.int32) for x in np.broadcast_arrays(fast, slow, panel_width, workers)]
    alone = np.expand_dims(kernels.cluster_m * kernels.cluster_n == 1, -1)
    distinct_fast, distinct_slow = 0.0, 0.0
    for start, stride in zip(_STARTS, _STRIDES):
        index = np.arange(max(_NEIGHBOURS, -(-width // stride)), dtype=np.int32)
        start = np.where(deep[3] > start, start, 0)
        worker = np.where(alone, start + index, index * stride)
        runs = (worker < deep[3]) & ~(alone & (index >= _NEIGHBOURS))
        panel, within = np.divmod(worker, deep[0] * deep[2])
        f, s = np.divmod(within, np.clip(deep[1] - panel * deep[2], 1, deep[2]))
        gpcs_worth = workers / runs.sum(-1) / len(_STRIDES)
        distinct_fast = distinct_fast + gpcs_worth * _distinct(f, runs)
        distinct_slow = distinct_slow + gpcs_worth * _distinct(s + panel * deep[2], runs)
    panels = np.ceil(workers / (fast * panel_width))
    down = np.where(panels == 1, np.ceil(workers / panel_width), fast)
    across = np.minimum(panels * panel_width, slow)

    rows, columns = np.minimum(rows, problem.m), np.minimum(columns, problem.n)
    return Wave(
        np.where(along_m, distinct_fast, distinct_slow) * rows,
        np.where(along_m, distinct_slow, distinct_fast) * columns,
        np.where(along_m, down, across) * rows + np.where(along_m, across, down) * columns,
        tiles,
    )


def _distinct(values, counts):
    """How many different values there are along the last axis, of those that count."""
    values = np.sort(np.where(counts, values, -1), axis=-1)
    return (values[..., 1:] != values[..., :-1]).sum(-1) + (values[..., 0] >= 0)


def needs(wave, machine):
    """What orders of tiles are ranked by: the time in which the caches can serve a wave, per element of K."""
    return (wave.rows + wave.columns) / machine.gpc_rate + wave.footprint / machine.memory_rate


def best_orders(kernels, problem, width, machine):
    """For every kernel the order of tiles, of ORDERS, whose waves need the least, and that ``Wave``."""
    along_m, swizzle = np.array([raster == "m" for raster, _ in ORDERS]), np.array([swizzle for _, swizzle in ORDERS])
    wave = first_wave(kernels, problem, width, along_m, swizzle)
    best = np.argmin(needs(wave, machine), axis=1, keepdims=True)
    chosen = (np.take_along_axis(x, best, axis=1) for x in (wave.rows, wave.columns, wave.footprint))
    return [ORDERS[order] for order in best.flat], Wave(*chosen, wave.tiles)


# How nearly the slowest of several overlapping things hides the others: exponents of the norm that joins them.
_OVERLAP_ITERATION, _OVERLAP_CALL = 5, 1.6


def predict_gpu(kernels, problem, schedules, sms, machine, wave):
    """The ``Costs`` of a ``GemmProblem`` on every kernel under every schedule, tiles being ordered in such waves."""
    d = decompose(kernels, problem, schedules, sms)
    accumulator = 8 if problem.type_a == _ffi.Type.f64 else 4
    tile_bytes = kernels.tile_m * kernels.tile_n * accumulator
    area = kernels.tile_m * kernels.tile_n / (128 * 128)

    c = _iteration(kernels, problem, schedules, d, wave, machine)
    # Split-K shares every piece of a worker; of those that Stream-K shares the last one is waited for.
    shared = np.where(d.peers > 1, np.where(schedules.stream_k, 1, d.pieces), 0)
    fix_up = shared * (machine.fix_up + (1 + d.peers) * tile_bytes / machine.partial_rate_sm)
    work = c * d.iterations + machine.epilogue * area * d.pieces + fix_up
    floor = np.array(problem.bytes / machine.memory_rate)

    partials = schedules.splits * (problem.batch * problem.m * problem.n * accumulator)
    reduction = machine.reduction + machine.reduction_slice * schedules.splits + partials / machine.reduction_rate
    extra = np.where(schedules.separate, reduction, np.where(d.peers > 1, machine.memset, 0.0))
    launches = machine.launch + machine.relaunch * (d.launches - 1)
    overlapped = (work**_OVERLAP_CALL + floor**_OVERLAP_CALL) ** (1 / _OVERLAP_CALL)
    waves = d.tiles * schedules.splits / d.workers
    return Costs(launches + overlapped + extra, waves, d.iterations, d.peers, work, fix_up, floor, launches, extra)


def _iteration(kernels, problem, schedules, d, wave, machine):
    """Microseconds of one MAC iteration of one worker."""
    size = BYTES[problem.type_a]
    ctas = d.busy * kernels.cluster_m * kernels.cluster_n
    # wgmma loses a fixed time per iteration, as if the tile were wider; mma.sync loses where warps reuse little.
    area = kernels.tile_m * kernels.tile_n
    wgmma = 2 * kernels.tile_m * (kernels.tile_n + machine.narrow) * kernels.tile_k / machine.wgmma_rate_sm
    wgmma = wgmma * np.where(kernels.uneven, machine.uneven, 1.0)
    wgmma = np.maximum(wgmma, 2 * area * kernels.tile_k * ctas / machine.wgmma_sustained)
    rate = machine.mma_rate_sm[size, problem.math] * np.minimum(area / (128 * 128), 1.0) ** 0.35
    math = np.where(kernels.wgmma, wgmma, 2 * area * kernels.tile_k / rate)

    # Rows of A and columns of B of a CTA: those beyond the problem are not loaded. Vectors below 16 bytes take more requests for the
    # same bytes.
    tile_rows, tile_columns = np.minimum(kernels.tile_m, d.rows), np.minimum(kernels.tile_n, d.columns)
    multicast_rows, multicast_columns = tile_rows / kernels.cluster_n, tile_columns / kernels.cluster_m
    panel = kernels.tile_k * size / np.minimum(kernels.vector * size / 16, 1.0) ** 0.5
    along_k = problem.major_a == _ffi.Major.row, problem.major_b == _ffi.Major.column
    misaligned = [ld * size % 128 != 0 for ld in (problem.lda, problem.ldb)]
    panel_a, panel_b = (
        panel * np.where(off, machine.misaligned_k if k else machine.misaligned_mn, 1.0) for off, k in zip(misaligned, along_k)
    )

    def loaded(rows, columns):
        return np.where(kernels.swap_ab, columns, rows) * panel_a + np.where(kernels.swap_ab, rows, columns) * panel_b

    loads = loaded(tile_rows, tile_columns) / machine.load_rate_sm
    cache = loaded(multicast_rows, multicast_columns) * ctas / machine.cache_rate
    # A wave may hold several batches or slices of K, alike but sharing nothing. Streams of one tile are at different k.
    alike = np.clip(d.workers / wave.tiles, 1.0, problem.batch * schedules.splits)
    gpc = alike * (wave.rows * panel_a + wave.columns * panel_b)
    streams = schedules.stream_k & (d.peers > 1)
    apart = loaded(multicast_rows, multicast_columns) * ctas
    drift = np.minimum(machine.drift, 1.0) * (1 - 1 / d.pieces)
    drift = np.maximum(drift, np.minimum(machine.misaligned_drift, 1.0) * np.logical_or(*misaligned))
    drifted = np.where(streams, 1.0, drift)
    gpc = (gpc + drifted * np.maximum(apart - gpc, 0.0)) / machine.gpc_rate

    # CTAs that load the same panel queue for its lines, a line of which holds several short rows of an operand.
    side_by_side = np.minimum(d.workers / wave.tiles, 1.0)
    tiles_m = np.ceil(d.rows / (kernels.tile_m * kernels.cluster_m))
    tiles_n = np.ceil(d.columns / (kernels.tile_n * kernels.cluster_n))
    short_a, short_b = (np.maximum(128 / (ld * size), 1.0) for ld in (problem.lda, problem.ldb))
    queue_a = np.where(kernels.swap_ab, tiles_m, tiles_n) * short_a
    queue_b = np.where(kernels.swap_ab, tiles_n, tiles_m) * short_b
    line = machine.line * side_by_side * np.maximum(queue_a, queue_b) * kernels.tile_k / 64
    p = _OVERLAP_ITERATION
    return (math**p + (loads + gpc) ** p + cache**p + line**p) ** (1 / p)


# A CPU thread: microseconds a multiply-add, an element of an operand's tile packed, an element of a partial tile stored or added.
# Waking other threads costs a small product more than its arithmetic. Only ratios matter: of the speed of a tile of 256x512, one of
# 128x128 was measured to have about nine tenths and one of 64x64 three quarters.
_HOST_MULTIPLY_ADD, _HOST_PACK, _HOST_PARTIAL, _HOST_WAKE = 1.2e-5, 1.7e-4, 5e-4, 20.0


def predict_host(kernels, problem, schedules, threads):
    """The ``Costs`` on CPU threads: MAC iterations of the busiest one, and the partials it shares."""
    d = decompose(kernels, problem, dataclasses.replace(schedules, separate=np.zeros_like(schedules.separate)), threads)
    k_tiles = np.ceil(problem.k / kernels.tile_k)

    def iteration(rows, columns):
        return problem.k / k_tiles * (_HOST_MULTIPLY_ADD * rows * columns + _HOST_PACK * (rows + columns))

    # Tiles at the edge are multiplied as far as they reach. The busiest thread has its part of the full tiles or of all work,
    # whichever is more; in Stream-K its iterations may all be of full tiles.
    rows, columns = np.minimum(kernels.tile_m, d.rows), np.minimum(kernels.tile_n, d.columns)
    full, full_tiles = iteration(rows, columns), problem.batch * (d.rows // rows) * (d.columns // columns)
    splits = np.minimum(schedules.splits, k_tiles)
    of_full = np.ceil(full_tiles * splits / d.workers) * (k_tiles // splits) + np.ceil(full_tiles * (k_tiles % splits) / d.workers)
    average = iteration(d.rows / np.ceil(d.rows / kernels.tile_m), d.columns / np.ceil(d.columns / kernels.tile_n))
    streams = schedules.stream_k & (d.peers > 1)
    work = np.where(streams, full * d.iterations, np.maximum(full * of_full, average * d.tiles * k_tiles / d.busy))
    # Every piece of a split tile is stored once and added once; Stream-K shares two tiles of a thread at most.
    shared = np.where(streams, 2 + d.peers, 2 * d.pieces)
    fix_up = np.where(d.peers > 1, _HOST_PARTIAL * rows * columns * shared, 0.0)
    work = work + fix_up
    launch = np.where(d.busy > 1, _HOST_WAKE, 1.0)
    waves, none = d.tiles * schedules.splits / d.workers, np.array(0.0)
    return Costs(launch + work, waves, d.iterations, d.peers, work, fix_up, none, launch, none)
