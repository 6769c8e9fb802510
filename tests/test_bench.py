"""``python -m jax_streamk bench``: what it measures, writes and refuses, and its parts that need no clock."""

import collections
import importlib.util
import json
import pathlib
import re
import signal
import subprocess
import sys
import time
import weakref
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_streamk
from jax_streamk import __main__ as command
from jax_streamk.tools import bench, float8, groups, report, results, shapes, sides, weights
from jax_streamk.tuning import timing
from jax_streamk.tuning.programs import Program, chain, wall_sample

TOLERANCE = 1e-5 if jax.default_backend() == "cpu" else 2e-3  # of float32: on a GPU both multiply in TF32
# Large enough to be ours on CPUs and Hopper GPUs.
SHAPES = "m,n,k,trans_a,trans_b,batch\n16,48,640,0,0,1\n64,64,4096,1,0,1\n33,97,129,0,1,1\n32,96,128,0,0,3\n"
IN_GROUPS = (
    "groups,m,n,k,routing,pass\n4,32,48,64,zipf,forward\n4,32,48,64,uniform,lhs\n5,33,48,64,,rhs\n16,8,32,64,zipf,\n"
)
QUICK = ["--dtype", "float32", "--rounds", "1", "--no-peers", "--measure", "independent"]


def run(tmp_path, *arguments):
    process = [sys.executable, "-m", "jax_streamk", "bench", *map(str, arguments)]
    return subprocess.run(process, cwd=tmp_path, capture_output=True, text=True, timeout=300)


