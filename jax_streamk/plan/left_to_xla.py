"""The products that ``Auto()`` leaves to XLA although a kernel could run them, because ours was not measured faster.

``RULES`` name XLA's domains. How far each reaches is a limit in the machine file, which ``python -m jax_streamk fit``
measures on a GPU.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_streamk import _ffi, machines, text
from jax_streamk.device import too_old
from jax_streamk.plan.problem import FLOAT8


@dataclasses.dataclass(frozen=True)
class Rule:
    """XLA computes the products of a domain whose value is at most the machine's limit.

    Attributes:
      value: of a ``GemmProblem`` on a ``Machine``; None outside of the domain.
      why: the reason, of problem and value.
    """

    value: Callable[[Any, machines.Machine], float | None]
    why: Callable[[Any, float], str]


def why(problem, device):
    """Why to leave a ``GemmProblem`` on a ``Device`` to XLA; None if there is no reason."""
    if device.platform not in ("cpu", "cuda"):
        return None
    if device.platform == "cuda" and (unfit := too_old(device)):
        return unfit
    if problem.has_scales:  # XLA would dequantize
        return not_measured(device) if device.platform == "cuda" else None
    if problem.is_ragged:  # on a GPU XLA multiplies all rows by the matrix of every group
        return None
    if device.platform == "cuda" and (unfit := not_measured(device)):
        return unfit
    return too_small(problem, device) or (_first_of(UNALIGNED | LARGE, problem, device) if device.arch == 90 else None)


def not_measured(device):
    """Why XLA multiplies on a GPU until tuning finds our kernels faster; None if the GPU has a machine file."""
    if machines.is_measured(device):
        return None
    name = device.kind or f"sm_{device.arch} with {device.sms} SMs"
    return (
        f"nobody measured our kernels on {name}: `python -m jax_streamk tune` compares them with XLA on your products, "
        "`python -m jax_streamk fit` measures the GPU for the planner"
    )


def too_small(problem, device):
    """Why the extents are too small for a kernel; None if they are not."""
    if problem.k == 1:
        return "with k = 1 it is an elementwise product, which XLA fuses with its neighbours"
    if device.platform == "cpu":
        return _first_of(SMALL_ON_CPU, problem, device)
    return no_narrow_kernel(problem) or _first_of(SMALL, problem, device)


def no_narrow_kernel(problem):
    """Why no kernel for narrow results on GPUs runs a product of at most 8 columns, or of one float64 row; else None.

    Other kernels' tiles are mostly empty: XLA's time / theirs is 0.64 for 2 to 8 columns. XLA fuses a row's product
    with what computes the matrix.
    """
    m, n, k = problem.m, problem.n, problem.k
    if m == 1 and n > 8 and problem.type_a == _ffi.Type.f64 and problem.major_b == _ffi.Major.row and problem.ldb % 2:
        return "with m = 1, only kernels for rows of B aligned to 16 bytes have no mostly empty tiles"
    if n > 8:
        return None
    if problem.type_b != problem.type_a or problem.type_a.bits < 16 or problem.gated:
        return f"with n = {n}, tiles are mostly empty"
    row_a, batched = problem.major_a == _ffi.Major.row, problem.batch > 1
    strides = [k if row_a else m, problem.lda * ((m if row_a else k) > 1), batched * problem.batch_stride_a]
    strides.append(batched * problem.inner_stride_a)
    if problem.major_b == _ffi.Major.column:  # read by vectors, too
        strides += [k, problem.ldb * (n > 1), batched * problem.batch_stride_b, batched * problem.inner_stride_b]
    if any(stride % (128 // problem.type_a.bits) for stride in strides):
        return f"with n = {n}, only kernels for rows aligned to 16 bytes have no mostly empty tiles"
    return None


def _first_of(rules, problem, device):
    """The reason of the first rule by which XLA is faster; None if there is none."""
    machine = machines.machine_of(device)
    for name, rule in rules.items():
        value = rule.value(problem, machine)
        if value is not None and value <= getattr(machine, name):
            return rule.why(problem, value)
    return None


def _reading_us(p, machine):
    """Microseconds for the matrix of a vector's or a narrow product, which takes as long; None for other products."""
    if p.n <= 8:
        rows, stride = p.m, p.batch_stride_a
    elif p.m == 1 and not p.gated:
        rows, stride = p.n, p.batch_stride_b
    else:
        return None
    return rows * p.k * (p.batch if stride else 1) * p.type_a.bits / 8 / machine.dram_bytes_per_us


