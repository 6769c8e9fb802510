"""Programs of rows: what lies between the products of a chain, such as a norm, as the steps of one kernel.

A step computes a value in float32 and rounds it to the dtype that the equation has. A value is a row of the array, or
one number for each row.
"""

import dataclasses
import itertools
import math

import numpy as np
from jax.extend.core import Literal

from jax_streamk import _ffi, compat

TYPES = {t.dtype: t.value for t in (_ffi.Type.f32, _ffi.Type.bf16, _ffi.Type.f16)}
_SAME = {name: name for name in "abs div erf exp log logistic max min mul neg rsqrt sqrt sub tanh".split()}
_ELEMENTWISE = dict(_SAME, add="add", add_any="add")
_REDUCTIONS = ("reduce_sum", "reduce_max")
_POWERS = (-2, -1, 2, 3)
_VIEWS = ("reshape", "squeeze", "expand_dims", "copy", "copy_p", "stop_gradient")
_NAMES = {*_ELEMENTWISE, *_REDUCTIONS, *_VIEWS, "broadcast_in_dim", "convert_element_type", "integer_pow", "square"}


class Unsupported(Exception):
    """Why an equation is in no program of rows, or not in this one."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What a kernel is given.

    Attributes:
      rows, columns: the size of the array.
      values, numbers: how many rows and how many numbers of a row the program keeps at a time.
      steps: five integers each: operation, type, result, and what it reads.
      operands: four each: where the first row begins, strides of rows and columns, in elements, and type.
      constants: float32 numbers.
      places: the variables of the operands, in order.
    """

    rows: int
    columns: int
    values: int
    numbers: int
    steps: tuple[int, ...]
    operands: tuple[int, ...]
    constants: tuple[float, ...]
    places: tuple

    def reads(self):
        """The variables of its operands, those that it stores among them."""
        return self.places

    def attributes(self):
        """What a custom call carries."""
        of = dict(rows=np.int64, columns=np.int64, values=np.int64, numbers=np.int64)
        arrays = dict(steps=np.int32, operands=np.int64, constants=np.float32)
        numbers = {name: type_(getattr(self, name)) for name, type_ in of.items()}
        return numbers | {name: np.array(getattr(self, name), type_) for name, type_ in arrays.items()}


def why_not(eqn):
    """Why no program of rows has an equation; None if one may."""
    body = compat.called(eqn)
    if body is not None:
        return next(filter(None, map(why_not, body.eqns)), None)
    name = eqn.primitive.name
    if not (name in _NAMES or is_view(eqn)) or (name == "integer_pow" and eqn.params["y"] not in _POWERS):
        return f"{name} is not one of a row's operations"
    if eqn.effects or eqn.ctx.compute_type is not None:
        return f"{name} has effects, or is computed elsewhere"
    for x in (*eqn.invars, *eqn.outvars):
        if x.aval.dtype not in TYPES:
            return f"{name} is of {x.aval.dtype}; rows are of float32, bfloat16 or float16"
    return None


def is_view(eqn):
    """Whether an equation only changes the shape of an array."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return len(eqn.invars) == 1 and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    if name == "slice":
        return not _skips(eqn) and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    return name in _VIEWS and eqn.params.get("dimensions" if name == "reshape" else "", None) is None


def _skips(slice_):
    return any(step != 1 for step in slice_.params["strides"] or ())


def first_columns(eqn):
    """Of each result, the first of the columns that it has of all rows; None if the equation does not cut so."""
    x, name = eqn.invars[0], eqn.primitive.name
    if name == "split" and eqn.params["axis"] % x.aval.ndim == x.aval.ndim - 1:
        return [0, *itertools.accumulate(eqn.params["sizes"][:-1])]
    if name != "slice" or _skips(eqn) or x.aval.shape[:-1] != eqn.outvars[0].aval.shape[:-1]:
        return None
    return eqn.params["start_indices"][-1:]


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value of a program by its number; a constant's is that among the constants."""

    kind: str  # "row", "number" or "constant"
    index: int