def here(monkeypatch, *arguments):
    """Runs the command in this process, and returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["jax_streamk", "bench", *map(str, arguments)])
    return command.main()


def refused(monkeypatch, capsys, *arguments):
    """What the command says as it refuses its arguments."""
    with pytest.raises(SystemExit) as end:
        here(monkeypatch, *arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


def wall_measures():
    return [each for each in sides.MEASURES if each != "device" or jax.default_backend() == "gpu"]


def test_bench_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    (tmp_path / "shapes.csv").write_text(SHAPES)
    done = run(tmp_path, "shapes.csv", "--dtype", "float32", "--rounds", 1, "--out", "out.json")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 4 and all(re.match(rf"{i} of 4 in [\d.]+ \w+, \d+ x ", x) for i, x in enumerate(lines, 1))
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["measures"] == wall_measures()
    assert (
        result["machine"]["jax"] == jax.__version__
        and result["machine"]["device"]
        and "bench shapes.csv" in result["command"]
    )
    wanted = shapes.read(tmp_path / "shapes.csv")
    assert [(row["m"], row["n"], row["k"], row["batch"]) for row in result["rows"]] == [
        (s.m, s.n, s.k, s.batch) for s in wanted
    ]
    for row, shape in zip(result["rows"], wanted):
        xla, ours = row["sides"][sides.XLA], row["sides"][sides.OURS]
        for each in result["measures"]:
            low, high = ours[each]["quartiles_us"]
            assert 0 < low <= ours[each]["median_us"] <= high
            assert ours["ratio"][each] == xla[each]["median_us"] / ours[each]["median_us"]
        assert ours["max_difference"] < TOLERANCE and not ours["wrong"]
        assert row["plan"]["kernel"] == sides.Task("float32").plan(shape).kernel
        assert row["flops"] == 2 * shape.batch * shape.m * shape.n * shape.k
        assert row["bytes"] == 4 * shape.batch * (shape.m * shape.k + shape.k * shape.n + shape.m * shape.n)
    of, first = result["summary"][sides.OURS], result["measures"][0]
    ratios = [row["sides"][sides.OURS]["ratio"][first] for row in result["rows"]]
    assert of["geomean"][first] == pytest.approx(np.exp(np.mean(np.log(ratios))))
    assert of["losses"][first] == sum(ratio < 0.95 for ratio in ratios) and of["shapes"] == 4

    page = (tmp_path / "out.md").read_text()
    for row in result["rows"]:
        assert re.search(
            rf"^\| +{row['m']} \| +{row['n']} \| +{row['k']} \|.*{row['plan']['kernel']}", page, re.MULTILINE
        )
    assert f"{of['geomean'][first]:.3f}" in page and f"{of['geomean'][first]:.3f}" in done.stdout
    monkeypatch.chdir(tmp_path)
    here(monkeypatch, "--from", "out.json", "--plot", "plots")
    assert capsys.readouterr().out.split("wrote")[0] == done.stdout
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "roofline.svg",
        "roofline.png",
        "ratio.svg",
        "ratio.png",
    }
    for name in ("roofline", "ratio"):
        assert xml.etree.ElementTree.parse(tmp_path / "plots" / f"{name}.svg").getroot().tag.endswith("svg")
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))


def test_a_killed_run_is_resumed(tmp_path, monkeypatch, capsys):
    lines = [f"{8 * i},128,512\n" for i in range(1, 400)]
    (tmp_path / "shapes.csv").write_text("".join(["m,n,k\n", *lines]))
    arguments = ["shapes.csv", *QUICK, "--out", "out.json"]
    with subprocess.Popen(
        [sys.executable, "-m", "jax_streamk", "bench", *arguments], cwd=tmp_path, stderr=subprocess.DEVNULL
    ) as process:
        end = time.monotonic() + 120
        while (before := read(tmp_path / "out.json")) < 2 and time.monotonic() < end and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    kept = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert 2 <= before <= len(kept) < 400

    monkeypatch.chdir(tmp_path)
    other = ["bfloat16" if word == "float32" else word for word in arguments]
    assert "out.json exists; --resume" in refused(monkeypatch, capsys, *other)
    said = refused(monkeypatch, capsys, *other, "--resume")
    assert "'dtype': 'float32'" in said and "'dtype': 'bfloat16'" in said
    all_ = len(kept) + 2
    (tmp_path / "shapes.csv").write_text("".join(["m,n,k\n", *lines[:all_]]))
    here(monkeypatch, *arguments, "--resume")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert rows[: len(kept)] == kept and [row["m"] for row in rows] == [8 * i for i in range(1, all_ + 1)]
    assert all(row["sides"][sides.OURS]["max_difference"] < TOLERANCE for row in rows)


def test_ctrl_c_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    (tmp_path / "shapes.csv").write_text(SHAPES)
    monkeypatch.chdir(tmp_path)
    measured = []

    def interrupted(*arguments, measure=bench.measure):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(measure(*arguments))
        return measured[-1]

    monkeypatch.setattr(bench, "measure", interrupted)
    monkeypatch.setattr(bench, "_limits", lambda dtype: {})  # XLA tunes its large product for long
    assert here(monkeypatch, "shapes.csv", *QUICK, "--out", "out.json") == 130
    result = json.loads((tmp_path / "out.json").read_text())
    assert (
        len(result["rows"]) == 2
        and result["stopped"] == "by the user, 2 shapes unmeasured, the first 33 x 97 x 129 B^T"
    )
    assert "Stopped by the user" in capsys.readouterr().out and (tmp_path / "out.md").exists()
    # Wherever else it is, too.
    monkeypatch.setattr(bench, "wall_sample", lambda *_: interrupted())
    assert here(monkeypatch, "shapes.csv", *QUICK) == 130
    assert "Traceback" not in capsys.readouterr().err


def read(path):
    """The number of shapes in a result that is being written; the file is never incomplete."""
    return len(json.loads(path.read_text())["rows"]) if path.exists() else 0


def test_the_limit_ends_a_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "shapes.csv").write_text(SHAPES)
    monkeypatch.chdir(tmp_path)
    here(monkeypatch, "shapes.csv", "--dtype", "float32", "--limit", 0, "--out", "out.json")
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["rows"] == [] and result["stopped"] in capsys.readouterr().out
    assert "limit of 0 seconds, 4 shapes unmeasured, the first 16 x 48 x 640" in result["stopped"]
    with pytest.raises(SystemExit, match="no shape was measured"):
        here(monkeypatch, "--from", "out.json", "--plot", "plots")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1: the header has no column m, n, k"),
        ("m,n\n1,2\n", "1: the header has no column k"),
        ("m,n,k\n1,2,3\n\n4,x,6\n", "4: n is 'x'; it must be an integer from 1 to 2^31 - 1"),
        ("m,n,k\n1,2,3\n4,0,6\n", "3: n is '0'; it must be an integer from 1 to 2^31 - 1"),
        ("m,n,k\n1,2,-3\n", "2: k is '-3'; it must be an integer from 1 to 2^31 - 1"),
        ("m,n,k\n1,2,3.0\n", "2: k is '3.0'; it must be an integer from 1 to 2^31 - 1"),
        ("m,n,k\n1,2\n", "2: k is missing"),
        ("m,n,k,trans_a\n1,2,3,2\n", "2: trans_a is '2'; it must be 0 or 1"),
        ("m,n,k,batch\n1,2,3,0\n", "2: batch is '0'; it must be an integer from 1 to 2^31 - 1"),
        ("m,n,k,N\n1,2,3,4\n", "1: the header has column n more than once"),
        ("m,n,k\n", " it has no shapes"),
        ("m,n,k\n1,2,\xff\n", "1: not a CSV file"),
    ],
    ids=[
        "empty",
        "no-k",
        "word",
        "zero",
        "negative",
        "fraction",
        "short-row",
        "flag",
        "batch",
        "twice",
        "header-only",
        "bytes",
    ],
)
def test_bad_files_are_refused_by_line(text, message, tmp_path, monkeypatch, capsys):
    path = tmp_path / "shapes.csv"
    path.write_bytes(text.encode("latin1"))
    monkeypatch.chdir(tmp_path)
    assert f"shapes.csv:{message}" in refused(monkeypatch, capsys, path, "--out", tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments FILE.csv --set --from --report --programs --groups is required"),
        (["--set", "nope"], "invalid choice: 'nope'"),
        (["shapes.csv", "--set", "decode_llm"], "not allowed with argument"),
        (["shapes.csv", "--dtype", "int32"], "invalid choice: 'int32'"),
        (["shapes.csv", "--dtype", "int8", "--gated", "silu"], "--linear and --gated are of floating-point numbers"),
        (["shapes.csv", "--linear", "swish"], "invalid choice: 'swish'"),
        (["shapes.csv", "--linear", "silu", "--gated", "silu"], "--linear and --gated are two kinds of layers"),
        (["shapes.csv", "--sample", "0"], "'0' is not a positive integer"),
        (["--groups", "groups.csv", "--linear", "silu"], "--linear is not for --groups"),
        (["--groups", "groups.csv", "--weights", "int4"], "--weights is not for --groups"),
        (["shapes.csv", "--weights", "int3"], "invalid choice: 'int3'"),
        (["shapes.csv", "--weights", "int4", "--linear", "silu"], "--weights are of plain products"),
        (["shapes.csv", "--weights", "int4", "--dtype", "float64"], "float32, bfloat16 or float16, not by float64"),
        (["shapes.csv", "--weights", "int4", "--group", "7"], "--weights int4: no k is a multiple of 7"),
        (["shapes.csv", "--weights", "int4", "--group", "row"], "'row' is not a positive integer"),
        (["shapes.csv", "--group", "32"], "--group is of --weights"),
        (["shapes.csv", "--scales", "row"], "--scales are of --dtype float8_e4m3fn and float8_e5m2"),
        (["shapes.csv", "--dtype", "e4m3", "--linear", "silu"], "float8 is of plain products"),
        (["shapes.csv", "--dtype", "e4m3", "--scales", "128x128"], "no product has k and n that are multiples of 128"),
        (["--groups", "moe_train", "--column-major"], "--column-major is not for --groups"),
        (["--groups", "shapes.csv"], "shapes.csv:1: the header has no column groups; it must have groups, m, n and k,"),
        (["--groups", "groups.csv"], "groups.csv:2: routing is 'skewed'; it must be uniform or zipf"),
        (["absent.csv"], "No such file or directory: 'absent.csv'"),
        (["shapes.csv", "--out", "absent/out.json"], "--out absent/out.json: cannot write it"),
        (["shapes.csv", "--out", "out.md"], "--out out.md: its name must end in .json"),
        (["shapes.csv", "--resume"], "--resume needs --out"),
        (["--from", "shapes.csv"], "shapes.csv is not JSON"),
        (["shapes.csv", "--limit", "nan"], "'nan' is not a time of 0 or more"),
        (["--from", "foreign.json"], "foreign.json is not a result of bench"),
        (["--from", "part.json"], "part.json is not a complete result of bench: it lacks command, date, limits,"),
    ],
    ids=lambda value: "-".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_bad_arguments_are_refused(arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "shapes.csv").write_text(SHAPES)
    (tmp_path / "groups.csv").write_text("groups,m,n,k,routing\n2,3,4,5,skewed\n")
    (tmp_path / "foreign.json").write_text('{"rows": []}')
    (tmp_path / "part.json").write_text('{"format": "jax_streamk bench 1", "rows": []}')
    monkeypatch.chdir(tmp_path)
    assert message in refused(monkeypatch, capsys, *arguments)


def test_missing_packages_are_named(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    assert "needs matplotlib: pip install matplotlib" in refused(
        monkeypatch, capsys, "--from", "x.json", "--plot", "plots"
    )


def test_device_times_cannot_be_all_that_is_measured_on_a_cpu(tmp_path, monkeypatch, capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("a GPU has device times")
    (tmp_path / "shapes.csv").write_text(SHAPES)
    assert "no device times" in refused(monkeypatch, capsys, tmp_path / "shapes.csv", "--measure", "device")


def test_transposes_and_column_major_files(tmp_path):
    (tmp_path / "shapes.csv").write_text(
        "k, m ,n,trans_a,source,trans_b,else\n3,1,2,1,here,0,x\n3,1,2,1,again,0,y\n3,1,2,0,,1,z\n"
    )
    first, second = shapes.read(tmp_path / "shapes.csv")
    assert first == shapes.Shape(1, 2, 3, True, False, 1, "here") and second == shapes.Shape(1, 2, 3, False, True)
    # Column-major D = op(A) op(B) is row-major D^T = op(B)^T op(A)^T.
    assert shapes.read(tmp_path / "shapes.csv", column_major=True)[0] == shapes.Shape(2, 1, 3, False, True, 1, "here")


@pytest.mark.parametrize(
    "text",
    [
        "M,N,K,Trans_B,SOURCE\n1,2,3,1,a\n",
        "m;n;k;trans_b;source\n1;2;3;1;a\n",
        "\ufeffM; N; K; TRANS_B; source\n1; 2; 3; 1; a\n",
        "m\tn\tk\ttrans_b\tsource\n1\t2\t3\t1\ta\n",
    ],
    ids=["upper case", "semicolons", "a spreadsheet's", "tabs"],
)
def test_files_of_other_programs_are_read(text, tmp_path):
    (tmp_path / "shapes.csv").write_text(text, encoding="utf-8")
    assert shapes.read(tmp_path / "shapes.csv") == [shapes.Shape(1, 2, 3, trans_b=True, source="a")]


def test_times_are_printed_in_their_unit():
    row = bench.measure(sides.Task("float32"), shapes.Shape(16, 16, 16), {}, ["independent"], 1, gpu=False)
    xla, ours = row["sides"][sides.XLA], row["sides"][sides.OURS]
    xla["independent"] |= dict(median_us=2.5e6, quartiles_us=[2.4e6, 2.6e6])
    ours["independent"] |= dict(median_us=1234.0, quartiles_us=[1224.0, 1244.0])
    machine, task = dict(device="a GPU", platform="cuda", jax="1"), dict(dtype="float32", activation=None)
    result = dict(
        machine=machine,
        task=task,
        measures=["independent"],
        rows=[row],
        limits={},
        link_us=None,
        notes=[],
        date="2026-01-02",
        command="bench",
    )
    page = report.markdown(result)
    assert "| 2.50 ±0.10 s |" in page and "| 1.23 ±0.01 ms |" in page


def test_sets_are_of_their_families():
    sets = ("decode_llm", "deepbench_train", "streamk_sample", "strong_scaling", "weights")
    decode, deepbench, streamk, scaling, quantized = map(shapes.named, sets)
    assert {shape.m for shape in decode} == {1, 2, 4, 8, 16, 32, 64, 128, 200}
    assert (
        shapes.Shape(1, 6144, 4096, source="Llama-3.1-8B") in decode
        and shapes.Shape(1, 8192, 7168, source="Llama-3.1-70B") in decode
    )
    assert shapes.Shape(7133, 1760, 1760, trans_a=True, source="gradient") in deepbench and len(deepbench) == 160
    assert len(streamk) == 256 and all(128 <= x <= 8192 for shape in streamk for x in (shape.m, shape.n, shape.k))
    assert sum(x % 8 == 0 for shape in streamk for x in (shape.m, shape.n, shape.k)) > 3 * 192
    assert all(shape.k >= 4096 and shape.m * shape.n <= 1152**2 for shape in scaling)
    assert {shapes.Shape(1, 12288, 4096), shapes.Shape(256, 4096, 10752, trans_b=True)} < set(quantized)
    assert {shape.m for shape in quantized} == {1, 4, 16, 64, 256} and len(quantized) == 100
    assert str(streamk[0]) == "632 x 7288 x 4280"  # the draws are the same everywhere
    first, second = shapes.sample(streamk, 2)
    assert first in streamk[:128] and second in streamk[128:] and shapes.sample(streamk, 2) == [first, second]
    assert shapes.sample(streamk, 999) == streamk
    assert {shape.m for shape in shapes.sample(decode, 64)} == {shape.m for shape in decode}
    with pytest.raises(ValueError, match="no set 'nope'; there are decode_llm"):
        shapes.named("nope")


def test_sets_of_experts_are_of_their_models():
    train, decode = (list(groups.SETS[name]()) for name in ("moe_train", "moe_decode"))
    assert len({*train, *decode}) == len(train) + len(decode)
    mixtral = groups.Groups(2, 14336, 4096, source="Mixtral-8x7B", groups=8)
    assert decode[0] == mixtral and str(mixtral) == "2 x 14336 x 4096 in 8 groups, uniform"
    assert {shape.pass_ for shape in train} == {"forward", "lhs", "rhs"} and {s.pass_ for s in decode} == {"forward"}
    assert {shape.routing for shape in train} == {shape.routing for shape in decode} == {"uniform", "zipf"}
    assert all(8192 <= shape.m <= 65536 for shape in train)
    for shape in (*train, *decode):
        assert shape.sizes().sum() == shape.m and len(shape.sizes()) == shape.groups
    uniform, zipf = (groups.Groups(8192, 8, 8, groups=128, routing=routing).sizes() for routing in ("uniform", "zipf"))
    assert zipf.max() > 4 * uniform.max() and zipf[0] < zipf.max()


EVENT = (
    "events {{ metadata_id: {name} offset_ps: {start}000 duration_ps: {duration}000"
    ' stats {{ metadata_id: {stat} str_value: "x" }} }}'
)
NAMES = {1: "kernel_a", 2: "Memset 2", 3: "MemcpyD2D", 4: "BUFFER_FLUSH", 5: "kernel_b"}
STATS = {1: "kernel_details", 2: "Memset_details", 3: "memcpy_details", 4: "correlation_id"}


def profile_of(*planes):
    """A profile as XLA's CUPTI tracer writes it, of (name, *lines); a line has events (name, start, duration, stat)."""
    text = ""
    for name, *lines in planes:
        events = [" ".join(EVENT.format(name=n, start=s, duration=d, stat=t) for n, s, d, t in line) for line in lines]
        text += f'planes {{ name: "{name}" ' + "".join(
            f'lines {{ id: {i} name: "Stream #{i}" {line} }} ' for i, line in enumerate(events)
        )
        for kind, table in (("event_metadata", NAMES), ("stat_metadata", STATS)):
            text += "".join(
                f'{kind} {{ key: {key} value {{ id: {key} name: "{value}" }} }} ' for key, value in table.items()
            )
        text += "} "
    return jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    )


