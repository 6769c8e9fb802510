"""Fragments of a program: a product, or the two of a gate, with the equations around it that a decision is about.

A fragment is what the epilogue of a kernel could do after the product, what XLA could merge with that or with the
operands, and nothing that another kernel computes. Inside ``tuning()`` it runs in three ways, and the fastest decides:

- ``xla``: as the program has it;
- ``apart``: our product, and XLA's equations around it;
- ``fused``: our product with as much as its kernel can do.

Programs over several devices have no fragments: nobody knows while tracing how XLA divides them.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from jax_streamk import compat, schedules
from jax_streamk.accelerate.equations import Equations, is_merged, is_movable, is_view
from jax_streamk.accelerate.followers import Follower
from jax_streamk.device import Device
from jax_streamk.product import kinds
from jax_streamk.product.fused import fused_p
from jax_streamk.tuning import tune, tuned

_TAIL = 8  # equations after what a kernel can do
_READERS = 4  # of a value that more than one equation reads
_MOST = 48  # equations
_ENDS = ("reduce_", "argmax", "argmin")
# What was measured, by the variable of a product's result.
Measured = dict[Var, tuned.FragmentTimes]


def measured(
    program: Equations, schedule: Any, where: Any, device: Device, rewrite: Callable[[Equations, Measured], list[Any]]
) -> Measured:
    """What tuning found for the products of a program that are still JAX's; inside ``tuning()`` it measures them.

    Args:
      rewrite: a function from a program and what is to be taken as measured to the rewritten equations.
    """
    if where is not None or not schedules.may_be_xlas(schedule):
        return {}
    if not tune.is_on(device):
        known = tuned.products_of_fragments(device)
        if not known or not any(_is_product(eqn) and _product(eqn) in known for eqn in program.eqns):
            return {}
    by_result: Measured = {}
    for products, closed in _fragments(program, schedule):
        outs = [x for at in products for x in _results(program, at)]
        make = functools.partial(_variants, closed, outs, rewrite)
        key = f"{_product(program.eqns[products[0]])}{tuned.AFTER_PRODUCT}{text_of(closed)}"
        times = tune.fragment_times(key, make, device)
        if times is not None:
            by_result |= dict.fromkeys(outs, times)
    return by_result


def _variants(closed: Any, outs: Sequence[Var], rewrite: Callable[..., list[Any]]) -> tuple[dict[str, Any], str]:
    """A fragment's closed jaxprs by name, and the name of the one that the rules make. Only ``xla``: none is ours."""
    program = Equations(closed.eqns, getattr(closed, "jaxpr", closed).outvars)

    def rewritten(times: Measured) -> tuple[str, Any]:
        eqns = rewrite(program, times)
        called = {eqn.primitive for eqn in eqns}
        if compat.dot_general_p in called:
            return "xla", closed
        return "fused" if fused_p in called else "apart", compat.with_eqns(closed, eqns)

    forced = [dict.fromkeys(outs, tuned.FragmentTimes.assumed(name)) for name in ("apart", "fused")]
    variants = dict([("xla", closed), *map(rewritten, forced)])
    own, _ = rewritten({})
    return variants, own if own in variants else "xla"


def _is_product(eqn: Any) -> bool:
    return eqn.primitive is compat.dot_general_p


def _product(eqn: Any) -> str:
    """Types and dimensions of a product as text: programs without any that was measured need no more."""
    return f"{_type(eqn.invars[0])} {_type(eqn.invars[1])} {_shown(eqn.params['dimension_numbers'])}"


def _type(x: Any) -> str:
    return f"{_name(x.aval.dtype)}{list(x.aval.shape)}"


@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype)


def _results(program: Equations, at: int) -> list[Var]:
    """The variables that a product of ours has for its result: that of a transpose is folded into it."""
    (out,) = program.eqns[at].outvars
    user = program.user(out)
    is_turned = user is not None and program.eqns[user].primitive.name == "transpose"
    return [out, program.eqns[user].outvars[0]] if user is not None and is_turned else [out]


def _fragments(program: Equations, schedule: Any) -> Iterator[tuple[list[int], Any]]:
    """The products of each fragment, by their positions, and its closed jaxpr."""
    ours = program.with_eqns([_ours(eqn, schedule) for eqn in program.eqns])
    ours.in_memory = set()
    of_kernels = set[int]()
    tails: list[tuple[set[int], Any]] = []
    # The last product first, as for gates.
    for at in reversed(range(len(program.eqns))):
        eqn = program.eqns[at]
        if at in of_kernels or not _is_product(eqn) or not is_movable(eqn):
            continue
        taken, end = {at}, eqn.outvars[0]
        for tail in Follower(ours, at, of_kernels).tails():
            taken, end = {at, *tail.taken}, tail.out
        of_kernels |= taken
        tails.append((taken, end))
    for taken, end in tails:
        others = of_kernels - taken
        _take_readers(program, taken, end, others)
        repeated = _take_makers(program, taken, others)
        closed = _closed(program, taken, repeated)
        if closed is not None:
            yield [at for at in sorted(taken) if _is_product(program.eqns[at])], closed


