"""Finds products by dequantized matrices in a program, and makes them products by the numbers with their scales.

From the right operand it goes back through ``(numbers - zero) * scale + offset``, with or without each part, and
through conversions and shapes among them, to an array of four or eight bits, or to the words that numbers are packed
in. A product stays as it is where another way is expected to be faster, or where something other than such products
reads the dequantized matrix.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var

from jax_streamk import compat, schedules
from jax_streamk.accelerate import float8
from jax_streamk.accelerate.atoms import Atoms
from jax_streamk.accelerate.decisions import decide
from jax_streamk.accelerate.equations import Equations, is_exact, is_merged, is_movable, is_view
from jax_streamk.device import Device
from jax_streamk.plan import alternatives
from jax_streamk.plan.problem import FLOAT8
from jax_streamk.product import kinds, scaled
from jax_streamk.product.dense import Dense
from jax_streamk.product.primitive import bind, product_p
from jax_streamk.product.ragged import Ragged, numbers_of
from jax_streamk.quantized import INTEGERS, SCALES, VALUES, WIDE
from jax_streamk.tuning import tuned

_VALUES, _SCALES, _WIDE = (frozenset(map(jnp.dtype, names)) for names in (VALUES, SCALES, WIDE))
_WORDS = frozenset(map(jnp.dtype, ("uint8", "int32", "uint32")))
# Sums and products from the matrix back to its numbers: an offset, scales, a zero point.
_ARITHMETIC = dict(add="+", sub="-", mul="*")
_FORM = re.compile(r"[+-]?\*{0,2}-?")
_MASKS = {15: "uint4", 255: "uint8"}
_ROWS_ON_CPU = 256
_SMALL = 64  # elements of an array that is evaluated here
_ONE = Literal(np.float32(1), jax.core.ShapedArray((), np.float32))


def has_numbers(eqns: Sequence[Any]) -> bool:
    """Whether there may be something to find."""
    return any(_may_be_numbers(x) for eqn in eqns for x in eqn.invars)


def by_numbers(
    program: Equations, schedule: Any, where: Any, device: Device, measured: Mapping[Any, tuned.FragmentTimes]
) -> Equations:
    """A program with products by numbers where kernels read them; the same object if there are none.

    ``measured``: what tuning found, by the results of products.
    """
    if not has_numbers(program.eqns):
        return program
    opened, outvars = _Opened(program.eqns), program.outvars
    whole, found = Equations(opened.eqns, outvars), {}
    for at, eqn in enumerate(opened.eqns):
        for product in opened.by_numbers(eqn, schedule):
            times = measured.get((product.plain or eqn).outvars[0])
            if product.plain is not None and where is None:
                may_be = decide(product.plain, whole, schedule, None, device, times).is_ours
            else:
                may_be = times is None or times.winner != "xla"
            if may_be and _is_ours(product, where, device):
                found[at] = product
                break
    found = _alone(whole, found)
    if not found:
        return program
    new = [x for at, eqn in enumerate(opened.eqns) for x in (found[at].eqns if at in found else [eqn])]
    return Equations(_needed(new, outvars), outvars)


def _may_be_numbers(x: Any) -> bool:
    dtype = getattr(x.aval, "dtype", None)
    return dtype in _VALUES or (dtype in _WORDS and x.aval.ndim > 1)


def _is_ours(found: "_Found", where: Any, device: Device) -> bool:
    """Whether one kernel computes a product by numbers, and dequantizing is not expected to be faster."""
    eqn = found.eqns[-1]
    product = eqn.params["product"]
    types = product.by_role([compat.local_aval(x.aval) for x in eqn.invars])
    try:
        way = alternatives.plan(product, types, eqn.params["schedule"], device)
    except ValueError:  # of an explicit schedule
        return False
    if way.instead is not None or way.plan.kernel is None:
        return False
    if where is not None:
        return bool(where(way.plan.problem))
    is_weighed = found.plain is None and schedules.may_be_xlas(eqn.params["schedule"]) and device.platform == "cpu"
    return not is_weighed or _gains_on_cpu(way.plan.problem)


def _gains_on_cpu(problem: Any) -> bool:
    """Whether a CPU's kernels are faster than a product of what XLA dequantizes.

    Each tile of rows decodes its matrix anew. Time of that product / theirs: 1.2 to 5 for up to 256 rows of bfloat16,
    0.8 to 0.95 for 1024, and for float32 0.6 to 1.4, 0.95 on average (int4 and int8 of 1024 x 1024, on a busy EPYC).
    """
    return problem.m <= _ROWS_ON_CPU and problem.type_a.bits == 16


def _alone(program: Equations, found: dict[int, "_Found"]) -> dict[int, "_Found"]:
    """The products whose matrices nothing but such products reads."""
    while True:
        makers = {program.maker[x] for product in found.values() for x in product.made}
        own = makers.union(found)
        shared = [
            at
            for at, product in found.items()
            if any(x in program.live or not own.issuperset(program.uses[x]) for x in product.dequantized)
        ]
        if not shared:
            return found
        found = {at: product for at, product in found.items() if at not in shared}


def _needed(eqns: Sequence[Any], outvars: Sequence[Any]) -> list[Any]:
    """Equations without those whose results nothing reads."""
    used, out = {x for x in outvars if isinstance(x, Var)}, list[Any]()
    for eqn in reversed(eqns):
        if used.isdisjoint(eqn.outvars) and is_movable(eqn, len(eqn.outvars)):
            continue
        used.update(x for x in eqn.invars if isinstance(x, Var))
        out.append(eqn)
    return out[::-1]


@dataclasses.dataclass(frozen=True)
class _Found:
    """A product by numbers.

    Attributes:
      eqns: what its operands need that the program does not have, and the product.
      made: the values from the numbers to the matrix, which is the first of them, or from the program's own product of
        the numbers to the last one before it is scaled.
      plain: the equation of that product; None if the program dequantizes the matrix.
    """

    eqns: list[Any]
    made: list[Any]
    plain: Any = None

    @property
    def dequantized(self) -> list[Any]:
        return [x for x in self.made if x.aval.dtype in _WIDE]


class _Opened:
    """The equations of a program, those of functions that dequantize or multiply in their callers' place."""

    def __init__(self, eqns: Sequence[Any]):
        self.eqns: list[Any] = []
        self._makers: dict[Any, Any] = {}
        self._constants: dict[Any, np.ndarray | None] = {}
        self._add(eqns)

    def _add(self, eqns: Iterable[Any]) -> None:
        for eqn in eqns:
            if (body := self._body(eqn)) is not None:
                self._add(_renamed(body, eqn))
            else:
                self.eqns.append(eqn)
                self._makers.update(dict.fromkeys(eqn.outvars, eqn))

    def _body(self, eqn: Any) -> Any:
        """The jaxpr of a function that dequantizes, spreads scales or multiplies; None of any other equation."""
        body = compat.called(eqn)
        if body is None or "jvp_jaxpr_fun" in eqn.params or body.constvars or not compat.is_plain_call(eqn):
            return None
        inside = [x for x in body.eqns if x.primitive not in kinds.KINDS]
        made = {x for of in body.eqns for x in of.outvars}
        results = {x for x in body.outvars if isinstance(x, Var)}
        is_simple = len(made & results) == len(body.outvars) and all(map(is_merged, inside))
        if not is_simple or not is_movable(eqn, len(eqn.outvars)):
            return None
        if len(inside) < len(body.eqns):
            return body if any(self._path(x) for x in eqn.invars) else None
        is_spread = sum(x.aval.size for x in eqn.outvars) > sum(x.aval.size for x in eqn.invars)
        return body if is_spread or any(map(_may_be_numbers, eqn.invars)) else None

    def maker(self, x: Any) -> Any:
        """The equation that computes a value and nothing else; None if none does."""
        eqn = None if isinstance(x, Literal) else self._makers.get(x)
        return eqn if eqn is not None and is_movable(eqn) else None

    def _path(self, x: Any, form: str = "", is_float8: bool = False) -> list[tuple[Any, int]] | None:
        """From a matrix back to its numbers: equations, and which of their operands leads there. None: it has none.

        ``is_float8``: to those of float8, which the program may compute.
        """
        if is_float8 and x.aval.dtype in FLOAT8:
            return []
        if (eqn := self.maker(x)) is not None:
            form += _ARITHMETIC.get(eqn.primitive.name, "")
            for at in _on_the_way(eqn) if _FORM.fullmatch(form) else ():
                rest = self._path(eqn.invars[at], form, is_float8)
                if rest is not None:
                    return [(eqn, at), *rest]
        is_end = not is_float8 and not isinstance(x, Literal) and (self._is_stored(x) or self.mask(x))
        return [] if is_end else None

    def _is_stored(self, x: Any) -> bool:
        """Whether memory holds numbers, or may at little cost: XLA need not compute them for us."""
        eqn = self._makers.get(x)
        is_cheap = eqn is None or eqn.primitive.name in ("slice", "bitcast_convert_type") or not is_merged(eqn)
        return x.aval.dtype in _VALUES and is_cheap

    def mask(self, x: Any) -> str | None:
        """The dtype of the numbers that a value has in integers of more bits, by a mask; None if it has none."""
        eqn = self.maker(x)
        number = self.constant(eqn.invars[1]) if eqn is not None and eqn.primitive.name == "and" else None
        return None if number is None or np.ptp(number) else _MASKS.get(int(number.flat[0]))

    def constant(self, x: Any) -> np.ndarray | None:
        """The few numbers that a value is in every run; None if it depends on arguments, or they are many."""
        if isinstance(x, Literal):
            dtype: Any = getattr(x.aval, "dtype", None)
            return np.asarray(x.val, dtype)
        if x not in self._constants:
            self._constants[x] = self._evaluated(x)
        return self._constants[x]

    def _evaluated(self, x: Any) -> np.ndarray | None:
        eqn = self.maker(x)
        if eqn is None or x.aval.size > _SMALL or compat.called(eqn) is not None:
            return None
        operands = [self.constant(y) for y in eqn.invars]
        if any(y is None for y in operands):
            return None
        with jax.ensure_compile_time_eval():
            return np.asarray(eqn.primitive.bind(*operands, **eqn.params))

    def by_numbers(self, eqn: Any, schedule: Any) -> Iterator[_Found]:
        """The ways to have the product of an equation by numbers with scales, the one with most of them first."""
        if eqn.primitive.name == "scaled_dot":
            found = _of_scaled_dot(eqn, schedule)
        elif eqn.primitive.name == "mul":
            found = self._by_result(eqn, schedule)
        else:
            yield from self._of_product(eqn, schedule)
            return
        if found is not None:
            yield found

    def _by_result(self, eqn: Any, schedule: Any) -> _Found | None:
        if (found := float8.by_result(self, eqn, schedule)) is None:
            return None
        eqns = [eqn.replace(source_info=found.call.source_info) for eqn in _renamed(found.body, found.call)]
        return _Found(eqns, found.made, found.plain)

    def _of_product(self, eqn: Any, schedule: Any) -> Iterator[_Found]:
        kind = kinds.KINDS.get(eqn.primitive)
        if kind is None or kind.why_not(eqn) is not None:
            return
        lhs, matrix = eqn.invars[:2]
        is_here = eqn.ctx.compute_type is None and eqn.params.get("out_sharding") is None
        if not is_here or isinstance(matrix, Literal) or matrix.aval.dtype not in _WIDE:
            return
        shapes = [x.aval.shape for x in (lhs, matrix)]
        if not all(isinstance(size, int) and size for size in itertools.chain(*shapes)):
            return
        if compat.explicit_mesh(lhs.aval, matrix.aval) is not None:
            return
        paths = [self._path(x, is_float8=True) for x in (lhs, matrix)]
        if all(paths) and (found := _of_both(self, eqn, paths, schedule)) is not None:
            yield found
        path = self._path(matrix)
        if path and (found := _Dequantized(self, eqn, path).product(schedule)) is not None:
            yield found


