"""Tuned plans: what is stored, what ``Auto()`` uses, how plans are measured, ``tuning()`` under transformations."""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import types
import warnings

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import platformdirs
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_streamk
from jax_streamk import Auto, DataParallel, Plan, SplitK, StreamK, _ffi, linear, matmul, plan
from jax_streamk.device import HOPPER, device_of
from jax_streamk.plan import alternatives, planner
from jax_streamk.plan.launch_policy import LaunchPolicy
from jax_streamk.plan.plan import native_schedule
from jax_streamk.tuning import contest, measure, tune, tuned
from jax_streamk.tuning.tuned import Store, Trial, Tuned

TARGET = "jax_streamk_cuda_gemm" if jax.default_backend() == "gpu" else "jax_streamk_host_gemm"


def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def here():
    return device_of(None)


A, B = shaped(64, 2048), shaped(2048, 96)


def another(problem, device):
    """A candidate that the planner would not choose: with another kind of schedule if possible, in an unusual order."""
    first, *others = planner.choose(problem, None, device, listed=24).candidates
    other = next((x for x in others if x.schedule.schedule != first.schedule.schedule), first)
    policy = dataclasses.replace(LaunchPolicy.of(other.policy), raster="n", swizzle=3)
    return Trial.of(other.kernel, other.schedule, policy)


def listed_as(found):
    """The planner's candidate as tuning's ``Trial``."""
    return Trial.of(found.kernel, found.schedule, LaunchPolicy.of(found.policy))


def found(problem, device, microseconds=7.0, **others):
    others = (
        dict(planned_microseconds=9.0, xla_ratio=1.2, jaxlib=jaxlib.__version__, date="2026-01-02T03:04:05+00:00")
        | others
    )
    return Tuned(**vars(another(problem, device)), microseconds=microseconds, **others)


@pytest.fixture
def quick(monkeypatch):
    """Makes measurements as short as possible."""
    monkeypatch.setitem(measure.ROTATED_BYTES, here().platform, 1e5)


def write(store, device, *lines):
    store.directory.mkdir(exist_ok=True)
    store.path(device).write_bytes(b"\n".join(lines) + b"\n")


def line_of(problem, device, changes=()):
    record = json.loads(tuned._line(device, problem, found(problem, device)))
    for name, value in dict(changes).items():
        (record["problem"] if name in record["problem"] else record)[name] = value
    return json.dumps(record).encode()


def emitted(f, *operands):
    """(kernel, splits, swizzle) of every call of ours in the lowered program, as text."""
    text = jax.jit(f).lower(*operands).as_text()
    calls = re.findall(rf"custom_call @{TARGET}\(.*?backend_config = \{{(.*?)\}}", text)
    found = [dict(re.findall(r'(\w+) = "?([^",}\s]+)', call)) for call in calls]
    return [(call["kernel"], call["splits"], call["swizzle"]) for call in found]


def test_auto_takes_what_is_stored_for_this_very_problem(store):
    alone = plan(A, B)
    wanted = found(alone.problem, here())
    store.add(here(), alone.problem, wanted)
    made = plan(A, B)
    assert (made.kernel, made.raster, made.swizzle, made.microseconds) == (wanted.kernel, "n", 3, 7.0)
    assert Trial.of(made.kernel, made.native_schedule(), made.policy) == another(alone.problem, here())
    what = made.kernel, made.problem.native(), made.native_schedule(), made.device.native()
    assert made.workspace_bytes == _ffi.workspace_bytes(*what)
    text = str(made)
    assert "7.0 us measured by tuning on 2026-01-02; the planner's choice took 9.0 us" in text
    assert f"without tuning the planner chooses {alone.kernel}, {alone.schedule}" in text
    # Not affected: another problem, an epilogue, another device, explicit schedules.
    for other in (
        plan(shaped(65, 2048), B),
        plan(A, B, activation="relu"),
        plan(A, B, preferred_element_type=jnp.float32),
    ):
        assert "tuning" not in str(other)
    unknown = dataclasses.replace(here(), kind="")
    assert "tuning" not in str(plan(A, B, device=unknown)) and plan(A, B, device=unknown).kernel == alone.kernel
    for schedule in (DataParallel(), SplitK(2), StreamK()):
        assert plan(A, B, schedule=schedule).reasons[0] == "the schedule was given"


def test_auto_leaves_to_xla_what_xla_was_faster_at(store):
    alone = plan(A, B)
    digests = set()
    cases = [
        ({}, False),
        (dict(xla_ratio=0.9), True),
        (dict(xla_ratio=0.995), False),
        (dict(xla_ratio=0.0), False),
        (dict(xla_ratio=0.9, jaxlib="0.0.1"), False),
    ]
    for changes, is_left in cases:
        store.add(here(), alone.problem, found(alone.problem, here(), **changes))
        made = plan(A, B)
        assert (made.kernel is None) == is_left and len(emitted(lambda a, b: matmul(a, b), A, B)) == 1 - is_left
        assert plan(A, B, schedule=DataParallel()).kernel and emitted(
            lambda a, b: matmul(a, b, schedule=StreamK()), A, B
        )
        digests.add((is_left, store.digest(here())))
        if is_left:
            loser = another(alone.problem, here()).kernel
            assert (
                made.reasons[0]
                == f"falls back to XLA: its product took 0.90 of the time of {loser}, measured by tuning on 2026-01-02"
            )
            assert made.reasons[1].startswith(f"without tuning the planner chooses {alone.kernel}, {alone.schedule}")
            assert Store(store.directory).read(here()).plans == store.plans(here())
        else:
            ratio = changes.get("xla_ratio", 1.2) * ("jaxlib" not in changes)
            assert (
                f"XLA's product took {ratio:.2f} times as long" if ratio else "XLA's product was not measured"
            ) in made.reasons
    assert len(digests) == 2 == len({digest for _, digest in digests})


