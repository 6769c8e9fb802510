"""Ragged products: a primitive with its rules and lowering. Groups whose sizes are data cut a dimension into runs.

Operands: lhs, rhs, group_sizes, then the epilogue's. Parameters: ``numbers``, lax's RaggedDotDimensionNumbers of a
product in one of two forms, dimensions in any order: groups of lhs rows, (M, k) x (G, k, n) -> (M, n); or of what is
contracted, (M, m) x (M, n) -> (G, m, n). With ``leading``, group_sizes has one size more in front, of rows in no group.
A size below 0 counts as 0, and groups end with the last row. With ``gathers``, which only the first form has, (M,)
indices are the last operand: row i of the product is of lhs[indices[i]], where ``gathers`` is JAX's mode of gathers for
indices out of bounds, "clip" or "promise_in_bounds". ``out_sharding`` is the result's explicit sharding, or None.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from jax_streamk import compat, schedules, text
from jax_streamk.lower import lowering, partition
from jax_streamk.plan import cost_model, planner, problem
from jax_streamk.product.epilogue import ACTIVATIONS, Epilogue, wide
from jax_streamk.tuning import tune, tuned

ragged_p: Primitive = Primitive("streamk_ragged_dot_general")
ragged_p.def_impl(functools.partial(compat.apply_primitive, ragged_p))
compat.check_nan(ragged_p)


def numbers_of(lhs_contract, rhs_contract, lhs_ragged, rhs_group=()):
    """The ``lax.RaggedDotDimensionNumbers`` of a product with one contracted dimension and no batch."""
    return lax.RaggedDotDimensionNumbers((((lhs_contract,), (rhs_contract,)), ((), ())), (lhs_ragged,), rhs_group)


BASIC = numbers_of(1, 1, 0, (0,))


def why_not(lhs, rhs, group_sizes, numbers):
    """Why the primitive has no such product; None if it has."""
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    if len(batch) > 0 or len(group_sizes.shape) != 1:
        return "no kernel multiplies batches of groups"
    if len(contract) != 1 or len(lhs.shape) != 2 or len(rhs.shape) != 2 + len(numbers.rhs_group_dimensions):
        return "kernels for groups contract one dimension, and lhs and rhs have one free dimension each"
    return None


def bind(
    lhs, rhs, group_sizes, *others, numbers, precision, preferred_element_type, schedule, epilogue=Epilogue(),
    leading=False, gathers=None, out_sharding=None,
):  # fmt: skip
    """The product and its epilogue, which only groups of rows have. The other arguments are canonical."""
    operands = lhs, rhs, group_sizes, *others
    if gathers and compat.explicit_mesh(*map(jax.typeof, operands)) is not None:
        operands, gathers = _gathered(gathers, *operands), None
    return ragged_p.bind(
        *compat.match_varying(*operands), numbers=numbers, precision=precision,
        preferred_element_type=preferred_element_type, schedule=schedule, epilogue=epilogue, leading=leading,
        gathers=gathers, out_sharding=explicit(out_sharding),
    )  # fmt: skip


def explicit(sharding):
    """A canonical sharding; None if its mesh has no explicit axes, so that it says nothing."""
    return sharding if sharding is not None and compat.is_explicit(sharding.mesh) else None


def _gathered(mode, lhs, *others):
    """The operands of the same product without ``gathers``, which was ``mode``."""
    *rest, indices = others
    if mode == "clip":
        rows = limit_of(lhs.shape[0])
        indices = jnp.clip(_from_the_front(indices, rows), 0, rows - 1)
    of_lhs, of_indices = jax.typeof(lhs), jax.typeof(indices)
    spec = None
    if compat.explicit_mesh(of_lhs, of_indices) is not None:
        spec = jax.P(of_indices.sharding.spec[0], of_lhs.sharding.spec[1])
    return jnp.asarray(lhs).at[indices].get(mode="promise_in_bounds", out_sharding=spec), *rest


def params_of(eqn, schedule):
    """The parameters of the primitive for an equation of JAX's."""
    params = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    params |= dict(numbers=numbers, schedule=schedule, epilogue=Epilogue(), leading=False, gathers=None)
    return params | dict(out_sharding=eqn.params.get("out_sharding"))


