"""Stores the plans that tuning found, for ``Auto()`` to use: a file of JSON lines for each kind of device."""

import contextlib
import contextvars
import dataclasses
import datetime
import enum
import fcntl
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import threading
import warnings
import zlib

import jax
import jaxlib
import platformdirs

from jax_streamk import _ffi, text
from jax_streamk.checks import version
from jax_streamk.plan.launch_policy import LaunchPolicy
from jax_streamk.plan.problem import GemmProblem

MARGIN = 1.01  # a faster candidate must win by this factor: less is noise


@dataclasses.dataclass(frozen=True)
class Trial:
    """A kernel, a schedule and a launch policy. Schedule and reduction are names of ``_ffi``'s enumerators."""

    kernel: str
    schedule: str
    splits: int
    reduction: str
    policy: LaunchPolicy

    @classmethod
    def of(cls, kernel, native, policy):
        """A candidate from the kernel's name, an ``_ffi.Schedule`` and a ``LaunchPolicy``."""
        return cls(kernel, native.schedule.name, native.splits, native.reduction.name, policy)

    def native(self):
        """The ``_ffi.Schedule``."""
        return _ffi.Schedule(_ffi.ScheduleKind[self.schedule], self.splits, _ffi.Reduction[self.reduction])


@dataclasses.dataclass(frozen=True)
class Tuned(Trial):
    """The fastest candidate of a problem.

    Attributes:
      microseconds: its measured time.
      planned_microseconds: the measured time of the planner's own choice.
      xla_ratio: the time of XLA's product over its time, both in programs; 0 if that was not measured or is less exact.
      jaxlib: the version of jaxlib, and so of XLA.
      date: date and time of the measurement, ISO 8601.
    """

    microseconds: float
    planned_microseconds: float
    xla_ratio: float
    jaxlib: str
    date: str

    @classmethod
    def now(cls, candidate, microseconds, planned_microseconds):
        """A candidate measured now, and not yet compared with XLA's product."""
        times = dict(microseconds=microseconds, planned_microseconds=planned_microseconds, xla_ratio=0.0)
        return cls(**vars(candidate), **times, jaxlib=jaxlib.__version__, date=_now())

    @property
    def is_of_this_xla(self):
        """Whether it was compared with this version of XLA. If not, it should be tuned again."""
        return self.jaxlib == jaxlib.__version__

    @property
    def is_left_to_xla(self):
        return 0 < MARGIN * self.xla_ratio < 1 and self.is_of_this_xla


@dataclasses.dataclass(frozen=True)
class FragmentTimes:
    """What was measured of a fragment of a program, in microseconds: 0 if it was not.

    Attributes:
      winner: the name of the fastest one, or of what the rules choose unless that was clearly faster.
      xla: as the program has it.
      apart: with our product.
      fused: with our product and as much in its kernel as that can do.
      jaxlib, date: as of ``Tuned``.
    """

    winner: str
    xla: float
    apart: float
    fused: float
    jaxlib: str
    date: str

    @classmethod
    def now(cls, winner, times):
        """From times by name, measured now."""
        by_name = {name: times.get(name, 0.0) for name in VARIANTS}
        return cls(winner, **by_name, jaxlib=jaxlib.__version__, date=_now())

    @classmethod
    def assumed(cls, winner):
        """As if this one had been the fastest."""
        return cls(winner, 0.0, 0.0, 0.0, jaxlib.__version__, "")

    @property
    def is_of_this_xla(self):
        return self.jaxlib == jaxlib.__version__

    @property
    def why(self):
        names = dict(fused="fused", apart="ours without fusion", xla="XLA")
        shown = (f"{name} {text.duration(getattr(self, at))}" for at, name in names.items() if getattr(self, at))
        return f"measured with the equations around it: {', '.join(shown)}"


VARIANTS = ("xla", "apart", "fused")
AFTER_PRODUCT = " | "  # in the text of a fragment, which begins with that of its first product


def _now():
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