def test_programs_run_what_is_stored(store):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-1, 2, x.shape), x.dtype) for x in (A, B))
    before = emitted(matmul, A, B)
    wanted = found(plan(A, B).problem, here())
    store.add(here(), plan(A, B).problem, wanted)
    assert emitted(lambda a, b: matmul(a, b), A, B) == [(wanted.kernel, str(wanted.splits), "3")] != before
    np.testing.assert_array_equal(
        jax.jit(lambda a, b: matmul(a, b))(a, b), np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    )


def test_the_latest_of_a_problem_wins_in_every_process(store):
    problem = plan(A, B).problem
    for microseconds in (5.0, 3.0, 4.0):
        store.add(here(), problem, found(problem, here(), microseconds))
        assert plan(A, B).microseconds == microseconds
    read = Store(store.directory).read(here())
    assert (read.lines, len(read.plans), read.stale, read.corrupt, read.trouble) == (3, 1, 0, 0, "")
    assert read.plans[problem] == found(problem, here(), 4.0)


def test_problems_are_told_apart_by_all_they_are(store):
    """Every field of a problem is kept in the file."""
    problem = dataclasses.replace(
        plan(A, B, activation="silu", bias=True, residual=True, alpha=0.1, beta=-3.5).problem,
        batch=3,
        batch_stride_bias=96,
    )
    store.add(here(), problem, found(problem, here()))
    assert list(Store(store.directory).read(here()).plans) == [problem]


WRITER = """
import dataclasses, json, sys
from jax_streamk import Device
from jax_streamk.tuning import tuned
store, device = tuned.Store(sys.argv[1]), Device(**json.loads(sys.argv[3]))
(problem, found), = store.read(device).plans.items()
print("ready", flush=True)
sys.stdin.readline()
for i in range(100):
    store.add(device, dataclasses.replace(problem, beta=float(sys.argv[2]) + i), found)
"""


def test_writers_at_once_lose_nothing(store):
    problem = plan(A, B).problem
    store.add(here(), problem, found(problem, here()))
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=store.directory)
    device = json.dumps(dataclasses.asdict(here()))
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(store.directory), str(1000 * i), device], **pipes)
        for i in range(1, 3)
    ]
    assert all(writer.stdout.readline() == "ready\n" for writer in writers)
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    # A third dies in the middle of a line, holding the lock: what follows must start a new line.
    with open(store.path(here()), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b'{"device": {"platform": "c')
    for i in range(50):
        store.add(here(), dataclasses.replace(problem, beta=-1.0 - i), found(problem, here()))
    assert [writer.wait(60) for writer in writers] == [0, 0]
    read = store.read(here())
    assert len(read.plans) == 1 + 2 * 100 + 50 and read.corrupt == 1