def _of_both(program: _Opened, eqn: Any, paths: Any, schedule: Any) -> _Found | None:
    """The product of two matrices of float8, given the paths to their numbers; None if a kernel would not read them."""
    product, given, has_scale = kinds.of(eqn), kinds.of(eqn).by_role(eqn.invars), False
    new, roles = list[Any](), (("lhs", "scale_of_a"), ("rhs", "scale"))
    for side, (path, (matrix, scale)) in enumerate(zip(paths, roles)):
        dequantized = _Dequantized(program, eqn, path, side)
        found = dequantized.found()
        if found is None or {*found.parts} - {"scale"}:
            return None
        if (product := dequantized.ordered(product, found.order)) is None:
            return None
        given[matrix], given[scale] = found.values, found.parts["scale"]
        has_scale |= dequantized.has_scale
        new += dequantized.new
    if has_scale:
        dtype = jnp.promote_types(*(x.aval.dtype for x in eqn.invars[:2]))
        product = scaled.Scaled.by(product, dtype, ("scale",), of_both=True)
    params = dict(product=product, schedule=schedule, out_sharding=None)
    call = eqn.replace(primitive=product_p, params=params, invars=[given[role] for role in product.roles])
    return _Found([*new, call], [x.outvars[0] for path in paths for x, _ in path])