def _groups_rows(numbers):
    """Whether groups are of rows of lhs and of the result."""
    return len(numbers.rhs_group_dimensions) > 0


@ragged_p.def_effectful_abstract_eval
def _abstract_eval(
    lhs, rhs, group_sizes, *others, numbers, schedule, epilogue, leading, gathers, out_sharding, **params
):
    del schedule, epilogue
    if gathers:
        lhs = rows_of(lhs, others[-1])
    sizes = group_sizes.update(shape=(group_sizes.shape[0] - leading,))
    typed = functools.partial(
        compat.ragged_dot_general_p.abstract_eval,
        ragged_dot_dimension_numbers=numbers,
        **compat.ragged_params(),
        **params,
    )
    mesh, operands = compat.explicit_mesh(lhs, rhs, sizes), (lhs, rhs, sizes)
    with partition.without_explicit_mesh():
        out, effects = typed(*(operands if mesh is None else map(compat.local_aval, operands)))
    if out_sharding is not None:
        out = compat.varying_over(out.update(sharding=out_sharding), compat.varying(lhs))
        if compat.is_unreduced(out):
            remedy = "leave its unreduced axes out"
            raise NotImplementedError(
                f"ragged_dot: out_sharding={out_sharding.spec} leaves sums over devices open: {remedy}"
            )
        return out, effects
    if mesh is None:
        return out, effects
    # lax infers no sharding. Over axes of what is contracted, and of groups of rows, devices add up.
    factors = partition.RaggedFactors(numbers, Epilogue(), leading)
    axes = {
        name: spec
        for names, aval in zip(factors.operands, (lhs, rhs))
        for name, spec in zip(names, aval.sharding.spec)
        if spec is not None
    }
    out = compat.divided(out, mesh, [axes.get(name) for name in factors.result])
    return compat.varying_over(out, compat.varying(lhs)), effects


def rows_of(lhs, indices):
    """The type of the rows that indices gather."""
    return lhs.update(shape=(*indices.shape, lhs.shape[1]))


def limit_of(extent):
    """The largest size that means anything, which may be symbolic."""
    return min(extent, np.iinfo(np.int32).max) if isinstance(extent, int) else extent


def _runs(group_sizes, extent, leading):
    """Where the groups begin and end."""
    ends = partition.ends_of_groups(as_int32(group_sizes), limit_of(extent))
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends])[leading:]


def xlas_product(
    lhs, rhs, group_sizes, *others, numbers, precision, preferred_element_type, epilogue=Epilogue(), leading=False,
    gathers=None,
):  # fmt: skip
    """What the primitive computes, by ``lax.ragged_dot_general``."""
    if gathers:
        lhs, rhs, group_sizes, *others = _gathered(gathers, lhs, rhs, group_sizes, *others)
    dtype = preferred_element_type
    side = numbers.lhs_ragged_dimensions[0]
    runs = _runs(group_sizes, lhs.shape[side], leading)
    starts = {0: side} if _groups_rows(numbers) else {0: side, 1: numbers.dot_dimension_numbers[0][1][0]}
    params = dict(
        ragged_dot_dimension_numbers=numbers,
        precision=precision,
        preferred_element_type=dtype if epilogue.is_plain else wide(dtype),
    )
    if not _groups_rows(numbers) and lhs.shape[1 - side] == 1:
        return _sums_of_groups(lhs.reshape(-1), rhs, runs, starts[1], precision, dtype)
    # lax has its groups begin with the first row.
    lhs, *rest = (jnp.roll(x, -runs[0], starts[i]) if leading and i in starts else x for i, x in enumerate((lhs, rhs)))
    sizes = jnp.diff(runs)
    second, biases, _ = epilogue.split(others)
    products = [lax.ragged_dot_general(lhs, x, sizes, **params) for x in (*rest, *second)]
    if leading and _groups_rows(numbers):
        products = [jnp.roll(x, runs[0], 0) for x in products]
    if epilogue.is_plain:
        return products[0]
    rows = products[0].shape[0]
    group = _group_of_rows(runs, rows)
    biases = [x.at[group].get(mode="fill", fill_value=0) for x in biases]
    with_biases = [x + bias.astype(x.dtype) for x, bias in zip(products, biases)] if biases else products
    gate, *up = with_biases
    out = functools.reduce(lax.mul, up, ACTIVATIONS[epilogue.activation](gate))
    return jnp.where((group < runs.shape[0] - 1)[:, None], out, 0).astype(dtype)


