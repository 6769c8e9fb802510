"""Whether XLA's own product is faster than a plan of ours: both in programs, where each call waits for the one before it."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_streamk import _ffi, custom_call
from jax_streamk.epilogue import Epilogue, wide
from jax_streamk.measure import LONGEST_PASS, ROTATED_BYTES, dtype_of, spans
from jax_streamk.programs import Program, chain, wall_sample

_MOST_CALLS = 16  # in a program: XLA takes time to compile each


def xla_ratio(made, memory, rounds):
    """XLA's time over that of a ``Plan`` of ours, which has a kernel, on the device of ``memory``: the largest of so many rounds.

    A round in which ours takes less is the last. 0 where XLA's product is less exact, or cannot run.

    Raises:
      RuntimeError: measuring was stopped.
    """
    if made.problem.math == _ffi.Math.tf32x3:  # at that precision XLA multiplies TF32 once
        return 0.0
    largest = 0.0
    try:
        with jax.enable_x64(True):  # types are the problem's, whatever programs may have elsewhere
            programs = [_program(*side(made), made, memory) for side in (ours, xlas)]
            for _ in range(rounds):
                memory.check_running()
                our_time, xla_time = map(wall_sample, programs)
                largest = max(largest, xla_time / our_time)
                if largest > 1:
                    break
    except Exception:  # lack of memory has many names
        memory.check_running()
        return 0.0
    return largest


def ours(made):
    """The product of a ``Plan``, a function, and the shapes of its operands: each as long as strides reach, as is the result."""
    a, b, d, *others = spans(made.problem)
    results = jax.ShapeDtypeStruct((d,), dtype_of(made.problem.type_d)), jax.ShapeDtypeStruct((made.workspace_bytes,), np.uint8)
    call, attributes = jax.ffi.ffi_call(custom_call.target(made), results), custom_call.attributes(made)
    return lambda *operands: call(*operands, **attributes)[0], [(size,) for size in (a, b, *filter(None, others))]


def xlas(made):
    """XLA's product of the same problem, a function, and the shapes of its operands: matrices without gaps."""
    p, dtype = made.problem, dtype_of(made.problem.type_d)
    strides = 1, p.batch_stride_a, p.batch_stride_b, p.batch_stride_bias
    batch, of_a, of_b, of_bias = ((p.batch,) if p.batch > 1 and stride else () for stride in strides)
    activation = None if p.activation == _ffi.Activation.none else p.activation.name
    epilogue = Epilogue(activation, p.alpha, p.beta, p.has_bias, len(of_bias), p.has_residual)
    transposed = [major == _ffi.Major.column for major in (p.major_a, p.major_b)]

    def product(*operands):
        a, b = (x.mT if turned else x for x, turned in zip(operands, transposed))
        out = jnp.matmul(a, b, precision=lax.Precision.DEFAULT, preferred_element_type=dtype if epilogue.is_plain else wide(dtype))
        return epilogue.apply(out, *operands[2:], dtype=dtype)

    a, b = ((*of, *(size[::-1] if turned else size)) for of, size, turned in zip((of_a, of_b), ((p.m, p.k), (p.k, p.n)), transposed))
    return product, [a, b, *[(*of_bias, p.n)] * p.has_bias, *[(*batch, p.m, p.n)] * p.has_residual]


def _program(product, shapes, made, memory):
    dtypes = [dtype_of(made.problem.type_a)] * 2 + [dtype_of(made.problem.type_d)] * (len(shapes) - 2)
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes))
    calls = max(1, min(_MOST_CALLS, int(LONGEST_PASS / made.microseconds)))
    keys = jax.random.split(memory.put(jax.random.key(0)), min(calls, math.ceil(ROTATED_BYTES[memory.device.platform] / size)))
    sets = [tuple(_random(key, shape, dtype) for shape, dtype in zip(shapes, dtypes)) for key in keys]
    products, run = list(itertools.islice(itertools.cycle(sets), calls)), chain(product)
    return Program(lambda: run(products), jax.block_until_ready, calls)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key, shape, dtype):
    if dtype == jnp.int8:
        return jax.random.randint(key, shape, -127, 128, dtype)
    return jax.random.normal(key, shape, jnp.promote_types(dtype, jnp.float32)).astype(dtype)
