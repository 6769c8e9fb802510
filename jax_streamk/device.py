"""The devices that plans are made for: this machine's, and any other."""

import dataclasses
import functools
import os
import platform
import warnings
from typing import Any

import jax

from jax_streamk import _ffi, compat, nvml
from jax_streamk.checks import check_static, integer
from jax_streamk.machines import under_way


@dataclasses.dataclass(frozen=True)
class Device:
    """A device to plan for, on this machine or another.

    Attributes:
      platform: ``"cpu"`` or ``"cuda"``.
      arch: 10 * major + minor of the compute capability; 0 on a CPU.
      sms: number of streaming multiprocessors; of threads on a CPU.
      kind: the model's name as JAX reports it. It selects tuned plans (none without a name) and the machine file: an
        H200 has faster memory than an H100.

    ``jax_streamk.H100``, ``H200`` and ``A100`` are the SXM models; the A100 has 80 GB.

    Raises:
      TypeError: platform or kind is not a string, or arch or sms is traced.
      ValueError: platform is unknown, or arch or sms is not an integer or does not fit the platform.
    """

    platform: str
    arch: int
    sms: int
    kind: str = ""

    def __post_init__(self) -> None:
        for name in ("platform", "kind"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"Device: {name}={value!r}: must be a string")
        if self.platform not in ("cpu", "cuda"):
            raise ValueError(f"Device: platform={self.platform!r}: must be 'cpu', or 'cuda' for NVIDIA GPUs")
        object.__setattr__(self, "arch", integer("Device: arch", self.arch, least=0))
        object.__setattr__(self, "sms", integer("Device: sms", self.sms))
        if (self.platform == "cuda") != (self.arch > 0):
            raise ValueError(
                f"Device: arch={self.arch}: must be 0 on a CPU, and 10 * major + minor of a GPU's compute capability, "
                "such as 90"
            )

    def native(self) -> _ffi.Device:
        return _ffi.Device(self.arch, self.sms, under_way(self))


class _Other(Device):
    """A device of JAX's that no kernel runs on, such as a TPU."""

    def __post_init__(self) -> None:
        pass


OLDEST_ARCH = 80  # of the sm80 and skinny families, which run on every newer GPU, too

# The target of programs lowered for CUDA on a machine without a GPU: fits the H100 and H200 SXM, planned with the
# H200's constants.
HOPPER = Device("cuda", 90, 132)


def device_of(device: Any) -> Device:
    """The ``Device`` for a jax.Device, a ``Device``, a JAX platform's name, or None: JAX's default device.

    Raises:
      TypeError: ``device`` is none of these.
      ValueError: this process has no such platform.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        device = compat.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        try:
            device = jax.devices(device)[0]
        except RuntimeError as error:
            remedy = (
                "jax_streamk.Device(...) describes a device that this process lacks, as jax_streamk.H100, H200 and "
                "A100 do"
            )
            raise ValueError(f"device={device!r}: {error}: {remedy}") from None
    if not isinstance(device, jax.Device):
        check_static("device", device)
        raise TypeError(
            f"device={device!r}: must be None, a jax.Device, a platform such as 'cpu', or a jax_streamk.Device"
        )
    if device.platform == "gpu" and "." in device.compute_capability:  # ROCm reports names
        major, minor = device.compute_capability.split(".")
        return Device("cuda", 10 * int(major) + int(minor), device.core_count, device.device_kind)
    return _host() if device.platform == "cpu" else _Other(device.platform, 0, 1)


@functools.cache
def _host() -> Device:
    try:
        with open("/proc/cpuinfo") as file:
            kind = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        kind = platform.machine()
    # The size of XLA's thread pool: the CPUs that this process may run on.
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Device("cpu", 0, threads, kind)


def jax_device_of(device: Device) -> jax.Device | None:
    """This process's first jax.Device that matches a ``Device``; None if there is none."""
    try:
        devices = jax.local_devices(backend=device.platform)
    except RuntimeError:
        return None
    return next((x for x in devices if device_of(x) == device), None)


def device_for_lowering(platform: str) -> Device:
    """The ``Device`` to lower for: this machine's, or ``HOPPER`` for CUDA on a machine without a GPU."""
    if platform == "cpu":
        return _host()
    try:
        return device_of(jax.local_devices(backend="cuda")[0])
    except RuntimeError:
        return HOPPER


def too_old(device: Device) -> str | None:
    """Why no kernel of any build runs on a GPU; None if some do."""
    if device.platform != "cuda" or device.arch >= OLDEST_ARCH:
        return None
    return f"kernels need compute capability {OLDEST_ARCH / 10} or later, and this GPU has {device.arch / 10}"


def check_gpus() -> None:
    """Warns if JAX will use this machine's GPUs, and kernels of this build run on none of them.

    The driver is asked instead of JAX, whose settings are fixed as soon as it has devices.
    """
    if not compat.may_use_cuda() or os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return
    driver = nvml.driver()
    if driver is None or not driver.gpus:
        return
    if not _ffi.has_cuda:
        why = f"when it was built, {_ffi.without_cuda}"
    elif all(arch < OLDEST_ARCH for _, arch in driver.gpus):
        why = f"they need compute capability {OLDEST_ARCH / 10} or later, so Auto() leaves every product to XLA"
    elif driver.cuda_version // 1000 < _ffi.cuda_version // 1000:
        built, runs = (f"{x // 1000}.{x % 1000 // 10}" for x in (_ffi.cuda_version, driver.cuda_version))
        why = (
            f"they were built with CUDA {built}, and NVIDIA's driver runs CUDA {runs} at most: install a newer driver, "
            f"or build jax_streamk with CUDA {runs}"
        )
    else:
        return
    gpus = ", ".join(sorted({f"{name} (compute capability {arch / 10})" for name, arch in driver.gpus}))
    warnings.warn(f"this build of jax_streamk has no kernels that run on {gpus}: {why}")


# The SXM models, with the names that JAX reports.
H100 = Device("cuda", 90, 132, "NVIDIA H100 80GB HBM3")
H200 = Device("cuda", 90, 132, "NVIDIA H200")
A100 = Device("cuda", 80, 108, "NVIDIA A100-SXM4-80GB")

NAMED = {"h200": H200, "h100": H100, "a100": A100}  # on the command line


def device_named(name: str | None) -> Device:
    """The ``Device`` of a name in ``NAMED``, of a JAX platform, or, for None, JAX's default device."""
    return device_of(None) if name is None else NAMED.get(name) or device_of(name)
