"""Which plan is chosen. CUDA plans are made here from a description of kernels, so that no GPU and no CUDA build is needed."""

import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streamk
from jax_streamk import DataParallel, SplitK, StreamK, _ffi, cost_model, lowering, machines, planner
from jax_streamk.device import HOPPER, Device
from jax_streamk.problem import GemmProblem
from jax_streamk.schedules import Auto
from jax_streamk.tuning import fit

BF16, F32, F64 = _ffi.Type.bf16, _ffi.Type.f32, _ffi.Type.f64
NATIVE, TF32, TF32X3 = _ffi.Math.native, _ffi.Math.tf32, _ffi.Math.tf32x3
ORDERED, SEPARATE = _ffi.Reduction.ordered, _ffi.Reduction.separate
A100 = Device("cuda", 80, 108)
CPU = Device("cpu", 0, 4)
H200 = machines.machine_of(HOPPER)
RASTERS = {"m": _ffi.Raster.along_m, "n": _ffi.Raster.along_n}


def gemm(m, n, k, type_ab=BF16, math=NATIVE, batch=1, type_d=None):
    row = _ffi.Major.row
    return GemmProblem(
        batch, m, n, k, type_ab, type_ab, type_d or type_ab, math, row, row, k, n, n, m * k, k * n, m * n
    )


def fake_kernel(
    family, type_ab, type_d, tile, cluster=(1, 1), warp_schedule="cooperative", swap_ab=False, align=8, math=NATIVE,
    major_b=_ffi.Major.row, align_b=None,
):  # fmt: skip
    reductions = [] if warp_schedule in ("pingpong", "single") else [ORDERED]
    accumulator = F64 if type_ab == F64 else F32
    parts = [
        family,
        type_ab,
        type_d,
        "x".join(map(str, tile)),
        cluster[0],
        cluster[1],
        warp_schedule,
        swap_ab,
        align,
        math,
        major_b,
        align_b,
    ]
    return _ffi.KernelInfo(
        name="_".join(str(getattr(part, "name", part)) for part in parts), family=family,
        type_a=type_ab, type_b=type_ab, type_d=type_d, math=math, major_a=_ffi.Major.row, major_b=major_b,
        **dict(zip(("tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n"), (*tile, *cluster))), align_a=align, align_b=align_b or align,
        align_d=align if family == _ffi.Family.sm80 else 1, warp_schedule=warp_schedule, swap_ab=swap_ab,
        split_k_reductions=reductions + ([SEPARATE] if type_d == accumulator else []), stream_k_reductions=reductions,
    )  # fmt: skip


def fake_kernels():
    sm90, sm80 = _ffi.Family.sm90, _ffi.Family.sm80
    found = []
    for type_d in (BF16, F32):
        for tile, cluster in [((64, 64, 128), (1, 1)), ((64, 128, 64), (1, 1)), ((128, 128, 64), (2, 1))]:
            found.append(fake_kernel(sm90, BF16, type_d, tile, cluster, "pingpong"))
        for tile in [(128, 64, 64), (128, 128, 64), (128, 256, 64)]:
            found.append(fake_kernel(sm90, BF16, type_d, tile))
        found.append(fake_kernel(sm90, BF16, type_d, (64, 16, 128), warp_schedule="pingpong", swap_ab=True))
        found.append(fake_kernel(sm90, BF16, type_d, (64, 16, 64), warp_schedule="single", swap_ab=True))
        found.append(fake_kernel(sm90, BF16, type_d, (128, 16, 128), swap_ab=True))
        found.append(fake_kernel(sm80, BF16, type_d, (128, 128, 32), warp_schedule="multistage"))
        for align in (1, 2):
            found.append(fake_kernel(sm80, BF16, type_d, (128, 64, 32), warp_schedule="multistage", align=align))
    for math in (TF32, TF32X3):
        for tile in [(128, 128, 16), (64, 64, 32)]:
            found.append(fake_kernel(sm80, F32, F32, tile, warp_schedule="multistage", align=4, math=math))
    found.append(
        fake_kernel(sm90, F32, F32, (128, 128, 32), swap_ab=True, align=4, math=TF32X3, major_b=_ffi.Major.column)
    )
    for tile in [(128, 64, 16), (64, 64, 16)]:
        found.append(fake_kernel(sm80, F64, F64, tile, warp_schedule="multistage", align=1))
    return sorted(found, key=lambda kernel: kernel.name)


@pytest.fixture
def cuda(monkeypatch):
    """Plans for GPUs, on the kernels above."""
    fakes = {kernel.name: kernel for kernel in fake_kernels()}
    monkeypatch.setattr(_ffi, "kernels", lambda: list(fakes.values()))
    planner._registry.cache_clear()
    planner.plan_with.cache_clear()

    def plan(problem, schedule=Auto(), device=HOPPER):
        made = planner.make_plan(problem, schedule, device)
        return made, fakes.get(made.kernel)

    yield plan
    planner._registry.cache_clear()
    planner.plan_with.cache_clear()


