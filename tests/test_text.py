"""Numbers in words for people."""

import pytest

from jax_streamk.text import duration


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


@pytest.mark.parametrize("times, text", [((12.34, 0.051), "12.34 ±0.05 us"), ((4567.0, 80.0), "4.57 ±0.08 ms"), ((999.996, 1.0), "1.00 ±0.00 ms")])
def test_a_spread_has_the_unit_of_its_time(times, text):
    assert duration(*times) == text
