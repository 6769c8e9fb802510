"""The examples run as their users run them."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def test_digits():
    pytest.importorskip("sklearn")
    done = subprocess.run([sys.executable, EXAMPLES / "digits.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\S.*\))  +(\S+)  +(\S+)  +(\S+)%$", done.stdout, re.MULTILINE)
    assert [name.partition("(")[0] for name, *_ in rows] == ["StreamK", "SplitK", "Auto"]
    for _, gram, moment, accuracy in rows:
        assert float(gram) < 1e-5 and float(moment) < 1e-5
        assert float(accuracy) > 92
    # Both products, under each schedule, by a kernel of ours.
    plans = re.findall(r"Plan: \[64, 1797\] @ \[1797, (\d+)\].*\n.*\n +\w+, (\w+)", done.stdout)
    assert [n for n, _ in plans] == ["64", "10"] * 3
    assert [schedule for _, schedule in plans[:4]] == ["StreamK", "StreamK", "SplitK", "SplitK"]
