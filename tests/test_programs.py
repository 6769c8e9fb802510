"""``bench --programs``: every program at its small size, and how programs are found, measured and shown."""

import dataclasses
import json
import pathlib
import re
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import pytest
from test_bench import here, refused

import jax_streamk
from jax_streamk.tools import programs, report, results
from jax_streamk.tools.sides import INVARIANT, OURS, XLA

# Of those that differ from another by numbers only, one or two.
RUN = [
    "data_parallel_2_gpus",
    "equinox_step",
    "gauss_newton_f32",
    "gauss_newton_f64",
    "gpt2_forward",
    "gpt2_step",
    "haiku_step",
    "linen_forward",
    "linen_step",
    "llama_decode_1",
    "llama_decode_16",
    "llama_decode_16_int4",
    "llama_decode_1_int4",
    "llama_layers_1",
    "llama_layers_1_int4",
    "llama_prefill_2048",
    "lora_step",
    "moe_decode_mxfp4",
    "moe_forward",
    "moe_forward_float8",
    "moe_gradient",
    "moe_gradient_float8",
    "nnx_forward",
    "nnx_step",
    "pinn_step",
    "ridge_f32",
    "ridge_f64",
    "tp2_1_layers_16_tokens",
    "tp4_8_layers_16_tokens",
    "vit_b16_forward",
]

OWN = """
import jax
import jax.numpy as jnp
from jax_streamk.tools.programs import UserProgram

def make(dtype, size):
    def step(state, w):
        hidden = jnp.tanh(state @ w)
        return hidden @ w.T, hidden.sum()

    state, w = jax.random.normal(jax.random.key(0), (2, size, size)).astype(dtype) / size**0.5
    return step, (state, w)

def failing(dtype, size):
    raise NotImplementedError("not this one")

def absent(dtype, size):
    import no_such_package

def program(name, make=make, **options):
    return UserProgram(name, make, small=dict(size=48), real=dict(size=64), **options)

PROGRAMS = [program("two_products", carries=True, dtype="float32")]
"""


@pytest.fixture(autouse=True)
def compile_at_once():
    """Compiling takes most of the time of these tests, and how fast the programs are is not what they are about."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a file of programs, the given lines after those above, in the current folder."""

    def write(*lines):
        (tmp_path / "own.py").write_text("\n".join([OWN, *lines]))

    monkeypatch.chdir(tmp_path)
    # The package may be installed elsewhere.
    monkeypatch.setattr(programs, "FOLDER", pathlib.Path(__file__).parents[1] / programs.FOLDER)
    write()
    return write


@pytest.fixture(scope="module")
def every():
    return {program.name: program for program in programs.chosen()}


def test_programs_have_names_and_sizes(every):
    listed = [program for path in programs.folder().glob("*.py") for program in programs.load(path)]
    assert len({program.name for program in listed}) == len(listed) == len(every)
    for program in listed:
        assert program.small.keys() == program.real.keys() and program.small != program.real, program.name
    assert {f"llama_decode_{m}" for m in (1, 8, 16, 32, 64, 128, 256)} <= every.keys()
    ways = {(program.devices, *program.real.values()) for name, program in every.items() if name.startswith("tp")}
    assert {(devices, layers) for devices, _, layers, *_ in ways} == {(2, 1), (2, 8), (4, 1), (4, 8)}


@pytest.mark.parametrize("name", RUN)
def test_program(name, every):
    if name not in every:
        pytest.skip("a package that its file needs is not installed")
    program = every[name]
    if program.devices > len(jax.devices()):
        pytest.skip(f"needs {program.devices} devices")
    row = programs.measure(program, "small", 1)
    assert "skipped" not in row and "not_compared" not in row, row
    xla, ours = row["sides"][XLA], row["sides"][OURS]
    assert "error" not in xla and "error" not in ours, row
    assert xla["custom_calls"] == 0 and ours["custom_calls"] > 0
    # Equal results: in the median array no further from a wider dtype's than twice XLA's.
    assert not ours["wrong"], row
    assert ours["argument_bytes"] == xla["argument_bytes"] and min(xla["peak_bytes"], ours["peak_bytes"]) > 0
    assert ours["ratio"]["step"] == xla["step"]["median_us"] / ours["step"]["median_us"]
    assert programs.FEWEST_STEPS <= row["steps"] <= programs.MOST_STEPS and ours["step"]["samples"] == 2


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU's planner may let XLA dequantize")
@pytest.mark.parametrize(
    "name, types, count",
    [
        ("llama_decode_16_int4", "bf16 x s4", 8),
        ("moe_decode_mxfp4", "bf16 x e2m1", 3),
        ("moe_gradient_float8", "e4m3 x e4m3", 3),
        ("moe_gradient_float8", "e5m2 x e4m3", 3),
        ("moe_gradient_float8", "e4m3 x e5m2", 3),
    ],
)
def test_products_of_quantized_weights_read_the_numbers(name, types, count, every):
    function, arguments = every[name].make(jnp.bfloat16, **every[name].small)
    products = jax_streamk.accelerate(function).explain(*arguments)
    of_numbers = [row.count for row in products.rows if row.plan and f"{types} " in str(row.plan.problem)]
    assert sum(of_numbers) == count, str(products)