@functools.cache
def kernel_set(platform):
    """A hash of what a tuned plan is valid for: version, fields of plans and problems, this build's kernels."""
    kernels = (kernel for kernel in _ffi.kernels() if kernel.platform == platform)
    names = (f"{kernel.name} {kernel.promotion_k}" for kernel in kernels)
    fields = (
        field.name for type_ in (Tuned, FragmentTimes, LaunchPolicy, GemmProblem) for field in dataclasses.fields(type_)
    )
    return hashlib.sha256("\n".join((version(), *fields, *names)).encode()).hexdigest()[:16]


def _line(device, problem, tuned):
    extents = {
        name: value.name if isinstance(value, enum.Enum) else value for name, value in problem.attributes().items()
    }
    return _record(device, problem=extents, **dataclasses.asdict(tuned))


def _record(device, **fields):
    valid = dict(device=dataclasses.asdict(device), kernels=kernel_set(device.platform))
    return json.dumps(valid | fields).encode() + b"\n"


class _Stale(Exception):
    """Why a well-formed line is not used."""


def _parse(line, device):
    """A line's (problem, ``Tuned``), or (text of a fragment, ``FragmentTimes``).

    Raises ``_Stale``, or any exception if the line is corrupt.
    """
    record = json.loads(line)
    # Checked first: other versions may have other fields.
    if (record.pop("device"), record.pop("kernels")) != (dataclasses.asdict(device), kernel_set(device.platform)):
        raise _Stale("they are for another device, version or set of kernels")
    if "fragment" in record:
        return _parse_fragment(record)
    extents = record.pop("problem")
    tuned = Tuned(**{field.name: _of_type(field.type, record.pop(field.name)) for field in dataclasses.fields(Tuned)})
    problem = GemmProblem(**{f.name: _of_type(f.type, extents.pop(f.name)) for f in dataclasses.fields(GemmProblem)})
    datetime.datetime.fromisoformat(tuned.date)
    times = tuned.microseconds, tuned.planned_microseconds
    if record or extents or not all(0 < us < math.inf for us in times) or not 0 <= tuned.xla_ratio < math.inf:
        raise ValueError(line)
    native, policy = tuned.native(), tuned.policy.native()
    if tuned.reduction == _ffi.Reduction.atomic.name:
        raise _Stale("Auto() is deterministic")
    try:
        parts = problem.native(), native
        refusal = _ffi.may_serve(tuned.kernel, *parts, device.native())
        refusal = refusal or _ffi.check_policy(tuned.kernel, *parts, policy, device.native())
    except KeyError as unknown:
        refusal = unknown.args[0]
    if refusal is not None:
        raise _Stale(refusal)
    return problem, tuned


def _parse_fragment(record):
    key = _of_type(str, record.pop("fragment"))
    fields = dataclasses.fields(FragmentTimes)
    times = FragmentTimes(**{field.name: _of_type(field.type, record.pop(field.name)) for field in fields})
    datetime.datetime.fromisoformat(times.date)
    by_variant = {name: getattr(times, name) for name in VARIANTS}
    if record or not all(0 <= us < math.inf for us in by_variant.values()) or not by_variant.get(times.winner):
        raise ValueError(key)
    return key, times