def test_a_writer_waits_for_the_one_that_writes(store):
    problem = plan(A, B).problem
    store.check_writable(here())
    with concurrent.futures.ThreadPoolExecutor(1) as pool, open(store.path(here()), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        added = pool.submit(Store(store.directory).add, here(), problem, found(problem, here()))
        with pytest.raises(concurrent.futures.TimeoutError):
            added.result(0.2)
        file.close()
        added.result(10)
    assert problem in store.read(here()).plans


def broken_lines():
    device, problem = here(), plan(A, B).problem

    def line(**changes):
        return line_of(problem, device, changes)

    whole = json.loads(line())
    no_k = dict(whole["problem"])
    del no_k["k"]
    corrupt = {
        "binary": b"\xff\xfe\x00\x01garbage",
        "deep": b"[" * 200_000,
        "null": b"null",
        "list": b"[1, 2]",
        "number": b"7",
        "torn": line()[:-20],
        "empty": b"{}",
        "missing": json.dumps({name: value for name, value in whole.items() if name != "splits"}).encode(),
        "extra": json.dumps(whole | {"more": 1}).encode(),
        "problem is text": line(problem="none"),
        "problem lacks k": json.dumps(whole | {"problem": no_k}).encode(),
        "text for a number": line(m="64"),
        "number for a flag": line(has_bias=0),
        "fraction": line(splits=2.5),
        "flag for a number": line(splits=True),
        "huge": line(k=10**30),
        "unknown type": line(type_a="f8"),
        "list for a type": line(type_a=["f32"]),
        "unknown schedule": line(schedule="greedy"),
        "no time": line(microseconds=float("inf")),
        "negative time": line(planned_microseconds=-1.0),
        "no ratio": line(xla_ratio=float("nan")),
        "no date": line(date="yesterday"),
        "kernel is null": line(kernel=None),
        "no launch policy": json.dumps({name: value for name, value in whole.items() if name != "policy"}).encode(),
        "policy is text": line(policy="usual"),
        "policy lacks the swizzle": line(policy={name: x for name, x in whole["policy"].items() if name != "swizzle"}),
        "policy has more": line(policy=whole["policy"] | {"more": 1}),
        "number for a hint": line(policy=whole["policy"] | {"evict_first_a": 1}),
        "unknown raster": line(policy=whole["policy"] | {"raster": "k"}),
        "unknown order of clusters": line(policy=whole["policy"] | {"cluster_order": "random"}),
    }
    stale = {
        "another device": line(device=dataclasses.asdict(device) | {"sms": device.sms + 1}),
        "another build": line(kernels="0" * 16),
        "unknown kernel": line(kernel="sm200_f4"),
        "cannot run": line(splits=10_000, schedule="split_k"),
        "not deterministic": line(reduction="atomic"),
        "empty problem": line(m=0),
        "cannot be launched so": line(policy=whole["policy"] | {"swizzle": 0}),
    }
    return corrupt, stale


@pytest.mark.parametrize("kind", ["corrupt", "stale"])
def test_lines_that_are_of_no_use_are_ignored_with_one_warning(store, kind):
    device, problem, good = here(), plan(A, B).problem, plan(shaped(32, 2048), B).problem
    lines = dict(zip(("corrupt", "stale"), broken_lines()))[kind]
    for name, line in lines.items():
        write(store, device, line, line_of(good, device))
        read = Store(store.directory).read(device)
        counts = dict(corrupt=read.corrupt, stale=read.stale)
        assert (list(read.plans), counts.pop(kind), *counts.values()) == ([good], 1, 0), name
    # Stale lines are worth a warning where there are no others: they stay in the file when products are measured again.
    others = [line_of(good, device)] if kind == "corrupt" else []
    write(store, device, *lines.values(), *others)
    fresh = [Store(store.directory), Store(store.directory)]
    count = f"ignores {len(lines)} of {len(lines) + len(others)} tuned plans in "
    with pytest.warns(UserWarning, match=rf"{count}.*{store.path(device).name}") as warned:
        for again in fresh:
            with tuned.using(again):
                assert "tuning" not in str(planner.make_plan(problem, Auto(), device))
                assert ("tuning" in str(planner.make_plan(good, Auto(), device))) == bool(others)
    assert len(warned) == 1


def test_a_program_whose_products_were_measured_again_is_not_warned(store):
    device, good = here(), plan(shaped(32, 2048), B).problem
    write(store, device, *broken_lines()[1].values(), line_of(good, device))
    tuned._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tuned.using(Store(store.directory)):
            assert "tuning" in str(planner.make_plan(good, Auto(), device))


def test_a_process_without_a_home_has_no_tuned_plans(monkeypatch, tmp_path):
    def homeless(*arguments):
        raise RuntimeError("could not determine the home directory for '~/.cache'")

    monkeypatch.setattr(platformdirs, "user_cache_dir", homeless)
    tuned._users.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan(A, B).kernel
    with pytest.raises(OSError, match="no folder for tuned plans"), jax_streamk.tuning():
        raise AssertionError("measured what cannot be stored")
    tuned._users.cache_clear()


def test_one_of_several_processes_has_the_plans_that_it_names(monkeypatch, tmp_path):
    """XLA waits for processes to compile the same program."""
    problem, device, named = plan(A, B).problem, here(), Store(tmp_path)
    write(named, device, line_of(problem, device))
    monkeypatch.setattr(tuned, "_users", lambda alone: named if alone else tuned.store_in(tuned._NOWHERE))
    assert "tuning" in str(plan(A, B))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert "tuning" not in str(plan(A, B))
    jax_streamk.use_tuned_plans(tmp_path)
    try:
        assert "tuning" in str(plan(A, B))
    finally:
        jax_streamk.use_tuned_plans()
    assert "tuning" not in str(plan(A, B))
    with pytest.raises(RuntimeError, match="tune in a single process"), jax_streamk.tuning():
        raise AssertionError("tuned")


def test_a_folder_that_is_named_is_there(tmp_path):
    before = tuned.store_of()
    (tmp_path / "file").touch()
    for name, error in (("absent", FileNotFoundError), ("file", NotADirectoryError)):
        with pytest.raises(
            error,
            match=rf"cache='.*{name}': .*{name} is not a folder: .*tune .*--cache DIR.* an empty one means no tuned",
        ):
            jax_streamk.use_tuned_plans(str(tmp_path / name))
        assert tuned.store_of() is before


@pytest.mark.parametrize("cache", [7, b"bytes", ""])
def test_a_cache_is_a_path(cache):
    with pytest.raises(ValueError, match=r"cache=.*must be the path of a folder, or None"):
        jax_streamk.use_tuned_plans(cache)


def unreadable(*arguments):
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("what", ["directory", "pipe", "no permission"])
def test_what_is_no_readable_file_is_ignored_with_one_warning(store, what, monkeypatch):
    device = here()
    store.directory.mkdir()
    if what == "directory":
        store.path(device).mkdir()
    elif what == "pipe":
        os.mkfifo(store.path(device))
    else:
        store.path(device).touch()
        monkeypatch.setattr(fcntl, "flock", unreadable)
    with pytest.warns(UserWarning, match="ignores tuned plans in") as warned:
        assert plan(A, B).kernel and plan(shaped(1, 2048), B).kernel
    assert len(warned) == 1


def test_a_file_in_place_of_the_folder(store):
    store.directory.write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan(A, B).kernel
    with pytest.raises(OSError, match=re.escape(str(store.directory))):
        store.check_writable(here())
    with pytest.raises(OSError), jax_streamk.tuning():
        raise AssertionError("measured what cannot be stored")


def test_the_file_is_read_once(store, monkeypatch):
    reads = []
    monkeypatch.setattr(Store, "read", lambda self, device: reads.append(device) or tuned.Contents({}))
    for m in range(1, 50):
        plan(shaped(m, 2048), B)
    assert reads == [here()]


def test_a_plan_that_was_tuned_is_found_at_once(store):
    device, problem = here(), plan(A, B).problem
    write(store, device, line_of(problem, device))
    fresh = Store(store.directory)
    with tuned.using(fresh):
        started = time.process_time()
        for _ in range(1000):
            assert planner.make_plan(problem, Auto(), device).swizzle == 3
        assert (time.process_time() - started) / 1000 < 3e-5  # seconds


def test_the_users_folder_is_the_default(tmp_path):
    (tmp_path / "mine").mkdir()
    program = f"""
import jax_streamk
from jax_streamk.tuning import tuned
from jax_streamk.plan.plan import native_schedule
print(tuned.store_of().directory)
jax_streamk.use_tuned_plans({str(tmp_path / "mine")!r})
print(tuned.store_of().directory)
with tuned.using(tuned.store_of("here")):
    print(tuned.store_of().directory)
jax_streamk.use_tuned_plans()
print(tuned.store_of().directory)
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    users = str(tmp_path / "cache" / "jax_streamk")
    assert done.stdout.split() == [users, str(tmp_path / "mine"), str(tmp_path / "here"), users], done.stderr
    # Nothing was written, and these tests themselves use another folder.
    assert [*tmp_path.rglob("*")] == [tmp_path / "mine"]
    assert os.environ["XDG_CACHE_HOME"] in str(tuned.store_of().directory) != users


def test_a_partitioned_program_tells_which_plans_it_was_made_with(store):
    """A partitioned product's text does not hold its plan: the persistent compilation cache must tell plans apart."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    sharding = NamedSharding(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), PartitionSpec("x"))

    def text():
        lowered = jax.jit(lambda a, b: matmul(a, b), in_shardings=(sharding, None)).lower(A, B).as_text()
        return re.findall(r"tuned plans \d+", lowered)

    before = text()
    assert len(before) == 1 and text() == before
    problem = plan(A, B).problem
    store.add(here(), problem, found(problem, here()))
    after = text()
    assert after != before
    # Inside tuning() every program is new, since lowering it may find new plans.
    with jax_streamk.tuning():
        assert len({*before, *after, *text(), *text()}) == 4


# Measuring


def problems_to_run():
    """Problems whose strides, batches, majornesses and epilogues make operands differ in size and address."""
    epilogue = dict(activation="relu", bias=True, residual=True, alpha=0.5, beta=2.0)
    wide = plan(shaped(3, 24, 40, dtype=jnp.float32), shaped(3, 40, 32, dtype=jnp.float32), **epilogue).problem
    column = plan(A, shaped(96, 2048), (((1,), (1,)), ((), ()))).problem
    return [wide, dataclasses.replace(wide, batch_stride_b=0, batch_stride_bias=32), column]


@pytest.mark.parametrize("which", range(3))
def test_every_set_of_operands_is_multiplied(which, monkeypatch):
    problem = problems_to_run()[which]
    monkeypatch.setitem(measure.ROTATED_BYTES, here().platform, 4 * 1.1e5 if which < 2 else 4 * 7e5)
    memory = measure.Memory(here())
    rotation = memory.rotation(problem)
    made = planner.make_plan(problem, Auto(), here())
    times = rotation.time(made.kernel, made.native_schedule(), made.policy, repeats=4)
    assert len(times) == 4 and all(0 < us < 1e6 for us in times)
    dtype = jnp.dtype(jnp.float32 if which < 2 else jnp.bfloat16)
    held = {address.unsafe_buffer_pointer(): np.asarray(address) for address in memory._held.values()}

    def matrix(address, batch_stride, row_stride, column_stride, rows, columns):
        start = max(base for base in held if base <= address)
        data = held[start][address - start :]
        at = np.arange(problem.batch)[:, None, None] * batch_stride
        at = at + np.arange(rows)[:, None] * row_stride + np.arange(columns) * column_stride
        return data[: (at.max() + 1) * dtype.itemsize].view(dtype)[at].astype(np.float64)

    assert len(rotation._sets) >= 3
    for held_at in rotation._sets:
        a, b, d, bias, residual = (held_at[role] for role in ("a", "b", "d", "bias", "residual"))
        lhs = matrix(a, problem.batch_stride_a, problem.lda, 1, problem.m, problem.k)
        b_strides = (problem.ldb, 1) if problem.major_b == _ffi.Major.row else (1, problem.ldb)
        wanted = lhs @ matrix(b, problem.batch_stride_b, *b_strides, problem.k, problem.n)
        assert 0.9 < lhs.std() < 1.1
        if problem.has_bias:
            wanted = 0.5 * wanted + matrix(bias, problem.batch_stride_bias, 0, 1, 1, problem.n)
            wanted = np.maximum(
                wanted + 2 * matrix(residual, problem.batch_stride_d, problem.ldd, 1, problem.m, problem.n), 0
            )
        got = matrix(d, problem.batch_stride_d, problem.ldd, 1, problem.m, problem.n)
        np.testing.assert_allclose(got, wanted, rtol=2**-6, atol=2e-2 if which < 2 else 1.0)


def test_measurements_of_what_cannot_run_are_refused(quick):
    problem = plan(A, B).problem
    memory = measure.Memory(here())
    made = planner.make_plan(problem, SplitK(2), here())
    schedule = SplitK(10_000)
    with pytest.raises(ValueError, match="splits=10000 exceeds"):
        memory.rotation(problem).time(made.kernel, native_schedule(schedule), made.policy)
    with pytest.raises(RuntimeError, match="at least one set"):
        how = made.native_schedule(), made.policy.native(), here().native()
        _ffi.time_launches(made.kernel, problem.native(), *how, [], 0)
    with pytest.raises(ValueError, match="not a device of this process"):
        measure.Memory(dataclasses.replace(here(), kind="another"))


def test_a_tuned_plan_is_a_measured_one_that_runs(quick):
    problem = plan(A, B).problem
    made = tune.fastest(problem, measure.Memory(here()))
    assert 0 < made.xla_ratio < 1e6
    assert _ffi.can_implement(made.kernel, problem.native(), made.native(), here().native()) is None
    assert 0 < made.microseconds <= made.planned_microseconds < 1e6 and made.reduction != "atomic"


@pytest.mark.parametrize(
    "faster, spoiled, wrong, wins",
    [(0.995, None, 0, False), (0.98, None, 0, True), (0.5, 3, 0, False), (0.5, None, 1, False)],
)
def test_the_planners_choice_stays_unless_beaten_by_more_than_noise(monkeypatch, faster, spoiled, wrong, wins):
    """With made-up times: the fastest is one of the first that the planner lists, with other splits."""
    problem = plan(shaped(64, 65536), shaped(65536, 96)).problem
    native = planner.choose(problem, None, here(), listed=24).candidates
    own = listed_as(native[0])
    listed = next(listed_as(x) for x in native[1:] if x.schedule.schedule == _ffi.ScheduleKind.split_k)
    best, asked = dataclasses.replace(listed, splits=listed.splits + 1), []

    class Pretended:
        def shorten(self, *launch):
            assert Trial.of(*launch) == own

        def time(self, kernel, schedule, policy, repeats=3):
            candidate = Trial.of(kernel, schedule, policy)
            asked.append(candidate)
            if candidate == best and asked.count(best) == spoiled:
                return [11.0] * repeats
            return [
                {own: 1.0, listed: 1.1, best: faster}.get(candidate, 2.0) * us for us in (10.0, 10.0, 50.0)[:repeats]
            ]

        def result(self, *launch):
            return np.array([np.nan, 3.0, -4.0 - wrong * (Trial.of(*launch) == best)])

    def against(made, memory, rounds):
        assert Trial.of(made.kernel, made.native_schedule(), made.policy) == (best if wins else own)
        return 0.7

    memory = measure.Memory(here())
    monkeypatch.setattr(memory, "rotation", lambda problem: Pretended())
    monkeypatch.setattr(contest, "xla_ratio", against)
    with pytest.warns(UserWarning, match="its result differs") if wrong else contextlib.nullcontext():
        made = tune.fastest(problem, memory)
    assert dataclasses.replace(made, date="") == Tuned(
        **vars(best if wins else own), microseconds=made.microseconds, planned_microseconds=10.0, xla_ratio=0.7,
        jaxlib=jaxlib.__version__, date="",
    )  # fmt: skip
    assert made.microseconds == pytest.approx(10 * faster if wins else 10)
    assert set(map(listed_as, native)) <= set(asked)
    # The finalists take turns.
    assert asked[-1] != asked[-2] and asked.count(own) == asked.count(best) == 2 + tune._ROUNDS
    assert asked.count(listed_as(native[-1])) == 1  # hopeless


def fail_of(failing, kernel, times):
    if kernel == failing:
        raise RuntimeError("out of memory")
    return times


def test_on_a_gpu_other_orders_of_tiles_and_launch_choices_are_tried_around_the_best(monkeypatch):
    """Candidates and times are made up. The fifth is fastest, and faster along n by four and with a stage held back."""
    problem = plan(A, B).problem
    own = _ffi.Schedule(_ffi.ScheduleKind.data_parallel), LaunchPolicy("m", 2).native()
    native = [types.SimpleNamespace(kernel=f"kernel {i}", schedule=own[0], policy=own[1]) for i in range(7)]
    monkeypatch.setattr(
        planner, "choose", lambda problem, wanted, device, listed: types.SimpleNamespace(candidates=native[:listed])
    )
    # The planner's launch policy for an order.
    monkeypatch.setattr(
        planner,
        "policy_in_order",
        lambda kernel, problem, native, raster, swizzle, device: LaunchPolicy(raster, swizzle, evict_first_b=True),
    )
    refused, most_held = ("kernel 5", "along_n", 1), 2
    monkeypatch.setattr(_ffi, "may_serve", lambda *parts: None)
    monkeypatch.setattr(
        _ffi,
        "check_policy",
        lambda kernel, problem, s, policy, device: (
            (kernel, policy.raster.name, policy.swizzle) == refused or policy.held_back > most_held or None
        ),
    )
    monkeypatch.setattr(planner, "plan_with", lambda *parts: None)
    monkeypatch.setattr(contest, "xla_ratio", lambda *parts: 0.0)
    asked = []

    class Pretended:
        device, stopped = HOPPER, threading.Event()
        rotation = lambda self, problem: self
        shorten = lambda self, *launch: None

        def time(self, kernel, schedule, policy, repeats=3):
            asked.append((kernel, policy))
            gain = ((policy.raster, policy.swizzle) == ("n", 4)) + (policy.held_back == 1 and policy.evict_first_b)
            return [{"kernel 4": 8.0, "kernel 5": 9.0, "kernel 6": 9.5}.get(kernel, 12.0) - gain] * repeats

        def result(self, *launch):
            return np.ones(3)

    # A candidate that fails to run is skipped, unless it is the planner's own choice.
    with monkeypatch.context() as patch:
        time = Pretended.time
        patch.setattr(
            Pretended, "time", lambda self, kernel, *rest: fail_of("kernel 4", kernel, time(self, kernel, *rest))
        )
        assert tune.fastest(problem, Pretended()).kernel == "kernel 5"
        patch.setattr(
            Pretended, "time", lambda self, kernel, *how, repeats=3: fail_of("kernel 0", kernel, [1.0] * repeats)
        )
        with pytest.raises(RuntimeError, match="out of memory"):
            tune.fastest(problem, Pretended())
    asked.clear()
    made = tune.fastest(problem, Pretended())
    assert made.kernel == "kernel 4" and made.policy == LaunchPolicy("n", 4, evict_first_b=True, held_back=1)
    assert (made.microseconds, made.planned_microseconds) == (6, 12)
    for kernel in ("kernel 4", "kernel 5", "kernel 6"):
        orders = {(policy.raster, policy.swizzle) for of, policy in asked if of == kernel}
        assert set(tune.ORDERS) - orders == ({("n", 1)} if kernel == "kernel 5" else set())
    assert all(of != "kernel 3" or policy.raster == "m" for of, policy in asked)
    # Every pair of L2 hints, and other numbers of stages if a launch allows them.
    around = {policy for of, policy in asked if of == "kernel 4" and (policy.raster, policy.swizzle) == ("n", 4)}
    assert {(policy.evict_first_a, policy.evict_first_b) for policy in around} == set(
        itertools.product((False, True), repeat=2)
    )
    assert {policy.held_back for policy in around} == {0, 1, 2}


def contested():
    """Also: operands without a batch, a bias per batch, column-major B, D narrower than sums, K = 1."""
    wide, shared, column = problems_to_run()
    turned = dataclasses.replace(wide, major_b=_ffi.Major.column, ldb=40)
    lone_a = dataclasses.replace(wide, batch_stride_a=0, ldd=96, batch_stride_d=32, batch_stride_bias=32)
    each_bias = dataclasses.replace(wide, batch_stride_bias=32)
    narrow = plan(A, B, activation="silu", bias=True).problem
    shared = dataclasses.replace(shared, batch_stride_bias=0)
    return [wide, shared, column, turned, lone_a, each_bias, narrow, plan(shaped(5, 1), shaped(1, 7)).problem]


@pytest.mark.parametrize("which", range(8))
def test_both_sides_of_the_contest_multiply_the_same(which, quick):
    made = planner.make_plan(contested()[which], Auto(), here())
    products = [jax.jit(side(made)) for side in (contest.ours, contest.xlas)]
    memory = measure.Memory(here())
    operands = contest.operands_of(made, memory)[0]
    spans = measure.spans(made.problem)
    _, d = spans.pop("d")
    assert [x.shape for x in operands] == [(size,) for _, size in spans.values()]
    ours, xlas = (product(*operands) for product in products)
    assert ours.shape == xlas.shape == (d,) and ours.dtype == xlas.dtype
    size = np.abs(np.asarray(xlas, np.float64)).max()
    np.testing.assert_allclose(np.asarray(ours, np.float64), np.asarray(xlas, np.float64), rtol=0, atol=2**-6 * size)
    texts = [product.lower(*operands).as_text() for product in products]
    assert [text.count(f"custom_call @{TARGET}") for text in texts] == [1, 0] and texts[1].count(
        "stablehlo.dot_general"
    ) == 1
    if which == 6:  # like XLA's product in a program: activated before it is rounded
        assert re.search(r"dot_general.*-> tensor<64x96xf32>", texts[1])
    assert contest.xla_ratio(made, memory, 1) > 0


def test_operands_of_a_contest_rotate(monkeypatch):
    made = dataclasses.replace(plan(A, B), microseconds=10.0)
    larger, seen = 2048 * 96 * 2, []
    monkeypatch.setattr(contest, "wall_sample", lambda program: seen.append(program.calls) or 1.0)
    cases = (20, 10.0, 20, 20), (3, 10.0, 16, 3), (1000, 10.0, 64, 64), (20, 4e3, 5, 5), (20, 1e6, 1, 1)
    for larger_operands, microseconds, calls, sets in cases:
        monkeypatch.setitem(measure.ROTATED_BYTES, here().platform, larger_operands * larger)
        made = dataclasses.replace(made, microseconds=microseconds)
        memory = measure.Memory(here())
        operands = contest.operands_of(made, memory)
        assert len(operands) == calls and len({b.unsafe_buffer_pointer() for _, b in operands}) == sets
        assert contest.xla_ratio(made, memory, 1) == 1 and seen == [calls] * 2
        seen.clear()


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.int8])
def test_a_contest_of_types_that_this_process_does_not_have(dtype, quick):
    out = {"preferred_element_type": jnp.int32} if dtype == jnp.int8 else {}
    with jax.enable_x64(True):
        made = plan(shaped(8, 64, dtype=dtype), shaped(64, 24, dtype=dtype), **out)
    assert contest.xla_ratio(made, measure.Memory(here()), 1) > 0


