"""Decides whether CUDA kernels are built, and with what: the one answer that CMake and the build backend share.

Run as a script it prints one CMake-readable line per fact: ``KEY=value``. An empty NVCC means no CUDA; WHY says why,
and LEVEL how loud CMake is to say it.
"""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

MINIMUM = (12, 8)
WHEELS = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"
DEFAULT_ARCHITECTURES = "80;90a"


def _candidates():
    """Yields paths where nvcc may be: PATH, CUDA_HOME, then NVIDIA's wheels."""
    yield shutil.which("nvcc")
    if "CUDA_HOME" in os.environ:
        yield os.path.join(os.environ["CUDA_HOME"], "bin", "nvcc")
    # jax[cuda13] brings some of the wheels, which compile nothing without the others.
    if all(wheel_files(name) for name in WHEELS.split()):
        yield from (str(file.locate()) for file in wheel_files("nvidia-cuda-nvcc") if file.name == "nvcc")


def wheel_files(name):
    """The files of an installed wheel; none when it is not installed.

    pip builds with an import path of its own and the interpreter of the environment that it installs into: the
    interpreter knows where that environment's wheels are.
    """
    places = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = next(iter(importlib.metadata.distributions(name=name, path=places)), None)
    return found.files or [] if found else []


def _version(nvcc):
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else None


def visible_architectures():
    """The compute capabilities of this machine's GPUs, from 8.0 on, as CMAKE_CUDA_ARCHITECTURES; empty without one."""
    try:
        text = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    found = {line.strip().replace(".", "") for line in text.splitlines() if re.fullmatch(r"\d+\.\d", line.strip())}
    found = {arch for arch in found if int(arch) >= 80}
    return ";".join(sorted("90a" if arch == "90" else arch for arch in found))


def decide(option, architectures):
    """Whether and how to build the CUDA kernels.

    Args:
      option: "ON", "OFF" or "AUTO".
      architectures: CMAKE_CUDA_ARCHITECTURES as the user gave it, or "".

    Returns:
      (nvcc, architectures, why): nvcc is "" when the CUDA kernels are not built, and why says so in one clause.
    """
    if option.upper() not in ("ON", "OFF", "AUTO"):
        raise SystemExit(f"JAX_STREAMK_CUDA={option}: must be ON, OFF or AUTO")
    if option.upper() == "OFF":
        return "", "", "JAX_STREAMK_CUDA was OFF"
    for arch in filter(None, architectures.split(";")):
        if not re.fullmatch(r"\d+[af]?", arch) or int(arch.rstrip("af")) < 80:
            raise SystemExit(f"CMAKE_CUDA_ARCHITECTURES={architectures}: must be numbers from 80 on, such as 80;90a")
    needed = f"a CUDA toolkit of at least {MINIMUM[0]}.{MINIMUM[1]} (nvcc on PATH, CUDA_HOME, or pip install {WHEELS})"
    found = [(nvcc, _version(nvcc)) for nvcc in _candidates() if nvcc and os.path.exists(nvcc)]
    usable = [nvcc for nvcc, version in found if version and version >= MINIMUM]
    if not usable:
        seen = f"; found {_listed(found)}" if found else ""
        if option.upper() == "ON":
            raise SystemExit(f"JAX_STREAMK_CUDA=ON needs {needed}{seen}")
        return "", "", f"there was no {needed[2:]}{seen}"
    if not architectures:
        architectures = visible_architectures()
        if not architectures and option.upper() == "AUTO":
            why = "no GPU of compute capability 8.0 or later was visible and no architectures were named"
            return "", "", f"{why}; found {_listed(found)}"
    return str(pathlib.Path(usable[0]).resolve()), architectures or DEFAULT_ARCHITECTURES, ""


def _listed(found):
    return ", ".join(f"{nvcc} {'.'.join(map(str, version or '?'))}" for nvcc, version in found)


def level(option, nvcc):
    """How to say that no kernels for GPUs are built: "WARNING" if a toolkit or a GPU is here, else "STATUS"."""
    if nvcc or option.upper() != "AUTO":
        return "STATUS"
    has_toolkit = any(candidate and os.path.exists(candidate) for candidate in _candidates())
    return "WARNING" if has_toolkit or visible_architectures() else "STATUS"


def cutlass_include():
    """CUTLASS's headers in the nvidia-cutlass wheel, or "" when it is not installed."""
    headers = (
        file for file in wheel_files("nvidia-cutlass") if file.as_posix().endswith("source/include/cutlass/cutlass.h")
    )
    header = next(headers, None)
    return str(pathlib.Path(header.locate()).resolve().parents[1]) if header else ""


if __name__ == "__main__":
    nvcc, architectures, why = decide(*sys.argv[1:3])
    facts = dict(
        NVCC=nvcc, ARCHITECTURES=architectures, WHY=why, LEVEL=level(sys.argv[1], nvcc), CUTLASS=cutlass_include()
    )
    print(*(f"{key}={value}" for key, value in facts.items()), sep="\n")
