"""What ``accelerate`` does to a function: which products become ours, and how they are found inside other primitives."""

import collections
import functools
import operator
import weakref

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, primitives

from jax_streamk import compat, lowering, primitive
from jax_streamk.device import device_of
from jax_streamk.schedules import check_schedule

_TRACED = object()
# Their bodies are not XLA's to compile.
_FOREIGN = ("pallas_call", "core_map", "mpmd_map", "cudnn_fusion")


def accelerate(fn, *, schedule=None, where=None):
    """``fn`` with its matrix products by split-K and Stream-K kernels.

    ``fn`` is traced as ``jax.jit`` traces it, and every ``lax.dot_general`` in it that a kernel can serve on the default device
    becomes ours: those of derivatives that ``fn`` takes too, and those inside ``jit``, ``scan``, ``while_loop``, ``cond``,
    ``shard_map``, ``checkpoint`` (whose policies take ours for JAX's), and functions with their own rules for derivatives or
    ``vmap``, rules included. Other products stay XLA's (those of complex numbers, of integers but int8, of a precision that no
    kernel has), as do those of ``lax.custom_root``'s derivatives and of ``linear_call``, the bodies of Pallas kernels, what
    ``compute_on`` moves elsewhere, and what NumPy multiplies.

    Args:
      fn: a pure function that ``jax.jit`` could trace. Arguments and results may be anything: arrays, pytrees with or without other
        leaves, other objects. Numbers stay numbers, so that shapes and control flow may depend on them.
      schedule: as in ``matmul``, but a product that no kernel can run under it stays XLA's. That is decided inside ``fn``: where
        ``vmap`` or sharding around the result changes a product so that the schedule cannot run it, it raises ValueError as in
        ``matmul``.
      where: called with the ``GemmProblem`` of each product that a kernel can serve (``plan(...).problem``); the product is ours
        where it returns true. None admits all.

    Returns:
      A function like ``fn``, to be transformed and compiled as ``fn`` would be. Like that of ``jax.checkpoint`` it traces ``fn``
      at every call that is not under ``jax.jit``, so that what ``fn`` closes over may change between calls.

    Raises:
      TypeError: fn or where is not callable, or schedule is not a schedule.
      RuntimeError: at a call, if the default device is a GPU and this build has no CUDA kernels.
    """
    for name, value in (("fn", fn), ("where", where)):
        if not callable(value) and (name, value) != ("where", None):
            raise TypeError(f"accelerate: {name} is {value!r}; it must be callable")
    rewriter = _Rewriter(check_schedule(schedule), where)

    @functools.wraps(fn, updated=())
    def accelerated(*args, **kwargs):
        return rewriter.call(fn, *args, **kwargs)

    return accelerated