def test_batch_invariant_programs_are_beside_the_others(own):
    (program,) = programs.chosen(["own.py"])
    row = programs.measure(program, "small", 1, batch_invariant=True)
    invariant = row["sides"][INVARIANT]
    assert invariant["custom_calls"] == 2 and invariant["ratio"]["step"] > 0 and "relative_error" not in invariant


def test_a_row_counts_what_the_compiled_program_has(own):
    (program,) = programs.chosen(["own.py"])
    row = programs.measure(program, "small", 2)
    xla, ours = row["sides"][XLA], row["sides"][OURS]
    assert (xla["custom_calls"], ours["custom_calls"]) == (0, 2)
    assert ours["argument_bytes"] == 2 * 4 * 48 * 48
    assert ours["step"]["samples"] == xla["step"]["samples"] == 4
    # The state is donated: there is room for the result and what lies between, not for another state.
    step = programs._Step(program, *program.make(jnp.dtype("float32"), size=48))
    state, _ = step._arguments
    out, _ = step()
    assert state.is_deleted() and step._arguments[0] is out
    assert 0 <= xla["relative_error"] < 1e-2 and 0 <= ours["relative_error"] < 1e-2


def test_programs_are_found_by_file_name_and_pattern(own, every, monkeypatch, capsys):
    names = lambda *wanted: [program.name for program in programs.chosen(wanted)]
    assert names("vit_b16_forward") == names("vit") == ["vit_b16_forward"]
    assert names("llama_decode_1*") == [
        "llama_decode_1",
        "llama_decode_16",
        "llama_decode_128",
        "llama_decode_1_int4",
        "llama_decode_16_int4",
    ]
    assert names("ridge_f64", "least_squares")[:2] == ["ridge_f64", "ridge_f32"]
    assert names("own.py") == ["two_products"] and names("own.py", "vit") == ["two_products", "vit_b16_forward"]
    assert names() == list(every)
    assert "no program 'nope'; there are data_parallel_2" in refused(monkeypatch, capsys, "--programs", "nope")
    assert "No such file" in refused(monkeypatch, capsys, "--programs", "nope.py")
    # Without a checkout only files of one's own.
    monkeypatch.setattr(programs, "FOLDER", "benchmarks/absent")
    assert "in a checkout" in refused(monkeypatch, capsys, "--programs")
    assert names("own.py") == ["two_products"]


def test_what_does_not_belong_to_programs_is_refused(monkeypatch, capsys):
    assert "--small is a size of --programs" in refused(monkeypatch, capsys, "--set", "decode_llm", "--small")
    for argument in ("--column-major", "--no-peers", "--dtype=float16", "--weights=int4", "--measure=dependent"):
        said = refused(monkeypatch, capsys, "--programs", "vit", argument)
        assert f"{argument.partition('=')[0]} is of shapes" in said


