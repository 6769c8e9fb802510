"""What six layers of a decoder do beside attention: products of few rows that follow each other, and norms.

The sizes are Llama-3.1-8B's.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_streamk.tools.programs import UserProgram

SMALL = dict(layers=1, d_model=64, d_kv=16, d_ff=96)
REAL = dict(layers=6, d_model=4096, d_kv=1024, d_ff=14336)


def init(key, dtype, layers, d_model, d_kv, d_ff):
    shapes = dict(
        o=(d_model, d_model),
        gate=(d_model, d_ff),
        up=(d_model, d_ff),
        down=(d_ff, d_model),
        qkv=(d_model, d_model + 2 * d_kv),
    )

    def layer(key):
        keys = dict(zip(shapes, jax.random.split(key, len(shapes))))
        drawn = {name: jax.random.normal(keys[name], shape) * shape[0] ** -0.5 for name, shape in shapes.items()}
        return {name: w.astype(dtype) for name, w in drawn.items()} | dict(norms=jnp.ones((2, d_model), dtype))

    return [*map(layer, jax.random.split(key, layers))]


def quantized(layers, group):
    """Weights as int4, with a scale for each group of rows in each column."""

    def quantize(w):
        groups = w.reshape(-1, group, w.shape[1]).astype(jnp.float32)
        scale = jnp.abs(groups).max(1, keepdims=True) / 7
        values = jnp.round(groups / scale).astype(jnp.int4).reshape(w.shape)
        return dict(values=values, scale=scale.astype(w.dtype)[:, 0])

    return [{name: w if name == "norms" else quantize(w) for name, w in layer.items()} for layer in layers]


def product(x, w):
    if isinstance(w, dict):
        values, scale = w["values"], w["scale"]
        groups = values.reshape(len(scale), -1, values.shape[1]).astype(x.dtype)
        w = (groups * scale[:, None]).reshape(values.shape)
    return x @ w


def rms_norm(x, weight):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * weight


def decode(dtype, rows, group=None, **sizes):
    d_model, d_kv = sizes["d_model"], sizes["d_kv"]

    def step(state, layers):
        x, qkv = state
        for w in layers:
            mixed = qkv[:, :d_model] * 0.5 + 0.25 * x  # in the place of attention
            x = x + product(mixed, w["o"])
            normed = rms_norm(x, w["norms"][0])
            x = x + product(jax.nn.silu(product(normed, w["gate"])) * product(normed, w["up"]), w["down"])
            qkv = product(rms_norm(x, w["norms"][1]), w["qkv"])
        return x, qkv

    layers = jax.jit(lambda key: init(key, dtype, **sizes))(jax.random.key(0))
    if group:
        layers = jax.jit(quantized, static_argnums=1)(layers, group)
    keys = jax.random.split(jax.random.key(1))
    state = [jax.random.normal(k, (rows, n)).astype(dtype) for k, n in zip(keys, (d_model, d_model + 2 * d_kv))]
    return step, (state, layers)


PROGRAMS = [
    UserProgram(
        f"decoder_layers_{rows}" + ("_int4" if group else ""),
        decode,
        small=dict(rows=rows, **(dict(group=32) if group else {}), **SMALL),
        real=dict(rows=rows, **(dict(group=128) if group else {}), **REAL),
    )
    for rows, group in ((1, None), (32, None), (1, 128), (16, 128))
]