def _sums_of_groups(weights, x, runs, contract, precision, dtype):
    """Weighted sums, as a product with a row for each group: lax would copy ``x`` for each group."""
    at = jnp.arange(weights.shape[0], dtype=jnp.int32)
    inside = (runs[:-1, None] <= at) & (at < runs[1:, None])
    params = dict(precision=precision, preferred_element_type=dtype)
    out = lax.dot_general(jnp.where(inside, weights, 0), x, (((1,), (contract,)), ((), ())), **params)
    return jnp.expand_dims(out, 1)


def _group_of_rows(runs, rows):
    """The group of each row; the number of groups for rows in none."""
    at, groups = jnp.arange(rows, dtype=jnp.int32), runs.shape[0] - 1
    group = jnp.searchsorted(runs[1:], at, side="right").astype(jnp.int32)
    return jnp.where(at < runs[0], groups, group)


def _apart(lhs, rhs, group_sizes, *others, epilogue, **params):
    """Products and epilogue one after the other."""
    second, biases, _ = epilogue.split(others)
    products = [bind(lhs, x, group_sizes, **params) for x in (rhs, *second)]
    return _finished(products, group_sizes, biases, epilogue, **params)


def _finished(products, group_sizes, biases, epilogue, **params):
    """The epilogue of products that are rounded."""
    dtype = products[0].dtype
    sums = [x.astype(wide(dtype)) for x in products]
    for i, bias in enumerate(biases):
        spread = _spread(bias, sums[i], group_sizes, **params).astype(sums[i].dtype)
        sums[i] += compat.placed_like(spread, jax.typeof(sums[i]))
    gate, *up = sums
    if epilogue.activation is not None:
        gate = _activated(epilogue.activation, gate, group_sizes, params["leading"])
    return functools.reduce(lax.mul, up, gate).astype(dtype)


def _activated(activation, x, group_sizes, leading):
    """The activation of rows in groups; the others are 0, and stay so."""
    if activation == "sigmoid":  # alone is not 0 at 0
        runs = _runs(group_sizes, x.shape[0], leading)
        is_inside = (_group_of_rows(runs, x.shape[0]) < runs.shape[0] - 1)[:, None]
        is_inside = compat.placed_like(jnp.broadcast_to(is_inside, x.shape), jax.typeof(x))
        return jnp.where(is_inside, jax.nn.sigmoid(x), 0)
    return ACTIVATIONS[activation](x)


def _spread(bias, like, group_sizes, *, leading, **_):
    """Each row's bias. A product of ones: its derivative sums over groups, in a fixed order."""
    ones = jnp.ones((like.shape[0], 1), bias.dtype)
    params = dict(precision=(lax.Precision.HIGHEST,) * 2, preferred_element_type=bias.dtype, schedule=schedules.Auto())
    return bind(ones, bias[:, None], group_sizes, numbers=BASIC, leading=leading, **params)