def test_a_contest_under_strict_settings(quick):
    with jax.numpy_dtype_promotion("strict"), jax.transfer_guard("disallow"), jax.numpy_rank_promotion("raise"):
        assert contest.xla_ratio(plan(A, B, activation="silu", bias=True), measure.Memory(here()), 1) > 0


@pytest.mark.parametrize("xlas_times, largest", [([9.0, 8.0, 9.5], 0.95), ([9.0, 12.0], 1.2), ([12.0], 1.2)])
def test_xla_wins_in_every_round_or_not_at_all(monkeypatch, quick, xlas_times, largest):
    times = iter([time for xlas in xlas_times for time in (10.0, xlas)])
    monkeypatch.setattr(contest, "wall_sample", lambda program: next(times))
    assert contest.xla_ratio(plan(A, B), measure.Memory(here()), 3) == largest
    assert next(times, None) is None


def test_a_contest_that_fails_warns(monkeypatch, quick):
    monkeypatch.setattr(contest, "wall_sample", lambda program: fail_of(0, 0, 0))
    with pytest.warns(UserWarning, match="could not compare .* with XLA's product: RuntimeError: out of memory"):
        assert contest.xla_ratio(plan(A, B), measure.Memory(here()), 3) == 0


def test_a_contest_that_is_stopped_says_so(monkeypatch):
    memory = measure.Memory(here())
    memory.stopped.set()
    with pytest.raises(RuntimeError, match="measuring was stopped"):
        contest.xla_ratio(plan(A, B), memory, 3)


