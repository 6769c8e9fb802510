"""Tuning: measures a problem's candidates where it will run, and stores the fastest for ``Auto()``."""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
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

from jax_streamk import _ffi, planner, schedules
from jax_streamk.device import Device, device_of, jax_device_of
from jax_streamk.launch_policy import LaunchPolicy
from jax_streamk.problem import GemmProblem
from jax_streamk.tuning import contest, tuned
from jax_streamk.tuning.measure import Memory
from jax_streamk.tuning.tuned import Candidate, Tuned

# Orders of tiles: raster and swizzle.
ORDERS = [("m", 1), ("m", 4), ("n", 1), ("n", 4), ("m", 2), ("m", 8), ("n", 8)]
_LISTED = 24  # candidates that are measured first, by estimate
_HOPELESS = 1.5  # times the best so far: measured once and no more
_BEST = 3  # of them, around which more are tried
_FINALISTS = 4  # are measured again, in turn
_ROUNDS = 5


def fastest(problem, memory):
    """Finds the fastest deterministic plan, on the device of ``memory``, of a problem that some kernel runs.

    Returns:
      The ``Tuned`` plan: the planner's own choice unless another is faster by more than noise. And how XLA's product
      compares.

    Raises:
      RuntimeError: a launch of the planner's own choice failed, or the device has no memory left for it.
    """
    device = memory.device
    choice = planner.choose(problem, None, device, listed=_LISTED)
    listed = [Candidate.of(found.kernel, found.schedule, LaunchPolicy.of(found.policy)) for found in choice.candidates]
    own, rotation = listed[0], memory.rotation(problem)
    times: dict[Candidate, float] = {}
    rotation.shorten(*_launch_of(own))

    def try_all(candidates):
        for candidate in candidates:
            if candidate in times or _why_not(candidate, problem, device) is not None:
                continue
            try:
                (times[candidate],) = rotation.time(*_launch_of(candidate), 1)
                if times[candidate] < _HOPELESS * min(times.values()):
                    times[candidate] = statistics.median(rotation.time(*_launch_of(candidate)))
            except RuntimeError:  # its workspace may be too large, for one
                if candidate == own or memory.stopped.is_set():
                    raise
                times[candidate] = math.inf

    def best(count):
        return sorted((candidate for candidate in times if times[candidate] < math.inf), key=times.__getitem__)[:count]

    try_all(listed)
    if device.arch:  # hundreds of tiles load together; on a CPU few do
        try_all(_in_order(found, *order, problem, device) for found in best(_BEST) for order in ORDERS)
    try_all(_split(found, splits, problem, device) for found in best(_BEST) for splits in _neighbours(found))
    if device.arch:
        try_all(
            dataclasses.replace(found, policy=policy) for found in best(_BEST) for policy in _variants(found.policy)
        )

    rounds: dict[Candidate, list[float]] = {candidate: [] for candidate in dict.fromkeys((own, *best(_FINALISTS)))}
    for _ in range(_ROUNDS):
        for candidate, medians in rounds.items():
            medians.append(statistics.median(rotation.time(*_launch_of(candidate))))
    final = {candidate: statistics.median(medians) for candidate, medians in rounds.items()}
    right = rotation.result(*_launch_of(own))
    winner = own
    for candidate in sorted(final, key=final.__getitem__):
        # The planner's own choice must be beaten in every round, too.
        if final[own] <= tuned.MARGIN * final[candidate] or any(x <= y for x, y in zip(rounds[own], rounds[candidate])):
            break
        if _agree(rotation.result(*_launch_of(candidate)), right):
            winner = candidate
            break
        warnings.warn(
            f"jax_streamk does not take {candidate}: its result differs from that of {own}. Please report this."
        )
    found = Tuned.now(winner, final[winner], final[own])
    ratio = contest.xla_ratio(planner.plan_with(problem, schedules.Auto(), device, found), memory, _ROUNDS)
    return dataclasses.replace(found, xla_ratio=ratio)


def _agree(x, y):
    """Whether results are equal up to rounding; where nothing was written, both are NaN or -1."""
    if x.dtype == np.int32:
        return np.array_equal(x, y)
    x, y = x.astype(np.float64), y.astype(np.float64)
    return np.allclose(x, y, rtol=0, atol=0.02 * np.nanmax(np.abs(y)), equal_nan=True)


def _launch_of(candidate):
    return candidate.kernel, candidate.native(), candidate.policy


def _why_not(candidate, problem, device):
    """None, or why a candidate is not measured."""
    parts = candidate.kernel, problem.native(), candidate.native()
    refusal = _ffi.may_serve(*parts, device.native())
    return refusal or _ffi.check_policy(*parts, candidate.policy.native(), device.native())


