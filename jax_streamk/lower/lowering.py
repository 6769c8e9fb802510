"""Lowers products: to a custom call on one device, to a product that XLA partitions on several."""

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from jax_streamk import _ffi, compat, schedules
from jax_streamk.device import Device, device_for_lowering
from jax_streamk.plan import alternatives, custom_call
from jax_streamk.plan.plan import Plan
from jax_streamk.product import partition
from jax_streamk.product.fused import fused_p
from jax_streamk.product.primitive import product_p
from jax_streamk.tuning import tune, tuned

_WITHOUT_CUDA = f"when it was built, {_ffi.without_cuda}"


@dataclasses.dataclass(frozen=True)
class _Look:
    """Functions are lowered only to see the plans of their products, for a device that need not be here."""

    device: Device
    plans: list[Plan]


_look: contextvars.ContextVar[_Look | None] = contextvars.ContextVar("jax_streamk_look", default=None)


def plans_of(function, *args, device):
    """The ``Plan`` of each product of ours in a function of arrays, or of their shapes, as jit lowers it for a device.

    What jit lowers once has one: the body of a loop, and a jitted function that is called several times.
    """
    new = functools.wraps(function, updated=())(lambda *args: function(*args))  # jit keeps what it lowered
    traced = jax.jit(new).trace(*args)
    look = _Look(device, [])
    token = _look.set(look)
    try:
        traced.lower(lowering_platforms=(device.platform,))
    finally:
        _look.reset(token)
    return look.plans


def check_build(platform):
    """Raises RuntimeError if this build has only descriptions of a platform's kernels, which suffice for plans."""
    if platform == "cuda" and not _ffi.has_cuda and _look.get() is None:
        raise RuntimeError(
            f"this build of jax_streamk has no CUDA kernels, and the product is for a GPU: {_WITHOUT_CUDA}"
        )


def _lower(ctx, *operands, **params):
    rules = {platform: functools.partial(_lower_with_kernels, platform=platform) for platform in ("cpu", "cuda")}
    rest = functools.partial(_lower_to_xla, why="there are kernels for CPUs and for NVIDIA GPUs only")
    return compat.lower_per_platform(ctx, rules, rest, *operands, **params)


def why_not_here(ctx, platform, schedule):
    """Why a product is XLA's where it is lowered; None if it may be ours, on one device or partitioned by our rule."""
    if _is_of_another_build(ctx, platform, schedule):
        warnings.warn(
            "the products of this program for several platforms are XLA's on GPUs, since this build of jax_streamk has "
            f"no CUDA kernels: {_WITHOUT_CUDA}",
            stacklevel=2,
        )
        return "this build has no CUDA kernels"
    where = compat.placement(ctx)
    if where == compat.Placement.UNKNOWN:
        return f"only XLA partitions products in {compat.where_unknown(ctx)}"
    if where == compat.Placement.PARTITIONED and not compat.config.jax_use_shardy_partitioner:
        return "only XLA partitions products where jax_use_shardy_partitioner is off"
    if compat.is_unreduced(ctx.avals_out[0]):
        return "only XLA supports an out_sharding with unreduced axes, which leaves the sum over devices open"
    return None


def _is_of_another_build(ctx, platform, schedule):
    """Whether only another build has kernels for a platform that is one of those of a program, as jax.export has it."""
    may_be_xlas = schedules.may_be_xlas(schedule)
    return may_be_xlas and platform == "cuda" and not _ffi.has_cuda and len(ctx.module_context.platforms) > 1


def _lower_with_kernels(ctx, *operands, platform, product, schedule, out_sharding):
    if (why := why_not_here(ctx, platform, schedule)) is not None:
        return _lower_to_xla(ctx, *operands, why=why, product=product, schedule=schedule, out_sharding=out_sharding)
    check_build(platform)
    result = ctx.avals_out[0]
    # Tracing inside a rule does not need shardings.
    ctx = ctx.replace(avals_in=[compat.local_aval(aval) for aval in ctx.avals_in])
    rule = _lower_partitioned if _placement(ctx) == compat.Placement.PARTITIONED else _lower_on_one_device
    (out,) = rule(ctx, *operands, platform=platform, product=product, schedule=schedule)
    return [compat.with_sharding_of(ctx, out, result)]