def _jvp(primals, tangents, *, epilogue, gathers, **params):
    lhs, rhs, group_sizes = primals[:3]
    integers = (2, len(primals) - 1) if gathers else (2,)
    moves = [type(x) is not ad.Zero and i not in integers for i, x in enumerate(tangents)]
    if gathers or not epilogue.is_plain:
        # The activation's derivative needs the value before it, and that of rhs the rows.
        function = bind if epilogue.is_plain else functools.partial(_apart, epilogue=epilogue)
        free = [x for x, moved in zip(primals, moves) if moved]
        velocities = [x for x, moved in zip(tangents, moves) if moved]

        def of_free(*given):
            taken = iter(given)
            operands = [next(taken) if moved else x for x, moved in zip(primals, moves)]
            return function(*(_gathered(gathers, *operands) if gathers else operands), **params)

        return jax.jvp(of_free, free, velocities)
    out = bind(lhs, rhs, group_sizes, **params)
    terms = []
    if moves[0]:
        terms.append(bind(tangents[0], rhs, group_sizes, **params))
    if moves[1]:
        terms.append(bind(lhs, tangents[1], group_sizes, **params))
    return out, functools.reduce(lax.add, terms) if terms else compat.no_tangent(out)


ad.primitive_jvps[ragged_p] = _jvp


def _transpose(cotangent, lhs, rhs, group_sizes, *others, numbers, schedule, epilogue, gathers, out_sharding, **params):
    """The cotangents of lhs and rhs: each a product of the same groups, with the other operand as it lies."""
    if not epilogue.is_plain:
        raise NotImplementedError("ragged_dot: a product with an epilogue is transposed only if differentiated")
    if gathers:
        operands = [lhs, rhs, group_sizes, *others]
        at = next(i for i, x in enumerate(operands) if ad.is_undefined_primal(x))

        def of_one(x):
            given = _gathered(gathers, *operands[:at], x, *operands[at + 1 :])
            return bind(*given, numbers=numbers, schedule=schedule, out_sharding=out_sharding, **params)

        (out,) = jax.linear_transpose(of_one, operands[at].aval)(cotangent)
        return [out if i == at else None for i in range(len(operands))]
    side = numbers.lhs_ragged_dimensions[0]
    ((contract,), (rhs_contract,)), _ = numbers.dot_dimension_numbers

    def product(operand, x, y, numbers, order):
        """A product whose dimensions are those of an operand in this order."""
        aval = (lhs, rhs)[operand].aval
        out = bind(
            x, y, group_sizes, numbers=numbers, schedule=schedules.of_cotangent(schedule, operand),
            out_sharding=compat.cotangent_sharding(aval, order), **params,
        )  # fmt: skip
        if list(order) != sorted(order):
            out = lax.transpose(out, np.argsort(order))
        return out if out.dtype == aval.dtype else compat.convert_cotangent(out, aval)

    of_lhs = of_rhs = None
    if _groups_rows(numbers):
        (group,) = numbers.rhs_group_dimensions
        free = 3 - group - rhs_contract
        if ad.is_undefined_primal(lhs):
            of_lhs = product(0, cotangent, rhs, numbers_of(1, free, 0, (group,)), (side, contract))
        elif free < rhs_contract:
            of_rhs = product(1, cotangent, lhs, numbers_of(0, side, 0), (group, free, rhs_contract))
        else:
            of_rhs = product(1, lhs, cotangent, numbers_of(side, 0, side), (group, rhs_contract, free))
    elif ad.is_undefined_primal(lhs):
        of_lhs = product(0, rhs, cotangent, numbers_of(1 - rhs_contract, 2, rhs_contract, (0,)), (side, 1 - side))
    else:
        order = rhs_contract, 1 - rhs_contract
        of_rhs = product(1, lhs, cotangent, numbers_of(1 - side, 1, side, (0,)), order)
    return [of_lhs, of_rhs, None]


ad.primitive_transposes[ragged_p] = _transpose


