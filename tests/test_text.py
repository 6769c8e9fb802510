"""Numbers in words for people."""

import pytest

from jax_streamk.text import duration, durations, flops, size


@pytest.mark.parametrize(
    "microseconds, text",
    [
        (0.0, "0.0 us"),
        (0.84, "0.8 us"),
        (12.34, "12.3 us"),
        (999.9, "999.9 us"),
        (999.96, "1.00 ms"),
        (1234.5, "1.23 ms"),
        (45678.9, "45.68 ms"),
        (999_994.0, "999.99 ms"),
        (999_996.0, "1.00 s"),
        (7.89e6, "7.89 s"),
        (4e9, "4000.00 s"),
    ],
)
def test_times_have_the_first_unit_that_keeps_them_below_1000(microseconds, text):
    assert duration(microseconds) == text


@pytest.mark.parametrize(
    "times, text",
    [((12.34, 0.051), "12.34 ±0.05 us"), ((4567.0, 80.0), "4.57 ±0.08 ms"), ((999.996, 1.0), "1.00 ±0.00 ms")],
)
def test_a_spread_has_the_unit_of_its_time(times, text):
    assert duration(*times) == text


@pytest.mark.parametrize(
    "parts, text",
    [
        ({"a": 2.1, "b": 26.9}, "29.0 us: 2.1 a + 26.9 b"),
        # 1.04 + 1.04 + 5.04 is 7.12: the largest part absorbs the rounding errors. Parts that round to 0 are omitted.
        ({"a": 1.04, "b": 1.04, "c": 5.04, "d": 0.01}, "7.1 us: 1.0 a + 1.0 b + 5.1 c"),
        ({"a": 20.0, "b": 6980.0}, "7.00 ms: 0.02 a + 6.98 b"),
        ({"a": 0.0}, "0.0 us"),
    ],
)
def test_a_sum_has_parts_that_add_up_in_its_unit(parts, text):
    assert durations(parts) == text


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (33024, "33.0 KB"),
        (4_194_304, "4.2 MB"),
        (2.5e9, "2.5 GB"),
        (3e15, "3000.0 TB"),
    ],
)
def test_bytes_have_the_first_unit_that_keeps_them_below_1000(count, text):
    assert size(count) == text


def test_operations_have_the_unit_that_suits():
    assert [flops(x) for x in (12, 2.1e9, 999.96e9, 1.0995e12)] == ["12 FLOP", "2.1 GFLOP", "1.00 TFLOP", "1.10 TFLOP"]
