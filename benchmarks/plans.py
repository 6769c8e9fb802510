"""Prints the plans of random products, for a change that must not change any: ``diff`` what two versions print.

    python benchmarks/plans.py > before.txt

Each line is a product and device, and what ``plan`` says of it: problem, kernel, schedule, launch policy, workspace and
reasons. The products have every kind, dtype and layout; ``--seed`` draws others.
"""

import argparse
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_streamk
from jax_streamk import Auto, DataParallel, Device, SplitK, StreamK

DEVICES = (jax_streamk.H200, jax_streamk.H100, jax_streamk.A100, Device("cpu", 0, 8))
DTYPES = ("bfloat16", "bfloat16", "bfloat16", "float16", "float32", "float32", "float64", "int8")
SCHEDULES = (*[Auto()] * 12, DataParallel(), SplitK(3), SplitK(2, "separate"), StreamK(), StreamK("atomic"))
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh")
KINDS = "matmul", "batch", "dims", "linear", "gated", "ragged", "rows", "of_k"
OF_K = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def extent(rng, most):
    """Drawn log-uniformly; half of them multiples of 8."""
    size = int(math.exp(rng.uniform(0, math.log(most))))
    return max(1, size // 8 * 8) if rng.random() < 0.5 else size


def product(rng):
    """The arguments of ``plan`` for a random product."""
    pick = lambda values: values[rng.integers(len(values))]
    shaped = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    dtype, kind = jnp.dtype(pick(DTYPES)), pick(KINDS)
    m, n, k, batch = extent(rng, 8192), extent(rng, 16384), extent(rng, 16384), extent(rng, 64)
    options = dict(schedule=pick(SCHEDULES), precision=pick((None, None, "high", "highest")))
    if dtype == np.int8:
        options["preferred_element_type"] = np.int32
    elif rng.random() < 0.2:
        options["preferred_element_type"] = jnp.dtype("float64" if dtype == np.float64 else "float32")
    if kind == "batch":
        broadcasts = rng.random() < 0.3
        return (shaped(batch, m, k), shaped(k, n) if broadcasts else shaped(batch, k, n)), options
    if kind == "dims":
        lhs, rhs = rng.permutation(3), rng.permutation(3)  # where batch, free and contracting dimensions are
        sizes = np.array([[batch, m, k], [batch, n, k]])
        shapes = [sizes[side][np.argsort(order)] for side, order in enumerate((lhs, rhs))]
        numbers = ((int(lhs[2]),), (int(rhs[2]),)), ((int(lhs[0]),), (int(rhs[0]),))
        return tuple(shaped(*map(int, shape)) for shape in shapes), options | dict(dimension_numbers=numbers)
    if dtype == np.int8:
        return (shaped(m, k), shaped(k, n)), options
    if kind == "linear":
        options |= dict(activation=pick(ACTIVATIONS), bias=rng.random() < 0.5, residual=rng.random() < 0.5)
        return (shaped(m, k), shaped(k, n)), options | dict(alpha=pick((1.0, 0.5)), dimension_numbers=None)
    if kind == "gated":
        rhs = shaped(k, 2, n) if rng.random() < 0.5 else shaped(k, n)
        return (shaped(m, k), rhs), options | dict(gate=True, activation=pick(ACTIVATIONS), bias=rng.random() < 0.5)
    groups = jax.ShapeDtypeStruct((batch,), np.int32)
    if kind == "of_k":
        return (shaped(k, m), shaped(k, n)), options | dict(group_sizes=groups, dimension_numbers=OF_K)
    if kind in ("ragged", "rows"):
        options |= dict(group_sizes=groups, gate=rng.random() < 0.5, bias=rng.random() < 0.5)
        options["activation"] = pick(ACTIVATIONS)
    if kind == "rows":
        options["lhs_indices"] = jax.ShapeDtypeStruct((m,), np.int32)
        return (shaped(extent(rng, 8192), k), shaped(batch, k, n)), options
    return (shaped(m, k), shaped(batch, k, n) if kind == "ragged" else shaped(k, n)), options


def told(args, options, device):
    """What ``plan`` says, in one line."""
    try:
        made = jax_streamk.plan(*args, **options, device=device)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    fields = "" if made.problem is None else made.problem.attributes()
    return f"{made} {made.workspace_bytes} {made.microseconds} {fields}".replace("\n", " ")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="of products, each on four devices")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(asked.seed)
    for _ in range(asked.count):
        args, options = product(rng)
        for device in DEVICES:
            shapes = " @ ".join(f"{x.dtype}{list(x.shape)}" for x in args)
            print(f"{shapes} {options} on {device.kind or device.platform}: {told(args, options, device)}")


if __name__ == "__main__":
    main()
