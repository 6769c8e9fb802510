"""An encoder in Equinox: layers for a token, ``vmap`` over tokens and texts, and a training step of its arrays."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from jax_streamk.tools.programs import UserProgram


class Block(eqx.Module):
    norm_1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm_2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, d_model, heads, key):
        attention, mlp = jax.random.split(key)
        self.norm_1 = eqx.nn.LayerNorm(d_model)
        self.attention = eqx.nn.MultiheadAttention(heads, d_model, key=attention)
        self.norm_2 = eqx.nn.LayerNorm(d_model)
        self.mlp = eqx.nn.MLP(d_model, d_model, 4 * d_model, depth=1, activation=jax.nn.gelu, key=mlp)

    def __call__(self, x):
        normed = jax.vmap(self.norm_1)(x).astype(x.dtype)
        x = x + self.attention(normed, normed, normed)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm_2)(x).astype(x.dtype))


class Encoder(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, layers, d_model, heads, vocab, key):
        embed, head, *keys = jax.random.split(key, 2 + layers)
        self.embed = eqx.nn.Embedding(vocab, d_model, key=embed)
        self.blocks = [Block(d_model, heads, key) for key in keys]
        self.head = eqx.nn.Linear(d_model, vocab, key=head)

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


def training(dtype, batch, time, **sizes):
    optimizer = optax.adamw(1e-4)
    model = cast(eqx.filter_jit(Encoder)(**sizes, key=jax.random.key(0)), jnp.promote_types(dtype, jnp.float32))
    params, static = eqx.partition(model, eqx.is_array)

    def loss_of(params, tokens, targets):
        logits = jax.vmap(eqx.combine(cast(params, dtype), static))(tokens).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(state, tokens, targets):
        params, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens, targets)
        updates, moments = optimizer.update(gradients, moments, params)
        return (eqx.apply_updates(params, updates), moments), loss

    tokens, targets = jax.random.randint(jax.random.key(1), (2, batch, time), 0, sizes["vocab"])
    return step, ((params, jax.jit(optimizer.init)(params)), tokens, targets)


PROGRAMS = [
    UserProgram(
        "equinox_step",
        training,
        small=dict(batch=2, time=24, layers=1, d_model=48, heads=4, vocab=120),
        real=dict(batch=16, time=512, layers=8, d_model=1024, heads=16, vocab=32768),
        carries=True,
    )
]