def test_three_tf32_are_not_left_to_one():
    problem = dataclasses.replace(
        plan(shaped(64, 64, dtype=jnp.float32), shaped(64, 64, dtype=jnp.float32)).problem, math=_ffi.Math.tf32x3
    )
    assert contest.xla_ratio(Plan(problem, HOPPER, "a kernel", DataParallel()), None, 3) == 0


# tuning()


@pytest.fixture
def pretended(monkeypatch):
    """Fakes measurements that find ``another`` plan for every problem; returns a list of the problems."""
    calls = []

    def found_at_once(problem, memory):
        assert isinstance(jnp.ones(3) + 1, jax.Array) and not isinstance(jnp.ones(3), jax.core.Tracer)
        calls.append(problem)
        return found(problem, memory.device)

    monkeypatch.setattr(tune, "fastest", found_at_once)
    return calls


def test_tuning_measures_stores_and_uses(store, quick):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.integers(-1, 2, x.shape), x.dtype) for x in (A, B))
    with jax_streamk.tuning() as plans:
        out = jax.jit(lambda a, b: matmul(a, b))(a, b)
        (made,) = plans
        assert isinstance(made, Plan) and made == plan(A, B) and "measured by tuning" in str(made)
        jax.jit(lambda a, b: matmul(a, b) + 1)(a, b)
        matmul(a, b, schedule=StreamK())
        assert len(plans) == 1
    np.testing.assert_array_equal(out, np.asarray(a, np.float32) @ np.asarray(b, np.float32))
    assert list(Store(store.directory).read(here()).plans) == [made.problem]
    assert plan(A, B) == made
    jax.jit(lambda a: matmul(a, b))(a[:5])
    assert len(plans) == 1