def _placement(ctx):
    """``compat.placement``; a product that XLA partitions is looked at as on one device."""
    placement = compat.placement(ctx)
    is_one = _look.get() is not None and placement == compat.Placement.PARTITIONED
    return compat.Placement.ONE_DEVICE if is_one else placement


def is_on_one_device(ctx):
    """Whether a program's values are on one device each, and not only looked at."""
    return _look.get() is None and _placement(ctx) == compat.Placement.ONE_DEVICE


def _lower_partitioned(ctx, *operands, platform, product, schedule):
    function = product.partitioned(ctx.avals_in, tune.later(schedule))
    if function is None:  # its simpler products are partitioned
        return _lower_function(functools.partial(product.instead, schedule=schedule), ctx, *operands)
    (out,) = _lower_function(function, compat.with_mesh(ctx), *operands)
    device = device_for_lowering(platform)
    kernels = f"kernels {tuned.kernel_set(platform)} and tuned plans {tune.digest(device)}"
    compat.tell_apart(out, f"{product} {schedule} for {device} with {kernels}")
    return [out]


def _lower_function(function, ctx, *operands):
    return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


def _lower_on_one_device(ctx, *operands, platform, product, schedule):
    look = _look.get()
    device = device_for_lowering(platform) if look is None else look.device
    product, operands, avals = product.without_transposes(operands, ctx.avals_in, compat.transpose_behind)
    ctx = ctx.replace(avals_in=avals)

    def planned(schedule):
        way = alternatives.plan(product, product.by_role(avals), schedule, device)
        may_tune = isinstance(schedule, schedules.Auto) and look is None and way.instead is None and product.is_one
        return dataclasses.replace(way, plan=tune.tuned_if_asked(way.plan)) if may_tune else way

    way = tune.in_its_context(schedules.of_forward(schedule), planned)
    if way.instead is not None:
        return _lower_instead(way, schedule, ctx, *operands)
    if look is not None:
        look.plans.append(way.plan)
    if look is not None or way.plan.kernel is None:
        return _by_xla(ctx, *operands, product=product)
    return [_lower_to_kernel(way, ctx, operands, product)]


def _lower_instead(way, schedule, ctx, *operands):
    """Simpler products in the place of one; its plan becomes that of the first, and says why."""
    look = _look.get()
    before = 0 if look is None else len(look.plans)
    out = _lower_function(functools.partial(way.instead, schedule=schedule), ctx, *operands)
    if look is not None:
        first, why = look.plans[before], way.plan.reasons[-1:]
        look.plans[before:] = [first.with_notes([reason for reason in why if reason not in first.reasons])]
    return out


def _lower_to_kernel(way, ctx, operands, product):
    changes, avals = changes_of(way, product, ctx.avals_in)
    operands = [x if change is None else change(ctx, x) for change, x in zip(changes, operands)]
    if way.arrangement.swapped:
        operands[:2], avals[:2] = operands[1::-1], avals[1::-1]
    stored = way.arrangement.stored(compat.local_aval(*ctx.avals_out))
    out = _call(ctx.replace(avals_in=avals), way.plan, stored, *operands)
    order = way.arrangement.permute_result
    return out if order is None else compat.lowered_transpose(out, order)


