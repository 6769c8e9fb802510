"""Products that share their left operand, such as those of q, k and v, as one.

A kernel for joined products reads two or three matrices where they lie, as if they were side by side. Each product
alone takes a launch, and few columns make too few tiles for the whole GPU.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, Var
from jax.interpreters import mlir

from jax_streamk import compat, schedules
from jax_streamk.accelerate import decisions
from jax_streamk.accelerate.program import Program, bytes_of, is_movable, variables
from jax_streamk.device import Device
from jax_streamk.lower import lowering
from jax_streamk.plan import cost_model, planner, problem
from jax_streamk.product import primitive

# Operands: lhs of shape (m, k), then two or three matrices, all (k, n) or all (n, k). The result has shape (m, sum of
# n). Only what ``fused_p`` calls has it: derivatives are those of the products apart.
joined_p: Primitive = Primitive("streamk_joined")
joined_p.def_impl(functools.partial(compat.apply_primitive, joined_p))
compat.check_nan(joined_p)

_MOST = 3
_NARROWEST = 64  # columns of a kernel's tile
_BY_ROWS, _BY_COLUMNS = ((((1,), (i,)), ((), ())) for i in (0, 1))  # of matrices (k, n) and (n, k)


@joined_p.def_abstract_eval
def _abstract_eval(lhs, *matrices, dimension_numbers, **params):
    params |= dict(dimension_numbers=dimension_numbers, out_sharding=None)
    product, _ = compat.dot_general_p.abstract_eval(lhs, matrices[0], **params)
    return product.update(shape=(lhs.shape[0], sum(_columns(dimension_numbers, *(x.shape for x in matrices)))))


def _columns(dimension_numbers, *shapes):
    return [shape[dimension_numbers == _BY_ROWS] for shape in shapes]


def _apart(lhs, *matrices, **params):
    return jnp.concatenate([primitive.bind(lhs, x, **params) for x in matrices], 1)


def _apart_by_xla(lhs, *matrices, **params):
    return jnp.concatenate([primitive.xlas_product(lhs, x, out_sharding=None, **params) for x in matrices], 1)


def _batch(axis_data, operands, dims, **params):
    apart = functools.partial(_apart, **params)
    return jax.vmap(apart, dims, axis_size=axis_data.size, spmd_axis_name=axis_data.spmd_name)(*operands), 0


compat.def_batching(joined_p, _batch)


def plan(lhs, *matrices, device, dimension_numbers, precision, preferred_element_type):
    """The ``Plan`` of a joined product on a GPU; None if no kernel can run it.

    Args:
      lhs, *matrices, dimension_numbers, precision, preferred_element_type: the primitive's operands and parameters.
      device: a ``Device``.
    """
    if any(min(x.shape) < _NARROWEST or x.dtype != lhs.dtype for x in matrices):
        return None
    shapes = lhs.shape, tuple(x.shape for x in matrices)
    try:
        asked = _problem(*shapes, np.dtype(lhs.dtype), dimension_numbers, precision, preferred_element_type)
    except problem.Unsupported:
        return None
    made = planner.make_plan(asked, schedules.Auto(), device)
    return made if made.kernel is not None else None


@functools.lru_cache(maxsize=4096)
def _problem(lhs, matrices, dtype, dimension_numbers, precision, preferred_element_type):
    columns = _columns(dimension_numbers, *matrices)
    whole = (lhs[1], sum(columns))
    a = jax.ShapeDtypeStruct(lhs, dtype)
    b = jax.ShapeDtypeStruct(whole if dimension_numbers == _BY_ROWS else whole[::-1], dtype)
    made = problem.arrange(a, b, dimension_numbers, precision, preferred_element_type, "cuda").problem
    second, third = (*itertools.accumulate(columns[:-1]), 0)[:2]
    made = dataclasses.replace(made, second_column=second, third_column=third)
    return dataclasses.replace(made, ldb=second) if dimension_numbers == _BY_ROWS else made


def _lower(ctx, *operands, **params):
    apart = mlir.lower_fun(_apart, multiple_results=False)
    rules = dict(cuda=functools.partial(_lower_with_kernel, apart))
    return compat.lower_per_platform(ctx, rules, apart, *operands, **params)


def _lower_with_kernel(apart, ctx, *operands, **params):
    made = None
    is_one = lowering.placement(ctx) == compat.Placement.ONE_DEVICE
    if is_one and lowering.why_not_here(ctx, "cuda", schedules.Auto()) is None:
        lowering.check_build("cuda")
        made = plan(*ctx.avals_in, device=lowering.target("cuda"), **params)
    if made is None:
        return apart(ctx, *operands, **params)
    if lowering.only_looked_at(made):
        return mlir.lower_fun(_apart_by_xla, multiple_results=False)(ctx, *operands, **params)
    return [lowering.call(ctx, made, compat.local_aval(*ctx.avals_out), *operands)]


mlir.register_lowering(joined_p, _lower, cacheable=False)


def joined(eqns: Sequence[Any], outvars: Sequence[Any], schedule: Any, device: Device) -> list[Any] | None:
    """A program's equations with products of one operand joined where that is faster; None if none are.

    What was fused into a product comes after the joined one, as it was written.

    Args:
      eqns, outvars: of a program, after fusing.
      schedule: of products that become ours.
      device: a GPU.
    """
    places = collections.defaultdict(list)
    for at, eqn in enumerate(eqns):
        if (product := _product_in(eqn)) is not None:
            places[product.invars[0]].append(at)
    shared = {at for found in places.values() if len(found) > 1 for at in found}
    if not shared:
        return None
    blocks = [_written(eqn) if at in shared else [eqn] for at, eqn in enumerate(eqns)]
    spans = [range(end - len(block), end) for block, end in zip(blocks, itertools.accumulate(map(len, blocks)))]
    opened = _Opened([*itertools.chain(*blocks)], outvars)
    opened.fused = {at for eqn, block, span in zip(eqns, blocks, spans) if block[0] is not eqn for at in span}
    made: dict[int, list[Any]] = {}
    taken = set[int]()
    for group in _groups(opened, schedule, device):
        call = _call(opened, group, device)
        before = None if call is None else _needed(opened, group)
        if call is not None and before is not None:
            made[group[0]] = [*(opened.eqns[at] for at in before), *call]
            taken.update(group)
    if not made:
        return None
    out: list[Any] = []
    defined = set[Any]()
    for eqn, span in zip(eqns, spans):
        new = [eqn]
        if not taken.isdisjoint(span):
            new = [x for at in span for x in (*made.get(at, ()), *([opened.eqns[at]] * (at not in taken)))]
        for x in new:  # once: what an operand needs is before a fused product, and in it
            if not x.outvars or not defined.issuperset(x.outvars):
                out.append(x)
                defined.update(x.outvars)
    return out


class _Opened(Program):
    """A program in which products that share an operand are as they were written.

    Attributes:
      fused: the places of equations that a fused product had replaced.
    """

    fused: set[int]


def _product_in(eqn: Any) -> Any:
    """The only product of an equation, which may be fused with what follows it; None if there is none."""
    found = [x for x in _written(eqn) if x.primitive in (primitive.dot_general_p, compat.dot_general_p)]
    return found[0] if len(found) == 1 and isinstance(found[0].invars[0], Var) else None


def _written(eqn: Any) -> list[Any]:
    """What a fused product replaced, in this program's own variables; else the equation itself."""
    if eqn.primitive is primitive.fused_p:
        written = getattr(eqn.params["written"], "jaxpr", eqn.params["written"])
        own = (*zip(written.invars, eqn.invars), *zip(written.outvars, eqn.outvars))
        if all(x is y for x, y in own):  # not if it was fused in another program, and copied
            return list(written.eqns)
    return [eqn]


