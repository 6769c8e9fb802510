"""Tuning: measures a problem's candidates where it will run, and stores the fastest for ``Auto()``."""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
import os
import statistics
import threading
import time
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jax_streamk import _ffi, schedules
from jax_streamk.device import Device, device_of, jax_device_of
from jax_streamk.plan import planner
from jax_streamk.plan.launch_policy import LaunchPolicy
from jax_streamk.plan.plan import Plan
from jax_streamk.plan.problem import GemmProblem
from jax_streamk.tuning import contest, tuned
from jax_streamk.tuning.measure import Memory
from jax_streamk.tuning.programs import repeat, wall_sample
from jax_streamk.tuning.tuned import Trial, Tuned

# Orders of tiles: raster and swizzle.
ORDERS = [("m", 1), ("m", 4), ("n", 1), ("n", 4), ("m", 2), ("m", 8), ("n", 8)]
_LISTED = 24  # candidates measured first: those with the lowest estimates
_HOPELESS = 1.5  # times the best time so far: slower candidates are measured once only
_BEST = 3  # candidates whose variants are measured too
_FINALISTS = 4  # candidates measured again, in turn
_ROUNDS = 5


def fastest(problem, memory):
    """Finds the fastest deterministic plan of a problem that some kernel runs, on the device of ``memory``.

    Returns:
      The ``Tuned`` plan: the planner's own choice unless another is faster by more than noise.

    Raises:
      RuntimeError: a launch of the planner's own choice failed, or the device has no memory left for it.
    """
    device = memory.device
    choice = planner.choose(problem, None, device, listed=_LISTED)
    listed = [Trial.of(x.kernel, x.schedule, LaunchPolicy.of(x.policy)) for x in choice.candidates]
    own, rotation = listed[0], memory.rotation(problem)
    times: dict[Trial, float] = {}
    rotation.shorten(*_launch_of(own))

    def try_all(candidates):
        for candidate in candidates:
            if candidate in times or _why_not(candidate, problem, device) is not None:
                continue
            try:
                (times[candidate],) = rotation.time(*_launch_of(candidate), 1)
                if times[candidate] < _HOPELESS * min(times.values()):
                    times[candidate] = statistics.median(rotation.time(*_launch_of(candidate)))
            except RuntimeError:  # such as a workspace that does not fit into memory
                if candidate == own or memory.stopped.is_set():
                    raise
                times[candidate] = math.inf

    def best(count):
        return sorted((candidate for candidate in times if times[candidate] < math.inf), key=times.__getitem__)[:count]

    try_all(listed)
    # On a CPU few tiles load at the same time, so their order matters little; groups of rows have one order.
    if device.arch and problem.ragged != _ffi.Ragged.m:
        try_all(_in_order(candidate, *order, problem, device) for candidate in best(_BEST) for order in ORDERS)
    try_all(
        _split(candidate, splits, problem, device) for candidate in best(_BEST) for splits in _neighbours(candidate)
    )
    if device.arch:
        try_all(
            dataclasses.replace(candidate, policy=policy)
            for candidate in best(_BEST)
            for policy in _variants(candidate.policy)
        )

    rounds: dict[Trial, list[float]] = {candidate: [] for candidate in dict.fromkeys((own, *best(_FINALISTS)))}
    for _ in range(_ROUNDS):
        for candidate, medians in rounds.items():
            medians.append(statistics.median(rotation.time(*_launch_of(candidate))))
    final = {candidate: statistics.median(medians) for candidate, medians in rounds.items()}
    right = rotation.result(*_launch_of(own))
    winner = own
    for candidate in sorted(final, key=final.__getitem__):
        # The winner must also beat the planner's own choice in every round.
        if final[own] <= tuned.MARGIN * final[candidate] or any(x <= y for x, y in zip(rounds[own], rounds[candidate])):
            break
        if _agree(rotation.result(*_launch_of(candidate)), right):
            winner = candidate
            break
        warnings.warn(
            f"jax_streamk does not use {candidate}: its result differs from that of {own}. Please report this."
        )
    tuned_plan = Tuned.now(winner, final[winner], final[own])
    ratio = contest.xla_ratio(planner.plan_with(problem, schedules.Auto(), device, tuned_plan), memory, _ROUNDS)
    return dataclasses.replace(tuned_plan, xla_ratio=ratio)


def _agree(x, y):
    """Whether results are equal up to rounding. Elements that no kernel writes are NaN or -1 in both."""
    if x.dtype == np.int32:
        return np.array_equal(x, y)
    x, y = x.astype(np.float64), y.astype(np.float64)
    return np.allclose(x, y, rtol=0, atol=0.02 * np.nanmax(np.abs(y)), equal_nan=True)


def _launch_of(candidate):
    return candidate.kernel, candidate.native(), candidate.policy