def transformed():
    """By name: a function, its arguments, and the number of its different products."""
    w = jnp.ones((2048, 96), jnp.bfloat16)
    loss = lambda a, b: (matmul(a, b).astype(jnp.float32) ** 2).sum()
    stacked = jnp.ones((5, 64, 2048), jnp.bfloat16)
    square = jnp.ones((64, 64), jnp.float32)
    bias = jnp.ones(96, jnp.bfloat16)
    return {
        "eager": (matmul, (stacked[0], w), 1),
        "vmap": (jax.vmap(matmul), (stacked, jnp.stack([w] * 5)), 1),
        "grad": (jax.grad(loss, (0, 1)), (stacked[0], w), 3),
        "checkpoint": (jax.grad(jax.checkpoint(loss)), (stacked[0], w), 2),
        "scan": (lambda xs, w: jax.lax.scan(lambda c, x: (c, matmul(x, w)), 0, xs)[1], (stacked, w), 1),
        "cond": (
            lambda x, w: jax.lax.cond(x[0, 0] > 0, matmul, lambda a, b: 2 * matmul(a, b), x, w),
            (stacked[0], w),
            1,
        ),
        "while": (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: matmul(y, x) / 64, x), (square,), 1),
        "linear": (lambda x, w: linear(x, w, bias, activation="silu"), (stacked[0], w), 1),
        "accelerate": (jax_streamk.accelerate(lambda x, w: jnp.dot(x, w)), (stacked[0], w), 1),
    }


