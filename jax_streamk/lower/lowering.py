"""Lowers a product: to a custom call on one device, to a product that XLA partitions on several."""

import contextvars
import dataclasses
import functools
import itertools
import math
import warnings

import jax
import numpy as np
from jax.interpreters import mlir

from jax_streamk import _ffi, compat, schedules, text
from jax_streamk.device import Device, device_for_lowering
from jax_streamk.lower import custom_call, partition
from jax_streamk.machines import machine_of
from jax_streamk.plan import cost_model, planner, problem
from jax_streamk.product.epilogue import Epilogue
from jax_streamk.product.primitive import dot_general_p, fused_p, linear_apart, linear_p, xlas_product
from jax_streamk.tuning import tune, tuned

# Only skinny kernels take a nested batch. Up to here their tiles have all rows, and read B once.
_ROWS_OF_NESTED = 32
_WITHOUT_CUDA = f"when it was built, {_ffi.without_cuda}"


def plan(
    lhs,
    rhs,
    *,
    dimension_numbers,
    precision,
    preferred_element_type,
    schedule,
    device,
    epilogue=Epilogue(),
    permutation=None,
):
    """The ``Plan`` of a product and, if a kernel supports its types, its ``Arrangement``.

    For a gated product whose products run apart it is the plan of one of them, or of both if they are stacked.

    Raises:
      ValueError: no kernel can run an explicit schedule.
    """
    if epilogue.gate:
        params = dict(
            dimension_numbers=dimension_numbers, precision=precision, preferred_element_type=preferred_element_type
        )
        arrange = functools.partial(problem.arrange, lhs, rhs, **params, platform=device.platform, epilogue=epilogue)
        params |= dict(schedule=schedule, device=device, epilogue=epilogue.before_gate)
        return plan_gated(arrange, functools.partial(plan, lhs, rhs, **params), lhs, rhs, epilogue, schedule, device)
    schedule = schedules.of_forward(schedule)
    arrange = functools.partial(
        problem.arrange, lhs, rhs, dimension_numbers, precision, preferred_element_type, device.platform, epilogue,
        permutation,
    )  # fmt: skip
    try:
        arrangement = arrange()
    except problem.Unsupported as why:
        refuse_schedule(schedule, " this product", why)
        return planner.unsupported(lhs, rhs, device, why), None
    made = planner.make_plan(arrangement.problem, schedule, device)
    if device.platform == "cuda" and arrangement.transposes:
        nested = arrange(nests=True)
        if nested.problem.inner_batch > 1 and nested.problem.m <= _ROWS_OF_NESTED:
            try:
                instead = planner.make_plan(nested.problem, schedule, device)
            except ValueError:  # of an explicit schedule
                instead = made
            copied = (
                made.microseconds + _copying(arrangement, lhs, rhs, device) if made.kernel is not None else math.inf
            )
            if instead is not made and instead.kernel is not None and instead.microseconds <= copied:
                return instead.with_notes(nested.copies(lhs, rhs)), nested
    return made if made.kernel is None else made.with_notes(arrangement.copies(lhs, rhs)), arrangement


def _copying(arrangement, lhs, rhs, device):
    """The expected time of the transposes around a product, in microseconds."""
    p = arrangement.problem
    copied = (
        (arrangement.permute_lhs, lhs.size * lhs.dtype.itemsize),
        (arrangement.permute_rhs, rhs.size * rhs.dtype.itemsize),
        (arrangement.permute_result, p.batch * p.m * p.n * cost_model.SIZES[p.type_d]),
    )
    return sum(cost_model.moving(2 * size, device) for permutation, size in copied if permutation is not None)


def plan_or_none(planned, *operands, out_sharding=None, **params):
    """What ``planned``, a ``plan``, makes of a product in a jaxpr; None if no kernel can run an explicit schedule."""
    del out_sharding
    try:
        return planned(*operands, **params)[0]
    except ValueError:
        return None