class _Rewriter:
    """Replaces products in jaxprs, and in the functions that JAX keeps beside jaxprs until they are transformed."""

    def __init__(self, schedule, where):
        self._schedule, self._where = schedule, where
        # What JAX compiled for a jaxpr it finds by the jaxpr's identity, so a jaxpr is rewritten once; None: nothing to rewrite.
        self._rewritten = weakref.WeakKeyDictionary()

    def call(self, fn, *args, **kwargs):
        """``fn(*args, **kwargs)``. Arguments are closed over, so they need not be arrays; results that were not traced pass by."""
        leaves = tree = None

        def traced():
            nonlocal leaves, tree
            out, tree = jax.tree.flatten(fn(*args, **kwargs))
            # Tracers must not outlive the trace.
            leaves = [_TRACED if isinstance(x, jax.core.Tracer) else x for x in out]
            return [x for x in out if isinstance(x, jax.core.Tracer)]

        jaxpr = self._value(jax.make_jaxpr(traced)())
        results = iter(jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts))
        return tree.unflatten(next(results) if x is _TRACED else x for x in leaves)

    def _value(self, value):
        """A parameter of an equation: a jaxpr, a tuple in which there may be some, or anything else."""
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            if value not in self._rewritten:
                eqns = _with_transposes(value, _map(self._eqn, value.eqns))
                self._rewritten[value] = None if eqns is value.eqns else compat.with_eqns(value, eqns)
            return self._rewritten[value] or value
        return _map(self._value, value) if isinstance(value, tuple) else value

    def _eqn(self, eqn):
        if eqn.primitive.name in _FOREIGN or eqn.ctx.compute_type is not None:
            return eqn
        if eqn.primitive is compat.dot_general_p:
            if not self._is_ours(*(x.aval for x in eqn.invars), **eqn.params):
                return eqn
            return eqn.replace(primitive=primitive.dot_general_p, params=eqn.params | dict(schedule=self._schedule, permutation=None))
        rules = self._RULES.get(eqn.primitive, {})
        params = {name: rules.get(name, _Rewriter._value)(self, value) for name, value in eqn.params.items()}
        return eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)

    def _is_ours(self, lhs, rhs, **params):
        made = _plan(lhs, rhs, schedule=self._schedule, **params)
        return made is not None and made.kernel is not None and (self._where is None or bool(self._where(made.problem)))

    def _jaxpr_rule(self, rule):
        """A rule that JAX calls for a jaxpr."""
        return compat.wrapped(lambda *args: self._value(rule.call_wrapped(*args)), rule)

    def _python_rule(self, rule):
        """A rule that JAX calls with operands."""
        return compat.wrapped(functools.partial(self.call, rule.call_wrapped), rule)

    def _vmap_rule(self, rule):
        return functools.partial(self.call, rule)

    def _policy(self, policy):
        """A policy of ``jax.checkpoint`` that decides about our product as about JAX's."""
        return None if policy is None else primitive.as_jaxs(policy, (primitive.dot_general_p,))

    _RULES = {
        primitives.custom_jvp_call_p: {"jvp_jaxpr_fun": _jaxpr_rule},
        primitives.custom_vjp_call_p: {"fwd_jaxpr_thunk": _jaxpr_rule, "bwd": _python_rule},
        primitives.remat_p: {"policy": _policy},
        compat.custom_vmap_p: {"rule": _vmap_rule},
    }


def _plan(lhs, rhs, *, out_sharding, **params):
    """The plan of a product on the default device, or None where no kernel can run it under an explicit schedule."""
    del out_sharding
    try:
        return lowering.plan(lhs, rhs, device=device_of(None), **params)[0]
    except ValueError:
        return None


def _with_transposes(jaxpr, eqns):
    """Products of ours take the transpose that follows, as in derivatives: XLA has its product store that order, not a custom call."""
    operands = (*(x for eqn in eqns for x in eqn.invars), *getattr(jaxpr, "jaxpr", jaxpr).outvars)
    uses = collections.Counter(x for x in operands if isinstance(x, Var))
    products = {
        eqn.outvars[0]: at
        for at, eqn in enumerate(eqns)
        if eqn.primitive is primitive.dot_general_p and eqn.params["permutation"] is None and uses[eqn.outvars[0]] == 1
    }
    new = list(eqns)
    for at, eqn in enumerate(eqns):
        if eqn.primitive is lax.transpose_p and isinstance(eqn.invars[0], Var) and eqn.invars[0] in products:
            product = eqns[products[eqn.invars[0]]]
            params = product.params | eqn.params
            if _plan(*(x.aval for x in product.invars), **params) is not None:
                new[products[eqn.invars[0]]] = product.replace(params=params, outvars=eqn.outvars)
                new[at] = None
    kept = [eqn for eqn in new if eqn is not None]
    return kept if len(kept) < len(eqns) else eqns


def _map(f, values):
    """``values`` with ``f`` applied, as the kind of sequence that it was; the same object where ``f`` changed nothing."""
    new = [f(value) for value in values]
    if all(map(operator.is_, new, values)):
        return values
    return values._make(new) if hasattr(values, "_make") else type(values)(new)
