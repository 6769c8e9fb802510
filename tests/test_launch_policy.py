"""What a launch decides besides the plan: eviction, stages held back, idle clusters and their numbers."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from jax_streamk import DataParallel, SplitK, StreamK, _ffi, machines, planner
from jax_streamk.device import HOPPER, Device

A100 = Device("cuda", 80, 108)
RASTERS = {"m": _ffi.Raster.along_m, "n": _ffi.Raster.along_n}


def gpcs_dealt_to(ctas, begin):
    """The GPC of each cluster of several CTAs as H100s and H200s deal them out; None for the SMs apart (measured)."""
    room = [(16 if gpc > 0 else 8) // ctas for gpc in range(8)]
    dealt = [None] * (4 if ctas == 2 else 0)
    for turn in itertools.count(begin):
        if sum(room) == 0:
            return dealt
        if room[turn % 8] > 0:
            room[turn % 8] -= 1
            dealt.append(turn % 8)


@pytest.mark.parametrize("ctas", [2, 4, 8])
def test_clusters_of_a_gpc_have_neighbouring_numbers(ctas):
    for working in {1, 7, 40 // ctas, 120 // ctas, 132 // ctas}:
        _, idle = _ffi.idle_clusters(working, ctas, 132)
        numbers = _ffi.number_clusters(_ffi.ClusterOrder.by_gpc, working + idle, idle, ctas)
        assert sorted(numbers) == list(range(working))
        for begin in range(8):
            of_gpc = collections.defaultdict(list)
            for number, gpc in zip(numbers, gpcs_dealt_to(ctas, begin)[idle:]):
                of_gpc[gpc].append(number)
            assert all(max(of) - min(of) == len(of) - 1 for of in of_gpc.values())


@pytest.mark.parametrize("begin", range(8))
def test_pairs_share_the_ways_to_l2_evenly(begin):
    for pairs in range(1, 67):
        first, idle = _ffi.idle_clusters(pairs, 2, 132)
        assert first == 0 or idle == 0
        count = collections.Counter(gpcs_dealt_to(2, begin)[idle : pairs + idle])
        others = [count[gpc] for gpc in range(1, 8)]
        assert count[None] + count[0] <= max(*others, 4) and (count[None] == 0 or min(others) >= 4)


def test_clusters_are_idle_where_there_is_room():
    assert [_ffi.idle_clusters(ctas, 1, 132) for ctas in (1, 64, 96, 131, 132)] == [
        (0, 8),
        (0, 8),
        (0, 4),
        (0, 0),
        (0, 0),
    ]
    # The second CTAs of SMs, and the third.
    assert [_ffi.idle_clusters(ctas, 1, 132) for ctas in (133, 192, 263, 264, 300)] == [
        (132, 8),
        (132, 8),
        (132, 0),
        (0, 0),
        (0, 0),
    ]
    assert [_ffi.idle_clusters(pairs, 2, 114)[1] for pairs in (10, 52, 55, 57)] == [4, 2, 2, 0]
    assert _ffi.idle_clusters(7, 4, 132) == (0, 0)


def test_ctas_without_a_cluster_stay_in_order():
    for order in (_ffi.ClusterOrder.by_gpc, _ffi.ClusterOrder.as_launched):
        assert _ffi.number_clusters(order, 132, 8, 1) == list(range(124))
    assert _ffi.number_clusters(_ffi.ClusterOrder.as_launched, 66, 4, 2) == list(range(62))


@pytest.mark.parametrize("ctas, clusters", [(1, 132), (1, 114), (2, 66), (4, 30), (8, 15), (1, 1)])
def test_the_first_of_clusters_that_are_spread_are_on_all_gpcs(ctas, clusters):
    numbers = _ffi.number_clusters(_ffi.ClusterOrder.spread, clusters, 0, ctas)
    assert sorted(numbers) == list(range(clusters))
    by_gpc = np.argsort(_ffi.number_clusters(_ffi.ClusterOrder.by_gpc, clusters, 0, ctas))
    for first in range(clusters):
        # Of any eighth of the clusters that are neighbours by GPC.
        has = np.array(numbers)[by_gpc] < first
        of_gpc = [
            has[at : at + -(-clusters // 8)].sum() for at in range(0, clusters - clusters // 8, max(clusters // 8, 1))
        ]
        assert max(of_gpc) - min(of_gpc) <= 2


# 120 tiles, those of a row or of a column following each other or not; all run at once, or half of them.
@pytest.mark.parametrize(
    "tiles, schedule, line, workers, others, first",
    [
        ((1, 120), DataParallel(), "m", 60, dict(others=1000), True),  # read once
        ((120, 1), DataParallel(), "n", 60, dict(others=1000), True),
        ((1, 120), DataParallel(), "m", 60, dict(by_all_batches=True), False),
        ((12, 10), DataParallel(), "m", 120, {}, True),  # at once
        ((12, 10), DataParallel(), "m", 120, dict(by_all_batches=True), True),
        ((12, 10), DataParallel(), "m", 120, dict(others=8), True),
        ((12, 10), DataParallel(), "m", 120, dict(others=9), False),  # much smaller than the other
        ((12, 10), DataParallel(), "m", 120, dict(bytes=9, k_tiles=128), True),
        ((12, 10), DataParallel(), "m", 120, dict(k_tiles=129), False),  # readers drift apart
        ((1, 120), DataParallel(), "m", 60, dict(k_tiles=129), True),
        ((6, 10), SplitK(2), "m", 120, dict(k_tiles=256), True),
        ((6, 10), SplitK(2), "m", 120, dict(k_tiles=258), False),
        ((12, 10), DataParallel(), "m", 120, dict(again=True), False),
        ((1, 120), DataParallel(), "m", 60, dict(multiply_adds=4e9), True),
        ((1, 120), DataParallel(), "m", 60, dict(multiply_adds=5e9), False),  # a long product
        ((12, 10), DataParallel(), "m", 120, dict(multiply_adds=5e9), False),
        ((1, 120), DataParallel(), "m", 60, dict(multiply_adds=5e9, slices=2), True),
        ((1, 120), DataParallel(), "m", 60, dict(multiply_adds=5e9, element_bytes=4), True),
        ((6, 10), SplitK(2), "m", 120, dict(multiply_adds=5e9), True),
        ((1, 113), StreamK(), "m", 60, dict(multiply_adds=5e9), True),
        ((12, 10), DataParallel(), "m", 60, {}, False),
        ((12, 10), DataParallel(), "m", 119, {}, False),
        ((6, 10), SplitK(2), "m", 120, {}, True),
        ((6, 10), SplitK(2), "m", 60, {}, False),
        ((12, 10), StreamK(), "m", 113, {}, False),
        ((4, 30), DataParallel(), "m", 60, {}, True),  # four that follow each other
        ((5, 24), DataParallel(), "m", 60, {}, False),
        ((4, 30), DataParallel(), "m", 60, dict(others=2), False),
        ((4, 30), DataParallel(), "m", 60, dict(again=True), False),
        ((4, 30), DataParallel(), "m", 60, dict(by_all_batches=True), False),
        ((4, 30), StreamK(), "m", 50, {}, False),
        ((4, 30), DataParallel(), "n", 60, {}, False),
        ((30, 4), DataParallel(), "n", 60, {}, False),  # thirty tiles apart
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_what_goes_first_from_l2(tiles, schedule, line, workers, others, first, turned):
    if turned:  # the same with rows and columns exchanged
        tiles, line = tiles[::-1], "nm"["mn".index(line)]
    order = (RASTERS["n" if turned else "m"], 1)
    native = planner._native_schedule(schedule)
    assert _ffi.goes_first(*tiles, native, order, workers, RASTERS[line], **others) == first


@pytest.mark.parametrize(
    "tiles, schedule, workers, held",
    [
        (60, DataParallel(), 132, [2]),  # 60 x 4 stages are as many as memory wants
        (132, DataParallel(), 132, [3]),  # 132 x 2 would be, and cover no latency
        (200, DataParallel(), 132, [3, 2]),
        (300, DataParallel(), 132, [3, 3, 0]),
        (100, SplitK(2), 132, [3, 2]),
        (140, StreamK(), 132, [0, 0]),
        (10, DataParallel(), 132, [0]),
    ],
)
def test_stages_that_loads_leave_empty(tiles, schedule, workers, held):
    """Of six."""
    native = planner._native_schedule(schedule)
    assert _ffi.held_back(tiles, native, workers, 1, 6, 1000, 239_500) == held
    assert _ffi.held_back(tiles // 2, native, workers // 2, 2, 6, 1000, 239_500) == held  # in pairs
    assert _ffi.held_back(tiles, native, workers, 1, 6, 1000, 0) == [0] * len(held)
    assert _ffi.held_back(tiles, native, workers, 1, 2, 1000, 1) == [0] * len(held)
    assert _ffi.held_back(tiles, native, workers, 1, 6, 0, 1) == [0] * len(held)  # no operand streams


def test_a_cta_alone_on_its_sm_has_144_kb_under_way():
    native = planner._native_schedule(DataParallel())
    assert _ffi.held_back(64, native, 132, 1, 11, 16 << 10, 1 << 30) == [2]  # 4096 columns by 64x16x128
    assert _ffi.held_back(64, native, 132, 1, 6, 32 << 10, 1 << 30) == [1]  # 8192 by 128x16x128
    assert _ffi.held_back(48, native, 132, 1, 5, 32 << 10, 1 << 30) == [0]  # 12288 by 64x256x64


def test_ctas_that_share_an_sm_have_less_under_way():
    native = planner._native_schedule(DataParallel())
    assert _ffi.held_back(132, native, 528, 1, 5, 1000, 132 * 4800) == [0]
    assert _ffi.held_back(264, native, 528, 1, 5, 1000, 264 * 4800) == [1]


def test_what_is_under_way_is_limited_where_it_was_measured():
    assert (
        0 < machines.under_way(dataclasses.replace(HOPPER, kind="NVIDIA H100 80GB HBM3")) < machines.under_way(HOPPER)
    )
    assert machines.under_way(A100) == machines.under_way(Device("cpu", 0, 4)) == 0


@pytest.mark.parametrize("swizzle, first", [(1, False), (2, False), (4, True), (16, True)])
def test_a_panel_of_all_tiles_keeps_those_that_read_the_same_together(swizzle, first):
    native = planner._native_schedule(DataParallel())
    assert _ffi.goes_first(30, 4, native, (_ffi.Raster.along_m, swizzle), 60, _ffi.Raster.along_n) == first
