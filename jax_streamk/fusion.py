"""Fuses what follows a product into its kernel's epilogue, in the equations of a jaxpr.

From each product a chain of equations is followed for as long as nothing else uses the value between: scales, a bias, a
residual, an activation, conversions, and reshapes among them. The longest part that pays becomes one ``linear_p``:

- A bias and a scale save a rounding at least.
- A residual saves a pass over the result if the sum is stored, or read more than once.
- An activation saves one if its result is stored. If only elementwise operations and reductions read it, XLA merges it
  with them, and a kernel would do no less.

By the model, the kernel must not take longer than that saves.

Sums stay in float32 between, so a fused chain rounds less often than its equations, never more.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var

from jax_streamk import activations, compat, primitive
from jax_streamk.epilogue import Epilogue

_RESHAPES = ("reshape", "squeeze", "expand_dims")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
# What XLA merges with what it reads and with what reads it.
_MERGED = frozenset(
    """abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bitcast_convert_type broadcast_in_dim
    cbrt ceil clamp convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expand_dims expm1
    floor ge gt imag integer_pow iota is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not
    one_minus_square optimization_barrier or pad population_count pow pvary real reduce_and reduce_max reduce_min
    reduce_or reduce_precision reduce_prod reduce_sum rem reshape rev round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh slice sqrt square squeeze stop_gradient sub tan tanh
    transpose xor""".split()
)
_LONGEST_ACTIVATION = 16  # equations
_FREE = 1.01  # times as long a kernel, for a rounding


class Program:
    """The equations of a jaxpr, with who makes and who uses each value."""

    def __init__(self, eqns: Sequence[Any], outvars: Sequence[Any], constants: dict[Var, float] | None = None):
        self.eqns = eqns
        self.results = {x for x in outvars if isinstance(x, Var)}
        self.maker: dict[Any, int] = {}
        self.uses: dict[Any, list[int]] = collections.defaultdict(list)
        for at, eqn in enumerate(eqns):
            for out in eqn.outvars:
                self.maker[out] = at
            for x in {x for x in eqn.invars if isinstance(x, Var)}:
                self.uses[x].append(at)
        self._constants: dict[Any, float | None] = dict(constants or {})

    def user(self, x: Var) -> int | None:
        """The only equation that uses a value; None if there are more or it is a result."""
        uses = self.uses[x]
        return uses[0] if len(uses) == 1 and x not in self.results else None

    def eqn_of(self, x: Any) -> Any:
        """The equation that makes a value; None if it is an argument or a constant."""
        at = self.maker.get(x) if isinstance(x, Var) else None
        return None if at is None else self.eqns[at]

    def constant(self, x: Any) -> float | None:
        """The one number that all elements of ``x`` are, if it is known."""
        if isinstance(x, Literal):
            return _literal(x)
        if x not in self._constants:
            self._constants[x] = self._computed(x)
        return self._constants[x]

    def _computed(self, x: Any) -> float | None:
        eqn, aval = self.eqn_of(x), x.aval
        if eqn is None or not _is_movable(eqn) or not jnp.issubdtype(aval.dtype, np.floating):
            return None
        operands = []
        for operand in eqn.invars:
            if (number := self.constant(operand)) is None:
                return None
            operands.append(activations.constant(number))
        made = activations.applied(eqn.primitive.name, eqn.params, *operands)
        value = None if made is None else activations.value_of(made)
        return None if value is None else float(np.asarray(value, aval.dtype))

    def is_stored(self, x: Var, taken: Any = ()) -> bool:
        """Whether somebody reads ``x`` from memory, other than what XLA merges with whatever makes ``x``."""
        if x in self.results:
            return True
        for at in self.uses[x]:
            eqn = self.eqns[at]
            if at in taken or not is_merged(eqn):
                return True
            if eqn.primitive.name in (*_RESHAPES, "transpose", "copy", "copy_p") and self.is_stored(
                eqn.outvars[0], taken
            ):
                return True
        return False


def is_merged(eqn: Any) -> bool:
    """Whether XLA merges an equation with those that it reads from and that read it."""
    if eqn.primitive.name in _CALLS:
        return all(map(is_merged, _body(eqn).eqns))
    return eqn.primitive.name in _MERGED


def _body(eqn: Any) -> Any:
    """The jaxpr of a call."""
    body = next(eqn.params[name] for name in ("jaxpr", "call_jaxpr") if name in eqn.params)
    return getattr(body, "jaxpr", body)


@dataclasses.dataclass(frozen=True)
class _Operand:
    """A bias or residual: a value, by the dtypes that hold it exactly, and how it enters the sum."""

    values: dict[np.dtype, Any]
    scale: float = 1.0
    batch: int = 0  # leading dimensions of a bias that are the product's batch


@dataclasses.dataclass(frozen=True)
class _Chain:
    """A product and the equations that follow it, up to one: ``out`` is that one's result."""

    out: Var
    taken: tuple[int, ...]
    alpha: float = 1.0
    bias: _Operand | None = None
    residual: _Operand | None = None
    activation: str | None = None
    before: np.dtype | None = None  # what the activation was given
    swapped: bool = False
    last: str = "product"

    @property
    def adds(self) -> tuple[_Operand, ...]:
        return tuple(x for x in (self.bias, self.residual) if x is not None)


