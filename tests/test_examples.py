"""The examples run as their users run them."""

import json
import os
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


def test_tensor_parallel(tmp_path):
    sizes = ["--tokens", "32", "--width", "48", "--hidden", "96", "--rounds", "3"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, EXAMPLES / "tensor_parallel.py", *sizes, "--dtype", dtype, "--out", tmp_path / "report.json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/", timeout=240)
        assert done.returncode == 0, done.stderr
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["devices"] == 4
        assert report["forward"]["our_products"] == 2 and report["forward"]["collectives"]["ours"] == {"all-reduce": 1}
        assert report["step"]["our_products"] >= 6
        assert sum(report["step"]["collectives"]["ours"].values()) <= sum(report["step"]["collectives"]["xla"].values())
        assert all(error < (0.05 if dtype == "bfloat16" else 1e-5) for error in report["errors"]["between"].values())
        assert min(report["step"]["seconds"].values()) > 0
