"""Tuning: measures a problem's candidates where it will run, and stores the fastest for ``Auto()``."""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import statistics
import threading
import time
import warnings

from jax_streamk import _ffi, planner, schedules, tuned
from jax_streamk.device import device_of, jax_device_of
from jax_streamk.measure import Memory
from jax_streamk.tuned import Candidate, Tuned

# Orders of tiles: raster and swizzle.
ORDERS = [("along_m", 1), ("along_m", 4), ("along_n", 1), ("along_n", 4), ("along_m", 2), ("along_m", 8), ("along_n", 8)]
_LISTED = 24  # candidates that are measured first, by estimate
_BEST = 3  # of them, around which more are tried
_FINALISTS = 4  # are measured again, in turn
_ROUNDS = 5
_MARGIN = 1.01  # by which, and in every round, the planner's own choice must be beaten: less is noise


def measure(problem, memory):
    """Finds the fastest plan of a problem, which some kernel runs, on the device of ``memory``, among the deterministic ones.

    Returns:
      The ``Tuned`` plan: the planner's own choice unless another is faster by more than noise.

    Raises:
      RuntimeError: a launch failed, or the device has no memory left.
    """
    device = memory.device
    choices = [planner.choose(problem, None, device, timed, listed=_LISTED) for timed in (True, False)]
    listed = [Candidate.of(found.kernel, found.schedule) for choice in choices for found in choice.candidates]
    own, rotation, times = listed[0], memory.rotation(problem), {}
    rotation.shorten(own.kernel, own.native())
    native_problem, native_device = problem.native(), device.native()

    def try_all(candidates):
        for candidate in candidates:
            parts = candidate.kernel, native_problem, candidate.native(), native_device
            if candidate not in times and _ffi.can_implement(*parts) is None:
                times[candidate] = statistics.median(rotation.time(candidate.kernel, candidate.native()))

    def best(count):
        return sorted(times, key=times.get)[:count]

    try_all(listed)
    if device.arch:  # hundreds of tiles load together; on a CPU few do
        try_all(dataclasses.replace(found, raster=raster, swizzle=swizzle) for found in best(_BEST) for raster, swizzle in ORDERS)
    try_all(dataclasses.replace(found, splits=splits) for found in best(_BEST) for splits in _neighbours(found))

    rounds = {candidate: [] for candidate in dict.fromkeys((own, *best(_FINALISTS)))}
    for _ in range(_ROUNDS):
        for candidate, medians in rounds.items():
            medians.append(statistics.median(rotation.time(candidate.kernel, candidate.native())))
    final = {candidate: statistics.median(medians) for candidate, medians in rounds.items()}
    fastest = min(final, key=final.get)
    is_beaten = final[own] > _MARGIN * final[fastest] and all(x > y for x, y in zip(rounds[own], rounds[fastest]))
    chosen = fastest if is_beaten else own
    return Tuned.now(chosen, final[chosen], final[own])


def _neighbours(candidate):
    """Numbers of splits around a candidate's."""
    if candidate.schedule != _ffi.ScheduleKind.split_k.name:
        return []
    n = candidate.splits
    return [splits for splits in (n // 2, n * 3 // 4, n - 2, n - 1, n + 1, n + 2, n * 4 // 3, n * 2) if splits >= 2]


class _Session:
    def __init__(self, store):
        self.store, self.plans, self._memories = store, [], {}

    def memory(self, device):
        if device not in self._memories:
            self._memories[device] = Memory(device)
        return self._memories[device]


_session = contextvars.ContextVar("jax_streamk_tuning", default=None)
_measuring = threading.Lock()  # what runs at once measures each other


@contextlib.contextmanager
def tuning(cache=None):
    """Tunes the products that programs are lowered with meanwhile: a context manager.

    Within it, lowering a product whose schedule is ``Auto()``, for a device of this process and without a tuned plan, measures
    candidates on that device at once, stores the fastest and uses it. Programs that were compiled before stay as they are. It holds
    for the thread, or the asyncio task, that enters it, and may be entered again inside.

    Args:
      cache: the folder that plans are taken from meanwhile, and stored in; None is the one in use, see ``use_tuned_plans``.

    Yields:
      A list, to which the ``Plan`` of each product that was tuned is added.

    Raises:
      OSError: on entry, where plans could not be stored.
    """
    session = _Session(tuned.store_of(cache))
    device = device_of(None)
    if device.kind:
        session.store.check_writable(device)
    with tuned.using(session.store):
        token = _session.set(session)
        try:
            yield session.plans
        finally:
            _session.reset(token)


def tuned_if_asked(plan):
    """The plan of ``Auto()`` itself, or where ``tuning()`` asks for one, the tuned one."""
    session, problem, device = _session.get(), plan.problem, plan.device
    if session is None or plan.kernel is None or tuned.lookup(problem, device) is not None or jax_device_of(device) is None:
        return plan
    with _measuring:
        if tuned.lookup(problem, device) is None:  # no other thread was first
            try:
                # Lowering has a trace, a mesh and settings in its context that arrays of ours are no part of; a thread has its own.
                with concurrent.futures.ThreadPoolExecutor(1) as thread:
                    found = thread.submit(lambda: measure(problem, session.memory(device))).result()
                session.store.add(device, problem, found)
            except (OSError, RuntimeError) as error:
                warnings.warn(f"jax_streamk could not tune {problem}, or not store it: {error}", stacklevel=2)
            made = planner.make_plan(problem, schedules.Auto(), device)
            session.plans.append(made)
            return made
    return planner.make_plan(problem, schedules.Auto(), device)


def digest(device):
    """Changes with what plans depend on besides the problem: the tuned ones in use, and those that compilation may yet find."""
    return tuned.digest(device) if _session.get() is None else time.time_ns()
