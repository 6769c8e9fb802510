"""Results of bench: their files and their summaries."""

import contextlib
import json
import math
import os
import pathlib

from jax_streamk.tools.sides import XLA

FORMAT = "jax_streamk bench 1"
PROGRAMS_FORMAT = "jax_streamk bench --programs 1"
FIELDS = {"date", "command", "machine", "task", "measures", "rounds", "notes", "limits", "link_us", "rows"}
LOSS = 0.95  # ratios below count as losses


def load(path):
    """The result in a file.

    Raises:
      OSError: it cannot be read.
      ValueError: it is not a result of bench.
    """
    try:
        result = json.loads(pathlib.Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(result, dict) or result.get("format") not in (FORMAT, PROGRAMS_FORMAT):
        raise ValueError(f"{path} is not a result of bench: its format is not {FORMAT!r}")
    if missing := FIELDS - result.keys():
        raise ValueError(f"{path} is not a complete result of bench: it lacks {', '.join(sorted(missing))}")
    return result


def is_of_programs(result):
    """Whether its rows are of programs, not of shapes."""
    return result.get("format") == PROGRAMS_FORMAT


def load_folder(folder):
    """The results in a folder and its subfolders: a dict by path, in their order.

    Raises:
      OSError: the folder or a file cannot be read.
      ValueError: a file is not a result of bench, or there is none.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    results = {path: load(path) for path in sorted(folder.rglob("*.json"))}
    if not results:
        raise ValueError(f"{folder} has no result of bench")
    return results


def save(result, path):
    """Writes the file atomically, with a line per shape."""
    result = result | dict(summary=summary(result))
    rows = ",\n".join("  " + json.dumps(row) for row in result.pop("rows"))
    head = json.dumps(result, indent=1).removesuffix("\n}")
    part = path.with_name(path.name + ".part")
    part.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n')
    os.replace(part, path)


def described(error):
    """An exception in a line."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]


@contextlib.contextmanager
def recorded(side):
    """Records what is raised inside as the error of ``side``: it must not end the measurement of the others."""
    try:
        yield
    except Exception as error:
        side["error"] = described(error)


def summary(result):
    """For each side: geometric mean ratio by measure, and how many shapes are losses, left to XLA, failed or wrong."""
    out = {}
    for name in dict.fromkeys(name for row in result["rows"] for name in row["sides"] if name != XLA):
        rows = [row["sides"][name] for row in result["rows"] if name in row["sides"]]
        ratios = [side["ratio"] for side in rows if "ratio" in side]
        out[name] = dict(
            shapes=len(rows),
            geomean={
                each: math.exp(sum(math.log(r[each]) for r in ratios) / len(ratios))
                for each in result["measures"]
                if ratios
            },
            losses={each: sum(r[each] < LOSS for r in ratios) for each in result["measures"]},
            **{count: sum(key in side and bool(side[key]) for side in rows) for count, key in _COUNTS.items()},
        )
    return out


_COUNTS = {"fallbacks": "fallback", "failed": "error", "wrong": "wrong"}
