"""How schedules cut the MAC-iteration space, as every kernel reports it; this needs no GPU."""

import collections
import functools

import pytest

from jax_streamk import _ffi

# Those of ragged, gated and joined products refuse the problems below.
KERNELS = {k.name: k for k in _ffi.kernels() if not (k.gated or k.joined or k.scaled or k.ragged != _ffi.Ragged.none)}
DATA_PARALLEL, SPLIT_K, STREAM_K = (
    _ffi.ScheduleKind.data_parallel,
    _ffi.ScheduleKind.split_k,
    _ffi.ScheduleKind.stream_k,
)
# One kernel for each tile, cluster and kind of kernel: majorness and types do not affect the decomposition.
SHAPES_OF_KERNELS = {
    (k.family, k.tile_m, k.tile_n, k.tile_k, k.cluster_m, k.cluster_n, k.warp_schedule, k.swap_ab): k
    for k in KERNELS.values()
}


def ceil_div(x, y):
    return -(-x // y)


def round_up(x, to):
    return ceil_div(x, to) * to


def problem_of(kernel, m, n, k, batch=1, type_d=None, lda=None):
    n, k, m = (round_up(x, 8) for x in (n, k, m))
    row_a, row_b = kernel.major_a == _ffi.Major.row, kernel.major_b == _ffi.Major.row
    problem = _ffi.GemmProblem(
        batch, m, n, k, kernel.type_a, kernel.type_b, kernel.type_d if type_d is None else type_d, kernel.math,
        kernel.major_a, kernel.major_b,
        lda or (k if row_a else m), n if row_b else k, n, m * k, k * n, m * n,
    )  # fmt: skip
    rows, columns = (n, m) if kernel.swap_ab else (m, n)
    # A cluster works on whole rows of tiles: those that pad the last cluster are tiles too.
    tiles_m = round_up(ceil_div(rows, kernel.tile_m), kernel.cluster_m)
    tiles_n = round_up(ceil_div(columns, kernel.tile_n), kernel.cluster_n)
    # f32 in two parts is multiplied three times (repack.h).
    products = 3 if kernel.family == _ffi.Family.sm90 and kernel.math == _ffi.Math.tf32x3 else 1
    return problem, batch * tiles_m * tiles_n, products * ceil_div(k, kernel.tile_k)


def schedule_of(kind, splits=1, reduction=_ffi.Reduction.ordered, max_sms=0):
    return _ffi.Schedule(kind, splits, reduction, max_sms)


def device_of(kernel, sms):
    return _ffi.Device({_ffi.Family.host: 0, _ffi.Family.sm80: 80}.get(kernel.family, 90), sms)


def pieces_by_tile(workers):
    tiles = collections.defaultdict(list)
    for worker, pieces in enumerate(workers):
        for tile, k_begin, k_count, peer, peers in pieces:
            tiles[tile].append((k_begin, k_count, peer, peers, worker))
    return tiles


def check_partition(workers, k_tiles):
    """Each MAC iteration of each tile is done once, and peers are numbered in the order of K."""
    tiles = pieces_by_tile(workers)
    assert sorted(tiles) == list(range(len(tiles)))
    for tile, pieces in tiles.items():
        pieces.sort()
        at = 0
        for peer, (k_begin, k_count, number, peers, _) in enumerate(pieces):
            assert k_begin == at and k_count >= 1, f"tile {tile}: {pieces}"
            assert (number, peers) == (peer, len(pieces)), f"tile {tile}: {pieces}"
            at += k_count
        assert at == k_tiles, f"tile {tile}: {pieces}"
    return tiles


def extents(kernel):
    """One tile, few, ragged ones, and more than the machine has workers; one k-tile, few, and many."""
    for tiles_m, tiles_n, k_tiles, batch in [
        (1, 1, 1, 1),
        (1, 1, 37, 1),
        (2, 3, 5, 1),
        (3, 3, 1, 2),
        (5, 4, 7, 3),
        (1, 7, 11, 1),
    ]:
        m, n = tiles_m * kernel.tile_m - 8, tiles_n * kernel.tile_n - 8
        yield *((n, m) if kernel.swap_ab else (m, n)), k_tiles * kernel.tile_k - 7, batch


@pytest.mark.parametrize("kernel", SHAPES_OF_KERNELS.values(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("sms", [1, 2, 6, 132])
def test_every_iteration_once(kernel, sms):
    device = device_of(kernel, sms)
    kinds = [schedule_of(DATA_PARALLEL)]
    kinds += [
        schedule_of(STREAM_K, reduction=r, max_sms=limit) for r in kernel.stream_k_reductions for limit in (0, 2, 5)
    ]
    kinds += [schedule_of(STREAM_K, max_sms=1)]
    for m, n, k, batch in extents(kernel):
        problem, tiles, k_tiles = problem_of(kernel, m, n, k, batch)
        splits = [
            schedule_of(SPLIT_K, s, r) for r in kernel.split_k_reductions for s in {1, 2, 3, k_tiles} if s <= k_tiles
        ]
        for schedule in kinds + splits:
            if _ffi.can_implement(kernel.name, problem, schedule, device) is None:
                workers = _ffi.decomposition(kernel.name, problem, schedule, device)
                assert len(check_partition(workers, k_tiles)) >= tiles // max(kernel.cluster_m * kernel.cluster_n, 1)


HOST = [kernel for kernel in SHAPES_OF_KERNELS.values() if kernel.family == _ffi.Family.host]


@pytest.mark.parametrize("kernel", HOST, ids=lambda kernel: kernel.name)
def test_iterations_are_balanced(kernel):
    """Split-K runs of a tile, and all that a Stream-K worker does, differ by at most one k-tile."""
    for m, n, k, batch in extents(kernel):
        problem, tiles, k_tiles = problem_of(kernel, m, n, k, batch)
        for splits in range(2, k_tiles + 1, 3):
            schedule = schedule_of(SPLIT_K, splits)
            for pieces in pieces_by_tile(
                _ffi.decomposition(kernel.name, problem, schedule, device_of(kernel, 6))
            ).values():
                counts = [k_count for _, k_count, *_ in pieces]
                assert len(counts) == splits and max(counts) - min(counts) <= 1
        for sms in (2, 3, 6, 50):
            workers = _ffi.decomposition(kernel.name, problem, schedule_of(STREAM_K), device_of(kernel, sms))
            totals = [sum(k_count for _, _, k_count, _, _ in pieces) for pieces in workers]
            assert len(workers) == min(sms, tiles * k_tiles) and max(totals) - min(totals) <= 1


@pytest.mark.parametrize("kernel", HOST, ids=lambda kernel: kernel.name)
def test_data_parallel_shares_no_tile(kernel):
    for m, n, k, batch in extents(kernel):
        problem, tiles, k_tiles = problem_of(kernel, m, n, k, batch)
        for schedule in (schedule_of(DATA_PARALLEL), schedule_of(SPLIT_K, 1), schedule_of(STREAM_K, max_sms=1)):
            workers = _ffi.decomposition(kernel.name, problem, schedule, device_of(kernel, 6))
            pieces = [piece for work in workers for piece in work]
            assert len(pieces) == tiles and all(piece[1:] == (0, k_tiles, 0, 1) for piece in pieces)


# The sm80 family's Stream-K is CUTLASS's, whose cost model decides how many workers share what.
OURS = [k for k in SHAPES_OF_KERNELS.values() if k.family != _ffi.Family.sm80 and k.stream_k_reductions]


@pytest.mark.parametrize("kernel", OURS, ids=lambda kernel: kernel.name)
def test_max_sms_limits_stream_k(kernel):
    reduction = kernel.stream_k_reductions[0]
    m, n = 3 * kernel.tile_m, 5 * kernel.tile_n
    problem, _, k_tiles = problem_of(kernel, *((n, m) if kernel.swap_ab else (m, n)), 9 * kernel.tile_k)
    for limit in (2, 4, 7):
        schedule = schedule_of(STREAM_K, reduction=reduction, max_sms=limit)
        limited = _ffi.decomposition(kernel.name, problem, schedule, device_of(kernel, 132))
        check_partition(limited, k_tiles)
        assert len(limited) == max(limit // (kernel.cluster_m * kernel.cluster_n), 1)
        # A limit beyond the machine is the machine.
        narrow, beyond = device_of(kernel, limit), schedule_of(STREAM_K, reduction=reduction, max_sms=1000)
        assert _ffi.decomposition(kernel.name, problem, beyond, narrow) == limited


@pytest.mark.parametrize("kernel", SHAPES_OF_KERNELS.values(), ids=lambda kernel: kernel.name)
def test_more_splits_than_k_tiles_are_refused(kernel):
    problem, _, k_tiles = problem_of(kernel, 64, 64, 3 * kernel.tile_k)
    for reduction in kernel.split_k_reductions:
        why = _ffi.can_implement(kernel.name, problem, schedule_of(SPLIT_K, k_tiles, reduction), device_of(kernel, 132))
        assert why is None or "a build for it" in why  # skinny kernels, which split K in clusters
        why = _ffi.can_implement(
            kernel.name, problem, schedule_of(SPLIT_K, k_tiles + 1, reduction), device_of(kernel, 132)
        )
        assert f"splits={k_tiles + 1} exceeds its {k_tiles} k-tiles of {kernel.tile_k}" in why


needs_sm90 = pytest.mark.skipif(
    not any(k.family == _ffi.Family.sm90 for k in KERNELS.values()), reason="this build has no kernels for clusters"
)


@needs_sm90
def test_tiles_that_end_beyond_32_bits_are_refused():
    for kernel in SHAPES_OF_KERNELS.values():
        if kernel.family != _ffi.Family.sm90:
            continue
        for extents in ((2**31 - 16, 16), (16, 2**31 - 16)):
            problem, _, _ = problem_of(kernel, *extents, 16)
            why = _ffi.can_implement(kernel.name, problem, schedule_of(DATA_PARALLEL), device_of(kernel, 132))
            assert "its last tile would end beyond 2^31" in why


@needs_sm90
def test_a_separate_reduction_into_more_than_31_bits_count_is_refused():
    for kernel in SHAPES_OF_KERNELS.values():
        if kernel.family == _ffi.Family.host or _ffi.Reduction.separate not in kernel.split_k_reductions:
            continue
        for m, why in ((2**13, None), (2**15, "2^31")):
            problem, _, _ = problem_of(kernel, m, 2**16, 2 * kernel.tile_k)
            found = _ffi.can_implement(
                kernel.name, problem, schedule_of(SPLIT_K, 2, _ffi.Reduction.separate), device_of(kernel, 132)
            )
            assert found is None if why is None else why in found


@needs_sm90
def test_a_separate_reduction_into_other_types_is_refused():
    kernel = next(
        k
        for k in KERNELS.values()
        if k.family == _ffi.Family.sm90 and (k.type_a, k.type_d) == (_ffi.Type.bf16, _ffi.Type.f32)
    )
    schedule = schedule_of(SPLIT_K, 2, _ffi.Reduction.separate)
    for type_d in _ffi.Type:
        problem, _, _ = problem_of(kernel, 64, 64, 2 * kernel.tile_k, type_d=type_d)
        why = _ffi.can_implement(kernel.name, problem, schedule, device_of(kernel, 132))
        assert (
            why is None if type_d in (_ffi.Type.bf16, _ffi.Type.f32) else "it multiplies bf16 by bf16 into f32" in why
        )


@needs_sm90
def test_strides_that_tma_cannot_encode_are_copied():
    kernel = next(
        k for k in KERNELS.values() if k.family == _ffi.Family.sm90 and k.type_d == _ffi.Type.bf16 and not k.gated
    )
    problems = [problem_of(kernel, 8, 64, 64, lda=lda)[0] for lda in (64, 2**38)]
    bytes_ = [
        _ffi.workspace_bytes(kernel.name, problem, schedule_of(DATA_PARALLEL), device_of(kernel, 132))
        for problem in problems
    ]
    assert bytes_[0] == 0 < bytes_[1]


@needs_sm90
def test_copies_of_more_than_31_bits_count_are_refused():
    kernel = next(
        k
        for k in KERNELS.values()
        if k.family == _ffi.Family.sm90 and k.type_d == _ffi.Type.bf16 and k.name.split("_")[3] == "rr"
    )
    for m, refused in ((2**25, False), (2**30, True)):
        problem, _, _ = problem_of(kernel, m, 8, 8, batch=2, lda=9)
        why = _ffi.can_implement(kernel.name, problem, schedule_of(DATA_PARALLEL), device_of(kernel, 132))
        assert ("2^31" in why) if refused else why is None


@needs_sm90
def test_skinny_kernels_split_within_a_cluster():
    for kernel in KERNELS.values():
        if kernel.family != _ffi.Family.skinny:
            continue
        problem, _, _ = problem_of(kernel, 8, 64, 20 * kernel.tile_k)
        why = functools.partial(_ffi.can_implement, kernel.name, problem)
        assert why(schedule_of(SPLIT_K, 8), _ffi.Device(90, 132)) is None
        assert "at most 8 splits" in why(schedule_of(SPLIT_K, 9), _ffi.Device(90, 132))
        assert "compute capability 9.0" in why(schedule_of(SPLIT_K, 2), _ffi.Device(80, 108))
        assert "compiled for sm_80 or newer" in why(schedule_of(DATA_PARALLEL), _ffi.Device(75, 68))
        assert _ffi.workspace_bytes(kernel.name, problem, schedule_of(SPLIT_K, 8), _ffi.Device(90, 132)) == 0
        if _ffi.Reduction.separate in kernel.split_k_reductions:
            assert why(schedule_of(SPLIT_K, 9, _ffi.Reduction.separate), _ffi.Device(80, 108)) is None


def test_unknown_kernels():
    problem, _, _ = problem_of(HOST[0], 64, 64, 64)
    with pytest.raises(KeyError, match="no kernel named another was compiled"):
        _ffi.decomposition("another", problem, schedule_of(STREAM_K), _ffi.Device(0, 2))
