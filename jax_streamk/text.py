"""Numbers in words for people."""

_UNITS = (("us", 1, 1), ("ms", 1e3, 2), ("s", 1e6, 2))  # microseconds of each, and digits that are shown


def duration(microseconds, spread=None):
    """A time with its unit: ``"12.3 us"``, ``"4.56 ms"`` or ``"7.89 s"``, the first of them that is below 1000.

    With a spread, also in microseconds, both have two digits: ``"12.34 ±0.05 us"``.
    """
    for unit, size, digits in _UNITS:
        digits = digits if spread is None else 2
        if round(microseconds / size, digits) < 1000:
            break
    more = "" if spread is None else f" ±{spread / size:.{digits}f}"
    return f"{microseconds / size:.{digits}f}{more} {unit}"