def _batch(axis_data, operands, dims, **params):
    """One product after another: each has groups of its own, and may have as many rows as a kernel wants."""
    if all(dim is None for dim in dims):
        return bind(*operands, **params), None
    mapped = [jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims) if dim is not None]

    def of_one(given):
        taken = iter(given)
        return bind(*(x if dim is None else next(taken) for x, dim in zip(operands, dims)), **params)

    return lax.map(of_one, mapped), 0


compat.def_batching(ragged_p, _batch)


def _question(lhs, rhs, group_sizes, *others, numbers, precision, preferred_element_type, gathers, out_sharding, **_):
    """What ``jax.checkpoint`` asks its policies about our products: the same as about JAX's."""
    if gathers:
        lhs = rows_of(lhs, others[-1])
    params = dict(
        ragged_dot_dimension_numbers=numbers, precision=precision, preferred_element_type=preferred_element_type
    )
    params |= compat.ragged_params(dict(out_sharding=out_sharding))
    return (compat.ragged_dot_general_p, lhs, rhs, group_sizes), params


compat.ask_policies(ragged_p, _question)


def plan(
    lhs, rhs, group_sizes, *others, numbers, precision, preferred_element_type, schedule, device, epilogue=Epilogue(),
    leading=False, gathers=None,
):  # fmt: skip
    """The ``Plan`` of a product and, if a kernel supports its types, its ``Arrangement``.

    For a gated product whose products run apart it is the plan of one of them. With ``gathers`` it is that of a kernel
    that gathers rows, or of the product of rows that XLA gathers first, whichever is faster.

    Raises:
      ValueError: no kernel can run an explicit schedule.
    """
    schedule = schedules.of_forward(schedule)
    params = dict(numbers=numbers, precision=precision, preferred_element_type=preferred_element_type)
    if gathers:
        params |= dict(epilogue=epilogue, leading=leading)
        return _plan_gathered(lhs, rhs, group_sizes, others[-1], schedule, device, **params)
    arrange = functools.partial(
        problem.arrange_ragged, lhs, rhs, group_sizes.shape[0] - leading, platform=device.platform, leading=leading,
        **params,
    )  # fmt: skip
    if epilogue.gate:
        params |= dict(schedule=schedule, device=device, leading=leading, epilogue=epilogue.before_gate)
        return lowering.plan_gated(
            functools.partial(arrange, epilogue=epilogue), functools.partial(plan, lhs, rhs, group_sizes, **params),
            lhs, rhs, epilogue, schedule, device,
        )  # fmt: skip
    try:
        arrangement = arrange(epilogue=epilogue)
    except problem.Unsupported as why:
        lowering.refuse_schedule(schedule, " this product", why)
        return planner.unsupported(lhs, rhs, device, why), None
    made = planner.make_plan(arrangement.problem, schedule, device)
    return made if made.kernel is None else made.with_notes(arrangement.copies(lhs, rhs)), arrangement


def _plan_gathered(lhs, rhs, group_sizes, indices, schedule, device, *, epilogue, leading, **params):
    """``plan`` with ``gathers``."""
    rows, count = rows_of(lhs, indices), group_sizes.shape[0] - leading
    params |= dict(epilogue=epilogue, leading=leading)
    made, arrangement = plan(rows, rhs, group_sizes, schedule=schedule, device=device, **params)
    if made.is_empty:
        return made, arrangement
    why = "two products read them" if _runs_apart(made, epilogue) else "no kernel does"
    if made.kernel is not None and not _runs_apart(made, epilogue) and isinstance(lhs.shape[0], int):
        by_kernel = problem.arrange_ragged(
            rows, rhs, count, platform=device.platform, gathered_rows=lhs.shape[0], **params
        )
        try:
            instead = planner.make_plan(by_kernel.problem, schedule, device)
        except ValueError as error:  # of an explicit schedule
            why, instead = str(error), made
        if instead is not made and instead.kernel is not None:
            first = made.microseconds + _gathering(rows, device)
            if instead.microseconds <= first or tuned.lookup(by_kernel.problem, device) is not None:
                return instead.with_notes(by_kernel.copies(rows, rhs)), by_kernel
            why = f"{instead.kernel} is slower, {text.duration(instead.microseconds)} instead of {text.duration(first)}"
    return made.with_notes([f"XLA gathers the rows of lhs first: {why}"]), arrangement