class Rows:
    """A program that equations are added to.

    Args:
      shape: of the array: its last dimension is that of the columns.
      maker: {variable: the equation that makes it} of what is computed before the program.
      cut: {variable: (the one in memory that has its columns and others, their number, its first one)}.
    """

    def __init__(self, shape, maker, cut):
        self._columns, self._count = shape[-1], math.prod(shape[:-1])
        self._maker, self._cut = maker, cut
        self._values = {}  # by variable
        self._steps = []  # (operation, dtype, result, values read); of loads and stores an operand's number
        self._operands = []  # (variable, where its first row begins, row stride, column stride)
        self._constants = []
        self._loaded = {}  # the value of an operand
        self._indices = itertools.count()
        if self._columns < 2 or self._count < 1:
            raise Unsupported(f"an array of shape {tuple(shape)} has no rows")

    @property
    def made(self):
        """The variables that it computes."""
        return self._values.keys()

    def reads(self):
        """The variables that it reads from memory."""
        return [x for x, *_ in self._operands]

    def add(self, eqn):
        """Adds an equation. Raises ``Unsupported``, having added nothing, if its arrays have other rows."""
        if (why := why_not(eqn)) is not None:
            raise Unsupported(why)
        kept = self._steps[:], self._operands[:], self._constants[:], dict(self._loaded)
        try:
            self._values[eqn.outvars[0]] = self._value(eqn)
        except Unsupported:
            self._steps, self._operands, self._constants, self._loaded = kept
            raise

    def _value(self, eqn):
        name, out = eqn.primitive.name, eqn.outvars[0].aval
        is_row = out.size == self._count * self._columns and out.shape[-1:] == (self._columns,)
        if not is_row and out.size != self._count:
            raise Unsupported(f"{name} makes an array of other rows, of shape {out.shape}")
        if name in _VIEWS or name == "broadcast_in_dim" or is_view(eqn):
            return self._seen(eqn)
        if name in _REDUCTIONS:
            x = eqn.invars[0]
            value = self._read(x, x.aval.shape)
            if value.kind != "row" or tuple(eqn.params["axes"]) != (x.aval.ndim - 1,):
                raise Unsupported(f"{name} is not over the columns")
            return self._step(name, out.dtype, "number", value)
        operands = [self._read(x, out.shape) for x in eqn.invars]
        if name == "convert_element_type":
            is_exact = out.dtype in (eqn.invars[0].aval.dtype, np.float32)
            return operands[0] if is_exact else self._computed("round", out, *operands)
        if name == "square":
            return self._computed("mul", out, *operands * 2)
        if name == "integer_pow":
            return self._power(eqn.params["y"], out, *operands)
        return self._computed(_ELEMENTWISE[name], out, *operands)

    def _power(self, y, out, x):
        power = x if abs(y) == 1 else self._computed("mul", out, x, x)
        if y == 3:
            power = self._computed("mul", out, power, x)
        return power if y > 0 else self._computed("div", out, self._constant(1.0), power)

    def _computed(self, op, out, *operands):
        kind = "row" if any(x.kind == "row" for x in operands) else "number"
        return self._step(op, out.dtype, kind, *operands)

    def _step(self, op, dtype, kind, *operands):
        value = _Value(kind, next(self._indices))
        self._steps.append((op, dtype, value, operands))
        return value

    def _constant(self, number):
        bits = np.float32(number).tobytes()  # 0.0 equals -0.0
        found = [np.float32(x).tobytes() for x in self._constants]
        if bits not in found:
            self._constants.append(number)
            found.append(bits)
        return _Value("constant", found.index(bits))

    def _seen(self, eqn):
        """The value behind a change of shape, which must not move elements from row to row."""
        (x, *_), shape = eqn.invars, eqn.outvars[0].aval.shape
        if isinstance(x, Literal):
            return self._read(x, shape)
        value = self._read(x, x.aval.shape)
        if eqn.primitive.name == "broadcast_in_dim":
            dims = [at for at, size in zip(eqn.params["broadcast_dimensions"], x.aval.shape) if size > 1]
            keeps = value.kind == "row" or len(shape) - 1 not in dims or self._columns == 1
        else:
            keeps = value.kind == "number" or shape[-1:] == (self._columns,)
            keeps &= value.kind == "row" or math.prod(shape) == self._count
        if not keeps:
            raise Unsupported(f"{eqn.primitive.name} moves elements to other rows")
        return value

    def _read(self, x, shape):
        """The value of a variable, as an operand of an equation whose result has this shape."""
        number = self._number(x)
        if number is not None:
            return self._constant(number)
        if x in self._values:
            return self._values[x]
        source, strides = self._source(x, shape)
        key = source, *strides
        if key not in self._loaded:
            self._operands.append(key)
            kind = "row" if strides[2] else "number"
            self._loaded[key] = self._step("load", x.aval.dtype, kind, len(self._operands) - 1)
        return self._loaded[key]

    def _number(self, x):
        """The number that a variable is; None if it is not known."""
        if isinstance(x, Literal):
            return float(np.asarray(x.val).astype(np.float32)) if np.ndim(x.val) == 0 else None
        eqn = self._maker.get(x)
        if eqn is None or x.aval.ndim > 0 or eqn.primitive.name not in ("pvary", "convert_element_type"):
            return None
        number = self._number(eqn.invars[0])
        return None if number is None else float(np.asarray(number).astype(x.aval.dtype))

    def _source(self, x, shape):
        """(the variable in memory that has all elements of ``x``, where and with which strides of rows and columns)."""
        if x.aval.ndim == 0:
            return x, (0, 0, 0)
        is_row = shape[-1:] == (self._columns,) and math.prod(shape) == self._count * self._columns
        if x in self._cut and is_row and x.aval.shape == shape:
            whole, width, first = self._cut[x]
            return whole, (first, width, 1)
        if x.aval.ndim != len(shape) or not all(size in (1, full) for size, full in zip(x.aval.shape, shape)):
            raise Unsupported(f"an operand has the shape {x.aval.shape}")
        sizes, source, found = list(x.aval.shape), x, None
        while True:
            count, columns = (math.prod(sizes[:-1]), sizes[-1]) if is_row else (math.prod(sizes), 1)
            if source.aval.size == count * columns and count in (1, self._count):
                found = source, (0, columns if count > 1 else 0, int(columns > 1))
            eqn = self._maker.get(source)
            if eqn is None or eqn.primitive.name != "broadcast_in_dim" or len(eqn.invars) != 1:
                break
            if isinstance(eqn.invars[0], Literal) or source.aval.ndim != len(shape):
                break
            source = eqn.invars[0]
            given = dict(zip(eqn.params["broadcast_dimensions"], source.aval.shape))
            sizes = [min(size, given.get(i, 1)) for i, size in enumerate(sizes)]
        if found is None:
            raise Unsupported(f"an operand of shape {x.aval.shape} is broadcast to {tuple(shape)}")
        return found

    def program(self, wanted, device):
        """The ``Program`` that stores these variables. Raises ``Unsupported`` if it is too large for a ``Device``."""
        steps, operands = list(self._steps), list(self._operands)
        for x in wanted:
            is_row = x.aval.size > self._count or self._values[x].kind == "row"
            steps.append(("store", x.aval.dtype, len(operands), (self._values[x],)))
            operands.append((x, 0, self._columns if is_row else 1, int(is_row)))
        numbered, values, numbers = _in_slots(_needed(steps))
        lying = tuple(number for x, *strides in operands for number in (*strides, TYPES[x.aval.dtype]))
        given = self._count, self._columns, values, numbers, numbered, lying, tuple(self._constants)
        if why := _ffi.why_no_rows(*(list(x) if isinstance(x, tuple) else x for x in given), device.native()):
            raise Unsupported(why)
        return Program(*given, places=tuple(x for x, *_ in operands))


