"""Which of the equations that follow a product a kernel's epilogue can do.

A tail is followed for as long as nothing else reads the value between: a scale, then a bias and a residual, then an
activation, with reshapes and conversions to wider types among them. A conversion to a narrower type ends it: what the
program rounds is rounded. So does everything that infinities, zeros or cancellation could tell from the kernel's way.
Two tails whose ends are multiplied are a gated product, and go on as one; so do those of a product's halves.
"""

import dataclasses
import heapq
import math
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from jax.extend.core import Literal, Var

from jax_streamk import compat, schedules
from jax_streamk.accelerate import activations
from jax_streamk.accelerate.equations import RESHAPES, Equations, is_exact, is_float, is_merged, is_movable, is_view
from jax_streamk.product import kinds
from jax_streamk.product.dense import Dense
from jax_streamk.product.epilogue import Activation
from jax_streamk.product.ragged import Ragged

_SUMS = ("add", "add_any", "sub")


def may_have_epilogue(eqn: Any) -> bool:
    """Whether an equation is a product of ours whose kernel may do what follows."""
    return kinds.is_plain(eqn, Dense, Ragged)


@dataclasses.dataclass(frozen=True)
class Addend:
    """A bias or residual: a value, and how it enters the sum.

    Attributes:
      values: by dtype, a value that holds it exactly, and the equations from there to the sum.
      scale: its factor.
      batch: leading dimensions of a bias that are the product's batch.
    """

    values: dict[np.dtype, tuple[Any, tuple[int, ...]]]
    scale: float = 1.0
    batch: int = 0


@dataclasses.dataclass(frozen=True)
class Tail:
    """A product and the equations ``taken`` that follow it, up to the one that makes ``out``.

    ``matrices`` of a gated product are the one whose product passes the activation, with ``bias``, and the other one,
    with ``second_bias``; ``taken`` has the other product and what follows it too. A single one has both side by side.
    """

    out: Any
    taken: tuple[int, ...]
    alpha: float = 1.0
    bias: Addend | None = None
    residual: Addend | None = None
    activation: Activation | None = None
    swapped: bool = False  # whether the kernel's lhs is the product's rhs
    last: str = "product"
    matrices: tuple[Any, ...] = ()
    second_bias: Addend | None = None

    @property
    def adds(self) -> tuple[Addend, ...]:
        return tuple(x for x in (self.bias, self.residual) if x is not None)


class _Product:
    """A product's equation among others, and the sizes of its dimensions."""

    is_ragged = False

    def __init__(self, eqn: Any):
        self.eqn, self.product = eqn, eqn.params["product"]
        contract, batch = self.product.numbers
        shapes = [x.aval.shape for x in eqn.invars[:2]]
        self.lead = tuple(shapes[0][i] for i in batch[0])
        self.free = [
            tuple(size for i, size in enumerate(shape) if i not in (*contract[side], *batch[side]))
            for side, shape in enumerate(shapes)
        ]

    @property
    def is_pinned(self) -> bool:
        """Whether its operands keep their sides: its result's sharding is given, or one side is not like the other."""
        return self.eqn.params["out_sharding"] is not None or self.is_scaled or self.is_invariant

    @property
    def is_invariant(self) -> bool:
        """Whether the bits of a row of lhs must not depend on others."""
        return schedules.is_invariant(self.eqn.params["schedule"])

    @property
    def is_scaled(self) -> bool:
        """Whether it is by numbers with scales, which are its rhs and not that of any other."""
        return kinds.is_scaled(self.eqn)

    @property
    def is_rounded(self) -> bool:
        """Whether the program rounds the sum: what it then subtracts may be as rounded, and cancel all of it."""
        return self.eqn.outvars[0].aval.dtype.itemsize < 4

    @property
    def may_swap(self) -> bool:
        """Whether the result's elements lie in the same order if the operands are exchanged."""
        return not self.is_pinned and any(math.prod(free) <= 1 for free in self.free)

    def can_be_factor(self, tail: Tail, swapped: bool) -> bool:
        """Whether a gated kernel with its operands in this order can do what a tail of this product does."""
        # What is rounded to the product's own dtype is rounded no more often than the product.
        is_kept = tail.last != "narrower" or tail.out.aval.dtype == self.eqn.outvars[0].aval.dtype
        is_placed = tail.swapped == swapped or (tail.bias is None and self.may_swap)
        return is_kept and is_placed and tail.alpha == 1 and tail.residual is None and not tail.matrices

    def sizes(self, swapped: bool) -> tuple[tuple[int, ...], ...]:
        """(batch, free of the kernel's lhs, free of its rhs)"""
        return self.lead, *(self.free[::-1] if swapped else self.free)

    def start(self) -> Tail | None:
        """The tail of nothing but the product; None if it can have no epilogue."""
        if not is_float(self.eqn.outvars[0]):
            return None
        tail, permutation = Tail(self.eqn.outvars[0], ()), self.product.permutation
        if permutation is None:
            return tail
        # A transpose of the free dimensions is the product of the operands in the other order.
        lead, rows, columns = map(len, self.sizes(False))
        turned = (*range(lead), *range(lead + rows, lead + rows + columns), *range(lead, lead + rows))
        is_turned = permutation == turned and not self.is_pinned
        return dataclasses.replace(tail, swapped=True) if is_turned else None


