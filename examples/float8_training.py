"""Trains a small language model with products in float8, forward and backward, and once more in bfloat16.

    python examples/float8_training.py
    python examples/float8_training.py --batch 16384 --d-model 2048    # for a GPU

A byte is guessed from those before it, by a dense layer and a mixture of experts. ``dot`` and ``ragged_dot`` are
products with derivatives of their own: activations and weights become float8_e4m3fn, which has more digits, gradients
float8_e5m2, which has the larger range. Each array has the scale that makes its largest number the dtype's, each
expert's matrix one of its own (current scaling). Forward and backward read the same numbers, which take half of the
memory of bfloat16 until then. Parameters, the optimizer and what lies between products are as in bfloat16.

Exits with 1 when the runs' final losses differ by more than 2%.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from language_model import batches, load
from transformer import BYTES, products_of

import jax_streamk as sk

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
EXPERTS, OF_A_TOKEN, OF_A_BYTE = 8, 2, 32
TOLERANCE = 0.02


def to_float8(x, dtype, of_each=0):
    """Numbers with one scale for all, or for each matrix of an array of them."""
    return sk.quantize(x, dtype, block=(*[1] * of_each, *x.shape[of_each:]))


@jax.custom_vjp
def dot(x, w):
    """(m, k) by (k, n)."""
    return dot_forward(x, w)[0]


def dot_forward(x, w):
    x, w = to_float8(x, E4M3), to_float8(w, E4M3)
    return sk.matmul(x, w), (x, w)


def dot_backward(saved, gradient):
    (x, w), gradient = saved, to_float8(gradient, E5M2)
    of_x = sk.einsum("mn,kn->mk", gradient, w)
    of_w = sk.einsum("mk,mn->kn", x, gradient)
    return of_x, of_w


dot.defvjp(dot_forward, dot_backward)


@jax.custom_vjp
def ragged_dot(x, w, sizes):
    """(m, k), whose rows lie by expert, by (experts, k, n)."""
    return ragged_forward(x, w, sizes)[0]


def ragged_forward(x, w, sizes):
    x, w = to_float8(x, E4M3), to_float8(w, E4M3, of_each=1)
    return sk.ragged_dot(x, w, sizes), (x, w, sizes)


# Rows of each expert by its matrix, transposed; and the sum over an expert's rows.
BY_MATRIX = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
OVER_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])


def ragged_backward(saved, gradient):
    (x, w, sizes), gradient = saved, to_float8(gradient, E5M2)
    of_x = sk.ragged_dot_general(gradient, w, sizes, BY_MATRIX)
    of_w = sk.ragged_dot_general(x, gradient, sizes, OVER_ROWS)
    return of_x, of_w, None


ragged_dot.defvjp(ragged_forward, ragged_backward)

# What a model multiplies by.
PRODUCTS = {
    "float8": (dot, ragged_dot),
    "bfloat16": (sk.matmul, sk.ragged_dot),
}


def init(key, context, d_model):
    shapes = dict(
        embed=(BYTES, OF_A_BYTE),
        join=(context * OF_A_BYTE, d_model),
        up=(d_model, 2 * d_model),
        down=(2 * d_model, d_model),
        router=(d_model, EXPERTS),
        expert_gate=(EXPERTS, d_model, d_model),
        expert_up=(EXPERTS, d_model, d_model),
        expert_down=(EXPERTS, d_model, d_model),
        head=(d_model, BYTES),
    )
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(key, shape) * shape[-2] ** -0.5 for key, (name, shape) in zip(keys, shapes.items())}


def mixture(params, x, ragged_dot):
    """Each token's experts, weighted as the router likes them."""
    likely = jax.nn.softmax(jnp.dot(x, params["router"], preferred_element_type=jnp.float32))
    weights, chosen = lax.top_k(likely, OF_A_TOKEN)
    order = jnp.argsort(chosen.ravel())
    rows, sizes = x[order // OF_A_TOKEN], jnp.bincount(chosen.ravel(), length=EXPERTS)
    gate, up = (ragged_dot(rows, params[name], sizes) for name in ("expert_gate", "expert_up"))
    out = ragged_dot(jax.nn.silu(gate) * up, params["expert_down"], sizes)[jnp.argsort(order)]
    return jnp.einsum("tkn,tk->tn", out.reshape(*chosen.shape, -1), weights.astype(x.dtype))


def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def loss(params, tokens, products):
    """Of the last byte of each text, in nats."""
    dot, ragged_dot = products
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    before = params["embed"][tokens[:, :-1]]
    x = dot(before.reshape(len(tokens), -1), params["join"])
    x += dot(jax.nn.gelu(dot(norm(x), params["up"])), params["down"])
    x += mixture(params, norm(x), ragged_dot)
    logits = jnp.dot(norm(x), params["head"], preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1]).mean()


def train(name, text, options):
    """The loss of every step."""
    optimizer = optax.adam(optax.cosine_decay_schedule(options.learning_rate, options.steps))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, tokens):
        params, moments = state
        value, gradient = jax.value_and_grad(loss)(params, tokens, PRODUCTS[name])
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments), value

    params = init(jax.random.key(0), options.context, options.d_model)
    state, losses = (params, optimizer.init(params)), []
    print(f"{name}: {products_of(step.lower(state, next(batches(text, options))))}", flush=True)
    for tokens in batches(text, options):
        state, value = step(state, tokens)
        losses.append(value)
    return np.array(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(steps=200, batch=256, context=8, d_model=128).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options, text = parser.parse_args(), load()
    print(f"{len(text) / 1e6:.1f} MB of text; jax {jax.__version__} on {jax.devices()[0]}\n")
    curves = [train(name, text, options) for name in PRODUCTS]

    print("\nLoss, nats a byte, mean of the steps up to each:\n")
    print(f"{'steps':>9}", *(f"{name:>10}" for name in PRODUCTS))
    for part in np.array_split(np.arange(options.steps), min(10, options.steps)):
        means = [curve[part].mean() for curve in curves]
        print(f"{f'{part[0] + 1}-{part[-1] + 1}':>9}", *(f"{mean:10.4f}" for mean in means))
    apart = abs(means[0] / means[1] - 1)
    print(f"\nThe last differ by {apart:.1%} of themselves.")
    if not apart < TOLERANCE:
        sys.exit(f"More than {TOLERANCE:.0%}: float8 costs too much.")


if __name__ == "__main__":
    main()
