"""``accelerate``: traces a function and replaces its products, also those inside other primitives."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import gc
import inspect
import operator
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, ParamSpec, Protocol, TypeVar, cast, overload

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, primitives

from jax_streamk import compat
from jax_streamk.accelerate import fragments, fusion, grouping, joined, scaled
from jax_streamk.accelerate.decisions import decide
from jax_streamk.accelerate.equations import Equations
from jax_streamk.accelerate.followers import may_have_epilogue
from jax_streamk.accelerate.products import Products, products_of
from jax_streamk.device import Device, device_of
from jax_streamk.plan import alternatives
from jax_streamk.plan.plan import Plan
from jax_streamk.plan.problem import GemmProblem
from jax_streamk.product import kinds, primitive
from jax_streamk.product.dense import Dense
from jax_streamk.schedules import PerPass, Schedule, check_schedule
from jax_streamk.tuning import tune, tuned

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Where = Callable[[GemmProblem], bool]


class Accelerated(Protocol[P, R_co]):
    """What ``accelerate`` returns: a function, with ``explain``."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def __get__(self, instance: Any, owner: Any = None) -> Callable[..., R_co]: ...

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Products:
        """The products of the function for these arguments, without running it.

        Arrays among the arguments may be ``jax.ShapeDtypeStruct``s. Products that XLA partitions over devices are
        listed as on one device: planned whole, with the biases, residuals and gates that they would have there.
        """
        ...


class _Place(enum.Enum):
    TRACED = enum.auto()


_TRACED = _Place.TRACED  # where an array is among other values


@dataclasses.dataclass(frozen=True)
class _Argument:
    """The place of a result that is a reference among the arrays."""

    at: int


# Equal to themselves only, and yet values: what they close over is not looked at, as by jit.
_FUNCTIONS = type, types.FunctionType, types.BuiltinFunctionType, type(jax.jit(len)), jax.custom_jvp, jax.custom_vjp