class _RaggedProduct(_Product):
    """One of groups of rows: its kernels have activations and gates of two matrices, and no scale or residual."""

    is_ragged, is_pinned, may_swap = True, False, False

    def __init__(self, eqn: Any):
        self.eqn, self.product, self.lead = eqn, eqn.params["product"], ()
        self.free = [(size,) for size in eqn.outvars[0].aval.shape]

    def start(self) -> Tail | None:
        may_be = self.product.groups_rows and is_float(self.eqn.outvars[0])
        return Tail(self.eqn.outvars[0], ()) if may_be else None


class Follower:
    """Follows the tail of one product of a program, whose equations ``taken`` are part of other products' tails.

    It looks for gates that end with the last of their two products.
    """

    def __init__(self, program: Equations, at: int, taken: Collection[int], may_gate: bool = True):
        eqn = program.eqns[at]
        product = (_RaggedProduct if isinstance(eqn.params["product"], Ragged) else _Product)(eqn)
        self.program, self.product, self.taken = program, product, taken
        self._at, self._may_gate = at, may_gate and not product.is_scaled

    def tails(self) -> Iterator[Tail]:
        """The tails of one equation more each."""
        tail = self.product.start()
        while tail is not None and (tail := self._next(tail)) is not None:
            yield tail

    def _next(self, tail: Tail) -> Tail | None:
        is_open = tail.activation is None and tail.last != "narrower" and not tail.matrices
        user = self.program.user(tail.out)
        if user is None or user in self.taken or not is_movable(self.program.eqns[user]):
            return self._activated(tail) or self._halved(tail) if is_open else None
        eqn = self.program.eqns[user]
        step = dataclasses.replace(tail, out=eqn.outvars[0], taken=(*tail.taken, user))
        is_elementwise = step.out.aval.shape == tail.out.aval.shape and eqn.params.get("out_dtype") is None
        moved = _moved(tail, step, eqn) or (self._gated(tail, step, eqn) if is_elementwise else None)
        if moved is not None or not is_open:
            return moved
        if self.product.is_ragged:
            return self._activated(tail)
        if eqn.primitive.name in _SUMS:
            return (self._summed(tail, step, eqn) if is_elementwise else None) or self._activated(tail)
        # A scale may be the first step of an activation: tanh(x) as -tanh(-x).
        return self._activated(tail) or (self._scaled(tail, step, eqn) if is_elementwise else None)

    def _scaled(self, tail: Tail, step: Tail, eqn: Any) -> Tail | None:
        """The tail with one factor, before all sums, where it can neither overflow nor cancel otherwise than there."""
        name = eqn.primitive.name
        if name not in ("mul", "div", "neg") or tail.adds or tail.alpha != 1:
            return None
        factor = -1.0 if name == "neg" else self._factor(tail, eqn)
        return None if factor is None else dataclasses.replace(step, alpha=factor, last="scale")

    def _factor(self, tail: Tail, eqn: Any) -> float | None:
        other, is_first = _other(eqn, tail.out)
        number = self.program.number(other) if other is not None else None
        if not number or (eqn.primitive.name == "div" and not is_first):
            return None
        factor = number if eqn.primitive.name == "mul" else 1 / number
        limits = np.finfo(np.float64 if tail.out.aval.dtype == np.float64 else np.float32)
        return factor if limits.tiny <= abs(factor) <= limits.max else None

    def _summed(self, tail: Tail, step: Tail, eqn: Any) -> Tail | None:
        x, is_first = _other(eqn, tail.out)
        if x is None or self.program.number(x) is not None:
            return None
        sign = -1.0 if eqn.primitive.name == "sub" and is_first else 1.0
        if eqn.primitive.name == "sub" and not is_first:
            if tail.adds or tail.alpha != 1:
                return None
            step = dataclasses.replace(step, alpha=-1.0)
        if step.alpha * sign < 0 and self.product.is_rounded:
            return None
        shape = tail.out.aval.shape
        return self._with_bias(step, x, shape, sign) or self._with_residual(step, x, shape, sign)

    def _with_bias(self, tail: Tail, x: Any, shape: tuple[int, ...], sign: float) -> Tail | None:
        if tail.bias is not None:
            return None
        # The other order of operands too, where the result's elements lie in the same order.
        may_swap = not tail.adds and self.product.may_swap
        for swapped in (tail.swapped, not tail.swapped) if may_swap else (tail.swapped,):
            if (addend := self._bias(x, shape, swapped)) is not None:
                bias = dataclasses.replace(addend, scale=sign)
                return dataclasses.replace(tail, bias=bias, swapped=swapped, last="bias")
        return None

    def _maker(self, x: Any) -> Any:
        """The equation that makes a value; None if there is none, or another product's kernel makes it."""
        return None if isinstance(x, Literal) or self.program.maker.get(x) in self.taken else self.program.eqn_of(x)

    def _bias(self, x: Any, shape: tuple[int, ...], swapped: bool) -> Addend | None:
        """``x``, which is added to a value of this shape, as a bias: with one element for each column."""
        lead, rows, columns = self.product.sizes(swapped)
        spread = self._spread(x, shape)
        if spread is None:
            return None
        source, steps, sizes = spread
        if self.product.is_invariant and source.aval.ndim == len(shape):
            return None  # a residual of several rows
        cut, covered = len(shape), 1
        while cut and (covered < math.prod(columns) or shape[cut - 1] == 1) and sizes[cut - 1] == shape[cut - 1]:
            cut -= 1
            covered *= shape[cut]
        if covered != math.prod(columns):
            return None
        if math.prod(sizes[:cut]) == 1:
            return Addend(self._sources(source, steps))
        batch = len(lead)
        is_whole = shape == (*lead, *rows, *columns)
        if is_whole and batch <= cut and sizes[:batch] == lead and math.prod(sizes[batch:cut]) == 1:
            return Addend(self._sources(source, steps), batch=batch)
        return None

    def _spread(self, x: Any, shape: tuple[int, ...]) -> tuple[Any, tuple[int, ...], tuple[int, ...]] | None:
        """A value that broadcasts to ``shape``, before that: it, the equations since, its sizes in those dimensions."""
        if isinstance(x, Literal) or x.aval.ndim != len(shape):
            return None
        sizes = list(x.aval.shape)
        steps: tuple[int, ...] = ()
        while (maker := self._maker(x)) is not None and x.aval.ndim == len(shape):
            name = maker.primitive.name
            source: Any = maker.invars[0] if maker.invars else None
            if name == "broadcast_in_dim" and len(maker.invars) == 1:
                if isinstance(source, Literal):
                    return None
                given = dict(zip(map(int, maker.params["broadcast_dimensions"]), source.aval.shape))
                sizes = [min(size, given.get(i, 1)) for i, size in enumerate(sizes)]
                if math.prod(sizes) != source.aval.size:
                    return None
            elif not (name == "pvary" or is_exact(maker)) or self.program.eqn_of(source) is None:
                break
            steps = (*steps, self.program.maker[x])
            x = source
        return x, steps, tuple(sizes)

    def _sources(self, x: Any, steps: tuple[int, ...]) -> dict[np.dtype, tuple[Any, tuple[int, ...]]]:
        """A value by dtype, as it was before conversions that lost nothing."""
        values = {x.aval.dtype: (x, steps)}
        while (maker := self._maker(x)) is not None:
            if maker.primitive.name in RESHAPES and maker.params.get("dimensions") is None:
                inner = self._maker(maker.invars[0])
                if inner is None or not is_exact(inner):
                    break
            elif not is_exact(maker):
                break
            steps = (*steps, self.program.maker[x])
            x = maker.invars[0]
            values.setdefault(x.aval.dtype, (x, steps))
        return values

    def _with_residual(self, tail: Tail, x: Any, shape: tuple[int, ...], sign: float) -> Tail | None:
        if tail.residual is not None or isinstance(x, Literal) or x.aval.shape != shape:
            return None
        source, steps, scale = self._unscaled(x)
        values = self._sources(source, steps)
        if source.aval.shape != shape or not any(self.is_in_memory(value) for value, _ in values.values()):
            return None
        return dataclasses.replace(tail, residual=Addend(values, sign * scale), last="residual")

    def _unscaled(self, x: Any) -> tuple[Any, tuple[int, ...], float]:
        """What a value is a multiple of, the equation since, and the factor."""
        maker = self._maker(x)
        if maker is not None and maker.primitive.name == "mul" and self.program.user(x) is not None:
            for factor, other in (maker.invars, maker.invars[::-1]):
                number = self.program.number(factor) or 0.0
                # A residual with another factor would, if it cancels the product, leave what was rounded.
                is_power_of_two = math.frexp(abs(number))[0] == 0.5 and 2.0**-64 < abs(number) < 2.0**64
                if is_power_of_two and not isinstance(other, Literal):
                    return other, (self.program.maker[x],), number
        return x, (), 1.0

    def is_in_memory(self, x: Any) -> bool:
        """Whether memory holds a value anyway, whatever reads it."""
        waiting, seen = [x], set[Any]()
        while waiting:
            x = waiting.pop()
            if x in seen or x in self.program.in_memory:
                continue
            needed = self._needed(x)
            if needed is None:
                return False
            seen.add(x)
            waiting += needed
        self.program.in_memory.update(seen)
        return True

    def _needed(self, x: Any) -> list[Any] | None:
        """The values that memory must hold to hold ``x``; None if it does not hold ``x``."""
        program = self.program
        maker = self._maker(x)
        if maker is None or not is_merged(maker):
            return []
        if program.is_stored(x, self.taken) or len(program.uses[x]) > 1:
            return []
        name, operands = maker.primitive.name, [y for y in maker.invars if isinstance(y, Var)]
        if name in RESHAPES:
            return operands
        # A sum that another product's kernel may make.
        makers = (program.eqn_of(y) for y in operands if program.user(y) is not None)
        is_of_product = any(of is not None and kinds.is_plain(of, Dense) for of in makers)
        return operands if name in _SUMS and is_of_product else None

    def _gated(self, tail: Tail, step: Tail, eqn: Any) -> Tail | None:
        """The tail with another product of the same operand as a factor, where at most one passes an activation."""
        if eqn.primitive.name != "mul" or not self._may_gate:
            return None
        x, _ = _other(eqn, tail.out)
        is_factor = x is not None and not isinstance(x, Literal) and x.aval.shape == tail.out.aval.shape
        at = self._product_behind(x) if is_factor and self.program.user(x) is not None else None
        if at is None:
            return None
        follower = Follower(self.program, at, self.taken, may_gate=False)
        other, other_tail = follower.product, follower.product.start()
        while other_tail is not None and other_tail.out is not x:
            other_tail = follower._next(other_tail)
        if other_tail is None:
            return None
        gate, up = (tail, other_tail) if tail.activation is not None else (other_tail, tail)
        # The kernel adds two biases or none, and zeros would be one more launch.
        batches = {None if bias is None else bias.batch for bias in (gate.bias, up.bias)}
        if up.activation is not None or len(batches) > 1:
            return None
        lhs, rhs, *sizes = zip(self.product.eqn.invars, other.eqn.invars)
        if not all(self.program.is_same(*pair) for pair in sizes):
            return None
        for swapped, shared, (own, others) in ((False, lhs, rhs), (True, rhs, lhs)):
            can_be = self.product.can_be_factor(tail, swapped) and other.can_be_factor(other_tail, swapped)
            if can_be and self.program.is_same(*shared) and compat.is_placed_like(own.aval, others.aval):
                return dataclasses.replace(
                    step,
                    taken=(*tail.taken, at, *other_tail.taken, step.taken[-1]),
                    bias=gate.bias,
                    second_bias=up.bias,
                    activation=gate.activation,
                    swapped=swapped,
                    matrices=(own, others) if gate is tail else (others, own),
                    last="gate",
                )
        return None

    def _halved(self, tail: Tail) -> Tail | None:
        """The tail with the two halves of its columns, where they are the factors of a gate."""
        may_be = self._may_gate and not self.product.is_pinned and not self.product.is_ragged
        halves = self._halves(tail) if may_be else None
        if halves is None:
            return None
        follower = Follower(self.program, self._at, self.taken, may_gate=False)
        taken = (*tail.taken, *self.program.uses[tail.out])
        ends = []
        for half in halves:
            followed: Tail | None = dataclasses.replace(tail, out=half, taken=())
            while followed is not None:
                end, followed = followed, follower._next(followed)
            ends.append(end)
        gate, up = ends
        user = self.program.user(gate.out)
        if user is None or user in self.taken or user != self.program.user(up.out) or up.activation is not None:
            return None
        eqn = self.program.eqns[user]
        can_be = all(self.product.can_be_factor(end, False) and end.bias is tail.bias for end in ends)
        if eqn.primitive.name != "mul" or not is_movable(eqn) or not can_be or gate.out.aval.shape != up.out.aval.shape:
            return None
        taken = (*taken, *gate.taken, *up.taken, user)
        matrices = (self.product.eqn.invars[1],)
        return dataclasses.replace(gate, out=eqn.outvars[0], taken=taken, swapped=False, matrices=matrices, last="gate")

    def _halves(self, tail: Tail) -> list[Any] | None:
        """The first and the second half of the columns, where nothing else is read of what the tail makes."""
        uses, shape = self.program.uses[tail.out], tail.out.aval.shape
        eqns = [self.program.eqns[at] for at in uses[:3]]
        names = [eqn.primitive.name for eqn in eqns]
        if names not in (["split"], ["slice", "slice"]) or tail.out in self.program.live:
            return None
        if any(at in self.taken for at in uses) or not all(is_movable(eqn, 3 - len(eqns)) for eqn in eqns):
            return None
        if len(eqns) == 1:
            halves, axis = eqns[0].outvars, eqns[0].params["axis"]
        else:
            eqns.sort(key=lambda eqn: eqn.params["start_indices"])
            halves, starts = [eqn.outvars[0] for eqn in eqns], [eqn.params["start_indices"] for eqn in eqns]
            axis = next((i for i, start in enumerate(starts[1]) if start), 0)
            second = tuple(size // 2 if i == axis else 0 for i, size in enumerate(shape))
            if starts != [(0,) * len(shape), second] or any(eqn.params["strides"] for eqn in eqns):
                return None
        half = (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])
        are_halves = shape[axis] % 2 == 0 and all(x.aval.shape == half for x in halves)
        # All of the columns, so that the first half of them is one matrix's product.
        are_columns = math.prod(shape[axis:]) == math.prod(self.product.sizes(False)[2])
        return halves if are_halves and are_columns else None

    def _product_behind(self, x: Any) -> int | None:
        """A product like this one and before it that a value may be computed from by what a tail takes."""
        waiting: list[Any] = [x]
        for _ in range(2 * activations.LONGEST):
            at = self.program.maker.get(waiting.pop()) if waiting else None
            if at is None or at in self.taken:
                continue
            eqn = self.program.eqns[at]
            if not may_have_epilogue(eqn):
                waiting += [y for y in eqn.invars if not isinstance(y, Literal) and y.aval.size == x.aval.size]
            elif at < self._at and eqn.params == self.product.eqn.params:
                return at
        return None

    def _activated(self, tail: Tail) -> Tail | None:
        """The tail with the activation that follows; None if none does."""
        program, x = self.program, tail.out
        if x in program.live:
            return None
        values: dict[Any, activations.Polynomial] = {x: activations.X}
        taken = set[int]()
        waiting = list(program.uses[x])
        heapq.heapify(waiting)
        while waiting and len(taken) < activations.LONGEST:
            at = heapq.heappop(waiting)
            if at in taken:
                continue
            value = None if at in self.taken else self._value(program.eqns[at], values)
            if value is None or program.eqns[at].outvars[0].aval.shape != x.aval.shape:
                return None
            out = program.eqns[at].outvars[0]
            values[out] = value
            taken.add(at)
            for user in program.uses[out]:
                heapq.heappush(waiting, user)
            if all(y is out or (y not in program.live and taken.issuperset(program.uses[y])) for y in values):
                name = activations.activation_of(value, x.aval.dtype)
                if name is not None and activations.holds(out.aval.dtype, x.aval.dtype):
                    taken_now = (*tail.taken, *sorted(taken))
                    return dataclasses.replace(tail, out=out, taken=taken_now, activation=name, last="activation")
        return None

    def _value(self, eqn: Any, values: dict[Any, activations.Polynomial]) -> activations.Polynomial | None:
        operands = []
        for x in eqn.invars:
            value = values.get(x) if isinstance(x, Var) else None
            if value is None and (number := self.program.number(x)) is not None:
                value = activations.constant(number)
            if value is None:
                return None
            operands.append(value)
        return activations.result_of(eqn, operands) if is_movable(eqn) else None


def _moved(tail: Tail, step: Tail, eqn: Any) -> Tail | None:
    """The tail with a conversion or a view; None if the equation is neither."""
    is_rounded = tail.last == "narrower"
    if eqn.primitive.name == "convert_element_type" and is_float(step.out):
        return None if is_rounded else dataclasses.replace(step, last="wider" if is_exact(eqn) else "narrower")
    if is_view(eqn):
        return dataclasses.replace(step, last="narrower" if is_rounded else "layout")
    return None


def _other(eqn: Any, x: Any) -> tuple[Any, bool]:
    """(the other operand of two, whether ``x`` is the first); (None, False) if both are ``x``."""
    first, second = eqn.invars
    if first is second:
        return None, False
    return (second, True) if first is x else (first, False)
