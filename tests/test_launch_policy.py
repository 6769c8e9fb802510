"""The rules of a ``LaunchPolicy``: L2 eviction, stages held back, idle clusters and their numbers."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from jax_streamk import H100, DataParallel, SplitK, StreamK, _ffi, machines
from jax_streamk.device import HOPPER, Device
from jax_streamk.plan.plan import native_schedule

A100 = Device("cuda", 80, 108)
H200 = machines.machine_of(HOPPER)
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


@pytest.mark.parametrize("ctas, sms", [(1, 132), (2, 132), (1, 114), (2, 114)])
def test_clusters_are_idle_where_there_is_room(ctas, sms):
    at_once = sms // ctas
    for working in range(1, 3 * at_once):
        first, idle = _ffi.idle_clusters(working, ctas, sms)
        assert first in (0, at_once)  # in the first round of CTAs over the SMs, or in the second
        assert idle == 0 or first < working <= first + at_once - idle
    assert _ffi.idle_clusters(at_once // 2, ctas, sms)[1] > 0
    for working in (at_once, 2 * at_once, 2 * at_once + at_once // 2):
        assert _ffi.idle_clusters(working, ctas, sms) == (0, 0)


def test_clusters_of_four_have_none_idle_beside_them():
    assert all(_ffi.idle_clusters(working, 4, 132) == (0, 0) for working in range(1, 34))


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
        # In any eighth of the clusters, neighbours by GPC.
        has = np.array(numbers)[by_gpc] < first
        of_gpc = [
            has[at : at + -(-clusters // 8)].sum() for at in range(0, clusters - clusters // 8, max(clusters // 8, 1))
        ]
        assert max(of_gpc) - min(of_gpc) <= 2


# 120 tiles or slices in one wave or two. Each part of an operand is read by a line of tiles along m or n.
@pytest.mark.parametrize(
    "tiles, schedule, line, workers, others, first",
    [
        # Each part is read once.
        ((1, 120), DataParallel(), "m", 60, {}, True),
        ((120, 1), DataParallel(), "n", 60, dict(others=1000, k_tiles=10_000), True),
        ((1, 120), DataParallel(), "m", 60, dict(by_all_batches=True), False),
        # All readers of a part run at the same time, or do not.
        ((12, 10), DataParallel(), "m", 120, {}, True),
        ((12, 10), DataParallel(), "m", 120, dict(by_all_batches=True), True),
        ((6, 10), SplitK(2), "m", 120, {}, True),
        ((12, 10), DataParallel(), "m", 60, {}, False),
        ((6, 10), SplitK(2), "m", 60, {}, False),
        ((12, 10), StreamK(), "m", 113, {}, False),
        # They do, but drift apart along K, read the part again, or read little of it.
        ((12, 10), DataParallel(), "m", 120, dict(k_tiles=10_000), False),
        ((6, 10), SplitK(2), "m", 120, dict(k_tiles=10_000), False),
        ((12, 10), DataParallel(), "m", 120, dict(again=True), False),
        ((12, 10), DataParallel(), "m", 120, dict(others=1000), False),
        # A few readers run soon after each other; readers thirty tiles apart do not.
        ((4, 30), DataParallel(), "m", 60, {}, True),
        ((4, 30), DataParallel(), "m", 60, dict(others=1000), False),
        ((4, 30), DataParallel(), "m", 60, dict(again=True), False),
        ((4, 30), DataParallel(), "m", 60, dict(by_all_batches=True), False),
        ((4, 30), StreamK(), "m", 50, {}, False),
        ((4, 30), DataParallel(), "n", 60, {}, False),
        # The product takes long, has 16-bit operands and is not split.
        ((1, 120), DataParallel(), "m", 60, dict(multiply_adds=1e12), False),
        ((1, 120), DataParallel(), "m", 60, dict(multiply_adds=1e12, slices=2), True),
        ((1, 120), DataParallel(), "m", 60, dict(multiply_adds=1e12, element_bytes=4), True),
        ((6, 10), SplitK(2), "m", 120, dict(multiply_adds=1e12), True),
        ((1, 113), StreamK(), "m", 60, dict(multiply_adds=1e12), True),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_what_goes_first_from_l2(tiles, schedule, line, workers, others, first, turned):
    if turned:  # the same with rows and columns exchanged
        tiles, line = tiles[::-1], "nm"["mn".index(line)]
    order = (RASTERS["n" if turned else "m"], 1)
    native = native_schedule(schedule)
    assert _ffi.goes_first(H200.native, *tiles, native, order, workers, RASTERS[line], **others) == first


@pytest.mark.parametrize("swizzle, first", [(1, False), (16, True)])
def test_a_panel_of_all_tiles_keeps_those_that_read_the_same_together(swizzle, first):
    native = native_schedule(DataParallel())
    order = _ffi.Raster.along_m, swizzle
    assert _ffi.goes_first(H200.native, 30, 4, native, order, 60, _ffi.Raster.along_n) == first


STAGES, SERVED = 6, 240_000  # stages of 1000 bytes; bytes in flight that memory serves well


def held_back(tiles, schedule=DataParallel(), workers=132, ctas=1, stages=STAGES, size=1000, served=SERVED):
    """For each wave, the number of stages that loads leave empty, on 132 SMs."""
    parts = native_schedule(schedule), workers, ctas, HOPPER.sms, stages, size, served
    return _ffi.held_back(H200.native, tiles, *parts)


@pytest.mark.parametrize("tiles", [10, 40, 60, 100, 132])
def test_no_more_is_under_way_than_memory_serves(tiles):
    """But each CTA keeps the stages that it needs to cover latency."""
    (held,), (most,) = held_back(tiles), held_back(132, served=1)
    assert 0 <= held <= most < STAGES - 1
    assert tiles * (STAGES - held) * 1000 <= SERVED or held == most
    assert held == 0 or tiles * (STAGES - held + 1) * 1000 > SERVED  # not one too many
    assert held_back(tiles // 2, workers=66, ctas=2) == [held]
    assert held_back(tiles // 2, SplitK(2)) == [held]


def test_a_partial_last_wave_holds_back_less():
    assert held_back(200) == held_back(132) + held_back(68)
    assert held_back(2 * 132 + 36) == 2 * held_back(132) + held_back(36)


def test_nothing_is_held_back_where_that_does_not_help():
    assert held_back(200, size=0) == held_back(200, served=0) == [0, 0]  # nothing streams, or nobody measured
    assert held_back(200, stages=2, served=1) == [0, 0]
    assert held_back(140, StreamK(), served=1) == [0, 0]


def test_ctas_that_share_an_sm_have_less_under_way():
    """Although memory serves nearly all that each CTA requests, as for CTAs with an SM of their own."""
    alone, shared = (held_back(ctas, workers=528, stages=5, served=ctas * 4800) for ctas in (132, 264))
    assert alone == [0] and shared[0] > 0


def test_a_cta_alone_on_its_sm_has_little_under_way_whatever_memory_serves():
    (deep,), (shallow,) = (held_back(64, stages=stages, size=16 << 10, served=1 << 30) for stages in (11, 6))
    assert deep > shallow == 0


def test_what_is_under_way_is_limited_where_it_was_measured():
    h100, half = (dataclasses.replace(HOPPER, **other) for other in (dict(kind=H100.kind), dict(sms=66)))
    assert 0 < machines.under_way(half) < machines.under_way(h100) < machines.under_way(HOPPER)
    assert machines.under_way(A100) == machines.under_way(Device("cpu", 0, 4)) == 0