def _gathering(rows, device):
    """The expected time, in microseconds, of gathering rows by XLA; on a CPU kernels always do."""
    if device.platform == "cpu":
        return math.inf
    return cost_model.moving(2 * rows.size * rows.dtype.itemsize, device)


def _lower(ctx, *operands, out_sharding, **params):
    del out_sharding  # the result's type has it
    rules = {platform: functools.partial(_lower_with_kernels, platform=platform) for platform in ("cpu", "cuda")}
    rest = functools.partial(_lower_to_xla, why="there are kernels for CPUs and for NVIDIA GPUs only")
    return compat.lower_per_platform(ctx, rules, rest, *operands, **params)


def _gathered_first(*operands, gathers, **params):
    return bind(*_gathered(gathers, *operands), **params)


def _lower_with_kernels(ctx, *operands, platform, schedule, **params):
    if (why := lowering.why_not_here(ctx, platform, schedule)) is not None:
        return _lower_to_xla(ctx, *operands, schedule=schedule, why=why, **params)
    lowering.check_build(platform)
    result = ctx.avals_out[0]
    ctx = ctx.replace(avals_in=[compat.local_aval(aval) for aval in ctx.avals_in])
    partitions = lowering.placement(ctx) == compat.Placement.PARTITIONED
    if partitions and params["gathers"]:
        rule = mlir.lower_fun(_gathered_first, multiple_results=False)
        return rule(ctx, *operands, schedule=schedule, **params)
    if partitions:
        later = _partitioned(schedule=tune.later(schedule), **params)
        out = lowering.lower_partitioned(ctx, later, operands, platform, params | dict(schedule=schedule))
        return [compat.with_sharding_of(ctx, out, result)]
    lhs, rhs, group_sizes, *others = operands
    rhs, aval, params["numbers"] = without_transposes(rhs, ctx.avals_in[1], params["numbers"], params["epilogue"])
    ctx = ctx.replace(avals_in=[ctx.avals_in[0], aval, *ctx.avals_in[2:]])
    operands = (lhs, rhs, group_sizes, *others)
    epilogue, types = params["epilogue"], ctx.avals_in

    def planned(schedule):
        made, arrangement = plan(*types, schedule=schedule, device=lowering.target(platform), **params)
        return made if _runs_apart(made, epilogue) else lowering.tuned_if_asked(made, schedule), arrangement

    made, arrangement = tune.in_its_context(schedules.of_forward(schedule), planned)
    if params["gathers"] and (made.kernel is None or not made.problem.gathered_rows):
        first = functools.partial(_gathered_first, schedule=schedule, **params)
        return lowering.lower_as_one(made, first, ctx, *operands)
    if _runs_apart(made, epilogue):
        apart = functools.partial(_apart, schedule=schedule, **params)
        return lowering.lower_as_one(made, apart, ctx, *operands)
    if lowering.only_looked_at(made) or made.kernel is None:
        return _by_xla(ctx, *operands, **params)
    # Group sizes and indices come last.
    last = len(operands) - bool(params["gathers"])
    order = [*range(3, last), 2, *range(last, len(operands))]
    others, of_others = [operands[i] for i in order], [types[i] for i in order]
    from_the_front = functools.partial(_from_the_front, rows=types[0].shape[0])
    integers = [as_int32, from_the_front if params["gathers"] == "clip" else as_int32]
    for i, convert in zip(range(last - 3, len(order)), integers):
        (others[i],) = mlir.lower_fun(convert, multiple_results=False)(ctx.replace(avals_in=[of_others[i]]), others[i])
        of_others[i] = of_others[i].update(dtype=np.dtype(np.int32))
    prepared = lowering.prepared(arrangement, lhs, rhs, *types[:2])
    avals = [*arrangement.prepared(*types[:2]), *of_others]
    stored = compat.local_aval(*ctx.avals_out)
    out = lowering.call(ctx.replace(avals_in=avals), made, stored, *prepared, *others)
    return [compat.with_sharding_of(ctx, out, *ctx.avals_out)]


