"""``python -m jax_streamk``: tune, fit, kernels and info."""

import argparse
import csv
import dataclasses
import functools
import importlib
import io
import itertools
import json
import math
import os
import pathlib
import pickle
import re
import shlex
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streamk
from jax_streamk import _ffi, checks, machines, plan
from jax_streamk.__main__ import COMMANDS, main
from jax_streamk.device import device_for_lowering, device_of
from jax_streamk.plan import described, left_to_xla, planner
from jax_streamk.plan.launch_policy import LaunchPolicy
from jax_streamk.text import duration
from jax_streamk.tools import info, kernels, results, shapes
from jax_streamk.tools.shapes import Shape
from jax_streamk.tuning import contest, fit, measure, plans, tune, tuned
from jax_streamk.tuning.tuned import Store, Trial, Tuned

HEADER = "m,n,k,batch,trans_a,trans_b,source"


def write(path, *rows, header=HEADER):
    path.write_text("\n".join((header, *rows)) + "\n")
    return str(path)


def out_of(capsys, *words, status=0):
    """What a command prints."""
    assert main(list(words)) == status
    return capsys.readouterr().out


def records_of(capsys, *words):
    return list(csv.DictReader(out_of(capsys, "kernels", *words, "--csv").splitlines()))


def refused(capsys, *words):
    """The message of a command line that is wrong: a line, and where to read more."""
    with pytest.raises(SystemExit) as end:
        main(list(words))
    assert end.value.code == 2
    *_, message, more = capsys.readouterr().err.splitlines()
    assert more == f"see python -m jax_streamk {words[0]} --help"
    return message


@pytest.fixture
def file(tmp_path):
    rows = ["40,24,64,,,,a", "16,32,48,3,1,1,b", "40,24,64,,0,,again"]
    return write(tmp_path / "shapes.csv", *rows)


@pytest.fixture
def pretended(monkeypatch):
    """Fakes measurements: the planner's own choice took 12 us, the last candidate that it lists 8 us."""
    measured = []

    def at_once(problem, memory):
        measured.append(problem)
        other = planner.choose(problem, None, memory.device, listed=24).candidates[-1]
        return Tuned.now(Trial.of(other.kernel, other.schedule, LaunchPolicy.of(other.policy)), 8.0, 12.0)

    monkeypatch.setattr(tune, "fastest", at_once)
    return measured