def _why_not(candidate, problem, device):
    """Why a candidate is not measured; None if it is."""
    parts = candidate.kernel, problem.native(), candidate.native()
    refusal = _ffi.may_serve(*parts, device.native())
    if refusal is None and problem.is_invariant:
        refusal = planner.why_another_order(candidate.kernel, problem, candidate.native(), device)
    return refusal or _ffi.check_policy(*parts, candidate.policy.native(), device.native())


def _in_order(candidate, raster, swizzle, problem, device):
    """The candidate with another order of tiles, and with the planner's launch policy for that order."""
    policy = planner.policy_in_order(candidate.kernel, problem, candidate.native(), raster, swizzle, device)
    return dataclasses.replace(candidate, policy=policy)


def _split(candidate, splits, problem, device):
    """The candidate with another number of splits, or unchanged if the kernel cannot run that number."""
    split = dataclasses.replace(candidate, splits=splits)
    is_served = _ffi.may_serve(split.kernel, problem.native(), split.native(), device.native()) is None
    if not is_served or problem.is_invariant:
        return candidate
    return _in_order(split, split.policy.raster, split.policy.swizzle, problem, device)


def _variants(policy):
    """The policy with other L2 hints, and with more and fewer stages held back."""
    for first_a, first_b in itertools.product((False, True), repeat=2):
        yield dataclasses.replace(policy, evict_first_a=first_a, evict_first_b=first_b)
    for held in {0, *range(max(policy.held_back - 1, 0), policy.held_back + 3)}:
        yield dataclasses.replace(policy, held_back=held, held_back_last=min(policy.held_back_last, held))


