"""The custom call that runs a plan: its name, its attributes, and what runs behind it."""

import enum

import jax
import jax.export
import numpy as np

from jax_streamk import _ffi
from jax_streamk.machines import under_way

_TARGETS = {"cpu": "jax_streamk_host_gemm", "cuda": "jax_streamk_cuda_gemm"}
# jax.export serializes custom calls other than JAX's own only where it is told to.
EXPORT_CHECKS = tuple(map(jax.export.DisabledSafetyCheck.custom_call, _TARGETS.values()))


def target(made):
    """The name of the call that runs a ``Plan``."""
    return _TARGETS[made.device.platform]


def attributes(made):
    """The members of GemmAttributes in ffi/gemm_call.h for a ``Plan`` with a kernel."""
    # Of the problem, enumerations are 32 bits wide and numbers 64; of the schedule all are 32.
    width = {bool: np.bool_, int: np.int64, float: np.float64}
    members = {
        name: (np.int32 if isinstance(value, enum.Enum) else width[type(value)])(value)
        for name, value in made.problem.attributes().items()
    }
    members |= {name: np.int32(value) for name, value in made.schedule_attributes().items()}
    return members | dict(
        kernel=made.kernel,
        arch=np.int32(made.device.arch),
        sms=np.int32(made.device.sms),
        under_way=np.int64(under_way(made.device)),
        workspace_bytes=np.int64(made.workspace_bytes),
    )


def _register_handlers():
    jax.ffi.register_ffi_target(_TARGETS["cpu"], _ffi.host_handler(), platform="cpu")
    if _ffi.has_cuda:
        jax.ffi.register_ffi_target(_TARGETS["cuda"], _ffi.cuda_handler(), platform="CUDA")


_register_handlers()
