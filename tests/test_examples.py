"""The examples run as their users run them."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def run(name, cwd, **options):
    """What it prints. Examples exit with 1 when what they compute is not as it should be."""
    arguments = [text for option, value in options.items() for text in (f"--{option.replace('_', '-')}", str(value))]
    done = subprocess.run([sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits(tmp_path):
    pytest.importorskip("sklearn")
    printed = run("digits.py", tmp_path)
    rows = re.findall(r"^(\S.*\))  +(\S+)  +(\S+)  +(\S+)%$", printed, re.MULTILINE)
    assert [name.partition("(")[0] for name, *_ in rows] == ["StreamK", "SplitK", "Auto"]
    for _, gram, moment, accuracy in rows:
        assert float(gram) < 1e-5 and float(moment) < 1e-5
        assert float(accuracy) > 92
    # Both products, under each schedule, by a kernel of ours.
    plans = re.findall(r"Plan: \[64, 1797\] @ \[1797, (\d+)\].*\n.*\n +\w+, (\w+)", printed)
    assert [n for n, _ in plans] == ["64", "10"] * 3
    assert [schedule for _, schedule in plans[:4]] == ["StreamK", "StreamK", "SplitK", "SplitK"]


def test_language_model(tmp_path):
    printed = run("language_model.py", tmp_path, steps=20, batch=4, context=32, layers=2, d_model=32, dtype="bfloat16")
    # Of a layer four by dense layers and two of attention, and the head; two more of each in the backward pass.
    assert f"jax_streamk: {3 * (2 * 6 + 1)} products by jax_streamk, 0 by XLA" in printed
    assert f"XLA: 0 products by jax_streamk, {3 * (2 * 6 + 1)} by XLA" in printed
    losses = re.findall(r"^ +\d+-\d+ +(\S+) +(\S+)$", printed, re.MULTILINE)
    assert len(losses) == 10
    for first, last in zip(losses[0], losses[-1]):
        assert float(last) < float(first) - 1


def test_decode(tmp_path):
    printed = run("decode.py", tmp_path, batch=2, prompt=8, new=16, layers=2, d_model=64, heads=4)
    # One pass over the prompt, and the body of the scan.
    assert f"jax_streamk: {2 * (2 * 6 + 1)} products by jax_streamk, 0 by XLA" in printed
    assert f"XLA: 0 products by jax_streamk, {2 * (2 * 6 + 1)} by XLA" in printed
    assert len(re.findall(r"[1-9]\d* tokens/s", printed)) == 2