def _multiply_adds_of_each(p, machine):
    """Those of a product of a batch, one of vectors none; None without a batch, or one whose matrices XLA copies."""
    is_batch = p.batch > 1 and p.inner_batch == 1
    return (0 if p.m == p.n == 1 else p.m * p.n * p.k) if is_batch else None


def _unaligned_16_bits(p):
    return (
        (p.lda % 8 != 0 or p.ldb % 8 != 0) and p.batch == 1 and p.type_a.bits == 16 and p.type_d == p.type_a
        and p.major_b == _ffi.Major.row and not p.epilogue
    )  # fmt: skip


def _odd_rows(p, machine):
    """Rows by an odd B, more than skinny kernels take, where XLA's tiles divide k."""
    is_odd = _unaligned_16_bits(p) and p.ldb % 2 == 1
    return p.m if is_odd and p.m > 32 and p.n >= 1000 and p.k % 64 == 0 else None


def _loaded_by_words(p):
    """Whether rows are aligned to 4 or 8 bytes, which XLA loads as they are, and some tiles are full."""
    return _unaligned_16_bits(p) and p.lda % 2 == p.ldb % 2 == 0 and min(p.m, p.n) >= 128


def _k_of_tiles(p, machine):
    return p.k if _loaded_by_words(p) and p.k % 64 == 0 and p.m * p.n >= 1024 * p.k else None


def _short_k(p, machine):
    return p.k if _loaded_by_words(p) and p.m * p.n >= 200_000 and p.major_a == _ffi.Major.row else None


def _float8_along_k(p, machine):
    """The smaller, the larger both extents of the result; None unless both operands lie along K, as XLA needs them."""
    is_along_k = p.major_a == _ffi.Major.row and p.major_b == _ffi.Major.column
    return 1 / p.m + 1 / p.n if p.type_a.dtype in FLOAT8 and is_along_k else None


def _too_small(p, value):
    return f"each of {p.batch} products of {p.m} x {p.n} x {p.k} is too small for a kernel"


def _too_short(p, value):
    return (
        "rows of A or B are not aligned to 16 bytes: our kernels would copy them or use narrower loads, which "
        "does not pay with so short a k"
    )


_BATCHED = Rule(_multiply_adds_of_each, _too_small)

# XLA's time / ours, 41 bfloat16 products on an H200 with jaxlib 0.11.2: 0.65 for k of at most 16, 0.89 for batches of
# products of at most 64 x 64 x 64. XLA reads a vector's matrix more slowly, but starts earlier, by a third of a launch.
SMALL = {
    "few_k": Rule(lambda p, machine: p.k, lambda p, value: f"with k = {value}, tiles are mostly empty"),
    "xla_earlier_us": Rule(
        _reading_us,
        lambda p, value: (
            f"reading {'A' if p.n <= 8 else 'B'} takes {text.duration(value)}: it counts more that XLA's "
            "kernel starts earlier"
        ),
    ),
    "small_tf32": Rule(
        lambda p, machine: p.batch * p.m * p.n * p.k if p.math == _ffi.Math.tf32 else None,
        lambda p, value: (
            f"a product of {p.m} x {p.n} x {p.k} takes no longer than its launch, and XLA may use full float32"
        ),
    ),
    "small_batched": _BATCHED,
}

# A call costs 1 to 2 us more than XLA's loop, plus some for each product of a batch (two cores of an AMD EPYC with
# AVX512_BF16, jaxlib 0.11.2; batches of 1 to 100,000, extents of 1 to 64, k of 1 to 512).
SMALL_ON_CPU = {
    "small_batched": _BATCHED,
    "small": Rule(
        lambda p, machine: p.m * p.n * p.k,
        lambda p, value: f"a product of {p.m} x {p.n} x {p.k} is too small for a kernel",
    ),
}

# 16-bit operands with rows that TMA cannot load, measured on H200s.
UNALIGNED = {
    "odd_rows": Rule(
        _odd_rows,
        lambda p, value: f"B's leading dimension is odd: with {p.m} rows our kernels would copy B or read it twice",
    ),
    "unaligned_k_of_tiles": Rule(_k_of_tiles, _too_short),
    "unaligned_k": Rule(_short_k, _too_short),
}

# Ours add to float32 sums every 128 along k, for which registers of smaller tiles suffice.
LARGE = {
    "float8_along_k": Rule(
        _float8_along_k,
        lambda p, value: f"with {p.m} x {p.n} results, XLA's kernels that add all of k in tensor cores are faster",
    ),
}

RULES = {"cuda": SMALL | UNALIGNED | LARGE, "cpu": SMALL_ON_CPU}
