"""Turns shapes, dtypes and dimension numbers into a strided GEMM, without copies where strides allow."""

import dataclasses
import functools
import itertools
import math
import operator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_streamk import _ffi
from jax_streamk.product.epilogue import ByBits, Epilogue

TYPES = {type_.dtype: type_ for type_ in _ffi.Type}
FLOAT8 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)  # kernels multiply any two of these


class Unsupported(Exception):
    """Why no kernel supports a product. ``Auto()`` falls back to XLA and reports it; an explicit schedule raises it."""


_NAMES = [name for name, *_ in _ffi.GemmProblem.fields]
_values = operator.attrgetter(*_NAMES)

if TYPE_CHECKING:
    _Fields: Any = object
else:
    _Fields = dataclasses.make_dataclass(
        "_Fields",
        [
            (name, type_) if default is None else (name, type_, default)
            for name, type_, _, default in _ffi.GemmProblem.fields
        ],
        frozen=True,
        eq=False,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class GemmProblem(ByBits, _Fields):
    """``D[l] = activation(alpha * A[l] @ B[l] + beta * residual[l] + bias[l])`` for l < batch.

    If gated, ``activation(A[l] @ B[l] + bias[l]) * (A[l] @ second B[l] + second bias[l])``.

    Its fields, listed in cutlass_kernels/core/gemm_fields.h: extents, types, majorness, and strides in elements (0
    broadcasts an operand). A batch may be nested: l is at ``l // inner_batch * batch_stride + l % inner_batch *
    inner_stride``. The bias has n contiguous elements of D's type per batch; the residual has D's type and
    layout.

    If ``ragged`` is not none, ``batch`` is the number of groups, whose sizes are data. They cut the m rows of the
    only A and the only D, or the k of the only A and the only B, into consecutive runs. With ``leading_rows`` a run in
    no group comes first. With ``gathered_rows`` A has that many rows, and as many int32 numbers as m, also data, say
    which of them each of the m rows is.

    If ``scale_rows`` is not 0, elements of B stand for ``(b - zero) * scale + offset``; ``scale_rows`` neighbours
    along k of ``scale_columns`` columns share these. Likewise ``scale_rows_of_a`` rows share a scale for
    ``scale_columns_of_a`` neighbours along k, if that is not 0.

    If ``second_column`` is not 0, B is two matrices side by side, or three with ``third_column``, which lie apart. The
    second and third begin at these columns.

    If ``invariant`` is not none, the bits of an element must not depend on m (or n), nor on its place along it.
    """

    def native(self):
        return _ffi.GemmProblem(*_values(self))

    def attributes(self):
        """Every field by name."""
        return dict(zip(_NAMES, _values(self)))

    @property
    def is_empty(self):
        return 0 in (self.batch, self.m, self.n, self.k)

    @property
    def is_invariant(self):
        """Whether bits must not depend on the number of rows, or of columns."""
        return self.invariant != _ffi.Invariant.none

    @property
    def is_ragged(self):
        """Whether groups of sizes that are data cut its rows or its K."""
        return self.ragged != _ffi.Ragged.none

    @property
    def epilogue(self):
        """The epilogue as text, "" if D is the plain product."""
        if self.gated:
            gate, up = (f"A @ {which}B" + f" + {which}bias" * self.has_bias for which in ("", "second "))
            gate = f"({gate})" if self.activation == _ffi.Activation.none else f"{_name(self.activation)}({gate})"
            return f"{gate} * ({up})"
        sum_ = "A @ B" if self.alpha == 1 else f"{self.alpha:g} A @ B"
        if self.has_residual:
            sum_ += " + residual" if self.beta == 1 else f" + {self.beta:g} residual"
        if self.has_bias:
            sum_ += " + bias"
        if self.activation != _ffi.Activation.none:
            return f"{_name(self.activation)}({sum_})"
        return "" if sum_ == "A @ B" else sum_

    @property
    def has_scales(self):
        return self.scale_rows > 0 or self.scale_rows_of_a > 0

    @property
    def _scales_of_a(self):
        if not self.scale_rows_of_a:
            return ""
        return f" (scale {_name(self.scale_type_of_a)} per {self.scale_rows_of_a} x {self.scale_columns_of_a})"

    @property
    def _scales(self):
        """What is said of the scales of B, "" if there are none."""
        if not self.scale_rows:
            return ""
        parts = [f"scale {_name(self.scale_type)} per {self.scale_rows} x {self.scale_columns}"]
        if self.has_zero:
            parts.append(f"zero {_name(self.zero_type)}")
        if self.has_offset:
            parts.append(f"offset {_name(self.offset_type)}")
        return f" ({', '.join(parts)})"

    def __str__(self):
        types = f"{_name(self.type_a)}{self._scales_of_a} x {_name(self.type_b)}{self._scales} -> {_name(self.type_d)}"
        if self.math != _ffi.Math.native:
            types += f" ({_name(self.math)})"
        batch = f"{self.batch} x " if self.batch > 1 else ""
        if self.inner_batch > 1:
            batch = f"{self.batch // self.inner_batch} x {self.inner_batch} x "
        epilogue = f", D = {self.epilogue}" if self.epilogue else ""
        majors = f"A {_name(self.major_a)}, B {_name(self.major_b)}"
        epilogue += ", batch invariant" * self.is_invariant
        if self.is_ragged:
            cut = "rows" if self.ragged == _ffi.Ragged.m else "k"
            groups = f"{cut} in {self.batch} group{'s' * (self.batch > 1)}"
            if self.gathered_rows:
                groups += f" by index of {self.gathered_rows}"
            return f"[{self.m}, {self.k}] @ [{self.k}, {self.n}], {groups}, {types}, {majors}{epilogue}"
        matrices = f" of {3 if self.third_column else 2} matrices" if self.second_column else ""
        return f"{batch}[{self.m}, {self.k}] @ [{self.k}, {self.n}]{matrices}, {types}, {majors}{epilogue}"


def _name(enum):
    return enum.name


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A product as a kernel sees it: the problem, the copies of operands before it, and the transpose of D after it.

    Attributes:
      problem: the kernel's problem.
      dtypes: what lhs and rhs are converted to.
      permute_lhs, permute_rhs, permute_result: transposes, or None.
      swapped: whether A is the rhs and B the lhs.
      permute_others: {role: transpose} of other operands.
    """

    problem: GemmProblem
    dtypes: tuple[np.dtype, np.dtype]
    permute_lhs: tuple[int, ...] | None = None
    permute_rhs: tuple[int, ...] | None = None
    permute_result: tuple[int, ...] | None = None
    swapped: bool = False
    permute_others: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def transposes(self):
        """Whether an operand or D is copied for its order of dimensions."""
        return any((self.permute_lhs, self.permute_rhs, self.permute_result))

    def prepared(self, lhs, rhs):
        """The types of the operands as the kernel expects them."""
        permutations = (self.permute_lhs or range(lhs.ndim), self.permute_rhs or range(rhs.ndim))
        types = [
            x.update(shape=tuple(x.shape[i] for i in order), dtype=dtype)
            for x, order, dtype in zip((lhs, rhs), permutations, self.dtypes)
        ]
        return types[::-1] if self.swapped else types

    def stored(self, result):
        """The type of D, given that of the result."""
        order = range(result.ndim) if self.permute_result is None else np.argsort(self.permute_result)
        return result.update(shape=tuple(result.shape[i] for i in order))

    def copies(self, lhs, rhs):
        """A line of text for each copy, of an operand or of D."""
        lines = []
        operands = ("lhs", lhs, self.permute_lhs), ("rhs", rhs, self.permute_rhs)
        for (name, x, permutation), dtype in zip(operands, self.dtypes):
            if permutation is not None:
                need = "a single stride each for batch, free and contracting dimensions"
                if self.problem.is_ragged:
                    need = "contiguous rows of what groups cut, and rows or columns of each group's matrix"
                lines.append(
                    f"{name} of shape {tuple(x.shape)} is transposed by {permutation} first: kernels need {need}"
                )
            if x.dtype != dtype:
                lines.append(f"{name} is converted from {x.dtype} to {dtype} first: kernels need operands of one dtype")
        for role, permutation in self.permute_others.items():
            lines.append(f"{role} is transposed by {permutation} first: kernels need that of each matrix in one piece")
        if self.permute_result is not None:
            lines.append(
                f"the result is transposed by {self.permute_result} afterwards: "
                "no kernel stores dimensions in that order"
            )
        return lines


def arrange(
    lhs, rhs, dimension_numbers, precision, preferred_element_type, platform, epilogue=Epilogue(), permutation=None,
    nests=False,
):  # fmt: skip
    """Arranges ``lax.dot_general``, its epilogue and a transpose of the result as one strided GEMM.

    Args:
      lhs, rhs: anything with shape and dtype; row-major.
      dimension_numbers: as in lax.dot_general.
      precision: canonical, as the dot_general primitive carries it.
      preferred_element_type: dtype of the result, or None for lax's choice.
      platform: "cpu" or "cuda", which decides the arithmetic of float32 products.
      epilogue: the epilogue of the product.
      permutation: transposes the result, or None. Must be None with an epilogue.
      nests: whether the batch may be nested, where that saves copies.

    Raises:
      Unsupported: no kernel family supports the types or precision, or a shape is symbolic or beyond 64 bits; or, with
        a gate, an operand would have to be copied.
    """
    sides = (tuple(map(tuple, pair)) for pair in dimension_numbers)
    return _arranged(
        (lhs.shape, lhs.dtype), (rhs.shape, rhs.dtype), tuple(sides), precision, preferred_element_type, platform,
        epilogue, permutation, nests,
    )  # fmt: skip


# Models repeat their layers, and accelerate asks about each product more than once.
@functools.lru_cache(maxsize=4096)
def _arranged(lhs, rhs, dimension_numbers, precision, preferred_element_type, platform, epilogue, permutation, nests):
    lhs, rhs = (jax.ShapeDtypeStruct(*x) for x in (lhs, rhs))
    types = dtypes, _, math_ = _types(lhs.dtype, rhs.dtype, preferred_element_type, precision, platform)
    if not all(isinstance(size, (int, np.integer)) for size in (*lhs.shape, *rhs.shape)):
        raise Unsupported(f"shapes {lhs.shape} and {rhs.shape} are symbolic: choosing a kernel needs numbers")
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    presets = lax.DotAlgorithmPreset
    if math_ != _ffi.Math.native and precision not in (presets.TF32_TF32_F32, presets.TF32_TF32_F32_X3):
        rows, columns, depth = _extents(lhs.shape, lhs_contract, lhs_batch, rhs.shape, rhs_contract, rhs_batch)
        if 0 not in (rows, columns, depth) and _xla_multiplies_in_float32(rows, columns, depth):
            raise Unsupported(
                f"XLA computes a float32 product of {rows} x {columns} x {depth} in float32 at this precision, and no "
                "GPU kernel does; precision=lax.DotAlgorithmPreset.TF32_TF32_F32 asks for TF32"
            )
    # Contracting dimensions may be merged in any common order: try the memory order of each operand.
    for contract in (lhs_contract, rhs_contract):
        order = sorted(range(len(contract)), key=contract.__getitem__)
        a = _Dimensions(lhs.shape, lhs_batch, [lhs_contract[i] for i in order])
        b = _Dimensions(rhs.shape, rhs_batch, [rhs_contract[i] for i in order])
        # B is the first of stacked matrices.
        stacked = b.free.pop(0) if epilogue.gate == "stacked" else None
        if a.collapses(a.contract) and b.collapses(b.contract):
            break
    # Leading free dimensions of one operand that do not merge with the rest become the batch if there is none, over
    # which the other operand is broadcast.
    borrowed = None
    if math.prod(a.sizes(a.batch)) == 1:
        if not a.collapses(a.free) and b.collapses(b.free):
            borrowed = a
        elif not b.collapses(b.free) and a.collapses(a.free):
            borrowed = b
    if borrowed is not None:
        borrowed.borrow_batch()
    if epilogue.gate and not all(x.is_strided() and x.has_unit_stride() for x in (a, b)):
        raise Unsupported("an operand of several dimensions has no single stride for each of its roles")
    # The product's dimensions are batch, lhs free, rhs free: a batch borrowed from the rhs lies between m and n.
    sizes = a.sizes(a.batch), a.sizes(a.free), b.sizes(b.batch[len(rhs_batch) :]), b.sizes(b.free)
    places = itertools.count()
    batch_d, _, borrowed_d, columns = ([next(places) for _ in part] for part in sizes)
    d = _Dimensions([*itertools.chain(*sizes)], batch_d + borrowed_d, columns, permutation)
    if d.stride(columns) != 1 and d.stride(d.free) == 1 and not epilogue.has_bias and not epilogue.gate:
        # D is column-major (or one column), and kernels store rows: compute the transpose, with operands swapped. Not
        # with a bias, which has one element per column.
        dims, first, last = range(len(d.shape)), len(lhs_batch), len(lhs.shape) - len(lhs_contract)
        exchanged = (*dims[:first], *dims[last:], *dims[first:last])
        turned = arrange(
            rhs, lhs, [sides[::-1] for sides in dimension_numbers], precision, preferred_element_type, platform,
            epilogue, tuple(map(exchanged.index, permutation or dims)), nests,
        )  # fmt: skip
        return dataclasses.replace(
            turned, dtypes=dtypes, permute_lhs=turned.permute_rhs, permute_rhs=turned.permute_lhs, swapped=True
        )
    cut = _nesting(a, b, d) if nests and borrowed is None and not epilogue.gate else None
    permute_lhs = permute_rhs = None
    if cut is None:
        permute_lhs, permute_rhs = a.permute_unless_strided(), b.permute_unless_strided()
    m, n, k = math.prod(a.sizes(a.free)), math.prod(b.sizes(b.free)), math.prod(a.sizes(a.contract))
    batch = math.prod((borrowed or a).sizes((borrowed or a).batch))
    layouts = a.major_and_leading(a.free, a.contract), b.major_and_leading(b.contract, b.free)
    if cut is None and (not d.is_strided() or d.stride(columns) > 1):
        d = _Dimensions(d.shape, d.batch, columns)
    else:
        permutation = None
    nested = {}
    if cut is not None:
        nested = {f"inner_stride_{name}": x.stride(x.batch[cut:]) for name, x in (("a", a), ("b", b), ("d", d))}
        nested["inner_batch"] = math.prod(a.sizes(a.batch[cut:]))
        a.batch, b.batch, d.batch = a.batch[:cut], b.batch[:cut], d.batch[:cut]
    problem = _problem(
        types,
        layouts,
        epilogue,
        batch=batch,
        m=m,
        n=n,
        k=k,
        ldd=d.stride(d.free) or n,
        batch_stride_a=0 if borrowed is b else a.stride(a.batch),
        batch_stride_b=0 if borrowed is a else b.stride(b.batch),
        batch_stride_d=d.stride(d.batch) or m * n,
        has_residual=epilogue.has_residual,
        alpha=epilogue.alpha,
        beta=epilogue.beta,
        batch_stride_bias=n * (1 if stacked is None else 2)
        if epilogue.has_bias and (borrowed is b or epilogue.bias_batch)
        else 0,
        up_offset=0 if stacked is None else b.strides[stacked],
        **nested,
    )
    if max(value for value in problem.attributes().values() if isinstance(value, int)) >= 2**63:
        raise Unsupported(f"shapes {lhs.shape} and {rhs.shape} have more elements than 64 bits can count")
    return Arrangement(problem, dtypes, permute_lhs, permute_rhs, permutation)


def arrange_ragged(
    lhs, rhs, groups, numbers, precision, preferred_element_type, platform, epilogue=Epilogue(), leading=False,
    gathered_rows=0,
):  # fmt: skip
    """Arranges ``lax.ragged_dot_general`` and its epilogue as one ragged GEMM.

    Args:
      lhs, rhs, precision, preferred_element_type, platform: as in ``arrange``.
      groups: their number.
      numbers: the ``lax.RaggedDotDimensionNumbers``.
      epilogue: the epilogue, whose bias has shape (groups, n).
      leading: whether a size precedes those of the groups.
      gathered_rows: the number of rows from which indices choose those of lhs, or 0.

    Raises:
      Unsupported: no kernel family supports the types or precision, or a shape is symbolic or beyond 32 bits.
    """
    sizes = *lhs.shape, *rhs.shape, gathered_rows
    if not all(isinstance(size, (int, np.integer)) and size < 2**31 for size in sizes):
        raise Unsupported(f"shapes {lhs.shape} and {rhs.shape} are symbolic, or beyond 32 bits")
    types = dtypes, *_ = _types(lhs.dtype, rhs.dtype, preferred_element_type, precision, platform)
    ((lhs_contract,), (rhs_contract,)), _ = numbers.dot_dimension_numbers
    along_m = lhs_contract not in numbers.lhs_ragged_dimensions
    group = list(numbers.rhs_group_dimensions)
    a = _Dimensions(lhs.shape, [], [lhs_contract])
    b = _Dimensions(rhs.shape, group, [rhs_contract])
    # Kernels read rows or columns of each group's matrix, and on a GPU whole rows of what groups cut.
    permute_lhs = permute_rhs = None
    if platform == "cuda" and lhs_contract != along_m:
        permute_lhs, a = (1, 0), _Dimensions(lhs.shape[::-1], [], [int(along_m)])
    if along_m and group[0] == 2 and groups > 1:
        permute_rhs = (*group, rhs_contract, 3 - group[0] - rhs_contract)
        b = _Dimensions([rhs.shape[i] for i in permute_rhs], [0], [1])
    elif not along_m and platform == "cuda" and rhs_contract != 0:
        permute_rhs, b = (1, 0), _Dimensions(rhs.shape[::-1], [], [0])
    (m,), (k,), (n,) = a.sizes(a.free), a.sizes(a.contract), b.sizes(b.free)
    # Majorness goes by the order of dimensions, not by strides: kernels of one kind want the same for extents of 1.
    layouts = a.major_in_order(a.free, a.contract), b.major_in_order(b.contract, b.free)
    problem = _problem(
        types,
        layouts,
        epilogue,
        batch=groups,
        m=m,
        n=n,
        k=k,
        ldd=n,
        batch_stride_a=0,
        batch_stride_b=b.strides[b.batch[0]] if along_m else 0,
        batch_stride_d=0 if along_m else m * n,
        batch_stride_bias=n if epilogue.has_bias else 0,
        ragged=_ffi.Ragged.m if along_m else _ffi.Ragged.k,
        leading_rows=leading,
        gathered_rows=gathered_rows,
    )
    return Arrangement(problem, dtypes, permute_lhs, permute_rhs)


def _problem(types, layouts, epilogue, **fields):
    """The ``GemmProblem`` for what ``_types`` returns, majorness and leading dimension of A and B, and other fields."""
    ((dtype_a, dtype_b), type_d, math_), ((major_a, lda), (major_b, ldb)) = types, layouts
    return GemmProblem(
        type_a=TYPES[dtype_a],
        type_b=TYPES[dtype_b],
        type_d=type_d,
        math=math_,
        major_a=major_a,
        major_b=major_b,
        lda=lda,
        ldb=ldb,
        activation=_ffi.Activation[epilogue.activation or "none"],
        has_bias=epilogue.has_bias,
        gated=epilogue.gate is not None,
        **fields,
    )


def _nesting(*operands):
    """Where to divide the batch of A, B and D in two, each with a single stride; None if it is one, or cannot be."""
    *_, d = operands
    if all(x.is_strided() for x in operands) or d.stride(d.contract) > 1:  # kernels store rows of D
        return None
    for cut in range(1, len(operands[0].batch)):
        parts = ([x.batch[:cut], x.batch[cut:], x.free, x.contract] for x in operands)
        if all(x.has_unit_stride() and all(map(x.collapses, roles)) for x, roles in zip(operands, parts)):
            return cut
    return None


def _extents(lhs_shape, lhs_contract, lhs_batch, rhs_shape, rhs_contract, rhs_batch):
    """(m, n, k) of each matrix product of a dot_general."""
    depth, batch = (math.prod(lhs_shape[i] for i in dims) for dims in (lhs_contract, lhs_batch))
    contracted = max(depth * batch, 1)
    return math.prod(lhs_shape) // contracted, math.prod(rhs_shape) // contracted, depth


def only_tf32(product, types, platform):
    """A ``Product`` that asks for TF32 wherever XLA has TF32 for larger products of its types and precision."""
    dtypes = {jnp.dtype(types[role].dtype) for role in ("lhs", "rhs")}
    if platform != "cuda" or jnp.dtype(jnp.float32) not in dtypes or jnp.dtype(jnp.float64) in dtypes:
        return product
    try:
        presets = {_ffi.Math.tf32: "TF32_TF32_F32", _ffi.Math.tf32x3: "TF32_TF32_F32_X3"}
        preset = presets[_math(jnp.dtype(jnp.float32), product.precision, platform)]
    except Unsupported:  # and it says so
        return product
    return product.replaced(precision=lax.DotAlgorithmPreset[preset])


def _xla_multiplies_in_float32(rows, columns, depth):
    """Whether XLA's GPU compiler avoids tensor cores for a float32 product, and so is more exact than TF32.

    It turns products without a sum into elementwise ones, products of vectors into reductions (or cuBLAS calls, if
    autotuning prefers them), and products whose matrices have fewer than 100 elements together into loops
    (xla/service/gpu: dot strength reduction, xla_gpu_gemm_rewrite_size_threshold). Checked against the errors of 589
    products on an H200 with jaxlib 0.11.2.
    """
    return depth == 1 or 1 in (rows, columns) or (rows + columns) * depth < 100


class _Dimensions:
    """An operand's dimensions by role, with their strides; ``order`` is their memory order, row-major by default."""

    def __init__(self, shape, batch, contract, order=None):
        self.shape = tuple(shape)
        order = range(len(self.shape)) if order is None else order
        self.strides = {dim: math.prod(self.sizes(order[place + 1 :])) for place, dim in enumerate(order)}
        self.batch, self.contract = list(batch), list(contract)
        self.free = [i for i in range(len(self.shape)) if i not in self.batch and i not in self.contract]

    def sizes(self, dims):
        return [self.shape[i] for i in dims]

    def _solid(self, dims):
        return [i for i in dims if self.shape[i] != 1]

    def collapses(self, dims):
        """Whether these dimensions, in this order, merge into one with a single stride."""
        dims = self._solid(dims)
        return all(self.strides[i] == self.strides[j] * self.shape[j] for i, j in itertools.pairwise(dims))

    def is_strided(self):
        """Whether batch, free and contracting dimensions each have a single stride."""
        return all(map(self.collapses, (self.batch, self.free, self.contract)))

    def has_unit_stride(self):
        """Whether free or contracting dimensions have a stride of 1."""
        return any(self.stride(dims) <= 1 for dims in (self.free, self.contract))

    def stride(self, dims):
        dims = self._solid(dims)
        return self.strides[dims[-1]] if dims else 0

    def borrow_batch(self):
        """Turns leading free dimensions into a batch, if both parts then have a single stride."""
        for cut in range(1, len(self.free)):
            if self.collapses(self.free[:cut]) and self.collapses(self.free[cut:]):
                self.batch, self.free = self.batch + self.free[:cut], self.free[cut:]
                return

    def permute_unless_strided(self):
        """Adopts and returns a permutation after which each role has a single stride; None if each has one already.

        The batch comes first. The innermost dimension in memory stays innermost: that copy is cheaper, and the other
        products of a derivative need the same one.
        """
        if self.is_strided() and self.has_unit_stride():
            return None
        roles = [self.batch, self.free, self.contract]
        if max(self._solid(self.free), default=-1) > max(self._solid(self.contract), default=-1):
            roles = [self.batch, self.contract, self.free]
        permutation = tuple(itertools.chain(*roles))
        places = {dim: place for place, dim in enumerate(permutation)}
        batch, contract = ([places[dim] for dim in dims] for dims in (self.batch, self.contract))
        _Dimensions.__init__(self, [self.shape[i] for i in permutation], batch, contract)
        return permutation

    def major_and_leading(self, rows, columns):
        """Majorness and leading dimension as a `rows` x `columns` matrix; one of them must have stride 1 or size 1."""
        row, column = self.stride(rows), self.stride(columns)
        extent_rows, extent_columns = math.prod(self.sizes(rows)), math.prod(self.sizes(columns))
        if column <= 1:
            return _ffi.Major.row, row or extent_columns
        return _ffi.Major.column, column or extent_rows

    def major_in_order(self, rows, columns):
        """Majorness and leading dimension of one dimension each; the later one has stride 1."""
        (row,), (column,) = rows, columns
        return (_ffi.Major.row, self.strides[row]) if column > row else (_ffi.Major.column, self.strides[column])


def _types(lhs, rhs, preferred, precision, platform):
    """The dtypes that the operands are multiplied in, the kernel's type of D, and its math."""
    lhs, rhs = jnp.dtype(lhs), jnp.dtype(rhs)
    outs = {
        jnp.dtype(jnp.float64): (jnp.float64,),
        jnp.dtype(jnp.float32): (jnp.float32,),
        jnp.dtype(jnp.bfloat16): (jnp.bfloat16, jnp.float32),
        jnp.dtype(jnp.float16): (jnp.float16, jnp.float32),
        jnp.dtype(jnp.int8): (jnp.int32,),
        **dict.fromkeys(FLOAT8, (jnp.bfloat16, jnp.float32)),
    }
    for operand in (lhs, rhs):
        if operand not in outs:
            raise Unsupported(f"{lhs} x {rhs}: no kernel multiplies {operand}")
    if lhs in FLOAT8 and rhs in FLOAT8:
        common, dtypes = lhs, (lhs, rhs)
    elif lhs in FLOAT8 or rhs in FLOAT8:
        raise Unsupported(f"{lhs} x {rhs}: no kernel multiplies these")
    else:
        with jax.numpy_dtype_promotion("standard"):  # lax mixes dtypes under any setting of jnp
            common = jnp.promote_types(lhs, rhs)
        dtypes = common, common
    # lax promotes bfloat16 with float16 to bfloat16, which has the larger exponent.
    out = jnp.dtype(preferred if preferred is not None else common if common in (lhs, rhs) else jnp.bfloat16)
    if lhs != rhs and jnp.dtype(jnp.int8) in (lhs, rhs):
        raise Unsupported(f"{lhs} x {rhs} -> {out}: no kernel multiplies these")
    if out not in map(jnp.dtype, outs[common]):
        allowed = " or ".join(jnp.dtype(t).name for t in outs[common])
        remedy = "set preferred_element_type to that, and convert the result with .astype"
        raise Unsupported(f"{lhs} x {rhs} -> {out}: the result of {common} operands must be {allowed}: {remedy}({out})")
    return dtypes, TYPES[out], _math(common, precision, platform)


def _math(dtype, precision, platform):
    """The arithmetic of a product. On a GPU f32 follows XLA: DEFAULT is TF32, HIGH three TF32, HIGHEST full f32."""
    if isinstance(precision, tuple):
        precision = max(precision, key=lambda p: p.value if isinstance(p, lax.Precision) else 0)
    f32 = dtype == jnp.float32
    if precision is not None and not isinstance(precision, lax.Precision):
        preset = lax.DotAlgorithmPreset
        served = {
            preset.DEFAULT: {dtype},
            preset.F64_F64_F64: {jnp.dtype(jnp.float64)},
            preset.BF16_BF16_F32: {jnp.dtype(jnp.bfloat16)},
            preset.F16_F16_F32: {jnp.dtype(jnp.float16)},
            preset.ANY_F8_ANY_F8_F32: FLOAT8,
            preset.ANY_F8_ANY_F8_F32_FAST_ACCUM: FLOAT8,
        }
        if platform == "cpu":
            served[preset.F32_F32_F32] = {jnp.dtype(jnp.float32)}
        if dtype in served.get(precision, ()):
            precision = lax.Precision.DEFAULT
        elif f32 and platform != "cpu" and precision == preset.TF32_TF32_F32:
            return _ffi.Math.tf32
        elif f32 and platform != "cpu" and precision == preset.TF32_TF32_F32_X3:
            return _ffi.Math.tf32x3
        else:
            raise Unsupported(f"no kernel supports precision={precision} for {dtype} on {platform}")
    if not f32 or platform == "cpu":
        return _ffi.Math.native
    if precision == lax.Precision.HIGHEST:
        raise Unsupported(
            "no kernel multiplies float32 at Precision.HIGHEST on a GPU: tensor cores have TF32, or three TF32"
        )
    return _ffi.Math.tf32x3 if precision == lax.Precision.HIGH else _ffi.Math.tf32