def _groups(program: Program, schedule: Any, device: Device) -> list[list[int]]:
    """Of products with one left operand, two or three at a time that one kernel could compute."""
    alike = collections.defaultdict(list)
    for at, eqn in enumerate(program.eqns):
        if _product_in(eqn) is not eqn:
            continue
        (result,) = eqn.outvars
        if (result in program.kept or program.uses.get(result)) and (key := _key(program, eqn)) is not None:
            alike[key].append(at)
    free = (
        [at for at in places if _is_free(program, program.eqns[at], schedule, device)]
        for places in alike.values()
        if len(places) > 1
    )
    return [places[i : i + _MOST] for places in free for i in range(0, len(places) - 1, _MOST)]


def _is_free(program: Program, eqn: Any, schedule: Any, device: Device) -> bool:
    """Whether a product is ours, or XLA's only because alone it takes no longer than to start a kernel."""
    if eqn.primitive is primitive.dot_general_p:
        return True
    made = decisions.decide(eqn, program, schedule, None, device).plan
    is_short = made is not None and made.kernel is None and made.microseconds is not None
    return is_short and decisions.merged_by_xla(eqn, program) is None


def _key(program: Program, eqn: Any) -> Any:
    """What products must have in common; None if a product cannot be joined."""
    (lhs, rhs), params = (x.aval for x in eqn.invars), eqn.params
    (contract, batch), is_ours = params["dimension_numbers"], eqn.primitive is primitive.dot_general_p
    if is_ours and (params["permutation"] is not None or params["schedule"] != schedules.Auto()):
        return None
    if any(batch) or tuple(contract[0]) != (lhs.ndim - 1,) or tuple(contract[1]) not in ((0,), (rhs.ndim - 1,)):
        return None
    if not all(isinstance(size, int) for size in (*lhs.shape, *rhs.shape)):  # exported for any size
        return None
    if compat.explicit_mesh(lhs, rhs) is not None or params["out_sharding"] is not None or eqn.ctx.compute_type:
        return None
    if rhs.size // max(1, lhs.shape[-1]) < _NARROWEST:
        return None
    matrix = _matrix(program, eqn)
    if matrix is None or program.transpose_behind(eqn.invars[0]) is not None:  # the products apart read it as it is
        return None
    return eqn.invars[0], matrix[1], params["precision"], eqn.outvars[0].aval.dtype