def _of_type(type_, value):
    if issubclass(type_, enum.Enum):
        return type_[value]
    if dataclasses.is_dataclass(type_):
        types = {field.name: field.type for field in dataclasses.fields(type_)}
        fields = {name: _of_type(kind, value.pop(name)) for name, kind in types.items()}
        instance = type_(**fields)  # type: ignore[operator]
        if value:
            raise ValueError(value)
        return instance
    if type(value) is not type_:
        raise TypeError(value)
    return value


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a file holds for one device: plans by problem, fragments by text, and counts of lines.

    ``trouble``: why lines are ignored.
    """

    plans: dict
    lines: int = 0
    stale: int = 0
    corrupt: int = 0
    trouble: str = ""
    fragments: dict = dataclasses.field(default_factory=dict)


class Store:
    """A folder of tuned plans. Safe to use from several threads and processes; a file is read once."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self._lock = threading.Lock()
        self._plans = {}
        self._fragments = {}
        self._products = {}
        self._digests = {}

    def path(self, device):
        name = f"{device.kind}-{device.arch}-{device.sms}" if device.arch else f"{device.kind}-{device.sms}"
        return self.directory / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".jsonl")

    def read(self, device):
        """The ``Contents`` of the device's file as it is now; never raises."""
        plans: dict[GemmProblem, Tuned] = {}
        fragments: dict[str, FragmentTimes] = {}
        stale, corrupt, trouble = 0, 0, ""
        path = self.path(device)
        try:
            if not path.is_file():
                return Contents(plans, trouble="it is not a file" if path.exists() else "")
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH)  # wait until no line is half written
                lines = [line for line in file.read().split(b"\n") if line]
        except OSError as error:
            return Contents(plans, trouble=str(error))
        for line in lines:
            try:
                key, value = _parse(line, device)
                (fragments if isinstance(value, FragmentTimes) else plans)[key] = value
            except _Stale as why:
                stale, trouble = stale + 1, trouble or str(why)
            except Exception:  # anyone may have written anything
                corrupt, trouble = corrupt + 1, trouble or "they are corrupt"
        # Stale lines are no trouble if there are plans: old lines stay in the file when products are measured again.
        return Contents(plans, len(lines), stale, corrupt, "" if plans and not corrupt else trouble, fragments)

    def plans(self, device):
        """``Tuned`` by problem: the file as it was first read, and what this process added since."""
        if device not in self._plans:
            contents = None
            with self._lock:
                if device not in self._plans:
                    contents = self.read(device)
                    self._fragments[device] = contents.fragments
                    self._plans[device] = contents.plans
            if contents is not None:
                _warn_once(self.path(device), contents)
        return self._plans[device]

    def fragments(self, device):
        """``FragmentTimes`` by the text of the fragment, as ``plans``."""
        self.plans(device)
        return self._fragments[device]

    def products_of_fragments(self, device):
        """The texts of the first products of ``fragments``."""
        fragments = self.fragments(device)
        at = self._products.get(device)
        if at is None or at[0] is not fragments:
            products = frozenset(key.partition(AFTER_PRODUCT)[0] for key in fragments)
            self._products[device] = at = fragments, products
        return at[1]

    def digest(self, device):
        """A number that changes with the plans and with what fragments decide."""
        plans, fragments = self.plans(device), self.fragments(device)
        at = self._digests.get(device)
        if at is None or at[0] is not plans or at[1] is not fragments:
            self._digests[device] = at = plans, fragments, _digest(plans, fragments) if plans or fragments else 0
        return at[2]

    def check_writable(self, device):
        """Raises OSError, with the path, if plans cannot be stored."""
        with self._appending(device):
            pass

    def add(self, device, problem, tuned):
        """Stores a plan. Raises OSError if it cannot be written; this process uses it all the same."""
        self.plans(device)
        with self._lock:
            self._plans[device] = self._plans[device] | {problem: tuned}
        self._write(device, _line(device, problem, tuned))

    def add_fragment(self, device, key, times):
        """Stores what was measured of a fragment, by its text. Raises as ``add``."""
        self.plans(device)
        with self._lock:
            self._fragments[device] = self._fragments[device] | {key: times}
        self._write(device, _record(device, fragment=key, **dataclasses.asdict(times)))

    def _write(self, device, line):
        _changed()
        with self._appending(device) as file:
            end = file.seek(0, os.SEEK_END)
            if end:  # a writer that died may have left the last line without its newline
                file.seek(end - 1)
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)

    @contextlib.contextmanager
    def _appending(self, device):
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self.path(device), "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            yield file


_warned = threading.Event()