@pytest.mark.parametrize("name", transformed())
def test_tuning_under_transformations(store, pretended, name):
    f, operands, products = transformed()[name]
    wanted = jax.jit(lambda *xs: f(*xs))(*operands)
    with jax_streamk.tuning() as plans:
        got = (f if name == "eager" else jax.jit(lambda *xs: f(*xs)))(*operands)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2**-6), got, wanted)
    assert len(plans) == products == len(set(pretended)) == len(store.plans(here()))
    assert all(made.swizzle == 3 for made in plans)


@pytest.mark.parametrize("name", transformed())
def test_what_is_left_to_xla_under_transformations(store, pretended, name, monkeypatch):
    f, operands, products = transformed()[name]
    wanted = jax.jit(lambda *xs: f(*xs))(*operands)
    monkeypatch.setattr(tune, "fastest", lambda problem, memory: found(problem, memory.device, xla_ratio=0.5))
    with jax_streamk.tuning() as plans:
        lowered = jax.jit(lambda *xs: f(*xs)).lower(*operands)
        got = lowered.compile()(*operands)
    assert TARGET not in lowered.as_text() and len(plans) == products and not any(made.kernel for made in plans)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2**-6), got, wanted)


def test_another_xla_is_measured_again(store, pretended, monkeypatch):
    program = lambda: jax.jit(lambda a, b: matmul(a, b)).lower(A, B)
    store.add(here(), plan(A, B).problem, found(plan(A, B).problem, here(), xla_ratio=0.5, jaxlib="0.0.1"))
    assert plan(A, B).kernel and "XLA's product took 0.50" not in str(plan(A, B))
    with jax_streamk.tuning() as plans:
        program(), program()
    assert len(plans) == len(pretended) == 1 and "XLA's product took 1.20" in str(plan(A, B))


def test_after_an_interruption_tuning_goes_on(store, quick, monkeypatch):
    measured = tune.fastest

    def interrupted(problem, memory):
        monkeypatch.setattr(tune, "fastest", measured)
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "fastest", interrupted)
    with jax_streamk.tuning() as plans:
        with pytest.raises(KeyboardInterrupt):
            jax.jit(matmul).lower(A, B)
        jax.jit(lambda a, b: matmul(a, b)).lower(A, B)
    assert len(plans) == 1


def test_tuning_lowers_again_what_was_compiled_before(store, pretended):
    f = jax.jit(lambda a, b: matmul(a, b))
    a, b = (jnp.ones(x.shape, x.dtype) for x in (A, B))
    wanted = f(a, b)
    with jax_streamk.tuning() as plans:
        assert (f(a, b) == wanted).all() and len(plans) == 1
        f(a, b)
    f(a, b)
    assert len(plans) == 1 and len(pretended) == 1


@pytest.mark.parametrize("call", [matmul, functools.partial(linear, activation="relu")])
def test_calls_outside_of_jit_run_the_plans_in_use(store, pretended, call, monkeypatch):
    a, b = (jnp.ones(x.shape, x.dtype) for x in (A, B))
    lowered, planned = [], alternatives.plan

    def recorded(*args, **kwargs):
        lowered.append(planned(*args, **kwargs))
        return lowered[-1]

    monkeypatch.setattr(alternatives, "plan", recorded)
    call(a, b), call(a, b)
    assert len(lowered) == 1 and lowered.pop().plan.swizzle != 3
    with jax_streamk.tuning() as plans:
        call(a, b)
    assert len(plans) == 1
    lowered.clear()
    call(a, b), call(a, b)  # compiled before, with another plan
    assert len(lowered) == 1 and lowered.pop().plan.swizzle == 3
    with tuned.using(None):
        (store.directory / "empty").mkdir()
        for directory, is_tuned in ((store.directory, True), (store.directory / "empty", False)):
            jax_streamk.use_tuned_plans(directory)
            call(a, b)
            assert len(lowered) == 1 and (lowered.pop().plan.swizzle == 3) == is_tuned
        jax_streamk.use_tuned_plans()


def test_a_product_that_cannot_be_tuned_is_tried_once(store, monkeypatch):
    tried = []

    def fails(problem, memory):
        tried.append(problem)
        raise MemoryError("too large")

    monkeypatch.setattr(tune, "fastest", fails)
    with (
        jax_streamk.tuning() as plans,
        pytest.warns(UserWarning, match="could not tune .*MemoryError: too large") as warned,
    ):
        for _ in range(3):
            jax.jit(lambda a, b: matmul(a, b)).lower(A, B)
    assert len(tried) == len(warned) == 1 and not plans


def test_interrupting_tuning_does_not_wait_for_the_rest(store, monkeypatch):
    def interrupted(future, timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), jax_streamk.tuning():
        jax.jit(matmul).lower(shaped(2048, 2048), shaped(2048, 2048))
    assert time.monotonic() - started < 20 and not store.plans(here())


