"""Runs a model that qwix quantizes to four bits, by kernels that read the numbers and by XLA, which dequantizes them.

    python examples/quantized.py

A small gated MLP in bfloat16, whose weights become int4 with a scale for each 32 of a column. The program is qwix's;
``accelerate`` finds what it dequantizes before each product.

Exits with 1 when the results differ by more than bfloat16 rounds.
"""

import argparse
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx

import jax_streamk as sk

TOLERANCE = 0.02  # of the largest element: hidden features are rounded to 8 bits, twice


class MLP(nnx.Module):
    def __init__(self, size, rngs):
        given = dict(use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)
        self.gate, self.up = (nnx.Linear(size, 4 * size, **given) for _ in range(2))
        self.down = nnx.Linear(4 * size, size, **given)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--size", type=int, default=512)
    options = parser.parse_args()
    x = jax.random.normal(jax.random.key(0), (options.rows, options.size), jnp.bfloat16)
    rules = [qwix.QuantizationRule(weight_qtype=jnp.int4, tile_size=32)]
    model = qwix.quantize_model(MLP(options.size, nnx.Rngs(0)), qwix.PtqProvider(rules), x)

    fast = sk.accelerate(lambda model, x: model(x))
    rows = fast.explain(model, x).rows
    print(f"jax {jax.__version__} on {jax.devices()[0]}")
    for row in rows:
        print(f"\n{row.count} by {'jax_streamk' if row.is_ours else 'XLA'}\n{textwrap.indent(str(row.plan), ' ' * 4)}")

    ours, xlas = (np.asarray(nnx.jit(fn)(model, x), np.float32) for fn in (fast, lambda model, x: model(x)))
    difference = np.abs(ours - xlas).max() / np.abs(xlas).max()
    print(f"\nlargest difference from XLA over the largest element: {difference:.1e}")
    raise SystemExit(int(difference > TOLERANCE))


if __name__ == "__main__":
    main()