def test_device_time_is_of_kernels_memsets_and_copies():
    call = [(2, 1000, 500, 2), (1, 2000, 4000, 1), (4, 3000, 9000, 4), (5, 7000, 1000, 1)]
    again = [(name, start + 20000, 2 * duration, stat) for name, start, duration, stat in call]
    # The second call's copy is on another stream. The host's events are launches, with the names of kernels.
    profile = profile_of(
        ("/device:GPU:0", call + again, [(3, 40000, 100, 3), (3, 9000, 100, 3)]), ("/host:CPU", [(1, 0, 70000, 1)])
    )
    work = timing.device_work(profile)
    assert [name for _, _, name in work] == ["Memset 2", "kernel_a", "kernel_b", "MemcpyD2D"] * 2
    # The second call's kernel_b overlaps with its kernel_a.
    assert timing.per_call(work, 2) == [5.6, 9.1]
    assert timing.per_call(work[:-1], 2) == [pytest.approx((5.6 + 9.0) / 2)]  # calls that differ have a mean only


def test_a_profile_without_a_gpu_is_no_measurement():
    if jax.default_backend() == "gpu":
        pytest.skip("a GPU has device times")
    program = Program(lambda: jnp.ones(8) + 1, jax.block_until_ready, 1)
    assert timing.device_work(timing.profile(program.run)) == []
    with pytest.raises(RuntimeError, match="no kernel of a GPU"):
        timing.device_samples(program)