def _neighbours(candidate):
    """Numbers of splits around a candidate's."""
    if candidate.schedule != _ffi.ScheduleKind.split_k.name:
        return []
    n = candidate.splits
    return [splits for splits in (n // 2, n * 3 // 4, n - 2, n - 1, n + 1, n + 2, n * 4 // 3, n * 2) if splits >= 2]


class _Session:
    def __init__(self, store):
        self.store = store
        self.plans: list[Plan] = []
        self.failed: set[tuple[GemmProblem | str, Device]] = set()
        self.key = object()  # kept by those who must not keep its memories
        self._memories: dict[Device, Memory] = {}

    def memory(self, device):
        if device not in self._memories or self._memories[device].stopped.is_set():
            self._memories[device] = Memory(device)
        return self._memories[device]


_session: contextvars.ContextVar[_Session | None] = contextvars.ContextVar("jax_streamk_tuning", default=None)
_jits_key = jax.make_user_context(None)  # part of jit's cache key: inside, programs are lowered again
_measuring = threading.Lock()  # concurrent measurements would slow each other down


@contextlib.contextmanager
def tuning(cache: str | os.PathLike[str] | None = None) -> Iterator[list[Plan]]:
    """A context manager that tunes the products of all programs lowered inside it.

    Lowering a product with schedule ``Auto()``, for a device of this process and without a tuned plan, then measures
    candidates on that device, compares the fastest with XLA's product, and stores and uses the result. Where
    ``accelerate`` traces, it also measures products with the equations around them, as ours and as XLA's. Functions
    compiled before are compiled again inside, and functions compiled inside once more afterwards. The context holds for
    the thread or asyncio task that enters it, and may be nested. It cannot be entered inside a traced function.

    Args:
      cache: the folder to read plans from and store them in; None is the one in use, see ``use_tuned_plans``.

    Yields:
      A list, to which the ``Plan`` of each product is added as it is tuned.

    Raises:
      OSError: on entry, if plans cannot be stored.
      RuntimeError: on entry, inside a traced function, whose products are lowered later; or with several processes
        (``jax.distributed``), whose programs would differ.
    """
    # Under a trace even a constant is a tracer.
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise RuntimeError(
            "tuning() has no effect inside a traced function, whose products are lowered later: "
            "enter it around the call of the function that jax.jit or accelerate returned"
        )
    if jax.process_count() > 1:
        raise RuntimeError(
            "tuning() in one of several processes would make their programs differ: tune in a single process"
        )
    session = _Session(tuned.store_of(cache))
    device = device_of(None)
    if device.kind:
        session.store.check_writable(device)
    with tuned.using(session.store), _jits_key(str(session.store.directory)):
        token = _session.set(session)
        try:
            yield session.plans
        finally:
            _session.reset(token)


@dataclasses.dataclass(frozen=True, eq=False)
class _Later(schedules.Auto):
    context: contextvars.Context


def later(schedule):
    """The schedule of a product that XLA's partitioner lowers later, in some versions in another thread.

    An ``Auto()`` then remembers which tuned plans are in use, and whether ``tuning()`` is on.
    """
    is_auto = isinstance(schedules.of_forward(schedule), schedules.Auto)
    if not is_auto:
        return schedule
    return _Later(contextvars.copy_context(), batch_invariant=schedules.is_invariant(schedule))


def in_its_context(schedule, function):
    """``function(schedule)``; for an ``Auto()`` from ``later``, in the context that it remembers."""
    if not isinstance(schedule, _Later):
        return function(schedule)
    return schedule.context.copy().run(function, schedules.Auto(batch_invariant=schedule.batch_invariant))


def tuned_if_asked(plan):
    """The plan that ``Auto()`` made, or inside ``tuning()`` the tuned one.

    Nested batches stay as planned: alone, XLA's product would not show the copies that it makes of them.
    """
    session, problem, device = _session.get(), plan.problem, plan.device
    if (
        session is None
        or plan.kernel is None
        or problem.inner_batch > 1
        or _is_tuned(problem, device)
        or jax_device_of(device) is None
    ):
        return plan
    if (problem, device) in session.failed:
        return plan
    with _measuring:
        if not _is_tuned(problem, device):  # another thread may have been first
            try:
                tuned_plan = _in_a_thread(functools.partial(fastest, problem), session.memory(device))
            except Exception as error:  # running out of memory raises many types
                session.failed.add((problem, device))
                warnings.warn(f"jax_streamk could not tune {problem}: {type(error).__name__}: {error}")
                return plan
            try:
                session.store.add(device, problem, tuned_plan)
            except OSError as error:
                warnings.warn(f"jax_streamk could not store the tuned plan of {problem}: {error}")
            session.plans.append(planner.make_plan(problem, schedules.Auto(), device))
    return planner.make_plan(problem, schedules.Auto(), device)


def is_on(device):
    """Whether ``tuning()`` is active here, for a device of this process."""
    return _session.get() is not None and jax_device_of(device) is not None


def session_key():
    """An object of the active ``tuning()``; None if there is none."""
    session = _session.get()
    return None if session is None else session.key


def fragment_times(key, make, device):
    """The ``FragmentTimes`` of a fragment by its text, stored before or, inside ``tuning()``, measured now; or None.

    ``make()`` returns its variants, closed jaxprs by name, and the name of the one that runs unless another is faster.
    """
    times, session = tuned.fragments(device).get(key), _session.get()
    if times is not None and times.is_of_this_xla:
        return times
    if session is None or jax_device_of(device) is None or (key, device) in session.failed:
        return None
    memory = session.memory(device)
    try:
        # Products of ours are tuned when the variants are lowered: that takes this context, and the lock.
        context = contextvars.copy_context()
        times = _in_a_thread(lambda memory: context.run(_race, make, memory), memory)
    except Exception as error:
        session.failed.add((key, device))
        warnings.warn(f"jax_streamk could not measure a fragment of a program: {type(error).__name__}: {error}")
        return None
    if times is None:
        session.failed.add((key, device))
        return None
    try:
        session.store.add_fragment(device, key, times)
    except OSError as error:
        warnings.warn(f"jax_streamk could not store what it measured of a fragment: {error}")
    return times


def _race(make, memory):
    """Measures the variants of a fragment: ``FragmentTimes``, or None if there is only one."""
    with memory.as_default():
        variants, own = make()
        if len(variants) == 1:
            return None
        rounds = fragment_rounds(variants, memory)
    medians = {name: statistics.median(times) for name, times in rounds.items()}
    winner = min(medians, key=medians.__getitem__)
    is_clear = medians[own] > tuned.MARGIN * medians[winner]
    if not is_clear or any(x <= y for x, y in zip(rounds[own], rounds[winner])):
        winner = own
    return tuned.FragmentTimes.now(winner, medians)


def fragment_rounds(variants, memory):
    """Microseconds of each variant of a fragment in each of ``_ROUNDS`` interleaved rounds, by name."""
    with jax.enable_x64(contest.has_64_bits(variants["xla"])):
        programs = contest.fragment_programs(variants, memory)
        for program in programs.values():
            repeat(program, 1)  # compiles it
        with _measuring:
            rounds = []
            for _ in range(_ROUNDS):
                memory.check_running()
                rounds.append({name: wall_sample(program) for name, program in programs.items()})
    return {name: [times[name] for times in rounds] for name in programs}


def _is_tuned(problem, device):
    tuned_plan = tuned.lookup(problem, device)
    return tuned_plan is not None and tuned_plan.is_of_this_xla


def _in_a_thread(function, memory):
    """``function(memory)`` in a thread of its own, without the trace, mesh and settings of the context that lowers."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(function, memory).result()
        except BaseException:
            memory.stopped.set()  # otherwise leaving would wait for the rest of the measurement
            raise


def digest(device):
    """A number that changes with the tuned plans in use; inside ``tuning()``, which may add some, with every call."""
    return time.time_ns() if is_on(device) else tuned.digest(device)
