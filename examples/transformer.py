"""A decoder-only transformer over bytes, in Flax nnx, whose matrix products are this library's or XLA's."""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import jax_streamk as sk
from jax_streamk.flax.nnx import Linear

BYTES = 256


class XlaLinear(nnx.Linear):
    """Flax's own layer, with the activation that ours takes along."""

    def __init__(self, *args, activation=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.activation = activation

    def __call__(self, x):
        y = super().__call__(x)
        return nnx.gelu(y, approximate=True) if self.activation == "gelu_tanh" else y


# What a model multiplies by: the class of its dense layers, and einsum.
PRODUCTS = {"jax_streamk": (Linear, sk.einsum), "XLA": (XlaLinear, jnp.einsum)}


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int
    d_model: int
    heads: int
    context: int


class Attention(nnx.Module):
    def __init__(self, size, products, **fields):
        linear, self.einsum = products
        self.heads = size.heads
        self.qkv = linear(size.d_model, 3 * size.d_model, **fields)
        self.out = linear(size.d_model, size.d_model, **fields)

    def __call__(self, x, cache, position):
        """Attends to x, (batch, time, d_model), and with a ``cache`` to what it holds before ``position``, too."""
        batch, time, d_model = x.shape
        # (batch, heads, time, d_head), so that batch and heads are one dimension to a kernel.
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(batch, time, 3, self.heads, -1), (2, 3), (0, 2))
        if cache is not None:
            k, v = cache = [
                lax.dynamic_update_slice_in_dim(old, new, position, axis=2) for old, new in zip(cache, (k, v))
            ]
        weights = self.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        seen = jnp.arange(k.shape[2]) <= position + jnp.arange(time)[:, None]
        weights = jax.nn.softmax(jnp.where(seen, weights, -jnp.inf)).astype(v.dtype)
        mixed = self.einsum("bhqk,bhkd->bqhd", weights, v)
        return self.out(mixed.reshape(batch, time, d_model)), cache


class MLP(nnx.Module):
    """Such a module also returns a loss of its own, here none."""

    def __init__(self, size, products, **fields):
        linear, _ = products
        self.up = linear(size.d_model, 4 * size.d_model, activation="gelu_tanh", **fields)
        self.down = linear(4 * size.d_model, size.d_model, **fields)

    def __call__(self, x):
        return self.down(self.up(x)), 0.0


class Block(nnx.Module):
    def __init__(self, size, products, mlp, **fields):
        self.attention = Attention(size, products, **fields)
        self.mlp = mlp(size, products, **fields)
        self.norms = nnx.List([nnx.LayerNorm(size.d_model, **fields) for _ in range(2)])

    def __call__(self, x, cache, position):
        mixed, cache = self.attention(self.norms[0](x), cache, position)
        x += mixed
        out, loss = self.mlp(self.norms[1](x))
        return x + out, cache, loss


class Transformer(nnx.Module):
    """Logits of the byte after each. The same seed gives the same parameters whatever the products.

    Args:
      size: of the model.
      products: a key of ``PRODUCTS``.
      mlp: the class of the second half of each block.
      dtype: of products and what lies between them; parameters are of param_dtype, logits float32.
    """

    def __init__(self, size, products, mlp=MLP, *, dtype, param_dtype, seed=0):
        fields = {"dtype": dtype, "param_dtype": param_dtype, "rngs": nnx.Rngs(seed)}
        self.size, self.dtype = size, dtype
        linear, _ = products = PRODUCTS[products]
        self.embed, self.place = (nnx.Embed(count, size.d_model, **fields) for count in (BYTES, size.context))
        self.blocks = nnx.List([Block(size, products, mlp, **fields) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.d_model, **fields)
        self.head = linear(size.d_model, BYTES, use_bias=False, preferred_element_type=jnp.float32, **fields)

    def empty_cache(self, batch):
        """Room for the keys and values of ``context`` tokens in every layer."""
        shape = batch, self.size.heads, self.size.context, self.size.d_model // self.size.heads
        return [[jnp.zeros(shape, self.dtype)] * 2] * self.size.layers

    def __call__(self, tokens, caches=None, position=0):
        """Of (batch, time) tokens: (batch, time, BYTES) logits, the caches with them, the sum of the MLPs' losses."""
        x = self.embed(tokens) + self.place(position + jnp.arange(tokens.shape[1]))
        new_caches, losses = [], 0.0
        for block, cache in zip(self.blocks, caches or [None] * self.size.layers):
            x, cache, loss = block(x, cache, position)
            new_caches.append(cache)
            losses += loss
        return self.head(self.norm(x)), new_caches, losses


def products_of(lowered):
    """How many products of a lowered program are this library's, and how many XLA's."""
    text = lowered.as_text()
    ours, xlas = text.count("custom_call @jax_streamk_"), text.count("stablehlo.dot_general")
    return f"{ours} products by jax_streamk, {xlas} by XLA"


def parser(description, dtype, **defaults):
    """Of the options that both examples have; ``dtype`` is the default of one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=dtype)
    return parser
