"""What each GPU can do: the constants of the cost model, a JSON file for each kind that was measured.

``python -m jax_streamk fit`` writes such a file. What the constants mean is in cutlass_kernels/planner/machine.h,
and in ``_ffi.GPU_CONSTANTS``, ``_ffi.POLICY_CONSTANTS`` and ``_ffi.HOST_CONSTANTS``.
"""

import dataclasses
import functools
import importlib.resources
import json
import pathlib
import warnings

import platformdirs

from jax_streamk import _ffi

# Up to which values of a product XLA computes it: those of ``plan.left_to_xla``'s rules, for GPUs and CPUs. And up to
# how many rows ``accelerate`` makes chains of products: none below 1.
GPU_LIMITS = (
    "few_k", "xla_earlier_us", "small_tf32", "small_batched", "odd_rows", "unaligned_k_of_tiles", "unaligned_k",
    "float8_along_k", "chain_rows",
)  # fmt: skip
HOST_LIMITS = ("small", "small_batched")

_PLAIN = "generic.json"  # of no GPU in particular: what other machines are derived from, and fits begin with
_HOST = "cpu.json"


@dataclasses.dataclass(frozen=True)
class Topology:
    """What a GPU consists of: SMs, GPCs, bytes of its L2."""

    sms: int
    gpcs: int
    l2_bytes: int

    @property
    def gpc_sms(self):
        """SMs of most GPCs. They come in pairs; some GPCs lack a pair."""
        return 2 * round(self.sms / self.gpcs / 2)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A kind of GPU, or CPUs, and its constants.

    Attributes:
      name: of the file; "generic" where it was derived.
      kinds: the names by which JAX reports such devices.
      arch: 10 * major + minor of the compute capability; 0 for CPUs.
      topology: None for CPUs.
      constants: (name, value) pairs of ``_ffi.GPU_CONSTANTS`` or ``_ffi.HOST_CONSTANTS``; each is an attribute, too.
      launch_policy: the same of ``_ffi.POLICY_CONSTANTS``; empty for CPUs.
      limits: the same of ``GPU_LIMITS`` or ``HOST_LIMITS``.
      types: (operand type, time of its multiplications, packing and results by that of float32) pairs, for CPUs.
      date: of the measurement; empty where it was derived.
      command: that measured it.
    """

    name: str
    kinds: tuple[str, ...]
    arch: int
    topology: Topology | None
    constants: tuple[tuple[str, float], ...]
    launch_policy: tuple[tuple[str, float], ...] = ()
    limits: tuple[tuple[str, float], ...] = ()
    types: tuple[tuple[str, float], ...] = ()
    date: str = ""
    command: str = ""

    def __getattr__(self, name):
        if "constants" in self.__dict__ and name in self._values:
            return self._values[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @functools.cached_property
    def _values(self):
        return dict((*self.constants, *self.launch_policy, *self.limits))

    @functools.cached_property
    def native(self):
        native = _ffi.Machine()
        for name, value in (*self.constants, *self.launch_policy):
            setattr(native, name, value)
        if self.topology:
            native.l2_bytes, native.gpc_sms = self.topology.l2_bytes, self.topology.gpc_sms
        return native

    def native_for(self, type_):
        """``native``, of products of operands of an ``_ffi.Type``."""
        name = "bf16_by_avx512" if type_ == _ffi.Type.bf16 and _has_avx512_bf16() else type_.name
        factor = dict(self.types).get(name, 1)
        return self.native if factor == 1 else _scaled(self, factor).native

    @property
    def is_measured(self):
        return bool(self.date)

    def replace(self, **constants):
        """The same with other values of some ``constants``."""
        unknown = constants.keys() - dict(self.constants).keys()
        if unknown:
            raise ValueError(f"{self.name} has no constant {min(unknown)!r}")
        return dataclasses.replace(self, constants=tuple((dict(self.constants) | constants).items()))

    def text(self):
        """The JSON that ``parse`` reads, of a GPU; constants with four digits."""
        names = (field.name for field in dataclasses.fields(self) if field.name not in ("name", "types"))
        fields = {name: getattr(self, name) for name in names}
        fields["topology"] = self.topology and dataclasses.asdict(self.topology)
        fields["constants"] = {name: float(f"{value:.4g}") for name, value in self.constants}
        fields["launch_policy"], fields["limits"] = dict(self.launch_policy), dict(self.limits)
        return json.dumps(fields, indent=2) + "\n"


def parse(name, text):
    """The ``Machine`` of a JSON file.

    Raises:
      ValueError: it is none, or lacks a constant or has another, or one is not positive.
    """
    try:
        fields = json.loads(text)
        is_gpu = bool(fields["topology"])
        constants = _section(fields["constants"], _ffi.GPU_CONSTANTS if is_gpu else _ffi.HOST_CONSTANTS)
        policy = _section(fields["launch_policy"], _ffi.POLICY_CONSTANTS if is_gpu else ())
        limits = _section(fields["limits"], GPU_LIMITS if is_gpu else HOST_LIMITS)
        types = () if is_gpu else tuple(fields["types"].items())
        topology = Topology(*(fields["topology"][of.name] for of in dataclasses.fields(Topology))) if is_gpu else None
        rest = types, fields["date"], fields["command"]
        return Machine(name, tuple(fields["kinds"]), fields["arch"], topology, constants, policy, limits, *rest)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"machine file {name}: {type(error).__name__}: {error}") from None
    except ValueError as error:
        raise ValueError(f"machine file {name}: {error}") from None


@functools.cache
def _has_avx512_bf16():
    try:
        return "avx512_bf16" in pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@functools.cache
def _scaled(machine, factor):
    """CPUs whose work on elements takes another time: what a call and a piece take does not depend on it."""
    of_call = ("host_wake_us", "host_piece_us")
    return machine.replace(**{name: factor * value for name, value in machine.constants if name not in of_call})


def _section(constants, known):
    """(name, value) pairs of a section of the file."""
    if differing := sorted(constants.keys() ^ set(known)):
        raise ValueError(f"its constants differ from those of this version in {', '.join(differing)}")
    pairs = tuple((name, float(constants[name])) for name in known)
    if wrong := [name for name, value in pairs if not value > 0]:
        raise ValueError(f"{wrong[0]} is not positive")
    return pairs


def user_directory():
    """Where ``fit`` stores machines, and plans look for them before those that are shipped."""
    return pathlib.Path(platformdirs.user_data_dir("jax_streamk")) / "machines"


@functools.cache
def _shipped(file):
    text = importlib.resources.files("jax_streamk").joinpath("machines", file).read_text()
    return parse(file.removesuffix(".json"), text)


@functools.cache
def measured():
    """Every ``Machine`` of a GPU that was measured: the user's, then those that are shipped."""
    users = []
    for path in sorted(user_directory().glob("*.json")):
        try:
            users.append(parse(path.stem, path.read_text()))
        except (OSError, ValueError) as error:  # of another version, for one
            remedy = "`python -m jax_streamk fit` makes it anew"
            warnings.warn(f"jax_streamk leaves out {path}: {error}; {remedy}", stacklevel=2)
    return (*users, *map(_shipped, ("h200.json", "h100.json")))