def plan_gated(arrange, plan_apart, lhs, rhs, epilogue, schedule, device):
    """``plan`` of a gated product: of one kernel for both products, or of what runs if that is faster.

    ``arrange`` makes its arrangement, and ``plan_apart`` plans one of its products.
    """
    made, why = None, ""
    try:
        arrangement = arrange()
        if copies := arrangement.copies(lhs, rhs):
            raise problem.Unsupported(copies[0])
        made = planner.make_plan(arrangement.problem, schedules.of_forward(schedule), device)
        if made.is_empty:
            return made, arrangement
        if made.kernel is None:
            why = made.why_xla
    except (problem.Unsupported, ValueError) as error:
        why = str(error)
    apart, of_apart = plan_apart()
    products = 2 if epilogue.is_pair else 1
    if made is not None and made.kernel is not None:
        more = _gating(arrangement, products, device) if device.platform == "cuda" else 0
        alone = None if apart.microseconds is None else products * apart.microseconds + more
        if alone is None or made.microseconds <= alone or tuned.lookup(arrangement.problem, device) is not None:
            return made, arrangement
        why = f"{made.kernel} is slower, {text.duration(made.microseconds)} instead of {text.duration(alone)}"
    of_each = "this product twice, each time with other weights" if epilogue.is_pair else "this product"
    gate = "gate" if epilogue.activation is None else f"{epilogue.activation}(gate)"
    return apart.with_notes([f"a gated product is {of_each}, and then {gate} * up by XLA: {why}"]), of_apart


def _gating(arrangement, products, device):
    """The expected time, in microseconds, of multiplying the two products by XLA, and of all launches but the first.

    Each launch costs as much as it takes to start a kernel; what L2 holds of the products is read in that time.
    """
    p, machine = arrangement.problem, machine_of(device)
    rows = p.m if p.is_ragged else p.batch * p.m
    moved = 3 * rows * p.n * cost_model.SIZES[p.type_d]
    held = 0 if machine.topology is None else machine.topology.l2_bytes
    return machine.launch_us * products + max(0, moved - held) / machine.dram_bytes_per_us


@dataclasses.dataclass(frozen=True)
class _Look:
    """Functions are lowered only to see the plans of their products, for a device that need not be here."""

    device: Device
    plans: list[planner.Plan]


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


def only_looked_at(made):
    """Notes the plan of a product if ``plans_of`` asks for it; anything may be lowered then."""
    look = _look.get()
    if look is not None:
        look.plans.append(made)
    return look is not None


def lower_as_one(made, function, ctx, *operands):
    """Lowers a function in the place of one product; its plan becomes that of the function's first, and says why."""
    look = _look.get()
    before = 0 if look is None else len(look.plans)
    out = mlir.lower_fun(function, multiple_results=False)(ctx, *operands)
    if look is not None:
        first, why = look.plans[before], made.reasons[-1:]
        look.plans[before:] = [first.with_notes([reason for reason in why if reason not in first.reasons])]
    return out


def target(platform):
    """The ``Device`` to plan for."""
    look = _look.get()
    return device_for_lowering(platform) if look is None else look.device


def placement(ctx):
    """``compat.placement``; a product that XLA partitions is looked at as on one device."""
    found = compat.placement(ctx)
    is_one = _look.get() is not None and found == compat.Placement.PARTITIONED
    return compat.Placement.ONE_DEVICE if is_one else found


def tuned_if_asked(made, schedule):
    """The plan for a schedule; of ``Auto()`` inside ``tuning()`` the tuned one."""
    is_asked = isinstance(schedule, schedules.Auto) and _look.get() is None
    return tune.tuned_if_asked(made) if is_asked else made


def check_build(platform):
    """Raises RuntimeError if this build has only descriptions of a platform's kernels, which suffice for plans."""
    if platform == "cuda" and not _ffi.has_cuda and _look.get() is None:
        raise RuntimeError(
            f"this build of jax_streamk has no CUDA kernels, and the product is for a GPU: {_WITHOUT_CUDA}"
        )


def refuse_schedule(schedule, what, why):
    if not isinstance(schedules.of_forward(schedule), schedules.Auto):
        raise ValueError(f"schedule={schedule} cannot run{what}: {why}; Auto() leaves the product to XLA")


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
    is_auto = isinstance(schedules.of_forward(schedule), schedules.Auto)
    return is_auto and platform == "cuda" and not _ffi.has_cuda and len(ctx.module_context.platforms) > 1