def test_no_run_starts_while_the_results_of_the_last_are_held():
    class Result:
        pass

    results = []

    def run():
        assert not any(result() for result in results)
        results.append(weakref.ref(result := Result()))
        return result

    wall_sample(Program(run, lambda _: time.sleep(0.001), 1), least=0.003)
    assert len(results) > 2


@pytest.mark.gpu
def test_device_time_has_every_kernel_and_memset():
    split = jax.jit(
        lambda x: jax_streamk.matmul(x, x, schedule=jax_streamk.SplitK(4))
    )  # which on a tile of Hopper zeroes its tickets
    x = jnp.ones((2048, 2048), jnp.bfloat16)
    jax.block_until_ready(split(x))
    samples, names = timing.device_samples(Program(lambda: [split(x) for _ in range(4)], jax.block_until_ready, 4))
    assert len(samples) == 20 and min(samples) > 0
    assert any("memset" in name.lower() for name in names) and len(names) >= 2, names


@pytest.mark.parametrize(
    "shape",
    [shapes.Shape(8, 64, 32), shapes.Shape(64, 8, 32, trans_b=True), shapes.Shape(4, 8, 16, True, batch=2)],
    ids=str,
)
def test_chained_calls_wait_for_each_other_at_the_cost_of_one_write(shape):
    task, calls = sides.Task("float32"), 5
    operands = task.operands(shape, calls)
    link = operands[0][0].size > operands[0][1].size
    texts = {}
    for name, function in task.functions(shape).items():
        chained = chain(function)
        linked = np.array(operands[0][link])
        for xs in operands:
            linked.flat[0] = np.asarray(function(*(linked if i == link else x for i, x in enumerate(xs)))).flat[0]
        # Kernels may round a tie between two TF32 numbers either way.
        tolerance = 1e-4 if jax.default_backend() == "cpu" else 5e-3
        np.testing.assert_allclose(chained(operands), linked, rtol=tolerance, atol=tolerance)
        texts[name] = chained.lower(operands).compile().as_text()
    for name, text in texts.items():
        counts = collections.Counter(re.findall(r" ([a-z\-]+)\(", text))
        # In place: only the caller's array is copied, once.
        assert counts["dynamic-update-slice"] == calls and counts["copy"] + counts["copy-start"] <= 1, name