def _needed(steps):
    """The steps whose results are stored, or read on the way."""
    kept, read = [], set[_Value]()
    for step in reversed(steps):
        op, _, out, operands = step
        if op == "store" or out in read:
            kept.append(step)
            read.update(x for x in operands if isinstance(x, _Value))
    return kept[::-1]


def _in_slots(steps):
    """(the steps as integers, with values in places that are used again, the number of places of each kind)."""
    last = {x: at for at, (*_, operands) in enumerate(steps) for x in operands if isinstance(x, _Value)}
    free: dict[str, list[int]] = dict(row=[], number=[])
    used, slots = dict(row=0, number=0), dict[_Value, int]()
    flat: list[int] = []

    def number_of(x):
        if x.kind == "constant":
            return -1 - x.index
        return slots[x] + (_ffi.first_row_number if x.kind == "number" else 0)

    for at, (op, dtype, out, operands) in enumerate(steps):
        read = [number_of(x) if isinstance(x, _Value) else x for x in operands]
        # An element is read before its place is written, but a sum is of all elements.
        for x in dict.fromkeys(operands):
            if isinstance(x, _Value) and last[x] == at and x.kind != "constant":
                free[x.kind].append(slots[x])
        if op != "store":
            if free[out.kind]:
                slots[out] = free[out.kind].pop()
            else:
                slots[out], used[out.kind] = used[out.kind], used[out.kind] + 1
            out = number_of(out)
        flat += [_ffi.row_ops[op], TYPES[dtype], out, *read, *[0] * (2 - len(read))]
    return tuple(flat), used["row"], used["number"]