def _warn_once(path, contents):
    if not contents.trouble or _warned.is_set():
        return
    _warned.set()
    some = f"{contents.stale + contents.corrupt} of {contents.lines} tuned plans" if contents.lines else "tuned plans"
    warnings.warn(
        f"jax_streamk ignores {some} in {path}: {contents.trouble}. `python -m jax_streamk info` shows details, "
        "`python -m jax_streamk tune` measures again."
    )


_generations = itertools.count(1)
_generation = 0


def _changed():
    global _generation
    _generation = next(_generations)  # never the number that another thread sets


def generation():
    """A number that changes when this process stores a plan or takes plans from elsewhere; cheaper than ``digest``."""
    return _generation


_NOWHERE = os.path.join(os.devnull, "no folder for tuned plans")
_of_process = None
_of_context = contextvars.ContextVar("jax_streamk_store", default=None)


@functools.cache
def store_in(directory):
    """The ``Store`` in a folder, always the same one."""
    return Store(directory)


def store_of(cache=None):
    """The ``Store`` in a folder, or for None the one in use."""
    if cache is None:
        return _of_context.get() or _of_process or _users(jax.process_count() == 1)
    if not isinstance(cache, (str, os.PathLike)) or not os.fspath(cache):
        raise ValueError(f"cache={cache!r}: must be the path of a folder, or None")
    return store_in(os.path.abspath(cache))


@functools.cache
def _users(alone):
    """The user's store. It has no folder for a process without a home, and for several whose programs must agree."""
    try:
        return store_in(platformdirs.user_cache_dir("jax_streamk") if alone else _NOWHERE)
    except RuntimeError:
        return store_in(_NOWHERE)


def use_tuned_plans(cache: str | os.PathLike[str] | None = None) -> None:
    """Makes ``Auto()`` use the tuned plans in the folder ``cache``, in all threads of this process.

    None is the default, the user's folder: ``platformdirs.user_cache_dir("jax_streamk")``, which is
    ``~/.cache/jax_streamk`` or in XDG_CACHE_HOME, and need not exist. With an empty folder there are no tuned plans.
    Functions that ``jax.jit`` compiled before stay as they are; calls outside ``jit`` follow at once.

    With several processes (``jax.distributed``) no tuned plans are used, unless every process calls this with a folder
    that holds the same plans.

    Raises:
      ValueError: cache is not a path.
      FileNotFoundError, NotADirectoryError: the folder does not exist, or is not a folder.
    """
    global _of_process
    store = None if cache is None else store_of(cache)
    if store is not None and not store.directory.is_dir():
        error = NotADirectoryError if store.directory.exists() else FileNotFoundError
        how = (
            "`python -m jax_streamk tune ... --cache DIR` or `tuning(DIR)` fills one; an empty one means no tuned plans"
        )
        raise error(f"cache={cache!r}: {store.directory} is not a folder: {how}")
    _of_process = store
    _changed()


def _digest(plans, fragments):
    """A hash of what the plans run and of what fragments decide, without their times."""
    what = sorted(
        f"{problem} {x.is_left_to_xla} {x.kernel} {x.schedule} {x.splits} {x.reduction} {x.policy}"
        for problem, x in plans.items()
    )
    what += sorted(f"{key} {x.winner}" for key, x in fragments.items() if x.is_of_this_xla)
    return zlib.crc32(" ".join(what).encode())


@contextlib.contextmanager
def using(store):
    """The ``Store`` in use within this context."""
    token = _of_context.set(store)
    try:
        yield store
    finally:
        _of_context.reset(token)


def lookup(problem, device):
    """What tuning found for a problem on a device; None if it was not tuned."""
    plans = store_of().plans(device) if device.kind else None
    return plans.get(problem) if plans else None


def fragments(device):
    """What was measured of fragments on a device, by their text."""
    return store_of().fragments(device) if device.kind else {}


def products_of_fragments(device):
    """The texts of the first products of those fragments."""
    return store_of().products_of_fragments(device) if device.kind else frozenset()


def digest(device):
    """A number that changes with the tuned plans in use on a device."""
    return store_of().digest(device) if device.kind else 0
