"""``python -m jax_streamk info``: shows what a bug report needs: versions, devices, kernels and tuned plans.

examples:
  python -m jax_streamk info
      for people
  python -m jax_streamk info --json > report.json
      for programs
"""

import collections
import importlib.metadata
import json
import pathlib
import platform
import re
import sys

import jax

from jax_streamk import _ffi, checks
from jax_streamk.device import device_for_lowering, device_of, too_old
from jax_streamk.tuning import tuned

_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


def add_arguments(parser):
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--cache", metavar="DIR", help="where tuned plans are kept (the user's cache folder)")


def run(arguments):
    parts = {
        "versions": _versions,
        "devices": _devices,
        "kernels": _kernels,
        "tuned plans": lambda: _tuned_plans(arguments.cache),
    }
    report = {name: _attempt(part) for name, part in parts.items()}
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_lines(report)))


def _attempt(part, *arguments):
    try:
        return part(*arguments)
    except Exception as error:  # a report must show what is broken
        return f"failed: {type(error).__name__}: {error}"


def _lines(report, indent=""):
    for name, value in report.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name}: {value}"


def _versions():
    plugins = [
        name for name in map(_name, importlib.metadata.distributions()) if re.fullmatch(r"jax-cuda\d+-plugin", name)
    ]
    versions = {"jax-streamk": checks.version()}
    versions |= {
        name: _attempt(importlib.metadata.version, name) for name in ("jax", "jaxlib", *sorted(plugins), "numpy")
    }
    try:
        versions["flax"] = importlib.metadata.version("flax")
    except importlib.metadata.PackageNotFoundError:
        versions["flax"] = "not installed"
    major, minor = divmod(_ffi.cuda_version // 10, 100)
    return versions | {
        "CUDA compiled against": f"{major}.{minor}"
        if _ffi.cuda_version
        else f"none, no CUDA kernels: {_ffi.without_cuda}",
        "Python": sys.version,
        "system": platform.platform(),
    }


def _name(distribution):
    return (distribution.metadata["Name"] or "").lower()


def _devices():
    return {
        "default": _attempt(lambda: _describe(device_of(None))),
        "here": _attempt(lambda: ", ".join(map(str, jax.local_devices()))),
        "CPU": _attempt(lambda: _describe(device_for_lowering("cpu"))),
        "GPU": _attempt(_gpus),
        "NVIDIA driver": _attempt(driver),
    }


def _gpus():
    if jax.default_backend() != "gpu":
        return "none that JAX uses"
    counts = collections.Counter(map(device_of, jax.local_devices(backend="gpu")))
    return ", ".join(f"{count} x {_describe(device)}{_remark(device)}" for device, count in counts.items())


def _remark(device):
    if not _ffi.has_cuda:
        return " (this build has no CUDA kernels)"
    return f" ({why})" if (why := too_old(device)) else ""


def _describe(device):
    return f"{device.kind}, " + (f"sm_{device.arch}, {device.sms} SMs" if device.arch else f"{device.sms} threads")


def driver():
    """The version of NVIDIA's kernel driver."""
    if not _DRIVER.exists():
        return "none"
    first = _DRIVER.read_text().splitlines()[0]
    match = re.search(r"\d+\.\d+(\.\d+)?", first)
    return match[0] if match else first


def _kernels():
    kernels = _ffi.kernels()
    families: dict[str, collections.Counter[str]] = {}
    for kernel in kernels:
        types = f"{kernel.type_a.name} x {kernel.type_b.name} -> {kernel.type_d.name}"
        types += "" if kernel.math == _ffi.Math.native else f" ({kernel.math.name})"
        families.setdefault(kernel.family.name, collections.Counter())[types] += 1
    sets = {f"set for {name}": tuned.kernel_set(name) for name in ("cpu", "cuda")}
    return {"count": len(kernels), **families, **sets}


def _tuned_plans(cache):
    store = tuned.store_of(cache)
    devices = {device_for_lowering("cpu")}
    # JAX's default device may be what is broken.
    default = _attempt(device_of, None)
    if not isinstance(default, str) and default.kind:
        devices.add(default)
    state = {_describe(device): _attempt(_state, store, device) for device in sorted(devices, key=_describe)}
    others = _attempt(
        lambda: ", ".join(sorted({x.name for x in store.directory.glob("*")} - {store.path(d).name for d in devices}))
    )
    return {"folder": str(store.directory), **state, "other files": others or "none"}


def _state(store, device):
    contents, path = store.read(device), store.path(device)
    return {
        "file": str(path) + ("" if path.exists() else " (not there)"),
        "lines": contents.lines,
        "plans in use": len(contents.plans),
        "fragments in use": len(contents.fragments),
        "stale lines": contents.stale,
        "corrupt lines": contents.corrupt,
        "trouble": contents.trouble or "none",
    }