def changes_of(way, product, avals):
    """For each operand a function of a context and the lowered operand, to what the kernel reads; and types of those.

    None: the kernel reads it as it is.
    """
    arrangement, (lhs, rhs, *others) = way.arrangement, avals
    changes: list[Any] = []
    for order, aval, dtype in zip((arrangement.permute_lhs, arrangement.permute_rhs), (lhs, rhs), arrangement.dtypes):
        is_same = order is None and aval.dtype == dtype
        changes.append(None if is_same else functools.partial(_prepared, order, aval.dtype, dtype))
    functions = product.as_read(product.by_role(avals))
    types = arrangement.prepared(lhs, rhs)
    types = [*(types[::-1] if arrangement.swapped else types), *others]
    for at, (role, aval) in enumerate(zip(product.roles[2:], others), 2):
        changes.append(None)
        if role in functions:
            changes[at] = functools.partial(_as_read, functions[role], aval)
            types[at] = aval.update(dtype=np.dtype(np.int32))
        elif (order := arrangement.permute_others.get(role)) is not None:
            changes[at] = functools.partial(_prepared, order, aval.dtype, aval.dtype)
            types[at] = aval.update(shape=tuple(aval.shape[dim] for dim in order))
    return changes, types


def _prepared(order, given, wanted, ctx, x):
    """A matrix as the kernel expects it. Operation by operation: tracing a function takes ten times as long."""
    del ctx
    x = x if order is None else compat.lowered_transpose(x, order)
    return x if given == wanted else compat.lowered_convert(x, wanted)


def _as_read(function, aval, ctx, x):
    return _lower_function(function, ctx.replace(avals_in=[aval]), x)[0]


def _call(ctx, plan, stored, *operands):
    """The custom call of a ``Plan``, whose D has the type ``stored``; its first result."""
    workspace = stored.update(shape=(plan.workspace_bytes,), dtype=np.dtype(np.uint8))
    key = custom_call.target(plan), plan.problem, plan.kernel, plan.schedule, plan.policy, plan.device
    attributes = compat.once_per_module(ctx, key, functools.partial(_attributes, plan))
    call = jax.ffi.ffi_lowering(custom_call.target(plan), backend_config=attributes)
    with compat.named(ctx, custom_call.scope(plan)):
        return call(ctx.replace(avals_out=[stored, workspace]), *operands)[0]


def _attributes(plan):
    return {name: mlir.ir_attribute(value) for name, value in custom_call.attributes(plan).items()}


def _lower_to_xla(ctx, *operands, why, product, schedule, out_sharding):
    """Raises ValueError if the schedule is explicit or batch invariant."""
    alternatives.refuse_schedule(schedule, "", why)
    look = _look.get()
    if look is not None:
        look.plans.append(Plan(None, look.device, None, None, why_xla=why))
    if product.is_placed_by_xla:
        return _by_xla(ctx, *operands, product=product, out_sharding=out_sharding)
    result = ctx.avals_out[0]
    ctx = ctx.replace(avals_in=[compat.local_aval(aval) for aval in ctx.avals_in])
    (out,) = _by_xla(ctx, *operands, product=product)
    return [compat.with_sharding_of(ctx, out, result)]


def _by_xla(ctx, *operands, product, out_sharding=None):
    with contextlib.nullcontext() if product.is_placed_by_xla else partition.without_explicit_mesh():
        return _lower_function(functools.partial(product.by_xla, out_sharding=out_sharding), ctx, *operands)


def _lower_fused(ctx, *operands, call_jaxpr, written):
    """Lowers to one kernel, or to the program as written where XLA may divide another operand unlike the product."""
    given, first = getattr(call_jaxpr, "jaxpr", call_jaxpr).invars, call_jaxpr.eqns[0]
    is_divided_alike = (
        _placement(ctx) == compat.Placement.ONE_DEVICE
        or compat.is_sharded_by_type(ctx)
        or (first.invars == given[:2] and not first.params["product"].epilogue.gate)
    )
    return compat.lowered_inline(ctx, *operands, call_jaxpr=call_jaxpr if is_divided_alike else written)


compat.needs_devices(product_p)
# A cached rule would not see the transposes that produce its operands.
mlir.register_lowering(product_p, _lower, cacheable=False)
mlir.register_lowering(fused_p, _lower_fused, cacheable=False)