@overload
def accelerate(
    fn: Callable[P, R], *, schedule: Schedule | PerPass | None = None, where: Where | None = None
) -> Accelerated[P, R]: ...
@overload
def accelerate(
    fn: None = None, *, schedule: Schedule | PerPass | None = None, where: Where | None = None
) -> Callable[[Callable[P, R]], Accelerated[P, R]]: ...
def accelerate(
    fn: Callable[..., Any] | None = None,
    *,
    schedule: Schedule | PerPass | None = None,
    where: Where | None = None,
) -> Any:
    """``fn`` with its matrix products computed by split-K and Stream-K kernels.

    ``fn`` is traced as by ``jax.jit``, and every ``lax.dot_general`` and ``lax.ragged_dot`` in it becomes ours if a
    kernel supports it on the default device. This includes products in derivatives that ``fn`` takes, in ``jit``,
    ``scan``, ``while_loop``, ``cond``, ``shard_map`` and ``checkpoint``, and in functions with custom derivatives or
    custom ``vmap``, rules included. Scales, biases, residuals, activations and conversions that follow a
    ``lax.dot_general`` become part of its kernel where nothing else needs the values between, products that are
    multiplied become one as in ``gated_linear`` and ``ragged_gated``, and so may two or three of few rows that share
    their left operand. Where the right operand is dequantized from numbers of four or eight bits, kernels read these.

    XLA still computes products that no kernel supports (complex numbers, integers other than int8, some precisions),
    and those in derivatives of ``lax.custom_root``, in ``linear_call``, in other libraries' primitives (such as
    ``equinox.internal.noinline``) and under ``compute_on``; and, under ``Auto()`` on a GPU, products that it merges
    with their neighbours, or whose operands our kernels would copy for longer than the product takes:
    ``accelerate(fn).explain(*args)`` says which. Pallas kernels and NumPy's products stay as they are.

    Args:
      fn: a pure function that ``jax.jit`` can trace; without it, ``accelerate(schedule=...)`` is a decorator.
        Arguments may be anything. Pytrees are rebuilt as by ``jit``, so ``fn`` may modify its copy. JAX arrays in them
        are traced and NumPy arrays copied; numbers stay numbers, so shapes and control flow may depend on them; other
        objects are passed through. Results may be anything, but objects that hold arrays must be pytrees. Where ``fn``
        is a pytree, such as a module of Equinox or ``flax.nnx``, or a method of one, that is its first argument.
      schedule: as in ``matmul``, but a product that no kernel can run under it is left to XLA. This is decided when
        ``fn`` is traced: if ``vmap`` or sharding outside ``fn`` changes a product so that the schedule no longer fits,
        it raises ValueError as in ``matmul``.
      where: called with the ``GemmProblem`` (``plan(...).problem``) of each product that a kernel supports; the product
        becomes ours if it returns true. None accepts all but those that XLA merges with their neighbours or
        reads without our copies.

    Returns:
      A function like ``fn``, which can be transformed and compiled like ``fn``, with a function ``explain``.
      ``jax.jit`` around it compiles it at once, as it does ``fn``. Called outside of ``jit``, it runs operation by
      operation the first time; from the second call on with arguments of the same structure and the same values other
      than arrays, it compiles once for each of their shapes and dtypes. Then ``fn`` is not called again: what it closes
      over stays as it was, and side effects are left out, as under ``jit``. A call traces ``fn`` each time if its
      arguments include NumPy arrays, or objects (other than functions) that are equal to themselves only, since these
      may have changed. A ``jax.jit`` inside ``fn`` is compiled once for all functions with the same schedule and
      ``where``.

    Raises:
      TypeError: fn or where is not callable, or schedule is not a schedule; at a call, a result that is not a pytree
        holds arrays.
      ValueError: at a call, ``fn`` changes the state of a ``flax.nnx`` module and does not return it; use
        ``jax_streamk.flax.nnx.accelerate``, which updates it.
      RuntimeError: at a call, the default device is a GPU and this build has no CUDA kernels.
    """
    schedule = check_schedule(schedule)
    for name, value in (("fn", fn), ("where", where)):
        if value is not None and not callable(value):
            raise TypeError(f"accelerate: {name} is {value!r}; it must be callable")
    if fn is None:
        return functools.partial(accelerate, schedule=schedule, where=where)

    calls = _Calls(fn, schedule, where)

    @functools.wraps(fn, updated=())
    def accelerated(*args: Any, **kwargs: Any) -> Any:
        return calls(*args, **kwargs)

    cast(Any, accelerated).explain = calls.explain
    return accelerated


class _Calls:
    """The calls of a function with its products replaced.

    Outside of traces the second call of a signature compiles, so that a function made to be called once does not.
    """

    def __init__(self, fn: Callable[..., Any], schedule: Schedule | PerPass, where: Where | None):
        self._given, self._schedule, self._where = fn, schedule, where
        function, self._owner = function_and_owner(fn)
        self._fn = functools.wraps(function, updated=())(lambda *args, **kwargs: _checked(function, *args, **kwargs))
        self._programs = functools.lru_cache(64)(lambda rewriter, signature: _Compiled())

    def __reduce__(self) -> Any:  # without compiled programs
        return type(self), (self._given, self._schedule, self._where)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rewriter = _rewriter(self._schedule, self._where)
        given = _Arguments((*self._owner, *args), kwargs)
        signature = given.signature if compat.outside_of_traces() else None
        if signature is not None:
            program = self._programs(rewriter, signature)
            if program.compiled is None and program.was_called:
                program.compiled = self._compiled(rewriter, given.without_arrays())
            program.was_called = True
            if program.compiled is not None:
                return program.compiled(*given.arrays).of(given)
        return rewriter.call(self._fn, given)

    def _compiled(self, rewriter: _Rewriter, others: _Arguments) -> Callable[..., _Results]:
        def program(*arrays: jax.Array) -> _Results:
            return rewriter.results(self._fn, others.with_arrays(arrays))

        program.__name__ = getattr(self._fn, "__name__", program.__name__)
        return jax.jit(program)

    def explain(self, *args: Any, **kwargs: Any) -> Products:
        measured: fragments.Measured = {}
        ends: dict[Any, str] = {}
        rewriter = _Rewriter(self._schedule, self._where, measured, ends)
        given = _Arguments((*self._owner, *args), kwargs, (jax.Array, jax.ShapeDtypeStruct))
        jaxpr, _ = rewriter.trace(self._fn, given)
        return products_of(jaxpr, self._schedule, self._where, device_of(None), measured, ends)