def add_kernels(monkeypatch, *more):
    """To those of ``cuda``."""
    found = [*_ffi.kernels(), *more]
    monkeypatch.setattr(_ffi, "kernels", lambda: found)
    planner._registry.cache_clear()


def estimates(problem, schedule, machine=H200):
    """The kernels above that multiply the problem's types, and an array of each figure of their costs."""
    infos = [kernel for kernel in fake_kernels() if (kernel.type_a, kernel.math) == (problem.type_a, problem.math)]
    parts = problem.native(), planner._native_schedule(schedule), HOPPER.native(), machine.native
    costs = [_ffi.estimate(info, *parts) for info in infos]
    figures = ("microseconds", "launches", "iterations", "peers", "floor")
    return infos, types.SimpleNamespace(**{name: np.array([getattr(cost, name) for cost in costs]) for name in figures})


@pytest.mark.parametrize("schedule", [DataParallel(), SplitK(4), SplitK(4, "separate")])
@pytest.mark.parametrize("extent", ["m", "n", "k"])
def test_estimate_grows_with_every_extent(schedule, extent):
    times = [
        estimates(dataclasses.replace(gemm(512, 1024, 2048), **{extent: size}), schedule)[1].microseconds
        for size in (1024, 2048, 4096, 8192, 65536)
    ]
    assert (np.diff(times, axis=0) >= 0).all()