def test_tune_stores_and_resumes(file, tmp_path, capsys, pretended):
    cache = tmp_path / "cache"
    arguments = ["tune", file, "--cache", str(cache), "--dtype", "bfloat16", "--dtype", "float16", "--dtype", "int32"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert "4 products: 4 tuned, 0 tuned before, 0 failed\nleft to XLA: 2 (2 unmeasured, 0 faster there)\n" in out
    assert "4 of 4 plans differ from the planner's, whose time over theirs is 1.500 in the geometric mean" in out
    assert "40 x 24 x 64 int32: falls back to XLA: int32 x int32" in err and "12.0 us by the planner's choice" in err
    store = Store(cache)
    assert f"stored in {store.path(device_of(None))}" in out
    assert list(store.plans(device_of(None))) == pretended
    assert [(p.batch, p.m, p.type_a.name, p.major_a.name, p.major_b.name) for p in pretended] == [
        (1, 40, "bf16", "row", "row"),
        (1, 40, "f16", "row", "row"),
        (3, 16, "bf16", "column", "column"),
        (3, 16, "f16", "column", "column"),
    ]
    # These are the problems that programs have.
    with tuned.using(store):
        for dtype in (jnp.bfloat16, jnp.float16):
            assert plan(jax.ShapeDtypeStruct((40, 64), dtype), jax.ShapeDtypeStruct((64, 24), dtype)).microseconds == 8

    assert main(arguments) == 0
    assert "0 tuned, 4 tuned before" in capsys.readouterr().out and len(pretended) == 4
    assert main([*arguments, "--again"]) == 0
    assert "4 tuned, 0 tuned before" in capsys.readouterr().out and len(pretended) == 8
    assert len(store.path(device_of(None)).read_text().splitlines()) == 8
    assert (
        main(["tune", "--set", "strong_scaling", "--sample", "2", "--out-dtype", "float32", "--cache", str(cache)]) == 0
    )
    assert [p.type_d.name for p in pretended[8:]] == ["f32", "f32"]


def test_tune_measures(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(measure.ROTATED_BYTES, device_of(None).platform, 1e5)
    path = write(tmp_path / "one.csv", "40,24,64", header="m,n,k")
    assert main(["tune", path, "--dtype", "float32", "--cache", str(tmp_path / "cache")]) == 0
    (found,) = Store(tmp_path / "cache").plans(device_of(None)).values()
    assert f"{duration(found.microseconds)} by" in capsys.readouterr().err


def test_tune_measures_batch_invariant_products(tmp_path, monkeypatch, capsys):
    """Their plans are apart from others. One that only XLA computes is left out."""
    monkeypatch.setitem(measure.ROTATED_BYTES, device_of(None).platform, 1e5)
    path, cache = write(tmp_path / "one.csv", "40,24,64", header="m,n,k"), str(tmp_path / "cache")
    dtypes = ["--dtype", "float32", "--dtype", "int32"]
    assert main(["tune", path, *dtypes, "--cache", cache]) == 0
    assert main(["tune", path, *dtypes, "--cache", cache, "--batch-invariant"]) == 0
    assert sorted(p.is_invariant for p in Store(tmp_path / "cache").plans(device_of(None))) == [False, True]
    assert "batch_invariant=True" in capsys.readouterr().err


def test_tune_measures_ragged_products(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(measure.ROTATED_BYTES, device_of(None).platform, 1e5)
    rows = ("4,40,24,64,forward,zipf", "4,40,24,64,lhs,uniform", "3,40,24,64,rhs,uniform")
    path, cache = write(tmp_path / "groups.csv", *rows, header="groups,m,n,k,pass,routing"), tmp_path / "cache"
    dtype = "bfloat16" if device_of(None).arch else "float32"
    assert main(["tune", "--groups", path, "--dtype", dtype, "--cache", str(cache)]) == 0
    problems = Store(cache).plans(device_of(None))
    extents = {(p.ragged.name, p.batch, p.m, p.n, p.k) for p in problems}
    assert extents == {("m", 4, 40, 24, 64), ("m", 4, 40, 64, 24), ("k", 3, 64, 24, 40)}
    printed = capsys.readouterr()
    assert "3 tuned" in printed.out and "zipf" not in printed.err and "uniform" in printed.err
    assert main(["tune", "--groups", path, "--dtype", dtype, "--gated", "silu", "--cache", str(cache)]) == 0
    assert "1 product" in capsys.readouterr().out


def test_tune_measures_gated_products(tmp_path, monkeypatch, capsys):
    """Where no kernel multiplies by both matrices, the product that runs twice."""
    monkeypatch.setitem(measure.ROTATED_BYTES, device_of(None).platform, 1e5)
    path = write(tmp_path / "one.csv", "40,24,64", header="m,n,k")
    cache = tmp_path / "cache"
    assert main(["tune", path, "--dtype", "float32", "--gated", "silu", "--cache", str(cache)]) == 0
    (problem,) = Store(cache).plans(device_of(None))
    assert (problem.m, problem.n, problem.k, problem.gated) == (40, 24, 64, False)
    path = write(tmp_path / "batch.csv", "3,40,24,64", header="batch,m,n,k")
    with pytest.raises(SystemExit):
        main(["tune", path, "--gated", "silu", "--cache", str(cache)])
    assert "--gated multiplies one row-major A" in capsys.readouterr().err


def test_tune_tells_what_it_leaves_to_xla(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(measure.ROTATED_BYTES, device_of(None).platform, 1e5)
    ratios = iter([0.876, 1.2])
    monkeypatch.setattr(contest, "xla_ratio", lambda made, memory, rounds: next(ratios))
    path = write(tmp_path / "two.csv", "40,24,64", "48,24,64", header="m,n,k")
    assert main(["tune", path, "--dtype", "float32", "--cache", str(tmp_path / "cache")]) == 0
    out, err = capsys.readouterr()
    assert "left to XLA: 1 (0 unmeasured, 1 faster there)\n" in out
    assert "; XLA's product took 0.88 times as long, and is used\n48 x 24 x 64" in err
    assert "; XLA's product took 1.20 times as long\n" in err


def test_an_interrupted_run_has_stored_what_it_finished(file, tmp_path, capsys, pretended, monkeypatch):
    def interrupted(problem, memory, measure=tune.fastest):
        if len(pretended) == 2:
            raise KeyboardInterrupt
        return measure(problem, memory)

    monkeypatch.setattr(tune, "fastest", interrupted)
    arguments = ["tune", file, "--cache", str(tmp_path / "cache"), "--dtype", "bfloat16", "--dtype", "float16"]
    assert main(arguments) == 130
    assert "2 tuned, 0 tuned before, 0 failed, interrupted" in capsys.readouterr().out
    assert len(Store(tmp_path / "cache").plans(device_of(None))) == 2


def test_tune_begins_nothing_after_the_limit(file, tmp_path, capsys, pretended):
    assert main(["tune", file, "--cache", str(tmp_path), "--limit", "0"]) == 0
    assert (
        "0 tuned, 0 tuned before, 0 failed, the rest not started within 0 s" in capsys.readouterr().out
        and not pretended
    )


def test_a_product_that_fails_does_not_stop_the_others(file, tmp_path, capsys, pretended, monkeypatch):
    def fails(problem, memory, measure=tune.fastest):
        if problem.batch == 1:
            raise RuntimeError("out of memory")
        return measure(problem, memory)

    monkeypatch.setattr(tune, "fastest", fails)
    assert main(["tune", file, "--cache", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert (
        "1 tuned, 0 tuned before, 1 failed" in out
        and "40 x 24 x 64 bfloat16: failed: RuntimeError: out of memory" in err
    )


def test_tune_measures_nothing_that_it_could_not_store(file, tmp_path, pretended):
    (tmp_path / "cache").write_text("")
    with pytest.raises(SystemExit, match=f"tune: plans cannot be stored in {tmp_path / 'cache'}: "):
        main(["tune", file, "--cache", str(tmp_path / "cache")])
    assert not pretended


def test_tune_asks_for_what_it_needs(file, tmp_path, pretended, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit, match="rich is missing: pip install rich"):
        main(["tune", file, "--cache", str(tmp_path)])
    assert not pretended


def test_bad_arguments_are_refused_before_anything_is_measured(tmp_path, pretended, capsys):
    cache = "--cache", str(tmp_path / "cache")
    bad = write(tmp_path / "bad.csv", "8,8,8", "8,8,0", header="m,n,k")
    assert f"tune: error: {bad}:3: k is '0'; it must be an integer" in refused(capsys, "tune", bad, *cache)
    assert "No such file" in refused(capsys, "tune", str(tmp_path / "missing.csv"), *cache)
    some = "tune", "--set", "strong_scaling", "--sample", "1"
    assert "tune: error: cache='': must be the path of a folder" in refused(capsys, *some, "--cache", "")
    assert "argument --limit: '-1' is not a time of 0 or more" in refused(capsys, *some, "--limit=-1", *cache)
    assert not pretended and not (tmp_path / "cache").exists()


OF_COMMANDS = {
    "explain": ["8", "8", "8"],
    "kernels": ["8", "8", "8"],
    "bench": ["shapes.csv"],
    "tune": ["shapes.csv"],
    "fit": [],
    "info": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_is_taken_as_often_as_it_is_given_or_refused(command, capsys, monkeypatch):
    module = importlib.import_module(f"jax_streamk.tools.{command}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    options = [x for x in parser._actions if x.option_strings and x.nargs != 0]
    ran = []
    monkeypatch.setattr(module, "run", lambda arguments: ran.append(vars(arguments)))
    for option in options:
        first, second, *_ = option.choices or VALUES.get(option.dest, ["1", "2"])
        where = [] if option.dest in ("set", "groups", "result", "report", "programs") else OF_COMMANDS[command]
        words = [command, *where, option.option_strings[0], first, option.option_strings[0], second]
        if isinstance(option, argparse._AppendAction):
            main(words)
            assert len(ran[-1][option.dest]) == 2
        else:
            assert refused(capsys, *words).endswith(f"argument {option.option_strings[0]}: given more than once")


VALUES = {"dtype": ["bf16", "f16"], "out_dtype": ["bf16", "f32"], "schedule": ["auto", "stream-k"]}


@pytest.mark.parametrize("command", ["explain", "kernels", "bench", "tune"])
def test_every_command_takes_the_dtypes_that_plans_print(command, capsys, monkeypatch):
    words = [command, *OF_COMMANDS[command], "--dtype"]
    said = refused(capsys, *words, "bfloat")
    assert "--dtype: 'bfloat' is not a dtype: " in said and "bfloat16 (bf16)" in said and "int8 (s8)" in said
    taken = []
    monkeypatch.setattr(f"jax_streamk.tools.{command}.run", lambda arguments: taken.append(arguments.dtype))
    for short in ("f64", "f32", "bf16", "f16", "s8"):
        main([*words, short])
    names = ["float64", "float32", "bfloat16", "float16", "int8"]
    assert taken == ([[name] for name in names] if command == "tune" else names)


def test_int8_has_an_int32_result_in_every_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(measure.ROTATED_BYTES, "cpu", 1e5)
    extents = "64", "48", "640"
    family = "sm90" if jax.default_backend() == "gpu" else "host"
    path = write(tmp_path / "one.csv", ",".join(extents), header="m,n,k")
    assert "s8 x s8 -> s32" in out_of(capsys, "explain", *extents, "--dtype", "int8")
    assert all(
        f"{family}_s8_s32" in row["kernel"] for row in records_of(capsys, *extents, "--dtype", "int8", "--predict")
    )
    out_of(capsys, "tune", path, "--dtype", "int8", "--cache", str(tmp_path / "cache"))
    (problem,) = Store(tmp_path / "cache").plans(device_of(None))
    assert (problem.type_a, problem.type_d) == (_ffi.Type.s8, _ffi.Type.s32)
    quickly = "--rounds", "1", "--measure", "independent", "--out", str(tmp_path / "out.json")
    out_of(capsys, "bench", path, "--dtype", "int8", *quickly)
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert f"{family}_s8_s32" in row["plan"]["kernel"] and row["sides"]["jax_streamk"]["max_difference"] == 0
    assert row["bytes"] == 64 * 640 + 640 * 48 + 4 * 64 * 48


def test_what_does_not_fit_into_memory_is_said_in_a_line(tmp_path, monkeypatch, capsys):
    """On a machine that has not the memory for the operands."""
    monkeypatch.setattr(
        measure, "check_memory", lambda size, real=measure.check_memory: real(size if size < 1e6 else 1e18)
    )
    monkeypatch.setattr("jax_streamk.tools.bench.check_memory", measure.check_memory)
    where = ["--device", "cpu"]
    for words in (["explain", "800", "800", "800", "--measure"], ["kernels", "800", "800", "800"]):
        with pytest.raises(SystemExit, match=rf"^{words[0]}: MemoryError: this needs 1000000.0 TB of memory, and .*$"):
            main([*words, *where])
    path = write(tmp_path / "one.csv", "800,800,800", header="m,n,k")
    assert main(["tune", path, "--cache", str(tmp_path / "cache")]) == 1
    assert "800 x 800 x 800 bfloat16: failed: MemoryError: this needs" in capsys.readouterr().err
    if jax.default_backend() == "cpu":
        assert main(["bench", path]) == 1
        assert "FAILED jax_streamk of 800 x 800 x 800: MemoryError: this needs" in capsys.readouterr().out


def test_jax_may_run_out_of_memory_in_any_command(monkeypatch):
    def run(arguments):
        raise jax.errors.JaxRuntimeError(why)

    monkeypatch.setattr(info, "run", run)
    why = "RESOURCE_EXHAUSTED: Out of memory allocating 40000000000 bytes.\nAllocators: ..."
    with pytest.raises(SystemExit, match="^info: JaxRuntimeError: RESOURCE_EXHAUSTED: Out of .* bytes.$"):
        main(["info"])
    why = "INTERNAL: an error of ours"
    with pytest.raises(jax.errors.JaxRuntimeError):
        main(["info"])


def test_fit_refuses_what_is_no_table(tmp_path, capsys):
    bad = write(tmp_path / "bad.csv", "8,8,8", header="m,n,x")
    assert f"fit: error: {bad} has no column k" in refused(capsys, "fit", "--from", bad, "--device", "h100")
    assert "No such file" in refused(capsys, "fit", "--from", str(tmp_path / "missing.csv"), "--device", "h100")
    assert "argument --minutes: 'x' is not a time of 0 or more" in refused(capsys, "fit", "--minutes", "x")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_fit_a_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    text = capsys.readouterr().out
    examples = re.findall(rf"^  python -m jax_streamk ({command}.*)$", re.sub(r" \\\n +", " ", text), re.MULTILINE)
    assert end.value.code == 0 and len(examples) > 1 and max(map(len, text.splitlines())) <= 100
    # Examples are command lines that the command takes.
    module = importlib.import_module(f"jax_streamk.tools.{command}")
    monkeypatch.setattr(module, "run", lambda arguments: 17)
    for example in examples:
        assert main(shlex.split(example.partition(" > ")[0])) == 17, example


def test_the_sample_of_shapes_is_read():
    path = pathlib.Path(__file__).parents[1] / "examples" / "shapes.csv"
    found = shapes.read(path)
    assert len(found) == 6 and found[0] == Shape(16, 4096, 4096, source=found[0].source) and found[-1].batch == 32


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_a_shape_is_the_dot_general_it_says(batch, trans_a, trans_b):
    shape = Shape(2, 3, 4, trans_a, trans_b, batch)
    a, b = (np.arange(np.prod(stored), dtype=np.float32).reshape(stored) for stored in shape.stored())
    out = jax.lax.dot_general(a, b, shape.dimension_numbers())
    left, right = (np.swapaxes(x, -1, -2) if swapped else x for x, swapped in ((a, trans_a), (b, trans_b)))
    np.testing.assert_array_equal(out, left @ right)
    assert out.shape == ((batch,) if batch > 1 else ()) + (2, 3)


def test_info_tells_the_state_of_plans(tmp_path, capsys):
    device = device_of(None)
    problem = plan(jax.ShapeDtypeStruct((40, 64), jnp.float32), jax.ShapeDtypeStruct((64, 24), jnp.float32)).problem
    first = planner.choose(problem, None, device).candidates[0]
    store = Store(tmp_path)
    measured = Trial.of(first.kernel, first.schedule, LaunchPolicy.of(first.policy))
    store.add(device, problem, Tuned.now(measured, 8.0, 12.0))
    with open(store.path(device), "ab") as file:
        file.write(b"nonsense\n" + store.path(device).read_bytes().replace(b'"kernels": "', b'"kernels": "x'))
    (tmp_path / "another-gpu.jsonl").touch()
    assert not main(["info", "--json", "--cache", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    assert (
        report["tuned plans"]["folder"] == str(tmp_path) and report["tuned plans"]["other files"] == "another-gpu.jsonl"
    )
    (state,) = (state for state in report["tuned plans"].values() if isinstance(state, dict) and state["lines"])
    assert (state["lines"], state["plans in use"], state["stale lines"], state["corrupt lines"]) == (3, 1, 1, 1)
    assert report["kernels"]["count"] == len(jax_streamk.kernels())
    assert sum(report["kernels"]["host"].values()) == sum(
        kernel.family == _ffi.Family.host for kernel in jax_streamk.kernels()
    )
    assert report["versions"]["jax"] == jax.__version__ and device.kind in report["devices"]["default"]
    main(["info", "--cache", str(tmp_path)])
    text = capsys.readouterr().out
    assert "\n    stale lines: 1\n" in text and f"\n  jax: {jax.__version__}\n" in text


def test_info_says_what_fails(monkeypatch, capsys):
    def broken(*arguments, **keywords):
        raise RuntimeError("CUDA_ERROR_NO_DEVICE")

    monkeypatch.setattr(jax, "local_devices", broken)
    monkeypatch.setattr(jax, "devices", broken)
    monkeypatch.setattr(jax, "default_backend", broken)
    monkeypatch.setattr(_ffi, "kernels", broken)
    monkeypatch.setattr(info, "_DRIVER", pathlib.Path("/proc/self/mem"))
    tuned.kernel_set.cache_clear()
    assert not main(["info"])
    text = capsys.readouterr().out
    assert "kernels: failed: RuntimeError: CUDA_ERROR_NO_DEVICE" in text and "GPU: failed: RuntimeError" in text
    assert (
        "NVIDIA driver: failed: OSError" in text and re.search(r"CPU: .*, \d+ threads", text) and "tuned plans:" in text
    )


def test_the_command_line(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    run = dict(cwd=tmp_path, env=environment, capture_output=True, text=True)
    done = subprocess.run([sys.executable, "-m", "jax_streamk", "info"], **run)
    assert done.returncode == 0 and str(tmp_path / "jax_streamk") in done.stdout, done.stderr
    assert not any(tmp_path.iterdir())
    done = subprocess.run([sys.executable, "-m", "jax_streamk"], **run)
    assert done.returncode == 2 and "are required: COMMAND\nsee python -m jax_streamk --help\n" in done.stderr


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"jax_streamk {jax_streamk.__version__}\n"
    assert jax_streamk.__version__ == checks.version()


@pytest.mark.parametrize(
    "arguments",
    ["info", "info --json", "--help", "--version", "bench --from out.json", "tune shapes.csv"],
    ids=lambda text: text.split()[0],
)
def test_a_reader_may_leave(arguments, tmp_path):
    """As ``head`` does. The rest of the output is lost, without a message."""
    write(tmp_path / "shapes.csv", "8,8,8", header="m,n,k")
    result = {field: [] for field in results.FIELDS} | dict(
        format=results.FORMAT, date="2026-01-02", command="", limits={}, link_us=None
    )
    result |= dict(machine=dict(device="", platform="cpu", jax=""), task=dict(dtype="float32", activation=None))
    (tmp_path / "out.json").write_text(json.dumps(result))
    process = [sys.executable, "-m", "jax_streamk", *arguments.split()]
    read, written = os.pipe()
    os.close(read)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        process, cwd=tmp_path, env=environment, stdout=written, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(written)
    assert done.returncode in (0, 1, 141), done.stderr  # argparse may not notice, and rich ends with 1
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.fixture
def fitted(tmp_path, monkeypatch):
    """A machine with some constants changed, and a table of plans with the times that it estimates."""
    device = jax_streamk.H100
    start = machines.derived(device)
    moved = {"wgmma_flops_per_us_sm": 0.8, "gpc_bytes_per_us": 1.3, "launch_us": 1.3, "dram_bytes_per_us": 0.8}
    truth = start.replace(**{name: getattr(start, name) * factor for name, factor in moved.items()})
    rows, kernels = [], {kernel.name: kernel for kernel in described.cuda_kernels()}
    for m, n, k in itertools.product((32, 256, 1024, 4096), (1024, 6144), (512, 4096)):
        problem = plans.problems()[0]
        problem = dataclasses.replace(problem, m=m, n=n, k=k, lda=k, ldb=n, ldd=n)
        for x in planner.choose(problem, None, device, listed=100).candidates:
            plan = Trial.of(x.kernel, x.schedule, LaunchPolicy.of(x.policy))
            parts = kernels[x.kernel], problem.native(), x.schedule, device.native(), truth.native
            rows.append(plans.record(problem, plan, _ffi.estimate(*parts).microseconds))
    with (tmp_path / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fit.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return device, start, truth, moved, tmp_path / "table.csv"


def test_fit_finds_the_constants_that_a_table_was_made_with(tmp_path, fitted, capsys):
    device, start, truth, moved, table = fitted
    out = tmp_path / "gpu.json"
    assert not main(["fit", "--from", str(table), "--device", "h100", "--out", str(out)])
    found = machines.parse("gpu", out.read_text())
    assert (found.kinds, found.arch, found.topology.sms) == ((device.kind,), 90, 132)
    assert found.date and found.command == "python -m jax_streamk fit --from table.csv --device h100"
    for name in moved:
        before, after = (abs(math.log(getattr(x, name) / getattr(truth, name))) for x in (start, found))
        assert after < 0.8 * before, name
    *_, fitted, stored = capsys.readouterr().out.splitlines()
    regrets = re.fullmatch(r"regret fitted: ([\d.]+) on shapes that are held out, ([\d.]+) on the others", fitted)
    assert all(1 <= float(x) < 1.01 for x in regrets.groups()) and stored == f"stored in {out}"


def test_plans_look_for_what_was_fitted_here(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "user_directory", lambda: tmp_path)
    device = dataclasses.replace(jax_streamk.H100, kind="a GPU of ours", sms=114)
    machine = dataclasses.replace(machines.derived(device), kinds=(device.kind,), date="2026-01-01")
    (tmp_path / "ours.json").write_text(machine.text())
    for cached in (machines.measured, machines.machine_of):
        monkeypatch.setattr(machines, cached.__name__, functools.cache(cached.__wrapped__))
    assert machines.is_measured(device) and machines.machine_of(device).name == "ours"
    assert not machines.is_measured(dataclasses.replace(device, sms=100))


def test_fit_measures_on_a_gpu_only(tmp_path, monkeypatch):
    monkeypatch.setattr("jax_streamk.tools.fit.device_named", lambda _: device_for_lowering("cpu"))
    with pytest.raises(SystemExit, match="fit: it fits constants of GPUs, .*--from"):
        main(["fit", "--out", str(tmp_path / "gpu.json")])


def test_fit_goes_on_with_the_plans_measured_before(tmp_path, monkeypatch, capsys):
    """Every problem of the fixed set is measured once, and a failure does not end the measurement."""
    device, asked = jax_streamk.H200, []

    def measured(problem, memory):
        asked.append(problem)
        if len(asked) == 3:
            raise RuntimeError("no memory is left")
        found = planner.choose(problem, None, device, listed=3).candidates
        return [
            plans.record(problem, Trial.of(x.kernel, x.schedule, LaunchPolicy.of(x.policy)), x.cost.microseconds)
            for x in found
        ]

    monkeypatch.setattr("jax_streamk.tools.fit.device_named", lambda _: device)
    monkeypatch.setattr("jax_streamk.tools.fit.Memory", lambda _: None)
    monkeypatch.setattr("jax_streamk.tools.fit.lowering.check_build", lambda _: None)
    monkeypatch.setattr("jax_streamk.tools.fit._STEPS", 1)
    monkeypatch.setattr(plans, "problems", lambda: all_problems[:8])
    monkeypatch.setattr(plans, "measured", measured)
    # XLA is faster up to k = 24, and at small products of a batch, never at others.
    by_xla = lambda p: 0.5 if p.k <= 24 or (p.batch > 1 and p.m <= 32) else 2.0
    monkeypatch.setattr(contest, "times", lambda plan, **_: (10.0, 10 * by_xla(plan.problem)))
    out, beside = tmp_path / "gpu.json", len(plans.beside_xla())
    assert not main(["fit", "--out", str(out), "--minutes", "0.2"])
    found = machines.parse("gpu", out.read_text())
    assert len(asked) == 8 and found.is_measured
    assert f"2 of {beside + 8}, {asked[0]}: 3 plans\n" in capsys.readouterr().err
    before, limits = (dict(x.limits) for x in (machines.derived(device), found))
    assert (limits["few_k"], limits["small_batched"]) == (24, 32**3)
    assert limits["odd_rows"] < 40 and limits["unaligned_k"] < 64
    assert limits["xla_earlier_us"] < before["xla_earlier_us"]
    assert not main(["fit", "--out", str(out), "--resume"])
    assert len(asked) == 9 and asked[8] == asked[2]


all_problems = plans.problems()


@pytest.mark.parametrize("rule", left_to_xla.RULES["cuda"])
def test_each_rule_is_measured_on_both_sides_of_its_limit(rule):
    machine = machines.derived(jax_streamk.H200)
    problems = [problem for of, problem in plans.beside_xla() if of == rule]
    values = [left_to_xla.RULES["cuda"][rule].value(problem, machine) for problem in problems]
    limit = getattr(machine, rule)
    assert len(values) >= 6 and min(values) <= limit / 1.4 and max(values) >= 1.4 * limit


def test_tables_may_be_of_kernels_that_are_gone(tmp_path):
    (kernel, *_), table = described.cuda_kernels(), tmp_path / "table.csv"
    gone = described.read(io.StringIO(described.text().replace(kernel.name, "gone")))[0]
    record = dict(zip(fit.COLUMNS, ("rr", 64, 64, 256, "gone", "data_parallel", 1, "ordered", "m", 1, 10.0)))
    machine = machines.machine_of(jax_streamk.H200)
    of = lambda: fit.tables_of([record], fit.kernels_beside(table), machine, jax_streamk.H200)
    with pytest.raises(ValueError, match="no kernel of this version is called gone: describe it in a kernels.csv"):
        of()
    with open(tmp_path / "kernels.csv", "w") as file:
        described.write([gone], file)
    ((row,),) = (made.rows for made in of())
    assert row.kernel.name == "gone" and row.kernel.tile_m == kernel.tile_m


def test_measured_plans_are_records_of_a_table(monkeypatch):
    device = device_of(None)
    monkeypatch.setitem(measure.ROTATED_BYTES, device.platform, 1e5)
    problem = next(x for x in all_problems if x.type_a == _ffi.Type.bf16)
    problem = dataclasses.replace(problem, m=64, n=64, k=256, lda=256, ldb=64, ldd=64)
    rows = plans.measured(problem, measure.Memory(device))
    assert set(fit.COLUMNS) == set(rows[0]) and len(rows) > 1
    assert all(float(row["us"]) > 0 and row["majors"] == "rr" and row["m"] == 64 for row in rows)
    assert {plans.key_of(row) for row in rows} == {plans.key_of(plans.record_of(problem))}


def test_kernels_lists_a_build(capsys, monkeypatch):
    built = [kernel.name for kernel in jax_streamk.kernels()]
    lines = out_of(capsys, "kernels").splitlines()
    assert lines[0].startswith(f"{len(built)} kernels of this build") and [x.split()[0] for x in lines[4:]] == built
    assert [row["name"] for row in records_of(capsys)] == built
    assert {row["family"] for row in records_of(capsys, "--device", "cpu")} == {"host"}
    # A build with CUDA kernels describes them; others have the description.
    host = [kernel for kernel in jax_streamk.kernels() if kernel.family == _ffi.Family.host]
    monkeypatch.setattr(_ffi, "kernels", lambda: host + described.cuda_kernels())
    assert out_of(capsys, "kernels", "--csv", "--device", "h200") == described.text()


def test_kernels_compares_splits_as_predicted(capsys):
    device, splits = jax_streamk.H200, [1, 2, 4, 8, 16]
    rows = records_of(capsys, "128", "4096", "4096", "--device", "h200", "--best", "2", "--predict")
    assert sorted(int(row["splits"]) for row in rows) == sorted(2 * splits)
    times = [float(row["predicted_us"]) for row in rows]
    assert times == sorted(times) and not any(row["measured_us"] for row in rows)
    # The first is the planner's own choice.
    abstract = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 4096), (4096, 4096))]
    made = plan(*abstract, device=device, schedule=jax_streamk.DataParallel())
    assert (rows[0]["kernel"], rows[0]["splits"]) == (made.kernel, "1")
    assert times[0] == pytest.approx(made.microseconds, abs=0.01)
    for row in rows:
        us, gigabytes, teraflops = (float(row[name]) for name in ("predicted_us", "gb_per_s", "tflop_per_s"))
        assert gigabytes * us * 1e3 == pytest.approx(2 * (2 * 128 * 4096 + 4096**2), rel=0.01)
        assert teraflops * us * 1e6 == pytest.approx(2 * 128 * 4096**2, rel=0.01)
        if row["reduction"] == "separate":  # its partial sums, in float32
            assert int(row["workspace_bytes"]) == int(row["splits"]) * 128 * 4096 * 4
    words = "64", "512", "512", "--device", "h100", "--layout", "rc", "--reduction", "ordered", "--predict"
    columns = records_of(capsys, *words)
    assert all("_rc_" in row["kernel"] and row["reduction"] in ("", "ordered") for row in columns)


def test_kernels_measures_what_is_here(capsys, monkeypatch):
    monkeypatch.setitem(measure.ROTATED_BYTES, device_of(None).platform, 1e5)
    words = "64", "64", "256", "--splits", "1,2", "--best", "1"
    rows = records_of(capsys, *words)
    assert [float(row["measured_us"]) for row in rows] == sorted(float(row["measured_us"]) for row in rows)
    text = out_of(capsys, "kernels", *words)
    assert "measured" in text and all(row["kernel"] in text for row in rows)
    assert "measured" not in out_of(capsys, "kernels", *words, "--predict").splitlines()[-3]

    def fails(*arguments):
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(measure.Rotation, "time", fails)
    assert main(["kernels", *words]) == 1
    assert "at 2 splits: no memory is left" in capsys.readouterr().err


def test_kernels_fits_a_terminal(capsys):
    assert max(map(len, out_of(capsys, "kernels", "--device", "h200").splitlines())) <= 100
    # The longest name, and every column.
    (kernel,) = (x for x in described.cuda_kernels() if x.name == "sm90_f32_f32_rc_64x16x64_1x1_pingpong_swap_tf32x3")
    cost = types.SimpleNamespace(microseconds=98765.4, waves=1234.5)
    row = kernels.Row(
        kernel, Trial(kernel.name, "split_k", 16, "separate", LaunchPolicy()), cost, 2**40, 98765.4, 255, 1
    )
    row.counters = dict.fromkeys(kernels._COUNTERS, 100.0)
    problem = dataclasses.replace(all_problems[0], m=10**5, n=10**5, k=10**5)
    arguments = types.SimpleNamespace(dtype="float32", layout="rc")
    assert max(map(len, kernels._lines([row], problem, arguments, jax_streamk.H200))) <= 100


def test_kernels_says_what_is_wrong(capsys, monkeypatch):
    assert "M, N and K must be given together" in refused(capsys, "kernels", "5", "5")
    assert "--best is about a product" in refused(capsys, "kernels", "--best", "2")
    assert "'1,0' is not a list of positive integers" in refused(capsys, "kernels", "8", "8", "8", "--splits", "1,0")
    assert "--ncu runs on a GPU of this machine" in refused(
        capsys, "kernels", "8", "8", "8", "--device", "cpu", "--ncu"
    )
    said = refused(capsys, "kernels", "8", "8", "8", "--splits", "50", "--predict")
    assert said.endswith("splits=50 exceeds its 1 k-tiles of 64: it must be at most 1")
    words = "kernels", "8", "8", "8", "--dtype", "int8", "--device", "h200"
    assert "must be multiples of 16 elements" in refused(capsys, *words)


NCU = """#!{python}
import pickle, sys
assert sys.argv[1] == "--csv" and "launch_each" in sys.argv[-1]
assert sys.argv[sys.argv.index("--print-kernel-base") + 1] == "mangled"
path = sys.argv[-1].split("'")[1]
problem, device, plans = pickle.load(open(path, "rb"))
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
print("==PROF== Connected")
print('"ID","Kernel Name",' + ",".join(map('"{{}}"'.format, metrics)))
print('"","",' + '"%",' * (len(metrics) - 1) + '"ns"')
def kernel(name, percent, time):
    print(f'"0","{{name}}",' + f'"{{percent}}",' * (len(metrics) - 1) + f'"{{time:,}}"')
for i, plan in enumerate(plans):
    kernel("wrapped_sine", 1, 10)
    kernel("_ZN11jax_streamk9copy_rowsE6Copies", 2, 50_000)
    kernel("_ZN11jax_streamk17sm80_cutlass_gemmI1KEvv", 3, 100)
    kernel("_ZN11jax_streamk17sm80_cutlass_gemmI1KEvv", 20 + i, 12_345)
    kernel("_ZN11jax_streamk13reduce_slicesEv", 4, 50_000)
{end}
"""


def test_kernels_counts_by_nsight_compute(capsys, monkeypatch, tmp_path):
    def ncu(end=""):
        (tmp_path / "ncu").write_text(NCU.format(python=sys.executable, end=end))
        (tmp_path / "ncu").chmod(0o755)

    words = "kernels", "16", "4096", "4096", "--device", "h200", "--best", "1", "--predict", "--ncu"
    monkeypatch.setattr(_ffi, "has_cuda", True)
    monkeypatch.setattr(kernels, "jax_device_of", lambda device: jax.devices()[0])
    monkeypatch.setattr(_ffi.KernelInfo, "resources", lambda kernel: (168, 1))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Nsight Compute, whose program ncu is not on the PATH: install" in refused(capsys, *words)
    ncu()
    rows = list(csv.DictReader(out_of(capsys, *words, "--csv").splitlines()))
    for name in ("occupancy", "dram", "l2", "sm"):
        assert [float(row[f"{name}_percent"]) for row in rows] == [20 + i for i in range(len(rows))]
    assert "occupancy" in out_of(capsys, *words)
    ncu('print("==ERROR== ERR_NVGPUCTRPERM")')
    with pytest.raises(SystemExit, match="only administrators may read performance counters here"):
        main(list(words))
    ncu('sys.exit("==ERROR== no device")')
    with pytest.raises(SystemExit, match="ncu counted 5 of 5 launches and ended with:(.|\n)*no device"):
        main(list(words))


def test_a_profiled_process_launches_each_plan(tmp_path, monkeypatch):
    device = device_of(None)
    monkeypatch.setitem(measure.ROTATED_BYTES, device.platform, 1e5)
    problem = dataclasses.replace(all_problems[0], m=64, n=64, k=256, lda=256, ldb=64, ldd=64)
    found = planner.choose(problem, None, device, listed=3).candidates
    listed = [Trial.of(x.kernel, x.schedule, LaunchPolicy.of(x.policy)) for x in found]
    launched = []
    launch = _ffi.launch
    monkeypatch.setattr(_ffi, "launch", lambda kernel, *rest: launched.append(kernel) or launch(kernel, *rest))
    (tmp_path / "launches").write_bytes(pickle.dumps((problem, device, listed)))
    kernels.launch_each(tmp_path / "launches")
    assert launched == [x.kernel for x in listed]


def test_tune_needs_kernels_for_the_gpu(tmp_path, monkeypatch):
    """Descriptions of kernels suffice for plans, but cannot run."""
    monkeypatch.setattr(_ffi, "has_cuda", False)
    monkeypatch.setattr("jax_streamk.tools.tune.device_of", lambda device: jax_streamk.H200)
    with pytest.raises(SystemExit, match="tune: this build of jax_streamk has no CUDA kernels"):
        main(["tune", write(tmp_path / "shapes.csv", "40,24,64,,,,a"), "--cache", str(tmp_path / "cache")])