def _of_scaled_dot(eqn: Any, schedule: Any) -> _Found | None:
    """The product of ``lax.scaled_dot``, whose left operand XLA dequantizes; None if the right one is no numbers."""
    avals = [x.aval for x in eqn.invars]
    is_here = eqn.ctx.compute_type is None and compat.explicit_mesh(*avals) is None and not compat.varying(avals[0])
    if not is_here or avals[1].dtype not in _VALUES or avals[3].dtype not in _SCALES:
        return None
    dtype = jnp.dtype(jnp.bfloat16)
    dense = Dense(eqn.params["dimension_numbers"], None, eqn.params["preferred_element_type"])

    def product(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> Any:
        lhs = scaled.dequantize(lhs, lhs_scale, None, None, dtype)
        return bind(scaled.Scaled.by(dense, dtype, ("scale",)), lhs, rhs, rhs_scale, schedule=schedule)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    return _Found([*_renamed(jax.make_jaxpr(product)(*shapes).jaxpr, eqn)], [])


def _on_the_way(eqn: Any) -> Sequence[int]:
    """The operands of an equation that may be what it dequantizes."""
    (out,), name = eqn.outvars, eqn.primitive.name
    if name == "convert_element_type":
        is_quantized = jnp.issubdtype(eqn.invars[0].aval.dtype, np.integer) or eqn.invars[0].aval.dtype in _VALUES
        return [0] if out.aval.dtype in _WIDE or (is_quantized and jnp.issubdtype(out.aval.dtype, np.integer)) else []
    if is_view(eqn) or name == "transpose":
        return [0]
    if name not in _ARITHMETIC or (out.aval.dtype not in _WIDE and name != "sub"):
        return []
    return [i for i, x in enumerate(eqn.invars[: 1 if name == "sub" else 2]) if x.aval.shape == out.aval.shape]


def _renamed(body: Any, call: Any) -> Iterator[Any]:
    """The equations of a call's jaxpr, of the values of its caller."""
    names = dict(zip((*body.invars, *body.outvars), (*call.invars, *call.outvars)))
    for eqn in body.eqns:
        for x in eqn.outvars:
            names.setdefault(x, compat.new_var(x.aval))
        given = [x if isinstance(x, Literal) else names[x] for x in eqn.invars]
        yield eqn.replace(invars=given, outvars=[names[x] for x in eqn.outvars])


@dataclasses.dataclass(frozen=True)
class _Part:
    """A scale, zero point or offset: a value, the atoms of its dimensions, and the primitive that applies it."""

    value: Any
    runs: Sequence[tuple[int, ...]]
    by: str


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """What a matrix is made of: numbers, the order in which they have its dimensions, and their parts by role."""

    values: Any
    order: list[int]
    parts: dict[str, Any]


class _Dequantized:
    """An operand of a product, the right one or another, and the path to its numbers.

    Attributes:
      new: equations of what the product by numbers needs.
      has_scale: whether it has more than numbers.
    """

    def __init__(self, program: _Opened, eqn: Any, path: list[tuple[Any, int]], side: int = 1):
        self._program, self._eqn, self._path = program, eqn, path
        self._side, self._matrix = side, eqn.invars[side]
        self._atoms, self.new = Atoms(), list[Any]()
        self.has_scale = any(step.primitive.name in _ARITHMETIC for step, _ in path)

    def product(self, schedule: Any) -> _Found | None:
        """The product by numbers; None if they lie in another order than the matrix, or are no such numbers."""
        if (found := self.found()) is None or (product := self.ordered(kinds.of(self._eqn), found.order)) is None:
            return None
        given = kinds.of(self._eqn).by_role(self._eqn.invars) | dict(rhs=found.values) | found.parts
        product = scaled.Scaled.by(product, self._matrix.aval.dtype, tuple(x for x in scaled.PARTS if x in given))
        params = dict(product=product, schedule=schedule, out_sharding=None)
        operands = [given[role] for role in product.roles]
        call = self._eqn.replace(primitive=product_p, params=params, invars=operands)
        return _Found([*self.new, call], [eqn.outvars[0] for eqn, _ in self._path])

    def found(self) -> _Numbers | None:
        """What the matrix is made of; None if the numbers' dimensions are not its own."""
        atoms = self._atoms
        dims = runs = [atoms.run(size) for size in self._matrix.aval.shape]
        parts: list[_Part] = []  # the one that is applied first comes first
        for eqn, at in self._path:
            if eqn.primitive.name in _ARITHMETIC:
                parts.insert(0, self._part(eqn.invars[1 - at], runs, eqn.primitive.name))
            elif eqn.primitive.name != "convert_element_type":
                if (before := atoms.before(eqn, runs)) is None:
                    return None
                runs = before
        last, at = self._path[-1]
        found = self._numbers(last.invars[at], runs, dims)
        if found is None or not self._is_sound(found[0].aval.dtype, parts):
            return None
        values, order = found
        dims = [dims[i] for i in order]
        values = self._reshaped(values, [math.prod(atoms.sizes(run)) for run in dims])
        return _Numbers(values, order, self._by_role(parts, values.aval.dtype, dims))

    def ordered(self, product: Any, order: list[int]) -> Any:
        """The product of an operand whose dimensions are the matrix's in this order; None if it needs a transpose."""
        side = self._side
        if order == sorted(order):
            return product
        if isinstance(product, Ragged):
            if side == 0:
                return None
            numbers = product.numbers
            ((of_lhs,), (contract,)), _ = numbers.dot_dimension_numbers
            groups = tuple(map(order.index, numbers.rhs_group_dimensions))
            numbers = numbers_of(of_lhs, order.index(contract), numbers.lhs_ragged_dimensions[0], groups)
            return product.replaced(numbers=numbers)
        contract, batch = (list(dims) for dims in product.numbers)
        contract[side], batch[side] = (tuple(map(order.index, dims[side])) for dims in (contract, batch))
        free = [i for i in order if order.index(i) not in (*contract[side], *batch[side])]
        return product.replaced(numbers=(tuple(contract), tuple(batch))) if free == sorted(free) else None

    def _numbers(self, x: Any, runs: Any, dims: Any) -> tuple[Any, list[int]] | None:
        """The numbers, and in which order they have the matrix's dimensions; None if other dimensions lie between."""
        mask = self._program.mask(x)
        words = None if mask is None else self._words(x, runs, mask)
        if words is not None and (order := self._order(dims, words.runs)) is not None:
            value = self._then(lax.bitcast_convert_type_p, words.value, new_dtype=jnp.dtype(mask))
            return value, order
        order = self._order(dims, runs)
        return None if order is None else (x if mask is None else self._converted(x, mask), order)

    def _words(self, x: Any, runs: Any, mask: str) -> _Part | None:
        """The words that have numbers side by side from their low bits up, with a dimension more; None if none do."""
        shift = self._program.maker(self._program.maker(x).invars[0])
        if shift is None or not shift.primitive.name.startswith("shift_right"):
            return None
        words, by = (self._part(y, runs, "") for y in shift.invars)
        bits, (word, shifts) = jnp.iinfo(mask).bits, (words.value.aval, self._program.constant(by.value))
        all_shifts = np.arange(0, 8 * word.dtype.itemsize, bits)
        if shifts is None or word.dtype != x.aval.dtype or not np.array_equal(shifts.ravel(), all_shifts):
            return None
        return _Part(words.value, [*words.runs, tuple(self._atoms.flat(*by.runs))], "")

    def _order(self, dims: Any, runs: Any) -> list[int] | None:
        place = {at: i for i, at in enumerate(self._atoms.flat(*runs))}
        each = [self._atoms.flat(run) for run in dims]
        if list(place) == self._atoms.flat(*dims):
            return [*range(len(dims))]
        order = sorted(range(len(dims)), key=lambda i: place.get(each[i][0], -1) if each[i] else -1)
        return order if list(place) == [at for i in order for at in each[i]] else None

    def _part(self, x: Any, runs: Any, by: str) -> _Part:
        """What is applied to an array with these runs, as it was before conversions, shapes and broadcasts."""
        runs = [() if size == 1 else run for size, run in zip(x.aval.shape, runs)]
        while (eqn := self._program.maker(x)) is not None:
            name = eqn.primitive.name
            if name == "convert_element_type":
                before = runs if self._is_lossless(eqn) else None
            else:
                may_move = is_view(eqn) or name == "transpose" or (name == "broadcast_in_dim" and len(eqn.invars) == 1)
                before = self._atoms.before(eqn, runs) if may_move else None
            if before is None:
                break
            x, runs = eqn.invars[0], before
        return _Part(x, runs, by)

    def _is_lossless(self, eqn: Any) -> bool:
        """Whether a conversion of scales, zero points or offsets changes no number."""
        source, dtype = eqn.invars[0], eqn.outvars[0].aval.dtype
        name = self._program.mask(source) or source.aval.dtype.name
        if name in INTEGERS:
            return dtype in _WIDE or _is_held(dtype, *_limits(name))
        is_power_of_two = source.aval.dtype == jnp.float8_e8m0fnu and dtype in _WIDE and dtype != np.float16
        return source.aval.dtype in _SCALES and (is_exact(eqn) or is_power_of_two)

    def _is_sound(self, dtype: Any, parts: list[_Part]) -> bool:
        """Whether integers stay within their dtypes until they are floating-point numbers."""
        if dtype.name not in INTEGERS:
            return True
        limits = _limits(dtype)
        for eqn, _ in reversed(self._path):
            if (made := eqn.outvars[0].aval.dtype) in _WIDE:
                break
            if eqn.primitive.name == "sub":
                least, most = self._limits(parts[0].value)
                limits = limits[0] - most, limits[1] - least
            if not _is_held(made, *limits):
                return False
        return True

    def _limits(self, x: Any) -> tuple[int, int]:
        """Those of a zero point: of 32 bits it is no larger than float32 holds."""
        if (number := self._program.constant(x)) is not None:
            return int(number.min()), int(number.max())
        least, most = _limits(self._program.mask(x) or x.aval.dtype)
        return max(least, -(2**24)), min(most, 2**24)

    def _by_role(self, parts: list[_Part], dtype: Any, dims: Any) -> dict[str, Any]:
        """The operands besides the numbers, all of one shape: that of the smallest blocks."""
        varying = {at for part in parts for at in self._atoms.flat(*part.runs)}
        blocks = []
        for run in (self._atoms.flat(run) for run in dims):
            count = max((i for i, at in enumerate(run, 1) if at in varying), default=0)
            blocks.append(run[:count])
        zero = parts.pop(0) if parts and parts[0].by == "sub" else None
        offset = parts.pop() if parts and parts[-1].by != "mul" else None
        scales = [self._spread(part.value, part.runs, blocks) for part in parts]
        if len(scales) > 1:
            scales = [self._then(lax.mul_p, *(self._converted(x, np.float32) for x in scales))]
        given = dict(scale=scales[0] if scales else self._spread(_ONE, [], blocks))
        if zero is not None:
            number, name = self._program.constant(zero.value), self._program.mask(zero.value)
            is_like = number is not None and dtype.name in INTEGERS and _is_among(number, dtype)
            value = self._spread(zero.value, zero.runs, blocks)
            given["zero"] = self._converted(value, dtype if is_like else name or value.aval.dtype)
        if offset is not None:
            value = self._spread(offset.value, offset.runs, blocks)
            given["offset"] = self._then(lax.neg_p, value) if offset.by == "sub" else value
        return given

    def _spread(self, x: Any, runs: Any, blocks: Any) -> Any:
        """A part with a number for each block."""
        atoms, target = self._atoms.flat(*runs), [at for run in blocks for at in run]
        of_atoms = self._reshaped(x, self._atoms.sizes(atoms))
        order = sorted(range(len(atoms)), key=lambda i: target.index(atoms[i]))
        if order != sorted(order):
            of_atoms = self._then(lax.transpose_p, of_atoms, permutation=tuple(order))
        if len(atoms) < len(target):
            places = tuple(i for i, at in enumerate(target) if at in atoms)
            shape = tuple(self._atoms.sizes(target))
            params = dict(shape=shape, broadcast_dimensions=places, sharding=None)
            of_atoms = self._then(lax.broadcast_in_dim_p, of_atoms, **params)
        return self._reshaped(of_atoms, [math.prod(self._atoms.sizes(run)) for run in blocks])

    def _reshaped(self, x: Any, shape: Sequence[int]) -> Any:
        if x.aval.shape == tuple(shape):
            return x
        return self._then(lax.reshape_p, x, new_sizes=tuple(shape), dimensions=None, sharding=None)

    def _converted(self, x: Any, dtype: Any) -> Any:
        if x.aval.dtype == dtype:
            return x
        params = dict(new_dtype=jnp.dtype(dtype), weak_type=False, sharding=None)
        return self._then(lax.convert_element_type_p, x, **params)

    def _then(self, called: Any, *operands: Any, **params: Any) -> Any:
        """The result of a new equation."""
        self.new.append(compat.new_eqn(self._eqn, called, *operands, **params))
        return self.new[-1].outvars[0]


def _limits(dtype: Any) -> tuple[int, int]:
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)


def _is_held(dtype: Any, least: int, most: int) -> bool:
    """Whether integers of these limits are numbers of an integer dtype."""
    lowest, highest = _limits(dtype)
    return lowest <= least and most <= highest


def _is_among(numbers: np.ndarray, dtype: Any) -> bool:
    numbers = numbers.astype(np.float64)
    return bool((numbers == np.floor(numbers)).all()) and _is_held(dtype, int(numbers.min()), int(numbers.max()))
