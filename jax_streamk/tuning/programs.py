"""Programs of many calls, and the wall time of a call."""

import dataclasses
import time
from collections.abc import Callable

import jax
from jax import lax


@dataclasses.dataclass(frozen=True)
class Program:
    """``wait(run())`` makes ``calls`` calls; ``run()`` alone may return before the device is done."""

    run: Callable
    wait: Callable
    calls: int


def chain(function, link=None):
    """A jitted function that calls ``function`` on each tuple of operands, each call waiting for the one before.

    The operand ``link``, by default the smaller of the first two, is the same array in every call, and one element of
    each result is written into it in place. This small kernel is the same for every ``function``, since barriers keep
    XLA from fusing it.

    The function returns that array: returning the results would cost the host an allocation each, which takes longer
    than a small product.
    """

    @jax.jit
    def run(products):
        at = min((0, 1), key=lambda i: products[0][i].size) if link is None else link
        linked = products[0][at]
        for operands in products:
            operands = (*operands[:at], linked, *operands[at + 1 :])
            out = lax.optimization_barrier(function(*operands))
            element = out[(slice(0, 1),) * out.ndim].reshape((1,) * linked.ndim).astype(linked.dtype)
            linked = lax.optimization_barrier(lax.dynamic_update_slice(linked, element, (0,) * linked.ndim))
        return linked

    return run


def dependent(function, operands, link=None):
    """The ``Program`` of ``chain(function, link)``; ``operands`` has a tuple for each call."""
    run = chain(function, link)
    return Program(lambda: run(operands), jax.block_until_ready, len(operands))


def wall_sample(program, least=0.03):
    """Microseconds of wall time per call of a program, which is repeated for at least ``least`` seconds."""
    repeat(program, 2)  # warm up after another program
    seconds = wall(program, 1)
    return wall(program, max(1, round(least / seconds))) / program.calls * 1e6


def wall(program, repeats):
    """Seconds of wall time per run, of ``repeats`` in a row."""
    start = time.perf_counter()
    repeat(program, repeats)
    return (time.perf_counter() - start) / repeats


def repeat(program, repeats):
    """Runs a program ``repeats`` times in a row, and waits for the last."""
    for _ in range(repeats):
        # If results were still held, the next run's would have other addresses, which XLA would update in its CUDA
        # graph: 4 us per node on the host, more than a small product takes.
        out = None
        out = program.run()
    program.wait(out)
