"""A LoRA fine-tuning step: frozen half-precision weights of Llama-3.1-8B's sizes, adapters of rank 16 in float32."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jax_streamk.tools.programs import UserProgram

SMALL = dict(batch=2, time=24, layers=1, d_model=48, heads=4, d_ff=96, vocab=120, rank=4)
REAL = dict(batch=4, time=512, layers=4, d_model=4096, heads=32, d_ff=14336, vocab=128256, rank=16)


def init(key, dtype, layers, d_model, d_ff, vocab, rank):
    """Frozen weights and adapters, both by name."""
    square, wide, tall = (d_model, d_model), (d_model, d_ff), (d_ff, d_model)
    shapes = dict(q=square, k=square, v=square, o=square, gate=wide, up=wide, down=tall)

    def normal(key, *shape):
        return jax.random.normal(key, shape) * shape[0] ** -0.5

    def layer(key):
        keys = dict(zip(shapes, jax.random.split(key, len(shapes))))
        return {name: normal(keys[name], *shape).astype(dtype) for name, shape in shapes.items()}

    def adapters(key):
        # In LoRA b begins with zeros; by the second step it has none.
        wider = jnp.promote_types(dtype, jnp.float32)
        keys = dict(zip(shapes, jax.random.split(key, len(shapes))))
        return {
            name: dict(a=normal(keys[name], m, rank).astype(wider), b=0.01 * normal(keys[name], rank, n).astype(wider))
            for name, (m, n) in shapes.items()
        }

    embedding, head, *keys = jax.random.split(key, 2 + layers)
    embedding, head = normal(embedding, vocab, d_model).astype(dtype), normal(head, d_model, vocab).astype(dtype)
    return dict(embedding=embedding, head=head, layers=[*map(layer, keys)]), [*map(adapters, keys)]


def rms_norm(x):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def forward(frozen, adapters, tokens, heads):
    x = frozen["embedding"][tokens]
    for weights, adapter in zip(frozen["layers"], adapters):

        def dense(x, name, weights=weights, adapter=adapter):
            a, b = (adapter[name][half].astype(x.dtype) for half in "ab")
            return x @ weights[name] + 2 * ((x @ a) @ b)

        normed = rms_norm(x)
        q, k, v = (dense(normed, name).reshape(*tokens.shape, heads, -1) for name in "qkv")
        x = x + dense(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape), "o")
        normed = rms_norm(x)
        x = x + dense(jax.nn.silu(dense(normed, "gate")) * dense(normed, "up"), "down")
    return rms_norm(x) @ frozen["head"]


def make(dtype, batch, time, heads, **sizes):
    optimizer = optax.adamw(1e-4)

    def loss(adapters, frozen, tokens):
        logits = forward(frozen, adapters, tokens[:, :-1], heads).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state, frozen, tokens):
        adapters, moments = state
        value, gradient = jax.value_and_grad(loss)(adapters, frozen, tokens)
        updates, moments = optimizer.update(gradient, moments, adapters)
        return (optax.apply_updates(adapters, updates), moments), value

    frozen, adapters = jax.jit(lambda key: init(key, dtype, **sizes))(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (batch, time + 1), 0, sizes["vocab"])
    return step, ((adapters, jax.jit(optimizer.init)(adapters)), frozen, tokens)


PROGRAMS = [UserProgram("lora_step", make, small=SMALL, real=REAL, carries=True)]
