"""The products that ``Auto()`` leaves to XLA although a kernel could run them, because ours was not measured faster."""

from jax_streamk import _ffi, machines, text
from jax_streamk.device import too_old


def why(problem, device):
    """Why to leave a ``GemmProblem`` on a ``Device`` to XLA; None if there is no reason."""
    if device.platform not in ("cpu", "cuda"):
        return None
    if device.platform == "cuda" and (unfit := too_old(device)):
        return unfit
    if problem.scale_rows:  # XLA would dequantize
        return not_measured(device) if device.platform == "cuda" else None
    if problem.is_ragged:  # on a GPU XLA multiplies all rows by the matrix of every group
        return None
    if device.platform == "cuda" and (unfit := not_measured(device)):
        return unfit
    return too_small(problem, device) or (loads_as_they_are(problem) if device.arch == 90 else None)


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
    """Why the extents are too small for a kernel; None if they are not.

    On a GPU tiles are mostly empty. Geometric mean of XLA's time / ours: 0.65 for k of at most 16, 0.89 for batches of
    products of at most 64 x 64 x 64 (41 bfloat16 products on an H200, jaxlib 0.11.2).

    On a CPU a call costs 1 to 2 us more than XLA's loop, plus some for each product of a batch (two cores of an AMD
    EPYC with AVX512_BF16, jaxlib 0.11.2; batches of 1 to 100,000, extents of 1 to 64, k of 1 to 512).
    """
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    if k == 1:
        return "with k = 1 it is an elementwise product, which XLA fuses with its neighbours"
    on_cpu = device.platform == "cpu"
    if not on_cpu and k <= 16:
        return f"with k = {k}, tiles are mostly empty"
    if not on_cpu and (slower := short(problem, device) or narrow(problem)):
        return slower
    if problem.math == _ffi.Math.tf32 and batch * m * n * k <= 64**3:
        return f"a product of {m} x {n} x {k} takes no longer than its launch, and XLA may use full float32"
    # XLA would copy the matrices of a nested batch first.
    if batch > 1 and problem.inner_batch == 1 and (m == n == 1 or m * n * k <= (32768 if on_cpu else 64**3)):
        return f"each of {batch} products of {m} x {n} x {k} is too small for a kernel"
    if on_cpu and m * n * k <= 4096:
        return f"a product of {m} x {n} x {k} is too small for a kernel"
    return None


def short(problem, device):
    """Why XLA is faster at a vector's or a narrow product on a GPU, which takes as long as reading the matrix; or None.

    XLA reads the matrix more slowly than skinny kernels do, but its kernel starts earlier: it takes 1.2 us, and 1 us
    more for each 2 MB, up to 8 MB (5 bfloat16 products on an H200, jaxlib 0.11.2).
    """
    if problem.n <= 8:
        rows, stride, word = problem.m, problem.batch_stride_a, "A"
    elif problem.m == 1 and not problem.gated:
        rows, stride, word = problem.n, problem.batch_stride_b, "B"
    else:
        return None
    machine = machines.machine_of(device)
    elements = rows * problem.k * (problem.batch if stride else 1)
    reading = elements * problem.type_a.bits / 8 / machine.dram_bytes_per_us
    if reading < machine.launch_us / 3:
        return f"reading {word} takes {text.duration(reading)}: it counts more that XLA's kernel starts earlier"
    return None


def narrow(problem):
    """Why no kernel for narrow results on GPUs runs a product of at most 8 columns, or of one float64 row; else None.

    Other kernels' tiles are mostly empty: XLA's time / theirs is 0.64 for 2 to 8 columns. XLA fuses a row's product
    with what computes the matrix.
    """
    m, n, k = problem.m, problem.n, problem.k
    if m == 1 and n > 8 and problem.type_a == _ffi.Type.f64 and problem.major_b == _ffi.Major.row and problem.ldb % 2:
        return "with m = 1, only kernels for rows of B aligned to 16 bytes have no mostly empty tiles"
    if n > 8:
        return None
    if problem.type_b != problem.type_a or problem.gated or problem.ragged != _ffi.Ragged.none:
        return f"with n = {n}, tiles are mostly empty"
    row_a, batched = problem.major_a == _ffi.Major.row, problem.batch > 1
    strides = [k if row_a else m, problem.lda * ((m if row_a else k) > 1), batched * problem.batch_stride_a]
    strides.append(batched * problem.inner_stride_a)
    if problem.major_b == _ffi.Major.column:  # read by vectors, too
        strides += [k, problem.ldb * (n > 1), batched * problem.batch_stride_b, batched * problem.inner_stride_b]
    if any(stride % (128 // problem.type_a.bits) for stride in strides):
        return f"with n = {n}, only kernels for rows aligned to 16 bytes have no mostly empty tiles"
    return None


def loads_as_they_are(problem):
    """Why XLA is faster at a 16-bit product whose rows are not all aligned to TMA's 16 bytes; None if it is not.

    Measured on H200s, for a row-major B and no epilogue. XLA is faster if B's leading dimension is odd, m is 33 to 64
    and XLA's tiles divide k; and if rows are aligned to 4 or 8 bytes, which XLA loads directly, and k is short.
    """
    m, n, k = problem.m, problem.n, problem.k
    is_16_bit = problem.type_a in (_ffi.Type.bf16, _ffi.Type.f16) and problem.type_d == problem.type_a
    if not is_16_bit or problem.epilogue or problem.batch > 1 or problem.major_b != _ffi.Major.row:
        return None
    if 32 < m <= 64 and n >= 1000 and problem.ldb % 2 == 1 and k % 64 == 0:
        return "B's leading dimension is odd: with 33 to 64 rows our kernels would copy B or read it twice"
    on_four_bytes = problem.lda % 2 == problem.ldb % 2 == 0 and (problem.lda % 8 or problem.ldb % 8)
    by_tiles = k % 64 == 0 and k <= 512 and m * n >= 1024 * k
    short = by_tiles or (k <= 192 and m * n >= 200_000 and problem.major_a == _ffi.Major.row)
    if on_four_bytes and min(m, n) >= 128 and short:
        return (
            "rows of A or B are not aligned to 16 bytes: our kernels would copy them or use narrower loads, which "
            "does not pay with so short a k"
        )
    return None