def wrong(*operands):
    return jnp.full((16, 16), 7.0)


def failing(*operands):
    raise NotImplementedError("not\nthis shape")


def test_what_fails_or_is_wrong_is_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "shapes.csv").write_text("m,n,k\n16,16,16\n16,16,32\n")
    xla = lambda a, b: a @ b
    for ours, said in (
        (wrong, r"of 16 x 16 x 16: differs from XLA by \d"),
        (failing, "of 16 x 16 x 16 and 1 more: NotImplementedError: not$"),
    ):
        monkeypatch.setattr(sides.Task, "functions", lambda self, shape, ours=ours: {sides.XLA: xla, sides.OURS: ours})
        assert here(monkeypatch, tmp_path / "shapes.csv", "--dtype", "float32", "--rounds", 1) == 1
        assert re.search(f"FAILED jax_streamk {said}", capsys.readouterr().out, re.MULTILINE)


def test_peers_that_fail_stay_in_the_row_and_others_are_compared():
    task, shape = sides.Task("float32"), shapes.Shape(16, 16, 16)
    build = lambda shape, operands, in_program: sides.jax_programs(jnp.matmul, operands, in_program)
    peers = {"peer": build, "broken": lambda *_: failing()}
    row = bench.measure(task, shape, peers, ["independent"], 1, gpu=False)
    assert row["sides"]["broken"] == {"error": "NotImplementedError: not"}
    assert row["sides"]["peer"]["max_difference"] == 0 and row["sides"]["peer"]["ratio"]["independent"] > 0
    of = results.summary(dict(rows=[row], measures=["independent"]))
    assert (of["broken"]["failed"], of["broken"]["geomean"], of["peer"]["failed"]) == (1, {}, 0)


