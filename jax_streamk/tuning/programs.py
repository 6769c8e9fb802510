"""Programs of many calls, and how long a call of them takes on the wall."""

import dataclasses
import time
from collections.abc import Callable

import jax
from jax import lax


@dataclasses.dataclass(frozen=True)
class Program:
    """``wait(run())`` makes so many calls. ``run`` returns early where the device works on its own."""

    run: Callable
    wait: Callable
    calls: int


def chain(function):
    """A jitted function that calls ``function`` on each tuple of operands, each call waiting for the one before.

    One array is the smaller operand of all calls, and after each of them one element of its result is written into it,
    in place: a little kernel that is the same whatever ``function`` is, since barriers keep XLA from merging it with
    what is around.

    Returns:
      The array. Results that are returned would each cost the host an allocation in every run, more than a small
      product takes.
    """

    @jax.jit
    def run(products):
        link = min((0, 1), key=lambda i: products[0][i].size)
        linked = products[0][link]
        for operands in products:
            operands = (*operands[:link], linked, *operands[link + 1 :])
            out = lax.optimization_barrier(function(*operands))
            element = out[(slice(0, 1),) * linked.ndim].astype(linked.dtype)
            linked = lax.optimization_barrier(lax.dynamic_update_slice(linked, element, (0,) * linked.ndim))
        return linked

    return run


def dependent(function, operands):
    """The ``Program`` of ``chain(function)`` on operands of so many calls."""
    run = chain(function)
    return Program(lambda: run(operands), jax.block_until_ready, len(operands))


def wall_sample(program, least=0.03):
    """Microseconds a call of the wall's time, the program being started over and over for at least so many seconds."""
    repeat(program, 2)  # another program ran before
    seconds = _wall(program, 1)
    return _wall(program, max(1, round(least / seconds))) / program.calls * 1e6


def _wall(program, repeats):
    start = time.perf_counter()
    repeat(program, repeats)
    return (time.perf_counter() - start) / repeats


def repeat(program, repeats):
    """Runs a program so many times in a row, and waits for the last."""
    for _ in range(repeats):
        # While the last run's results are held the next run's lie elsewhere, and XLA writes new addresses into its CUDA
        # graph before every run: 4 us a node on the host, more than many a small product takes.
        out = None
        out = program.run()
    program.wait(out)