def test_the_command_writes_resumes_and_shows(own, tmp_path, monkeypatch, capsys):
    own(
        'PROGRAMS += [program("far", devices=999), program("alone", absent), program("second", dtype="float64")]',
        'PROGRAMS.append(program("half"))',
    )
    arguments = ["--programs", "own.py", "--small", "--rounds", 1, "--out", "out.json"]
    assert not here(monkeypatch, *arguments, "--limit", 0)
    assert "5 programs unmeasured, the first two_products" in capsys.readouterr().out
    assert not here(monkeypatch, *arguments, "--resume", "--plot", "plots")
    out = capsys.readouterr().out
    result = results.load("out.json")
    assert [row["program"] for row in result["rows"]] == ["two_products", "far", "alone", "second", "half"]
    _, far, alone, second, half = result["rows"]
    assert "999 devices" in far["skipped"] and alone["skipped"] == "not installed: no_such_package"
    assert "Skipped: far: needs 999 devices" in out and "Skipped: alone: not installed: no_such_package." in out
    assert half["sides"][OURS]["relative_error"] > 1e-4 and second["sides"][OURS]["relative_error"] < 1e-9
    assert result["task"] == {"size": "small"} and result["summary"][OURS]["shapes"] == 3
    page = (tmp_path / "out.md").read_text()
    for text in (out, page):
        assert re.search(r"two_products .*float32 .* 2 ", text) and "3 programs have a mean ratio of" in text
        assert re.search(r"alone .* skipped ", text)
    for kind in ("svg", "png"):
        assert (tmp_path / "plots" / f"programs.{kind}").stat().st_size > 0
    assert not here(monkeypatch, "--from", "out.json")
    assert capsys.readouterr().out == out.split("wrote")[0]
    # Nothing that was measured is measured again; what was skipped may be there by now.
    own('PROGRAMS += [program("alone")]')
    assert not here(monkeypatch, *arguments, "--resume")
    again = results.load("out.json")["rows"]
    assert [row["program"] for row in again] == ["two_products", "second", "half", "alone"] and again[:3] == [
        row for row in result["rows"] if "skipped" not in row
    ]
    said = refused(monkeypatch, capsys, *[x for x in arguments if x != "--small"], "--resume")
    assert "task of out.json is {'size': 'small'}, and now {'size': 'real'}" in said


@pytest.mark.parametrize(
    "ours, said",
    [
        (lambda fn: lambda *args: jax.tree.map(lambda x: 1.1 * x, fn(*args)), r"its relative error is 0\.\d+, XLA's"),
        (lambda fn: lambda *args: jax.tree.map(lambda x: x / 0, fn(*args)), "its relative error is not finite, XLA's"),
        (lambda fn: lambda *args: fn(*args) + undefined, "NameError"),  # noqa: F821
    ],
    ids=["wrong", "infinite", "failing"],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_wrong_or_fails_is_reported(own, monkeypatch, capsys, ours, said, dtype):
    own(f'PROGRAMS = [program("two_products", dtype="{dtype}")]')
    load = programs.load
    monkeypatch.setattr(programs, "load", lambda path: [dataclasses.replace(p, accelerate=ours) for p in load(path)])
    assert here(monkeypatch, "--programs", "own.py", "--small", "--rounds", 1) == 1
    assert re.search(f"FAILED jax_streamk of two_products: {said}", capsys.readouterr().out)


def test_times_remain_where_the_reference_fails(own, monkeypatch, capsys):
    own(
        "def narrow_only(dtype, size):",
        "    return failing(dtype, size) if dtype == 'float32' else make(dtype, size)",
        "PROGRAMS = [program('one', narrow_only)]",
    )
    assert not here(monkeypatch, "--programs", "own.py", "--small", "--rounds", 1)
    out = capsys.readouterr().out
    assert "results of one were not compared: NotImplementedError: not this one" in out and "1 programs have" in out


def test_a_program_that_cannot_be_made_is_reported(own, monkeypatch, capsys):
    own('PROGRAMS = [program("one", failing)]')
    assert here(monkeypatch, "--programs", "own.py", "--small", "--out", "out.json") == 1
    assert "FAILED XLA of one: NotImplementedError: not this one" in capsys.readouterr().out
    assert "No program was measured" in report.markdown(results.load("out.json"))


def test_a_file_that_lacks_a_package_is_a_skipped_program(own, monkeypatch, capsys):
    own("import no_such_package")
    assert not here(monkeypatch, "--programs", "own.py", "--small", "--out", "out.json")
    (row,) = json.loads(pathlib.Path("out.json").read_text())["rows"]
    assert row["program"] == "own" and row["skipped"] == "not installed: no_such_package"


def test_programs_are_a_table_of_their_machine(own, tmp_path, monkeypatch, capsys):
    (tmp_path / "kept").mkdir()
    assert not here(monkeypatch, "--programs", "own.py", "--small", "--rounds", 1, "--out", "kept/programs.json")
    capsys.readouterr()
    assert not here(monkeypatch, "--report", "kept", "--plot", "plots")
    out = capsys.readouterr().out
    result = results.load("kept/programs.json")
    ratio = result["rows"][0]["sides"][OURS]["ratio"]["step"]
    assert out.startswith(f"### {result['machine']['device']}\n")
    assert f"1 programs have a mean ratio of {ratio:.3f}" in out
    assert re.search(rf"^\| two_products +\| float32 \|.* \| +{ratio:.2f} \| +2 \|", out, re.MULTILINE)
    (plot,) = (tmp_path / "plots").iterdir()
    text = "".join(xml.etree.ElementTree.parse(plot).getroot().itertext())
    assert plot.name.startswith("programs_") and "two_products" in text
