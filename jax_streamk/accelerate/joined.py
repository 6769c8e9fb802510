"""Products that share their left operand, such as those of q, k and v, as one.

A kernel for joined products reads two or three matrices where they lie, as if they were side by side. Each product
alone takes a launch, and few columns make too few tiles for the whole GPU.
"""

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend.core import Var

from jax_streamk import compat, schedules
from jax_streamk.accelerate import decisions
from jax_streamk.accelerate.equations import Equations, bytes_of, is_movable, variables
from jax_streamk.device import Device
from jax_streamk.plan import alternatives, cost_model
from jax_streamk.product import kinds
from jax_streamk.product.dense import Dense
from jax_streamk.product.fused import fused_p
from jax_streamk.product.joined import BY_COLUMNS, BY_ROWS, MOST, NARROWEST, Joined
from jax_streamk.product.primitive import product_p


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
    shared = {at for group in places.values() if len(group) > 1 for at in group}
    if not shared:
        return None
    blocks = [_written(eqn) if at in shared else [eqn] for at, eqn in enumerate(eqns)]
    spans = [range(end - len(block), end) for block, end in zip(blocks, itertools.accumulate(map(len, blocks)))]
    opened = _Opened([*itertools.chain(*blocks)], outvars)
    opened.fused = {at for eqn, block, span in zip(eqns, blocks, spans) if block[0] is not eqn for at in span}
    calls: dict[int, list[Any]] = {}
    taken = set[int]()
    for group in _groups(opened, schedule, device):
        call = _call(opened, group, device)
        before = None if call is None else _needed(opened, group)
        if call is not None and before is not None:
            calls[group[0]] = [*(opened.eqns[at] for at in before), *call]
            taken.update(group)
    if not calls:
        return None
    out: list[Any] = []
    defined = set[Any]()
    for eqn, span in zip(eqns, spans):
        new = [eqn]
        if not taken.isdisjoint(span):
            new = [x for at in span for x in (*calls.get(at, ()), *([opened.eqns[at]] * (at not in taken)))]
        for x in new:  # once: what an operand needs is before a fused product, and in it
            if not x.outvars or not defined.issuperset(x.outvars):
                out.append(x)
                defined.update(x.outvars)
    return out


class _Opened(Equations):
    """A program in which products that share an operand are as they were written.

    Attributes:
      fused: the places of equations that a fused product had replaced.
    """

    fused: set[int]


def _product_in(eqn: Any) -> Any:
    """The only product of an equation, which may be fused with what follows it; None if there is none."""
    products = [
        x
        for x in _written(eqn)
        if x.primitive is compat.dot_general_p or (kinds.is_plain(x, Dense) and not kinds.is_scaled(x))
    ]
    return products[0] if len(products) == 1 and isinstance(products[0].invars[0], Var) else None


def _written(eqn: Any) -> list[Any]:
    """What a fused product replaced, in this program's own variables; else the equation itself."""
    if eqn.primitive is fused_p:
        written = getattr(eqn.params["written"], "jaxpr", eqn.params["written"])
        own = (*zip(written.invars, eqn.invars), *zip(written.outvars, eqn.outvars))
        if all(x is y for x, y in own):  # not if it was fused in another program, and copied
            return list(written.eqns)
    return [eqn]


def _groups(program: Equations, schedule: Any, device: Device) -> list[list[int]]:
    """Products with one left operand that one kernel could compute, two or three at a time."""
    alike = collections.defaultdict(list)
    for at, eqn in enumerate(program.eqns):
        if _product_in(eqn) is not eqn:
            continue
        (result,) = eqn.outvars
        if (result in program.live or program.uses.get(result)) and (key := _key(program, eqn)) is not None:
            alike[key].append(at)
    free = (
        [at for at in places if _is_free(program, program.eqns[at], schedule, device)]
        for places in alike.values()
        if len(places) > 1
    )
    return [places[i : i + MOST] for places in free for i in range(0, len(places) - 1, MOST)]


def _is_free(program: Equations, eqn: Any, schedule: Any, device: Device) -> bool:
    """Whether a product is ours, or XLA's only because alone it takes no longer than to start a kernel."""
    if eqn.primitive is product_p:
        return True
    plan = decisions.decide(eqn, program, schedule, None, device).plan
    is_short = plan is not None and plan.kernel is None and plan.microseconds is not None
    return is_short and decisions.merged_by_xla(eqn, program) is None


def _key(program: Equations, eqn: Any) -> Any:
    """What products must have in common; None if a product cannot be joined."""
    (lhs, rhs), product = (x.aval for x in eqn.invars), kinds.of(eqn)
    contract, batch = product.numbers
    if product.permutation is not None or eqn.params.get("schedule", schedules.Auto()) != schedules.Auto():
        return None
    if any(batch) or tuple(contract[0]) != (lhs.ndim - 1,) or tuple(contract[1]) not in ((0,), (rhs.ndim - 1,)):
        return None
    if not all(isinstance(size, int) for size in (*lhs.shape, *rhs.shape)):  # exported for any size
        return None
    if compat.explicit_mesh(lhs, rhs) is not None or eqn.params["out_sharding"] is not None or eqn.ctx.compute_type:
        return None
    if rhs.size // max(1, lhs.shape[-1]) < NARROWEST:
        return None
    matrix = _matrix(program, eqn)
    if matrix is None or program.transpose_behind(eqn.invars[0]) is not None:  # the products apart read it as it is
        return None
    return eqn.invars[0], matrix[1], product.precision, eqn.outvars[0].aval.dtype


def _matrix(program: Equations, eqn: Any) -> Any:
    """A product's matrix, behind a transpose, and whether it is (k, n); None if it is transposed in another way."""
    x = eqn.invars[1]
    is_by_rows = kinds.of(eqn).numbers[0][1] == (0,)
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
    dtype, precision = first.outvars[0].aval.dtype, kinds.of(first).precision
    whole = Joined(BY_ROWS if is_by_rows else BY_COLUMNS, precision, dtype, matrices=len(matrices))
    columns = [x.aval.size // max(1, depth) for x in matrices]
    shapes = [(depth, n) if is_by_rows else (n, depth) for n in columns]
    views = [compat.reshaped(first, x, shape) for x, shape in zip((lhs, *matrices), ((rows, depth), *shapes))]
    operands = [x.outvars[0] for x in views]
    plan = alternatives.plan(whole, whole.by_role([x.aval for x in operands]), schedules.Auto(), device).plan
    if plan.kernel is None or plan.microseconds + _slicing(program, group, device) >= sum(
        decisions.planned(eqn, program, device, schedules.Auto()).microseconds or 0 for eqn in products
    ):
        return None
    product = compat.new_eqn(first, product_p, *operands, product=whole, schedule=schedules.Auto(), out_sharding=None)
    copies = [eqn.replace(outvars=[compat.new_var(x.aval) for x in eqn.outvars]) for eqn in products]
    parts = [compat.reshaped(eqn, eqn.outvars[0], (rows, n)) for eqn, n in zip(copies, columns)]
    together = compat.new_eqn(first, lax.concatenate_p, *(x.outvars[0] for x in parts), dimension=1)
    inputs = list(dict.fromkeys((lhs, *matrices, *(x for eqn in products for x in variables(eqn)))))
    out = compat.new_var(product.outvars[0].aval)
    jaxprs = dict(
        call_jaxpr=compat.closed(inputs, [*views, product], *product.outvars),
        written=compat.closed(inputs, [*copies, *parts, together], *together.outvars),
    )
    eqns = [first.replace(primitive=fused_p, params=jaxprs, invars=inputs, outvars=[out])]
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