def test_what_is_left_to_xla_counts_as_one(monkeypatch):
    left = jax_streamk.Plan(None, None, None, None, why_xla="why")
    monkeypatch.setattr(sides.Task, "plan", lambda self, shape: left)
    row = bench.measure(sides.Task("float32"), shapes.Shape(16, 16, 16), {}, ["dependent", "independent"], 1, gpu=False)
    assert row["sides"][sides.OURS] == {"fallback": True, "ratio": {"dependent": 1.0, "independent": 1.0}}
    of = results.summary(dict(rows=[row], measures=["dependent", "independent"]))[sides.OURS]
    assert (
        of["fallbacks"] == 1
        and of["geomean"] == {"dependent": 1.0, "independent": 1.0}
        and of["losses"]["dependent"] == 0
    )


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_linear_layers_are_beside_xlas_expression_and_our_product(activation):
    task, shape = sides.Task("bfloat16", activation=activation), shapes.Shape(16, 32, 64, trans_b=True)
    row = bench.measure(task, shape, {}, ["independent"], 1, gpu=False)
    assert list(row["sides"]) == [sides.XLA, sides.OURS, sides.OUR_MATMUL]
    assert row["sides"][sides.OURS]["max_difference"] < 0.02
    assert row["bytes"] == 2 * (16 * 64 + 64 * 32 + 32 + 16 * 32)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_gated_products_are_beside_xlas_expression_and_our_products(activation):
    task, shape = sides.Task("bfloat16", activation=activation, gated=True), shapes.Shape(16, 32, 64, trans_b=True)
    row = bench.measure(task, shape, {}, ["independent"], 1, gpu=False)
    assert list(row["sides"]) == [sides.XLA, sides.OURS, sides.OUR_MATMUL]
    assert row["sides"][sides.OURS]["max_difference"] < 0.02
    assert row["bytes"] == 2 * (16 * 64 + 2 * 64 * 32 + 16 * 32) and row["flops"] == 4 * 16 * 32 * 64


@pytest.mark.parametrize("layer", [[], ["--linear", "relu"], ["--gated", "silu"]])
def test_batch_invariant_products_are_beside_the_others(layer, tmp_path, monkeypatch, capsys):
    (tmp_path / "one.csv").write_text("m,n,k\n16,48,640\n")
    out = tmp_path / "out.json"
    assert here(monkeypatch, tmp_path / "one.csv", *QUICK, *layer, "--batch-invariant", "--out", out) == 0
    (row,) = json.loads(out.read_text())["rows"]
    invariant = row["sides"][sides.INVARIANT]
    assert not invariant["wrong"] and invariant["ratio"]["independent"] > 0
    assert sides.INVARIANT in capsys.readouterr().out
    why = refused(monkeypatch, capsys, "--groups", "moe_decode", "--batch-invariant")
    assert "--batch-invariant is of" in why


