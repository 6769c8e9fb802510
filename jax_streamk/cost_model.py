"""What a plan is expected to cost.

On a GPU this is the cost model of Osama et al., "Stream-K" (2023), section 5: the busiest worker's time is
``a + b*[it fixes up] + c*iterations + d*(peers - 1)``, under a floor of the bytes that must come from memory. ``c`` follows from the
tile: it is what the tensor cores or the loads of one MAC iteration take, whichever is more. Constants in microseconds, fitted by
benchmarks/fit_cost_model.py.
"""

import dataclasses
import math

from jax_streamk import _ffi
from jax_streamk.problem import BYTES


@dataclasses.dataclass(frozen=True)
class Machine:
    """Constants of one kind of GPU. Times in microseconds, rates in bytes or FLOPs per microsecond."""

    memory_rate: float  # DRAM, whole device
    memory_rate_sm: float  # most that one SM draws
    cache_rate: float  # L2 to all SMs together
    flops_sm: dict  # math -> of one SM's tensor cores, at full efficiency
    launch: float  # first instruction to last, of a kernel that does nothing
    memset: float  # an extra node that zeroes tickets
    reduction: float  # an extra kernel that adds slices
    tile_start: float  # filling the pipeline at the head of a worker's run
    tile_end: float  # epilogue of a tile that nothing hides
    fix_up: float  # ticket and synchronization at a shared tile
    partial_rate_sm: float  # bytes of partials one SM writes or reads