def _ours(eqn: Any, schedule: Any) -> Any:
    return kinds.of_ours(eqn, schedule) if _is_product(eqn) else eqn


def _may_join(eqn: Any) -> bool:
    return is_movable(eqn) and is_merged(eqn)


def _take_readers(program: Equations, taken: set[int], end: Any, others: set[int]) -> None:
    """Adds what XLA could merge with the reading of a value: of several readers, only they themselves."""
    for _ in range(_TAIL):
        users = program.uses[end]
        if end in program.live or not 1 <= len(users) <= _READERS or not taken.isdisjoint(users):
            return
        if not others.isdisjoint(users) or not all(_may_join(program.eqns[at]) for at in users):
            return
        taken.update(users)
        last = program.eqns[users[0]]
        if len(users) > 1 or last.primitive.name.startswith(_ENDS):
            return
        end = last.outvars[0]


def _take_makers(program: Equations, taken: set[int], others: set[int]) -> set[int]:
    """Adds what XLA could merge with the operands. Returns what is computed once more: numbers and broadcasts."""
    repeated = set[int]()
    waiting = sorted(taken)
    while waiting and len(taken) < _MOST:
        for x in program.eqns[waiting.pop()].invars:
            at = None if isinstance(x, Literal) else program.maker.get(x)
            if at is None or at in taken or at in others or not _may_join(program.eqns[at]):
                continue
            maker = program.eqns[at]
            is_ours_alone = x not in program.live and taken.issuperset(program.uses[x])
            is_free = maker.primitive.name == "broadcast_in_dim" or program.number(x) is not None
            if maker.primitive.name.startswith(_ENDS) or not (is_ours_alone or is_free):
                continue
            taken.add(at)
            waiting.append(at)
            if not is_ours_alone:
                repeated.add(at)
    return repeated


def _closed(program: Equations, taken: set[int], repeated: set[int]) -> Any:
    """The closed jaxpr of equations; None if there is nothing to decide, or they cannot run alone."""
    eqns = [program.eqns[at] for at in sorted(taken)]
    others = [eqn for eqn in eqns if not _is_product(eqn)]
    if all(is_view(eqn) or eqn.primitive.name in ("transpose", "pvary") for eqn in others):
        return None
    if not all(_is_alone(x.aval) for eqn in eqns for x in (*eqn.invars, *eqn.outvars)):
        return None
    if any(getattr(body, "consts", ()) for eqn in others for body in eqn.params.values()):  # may be tracers
        return None
    outs = [
        x
        for at in sorted(taken - repeated)
        for x in program.eqns[at].outvars
        if x in program.live or not taken.issuperset(program.uses[x])
    ]
    return compat.closed([*compat.free_variables(eqns)], eqns, *outs) if outs else None


def _is_alone(aval: Any) -> bool:
    """Whether a value is an array of numbers on one device."""
    mesh = aval.sharding.mesh
    return _is_number(aval.dtype) and (mesh.empty or mesh.size == 1) and not compat.varying(aval)


@functools.cache
def _is_number(dtype: Any) -> bool:
    return not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def text_of(jaxpr: Any) -> str:
    """A jaxpr as text that is the same in every process: variables are numbered, and functions left out."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    numbers: dict[Any, int] = {}

    def named(x: Any) -> str:
        if isinstance(x, Literal):
            return f"{x.val}"
        is_new = x not in numbers
        number = numbers.setdefault(x, len(numbers))
        return f"{number}:{_type(x)}" if is_new else f"{number}"

    def line(eqn: Any) -> str:
        given = (
            (name, x) for name, x in sorted(eqn.params.items()) if not callable(x) and not hasattr(x, "call_wrapped")
        )
        params = (f"{name}={_shown(value)}" for name, value in given)
        operands = " ".join(map(named, eqn.invars))
        return f"{' '.join(map(named, eqn.outvars))} = {eqn.primitive.name}[{' '.join(params)}] {operands}"

    first = " ".join(map(named, (*jaxpr.constvars, *jaxpr.invars)))
    return "; ".join([first, *map(line, jaxpr.eqns), " ".join(map(named, jaxpr.outvars))])


def _shown(value: Any) -> str:
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        return "{" + text_of(value) + "}"
    if isinstance(value, (set, frozenset)):
        return f"{sorted(map(_shown, value))}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(map(_shown, value)) + ")"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
