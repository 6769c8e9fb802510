"""The primitive behind every product: what jit, lowering and export do with it."""

import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_streamk import _ffi, compat, planner, problem, schedules

# Parameters are those of lax.dot_general's primitive, and the schedule.
dot_general_p = Primitive("streamk_dot_general")
dot_general_p.def_impl(functools.partial(compat.apply_primitive, dot_general_p))

_HOST_TARGET, _CUDA_TARGET = "jax_streamk_host_gemm", "jax_streamk_cuda_gemm"
_REBUILD = "pip install . -C cmake.define.JAX_STREAMK_CUDA=ON"


def bind(lhs, rhs, *, dimension_numbers, precision, preferred_element_type, out_sharding=None, schedule=schedules.Auto()):
    """``lax.dot_general`` by our kernels. Operands are arrays; precision and preferred_element_type are canonical."""
    lhs, rhs = compat.match_varying(lhs, rhs)
    return dot_general_p.bind(
        lhs,
        rhs,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        schedule=schedule,
    )


@dot_general_p.def_effectful_abstract_eval
def _abstract_eval(lhs, rhs, *, schedule, **params):
    del schedule
    return compat.dot_general_p.abstract_eval(lhs, rhs, **params)


def plan(lhs, rhs, *, dimension_numbers, precision, preferred_element_type, schedule, device):
    """The ``Plan`` of a product and, where a kernel runs it, its ``Arrangement``.

    Raises:
      ValueError: an explicit schedule that no kernel can run.
      RuntimeError: a GPU, and a build without kernels for it.
    """
    if device.platform == "cuda" and not _ffi.has_cuda:
        raise RuntimeError(f"this build of jax_streamk has no CUDA kernels and the program runs on a GPU: {_REBUILD}")
    try:
        arrangement = problem.arrange(lhs, rhs, dimension_numbers, precision, preferred_element_type, device.platform)
    except problem.Unsupported as why:
        if not isinstance(schedule, schedules.Auto):
            raise ValueError(f"schedule={schedule} cannot run this product: {why}") from None
        return planner.Plan(None, device, None, None, reasons=(f"falls back to XLA: {why}",)), None
    return planner.make_plan(arrangement.problem, schedule, device), arrangement


def _run(lhs, rhs, *, platform, schedule, **params):
    """What the primitive lowers to on a platform that has kernels."""
    device = problem.device_for_lowering(platform)
    out_sharding = params.pop("out_sharding")
    made, arrangement = plan(lhs, rhs, schedule=schedule, device=device, **params)
    out = jax.eval_shape(functools.partial(lax.dot_general, **params), lhs, rhs)
    if made.is_empty:
        return jnp.zeros(out.shape, out.dtype)
    if made.kernel is None:
        return _xla(lhs, rhs, out_sharding, params)
    if arrangement.permute_lhs:
        lhs = lax.transpose(lhs, arrangement.permute_lhs)
    if arrangement.permute_rhs:
        rhs = lax.transpose(rhs, arrangement.permute_rhs)
    call = jax.ffi.ffi_call(
        _HOST_TARGET if platform == "cpu" else _CUDA_TARGET,
        (out, jax.ShapeDtypeStruct((made.workspace_bytes,), jnp.uint8)),
    )
    return call(lhs, rhs, **_attributes(made))[0]


def _xla(lhs, rhs, out_sharding, params):
    return compat.dot_general_p.bind(lhs, rhs, out_sharding=out_sharding, **params)


def _attributes(made):
    """The custom call's attributes: the members of GemmAttributes in ffi/gemm_call.h."""
    # Of the problem, enumerations are 32 bits wide and numbers 64; of the schedule all are 32.
    width = {bool: np.bool_, int: np.int64, float: np.float64}
    attributes = {
        name: (np.int32 if isinstance(value, enum.Enum) else width[type(value)])(value)
        for name, value in made.problem.attributes().items()
    }
    attributes |= {name: np.int32(value) for name, value in made.schedule_attributes().items()}
    return attributes | dict(
        kernel=made.kernel,
        arch=np.int32(made.device.arch),
        sms=np.int32(made.device.sms),
        workspace_bytes=np.int64(made.workspace_bytes),
    )


def _without_kernels(lhs, rhs, *, schedule, out_sharding, **params):
    """Other platforms run XLA's product."""
    if not isinstance(schedule, schedules.Auto):
        raise ValueError(f"schedule={schedule} cannot run: there are kernels for CPUs and for NVIDIA GPUs only")
    return _xla(lhs, rhs, out_sharding, params)


mlir.register_lowering(dot_general_p, mlir.lower_fun(_without_kernels, multiple_results=False))
for _platform in ("cpu", "cuda"):
    _lowering = mlir.lower_fun(functools.partial(_run, platform=_platform), multiple_results=False)
    mlir.register_lowering(dot_general_p, _lowering, platform=_platform)


def _register_handlers():
    jax.ffi.register_ffi_target(_HOST_TARGET, _ffi.host_handler(), platform="cpu")
    if _ffi.has_cuda:
        jax.ffi.register_ffi_target(_CUDA_TARGET, _ffi.cuda_handler(), platform="CUDA")


_register_handlers()