H200 = Machine(
    memory_rate=4.2e6,
    memory_rate_sm=6.0e4,
    cache_rate=6.5e6,
    flops_sm={_ffi.Math.native: 5.6e6, _ffi.Math.tf32: 2.0e6, _ffi.Math.tf32x3: 0.7e6},
    launch=2.2,
    memset=1.6,
    reduction=2.2,
    tile_start=0.9,
    tile_end=0.7,
    fix_up=1.0,
    partial_rate_sm=5.0e4,
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The estimate and what it is made of.

    Attributes:
      microseconds: of the whole call.
      waves: output tiles (or pieces of work) over workers.
      iterations: MAC iterations of the busiest worker.
      peers: workers that share a tile, at most.
      bound: what the busiest worker waits for: "memory", "loads" or "math".
    """

    microseconds: float
    waves: float
    iterations: int
    peers: int
    bound: str

    def __str__(self):
        return (
            f"{self.microseconds:.1f} us: {self.waves:.2f} waves, {self.iterations} MAC iterations on the busiest worker, "
            f"{self.peers} peers a tile, bound by {self.bound}"
        )


def efficiency(kernel):
    """The share of the tensor cores' rate that a tile of this shape sustains."""
    rows, columns = (kernel.tile_m, kernel.tile_n)
    if kernel.family == _ffi.Family.sm90:
        # wgmma reads B from shared memory once for 64 rows: narrow tiles wait for shared memory.
        per_warpgroup = rows if kernel.warp_schedule == "pingpong" else rows // 2
        return min(1.0, columns / 128) ** 0.5 * (1.0 if per_warpgroup * columns >= 64 * 128 else 0.85)
    # mma.sync on Hopper reaches about 60% of wgmma, less where warps have little to reuse.
    return 0.55 * min(1.0, rows * columns / (128 * 128)) ** 0.35


def predict_gpu(kernel, problem, schedule, device, machine=H200):
    """The ``Cost`` of a problem on a kernel under a native schedule (kind, splits, reduction)."""
    m, n = (problem.n, problem.m) if kernel.swap_ab else (problem.m, problem.n)
    tiles_m = -(-m // (kernel.tile_m * kernel.cluster_m)) * kernel.cluster_m
    tiles_n = -(-n // (kernel.tile_n * kernel.cluster_n)) * kernel.cluster_n
    tiles = problem.batch * tiles_m * tiles_n
    k_tiles = -(-problem.k // kernel.tile_k)
    cluster = kernel.cluster_m * kernel.cluster_n
    workers = max(device.sms // cluster * cluster, 1)
    size = BYTES[problem.type_a]

    kind, splits, reduction = schedule
    separate = kind == _ffi.ScheduleKind.split_k and splits > 1 and reduction == _ffi.Reduction.separate
    peers = 1
    if kind == _ffi.ScheduleKind.split_k and splits > 1:
        pieces, longest, peers = tiles * splits, -(-k_tiles // splits), splits
        rounds = -(-pieces // workers)
        iterations = rounds * longest
        waves = pieces / workers
        if separate:
            peers = 1
    elif kind == _ffi.ScheduleKind.stream_k and tiles % workers:
        waves = tiles / workers
        whole = max(tiles // workers - 1, 0)
        cut = tiles - whole * workers
        share = -(-cut * k_tiles // workers)
        iterations = whole * k_tiles + share
        peers = -(-k_tiles // share) + (1 if k_tiles % share else 0) if share < k_tiles else 2
        rounds = whole + max(1, -(-cut // workers))
    else:
        rounds = -(-tiles // workers)
        iterations = rounds * k_tiles
        waves = tiles / workers
        pieces = tiles

    # One MAC iteration of one worker.
    busy = min(workers, tiles * max(splits, 1) if kind != _ffi.ScheduleKind.stream_k else workers)
    bytes_loaded = (kernel.tile_m / kernel.cluster_n + kernel.tile_n / kernel.cluster_m) * kernel.tile_k * size
    math_time = 2 * kernel.tile_m * kernel.tile_n * kernel.tile_k / (machine.flops_sm[problem.math] * efficiency(kernel))
    load_time = bytes_loaded / min(machine.memory_rate_sm, machine.cache_rate / busy)
    c = max(math_time, load_time)

    tile_bytes = kernel.tile_m * kernel.tile_n * 4
    hidden = kernel.warp_schedule == "pingpong" and rounds > 1
    work = c * iterations + machine.tile_start + machine.tile_end * (1 if hidden else rounds)
    if peers > 1:
        work += machine.fix_up + (1 + peers) * tile_bytes / machine.partial_rate_sm
    floor = problem.bytes / machine.memory_rate + machine.tile_start
    extra = 0.0
    if separate:
        partials = splits * problem.batch * problem.m * problem.n * 4
        extra = machine.reduction + 2 * partials / machine.cache_rate
    elif peers > 1:
        extra = machine.memset
    bound = "memory" if floor > work else "loads" if load_time > math_time else "math"
    # Memory and the busiest worker overlap, but not perfectly.
    overlapped = (work**4 + floor**4) ** 0.25
    return Cost(machine.launch + overlapped + extra, waves, iterations, splits if separate else peers, bound)


def predict_host(kernel, problem, schedule, device):
    """The ``Cost`` on CPU threads: MAC iterations of the busiest thread, plus a pass over the partials it shares."""
    tiles = problem.batch * -(-problem.m // kernel.tile_m) * -(-problem.n // kernel.tile_n)
    k_tiles = -(-problem.k // kernel.tile_k)
    workers = device.sms
    kind, splits, _ = schedule
    # Half a microsecond a million multiply-adds is an AVX2 core; only ratios matter here.
    tile_m, tile_n = min(kernel.tile_m, problem.m), min(kernel.tile_n, problem.n)
    c = tile_m * tile_n * min(kernel.tile_k, problem.k) * 2e-5
    partial = tile_m * tile_n * 1e-3
    if kind == _ffi.ScheduleKind.split_k and splits > 1:
        pieces, longest, peers = tiles * splits, -(-k_tiles // splits), splits
        iterations = -(-pieces // workers) * longest
    elif kind == _ffi.ScheduleKind.stream_k and tiles % workers:
        whole = max(tiles // workers - 1, 0)
        share = -(-(tiles - whole * workers) * k_tiles // workers)
        iterations, peers = whole * k_tiles + share, 2 if share >= k_tiles else -(-k_tiles // share) + 1
    else:
        iterations, peers = -(-tiles // workers) * k_tiles, 1
    time = 2.0 + c * iterations + (partial * (1 + peers) if peers > 1 else 0.0)
    return Cost(time, tiles / workers, iterations, peers, "math")


def split_candidates(k_tiles, tiles, workers):
    """Numbers of splits worth trying: those that fill one to four waves, and powers of two."""
    wanted = {2**i for i in range(1, 8)}
    for waves in (1, 2, 3, 4):
        wanted.add(math.floor(waves * workers / tiles))
    return sorted(s for s in wanted if 2 <= s <= k_tiles and s * tiles <= 8 * workers)