@dataclasses.dataclass
class _Compiled:
    """What runs at calls of one signature; None at the first one."""

    was_called: bool = False
    compiled: Callable[..., _Results] | None = None


def function_and_owner(fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(a function, its first arguments) that are ``fn``: arrays of a module that is called are arguments, too."""
    if inspect.ismethod(fn) and not jax.tree_util.all_leaves([fn.__self__]):
        return fn.__func__, (fn.__self__,)
    return (fn, ()) if jax.tree_util.all_leaves([fn]) else (type(fn).__call__, (fn,))


class _Arguments:
    """The arguments of a call: arrays and references to arrays, which are traced, among values of any kind."""

    def __init__(self, args: Any, kwargs: Any, kinds: Any = jax.Array):
        self._structure: Any
        leaves, self._structure = jax.tree.flatten((args, kwargs))
        is_traced = [isinstance(x, kinds) or compat.is_reference(x) for x in leaves]
        self.arrays = [x for x, traces in zip(leaves, is_traced) if traces]
        self._others = [_TRACED if traces else x for x, traces in zip(leaves, is_traced)]

    @property
    def signature(self) -> Any:
        """What a program depends on besides the types of arrays; None if it cannot be compared by value."""
        kinds = [type(x) for x in self._others]
        if any(kind.__hash__ in (None, object.__hash__) and not issubclass(kind, _FUNCTIONS) for kind in kinds):
            return None
        # 0.0 and -0.0 are equal, and NaN is not.
        values = (repr(x) if isinstance(x, (float, complex, np.inexact)) else x for x in self._others)
        signature = self._structure, *kinds, *values
        try:
            hash(signature)
        except TypeError:
            return None
        return signature

    def without_arrays(self) -> _Arguments:
        return self.with_arrays(())

    def with_arrays(self, arrays: Sequence[Any]) -> _Arguments:
        other = copy.copy(self)
        other.arrays = list(arrays)
        return other

    def rebuilt(self) -> Any:
        """(args, kwargs), which a function may change."""
        arrays = iter(self.arrays)
        own = (x.copy() if isinstance(x, np.ndarray) else x for x in self._others)
        return self._structure.unflatten(next(arrays) if x is _TRACED else x for x in own)

    def debug_info(self, fn: Callable[..., Any]) -> Any:
        """The names that JAX's messages give a function of the arrays alone: those of ``fn`` and its arguments."""
        args, kwargs = self._structure.unflatten(self._others)
        return compat.debug_info(fn, args, kwargs, [x is _TRACED for x in self._others])


@jax.tree_util.register_pytree_node_class
class _Results:
    """Results of a call: arrays, and a function that puts them in their places, given all arrays of the call."""

    def __init__(self, arrays: Any, rebuilt: Callable[..., Any]):
        self._arrays, self._rebuilt = arrays, rebuilt

    def of(self, given: _Arguments) -> Any:
        return self._rebuilt(self._arrays, given.arrays)

    def tree_flatten(self) -> Any:
        return self._arrays, self._rebuilt

    @classmethod
    def tree_unflatten(cls, rebuilt: Any, arrays: Any) -> _Results:
        return cls(arrays, rebuilt)


def _rewriter(schedule: Schedule | PerPass, where: Where | None) -> _Rewriter:
    """The same object for the same decisions: JAX finds compiled programs by the identity of their jaxprs."""
    device = device_of(None)
    key = schedule, where, device, tuned.digest(device), tune.session_key()
    try:
        return _rewriter_of(*key)
    except TypeError:  # where has no hash
        return _rewriter_of.__wrapped__(*key)


@functools.lru_cache(64)
def _rewriter_of(
    schedule: Schedule | PerPass, where: Where | None, device: Device, digest: int, session: object
) -> _Rewriter:
    del device, digest, session
    return _Rewriter(schedule, where)


def evaluated(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    schedule: Schedule | PerPass,
    where: Where,
    by: Callable[..., Any],
) -> Any:
    """``fn`` of arguments, rewritten, by a function of its closed jaxpr and the arrays among them."""
    given = _Arguments(args, kwargs)
    jaxpr, rebuilt = _rewriter(schedule, where).trace(fn, given)
    primitive.know_sparse()
    return _Results(by(jaxpr, *given.arrays), rebuilt).of(given)


class _Rewriter:
    """Replaces products in jaxprs, and in the rules that JAX stores beside them until they are transformed.

    Adds to ``measured`` what tuning found for products, and to ``ends`` why chains end, by their first results.
    """

    def __init__(
        self,
        schedule: Schedule | PerPass,
        where: Where | None,
        measured: fragments.Measured | None = None,
        ends: dict[Any, str] | None = None,
    ):
        self._schedule, self._where, self._measured = schedule, where, measured
        self._ends = ends
        # The rewritten jaxpr by jaxpr; None: it has nothing to rewrite.
        self._rewritten: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def call(self, fn: Callable[..., Any], given: _Arguments) -> Any:
        """``fn`` of these arguments, rewritten. Only arrays are traced; other arguments and results pass through."""
        return self.results(fn, given).of(given)

    def results(self, fn: Callable[..., Any], given: _Arguments) -> _Results:
        """``call``, with its results taken apart."""
        jaxpr, rebuilt = self.trace(fn, given)
        primitive.know_sparse()
        return _Results(compat.evaluated(jaxpr, *given.arrays), rebuilt)

    def trace(self, fn: Callable[..., Any], given: _Arguments) -> tuple[Any, Callable[..., Any]]:
        """(the rewritten jaxpr of ``fn``, a function from its results and arguments to the results of ``fn``)."""
        leaves: list[Any] = []
        tree: Any = None

        def traced(*arrays: jax.Array) -> list[Any]:
            nonlocal leaves, tree
            args, kwargs = given.with_arrays(arrays).rebuilt()
            out, tree = jax.tree.flatten(fn(*args, **kwargs))
            place = {id(x): _Argument(i) for i, x in enumerate(arrays) if compat.is_reference(x)}
            # Tracers must not outlive the trace.
            leaves = [place.get(id(x), _TRACED if isinstance(x, jax.core.Tracer) else x) for x in out]
            return [x for x, leaf in zip(out, leaves) if leaf is _TRACED]

        def rebuilt(out: Any, arrays: Any) -> Any:
            results = iter(out)
            own = (x.copy() if isinstance(x, np.ndarray) else x for x in leaves)
            placed = (arrays[x.at] if isinstance(x, _Argument) else x for x in own)
            return tree.unflatten(next(results) if x is _TRACED else x for x in placed)

        cast(Any, traced).__fun_debug_info__ = given.debug_info(fn)
        return self._value(jax.make_jaxpr(traced)(*given.arrays)), rebuilt

    def _value(self, value: Any) -> Any:
        """A rewritten parameter of an equation: a jaxpr, a tuple that may contain some, or anything else."""
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            if value not in self._rewritten:
                eqns = self._eqns(value)
                self._rewritten[value] = None if eqns is value.eqns else compat.with_eqns(value, eqns)
            return self._rewritten[value] or value
        if isinstance(value, jax.stages.Traced):
            jaxpr = self._value(value.jaxpr)
            return value if jaxpr is value.jaxpr else compat.traced_with_jaxpr(value, jaxpr)
        if compat.is_hi(value):
            params = self._params(self._HI_RULES, value.params)
            return value if params is value.params else compat.hi_with_params(value, params)
        return _map(self._value, value) if isinstance(value, tuple) else value

    def _params(self, rules: Any, params: dict[str, Any]) -> dict[str, Any]:
        """Rewritten parameters, some of them by rules of their own; ``params`` itself if nothing changes."""
        new = {name: rules.get(name, _Rewriter._value)(self, value) for name, value in params.items()}
        return params if all(new[name] is value for name, value in params.items()) else new

    def _eqns(self, jaxpr: Any) -> list[Any]:
        """The rewritten equations of a jaxpr; its own list if nothing changes."""
        outvars = getattr(jaxpr, "jaxpr", jaxpr).outvars
        has_products = any(eqn.primitive in kinds.KINDS for eqn in jaxpr.eqns)
        if not has_products and not scaled.has_numbers(jaxpr.eqns):
            return _map(functools.partial(self._eqn, None, {}), jaxpr.eqns)
        program = Equations(jaxpr.eqns, outvars)
        measured = fragments.measured(program, self._schedule, self._where, device_of(None), self._eqns_of)
        if self._measured is not None:
            self._measured.update(measured)
        return self._eqns_of(program, measured)

    def _eqns_of(self, program: Equations, measured: fragments.Measured) -> Any:
        """``_eqns`` of a program with products, by what tuning found for them."""
        device = device_of(None)
        program = scaled.by_numbers(program, self._schedule, self._where, device, measured)
        eqns = _map(functools.partial(self._eqn, program, measured), program.eqns)
        if not any(map(may_have_epilogue, eqns)):
            return eqns
        folded = _with_transposes(program, eqns)
        program = program.with_eqns(eqns) if folded is eqns else Equations(folded, program.outvars)
        eqns = fusion.fused(program, device, measured) or folded
        if self._where is not None or measured or device.platform != "cuda":
            return eqns
        eqns = joined.joined(eqns, program.outvars, self._schedule, device) or eqns
        return grouping.chained(eqns, program.outvars, self._schedule, device, self._ends) or eqns

    def _eqn(self, program: Any, measured: fragments.Measured, eqn: Any) -> Any:
        if eqn.primitive in kinds.KINDS:
            times = measured.get(eqn.outvars[0])
            decision = decide(eqn, program, self._schedule, self._where, device_of(None), times)
            return kinds.of_ours(eqn, self._schedule) if decision.is_ours else eqn
        # A jaxpr in another library's primitive may have to match other parameters: Equinox keeps a copy and compares.
        if eqn.primitive not in compat.higher_order or eqn.ctx.compute_type is not None:
            return eqn
        params = self._params(self._RULES.get(eqn.primitive, {}), eqn.params)
        return eqn if params is eqn.params else eqn.replace(params=params)

    def _jaxpr_rule(self, rule: Any) -> Callable[..., Any]:
        """A rule that JAX calls for a jaxpr."""
        return compat.wrapped(lambda *args: self._value(rule.call_wrapped(*args)), rule)

    def _python_rule(self, rule: Any) -> Callable[..., Any]:
        """A rule that JAX calls with operands."""
        return compat.wrapped(self._rule(compat.unwrapped(rule)), rule)

    def _rule(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(rule)(lambda *args: self.call(rule, _Arguments(args, {})))

    def _rules(self, rules: Any) -> Any:
        return rules and tuple(map(self._rule, rules))

    _RULES: ClassVar = {
        primitives.custom_jvp_call_p: {"jvp_jaxpr_fun": _jaxpr_rule},
        primitives.custom_vjp_call_p: {"fwd_jaxpr_thunk": _jaxpr_rule, "bwd": _python_rule},
        compat.custom_vmap_p: {"rule": _rule},
    }
    # The rules of "hi" primitives, by the names that JAX's have in common.
    _HI_RULES: ClassVar = dict(jvp_rule=_rule, fwd=_rule, bwd=_rule, remat_rules=_rules, solve=_rule)


def _checked(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn(*args, **kwargs)`` of rebuilt arguments. Raises if a change to a module would be lost or a tracer leak."""
    modules = _nnx_modules((args, kwargs))
    before: list[Any] = [jax.tree.flatten(module) for module in modules]
    try:
        out = fn(*args, **kwargs)
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            error.add_note(f"accelerate: {_NNX_REMEDY}")
        raise
    check_results(out)
    returned = set(map(id, jax.tree.leaves(out)))
    for module, (old, structure) in zip(modules, before):
        changed: Any
        new, changed = jax.tree.flatten(module)
        if changed == structure:
            new = [x for x, y in zip(new, old) if x is not y]
        if not returned.issuperset(map(id, new)) or (changed != structure and not new):
            message = f"accelerate: fn changes {type(module).__name__}, an argument, and does not return it"
            raise ValueError(f"{message}. {_NNX_REMEDY}")
    return out


def check_results(out: Any) -> None:
    """Raises TypeError if a result that is not a pytree holds tracers of the current trace."""
    for x in jax.tree.leaves(out):
        is_plain = isinstance(x, (jax.Array, jax.core.Tracer, np.generic, int, float, complex, str, bytes))
        if not is_plain and _holds_tracer(x):
            raise TypeError(
                f"accelerate: a result of type {type(x).__name__} holds arrays and is not a pytree. Return the arrays, "
                "or make it one: a class with jax.tree_util.register_dataclass or register_pytree_node, a function "
                "with jax.tree_util.Partial"
            )


_NNX_REMEDY = "Use jax_streamk.flax.nnx.accelerate and pass it the module: it updates modules as flax.nnx.jit does."


def _nnx_modules(tree: Any) -> list[Any]:
    kind = getattr(sys.modules.get("flax.nnx"), "Pytree", None)
    if kind is None:
        return []
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)) if isinstance(x, kind)]


def _holds_tracer(x: Any) -> bool:
    """Whether an object refers to a tracer of the current trace, other than through modules and classes."""
    seen: dict[int, Any] = {}
    waiting = [x]
    while waiting:
        x = waiting.pop()
        if compat.is_of_current_trace(x):
            return True
        if id(x) in seen or isinstance(x, (type, types.ModuleType, jax.Array)):
            continue
        seen[id(x)] = x  # kept alive, or another object may get its id
        if isinstance(x, types.FunctionType):  # but not its globals
            waiting += [x.__defaults__, x.__kwdefaults__, x.__closure__, x.__dict__]
        elif isinstance(x, np.ndarray) and x.dtype == object:
            waiting += x.flat
        else:
            waiting += gc.get_referents(x)
    return False


def _with_transposes(program: Equations, eqns: list[Any]) -> list[Any]:
    """Folds transposes into the products before them: XLA does that for its own dot, but not for a custom call."""
    new = list(eqns)
    for at, eqn in enumerate(eqns):
        if eqn.primitive is not lax.transpose_p or not isinstance(eqn.invars[0], Var):
            continue
        maker = program.maker.get(eqn.invars[0])
        if maker is None or new[maker] is None or program.user(eqn.invars[0]) is None:
            continue
        before = new[maker]
        if not kinds.is_plain(before, Dense) or before.params["product"].permutation or kinds.is_scaled(before):
            continue
        turned = before.params["product"].replaced(permutation=eqn.params["permutation"])
        folded = _planned(before, turned)
        # A nested batch is worth a transpose of its result: in another order, matrices would be copied.
        if folded is not None and (_is_nested(folded) or not _is_nested(_planned(before, before.params["product"]))):
            new[maker] = before.replace(params=before.params | dict(product=turned), outvars=eqn.outvars)
            new[at] = None
    remaining = [eqn for eqn in new if eqn is not None]
    return remaining if len(remaining) < len(eqns) else eqns


def _planned(eqn: Any, product: Dense) -> Plan | None:
    types = product.by_role([x.aval for x in eqn.invars])
    return alternatives.plan_or_none(product, types, eqn.params["schedule"], device_of(None))


def _is_nested(plan: Plan | None) -> bool:
    return plan is not None and plan.problem is not None and plan.kernel is not None and plan.problem.inner_batch > 1


def _map(f: Callable[[Any], Any], values: Any) -> Any:
    """``f`` of each value, as the same kind of sequence; ``values`` itself if ``f`` changed nothing."""
    new = [f(value) for value in values]
    if all(map(operator.is_, new, values)):
        return values
    return values._make(new) if hasattr(values, "_make") else type(values)(new)
