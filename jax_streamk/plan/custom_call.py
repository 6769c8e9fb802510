"""The custom call that runs a plan: its name, its attributes, and what runs behind it."""

import warnings

import jax
import jax.export
import jaxlib
import numpy as np

from jax_streamk import _ffi
from jax_streamk.checks import version

_TARGETS = {"cpu": "jax_streamk_host_gemm", "cuda": "jax_streamk_cuda_gemm"}
CHAIN_TARGETS = {"cpu": "jax_streamk_host_chain", "cuda": "jax_streamk_cuda_chain"}
# jax.export refuses to serialize custom calls other than JAX's own unless told to.
EXPORT_CHECKS = tuple(map(jax.export.DisabledSafetyCheck.custom_call, (*_TARGETS.values(), *CHAIN_TARGETS.values())))


def target(plan):
    """The name of the call that runs a ``Plan``."""
    return _TARGETS[plan.device.platform]


def scope(plan):
    """What profiles call the schedule of a ``Plan``: ``"data_parallel"``, ``"split_k_4_ordered"``."""
    native = plan.native_schedule()
    kind = native.schedule
    if kind == _ffi.ScheduleKind.data_parallel:
        return kind.name
    splits = f"_{native.splits}" if kind == _ffi.ScheduleKind.split_k else ""
    return f"{kind.name}{splits}_{native.reduction.name}"


def attributes(plan):
    """What a ``Plan``'s call carries: the fields of problem, schedule, policy and device; kernel; workspace size."""
    natives = plan.problem.native(), plan.native_schedule(), plan.policy.native()
    fields = [(native, name, dtype) for native in natives for name, _, dtype, _ in native.fields]
    device = plan.device.native()
    fields += [(device, name, dtype) for name, _, dtype, default in device.fields if default is None]
    carried = {name: np.dtype(dtype).type(getattr(native, name)) for native, name, dtype in fields}
    return carried | dict(kernel=plan.kernel, workspace_bytes=np.int64(plan.workspace_bytes))


def _register_handlers():
    handlers = {"cpu": (_ffi.host_handler, _ffi.host_chain_handler)}
    if _ffi.has_cuda:
        handlers["cuda"] = _ffi.cuda_handler, _ffi.cuda_chain_handler
    for platform, of_platform in handlers.items():
        for targets, handler in zip((_TARGETS, CHAIN_TARGETS), of_platform):
            jax.ffi.register_ffi_target(targets[platform], handler(), platform={"cuda": "CUDA"}.get(platform, platform))


def _why_refused():
    """Why this jaxlib has no handlers of ours; None if it has."""
    try:
        _register_handlers()
    except Exception as error:  # its type is another one in each jaxlib
        reason = str(error).split("\n")[0]
        why = f"jaxlib {jaxlib.__version__} refuses the kernels of jax_streamk {version()}: {reason}"
        warnings.warn(
            f"{why}. All products are XLA's. Install a jax_streamk that was built for this jaxlib, or another jaxlib: "
            "pip install -U jax-streamk jaxlib"
        )
        return why


WHY_REFUSED = _why_refused()