def fused(
    program: Program,
    is_ours: Callable[[Any], bool],
    time: Callable[..., float | None],
    passing: Callable[[int, int], float],
) -> list[Any] | None:
    """The equations of a program with epilogues in their products; None if there is nothing to fuse.

    Args:
      program: may have products of ours.
      is_ours: whether an equation is one of them.
      time: the expected time of a product of these types and parameters; None if no kernel runs it.
      passing: the expected time of moving a number of bytes in a number of launches.
    """
    products = [at for at, eqn in enumerate(program.eqns) if is_ours(eqn)]
    taken: set[int] = set()
    made: dict[int, list[Any]] = {}
    # The last product first: its residual may be the sum that ends another's chain.
    for at in reversed(products):
        found = _Finder(program, at, taken, is_ours, time, passing).best()
        if found is not None:
            chain, eqns = found
            taken.update((at, *chain.taken))
            made[chain.taken[-1]] = eqns
    if not made:
        return None
    out: list[Any] = []
    for at, eqn in enumerate(program.eqns):
        out += made.get(at, [] if at in taken else [eqn])
    return _without_unused(program, out)


def _without_unused(program: Program, eqns: list[Any]) -> list[Any]:
    """Without the equations that only served what was fused, such as the broadcast of a bias."""
    used, kept = set(program.results), []
    for eqn in reversed(eqns):
        if any(x in used or not program.uses[x] for x in eqn.outvars) or not is_merged(eqn):
            used.update(x for x in eqn.invars if isinstance(x, Var))
            kept.append(eqn)
    return kept[::-1]