@pytest.mark.parametrize(
    "shape", [(1000, 777, 555), (130, 4096, 520), (4096, 4096, 4096), (1, 1, 1), (257, 129, 70000)]
)
@pytest.mark.parametrize("schedule", [DataParallel(), SplitK(3), StreamK(), SplitK(5, "separate")])
def test_decomposition_is_the_one_that_runs(shape, schedule):
    """Against the native decomposition, of host kernels: iterations of the busiest worker and the most peers of a tile."""
    problem = gemm(*shape, type_ab=F32)
    for kernel in (kernel for kernel in _ffi.kernels() if kernel.name.startswith("host_f32_f32_rr_")):
        k_tiles = -(-problem.k // kernel.tile_k)
        if isinstance(schedule, SplitK) and schedule.splits > k_tiles:
            continue
        native = planner._native_schedule(schedule)
        ours = _ffi.estimate(kernel, problem.native(), native, CPU.native(), H200.native)
        workers = _ffi.decomposition(kernel.name, problem.native(), native, CPU.native())
        busiest = max(sum(k_count for _, _, k_count, _, _ in pieces) for pieces in workers)
        peers = max(piece[-1] for pieces in workers for piece in pieces)
        assert ours.iterations == busiest
        assert peers <= ours.peers <= peers + 1  # Stream-K boundaries that happen to fall on tiles spare a peer


@pytest.mark.parametrize("shape", [(512, 128, 16384), (80, 72, 65536), (256, 256, 65536)])
def test_few_tiles_and_a_long_k_are_split(cuda, shape):
    made, _ = cuda(gemm(*shape))
    assert isinstance(made.schedule, (SplitK, StreamK))


@pytest.mark.parametrize("size", [4096, 8192])
def test_many_tiles_are_not_split_by_number(cuda, size):
    made, kernel = cuda(gemm(size, size, size))
    assert isinstance(made.schedule, (DataParallel, StreamK))
    assert kernel.tile_m * kernel.tile_n >= 128 * 128


@pytest.mark.parametrize("majors", [*itertools.product((_ffi.Major.row, _ffi.Major.column), repeat=2)])
def test_copies_in_two_parts_pay_where_much_is_multiplied(cuda, majors):
    def product(m, n, k):
        lda, ldb = k if majors[0] == _ffi.Major.row else m, n if majors[1] == _ffi.Major.row else k
        return dataclasses.replace(gemm(m, n, k, F32, TF32X3), major_a=majors[0], major_b=majors[1], lda=lda, ldb=ldb)

    _, kernel = cuda(product(4096, 4096, 4090))
    assert kernel.family == _ffi.Family.sm90
    # Thrice the MAC iterations of K in whole k-tiles, after two parts of A and B, read once and written, have been copied.
    m, n, k = 1000, 3000, 4090
    cost = _ffi.estimate(
        kernel,
        product(m, n, k).native(),
        planner._native_schedule(DataParallel()),
        HOPPER.native(),
        H200.native,
    )
    assert cost.iterations % 3 == 0 and cost.iterations >= 3 * 4096 // 32
    assert cost.repack > 3 * 4 * (m + n) * k / H200.dram_bytes_per_us
    if majors == (_ffi.Major.row, _ffi.Major.row):
        assert cuda(product(64, 64, 4096))[1].family == _ffi.Family.sm80


@pytest.mark.parametrize("m", [1, 4, 16])
def test_small_m_runs_swapped(cuda, m):
    made, kernel = cuda(gemm(m, 4096, 4096))
    assert kernel.swap_ab and kernel.tile_n == 16


@pytest.mark.parametrize("k", [8, 64, 200, 1024, 65536])
def test_splits_never_exceed_k_tiles(cuda, k):
    for m, n in [(64, 64), (16, 8), (256, 512)]:
        made, kernel = cuda(gemm(m, n, k))
        if isinstance(made.schedule, SplitK):
            assert 2 <= made.schedule.splits <= -(-k // kernel.tile_k)


def test_many_splits_are_reduced_separately(cuda):
    infos, ordered = estimates(gemm(128, 128, 65536), SplitK(64))
    _, separate = estimates(gemm(128, 128, 65536), SplitK(64, "separate"))
    large = [info.tile_m * info.tile_n >= 128 * 128 for info in infos]
    assert (separate.microseconds < ordered.microseconds)[large].all()
    made, _ = cuda(gemm(64, 64, 65536))
    assert made.schedule.reduction == "separate"


def test_slices_have_one_length_and_are_no_more_than_that_takes():
    """64 k-tiles in 15 slices are 13 of 5, the last of 4: one launch, but for sm80 kernels."""
    problem = gemm(64, 64, 64 * 64)
    infos, of_15 = estimates(problem, SplitK(15, "separate"))
    _, of_13 = estimates(problem, SplitK(13, "separate"))
    _, of_16 = estimates(problem, SplitK(16, "separate"))
    ours = np.array([info.family == _ffi.Family.sm90 for info in infos])
    in_64 = np.array([info.tile_k == 64 for info in infos])
    assert (of_15.microseconds == of_13.microseconds)[in_64].all()
    assert (of_15.launches == of_16.launches)[ours].all() and (of_15.launches > of_16.launches)[~ours].all()


def test_a_product_that_memory_bounds_costs_its_bytes():
    m, n, k = 16, 65536, 8192
    _, costs = estimates(gemm(m, n, k), DataParallel())
    assert costs.microseconds.min() >= 2 * (m * k + k * n + m * n) / H200.dram_bytes_per_us


@pytest.mark.parametrize(
    "problem, device",
    [
        (gemm(512, 512, 8192, F32, TF32), HOPPER),
        (gemm(512, 512, 8192, F32, TF32X3), A100),
        (gemm(333, 100, 1000, F64), HOPPER),
        (gemm(2048, 2048, 2048), A100),
        (gemm(2048, 2048, 2048), Device("cuda", 120, 170)),
    ],
)
def test_the_sm80_family_serves_what_others_do_not(cuda, problem, device):
    made, kernel = cuda(problem, device=device)
    assert kernel.family == _ffi.Family.sm80
    assert made.microseconds > 0


@pytest.mark.parametrize(
    "m, n, k, copies",
    [(1000, 1001, 999, "ab"), (1000, 1024, 999, "a"), (1000, 1001, 1024, "b"), (1000, 1024, 1000, "")],
)
def test_misaligned_matrices_are_copied_where_that_pays(cuda, m, n, k, copies):
    made, kernel = cuda(gemm(m, n, k))
    assert kernel.family == _ffi.Family.sm90 and kernel.type_d == BF16
    best = planner.choose(gemm(m, n, k), None, HOPPER).candidates[0]
    assert ("operand copies" in cost_model.describe(best.cost)) == bool(copies)
    copied = 2 * (("a" in copies) * m * k + ("b" in copies) * k * n)  # bytes, read and written
    assert best.cost.repack >= 2 * copied / H200.dram_bytes_per_us
    # A short sum is done before the copies would be.
    assert "sm80" in planner.choose(gemm(16, 100, 7), None, HOPPER).candidates[0].kernel


@pytest.mark.parametrize(
    "m, n, k, itself",
    [(16, 50257, 768, True), (1, 32001, 4096, True), (64, 8457, 2048, False), (16, 50257, 769, False)],
)
def test_few_rows_do_not_wait_for_a_copy_of_a_misaligned_matrix(cuda, monkeypatch, m, n, k, itself):
    """A has to be aligned, which the last one is not."""
    shifted = fake_kernel(
        _ffi.Family.skinny, BF16, BF16, (64, 16, 128), warp_schedule="streaming", swap_ab=True, align_b=1
    )
    add_kernels(monkeypatch, shifted)
    assert (cuda(gemm(m, n, k))[0].kernel == shifted.name) == itself


@pytest.mark.parametrize("m, n, k", [(300, 404, 196), (512, 516, 260)])
def test_rows_that_start_on_8_bytes_are_copied_even_for_a_short_product(cuda, monkeypatch, m, n, k):
    """sm80 kernels, which load them so, take 1.2 to 1.4 times as long."""
    eight = fake_kernel(_ffi.Family.sm80, BF16, BF16, (128, 64, 32), warp_schedule="multistage", align=4)
    swapped = fake_kernel(_ffi.Family.sm90, BF16, BF16, (64, 48, 128), warp_schedule="pingpong", swap_ab=True)
    add_kernels(monkeypatch, eight, swapped)
    assert "sm90" in cuda(gemm(m, n, k))[0].kernel


@pytest.mark.parametrize("m, n, k, rows", [(16, 28672, 4096, 16), (8, 28672, 4096, 8)])
def test_three_tf32_of_few_rows_stream_past(cuda, monkeypatch, m, n, k, rows):
    """In tiles of as many rows as there are."""
    skinny = [
        fake_kernel(
            _ffi.Family.skinny, F32, F32, (64, of, 128), warp_schedule="streaming", swap_ab=True, align=4, math=TF32X3
        )
        for of in (8, 16, 32)
    ]
    add_kernels(monkeypatch, *skinny)
    assert cuda(gemm(m, n, k, F32, TF32X3))[0].kernel == skinny[rows // 16].name


def test_no_panel_is_wider_than_four_tiles():
    """Wider ones need more than what is counted tells."""
    kernel = fake_kernel(_ffi.Family.sm90, BF16, BF16, (192, 192, 64), (1, 2), swap_ab=True)
    kernels, parts = _ffi.Kernels([kernel]), (None, HOPPER.native(), H200.native)
    for m, n, k in [(1768, 7216, 1848), (2224, 4312, 2016), (8192, 8192, 8192)]:
        assert all(
            candidate.policy.swizzle <= 4
            for candidate in _ffi.choose(kernels, gemm(m, n, k).native(), *parts).candidates
        )


def test_what_is_fused_is_hidden_by_pingpong_kernels():
    """A cooperative kernel's tensor cores wait for it, tile after tile."""
    problem = gemm(2048, 14336, 4096)
    fused = dataclasses.replace(problem, activation=_ffi.Activation.silu, has_bias=True)
    infos, plain = estimates(problem, DataParallel())
    more = estimates(fused, DataParallel())[1].microseconds - plain.microseconds
    pingpong = np.array([info.warp_schedule == "pingpong" for info in infos])
    assert (more >= 0).all() and 3 * more[pingpong].max() < more[~pingpong].min()


@pytest.mark.parametrize("cluster, at_once", [((1, 1), 132), ((2, 1), 66), ((1, 2), 66), ((2, 2), 30), ((4, 1), 30)])
def test_clusters_of_four_leave_sms_idle(cluster, at_once):
    """As cudaOccupancyMaxActiveClusters says on an H200."""
    kernel = fake_kernel(_ffi.Family.sm90, BF16, BF16, (128, 128, 64), cluster, "pingpong")
    parts = planner._native_schedule(DataParallel()), HOPPER.native(), H200.native
    problem = gemm(128 * cluster[0] * at_once, 128 * cluster[1], 512)
    one, more = (
        _ffi.estimate(kernel, dataclasses.replace(problem, m=m).native(), *parts) for m in (problem.m, problem.m + 1)
    )
    assert one.waves == 1 and more.waves > 1 and more.iterations == 2 * one.iterations


@pytest.mark.parametrize("raster, swizzle", [(raster, swizzle) for swizzle in (1, 2, 4, 8, 16) for raster in "mn"])
@pytest.mark.parametrize("m, n", [(2048, 2048), (2176, 24000), (100, 8192), (64, 64)])
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_wave_is_the_tiles_that_run_together(m, n, raster, swizzle, cluster):
    """Against TileOrder::coordinate of every worker of the wave: what all of it shares, and what the workers of a GPC share."""
    tile_m, tile_n = 128 * cluster[0], 64 * cluster[1]
    kernel = fake_kernel(_ffi.Family.sm90, BF16, BF16, (128, 64, 64), cluster)
    order = (RASTERS[raster], swizzle)
    schedule = planner._native_schedule(DataParallel())
    wave = _ffi.first_wave(kernel, gemm(m, n, 4096).native(), schedule, order, HOPPER.native())
    tiles_m, tiles_n = -(-m // tile_m), -(-n // tile_n)
    fast, slow = (tiles_m, tiles_n) if raster == "m" else (tiles_n, tiles_m)
    ctas = cluster[0] * cluster[1]
    workers = min((120 if ctas > 2 else 132) // ctas, tiles_m * tiles_n)
    rows, columns = [], []
    for tile in range(workers):
        panel, within = divmod(tile, fast * swizzle)
        f, s = divmod(within, min(swizzle, slow - panel * swizzle))
        at = f, s + panel * swizzle
        rows.append(at[raster == "n"])
        columns.append(at[raster == "m"])
    extents = np.array([min(m, tile_m), min(n, tile_n)])
    of_all = len(set(rows)) * extents[0] + len(set(columns)) * extents[1]
    assert of_all <= wave.footprint <= of_all * 1.3
    run = 16 // ctas
    for got, tiles, extent, multicast in (
        (wave.rows, rows, extents[0], cluster[1] > 1),
        (wave.columns, columns, extents[1], cluster[0] > 1),
    ):
        # Clusters of a GPC may begin in the middle of a run. Of CTAs by themselves, which are all looked at here, two runs stand for all.
        runs = [tiles[begin : begin + run] for begin in range(0, workers, run if ctas == 1 else run // 2)]
        shared = workers * sum(len(set(of)) for of in runs) / sum(len(of) for of in runs)
        assert got == pytest.approx((workers if multicast else shared) * extent, rel=0.4 if ctas == 1 else 1e-9)


@pytest.mark.parametrize("m, n, near", [(1024, 128, "A"), (128, 1024, "B")])
def test_slices_of_sums_of_the_results_type_are_ordered_by_what_their_neighbours_read(m, n, near):
    """Of TF32: two tiles read the same of the larger operand, and are next to each other."""
    kernel = fake_kernel(
        _ffi.Family.sm90, F32, F32, (64, 128, 32), warp_schedule="pingpong", swap_ab=True, align=4, math=TF32
    )
    kernels, parts = _ffi.Kernels([kernel]), (None, HOPPER.native(), H200.native)
    chosen = _ffi.choose(kernels, gemm(m, n, 65536, F32, TF32).native(), *parts).candidates[0]
    along = _ffi.Raster.along_n if near == "A" else _ffi.Raster.along_m
    assert chosen.schedule.splits > 1 and chosen.policy.raster == along


@pytest.mark.parametrize("m, n, near", [(552, 128, "A"), (128, 552, "B")])
def test_slices_of_few_tiles_are_ordered_by_what_their_neighbours_read(m, n, near):
    """Seven tiles by two: those that read the same rows of the larger operand are next to each other."""
    partials = fake_kernel(_ffi.Family.sm90, BF16, F32, (64, 80, 64), warp_schedule="pingpong", swap_ab=near == "A")
    whole = fake_kernel(
        _ffi.Family.sm90, BF16, BF16, (64, 80, 64), warp_schedule="pingpong", swap_ab=near == "A"
    )  # has an order of its own
    kernels, parts = _ffi.Kernels([whole, partials]), (None, HOPPER.native(), H200.native)
    candidates = _ffi.choose(kernels, gemm(m, n, 65536).native(), *parts).candidates
    (chosen,) = (candidate for candidate in candidates if candidate.kernel == partials.name)
    along_n = chosen.policy.raster == _ffi.Raster.along_n
    assert (chosen.policy.swizzle == 1 and along_n == (near == "A")) or (
        chosen.policy.swizzle >= 2 and along_n != (near == "A")
    )


def test_rows_that_start_within_a_sector_cost_more():
    """Of A, whose rows start on lines of 128 bytes, on sectors of 32, or on 16."""
    problems = [dataclasses.replace(gemm(512, 4096, 4096), lda=lda) for lda in (4096, 4112, 4104)]
    times = [estimates(problem, DataParallel())[1].microseconds.min() for problem in problems]
    assert times[0] < times[1] < times[2]


TABLES = pathlib.Path(__file__).parents[1] / "benchmarks" / "tables"


@functools.cache
def measured_tables():
    """(``fit.Table``, machine) of every set of the kept tables."""
    found = []
    for path in sorted(TABLES.glob("*.csv.gz")):
        device = jax_streamk.H100 if path.name.startswith("h100") else jax_streamk.H200
        machine = machines.machine_of(device)
        found += [(table, machine) for table in fit.tables_of(fit.read(path), machine, device)]
    return found


def test_choices_are_near_the_best_that_was_measured():
    """The time of the plan that the model ranks first over that of the best: the mean of the tables, each a geometric mean of shapes."""
    regrets = [fit.regret([table], machine) for table, machine in measured_tables()]
    assert len(regrets) > 30 and np.mean(regrets) <= 1.03


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_choices_are_near_the_best_of_shapes_that_no_constant_was_fitted_to(name):
    tables, (machine, *_) = zip(*((t, m) for t, m in measured_tables() if m.name == name), strict=True)
    assert fit.regret(tables, machine, held_out=True) <= 1.04


def test_machines_have_few_constants_that_all_have_a_meaning():
    assert len(_ffi.GPU_CONSTANTS) <= 30 and len(_ffi.HOST_CONSTANTS) <= 10
    for machine in (*machines.measured(), machines.derived(A100)):
        native = {name: getattr(machine.native, name) for name in _ffi.GPU_CONSTANTS}
        assert native == dict(machine.constants) and min(native.values()) > 0
        assert machines.parse(machine.name, machine.text()).topology == machine.topology
    assert all(_ffi.GPU_CONSTANTS.values()) and all(_ffi.HOST_CONSTANTS.values())


def test_the_machine_of_a_device_was_measured_or_is_derived():
    assert machines.machine_of(dataclasses.replace(HOPPER, kind="NVIDIA H200")) is machines.machine_of(HOPPER) is H200
    for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA H800"):
        device = dataclasses.replace(HOPPER, kind=kind)
        assert machines.is_measured(device) and machines.machine_of(device).name == "h100"
        # A PCIe model or a slice of one has fewer SMs, and was not measured.
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
        (lambda x: x.pop("kinds"), "kinds"),
    ],
)
def test_a_machine_file_that_does_not_serve_is_refused(change, why):
    fields = json.loads(H200.text())
    change(fields)
    with pytest.raises(ValueError, match=f"machine file mine: .*{why}"):
        machines.parse("mine", json.dumps(fields))


@pytest.mark.parametrize(
    "device", [A100, Device("cuda", 89, 142), Device("cuda", 90, 66, "slice"), Device("cuda", 120, 170)]
)
def test_a_foreign_gpu_plans_sensibly(cuda, device):
    few, much = (cuda(gemm(*shape), device=device)[0] for shape in ((64, 64, 65536), (8192, 8192, 8192)))
    assert isinstance(few.schedule, (SplitK, StreamK)) and few.efficiency > 0.5 and much.efficiency > 0.8
    for made in (few, much):
        assert made.limit.microseconds < made.microseconds < 1e5
    twice = cuda(gemm(8192, 8192, 8192), device=dataclasses.replace(device, sms=device.sms // 2))[0]
    assert 1.5 < twice.microseconds / much.microseconds < 2.5


def test_the_search_takes_less_than_100_microseconds():
    """Of all kernels that multiply 16-bit row-major operands, for each of which a schedule is looked for."""
    shapes = [(m, n, k) for m in (16, 200, 1000, 4096) for n in (1024, 4096) for k in (512, 4096)]
    planner.choose(gemm(8, 8, 8), None, HOPPER)
    times = []
    for shape in shapes:
        started = time.process_time()
        planner.choose(gemm(*shape), None, HOPPER)
        times.append(time.process_time() - started)
    assert statistics.median(times) < 100e-6


def test_nothing_to_multiply_divides_by_nothing():
    """A division by zero would end the process."""
    kernel = next(kernel for kernel in fake_kernels() if kernel.family == _ffi.Family.sm90)
    whole = planner._native_schedule(DataParallel())
    for m, n in ((0, 8), (8, 0)):
        _ffi.first_wave(kernel, gemm(m, n, 8).native(), whole, (_ffi.Raster.along_m, 1), HOPPER.native())


@pytest.mark.parametrize(
    "shape",
    [
        (16, 4096, 4096),
        (32, 12288, 3072),
        (64, 64, 65536),
        (96, 1000, 1000),
        (512, 512, 4096),
        (1000, 3000, 6144),
        (4096, 4096, 4096),
    ],
)
@pytest.mark.parametrize("device", [HOPPER, A100, Device("cuda", 120, 170)])
@pytest.mark.parametrize("epilogue", [{}, dict(has_bias=True, activation=_ffi.Activation.silu)], ids=["plain", "fused"])
def test_the_cheapest_of_all_candidates_is_chosen(cuda, shape, device, epilogue):
    """Against the estimate of every kernel under every schedule, one at a time, so that nothing is left out of the search."""
    problem = dataclasses.replace(gemm(*shape), **epilogue)
    parts = device.native(), machines.machine_of(device).native
    splits = {*range(2, 17), 32, 64, 128, *(min(device.sms // tiles, 128) for tiles in range(1, device.sms // 16 + 1))}
    tried = [
        DataParallel(),
        StreamK(),
        *(SplitK(n, reduction) for n in splits for reduction in ("ordered", "separate")),
    ]
    found = {}
    for kernel in (kernel for kernel in fake_kernels() if kernel.type_a == BF16):
        alone = _ffi.Kernels([kernel])
        for schedule in tried:
            for candidate in _ffi.choose(
                alone, problem.native(), planner._native_schedule(schedule), *parts
            ).candidates:
                found[candidate.cost.microseconds, kernel.name, str(schedule)] = candidate
    made, _ = cuda(problem, device=device)
    assert made.microseconds == min(found)[0]
    again, _ = cuda(problem, made.schedule, device=device)
    assert dataclasses.replace(again, reasons=made.reasons, candidates=made.candidates) == made
    times = [candidate.microseconds for candidate in made.candidates]
    assert times[0] == made.microseconds and times == sorted(times)


def test_an_uncached_plan_takes_less_than_a_millisecond(cuda, monkeypatch):
    monkeypatch.setattr(_ffi, "has_cuda", True)
    params = dict(dimension_numbers=(((1,), (0,)), ((), ())), precision=None, preferred_element_type=None)
    plans, times = [], []
    for m in range(64, 1088, 8):
        a, b = jax.ShapeDtypeStruct((m, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
        started = time.process_time()
        made, _ = lowering.plan(a, b, schedule=Auto(), device=HOPPER, **params)
        times.append(time.process_time() - started)
        plans.append(made)
    assert len(set(plans)) == len(plans) and all(made.kernel for made in plans)
    assert statistics.median(times) < 1e-3


@pytest.mark.parametrize(
    "schedule", [DataParallel(), SplitK(7), SplitK(16, "separate"), StreamK(), StreamK(max_sms=64)]
)
def test_a_given_schedule_is_obeyed(cuda, schedule):
    made, kernel = cuda(gemm(512, 512, 4096), schedule)
    assert made.schedule == schedule
    assert kernel.type_d == (F32 if getattr(schedule, "reduction", "") == "separate" else BF16)
    assert made.reasons[0] == "the schedule was given"


def test_a_given_schedule_is_refused_with_the_limit(cuda):
    with pytest.raises(ValueError, match=r"SplitK\(splits=100.*exceeds its \d+ k-tiles"):
        cuda(gemm(64, 64, 640), SplitK(100))
    with pytest.raises(ValueError, match='no Stream-K with reduction "atomic"'):
        cuda(gemm(64, 64, 640), StreamK("atomic"))


def test_the_wave_is_square(cuda):
    """A wave of 132 tiles of a large D: neither one row of tiles nor one column."""
    kernels = _ffi.Kernels([fake_kernel(_ffi.Family.sm90, BF16, BF16, (128, 256, 64))])
    parts = planner._native_schedule(DataParallel()), HOPPER.native(), H200.native
    assert 4 <= _ffi.choose(kernels, gemm(16384, 16384, 4096).native(), *parts).candidates[0].policy.swizzle <= 16
    made, _ = cuda(gemm(128, 8192, 4096), DataParallel())
    assert made.swizzle == 1


def test_a_candidate_outlives_what_it_was_chosen_from():
    def chosen():
        kernels = _ffi.Kernels(fake_kernels())
        return _ffi.choose(kernels, gemm(512, 512, 512).native(), None, HOPPER.native(), H200.native).candidates[0]

    name = chosen().kernel
    for _ in range(20):
        candidate = chosen()
        others = [bytes(size) for size in range(4096)]  # where the kernels were
        assert candidate.kernel == name and len(others) == 4096


def test_reasons_list_the_cost_and_runners_up(cuda):
    made, _ = cuda(gemm(512, 128, 16384))
    assert made.reasons[0].startswith("estimated ") and any(
        " waves, quantization efficiency " in reason for reason in made.reasons
    )
    runners_up = [reason for reason in made.reasons if reason.startswith("instead of ")]
    assert 2 <= len(runners_up) <= 5 and len(set(runners_up)) == len(runners_up) == len(made.candidates) - 1
    assert all(reason in str(made) for reason in made.reasons)


def test_a_plan_is_a_cached_frozen_hashable_value():
    problem = gemm(96, 80, 1000, F32)
    made = planner.make_plan(problem, Auto(), CPU)
    assert planner.make_plan(gemm(96, 80, 1000, F32), Auto(), Device("cpu", 0, 4)) is made
    assert hash(made) == hash(dataclasses.replace(made)) and made == dataclasses.replace(made)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.kernel = "another"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8])
def test_cpu_plans(dtype):
    a = jax.ShapeDtypeStruct((300, 200), dtype)
    b = jax.ShapeDtypeStruct((200, 100), dtype)
    out = jnp.int32 if dtype == jnp.int8 else None
    made = jax_streamk.plan(a, b, device=CPU, preferred_element_type=out)
    assert made.kernel.startswith("host_") and made.device == CPU
    assert "on cpu (4 threads)" in str(made)


def test_a_gram_matrix_on_threads_is_split():
    made = planner.make_plan(gemm(64, 64, 100_000, F32), Auto(), CPU)
    assert isinstance(made.schedule, (SplitK, StreamK))


def test_a_tiny_product_stays_on_one_thread():
    made = planner.make_plan(gemm(8, 8, 64, F32), Auto(), CPU)
    assert made.schedule == DataParallel()


def test_every_product_of_a_batch_costs_a_cpu_something():
    """However small it is: a million products of two numbers take many times as long as one that has a million results."""
    batched = planner.make_plan(gemm(1, 1, 1, F32, batch=10**6), Auto(), CPU)
    outer = planner.make_plan(gemm(1000, 1000, 1, F32), Auto(), CPU)
    assert batched.microseconds > 10 * outer.microseconds


def test_host_schedules_are_obeyed_or_refused():
    for schedule in (
        DataParallel(),
        SplitK(4),
        SplitK(4, "atomic"),
        SplitK(4, "separate"),
        StreamK(),
        StreamK(max_sms=1),
    ):
        assert planner.make_plan(gemm(64, 64, 1797, F32), schedule, CPU).schedule == schedule
    with pytest.raises(ValueError, match="splits=1000 exceeds its 29 k-tiles of 64"):
        planner.make_plan(gemm(64, 64, 1797, F32), SplitK(1000), CPU)


def test_auto_falls_back_openly():
    x = jax.ShapeDtypeStruct((8, 8), jnp.int32)
    made = jax_streamk.plan(x, x, device=CPU)
    assert made.kernel is None and made.schedule is None
    assert made.reasons[0].startswith("falls back to XLA: ") and "int32" in str(made)
    with pytest.raises(ValueError, match="cannot run this product.*int32"):
        jax_streamk.plan(x, x, device=CPU, schedule=StreamK())


@pytest.mark.parametrize(
    "shape, falls_back",
    [
        ((35, 8457, 2048), True), ((33, 1001, 64), True), ((64, 50257, 1600), True),
        ((35, 8458, 2048), False), ((32, 8457, 2048), False), ((65, 8457, 2048), False), ((35, 8456, 2048), False), ((35, 8457, 1760), False), ((35, 161, 2048), False),
        ((1024, 700, 512), True), ((496, 500, 170), True), ((2000, 1000, 132), True), ((1024, 1022, 256), True),
        ((1024, 704, 512), False), ((512, 510, 512), False), ((2048, 2044, 1024), False), ((1024, 1023, 256), False), ((496, 500, 171), False),
        ((512, 516, 260), False), ((300, 404, 188), False), ((64, 10004, 128), False),
    ],
)  # fmt: skip
def test_auto_leaves_to_xla_what_it_was_measured_to_be_faster_at(cuda, shape, falls_back):
    made, _ = cuda(gemm(*shape))
    assert (made.kernel is None) == falls_back and ("our kernels would copy" in str(made)) == falls_back
    assert cuda(gemm(*shape), DataParallel())[0].kernel
    assert cuda(gemm(*shape, batch=2))[0].kernel and cuda(gemm(*shape), device=A100)[0].kernel
    assert cuda(dataclasses.replace(gemm(*shape), has_bias=True))[0].kernel
    column = dataclasses.replace(gemm(*shape), major_b=_ffi.Major.column, ldb=shape[2])
    assert "our kernels copy" not in str(cuda(column)[0])
    if falls_back:  # with A column-major, too, if its rows do not start anywhere
        column = dataclasses.replace(gemm(*shape), major_a=_ffi.Major.column, lda=shape[0])
        m, n, k = shape
        assert ("our kernels would copy" in str(cuda(column)[0])) == (
            m <= 64 or (k % 64 == 0 and m % 2 == 0 and (m % 8 or n % 8) != 0)
        )


def test_auto_falls_back_where_no_kernel_runs(cuda):
    made, _ = cuda(gemm(64, 64, 64), device=Device("cuda", 75, 40))
    assert made.kernel is None and "does not run on sm_75" in made.reasons[0]
    made, _ = cuda(gemm(64, 64, 64, _ffi.Type.f16))
    assert "no kernel of this build" in made.reasons[0]


@pytest.mark.parametrize("empty", ["batch", "m", "n", "k"])
def test_nothing_to_multiply(empty):
    made = planner.make_plan(dataclasses.replace(gemm(4, 4, 4, F32), **{empty: 0}), Auto(), CPU)
    assert made.kernel is None and "nothing to multiply" in made.reasons[0]


@pytest.mark.parametrize(
    "m, n, k, at_once",
    [(16, 4096, 4096, False), (16, 8192, 4096, False), (1, 18432, 12288, True), (16, 40960, 4096, False)],
)
def test_tiles_of_a_few_rows_share_sms_where_their_last_wave_would_leave_many_idle(cuda, m, n, k, at_once):
    _, kernel = cuda(gemm(m, n, k), DataParallel())
    assert (kernel.warp_schedule == "single") == at_once