def _in_order(candidate, raster, swizzle, problem, device):
    """A candidate in another order of tiles, with what else the planner decides of its launch then."""
    policy = planner.policy_in_order(candidate.kernel, problem, candidate.native(), raster, swizzle, device)
    return dataclasses.replace(candidate, policy=policy)


def _split(candidate, splits, problem, device):
    """The same with another number of splits, or as it is if the kernel does not have that many."""
    split = dataclasses.replace(candidate, splits=splits)
    if _ffi.may_serve(split.kernel, problem.native(), split.native(), device.native()) is not None:
        return candidate
    return _in_order(split, split.policy.raster, split.policy.swizzle, problem, device)


def _variants(policy):
    """Policies around one: with other L2 hints, and with more and fewer stages held back."""
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
        self.plans: list[planner.Plan] = []
        self.failed: set[tuple[GemmProblem, Device]] = set()
        self._memories: dict[Device, Memory] = {}

    def memory(self, device):
        if device not in self._memories or self._memories[device].stopped.is_set():
            self._memories[device] = Memory(device)
        return self._memories[device]


_session: contextvars.ContextVar[_Session | None] = contextvars.ContextVar("jax_streamk_tuning", default=None)
_jits_key = jax.make_user_context(None)  # a part of it: what was compiled outside is lowered again inside
_measuring = threading.Lock()  # what runs at once measures each other


@contextlib.contextmanager
def tuning(cache: str | os.PathLike[str] | None = None) -> Iterator[list[planner.Plan]]:
    """Tunes the products that programs are lowered with meanwhile: a context manager.

    Within it, lowering a product whose schedule is ``Auto()``, for a device of this process and without a tuned plan,
    measures candidates on that device at once, XLA's product beside the fastest, stores what it found and uses it.
    Functions that were compiled before are compiled anew inside, and those compiled inside once more after it. It holds
    for the thread, or the asyncio task, that enters it, and may be entered again inside; not inside a function that is
    traced.

    Args:
      cache: the folder that plans are taken from meanwhile, and stored in; None is the one in use, see
        ``use_tuned_plans``.

    Yields:
      A list, to which the ``Plan`` of each product that was tuned is added.

    Raises:
      OSError: on entry, where plans could not be stored.
      RuntimeError: on entry, inside a function that is traced, whose products are lowered later; and in one of several
        processes (``jax.distributed``), whose programs would differ.
    """
    # Whatever JAX makes is traced where a program is.
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        raise RuntimeError(
            "tuning() has no effect inside a function that is traced, whose products are lowered later: "
            "enter it around the call of what jax.jit, or accelerate, returned"
        )
    if jax.process_count() > 1:
        raise RuntimeError(
            "tuning() in one of several processes would make their programs differ: tune in a process alone"
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
    """A schedule for a product that XLA's partitioner has lowered later, in some versions in a thread of its own.

    ``Auto()`` remembers which tuned plans are in use, and whether ``tuning()`` is on.
    """
    is_auto = isinstance(schedules.of_forward(schedule), schedules.Auto)
    return _Later(contextvars.copy_context()) if is_auto else schedule


def in_its_context(schedule, function):
    """``function(schedule)``; of what ``later`` returned, ``function(Auto())`` in the context that it remembers."""
    return (
        schedule.context.copy().run(function, schedules.Auto()) if isinstance(schedule, _Later) else function(schedule)
    )


def tuned_if_asked(plan):
    """The plan of ``Auto()`` itself, or where ``tuning()`` asks for one, the tuned one."""
    session, problem, device = _session.get(), plan.problem, plan.device
    if session is None or plan.kernel is None or _is_tuned(problem, device) or jax_device_of(device) is None:
        return plan
    if (problem, device) in session.failed:
        return plan
    with _measuring:
        if not _is_tuned(problem, device):  # no other thread was first
            try:
                found = _apart(problem, session.memory(device))
            except Exception as error:  # lack of memory has many names
                session.failed.add((problem, device))
                warnings.warn(f"jax_streamk could not tune {problem}: {type(error).__name__}: {error}")
                return plan
            try:
                session.store.add(device, problem, found)
            except OSError as error:
                warnings.warn(f"jax_streamk could not store the tuned plan of {problem}: {error}")
            session.plans.append(planner.make_plan(problem, schedules.Auto(), device))
    return planner.make_plan(problem, schedules.Auto(), device)


def _is_tuned(problem, device):
    found = tuned.lookup(problem, device)
    return found is not None and found.is_of_this_xla


def _apart(problem, memory):
    """``fastest`` in a thread, away from the trace, the mesh and the settings of the context that lowers."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(fastest, problem, memory).result()
        except BaseException:
            memory.stopped.set()  # or leaving would wait for all that is left to measure
            raise


def digest(device):
    """Changes with what plans depend on besides the problem: tuned ones in use, and those that compilation may find."""
    is_tuning = _session.get() is not None and jax_device_of(device) is not None
    return time.time_ns() if is_tuning else tuned.digest(device)
