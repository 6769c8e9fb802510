"""Numbers in words for people."""

_UNITS = (("us", 1, 1), ("ms", 1e3, 2), ("s", 1e6, 2))  # name, microseconds, digits shown
_FLOPS = (("FLOP", 1, 0), ("MFLOP", 1e6, 1), ("GFLOP", 1e9, 1), ("TFLOP", 1e12, 2))
_SIZES = (("bytes", 1, 0), ("KB", 1e3, 1), ("MB", 1e6, 1), ("GB", 1e9, 1), ("TB", 1e12, 1))


def _unit(units, number, digits=None):
    """The first unit in which a number is below 1000, or the last unit."""
    for name, size, usual in units:
        shown = usual if digits is None else digits
        if round(number / size, shown) < 1000:
            return name, size, shown
    return name, size, shown


def duration(microseconds, spread=None):
    """A time in the first unit in which it is below 1000: ``"12.3 us"``, ``"4.56 ms"`` or ``"7.89 s"``.

    With a spread (in microseconds), both have two digits: ``"12.34 ±0.05 us"``.
    """
    if spread is None and microseconds < 999:  # most are, and plans have many
        return f"{microseconds:.1f} us"
    unit, size, digits = _unit(_UNITS, microseconds, None if spread is None else 2)
    more = "" if spread is None else f" ±{spread / size:.{digits}f}"
    return f"{microseconds / size:.{digits}f}{more} {unit}"


def durations(parts):
    """A sum of times and its named parts in one unit, which add up as printed: ``"9.0 us: 2.7 launch + 6.3 loop"``."""
    total = sum(parts.values())
    unit, size, digits = _unit(_UNITS, total)
    rounded = [(name, round(part / size, digits)) for name, part in parts.items()]
    shown = {name: part for name, part in rounded if part > 0}
    if shown:  # the largest absorbs the rounding errors of the others
        largest = max(shown, key=shown.__getitem__)
        shown[largest] += round(total / size, digits) - sum(shown.values())
    text = " + ".join(f"{part:.{digits}f} {name}" for name, part in shown.items())
    return f"{total / size:.{digits}f} {unit}" + (f": {text}" if text else "")


def flops(count):
    """Floating-point operations with their unit: ``"2.1 GFLOP"``."""
    unit, size, digits = _unit(_FLOPS, count)
    return f"{count / size:.{digits}f} {unit}"


def size(count):
    """Bytes with their unit: ``"512 bytes"``, ``"33.0 KB"``, ``"4.2 MB"``, by thousands."""
    unit, size, digits = _unit(_SIZES, count)
    return f"{count / size:.{digits}f} {unit}"
