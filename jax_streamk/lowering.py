"""What a product becomes in a program: a custom call on one device, or on several a product that XLA partitions."""

import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir

from jax_streamk import _ffi, compat, partition, planner, problem, schedules
from jax_streamk.epilogue import Epilogue
from jax_streamk.primitive import dot_general_p, linear_p

_HOST_TARGET, _CUDA_TARGET = "jax_streamk_host_gemm", "jax_streamk_cuda_gemm"
_REBUILD = "pip install . -C cmake.define.JAX_STREAMK_CUDA=ON"


def plan(lhs, rhs, *, dimension_numbers, precision, preferred_element_type, schedule, device, epilogue=Epilogue()):
    """The ``Plan`` of a product and, where a kernel runs it, its ``Arrangement``.

    Raises:
      ValueError: an explicit schedule that no kernel can run.
      RuntimeError: a GPU, and a build without kernels for it.
    """
    if device.platform == "cuda" and not _ffi.has_cuda:
        raise RuntimeError(f"this build of jax_streamk has no CUDA kernels and the program runs on a GPU: {_REBUILD}")
    schedule = schedules.of_forward(schedule)
    try:
        arrangement = problem.arrange(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, device.platform, epilogue
        )
    except problem.Unsupported as why:
        return _left_to_xla(why, schedule, device), None
    made = planner.make_plan(arrangement.problem, schedule, device)
    return made.with_reasons(arrangement.copies(lhs, rhs)), arrangement


def _left_to_xla(why, schedule, device):
    if not isinstance(schedule, schedules.Auto):
        raise ValueError(f"schedule={schedule} cannot run this product: {why}")
    return planner.Plan(None, device, None, None, reasons=(f"falls back to XLA: {why}",))


def _run(lhs, rhs, *others, platform, schedule, epilogue=Epilogue(), **params):
    """The product of one device, on a platform that has kernels."""
    device = problem.device_for_lowering(platform)
    del params["out_sharding"]
    made, arrangement = plan(lhs, rhs, schedule=schedule, device=device, epilogue=epilogue, **params)
    out = jax.eval_shape(functools.partial(lax.dot_general, **params), lhs, rhs)
    if made.is_empty:
        return epilogue.apply(jnp.zeros(out.shape, out.dtype), *others)
    if made.kernel is None:
        return epilogue.apply(compat.dot_general_p.bind(lhs, rhs, out_sharding=None, **params), *others)
    call = jax.ffi.ffi_call(
        _HOST_TARGET if platform == "cpu" else _CUDA_TARGET,
        (out, jax.ShapeDtypeStruct((made.workspace_bytes,), jnp.uint8)),
    )
    return call(*arrangement.prepare(lhs, rhs), *others, **_attributes(made))[0]


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


def _without_kernels(lhs, rhs, *others, why, schedule, epilogue=Epilogue(), **params):
    """XLA's product, where none of ours can be had."""
    if not isinstance(schedules.of_forward(schedule), schedules.Auto):
        raise ValueError(f"schedule={schedule} cannot run: {why}")
    return epilogue.apply(compat.dot_general_p.bind(lhs, rhs, **params), *others)


_NO_PLATFORM = "there are kernels for CPUs and for NVIDIA GPUs only"
_NO_PLACEMENT = "XLA alone divides products in a shard_map that leaves mesh axes to it, and in an export for several devices"


def _lower(ctx, *operands, platform, **params):
    placement = compat.placement(ctx)
    if placement == compat.Placement.UNKNOWN:
        return mlir.lower_fun(functools.partial(_without_kernels, why=_NO_PLACEMENT), multiple_results=False)(ctx, *operands, **params)
    avals = [compat.local_aval(aval) for aval in ctx.avals_in]
    if placement == compat.Placement.PARTITIONED:
        function = _partitioned(avals, **params | {"out_sharding": None})
    else:
        operands, avals, numbers = _without_transposes(operands, avals, params["dimension_numbers"])
        function = functools.partial(_run, platform=platform, **params | {"dimension_numbers": numbers})
    (out,) = mlir.lower_fun(function, multiple_results=False)(ctx.replace(avals_in=avals), *operands)
    return [compat.with_sharding_of(ctx, out, *ctx.avals_out)]


def _without_transposes(operands, avals, dimension_numbers):
    """The product of what ``operands`` are transposes of, where that is the same: kernels take any majorness, and copy nothing."""
    operands, avals = list(operands), list(avals)
    sides = [list(zip(*dimension_numbers))[i] for i in range(2)]
    for i in range(2):
        while (found := compat.transpose_behind(operands[i])) is not None:
            source, permutation = found
            free = [p for dim, p in enumerate(permutation) if dim not in (*sides[i][0], *sides[i][1])]
            if free != sorted(free):  # the result has them in the operand's order
                break
            operands[i] = source
            avals[i] = avals[i].update(shape=tuple(avals[i].shape[j] for j in np.argsort(permutation)))
            sides[i] = [tuple(permutation[dim] for dim in dims) for dims in sides[i]]
    return operands, avals, tuple(zip(*sides))


def _partitioned(avals, *, epilogue=Epilogue(), **params):
    product = functools.partial(dot_general_p.bind, **params)
    fused = product if epilogue.is_plain else functools.partial(linear_p.bind, epilogue=epilogue, **params)
    factors = partition.Factors(params["dimension_numbers"], avals[0].ndim, avals[1].ndim, epilogue)
    return partition.partitioned(product, epilogue.apply, fused, factors)


for _primitive in (dot_general_p, linear_p):
    compat.needs_devices(_primitive)
    mlir.register_lowering(
        _primitive, mlir.lower_fun(functools.partial(_without_kernels, why=_NO_PLATFORM), multiple_results=False)
    )
    for _platform in ("cpu", "cuda"):
        # Not cacheable: a cached rule does not see what its operands come from.
        mlir.register_lowering(
            _primitive, functools.partial(_lower, platform=_platform), platform=_platform, cacheable=False
        )


def _register_handlers():
    jax.ffi.register_ffi_target(_HOST_TARGET, _ffi.host_handler(), platform="cpu")
    if _ffi.has_cuda:
        jax.ffi.register_ffi_target(_CUDA_TARGET, _ffi.cuda_handler(), platform="CUDA")


_register_handlers()