def _lower_with_kernels(ctx, *operands, platform, **params):
    if (why := why_not_here(ctx, platform, params["schedule"])) is not None:
        return _lower_to_xla(ctx, *operands, why=why, **params)
    # Tracing inside a rule does not need shardings.
    local = ctx.replace(avals_in=[compat.local_aval(aval) for aval in ctx.avals_in])
    params["out_sharding"] = None
    if placement(ctx) == compat.Placement.PARTITIONED:
        later = params | dict(schedule=tune.later(params["schedule"]))
        out = lower_partitioned(local, _partitioned(local.avals_in, **later), operands, platform, params)
    else:
        (out,) = _lower_on_one_device(local, *operands, platform=platform, **params)
    return [compat.with_sharding_of(ctx, out, *ctx.avals_out)]


def lower_partitioned(ctx, function, operands, platform, params):
    """Lowers what ``partition.partitioned`` made of a product with these parameters."""
    (out,) = mlir.lower_fun(function, multiple_results=False)(compat.with_mesh(ctx), *operands)
    device = device_for_lowering(platform)
    kernels = f"kernels {tuned.kernel_set(platform)} and tuned plans {tune.digest(device)}"
    compat.tell_apart(out, f"{sorted(params.items())} for {device} with {kernels}")
    return out


def _lower_on_one_device(ctx, lhs, rhs, *others, platform, schedule, out_sharding, epilogue=Epilogue(), **params):
    check_build(platform)
    device = target(platform)
    if epilogue.gate:
        return _lower_gated(ctx, lhs, rhs, *others, device=device, schedule=schedule, epilogue=epilogue, **params)
    (lhs, rhs), avals, params["dimension_numbers"] = without_transposes(
        (lhs, rhs), ctx.avals_in[:2], params["dimension_numbers"]
    )

    def planned(schedule):
        made, arrangement = plan(*avals, schedule=schedule, device=device, epilogue=epilogue, **params)
        return tuned_if_asked(made, schedule), arrangement

    made, arrangement = tune.in_its_context(schedules.of_forward(schedule), planned)
    if only_looked_at(made) or made.kernel is None:
        ctx = ctx.replace(avals_in=[*avals, *ctx.avals_in[2:]])
        return _by_xla(ctx, lhs, rhs, *others, out_sharding=out_sharding, epilogue=epilogue, **params)
    lhs, rhs = prepared(arrangement, lhs, rhs, *avals)
    ctx = ctx.replace(avals_in=[*arrangement.prepared(*avals), *ctx.avals_in[2:]])
    out = call(ctx, made, arrangement.stored(compat.local_aval(*ctx.avals_out)), lhs, rhs, *others)
    if arrangement.permute_result is None:
        return [out]
    return [compat.lowered_transpose(out, arrangement.permute_result)]


def _attributes(made):
    return {name: mlir.ir_attribute(value) for name, value in custom_call.attributes(made).items()}


def prepared(arrangement, lhs, rhs, *avals):
    """The operands as the kernel expects them. Operation by operation: tracing a function takes ten times as long."""
    operands = []
    permutations = arrangement.permute_lhs, arrangement.permute_rhs
    for x, aval, permutation in zip((lhs, rhs), avals, permutations):
        x = x if permutation is None else compat.lowered_transpose(x, permutation)
        operands.append(x if aval.dtype == arrangement.dtype else compat.lowered_convert(x, arrangement.dtype))
    return operands[::-1] if arrangement.swapped else operands


def _lower_gated(ctx, lhs, rhs, *others, device, schedule, epilogue, **params):
    second, *more = map(list, epilogue.split(others))
    multiplied, avals, params["dimension_numbers"] = without_transposes_of_gated(
        (lhs, rhs, *second), ctx.avals_in[:2], params["dimension_numbers"]
    )
    operands = [*multiplied, *itertools.chain(*more)]
    ctx = ctx.replace(avals_in=[*avals, *avals[1:] * len(second), *ctx.avals_in[2 + len(second) :]])

    def planned(schedule):
        made, _ = plan(*avals, schedule=schedule, device=device, epilogue=epilogue, **params)
        is_one = made.kernel is not None and made.problem.gated
        return tuned_if_asked(made, schedule) if is_one else made

    made = tune.in_its_context(schedules.of_forward(schedule), planned)
    apart = functools.partial(linear_apart, schedule=schedule, out_sharding=None, epilogue=epilogue, **params)
    if made.kernel is None or not made.problem.gated:
        return lower_as_one(made, apart, ctx, *operands)
    if only_looked_at(made):
        return _by_xla(ctx, *operands, out_sharding=None, epilogue=epilogue, **params)
    return [call(ctx, made, compat.local_aval(*ctx.avals_out), *operands)]