def _matrix(program: Program, eqn: Any) -> Any:
    """A product's matrix, behind a transpose, and whether it is (k, n); None if it is transposed in another way."""
    x = eqn.invars[1]
    is_by_rows = tuple(eqn.params["dimension_numbers"][0][1]) == (0,)
    behind = program.transpose_behind(x)
    if behind is None:
        return x, is_by_rows
    return (behind[0], not is_by_rows) if behind[1] == (1, 0) else None


def _needed(program: _Opened, group: Sequence[int]) -> list[int] | None:
    """The equations after the first product that the others need, in order; None if they cannot go before it."""
    needed, left = set[int](), [x for at in group for x in variables(program.eqns[at])]
    while left:
        at = program.maker.get(left.pop(), -1)
        if at < group[0] or at in needed:
            continue
        eqn = program.eqns[at]
        if at in group or not is_movable(eqn) or (at in program.fused and _product_in(eqn) is not None):
            return None
        needed.add(at)
        left += variables(eqn)
    return sorted(needed)


def _call(program: _Opened, group: Sequence[int], device: Device) -> list[Any] | None:
    """The equations that compute products as one; None if they take longer, or no kernel can."""
    products = [program.eqns[at] for at in group]
    first, lhs = products[0], products[0].invars[0]
    rows, depth = math.prod(lhs.aval.shape[:-1]), lhs.aval.shape[-1]
    matrices, (is_by_rows, *_) = zip(*(_matrix(program, eqn) for eqn in products))
    params = dict(
        dimension_numbers=_BY_ROWS if is_by_rows else _BY_COLUMNS,
        precision=first.params["precision"],
        preferred_element_type=first.outvars[0].aval.dtype,
    )
    columns = [x.aval.size // max(1, depth) for x in matrices]
    shapes = [(depth, n) if is_by_rows else (n, depth) for n in columns]
    views = [compat.reshaped(first, x, shape) for x, shape in zip((lhs, *matrices), ((rows, depth), *shapes))]
    operands = [x.outvars[0] for x in views]
    made = plan(*(x.aval for x in operands), device=device, **params)
    if made is None or made.microseconds + _slicing(program, group, device) >= sum(
        decisions.planned(eqn, program, device, schedule=schedules.Auto()).microseconds or 0 for eqn in products
    ):
        return None
    product = compat.new_eqn(first, joined_p, *operands, **params)
    apart = [eqn.replace(outvars=[compat.new_var(x.aval) for x in eqn.outvars]) for eqn in products]
    parts = [compat.reshaped(eqn, eqn.outvars[0], (rows, n)) for eqn, n in zip(apart, columns)]
    whole = compat.new_eqn(first, lax.concatenate_p, *(x.outvars[0] for x in parts), dimension=1)
    inputs = list(dict.fromkeys((lhs, *matrices, *(x for eqn in products for x in variables(eqn)))))
    out = compat.new_var(product.outvars[0].aval)
    jaxprs = dict(
        call_jaxpr=compat.closed(inputs, [*views, product], *product.outvars),
        written=compat.closed(inputs, [*apart, *parts, whole], *whole.outvars),
    )
    eqns = [first.replace(primitive=primitive.fused_p, params=jaxprs, invars=inputs, outvars=[out])]
    for eqn, n, end in zip(products, columns, itertools.accumulate(columns)):
        limits = dict(start_indices=(0, end - n), limit_indices=(rows, end), strides=None)
        part = compat.new_eqn(eqn, lax.slice_p, out, **limits)
        back = compat.reshaped(eqn, part.outvars[0], eqn.outvars[0].aval.shape)
        eqns += [part, back.replace(outvars=eqn.outvars)]
    return eqns


def _slicing(program: _Opened, group: Sequence[int], device: Device) -> float:
    """The expected time, in microseconds, of copies out of a joined product, where XLA does not merge them.

    What was fused into a product becomes a pass of its own.
    """
    results = {at: program.eqns[at].outvars[0] for at in group}
    copied = [x.aval for at, x in results.items() if at in program.fused or program.is_stored(x)]
    return cost_model.moving(2 * sum(map(bytes_of, copied)), device) if copied else 0.0
