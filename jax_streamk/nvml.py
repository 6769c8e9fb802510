"""NVIDIA's driver and its GPUs, by a library of the driver that starts neither CUDA nor JAX's backends."""

import ctypes
import typing


class Driver(typing.NamedTuple):
    """The newest CUDA that the driver runs, as 1000 * major + 10 * minor, and its GPUs.

    ``gpus`` has (name, 10 * major + minor of the compute capability) of each.
    """

    cuda_version: int
    gpus: list[tuple[str, int]]


def driver():
    """The ``Driver``; None where there is none that answers."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        # Without attaching the GPUs, which would wake all those that sleep.
        _call(library.nvmlInitWithFlags, 2)
    except (OSError, AttributeError, RuntimeError):
        return None
    try:
        version, count = ctypes.c_int(), ctypes.c_uint()
        _call(library.nvmlSystemGetCudaDriverVersion_v2, ctypes.byref(version))
        _call(library.nvmlDeviceGetCount_v2, ctypes.byref(count))
        return Driver(version.value, [_describe(library, index) for index in range(count.value)])
    except (AttributeError, RuntimeError):  # a GPU may be lost, or another user's
        return None
    finally:
        library.nvmlShutdown()


def _describe(library, index):
    device, name, major, minor = ctypes.c_void_p(), ctypes.create_string_buffer(96), ctypes.c_int(), ctypes.c_int()
    _call(library.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(index), ctypes.byref(device))
    _call(library.nvmlDeviceGetName, device, name, ctypes.c_uint(len(name)))
    _call(library.nvmlDeviceGetCudaComputeCapability, device, ctypes.byref(major), ctypes.byref(minor))
    return name.value.decode(), 10 * major.value + minor.value


def _call(function, *arguments):
    if status := function(*arguments):
        raise RuntimeError(f"{function.__name__} returned {status}")