@pytest.mark.parametrize("how", ["shard_map", "partitioned", "explicit"])
def test_tuning_on_several_devices(store, pretended, how):
    """A device multiplies its part: that product is tuned, in lowering or in the partitioner's callback."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    explicit = how == "explicit"
    kind = (jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("x",), axis_types=kind, devices=jax.devices()[:2])
    spec = PartitionSpec("x", None)
    a = jax.device_put(jnp.ones((128, 320), jnp.bfloat16), NamedSharding(mesh, spec))
    b = jax.device_put(jnp.ones((320, 80), jnp.bfloat16), NamedSharding(mesh, PartitionSpec()))
    f = matmul
    if how == "shard_map":
        f = jax.shard_map(matmul, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    with jax_streamk.tuning() as plans, jax.set_mesh(mesh):
        out = jax.jit(lambda a, b: f(a, b))(a, b)
    np.testing.assert_array_equal(out, np.full((128, 80), 320))
    (made,) = plans
    assert (made.problem.m, made.problem.n, made.problem.k) == (64, 80, 320) and made.swizzle == 3


def test_what_is_partitioned_runs_beside_xlas_product(store, quick, monkeypatch):
    """While one program is compiled, two more are compiled and run."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    ratios = []
    measured = contest.xla_ratio
    monkeypatch.setattr(contest, "xla_ratio", lambda *parts: ratios.append(measured(*parts)) or 0.5)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    a = jax.device_put(jnp.ones((128, 320), jnp.bfloat16), NamedSharding(mesh, PartitionSpec("x")))
    with jax_streamk.tuning() as plans, jax.set_mesh(mesh):
        run = jax.jit(lambda a: matmul(a, a.T)).lower(a).compile()
    (made,) = plans
    assert ratios[0] > 0 and made.kernel is None and TARGET not in run.as_text()
    np.testing.assert_array_equal(run(a), np.full((128, 128), 320))


def test_tuning_holds_for_its_thread_and_store(store, pretended, tmp_path):
    def program(m):
        return jax.jit(lambda b: matmul(jnp.ones((m, 2048), b.dtype), b)).lower(B)

    with concurrent.futures.ThreadPoolExecutor(1) as other, jax_streamk.tuning() as outer:
        other.submit(program, 3).result()
        assert not pretended
        with jax_streamk.tuning(tmp_path / "inner") as inner:
            program(3)
        program(4)
        assert (len(inner), len(outer)) == (1, 1)
        program(3)
        assert (len(inner), len(outer)) == (1, 2)
    program(5)
    assert len(pretended) == 3 and len(Store(tmp_path / "inner").read(here()).plans) == 1
    assert len(Store(store.directory).read(here()).plans) == 2


def test_threads_that_tune_at_once_measure_a_product_once(store, pretended, monkeypatch):
    at_once, now = [], threading.Lock()

    def slowly(problem, memory, measure=tune.fastest):
        at_once.append(now.acquire(blocking=False))
        time.sleep(0.05)
        now.release()
        return measure(problem, memory)

    monkeypatch.setattr(tune, "fastest", slowly)

    def program(factor):
        with tuned.using(store), jax_streamk.tuning():
            for m in (3, 4):
                jax.jit(lambda b: factor * matmul(jnp.ones((m, 2048), b.dtype), b)).lower(B)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(program, range(4)))
    assert at_once == [True, True] and len(set(pretended)) == 2


def test_a_failure_to_measure_or_store_is_a_warning(store, monkeypatch):
    def fails(problem, memory):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tune, "fastest", fails)
    with jax_streamk.tuning(), pytest.warns(UserWarning, match="could not tune .*out of memory"):
        assert emitted(lambda a, b: matmul(a, b), A, B)[0][0] == plan(A, B).kernel
    problem = plan(A, B).problem
    monkeypatch.setattr(tune, "fastest", lambda problem, memory: found(problem, memory.device))
    with jax_streamk.tuning() as plans, pytest.warns(UserWarning, match="could not store .*No space"):
        monkeypatch.setattr(Store, "_appending", no_space)
        emitted(lambda a, b: matmul(a, b), A, B)
    assert plans == [plan(A, B)] and plans[0].swizzle == 3  # in this process it is used
    assert problem not in Store(store.directory).read(here()).plans


def no_space(self, device):
    raise OSError(28, "No space left on device")


def test_devices_of_other_machines_are_not_tuned(store, pretended):
    for device in (HOPPER, dataclasses.replace(here(), kind="another")):
        made = Plan(plan(A, B).problem, device, "a kernel", DataParallel())
        with jax_streamk.tuning() as plans:
            assert tune.tuned_if_asked(made) is made
        assert not plans and not pretended


def test_nested_batches_are_not_tuned(store, pretended):
    problem = dataclasses.replace(plan(A, B).problem, batch=4, inner_batch=2)
    made = Plan(problem, here(), "a kernel", DataParallel())
    with jax_streamk.tuning() as plans:
        assert tune.tuned_if_asked(made) is made
    assert not plans and not pretended


def enters_tuning(x):
    with jax_streamk.tuning():
        return matmul(x, x)


@pytest.mark.parametrize(
    "traced",
    [
        jax.jit(enters_tuning),
        jax.jit(jax.vmap(enters_tuning)),
        jax.jit(jax.grad(lambda x: enters_tuning(x).sum())),
        jax_streamk.accelerate(enters_tuning),
    ],
    ids=["jit", "vmap in jit", "grad in jit", "accelerate"],
)
def test_tuning_inside_of_a_trace_is_an_error(store, traced):
    with pytest.raises(
        RuntimeError, match="tuning.. has no effect inside a traced function, .*: enter it around the call"
    ):
        traced(jnp.ones((2, 8, 8)))


def test_tuning_inside_of_a_function_that_is_not_traced_tunes(store, quick):
    jax.vmap(enters_tuning)(jnp.ones((2, 8, 8)))
    assert len(store.plans(here())) == 1