class _Finder:
    """Follows the chain of one product."""

    def __init__(self, program, at, taken, is_ours, time, passing):
        self._program, self._taken, self._is_ours, self._time, self._passing = program, taken, is_ours, time, passing
        self._eqn = eqn = program.eqns[at]
        self._product = eqn.outvars[0].aval
        (contract, batch) = eqn.params["dimension_numbers"]
        self._batch = len(batch[0])
        lhs, rhs = (x.aval for x in eqn.invars)
        self._free = [
            tuple(size for i, size in enumerate(x.shape) if i not in (*contract[side], *batch[side]))
            for side, x in enumerate((lhs, rhs))
        ]
        self._lead = tuple(lhs.shape[i] for i in batch[0])

    def best(self):
        """The longest chain that pays, and its equations; None if there is none."""
        chain = self._start()
        if chain is None:
            return None
        chains = []
        while (chain := self._next(chain)) is not None:
            chains.append(chain)
        for chain in reversed(chains):
            if self._pays(chain) and (eqns := self._emit(chain)) is not None:
                return chain, eqns
        return None

    def _start(self):
        if not jnp.issubdtype(self._product.dtype, np.floating):
            return None
        chain = _Chain(self._eqn.outvars[0], ())
        permutation = self._eqn.params["permutation"]
        if permutation is None:
            return chain
        if self._eqn.params["out_sharding"] is not None:
            return None
        # A transpose of the free dimensions is the product of the operands in the other order.
        lead, left, right = (list(range(n)) for n in (self._batch, len(self._free[0]), len(self._free[1])))
        left, right = [len(lead) + i for i in left], [len(lead) + len(left) + i for i in right]
        return dataclasses.replace(chain, swapped=True) if list(permutation) == lead + right + left else None

    def _sizes(self, swapped):
        """(batch, free of the first operand, free of the second)"""
        return self._lead, *(self._free[::-1] if swapped else self._free)

    def _next(self, chain):
        """The chain with what uses its result; None if it ends there."""
        program = self._program
        user = program.user(chain.out)
        if user is not None and user not in self._taken and _is_movable(program.eqns[user]):
            eqn = program.eqns[user]
            step = dataclasses.replace(chain, out=eqn.outvars[0], taken=(*chain.taken, user))
            name = eqn.primitive.name
            if name == "convert_element_type" and jnp.issubdtype(step.out.aval.dtype, np.floating):
                narrows = step.out.aval.dtype.itemsize < chain.out.aval.dtype.itemsize
                return dataclasses.replace(step, last="narrower" if narrows else "wider")
            if name in ("copy", "copy_p"):
                return step
            if self._is_reshape(eqn):
                return dataclasses.replace(step, last="layout")
            if chain.activation is None:
                # A scale may be the first step of an activation: tanh(x) as -tanh(-x).
                found = self._activation(chain) if name in ("mul", "div", "neg") else None
                found = found or self._step(chain, step, eqn)
                if found is not None:
                    return found
        return self._activation(chain) if chain.activation is None else None

    def _is_reshape(self, eqn):
        if eqn.primitive.name == "broadcast_in_dim":  # that only adds dimensions of size 1
            return len(eqn.invars) == 1 and eqn.outvars[0].aval.size == eqn.invars[0].aval.size
        return eqn.primitive.name == "squeeze" or (
            eqn.primitive.name in _RESHAPES and eqn.params.get("dimensions") is None
        )

    def _step(self, chain, step, eqn):
        """The chain with an addition or a scale."""
        name = eqn.primitive.name
        if name not in ("add", "add_any", "sub", "mul", "div", "neg") or step.out.aval.shape != chain.out.aval.shape:
            return None
        if eqn.params.get("out_dtype") is not None:
            return None
        if name == "neg":
            return self._scaled(step, -1.0)
        x, y = eqn.invars
        if x is y:
            return None
        is_first = x is chain.out
        other = y if is_first else x
        factor = self._program.constant(other)
        if name in ("mul", "div"):
            if factor is None or (name == "div" and not is_first) or not factor or not math.isfinite(factor):
                return None
            return self._scaled(step, factor if name == "mul" else 1 / factor)
        if factor is not None:
            return None
        sign = -1.0 if name == "sub" and is_first else 1.0
        if name == "sub" and not is_first:
            step = self._scaled(step, -1.0)
        return step and self._added(step, other, chain.out.aval.shape, sign)

    def _scaled(self, chain, factor):
        """All of a chain times a factor; None if a bias would be rounded."""
        if not math.isfinite(1 / factor) or (chain.bias is not None and abs(math.frexp(factor)[0]) != 0.5):
            return None
        bias, residual = (x and dataclasses.replace(x, scale=factor * x.scale) for x in (chain.bias, chain.residual))
        return dataclasses.replace(chain, alpha=factor * chain.alpha, bias=bias, residual=residual, last="scale")

    def _added(self, chain, x, shape, sign):
        if chain.bias is None:
            for swapped in (chain.swapped, not chain.swapped) if not chain.adds else (chain.swapped,):
                # The other order of operands, where the result's elements lie in the same order.
                is_pinned = self._eqn.params["out_sharding"] is not None
                if swapped != chain.swapped and (is_pinned or all(math.prod(free) > 1 for free in self._free)):
                    continue
                found = self._bias(x, shape, swapped)
                if found is not None:
                    bias = dataclasses.replace(found, scale=sign)
                    return dataclasses.replace(chain, bias=bias, swapped=swapped, last="bias")
        if chain.residual is None and x.aval.shape == shape and self._is_residual(x):
            scale = sign
            made = self._program.eqn_of(x)
            if made is not None and made.primitive.name == "mul" and self._program.user(x) is not None:
                for factor, scaled in (made.invars, made.invars[::-1]):
                    number = self._program.constant(factor)
                    if number and math.isfinite(number) and scaled.aval.shape == shape:
                        x, scale = scaled, sign * number
                        break
            return dataclasses.replace(chain, residual=_Operand(self._exact(x), scale), last="residual")
        return None

    def _is_residual(self, x):
        """Whether memory holds a value anyway, whatever reads it."""
        program = self._program
        made = program.eqn_of(x)
        if made is None or program.maker[x] in self._taken or not is_merged(made):
            return True
        if program.is_stored(x, self._taken) or len(program.uses[x]) > 1:
            return True
        name = made.primitive.name
        if name in (*_RESHAPES, "convert_element_type"):
            return self._is_residual(made.invars[0])
        if name == "mul" and any(program.constant(y) is not None for y in made.invars):
            return any(program.constant(y) is None and self._is_residual(y) for y in made.invars)
        # A sum that another product's kernel may make.
        return name in ("add", "add_any") and any(
            isinstance(y, Var) and program.user(y) is not None and (of := program.eqn_of(y)) and self._is_ours(of)
            for y in made.invars
        )

    def _bias(self, x, shape, swapped):
        """``x``, which is added to a value of this shape, as a bias: with one element for each column."""
        lead, _, columns = self._sizes(swapped)
        n = math.prod(columns)
        source, sizes = self._spread(x, shape)
        if source is None:
            return None
        cut, covered = len(shape), 1
        while cut and (covered < n or shape[cut - 1] == 1) and sizes[cut - 1] == shape[cut - 1]:
            cut -= 1
            covered *= shape[cut]
        if covered != n:
            return None
        if math.prod(sizes[:cut]) == 1:
            return _Operand(self._exact(source))
        batch = len(lead)
        is_whole = shape == (*lead, *self._sizes(swapped)[1], *columns)
        if is_whole and batch <= cut and sizes[:batch] == lead and math.prod(sizes[batch:cut]) == 1:
            return _Operand(self._exact(source), batch=batch)
        return None

    def _spread(self, x: Any, shape: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
        """A value that broadcasts to ``shape``, before it was broadcast, and its sizes in that shape's dimensions."""
        sizes = list(x.aval.shape)
        if isinstance(x, Literal) or len(sizes) != len(shape):
            return None, ()
        while (made := self._program.eqn_of(x)) is not None:
            name = made.primitive.name
            if name == "broadcast_in_dim" and len(sizes) == len(made.outvars[0].aval.shape) and len(made.invars) == 1:
                source, dims = made.invars[0], made.params["broadcast_dimensions"]
                if isinstance(source, Literal):
                    return None, ()
                given = dict(zip(map(int, dims), source.aval.shape))
                sizes = [min(size, given.get(i, 1)) for i, size in enumerate(sizes)]
                if math.prod(sizes) != math.prod(source.aval.shape):
                    return None, ()
                x = source
                if len(source.aval.shape) != len(sizes):
                    break
            elif name in ("pvary", "convert_element_type"):
                if name == "convert_element_type" and not _is_exact(made):
                    break
                inner = self._program.eqn_of(made.invars[0])
                if inner is None or inner.primitive.name not in ("broadcast_in_dim", "pvary", "convert_element_type"):
                    break
                x = made.invars[0]
            else:
                break
        return x, tuple(sizes)

    def _exact(self, x):
        """A value by dtype, as it was before conversions that lost nothing."""
        values = {x.aval.dtype: x}
        while (made := self._program.eqn_of(x)) is not None:
            if made.primitive.name in _RESHAPES and made.params.get("dimensions") is None:
                inner = self._program.eqn_of(made.invars[0])
                if inner is None or not _is_exact(inner):
                    break
            elif not _is_exact(made):
                break
            x = made.invars[0]
            values.setdefault(x.aval.dtype, x)
        return values

    def _activation(self, chain):
        """The chain with the activation that follows; None if none does."""
        program, x = self._program, chain.out
        values: dict[Any, activations.Polynomial] = {x: activations.X}
        waiting: list[int] = list(program.uses[x])
        taken: set[int] = set()
        if x in program.results:
            return None
        heapq.heapify(waiting)
        while waiting and len(taken) < _LONGEST_ACTIVATION:
            at = heapq.heappop(waiting)
            if at in taken:
                continue
            eqn = program.eqns[at]
            is_free = at not in self._taken and _is_movable(eqn)
            value = _value(eqn, values, program.constant) if is_free else None
            if value is None or eqn.outvars[0].aval.shape != x.aval.shape:
                return None
            out = eqn.outvars[0]
            values[out] = value
            taken.add(at)
            for user in program.uses[out]:
                heapq.heappush(waiting, user)
            inner = [y for y in values if y is not out]
            if all(y not in program.results and taken.issuperset(program.uses[y]) for y in inner):
                eps = max(float(jnp.finfo(y.aval.dtype).eps) for y in (x, out))
                name = activations.activation_of(value, eps)
                if name is not None and out.aval.dtype.itemsize >= x.aval.dtype.itemsize:
                    return dataclasses.replace(
                        chain,
                        out=out,
                        taken=(*chain.taken, *sorted(taken)),
                        activation=name,
                        before=x.aval.dtype,
                        last="activation",
                    )
        return None

    def _pays(self, chain):
        """Whether a chain may end here: with an activation or a residual, only where that saves a pass."""
        if chain.last in ("wider", "layout"):
            return False
        return (chain.activation is None and chain.residual is None) or self._saves_a_pass(chain)

    def _saves_a_pass(self, chain):
        """Whether XLA would store what the chain makes, or what it is made of would be read or written more often."""
        if self._program.is_stored(chain.out, self._taken) or chain.last == "narrower":
            return True
        return chain.activation is None and chain.residual is not None and len(self._program.uses[chain.out]) > 1

    def _is_faster(self, chain, time):
        """Whether a kernel with an epilogue takes no longer than one without and what the epilogue saves."""
        plain = self._time(*(x.aval for x in self._eqn.invars), self._eqn.params)
        is_cheap = chain.residual is None and chain.activation is None
        return plain is not None and time <= (_FREE if is_cheap else 1) * plain + self._saved(chain)

    def _saved(self, chain):
        """The time of the passes that a chain saves: of all readers', or of one reader of a sum."""
        program, out = self._program, chain.out
        size = out.aval.size * out.aval.dtype.itemsize
        if not self._saves_a_pass(chain):
            return 0.0
        if chain.last == "narrower":
            return self._passing(2 * (self._product.size * self._product.dtype.itemsize - size), 0)
        readers = [program.eqns[at] for at in program.uses[out] if at not in self._taken]
        is_read_elsewhere = any(is_merged(eqn) and not self._is_reshape(eqn) for eqn in readers)
        is_alone = program.is_stored(out, self._taken) and not is_read_elsewhere
        return self._passing(2 * size, 1) if is_alone else self._passing(size, 0)

    def _emit(self, chain):
        """The chain's equations: conversions of small operands, the product, a reshape; None if it cannot be fused."""
        eqn, dtype = self._eqn, chain.out.aval.dtype
        numbers = eqn.params["dimension_numbers"]
        operands = list(eqn.invars)
        if chain.swapped:
            operands.reverse()
            numbers = tuple(side[::-1] for side in numbers)
        lead, rows, columns = self._sizes(chain.swapped)
        emitted: list[Any] = []
        epilogue = Epilogue(
            activation=chain.activation,
            alpha=chain.alpha,
            beta=1.0 if chain.residual is None else chain.residual.scale,
            has_bias=chain.bias is not None,
            bias_batch=0 if chain.bias is None else chain.bias.batch,
            has_residual=chain.residual is not None,
            before=chain.before if chain.before and chain.before.itemsize > dtype.itemsize else None,
        )
        if chain.bias is not None:
            shape = (*lead[: chain.bias.batch], *columns)
            bias = _as_operand(chain.bias, dtype, shape, eqn, emitted, True)
            operands.append(bias)
        if chain.residual is not None:
            operands.append(_as_operand(chain.residual, dtype, (*lead, *rows, *columns), eqn, emitted, False))
        if None in operands:
            return None
        params = {name: value for name, value in eqn.params.items() if name != "permutation"}
        params |= dict(dimension_numbers=numbers, preferred_element_type=dtype, epilogue=epilogue)
        avals = [x.aval for x in operands]
        if epilogue.is_plain:
            params = {name: value for name, value in params.items() if name != "epilogue"} | dict(permutation=None)
        made = (primitive.dot_general_p if epilogue.is_plain else primitive.linear_p), params
        result = compat.abstract(eqn, made[0], *avals, **params)
        if result is None:
            return None
        placed = (chain.bias is None or compat.ends_like(result, avals[2])) and (
            chain.residual is None or compat.ends_like(result, avals[-1])
        )
        if not placed:
            return None
        time = self._time(*avals[:2], params)
        if time is None or not self._is_faster(chain, time):
            return None
        last = self._program.eqns[chain.taken[-1]]
        if result == chain.out.aval:
            emitted.append(eqn.replace(primitive=made[0], params=params, invars=operands, outvars=[chain.out]))
            return emitted
        product = compat.new_var(result)
        emitted.append(eqn.replace(primitive=made[0], params=params, invars=operands, outvars=[product]))
        back = compat.new_eqn(
            last, lax.reshape_p, product, new_sizes=chain.out.aval.shape, dimensions=None, sharding=None
        )
        if back is None or back.outvars[0].aval != chain.out.aval:
            return None
        emitted.append(back.replace(outvars=[chain.out]))
        return emitted


def _as_operand(operand, dtype, shape, eqn, emitted, is_small):
    """A bias or residual of a dtype and shape, by new equations where need be; None if it cannot be one."""
    of_dtype = operand.values.get(dtype)
    x = of_dtype if of_dtype is not None else next(iter(operand.values.values()))
    added = []

    def then(primitive, *operands, **params):
        nonlocal x
        made = compat.new_eqn(eqn, primitive, x, *operands, **params)
        if made is None:
            return False
        added.append(made)
        x = made.outvars[0]
        return True

    if of_dtype is None:
        # A bias may be converted to a dtype that holds it; a residual would be another pass.
        if not is_small or not _holds(dtype, x.aval.dtype):
            return None
        if not then(lax.convert_element_type_p, new_dtype=dtype, weak_type=False, sharding=None):
            return None
    if x.aval.shape != shape and not then(lax.reshape_p, new_sizes=shape, dimensions=None, sharding=None):
        return None
    missing = compat.varying(eqn.outvars[0].aval) - compat.varying(x.aval)
    if missing:
        made = compat.vary(eqn, x, missing)
        added.append(made)
        x = made.outvars[0]
    if is_small and operand.scale != 1:
        factor = Literal(np.asarray(operand.scale, dtype), compat.scalar(dtype))
        scale = lax.neg_p if operand.scale == -1 else lax.mul_p
        if not (then(scale) if scale is lax.neg_p else then(scale, factor)):
            return None
    emitted += added
    return x


def _is_movable(eqn):
    """Whether an equation does nothing but compute one value on the device."""
    return len(eqn.outvars) == 1 and not eqn.effects and eqn.ctx.compute_type is None


def _value(eqn, values, constant):
    """What an equation makes of polynomials in the product; None if it is no polynomial."""
    operands = []
    for x in eqn.invars:
        value = values.get(x) if isinstance(x, Var) else None
        if value is None:
            number = constant(x)
            if number is None:
                return None
            value = activations.constant(number)
        operands.append(value)
    if eqn.primitive.name in _CALLS:
        body = _body(eqn)
        # Of others' functions with custom derivatives, the rule is part of what they are.
        if "custom" in eqn.primitive.name and not compat.is_relu(eqn):
            return None
        if len(body.eqns) > _LONGEST_ACTIVATION or len(operands) != len(body.invars):
            return None
        inner = dict(zip(body.invars, operands))
        for step in body.eqns:
            value = _value(step, inner, _literal) if _is_movable(step) else None
            if value is None:
                return None
            inner[step.outvars[0]] = value
        (out,) = body.outvars
        return inner.get(out) if isinstance(out, Var) else None
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, np.floating):
        number = activations.value_of(operands[0]) if operands else None
        return operands[0] if eqn.primitive.name == "convert_element_type" and number is not None else None
    return activations.applied(eqn.primitive.name, eqn.params, *operands)


def _literal(x: Any) -> float | None:
    dtype = x.aval.dtype
    is_real = jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.integer)
    return float(x.val) if isinstance(x, Literal) and np.ndim(x.val) == 0 and is_real else None


def _is_exact(eqn):
    """Whether an equation converts to a dtype that holds every value of the one before."""
    if eqn.primitive.name != "convert_element_type":
        return False
    source = eqn.invars[0].aval.dtype
    return not isinstance(eqn.invars[0], Literal) and _holds(eqn.outvars[0].aval.dtype, source)


def _holds(wide, narrow):
    """Whether one floating-point dtype holds every value of another."""
    return all(jnp.issubdtype(x, np.floating) for x in (wide, narrow)) and jnp.promote_types(wide, narrow) == wide
