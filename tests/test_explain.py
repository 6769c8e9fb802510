"""Explanations of plans, and their pictures: ``Plan.explain``, ``Plan.plot``, ``plot_schedules`` and the command."""

import dataclasses
import random
import sys
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streamk
from jax_streamk import _ffi, machines, text
from jax_streamk.__main__ import main
from jax_streamk.device import HOPPER, Device
from jax_streamk.plan import cost_model, described, planner
from jax_streamk.schedules import Auto, DataParallel, SplitK, StreamK
from jax_streamk.show import explain
from jax_streamk.tuning import measure

H200 = jax_streamk.H200
FOUR = Device("cpu", 0, 4, "four threads")
KERNELS = [*planner.kernels_for("cpu"), *planner.kernels_for("cuda")]


def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def plan(m, n, k, dtype=jnp.bfloat16, **options):
    return jax_streamk.plan(shaped(m, k, dtype=dtype), shaped(k, n, dtype=dtype), **{"device": H200} | options)


def round_up(x, to):
    return -(-x // to) * to


def random_call(rng, kernels=KERNELS):
    """A kernel, a problem of some tiles, a schedule and a device; the kernel may be unable to run them."""
    kernel = rng.choice([kernel for kernel in kernels if kernel.family == rng.choice(list(_ffi.Family))] or kernels)
    few, many = rng.choice([(1, 3), (2, 9), (7, 20)]), rng.choice([1, 4, 30])
    rows, columns = kernel.tile_m * rng.randint(1, few[1]), kernel.tile_n * rng.randint(1, few[1])
    m, n = (columns, rows) if kernel.swap_ab else (rows, columns)
    m, n = max(8, m - 8 * rng.randint(0, 3)), max(8, n - 8 * rng.randint(0, 3))
    k, batch = max(8, kernel.tile_k * rng.randint(1, many) - 8 * rng.randint(0, 1)), rng.choice([1, 1, 1, 2, 3])
    row_a, row_b = kernel.major_a == _ffi.Major.row, kernel.major_b == _ffi.Major.row
    problem = _ffi.GemmProblem(
        batch, m, n, k, kernel.type_a, kernel.type_b, kernel.type_d, kernel.math, kernel.major_a, kernel.major_b,
        k if row_a else m, n if row_b else k, n, m * k, k * n, m * n,
    )  # fmt: skip
    kind = rng.choice([_ffi.ScheduleKind.data_parallel, _ffi.ScheduleKind.split_k, _ffi.ScheduleKind.stream_k])
    reduction = rng.choice([_ffi.Reduction.ordered, _ffi.Reduction.atomic, _ffi.Reduction.separate])
    schedule = _ffi.Schedule(kind, rng.randint(1, 9), reduction, rng.choice([0, 0, 0, 1, 5]))
    arch = 0 if kernel.family == _ffi.Family.host else 90
    return kernel, problem, schedule, _ffi.Device(arch, rng.choice([1, 3, 8, 132]))


def check_units(kernel, problem, schedule, device, units):
    separate = schedule.schedule == _ffi.ScheduleKind.split_k and schedule.reduction == _ffi.Reduction.separate
    separate &= kernel.family != _ffi.Family.host
    rows, columns = (problem.n, problem.m) if kernel.swap_ab else (problem.m, problem.n)
    tiles_m, tiles_n = -(-rows // (kernel.tile_m * kernel.cluster_m)), -(-columns // (kernel.tile_n * kernel.cluster_n))
    products = 3 if kernel.family == _ffi.Family.sm90 and kernel.math == _ffi.Math.tf32x3 else 1
    assert units.tiles == problem.batch * tiles_m * tiles_n
    assert units.k_tiles == products * -(-problem.k // kernel.tile_k)

    # Every MAC iteration of every tile once, and peers in the order of K.
    by_tile = np.lexsort((units.k_begin, units.tile))
    tile, begin, end = units.tile[by_tile], units.k_begin[by_tile], units.k_end[by_tile]
    peer, peers = units.peer[by_tile], units.peers[by_tile]
    first = np.flatnonzero(np.diff(tile, prepend=-1))
    counts = np.diff(first, append=len(tile))
    assert (tile[first] == np.arange(units.tiles)).all() and (end > begin).all()
    assert (begin[first] == 0).all() and (end[np.append(first[1:], len(tile)) - 1] == units.k_tiles).all()
    inside = np.setdiff1d(np.arange(len(tile)), first)
    assert (begin[inside] == end[inside - 1]).all()
    assert (peers == np.repeat(counts, counts)).all()
    assert (peer == np.arange(len(tile)) - np.repeat(first, counts)).all()

    # A worker does one thing at a time, for as long as its iterations take or longer.
    assert 0 <= units.worker.min() and units.worker.max() < units.workers
    took = units.end - units.begin
    assert (took >= units.k_end - units.k_begin).all()
    by_time = np.lexsort((units.begin, units.worker))
    same = np.diff(units.worker[by_time]) == 0
    assert (units.begin[by_time][1:] >= units.end[by_time][:-1])[same].all()
    if kernel.family != _ffi.Family.sm90:
        assert (took == units.k_end - units.k_begin).all()

    # One unit adds up each shared tile, unless a second kernel does.
    adding = np.bincount(units.tile, units.fixes_up, units.tiles)
    assert (adding == (np.zeros(units.tiles) if separate else counts > 1)).all()


def random_units(seed):
    """Thirty random calls that kernels can run, each with its units of work."""
    rng, found = random.Random(seed), 0
    while found < 30:
        call = random_call(rng)
        try:
            units = _ffi.work_units(*call)
        except ValueError:
            continue
        yield *call, units
        found += 1


@pytest.mark.parametrize("seed", range(10))
def test_every_iteration_is_in_the_picture_once(seed):
    for call in random_units(seed):
        check_units(*call)


def test_random_calls_are_of_every_family_and_schedule():
    seen = set()
    for seed in range(10):
        for kernel, _, schedule, _, units in random_units(seed):
            seen.add((kernel.family, schedule.schedule if units.peers.max() > 1 else None, schedule.reduction))
    families, kinds, reductions = zip(*seen)
    assert set(families) == set(_ffi.Family) and len(set(kinds)) == 3 and len(set(reductions)) == 3


def test_units_are_what_the_kernels_say_they_do():
    rng, checked = random.Random(1), 0
    compiled = {kernel.name for kernel in _ffi.kernels()}
    while checked < 100:
        kernel, problem, schedule, device = random_call(rng)
        separate = schedule.reduction == _ffi.Reduction.separate and kernel.family != _ffi.Family.host
        if kernel.name not in compiled or kernel.family in (_ffi.Family.sm80, _ffi.Family.skinny) or separate:
            continue
        try:
            units = _ffi.work_units(kernel, problem, schedule, device)
        except ValueError:
            continue
        checked += 1
        for worker, pieces in enumerate(_ffi.decomposition(kernel.name, problem, schedule, device)):
            of_worker = units.worker == worker
            columns = (units.tile, units.k_begin, units.k_end - units.k_begin, units.peer, units.peers)
            assert pieces == list(zip(*(column[of_worker].tolist() for column in columns)))


def renamed(kernel):
    """The same kernel as one that this build lacks."""
    fields = {name: getattr(kernel, name) for name, *_ in kernel.fields}
    return _ffi.KernelInfo(**fields | dict(name=f"described_{kernel.name}"))


@pytest.mark.skipif(not _ffi.has_cuda, reason="this build has no CUDA kernels to compare with")
def test_described_kernels_divide_work_as_compiled_ones_do():
    rng, checked = random.Random(2), 0
    while checked < 300:
        kernel, problem, schedule, device = random_call(rng)
        is_cutlass = kernel.family == _ffi.Family.sm80 and schedule.schedule == _ffi.ScheduleKind.stream_k
        if kernel.family == _ffi.Family.host or is_cutlass:
            continue
        try:
            units = _ffi.work_units(kernel, problem, schedule, device)
        except ValueError:
            continue
        described = _ffi.work_units(renamed(kernel), problem, schedule, device)
        for name in ("worker", "tile", "k_begin", "k_end", "begin", "end", "peer", "peers", "fixes_up"):
            assert (getattr(described, name) == getattr(units, name)).all()
        assert (described.tiles, described.k_tiles, described.workers) == (units.tiles, units.k_tiles, units.workers)
        checked += 1


def coordinates(tile, tiles_m, tiles_n, along_m, swizzle):
    """Where along m and n a tile is, of those that are numbered in panels of ``swizzle`` lines."""
    fast, slow = (tiles_m, tiles_n) if along_m else (tiles_n, tiles_m)
    panel, within = divmod(tile, fast * swizzle)
    line, beside = divmod(within, min(swizzle, slow - panel * swizzle))
    at = line, panel * swizzle + beside
    return at if along_m else at[::-1]


def pictured_work(kernel, problem, policy, units):
    """What the picture says each CTA works on: {worker: {CTA of its cluster: [(m, n, batch, first, end), ...]}}.

    A skinny kernel's workers are CTAs in the order in which they begin, an sm90 kernel's are clusters.
    """
    sm90 = kernel.family == _ffi.Family.sm90
    # Skinny kernels swap operands too, but number tiles as the problem does.
    rows, columns = (problem.n, problem.m) if kernel.swap_ab else (problem.m, problem.n)
    counts = [-(-rows // (kernel.tile_m * kernel.cluster_m)), -(-columns // (kernel.tile_n * kernel.cluster_n))]
    along_m = (policy.raster == _ffi.Raster.along_m) != (sm90 and kernel.swap_ab)
    if not sm90:
        counts.reverse()
    work = {}
    for i in range(len(units.tile)):
        batch, tile = divmod(int(units.tile[i]), counts[0] * counts[1])
        m, n = coordinates(tile, *counts, along_m, policy.swizzle)
        first = int(units.k_begin[i])
        took = int(units.end[i] - units.begin[i])  # with the zeros beyond K
        for x in range(kernel.cluster_m):
            for y in range(kernel.cluster_n):
                unit = (m * kernel.cluster_m + x, n * kernel.cluster_n + y, batch, first, first + took)
                work.setdefault(int(units.worker[i]) if sm90 else i, {}).setdefault((x, y), []).append(unit)
    return work


def recorded_work(kernel, records):
    """What CTAs recorded: {cluster: {CTA of the cluster: [(m, n, batch, first, end), ...]}}."""
    work = {}
    for x, y, *unit in records:
        cluster, x = divmod(x, kernel.cluster_m)
        work.setdefault(cluster, {}).setdefault((x, y), []).append(tuple(unit))
    return work


def workers_of(kernel, policy, clusters):
    """The workers that clusters of a launch, those that have work, are."""
    if policy.cluster_order == _ffi.ClusterOrder.as_launched:
        return range(len(clusters))
    idle, size = policy.idle_clusters, kernel.cluster_m * kernel.cluster_n
    return _ffi.number_clusters(policy.cluster_order, len(clusters) + idle, idle, size)


@pytest.mark.gpu
@pytest.mark.timeout(300, method="thread")
@pytest.mark.skipif(
    not hasattr(_ffi, "record_work"),
    reason="CTAs record their work in another build: pip install . -C cmake.define.JAX_STREAMK_CUDA=ON "
    "-C cmake.define.CMAKE_CUDA_ARCHITECTURES=90a -C cmake.define.JAX_STREAMK_RECORD=ON",
)
def test_ctas_work_on_what_the_picture_shows():
    rng, checked, seen = random.Random(3), 0, set()
    families = _ffi.Family.sm90, _ffi.Family.skinny
    kernels = [kernel for kernel in _ffi.kernels() if kernel.family in families and not kernel.scaled]
    machine = machines.machine_of(HOPPER).native
    while checked < 200:
        kernel, problem, schedule, device = random_call(rng, kernels)
        raster, swizzle = rng.choice([_ffi.Raster.along_m, _ffi.Raster.along_n]), rng.randint(1, 4)
        try:
            units = _ffi.work_units(kernel, problem, schedule, device)
        except ValueError:
            continue
        policy = _ffi.launch_policy(kernel, problem, schedule, raster, swizzle, device, machine)
        what = kernel.name, problem, schedule
        (_, of_a), (_, of_b), (_, of_d), *_ = problem.spans()
        a, b = (np.ones(span, kernel.type_a.dtype) for span in (of_a, of_b))
        d = np.full(of_d, np.nan, kernel.type_d.dtype)
        workspace = np.full(_ffi.workspace_bytes(*what, device) + 1, 255, np.uint8)
        buffers = jax.block_until_ready(jax.device_put((a, b, d, workspace)))
        *addresses, scratch = (buffer.unsafe_buffer_pointer() for buffer in buffers)
        records = _ffi.record_work(*what, policy, device, (*addresses, 0, 0), scratch)

        recorded, pictured = recorded_work(kernel, records), pictured_work(kernel, problem, policy, units)
        label = f"{kernel.name}: {problem}, {schedule}, {policy}, {device}"
        assert len(recorded) == len(pictured), label
        for cluster, worker in zip(sorted(recorded), workers_of(kernel, policy, recorded)):
            assert recorded[cluster] == pictured[worker], f"{label}: cluster {cluster}, worker {worker}"
        assert (np.asarray(buffers[2]) == np.full(1, problem.k, np.float32).astype(d.dtype)).all(), label
        seen.add((kernel.name, schedule.schedule if units.peers.max() > 1 else None, schedule.reduction))
        checked += 1
    names, _, _ = zip(*seen)
    assert set(names) == {kernel.name for kernel in kernels}
    shared = {(kind, reduction) for _, kind, reduction in seen if kind is not None}
    assert shared >= {
        (_ffi.ScheduleKind.split_k, _ffi.Reduction.ordered),
        (_ffi.ScheduleKind.split_k, _ffi.Reduction.separate),
        (_ffi.ScheduleKind.stream_k, _ffi.Reduction.ordered),
    }


def test_a_last_slice_beyond_k_takes_as_long_as_the_others():
    made = plan(128, 4096, 4096, schedule=SplitK(7, "separate"))
    units = explain.work_units(made)
    assert explain.kernel_of(made.kernel, H200).family == _ffi.Family.sm90
    took, iterations = units.end - units.begin, units.k_end - units.k_begin
    assert len(set(took)) == 1 and set(iterations[units.peer == 6]) == {4} and set(iterations[units.peer < 6]) == {10}


def stream_k_of_sm80(rng, kernel):
    """A problem that is one call of a kernel of the sm80 family, a schedule and a device."""
    m, n, k = (rng.randint(1, most) * tile for most, tile in ((40, kernel.tile_m), (20, kernel.tile_n), (64, 64)))
    row_a, row_b = kernel.major_a == _ffi.Major.row, kernel.major_b == _ffi.Major.row
    problem = _ffi.GemmProblem(
        1, m, n, k, kernel.type_a, kernel.type_b, kernel.type_d, kernel.math, kernel.major_a, kernel.major_b,
        k if row_a else m, n if row_b else k, n, m * k, k * n, m * n,
    )  # fmt: skip
    schedule = _ffi.Schedule(
        _ffi.ScheduleKind.stream_k, 1, rng.choice(kernel.stream_k_reductions), rng.choice([0, 0, 0, 2, 57])
    )
    return problem, schedule, rng.choice([jax_streamk.A100, H200, Device("cuda", 89, 142)]).native()


SM80 = [
    kernel for kernel in described.cuda_kernels() if kernel.family == _ffi.Family.sm80 and kernel.stream_k_reductions
]


@pytest.mark.parametrize("seed", range(5))
def test_cutlass_shares_tiles_where_that_is_fewer_iterations(seed):
    rng, is_shared = random.Random(seed), []
    while len(is_shared) < 60:
        kernel = rng.choice(SM80)
        call = kernel, *stream_k_of_sm80(rng, kernel)
        try:
            units = _ffi.work_units(*call)
        except ValueError:  # such as too little shared memory on sm_89
            continue
        check_units(*call, units)
        sms = call[2].max_sms or call[3].sms
        assert units.end.max() <= -(-units.tiles // sms) * units.k_tiles
        is_shared.append(units.peers.max() > 1)
        assert is_shared[-1] <= (units.tiles % sms > 0), "whole waves are not shared"
    assert 10 < sum(is_shared) < 60


@pytest.mark.skipif(
    all(kernel.family != _ffi.Family.sm80 for kernel in jax_streamk.kernels()),
    reason="this build lacks CUTLASS's kernels to compare with",
)
def test_as_many_workers_share_tiles_as_cutlass_says():
    """CUTLASS tells by the workspace: a word and a place for sums, of one or two tiles, for each of them."""
    rng = random.Random(1)
    for kernel in SM80:
        of_tile = kernel.tile_m * kernel.tile_n * (8 if kernel.type_a == _ffi.Type.f64 else 4)
        for problem, schedule, device in (stream_k_of_sm80(rng, kernel) for _ in range(10)):
            if _ffi.can_implement(kernel.name, problem, schedule, device) is None:
                units = _ffi.work_units(kernel, problem, schedule, device)
                # Tiles up to the last shared one are cut; if the last workers' runs are whole tiles, all are.
                sharing = {*units.worker[units.tile <= units.tile[units.peers > 1].max(initial=-1)]}
                places = _ffi.workspace_bytes(kernel.name, problem, schedule, device) // of_tile
                workers = len(sharing), units.workers
                assert places in (*workers, *(2 * x for x in workers)), (kernel, problem, schedule, device)


def test_stream_k_of_every_family_is_drawn_wherever_it_is_planned():
    for made in (
        plan(512, 512, 4096, schedule=StreamK(), device=jax_streamk.A100),
        plan(16, 4096, 4096, schedule=StreamK()),
    ):
        found = made.explain()
        assert found.kernel.family == _ffi.Family.sm80 and not found.unknown
        assert found.shared_tiles > 0 and found.peers > 1 and made.plot() is not None


def test_too_many_units_are_not_listed():
    made = plan(2**19, 2**19, 64, schedule=DataParallel())
    assert "too many to list" in made.explain().unknown
    with pytest.raises(ValueError, match="too many to list"):
        made.plot()


PLANS = [
    dict(m=128, n=4096, k=4096),
    dict(m=128, n=4096, k=4096, schedule=SplitK(4)),
    dict(m=128, n=4096, k=4096, schedule=SplitK(7, "separate")),
    dict(m=2048, n=1920, k=4096, schedule=StreamK()),
    dict(m=8, n=4096, k=4096, schedule=SplitK(8)),
    dict(m=8, n=4000, k=4099),
    dict(m=96, n=72, k=520, device=jax_streamk.A100, dtype=jnp.float64),
    dict(m=640, n=512, k=1024, device=FOUR, dtype=jnp.float32),
    dict(m=640, n=512, k=1024, device=FOUR, dtype=jnp.float32, schedule=SplitK(3)),
    dict(m=640, n=512, k=1024, device=FOUR, dtype=jnp.float32, schedule=StreamK("separate")),
]


def made_of(case):
    with jax.enable_x64(True):
        return plan(**case)


@pytest.mark.parametrize("case", PLANS, ids=str)
def test_figures_agree_with_the_plan(case):
    made = made_of(case)
    found = made.explain()
    assert (found.plan, found.problem, found.device, found.schedule) == (made, made.problem, made.device, made.schedule)
    assert (found.kernel.name, found.waves, found.workspace_bytes) == (made.kernel, made.waves, made.workspace_bytes)
    units = explain.work_units(made)
    work = np.bincount(units.worker, units.end - units.begin, units.workers)
    assert (found.iterations.least, found.iterations.mean, found.iterations.most) == (
        work.min(), pytest.approx(work.mean()), work.max(),
    )  # fmt: skip
    assert (found.workers, found.busy_workers) == (units.workers, np.count_nonzero(work))
    assert found.peers == units.peers.max() and (found.shared_tiles > 0) == (found.peers > 1)
    p = made.problem
    assert found.flops == 2 * p.batch * p.m * p.n * p.k
    assert found.bytes >= p.m * p.k + p.k * p.n + p.m * p.n
    assert found.microseconds == made.microseconds and sum(found.parts.values()) == pytest.approx(made.microseconds)
    assert found.tuned_microseconds is None
    if made.device.platform == "cuda":
        assert found.limit_share == made.limit.microseconds / made.microseconds
        main_loop = found.parts[cost_model.MAIN_LOOP]
        assert main_loop >= 0.999 * found.resources["memory"]
        assert all(0 < time <= 1.001 * main_loop for name, time in found.resources.items())
        assert found.most_ctas_per_sm >= 1 and found.kernel.shared_memory == found.shared_memory > 0


def test_efficiency_is_that_of_the_picture():
    """The product's MAC iterations, of those that all workers could do in the time of the busiest."""
    for case in PLANS:
        made = made_of(case)
        units = explain.work_units(made)
        done = (units.k_end - units.k_begin).sum() / (units.workers * units.end.max())
        assert done == pytest.approx(made.efficiency, abs=0.01), case
        same = explain.on_kernel(made, made.kernel)
        assert same.efficiency == done and (same.waves, same.policy) == (made.waves, made.policy)
        assert same.microseconds == pytest.approx(made.microseconds)


@pytest.mark.parametrize("case", PLANS, ids=str)
def test_text_and_table_show_the_figures(case):
    found = made_of(case).explain()
    printed = str(found)
    assert max(map(len, printed.splitlines())) <= explain.WIDTH == 100
    words = " ".join(printed.split())
    for shown in (
        f"problem {found.problem}",
        f"kernel {found.kernel.name}",
        f"schedule {found.schedule}",
        f"launch policy {found.policy}",
        f"{found.tiles:,} tile",
        f"of {found.tile[0]} x {found.tile[1]}",
        f"{found.k_tiles:,} along K of each tile, {found.tile_k} long",
        f"of a worker {found.iterations} MAC iterations",
        f"least {found.iterations.least}, mean {found.iterations.mean:.1f}, most {found.iterations.most} MAC",
        f"{found.waves:.2f}, quantization efficiency {found.efficiency:.0%}",
        f"{text.size(found.bytes)} to move once, {text.flops(found.flops)}",
        f"predicted {text.duration(found.microseconds)}: ",
        *(f"{x.kernel}, {x.schedule}: {text.duration(x.microseconds)}; {x.why}" for x in found.runners_up),
        *(f"{name} {text.duration(time)}" for name, time in found.resources.items()),
    ):
        assert shown in words
    assert ("CTAs per SM" in words) == (found.device.platform == "cuda")

    table = xml.etree.ElementTree.fromstring(found._repr_html_())
    assert table.tag == "table" and {row.tag for row in table} == {"tr"}
    cells = ["".join(cell.itertext()) for row in table for cell in row]
    for section, label, figure in found.rows():
        assert {section, figure} <= set(cells) and (not label or label in cells)


def test_the_table_escapes():
    made = dataclasses.replace(plan(64, 64, 64), device=Device("cuda", 90, 132, "<script>&"))
    table = made.explain()._repr_html_()
    assert "<script>" not in table and "&lt;script&gt;&amp;" in table
    xml.etree.ElementTree.fromstring(table)


def test_runners_up_are_distinct_and_say_why_they_lost():
    for case in PLANS:
        found = made_of(case).explain()
        times = [other.microseconds for other in found.runners_up]
        assert times == sorted(times) and all(time >= found.microseconds for time in times)
        shown = [(other.kernel, str(other.schedule)) for other in found.runners_up]
        assert len(set(shown)) == len(shown) and (found.kernel.name, str(found.schedule)) not in shown
        for other in found.runners_up:
            assert sum(other.parts.values()) == pytest.approx(other.microseconds, rel=1e-3)
            named = [name for name in other.parts if f"more for {name}" in other.why]
            if not named:
                assert other.microseconds - found.microseconds < 0.05
                continue
            more = {name: time - found.parts.get(name, 0) for name, time in other.parts.items()}
            assert more[named[0]] == pytest.approx(max(more.values()), abs=0.05)


def test_a_separate_reduction_loses_by_the_second_kernel():
    found = plan(200, 4096, 4096).explain()
    slices = [other for other in found.runners_up if isinstance(other.schedule, SplitK)]
    assert slices and all("more for adding slices of K" in other.why for other in slices)


def test_xlas_products_are_explained():
    found = plan(64, 64, 64, dtype=jnp.complex64).explain()
    assert found.kernel is None and found.problem is None and found.bytes is None and not found.runners_up
    assert "XLA's own product" in str(found) and "falls back to XLA: complex64" in str(found)
    with pytest.raises(ValueError, match="no kernel of jax_streamk runs: falls back to XLA: complex64"):
        plan(64, 64, 64, dtype=jnp.complex64).plot()
    empty = plan(0, 64, 64).explain()
    assert "there is nothing to multiply" in str(empty)
    with pytest.raises(ValueError, match="there is nothing to multiply"):
        plan(0, 64, 64).plot()


@pytest.mark.left_to_xla
def test_the_prediction_of_ours_is_shown_where_xlas_runs():
    made = plan(64, 64, 16)
    found = made.explain()
    assert made.kernel is None and found.microseconds == made.microseconds and found.flops == 2 * 64 * 64 * 16
    assert found.limit.bound == "memory" and found.limit_share == found.limit.microseconds / made.microseconds
    assert f"ours, predicted {text.duration(made.microseconds)}" in " ".join(str(found).split())


def test_a_tuned_plan_has_both_times():
    made = plan(128, 4096, 4096)
    tuned = dataclasses.replace(made, microseconds=9.5)
    found = tuned.explain()
    assert (found.tuned_microseconds, found.microseconds) == (9.5, pytest.approx(made.microseconds))
    assert "tuning measured 9.5 us" in " ".join(str(found).split())


@pytest.fixture
def small_rotation(monkeypatch):
    monkeypatch.setitem(measure.ROTATED_BYTES, "cpu", 1e5)


def test_measured_times(small_rotation):
    made = jax_streamk.plan(shaped(64, 256, dtype=jnp.float32), shaped(256, 48, dtype=jnp.float32), device="cpu")
    found = made.explain(measure=True)
    ours = found.measured
    assert ours.microseconds > 0 and ours.xla_microseconds > 0 and ours.limit_share is None
    assert ours.tflops == pytest.approx(found.flops / ours.microseconds / 1e6)
    assert ours.gbytes_per_s == pytest.approx(found.bytes / ours.microseconds / 1e3)
    words = " ".join(str(found).split())
    assert f"measured {text.duration(ours.microseconds)}: " in words
    assert f"XLA, measured {text.duration(ours.xla_microseconds)}, " in words
    assert max(map(len, str(found).splitlines())) <= 100

    xlas = dataclasses.replace(made, kernel=None, schedule=None).explain(measure=True).measured
    assert xlas.microseconds is None and xlas.tflops == pytest.approx(found.flops / xlas.xla_microseconds / 1e6)


@pytest.mark.gpu
def test_measured_times_on_a_gpu():
    made = jax_streamk.plan(shaped(128, 4096), shaped(4096, 4096))
    found = made.explain(measure=True)
    assert found.measured.microseconds > 0 and found.measured.xla_microseconds > 0
    assert 0 < found.measured.limit_share == made.limit.microseconds / found.measured.microseconds
    assert found.registers > 0 and 1 <= found.ctas_per_sm <= found.most_ctas_per_sm
    assert f"registers {found.registers} per thread" in " ".join(str(found).split())


def test_what_cannot_be_measured_is_refused():
    elsewhere = Device("cuda", 90, 7, "another GPU")
    with pytest.raises(RuntimeError if not _ffi.has_cuda else ValueError):
        plan(64, 64, 64, device=elsewhere, schedule=DataParallel()).explain(measure=True)
    with pytest.raises(ValueError, match="not a device of this process"):
        plan(64, 64, 64, device=FOUR).explain(measure=True)
    with pytest.raises(ValueError, match="there is nothing to measure: there is nothing to multiply"):
        plan(0, 64, 64).explain(measure=True)


matplotlib = pytest.importorskip("matplotlib")


def drawn_tiles(ax):
    """Of every bar: (worker, begin, end), by the colors of tiles."""
    from jax_streamk.show.plot import _TILES

    bars = []
    for patch in ax.patches:
        if matplotlib.colors.to_hex(patch.get_facecolor()) in _TILES:
            for box in patch.get_path().to_polygons(closed_only=False):
                bars.append((int(box[:, 1].min() + 0.5), box[:, 0].min(), box[:, 0].max()))
    return sorted(bars)


def test_bars_are_the_units(tmp_path):
    for case in PLANS:
        made = made_of(case)
        units = explain.work_units(made)
        ax = made.plot(tmp_path / "plan.svg")
        bars = drawn_tiles(ax)
        assert bars == sorted(zip(units.worker.tolist(), units.begin.tolist(), units.end.tolist())), case
        assert f"quantization efficiency {made.efficiency:.0%}" in ax.get_title(loc="left")
        assert "Each row" not in ax.get_title(loc="left") and "Not drawn" not in ax.get_title(loc="left")


def legend_of(figure):
    (legend,) = figure.legends
    return [label.get_text() for label in legend.get_texts()]


def test_the_legend_has_what_is_drawn(tmp_path):
    whole = plan(4096, 4096, 4096).plot(tmp_path / "a.png").figure
    assert legend_of(whole) == ["an output tile (colors repeat)", "idle"]
    shared = plan(2048, 1920, 4096, schedule=StreamK()).plot(tmp_path / "b.png").figure
    assert legend_of(shared)[1:3] == ["a tile that workers share", "adds up its sums (expected)"]
    slices = plan(128, 4096, 4096, schedule=SplitK(4, "separate")).plot(tmp_path / "c.png").figure
    assert any("second kernel" in label for label in legend_of(slices))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_legend_of_several_schedules_has_output_tiles_once():
    """Whether a schedule has more tiles than there are colors, or fewer."""
    from jax_streamk.show.plot import _TILES

    seen, schedules = set(), (DataParallel(), SplitK(2), StreamK())
    for m, n in ((128, 128), (128, 256), (512, 384), (1280, 1280)):
        x, w = shaped(m, 1024, dtype=jnp.float32), shaped(1024, n, dtype=jnp.float32)
        plans = [jax_streamk.plan(x, w, schedule=schedule, device=FOUR) for schedule in schedules]
        repeat = {made.explain().tiles > len(_TILES) for made in plans}
        legend = legend_of(jax_streamk.plot_schedules(x, w, schedules, device=FOUR))
        (label,) = (label for label in legend if label.startswith("an output tile"))
        assert label == ("an output tile (colors repeat)" if True in repeat else "an output tile")
        seen.add(len(repeat))
    assert seen == {1, 2}


def test_a_long_product_leaves_its_middle_out_and_says_so(tmp_path):
    made = plan(16384, 32768, 1024)
    units = explain.work_units(made)
    ax = made.plot(tmp_path / "long.svg")
    caption, bars = ax.get_title(loc="left"), drawn_tiles(ax)
    assert units.tiles > 10_000 and "Not drawn: MAC iterations" in caption
    assert f"which are {len(units.tile) - len(bars):,} units of work" in caption.replace("\n", " ")
    assert (tmp_path / "long.svg").stat().st_size < 400_000
    # The end, which quantization is about, is there: as many bars end last as workers do.
    last = max(end for *_, end in bars)
    assert sum(end == last for *_, end in bars) == np.count_nonzero(units.end == units.end.max())


def test_a_thousand_workers_are_summed_up(tmp_path):
    thousand = Device("cpu", 0, 1000, "a thousand threads")
    made = plan(3000, 4096, 4096, device=thousand, schedule=DataParallel())
    ax = made.plot(tmp_path / "thousand.png")
    (image,) = ax.images
    assert "Each row sums up 16 threads" in ax.get_title(loc="left")
    idle, whole = image.get_array()[-1, -1], np.array([0x7F, 0xB0, 0xE3]) / 255
    share = (idle - image.get_array()) / (idle - whole)
    assert share[:, :, 0].min() >= -1e-6 and share.max() <= 1 + 1e-6
    rows = np.full(len(share), 16)
    rows[-1] = 1000 - rows[:-1].sum()
    at_work = (share[:, :, 0].mean(1) * rows).sum()
    units = explain.work_units(made)
    assert at_work == pytest.approx((units.end - units.begin).sum() / units.end.max(), rel=1e-6)


def test_schedules_share_an_axis(tmp_path):
    wanted = [DataParallel(), SplitK(2), StreamK()]
    options = dict(device=FOUR, path=tmp_path / "three.svg")
    a, b = shaped(1280, 1024, dtype=jnp.float32), shaped(1024, 512, dtype=jnp.float32)
    figure = jax_streamk.plot_schedules(a, b, wanted, kernel="host_f32_f32_rr_256x512x64", **options)
    ends = [max(end for *_, end in drawn_tiles(ax)) for ax in figure.axes]
    assert ends == [32, 24, 20] and len({ax.get_xlim() for ax in figure.axes}) == 1
    assert figure.axes[-1].get_xlabel() == "MAC iterations of a worker"
    assert [ax.get_title(loc="left").split(":")[0] for ax in figure.axes] == [
        "DataParallel()",
        "SplitK(splits=2)",
        "StreamK()",
    ]
    assert "efficiency 62%" in figure.axes[0].get_title(loc="left")
    assert legend_of(figure)[-1] == "idle"

    # Where kernels differ, the axis counts what they have in common.
    each = jax_streamk.plot_schedules(a, b, wanted, **options)
    plans = [jax_streamk.plan(a, b, schedule=schedule, device=FOUR) for schedule in wanted]
    kernels = [explain.kernel_of(made.kernel, FOUR) for made in plans]
    if len({(k.tile_m, k.tile_n, k.tile_k) for k in kernels}) > 1:
        assert each.axes[-1].get_xlabel() == "million multiply-adds of a thread"
        for ax, made, kernel in zip(each.axes, plans, kernels):
            multiply_adds = explain.work_units(made).end.max() * kernel.tile_m * kernel.tile_n * kernel.tile_k / 1e6
            assert max(end for *_, end in drawn_tiles(ax)) == pytest.approx(multiply_adds)


def test_schedules_that_cannot_be_drawn_are_refused(tmp_path):
    a, b = shaped(256, 1024), shaped(1024, 512)
    with pytest.raises(ValueError, match="schedules is empty"):
        jax_streamk.plot_schedules(a, b, [])
    with pytest.raises(TypeError, match="must be None"):
        jax_streamk.plot_schedules(a, b, ["split-k"])
    with pytest.raises(ValueError, match="kernel='none such': no such kernel for cpu"):
        jax_streamk.plot_schedules(a, b, device=FOUR, kernel="none such")
    with pytest.raises(ValueError, match="it multiplies f32 by f32"):
        jax_streamk.plot_schedules(a, b, device=FOUR, kernel="host_f32_f32_rr_64x64x64")
    with pytest.raises(ValueError, match="splits=1000 exceeds"):
        jax_streamk.plot_schedules(a, b, [SplitK(1000)], device=FOUR)


def test_pictures_go_into_given_axes(tmp_path):
    figure = matplotlib.figure.Figure()
    left, right = figure.subplots(1, 2)
    made = plan(128, 4096, 4096)
    assert made.plot(ax=left) is left
    assert made.problem is not None and f"{made.problem.m} x {made.problem.n}" in left.get_title(loc="left")
    assert left.get_legend() is not None and not right.patches


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made = plan(128, 4096, 4096)
    with pytest.raises(ImportError, match=r"plot needs matplotlib: pip install 'jax-streamk\[tools\]'"):
        made.plot()
    with pytest.raises(ImportError, match="plot_schedules needs matplotlib"):
        jax_streamk.plot_schedules(shaped(64, 64), shaped(64, 64))
    with pytest.raises(SystemExit, match="explain: plot needs matplotlib"):
        main(["explain", "128", "256", "512", "--plot", "plan.svg"])
    assert str(made.explain())


def test_the_command_explains(capsys):
    assert main(["explain", "200", "4096", "4096", "--device", "h200"]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{plan(200, 4096, 4096).explain()}\n"
    assert max(map(len, printed.splitlines())) <= 100


def test_the_command_takes_all_that_a_product_has(capsys):
    operands = "--batch 3 --trans-a --trans-b --dtype float64 --out-dtype float64".split()
    how = "--device a100 --schedule split-k:3:separate --html".split()
    assert main(["explain", "96", "40", "520", *operands, *how]) == 0
    printed = capsys.readouterr().out
    xml.etree.ElementTree.fromstring(printed)
    assert "3 x [96, 520] @ [520, 40], f64 x f64 -&gt; f64, A column, B column" in printed and "A100" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "[96, 520] @ [520, 40], rows in 4 groups, bf16 x bf16 -> bf16, A row, B row"),
        (("--trans-b",), "[96, 520] @ [520, 40], rows in 4 groups, bf16 x bf16 -> bf16, A row, B column"),
        (("--trans-a",), "[96, 520] @ [520, 40], k in 4 groups, bf16 x bf16 -> bf16, A column, B row"),
    ],
    ids=["rows", "columns", "k"],
)
def test_the_command_explains_ragged_products(words, said, capsys):
    assert main(["explain", "96", "40", "520", "--groups", "4", "--device", "cpu", *words]) == 0
    printed = capsys.readouterr().out
    assert said in printed and "depends on the sizes of the groups" in printed


def test_the_command_draws(tmp_path, capsys):
    one, several = tmp_path / "one.svg", tmp_path / "several.png"
    assert (
        main(["explain", "128", "4096", "4096", "--device", "h100", "--schedule", "split-k:4", "--plot", str(one)]) == 0
    )
    assert "SplitK(splits=4, reduction='ordered')" in capsys.readouterr().out
    xml.etree.ElementTree.parse(one)
    schedules = ["--schedule", "data-parallel", "--schedule", "split-k:2:separate"]
    assert main(["explain", "96", "64", "512", "--device", "cpu", *schedules, "--plot", str(several)]) == 0
    assert capsys.readouterr().out.count("division of work") == 2 and several.read_bytes().startswith(b"\x89PNG")
    kernel = "sm90_bf16_bf16_rr_128x256x64_1x2_coop"
    schedules = ["--schedule", "data-parallel", "--schedule", "stream-k", "--kernel", kernel, "--device", "h200"]
    assert main(["explain", "1536", "2816", "4096", *schedules, "--plot", str(several)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(kernel) == 2 and "tuning measured" not in printed


def test_the_command_measures(small_rotation, capsys):
    assert main(["explain", "64", "48", "256", "--device", "cpu", "--dtype", "float32", "--measure"]) == 0
    assert "XLA, measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, schedule",
    [
        ("auto", Auto()),
        ("data-parallel", DataParallel()),
        ("split-k:4", SplitK(4)),
        ("split-k:4:separate", SplitK(4, "separate")),
        ("stream-k", StreamK()),
        ("stream-k:atomic", StreamK("atomic")),
    ],
)
def test_schedules_of_the_command_line(words, schedule):
    from jax_streamk.tools import explain as command

    assert command.schedule(words) == schedule


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["0", "8", "8"], "argument M"),
        (["8", "8"], "the following arguments are required: K"),
        (["8", "8", "8", "--schedule", "split-k"], "'split-k': must be auto, batch-invariant, data-parallel"),
        (["8", "8", "8", "--schedule", "split-k:0"], "splits=0: must be an integer from 1 to"),
        (["8", "8", "8", "--schedule", "split-k:two"], "'split-k:two'"),
        (["8", "8", "8", "--schedule", "stream-k:fast"], "reduction='fast': must be one of"),
        (["8", "8", "8", "--device", "v100"], "argument --device"),
        (["8", "8", "8", "--dtype", "bfloat17"], "argument --dtype"),
        (["8", "8", "8", "--kernel", "nope"], "kernel='nope': no such kernel"),
        (["8", "8", "8", "--batch", "2", "--groups", "2"], "no kernel multiplies batches of groups"),
        (["8", "8", "64", "--schedule", "split-k:4", "--device", "h200"], "splits=4 exceeds"),
        (["8", "8", "64", "--dtype", "int32", "--plot", "x.svg"], "no kernel of jax_streamk runs: falls back to XLA"),
        (["8", "8", "64", "--schedule", "split-k:10000", "--device", "cpu"], ": it must be at most 1\n"),
        (["8", "8", "64", "--dtype", "complex64", "--measure"], "there is nothing to measure: falls back to XLA"),
    ],
)
def test_bad_arguments_are_refused(arguments, why, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["explain", *arguments])
    assert refused.value.code == 2 and why in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["8", "8", "64", "--device", "cpu", "--plot", "/none/such/x.svg"], "No such file or directory"),
        (["8", "8", "64", "--device", "cpu", "--plot", "x.tile"], "Format 'tile' is not supported"),
    ],
)
def test_what_cannot_be_explained_is_refused(arguments, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="explain: ") as refused:
        main(["explain", *arguments])
    assert why in str(refused.value) and not any(tmp_path.iterdir())