def call(ctx, made, stored, *operands):
    """The custom call of a ``Plan``, whose D has the type ``stored``; its first result."""
    workspace = stored.update(shape=(made.workspace_bytes,), dtype=np.dtype(np.uint8))
    key = custom_call.target(made), made.problem, made.kernel, made.schedule, made.policy, made.device
    attributes = compat.once_per_module(ctx, key, functools.partial(_attributes, made))
    call = jax.ffi.ffi_lowering(custom_call.target(made), backend_config=attributes)
    with compat.named(ctx, custom_call.scope(made)):
        return call(ctx.replace(avals_out=[stored, workspace]), *operands)[0]


_by_xla = mlir.lower_fun(xlas_product, multiple_results=False)


def leave_to_xla(schedule, why):
    """Notes for ``plans_of`` that a product is XLA's. Raises ValueError if its schedule is explicit."""
    refuse_schedule(schedule, "", why)
    look = _look.get()
    if look is not None:
        look.plans.append(planner.Plan(None, look.device, None, None, why_xla=why))


def _lower_to_xla(ctx, *operands, why, schedule, **params):
    leave_to_xla(schedule, why)
    return _by_xla(ctx, *operands, **params)


def _partitioned(avals, *, epilogue=Epilogue(), permutation=None, **params):
    product = functools.partial(dot_general_p.bind, permutation=permutation, **params)
    fused = product if epilogue.is_plain else functools.partial(linear_p.bind, epilogue=epilogue, **params)
    factors = partition.Factors(params["dimension_numbers"], avals[0].ndim, avals[1].ndim, epilogue, permutation)
    return partition.partitioned(product, epilogue.apply, fused, factors)


def without_transposes(operands, avals, dimension_numbers, behind=compat.transpose_behind):
    """Folds transposes of the operands into the product: kernels read either majorness without a copy.

    ``behind`` finds (operand, permutation) of the transpose that makes a value, None if none does.
    """
    operands, avals = list(operands), list(avals)
    sides = [list(side) for side in zip(*dimension_numbers)]
    for i in range(2):
        while (found := behind(operands[i])) is not None:
            source, permutation = found
            free = [p for dim, p in enumerate(permutation) if dim not in (*sides[i][0], *sides[i][1])]
            if free != sorted(free):  # the result keeps the operand's order
                break
            operands[i] = source
            avals[i] = avals[i].update(shape=tuple(avals[i].shape[j] for j in np.argsort(permutation)))
            sides[i] = [tuple(permutation[dim] for dim in dims) for dims in sides[i]]
    return operands, avals, tuple(zip(*sides))


def without_transposes_of_gated(operands, avals, dimension_numbers, behind=compat.transpose_behind):
    """``without_transposes`` of lhs and of each matrix: only if all of them have one layout then."""
    lhs, *matrices = operands
    found = [without_transposes((lhs, x), avals, dimension_numbers, behind) for x in matrices]
    ((lhs, _), *layout), *_ = found
    if any(x[1:] != tuple(layout) for x in found):
        return operands, avals, dimension_numbers
    return [lhs, *(rhs for (_, rhs), *_ in found)], *layout


for _primitive in (dot_general_p, linear_p):
    compat.needs_devices(_primitive)
    # A cached rule would not see the transposes that produce its operands.
    mlir.register_lowering(_primitive, _lower, cacheable=False)


def _lower_fused(ctx, *operands, call_jaxpr, written):
    """As one kernel, or as the program was written where XLA may divide another operand unlike the product."""
    given, first = getattr(call_jaxpr, "jaxpr", call_jaxpr).invars, call_jaxpr.eqns[0]
    is_divided_alike = (
        placement(ctx) == compat.Placement.ONE_DEVICE
        or compat.is_sharded_by_type(ctx)
        or (first.invars == given[:2] and not first.params.get("epilogue", Epilogue()).gate)
    )
    return compat.lowered_inline(ctx, *operands, call_jaxpr=call_jaxpr if is_divided_alike else written)


mlir.register_lowering(fused_p, _lower_fused, cacheable=False)