def is_measured(device):
    """Whether there is a file for this very kind of GPU, with as many SMs."""
    return _measured_for(device) is not None


def _measured_for(device):
    # A Hopper GPU of no name is taken for an H200: programs are lowered for one where no GPU is.
    kind = device.kind or "NVIDIA H200"
    for machine in measured():
        if (machine.arch, machine.topology.sms) == (device.arch, device.sms) and kind in machine.kinds:
            return machine
    return None


@functools.lru_cache(maxsize=256)
def machine_of(device):
    """The ``Machine`` of a ``Device``: measured, or else derived from its compute capability and number of SMs."""
    if device.platform == "cpu":
        return _shipped(_HOST)
    return _measured_for(device) or derived(device)


# Ratios of other compute capabilities than 9.0 to a Hopper SXM with as many SMs, from datasheets. Estimates: loads
# without TMA and from an older L2 are at a fifth and a third of the rate, and launches take half again as long.
_OLDER = dict(
    launch_us=1.5, dram_bytes_per_us=0.45, gpc_bytes_per_us=0.33, load_bytes_per_us_sm=0.2, thread_bytes_per_us_sm=0.75,
    wgmma_flops_per_us_sm=0.6, few_rows_flops_per_us_sm=0.6, mma_f64_flops_per_us_sm=0.4,
)  # fmt: skip


def derived(device):
    """The ``Machine`` of a GPU that nobody measured: round figures of a Hopper SXM, scaled.

    Rates of the whole GPU (those that do not end in ``_sm``), its L2 and the bytes under way go with the number of SMs;
    ``_OLDER`` scales those of other compute capabilities than 9.0.
    """
    plain = _shipped(_PLAIN)
    share = device.sms / plain.topology.sms
    ratios = {} if device.arch == plain.arch else _OLDER

    def scaled(name, value):
        of_gpu = name.endswith("_per_us") or name == "under_way_bytes"
        return value * ratios.get(name, 1) * (share if of_gpu else 1)

    constants, policy = (
        tuple((name, scaled(name, value)) for name, value in pairs) for pairs in (plain.constants, plain.launch_policy)
    )
    gpcs, l2_bytes = max(round(plain.topology.gpcs * share), 1), int(plain.topology.l2_bytes * share)
    topology = Topology(device.sms, gpcs, l2_bytes)
    return dataclasses.replace(plain, arch=device.arch, topology=topology, constants=constants, launch_policy=policy)


def under_way(device):
    """The ``under_way_bytes`` of a device with sm90 kernels, which hold stages back for it; 0 of others."""
    return int(machine_of(device).under_way_bytes) if device.arch == 90 else 0