def _runs_apart(made, epilogue):
    """Whether this plan is of one of the products of a gated one."""
    return epilogue.gate is not None and not made.is_empty and (made.kernel is None or not made.problem.gated)


def _partitioned(*, epilogue, leading, **params):
    """The product, for XLA to partition. Where groups or what they cut are divided, there are rows in none before."""
    seconds = int(epilogue.is_pair)

    def product(lhs, rhs, group_sizes, leading):
        return bind(lhs, rhs, group_sizes, leading=leading, **params)

    def fused(lhs, rhs, *others, leading=leading):
        up, (group_sizes, *biases) = others[:seconds], others[seconds:]
        return bind(lhs, rhs, group_sizes, *up, *biases, epilogue=epilogue, leading=leading, **params)

    def finish(*given, leading):
        products, (group_sizes, *biases) = given[: 1 + seconds], given[1 + seconds :]
        return _finished(products, group_sizes, biases, epilogue, leading=leading)

    factors = partition.RaggedFactors(params["numbers"], epilogue, leading)
    function = partition.partitioned(product, finish, fused, factors)

    def ordered(lhs, rhs, group_sizes, *others):
        return function(lhs, rhs, *others[:seconds], as_int32(group_sizes), *others[seconds:])

    return ordered


def without_transposes(rhs, aval, numbers, epilogue, behind=compat.transpose_behind):
    """Folds transposes of the matrices of groups into the product: kernels read either majorness without a copy.

    ``behind`` is as in ``lowering.without_transposes``.
    """
    if not _groups_rows(numbers) or epilogue.gate:
        return rhs, aval, numbers
    ((contract,), (rhs_contract,)), _ = numbers.dot_dimension_numbers
    (group,) = numbers.rhs_group_dimensions
    while (found := behind(rhs)) is not None:
        rhs, permutation = found
        aval = aval.update(shape=tuple(aval.shape[i] for i in np.argsort(permutation)))
        rhs_contract, group = permutation[rhs_contract], permutation[group]
    return rhs, aval, numbers_of(contract, rhs_contract, numbers.lhs_ragged_dimensions[0], (group,))


def as_int32(numbers):
    """Sizes or indices as kernels read them; those that 32 bits do not hold are beyond any extent."""
    if numbers.dtype == np.int32:
        return numbers
    held, own = jnp.iinfo(np.int32), jnp.iinfo(numbers.dtype)
    return jnp.clip(numbers, max(held.min, own.min), min(held.max, own.max)).astype(np.int32)


def _from_the_front(indices, rows):
    """Indices as kernels read them, which take the nearest row for one out of bounds: none counts from the end."""
    indices = as_int32(indices)
    return jnp.where(indices < 0, indices + rows, indices)


def _lower_to_xla(ctx, *operands, why, schedule, **params):
    lowering.leave_to_xla(schedule, why)
    return _by_xla(ctx, *operands, **params)


def _by_xla(ctx, *operands, **params):
    on_types = ctx.replace(avals_in=[compat.local_aval(aval) for aval in ctx.avals_in])
    with partition.without_explicit_mesh():
        product = functools.partial(xlas_product, **params)
        (out,) = mlir.lower_fun(product, multiple_results=False)(on_types, *operands)
    return [compat.with_sharding_of(ctx, out, *ctx.avals_out)]


compat.needs_devices(ragged_p)
mlir.register_lowering(ragged_p, _lower, cacheable=False)
