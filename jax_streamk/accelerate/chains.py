"""``chain``: a function whose products, with what lies between them on rows, are one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from jax_streamk import compat
from jax_streamk.accelerate import rewrite
from jax_streamk.accelerate.rewrite import P, R
from jax_streamk.device import device_of
from jax_streamk.lower.chain import Broken, chain_of
from jax_streamk.plan.problem import GemmProblem
from jax_streamk.product.chain import chain_p
from jax_streamk.schedules import PerPass, Schedule, check_schedule


@overload
def chain(fn: Callable[P, R], *, schedule: Schedule | PerPass | None = None) -> Callable[P, R]: ...
@overload
def chain(
    fn: None = None, *, schedule: Schedule | PerPass | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def chain(fn: Callable[..., Any] | None = None, *, schedule: Schedule | PerPass | None = None) -> Any:
    """``fn`` with its matrix products, and what lies between them, as one call of our kernels.

    For products of few rows that follow each other, such as those of a decoder's layer after its attention: a kernel
    starts while the one before it ends (programmatic dependent launch), which XLA's own calls cannot. ``fn`` is traced
    as by ``accelerate``, which also fuses epilogues. Between its products may lie what is computed on rows of an array,
    in float32, bfloat16 and float16: sums and products with other arrays of rows, vectors and numbers, sums and maxima
    over the last dimension, roots, exponentials and conversions, as norms and activations are made of. Each is
    computed and rounded as in ``fn``.

    Under ``jax.jit`` it is one call; else its products run one by one. Where devices divide its operands, and where
    ``vmap`` changes it such that no chain is left, it runs as written; derivatives are those of ``fn`` as written.

    Args:
      fn: a function of arrays, or of pytrees of arrays, with at least two products of ours.
      schedule: of each product, as in ``matmul``.

    Raises:
      TypeError: fn is not callable, or schedule is not a schedule.
      ValueError: at a call, ``fn`` is not one chain: the message says where it breaks, and why.
      RuntimeError: at a call, the default device is a GPU and this build has no CUDA kernels.
    """
    schedule = check_schedule(schedule)
    if fn is None:
        return functools.partial(chain, schedule=schedule)
    if not callable(fn):
        raise TypeError(f"chain: fn is {fn!r}; it must be callable")
    function, owner = rewrite.function_and_owner(fn)

    def as_chain(closed: Any, *arrays: Any) -> Any:
        """The results of a program's jaxpr, as one chain."""
        jaxpr = closed.jaxpr
        inside = compat.closed([*jaxpr.constvars, *jaxpr.invars], jaxpr.eqns, *jaxpr.outvars)
        try:
            found = chain_of(inside, schedule, device_of(None))
        except Broken as why:
            raise ValueError(f"chain: fn is not one chain: {why}") from None
        if len(found.products) < 2:
            raise ValueError(f"chain: fn has {len(found.products)} products; a chain has at least two")
        return chain_p.bind(*closed.consts, *arrays, jaxpr=inside, schedule=schedule)

    @functools.wraps(fn, updated=())
    def chained(*args: Any, **kwargs: Any) -> Any:
        return rewrite.evaluated(function, (*owner, *args), kwargs, schedule, _every_one, as_chain)

    return chained


def _every_one(problem: GemmProblem) -> bool:
    """Also products that XLA would merge with their neighbours are ours."""
    return True
