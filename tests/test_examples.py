"""The examples run as their users run them."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
GALLERY = EXAMPLES.parent / "docs" / "examples.md"


def run(name, cwd, environment=None, **options):
    """What it prints. An example exits with 1 if its results are wrong."""
    arguments = [text for option, value in options.items() for text in (f"--{option.replace('_', '-')}", str(value))]
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | (environment or {}),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits(tmp_path):
    pytest.importorskip("sklearn")
    printed = run("digits.py", tmp_path)
    assert_gallery_has("digits.py", printed)
    rows = re.findall(r"^(\S.*?)  +(\S+)  +(\S+)  +(\S+)%  +(\S+) us  +(\S+)$", printed, re.MULTILINE)
    assert [name.partition("(")[0] for name, *_ in rows] == ["StreamK", "SplitK", "Auto", "XLA"]
    for name, gram, moment, accuracy, time, ratio in rows:
        # At this precision XLA multiplies TF32 once on a GPU, and we three times.
        tolerance = 1e-3 if name == "XLA" and jax.default_backend() == "gpu" else 1e-5
        assert float(gram) < tolerance and float(moment) < tolerance
        assert float(accuracy) > 92
        assert float(ratio) == pytest.approx(float(time) / float(rows[-1][-2]), abs=0.02)
    # Both products, under each schedule, by a kernel of ours.
    plans = re.findall(r"Plan: \[64, 1797\] @ \[1797, (\d+)\].*\n.*\n +(?:host|sm\d+|skinny)_\w+\n +(\w+)", printed)
    assert [n for n, _ in plans] == ["64", "10"] * 3
    assert [schedule for _, schedule in plans[:4]] == ["StreamK", "StreamK", "SplitK", "SplitK"]


def outline(printed):
    """Lines without numbers, machines and the details of plans."""
    printed = printed.replace("TFRT_CPU_", "cpu:")  # JAX 0.9's name
    lines = [line for line in printed.splitlines() if not line.startswith(" " * 6)]
    words = [re.sub(r"cpu:|cuda:|\b(b?float)?\d[-+\d.,e%]*|\s+", " ", line.replace(" x cpu", "")) for line in lines]
    return [" ".join(line.split()) for line in words if re.search("[A-Za-z]", line)]


def assert_gallery_has(name, printed):
    """docs/examples.md has what the example prints on a CPU, numbers aside."""
    if jax.default_backend() != "cpu":
        return
    command = re.escape(f"python examples/{name}")
    (shown,) = re.findall(rf"^{command}\n```\n\n```text\n(.*?)^```$", GALLERY.read_text(), re.DOTALL | re.MULTILINE)
    assert outline(shown) == outline(printed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_parallel(dtype, tmp_path):
    environment = {"JAX_PLATFORMS": "cpu"}
    printed = run(
        "tensor_parallel.py",
        tmp_path,
        environment,
        tokens=32,
        width=48,
        hidden=96,
        rounds=3,
        dtype=dtype,
        out="report.json",
    )
    assert_gallery_has("tensor_parallel.py", printed)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["devices"] == 4
    assert report["forward"]["our_products"] == 2 and report["forward"]["collectives"]["ours"] == {"all-reduce": 1}
    assert report["step"]["our_products"] >= 6
    assert sum(report["step"]["collectives"]["ours"].values()) <= sum(report["step"]["collectives"]["xla"].values())
    assert all(error < (0.05 if dtype == "bfloat16" else 1e-5) for error in report["errors"]["between"].values())
    assert min(report["step"]["seconds"].values()) > 0


def test_language_model(tmp_path):
    printed = run("language_model.py", tmp_path, steps=20, batch=4, context=32, layers=2, d_model=32, dtype="bfloat16")
    assert_gallery_has("language_model.py", printed)
    # Per layer, four products in dense layers and two in attention; one in the head. Backward there are two for each.
    ours, xlas = map(
        int, re.search(r"^jax_streamk: (\d+) products by jax_streamk, (\d+) by XLA", printed, re.MULTILINE).groups()
    )
    assert ours > xlas and ours + xlas == 3 * (2 * 6 + 1)  # some of so small a model are too small for ours
    assert f"XLA: 0 products by jax_streamk, {3 * (2 * 6 + 1)} by XLA" in printed
    losses = re.findall(r"^ +\d+-\d+ +(\S+) +(\S+)$", printed, re.MULTILINE)
    assert len(losses) == 10
    for first, last in zip(losses[0], losses[-1]):
        assert float(last) < float(first) - 1


def test_quantized_language_model(tmp_path):
    printed = run("quantized_language_model.py", tmp_path, steps=20, batch=4, context=32, layers=1, d_model=64)
    assert_gallery_has("quantized_language_model.py", printed)
    # The loss is the example's own check. One pass over the prompt, and the body of the scan.
    counts = re.findall(r"^(bfloat16|int4): (\d+) products by jax_streamk, (\d+) by XLA$", printed, re.MULTILINE)
    assert [name for name, *_ in counts] == ["bfloat16", "int4"]
    assert all(int(ours) >= 6 and int(ours) + int(xlas) == 2 * (6 + 1) for _, ours, xlas in counts)
    assert len(re.findall(r"[1-9]\d* tokens/s", printed)) == 2


def test_float8_training(tmp_path):
    printed = run("float8_training.py", tmp_path, steps=40, batch=64, d_model=64)
    assert_gallery_has("float8_training.py", printed)
    # That float8's loss is bfloat16's is the example's own check. Three dense products and three of experts, and two
    # backward for each; the router, the head and the sum of experts are XLA's.
    counts = re.findall(r"^(float8|bfloat16): (\d+) products by jax_streamk, (\d+) by XLA$", printed, re.MULTILINE)
    assert [name for name, *_ in counts] == ["float8", "bfloat16"]
    assert all(int(ours) > int(xlas) for _, ours, xlas in counts)
    losses = re.findall(r"^ +\d+-\d+ +(\S+) +(\S+)$", printed, re.MULTILINE)
    assert len(losses) == 10
    for first, last in zip(losses[0], losses[-1]):
        assert float(last) < float(first) - 1


def test_mixture_of_experts(tmp_path):
    size = dict(steps=20, batch=4, context=32, layers=2, d_model=32)
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    printed = run("mixture_of_experts.py", tmp_path, **size, dtype=dtype)
    assert_gallery_has("mixture_of_experts.py", printed)
    # Per layer four products of attention, the router, and gate, up and down; gate and up may be one kernel.
    ours, xlas = map(
        int, re.search(r"^jax_streamk: (\d+) products by jax_streamk, (\d+) by XLA", printed, re.MULTILINE).groups()
    )
    assert ours > xlas and ours + xlas <= 3 * (2 * 8 + 1)
    assert f"XLA: 0 products by jax_streamk, {3 * (2 * 8 + 1)} by XLA" in printed
    assert "16 bytes and 16 that" in printed and "In context every token" in printed


@pytest.mark.parametrize("devices", [1, 4])
def test_expert_parallel(devices, tmp_path):
    printed = run(
        "expert_parallel.py", tmp_path, {"JAX_PLATFORMS": "cpu"}, tokens=24, width=16, hidden=24, devices=devices
    )
    assert_gallery_has("expert_parallel.py", printed)
    # Forward rows, sizes and results; backward the two of rows again.
    assert ("5 all-to-alls" if devices > 1 else "0 all-to-alls") in printed


def test_decode(tmp_path):
    printed = run("decode.py", tmp_path, batch=2, prompt=8, new=16, layers=2, d_model=64, heads=4)
    assert_gallery_has("decode.py", printed)
    # One pass over the prompt, and the body of the scan.
    ours, xlas = map(
        int, re.search(r"^jax_streamk: (\d+) products by jax_streamk, (\d+) by XLA", printed, re.MULTILINE).groups()
    )
    assert ours > xlas and ours + xlas == 2 * (2 * 6 + 1)
    assert f"XLA: 0 products by jax_streamk, {2 * (2 * 6 + 1)} by XLA" in printed
    assert len(re.findall(r"[1-9]\d* tokens/s", printed)) == 2


def test_quantized(tmp_path):
    pytest.importorskip("qwix")
    printed = run("quantized.py", tmp_path, rows=3, size=64)
    assert_gallery_has("quantized.py", printed)
    assert printed.count("by jax_streamk") == 2 and printed.count("x s4 (scale bf16 per 32 x 1)") == 2


def test_batch_invariant(tmp_path):
    # XLA's own sums must be compiled as users have them.
    optimized = dict(JAX_DISABLE_MOST_OPTIMIZATIONS="0")
    printed = run("batch_invariant.py", tmp_path, optimized, prompt=64, batch=5, width=64)
    assert_gallery_has("batch_invariant.py", printed)
    *_, invariant = printed.split("\n\n")
    assert re.findall(r": (\S+)%", invariant) == ["0.0"] * 5