@pytest.mark.parametrize(
    "stored, group, scales",
    [
        ("int4", 128, 2 * 32 * 2),
        ("uint4", weights.COLUMN, 32 * 2 + 32 // 2),
        ("mxfp4", 32, 8 * 32),
        ("nvfp4", 16, 16 * 32 + 4),
    ],
)
def test_products_by_quantized_weights_are_beside_those_by_arrays(stored, group, scales):
    task, shape = weights.Task("bfloat16", weights=stored, group=group), shapes.Shape(16, 32, 256, trans_b=True)
    row = bench.measure(task, shape, {}, ["independent"], 1, gpu=False)
    assert list(row["sides"]) == [sides.XLA, sides.OURS, *weights.BOUNDS]
    assert all(side["ratio"]["independent"] > 0 for side in row["sides"].values())
    assert row["sides"][sides.OURS]["max_difference"] < 0.02
    assert row["bytes"] == 2 * 16 * 256 + 256 * 32 // 2 + scales + 2 * 16 * 32
    (_, w), again = task.operands(shape, 2)
    assert w.dtype == jnp.bfloat16 and w.block == (1, 256 if group == weights.COLUMN else group)
    assert not (w.values == again[1].values).all()


@pytest.mark.parametrize("scales", float8.SCALES)
def test_products_of_float8_are_beside_those_without_scales(scales):
    task = float8.Task("float8_e4m3fn", scales=scales)
    for shape in (shapes.Shape(16, 128, 256, trans_b=True), shapes.Shape(16, 128, 256, batch=2)):
        row = bench.measure(task, shape, {}, ["independent"], 1, gpu=False)
        beside = [] if scales == "none" else [float8.UNSCALED]
        assert list(row["sides"]) == [sides.XLA, sides.OURS, *beside]
        assert row["sides"][sides.OURS]["max_difference"] < 0.02
        assert task.plan(shape).problem.type_a.name == "e4m3"


def test_quantized_weights_are_named_wherever_a_result_is_shown(tmp_path, monkeypatch, capsys):
    (tmp_path / "shapes.csv").write_text("m,n,k\n300,48,128\n4,64,200\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "_limits", lambda dtype: {})
    words = ["--rounds", 1, "--no-peers", "--measure", "dependent", "--out", "kept/out.json"]
    (tmp_path / "kept").mkdir()
    assert not here(monkeypatch, "shapes.csv", "--weights", "int8", "--group", 64, *words)
    printed, result = capsys.readouterr().out, results.load("kept/out.json")
    assert [row["k"] for row in result["rows"]] == [128]  # 200 is no multiple of 64
    assert result["task"] == dict(dtype="bfloat16", precision=None, activation=None, weights="int8", group=64)
    assert "bfloat16 products by int8 with scales per 64 beside" in printed and "unquantized XLA" in printed
    here(monkeypatch, "--from", "kept/out.json")
    assert capsys.readouterr().out == printed
    assert not here(monkeypatch, "--report", "kept")
    assert "| bfloat16 by int8 with scales per 64 |" in capsys.readouterr().out


@pytest.mark.parametrize("activation", [None, "silu"])
def test_ragged_products_are_beside_laxs_and_dense_ones(activation, tmp_path, monkeypatch, capsys):
    (tmp_path / "groups.csv").write_text(IN_GROUPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "_limits", lambda dtype: {})
    words = ["--groups", "groups.csv", *QUICK, "--out", "out.json", *(["--gated", activation] if activation else [])]
    assert not here(monkeypatch, *words)
    printed, result = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert f"float32 ragged {'gated products, silu' if activation else 'products'} beside" in printed
    wanted = shapes.read(tmp_path / "groups.csv", kind=groups.Groups)
    assert [shape.pass_ for shape in wanted] == ["forward", "lhs", "rhs", "forward"]
    wanted = [shape for shape in wanted if not activation or shape.pass_ == "forward"]
    assert len(result["rows"]) == len(wanted)
    for row, shape in zip(result["rows"], wanted):
        even = [sides.EVEN] * (shape.m % shape.groups == 0)
        assert list(row["sides"]) == [sides.XLA, sides.OURS, sides.DENSE, *even]
        assert all(side["ratio"]["independent"] > 0 for side in row["sides"].values())
        assert row["sides"][sides.OURS]["max_difference"] < TOLERANCE
        assert not any("max_difference" in row["sides"][name] for name in (sides.DENSE, *even))
        products = 2 if activation else 1
        assert row["flops"] == 2 * products * shape.m * shape.n * shape.k
        matrices = shape.groups if shape.pass_ == "rhs" else (shape.sizes() > 0).sum()
        assert row["bytes"] == 4 * (shape.m * (shape.n + shape.k) + products * matrices * shape.n * shape.k)
        assert re.search(
            rf"^\| +{shape.groups} \| +{shape.m} \| .*{shape.routing} +\| {shape.pass_} ",
            (tmp_path / "out.md").read_text(), re.MULTILINE,
        )  # fmt: skip
    here(monkeypatch, *words, "--resume")
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == result["rows"]


@pytest.mark.parametrize("pass_", ["forward", "lhs", "rhs"])
def test_what_takes_laxs_product_too_much_memory_is_skipped(pass_, monkeypatch):
    task, shape = groups.Task("float32"), groups.Groups(32, 48, 64, groups=5, routing="zipf", pass_=pass_)
    monkeypatch.setattr(sides, "memory", lambda: 3 * 5 * 32 * 48 * 4 - 1)
    row = bench.measure(task, shape, {}, ["independent"], 1, gpu=False)
    xla, ours = row["sides"][sides.XLA], row["sides"][sides.OURS]
    assert list(xla) == ["skipped"] and "ratio" not in ours
    assert ours["independent"]["median_us"] > 0 and 0 <= ours["max_difference"] < TOLERANCE
    monkeypatch.undo()
    assert task.skipped(shape) == {}
    result = digested([]) | dict(rows=[row], measures=["independent"], task=dict(dtype="float32", activation=None))
    result["machine"]["platform"], result["task"]["groups"] = "cpu", True
    page = report.markdown(result)
    assert "XLA's side was skipped 1 times" in page and re.search(r"\| +skipped \|", page)


def test_rotating_operands_fit_into_memory(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(sides, "memory", lambda: 50e9)
    assert sides.calls_of(100e6, 100e6) == (8, 8)
    assert sides.calls_of(100e6, 2e9) == (5, 5) and sides.calls_of(100e6, 9e9) == (2, 2)
    assert sides.calls_of(1e6, 1e6) == (220, sides.MOST_CALLS_IN_PROGRAM)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    "precision, backend, algorithm", [(None, "gpu", ""), ("high", "gpu", "TF32_TF32_F32_X3"), ("high", "cpu", "")]
)
def test_xla_multiplies_as_exactly_as_we_do(monkeypatch, activation, precision, backend, algorithm):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    task, shape = sides.Task("float32", precision, activation), shapes.Shape(16, 32, 64)
    programs = {name: str(jax.make_jaxpr(f)(*task.operands(shape, 1)[0])) for name, f in task.functions(shape).items()}
    assert ("TF32_TF32_F32_X3" in programs[sides.XLA]) == bool(algorithm)
    assert not any("TF32_TF32_F32_X3" in program for name, program in programs.items() if name != sides.XLA)


def test_the_performance_page_has_what_the_command_prints(monkeypatch, capsys):
    root = pathlib.Path(__file__).parents[1]
    monkeypatch.chdir(root)
    page = (root / "docs" / "performance.md").read_text()
    (line,) = re.findall(r"^python -m jax_streamk bench (--report .*)$", page, re.MULTILINE)
    assert not here(monkeypatch, *line.split("--plot")[0].split())
    assert capsys.readouterr().out in page
    for result in results.load_folder(root / "benchmarks" / "results").values():
        assert report.markdown(result).count("\n|") >= len(result["rows"])


def digested(rows, device="a GPU", measure="device", **task):
    """A result of as many rows as there are ratios."""
    sides_of = lambda ratio: {sides.XLA: {}, sides.OURS: {"ratio": {measure: ratio}, "fallback": ratio == 1}}
    return {
        "format": results.FORMAT,
        "date": "2026-01-02T03:04:05Z",
        "command": "bench",
        "measures": [measure],
        "rounds": 1,
        "machine": {"device": device, "jax": "1"},
        "task": {"dtype": "bfloat16", "precision": None, "activation": None} | task,
        "notes": [],
        "limits": {},
        "link_us": None,
        "rows": [{"sides": sides_of(ratio)} for ratio in rows],
    }


def test_results_of_a_folder_are_a_table_per_machine(tmp_path, monkeypatch, capsys):
    (tmp_path / "gpu").mkdir()
    results.save(digested([2, 0.5, 1, 4]) | {"notes": ["a", "b"]}, tmp_path / "gpu" / "large.json")
    results.save(digested([1.5] * 60, activation="silu") | {"notes": ["a", "b"]}, tmp_path / "gpu" / "layers.json")
    results.save(digested([3], "a CPU", "dependent", dtype="float32", precision="high"), tmp_path / "host.json")
    assert not here(monkeypatch, "--report", tmp_path, "--plot", tmp_path / "plots")
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("#")] == ["### a GPU", "### a CPU"]
    cells = [re.split(r" *\| *", line)[1:-1] for line in out.splitlines() if line.startswith("| ")]
    assert ["large", "bfloat16", "device", "4", "1.414", "1", "0.50", "1", "2026-01-02"] in cells
    assert ["layers", "bfloat16, bias and silu", "device", "60", "1.500", "0", "1.50", "0", "2026-01-02"] in cells
    assert ["host", 'float32 at "high"', "dependent", "1", "3.000", "0", "3.00", "0", "2026-01-02"] in cells
    assert "- large, layers: a; b." in out
    (plot,) = (tmp_path / "plots").iterdir()  # of the one result that has enough shapes
    text = "".join(xml.etree.ElementTree.parse(plot).getroot().itertext())
    assert plot.name == "ratios_a_gpu.svg" and "layers (60, mean 1.500)" in text and "large" not in text


def test_folders_without_results_are_refused(tmp_path, monkeypatch, capsys):
    assert "has no result of bench" in refused(monkeypatch, capsys, "--report", tmp_path)
    assert "absent is not a folder" in refused(monkeypatch, capsys, "--report", tmp_path / "absent")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        results.save(digested([2]), tmp_path / folder / "same.json")
    assert "same.json: another result of a GPU has this name" in refused(monkeypatch, capsys, "--report", tmp_path)
    (tmp_path / "a" / "same.json").write_text("{}")
    assert "same.json is not a result of bench" in refused(monkeypatch, capsys, "--report", tmp_path)
