"""Reads one text alone, among others and in chunks by a small decoder, and compares the bits of its logits.

    python examples/batch_invariant.py
    python examples/batch_invariant.py --prompt 1024 --batch 64 --width 2048    # a size for a GPU

Whoever samples from a model in one batch and trains it in another wants the same logits in both. Products are XLA's,
this library's, or this library's with ``batch_invariant=True``. Between them XLA adds up norms and softmax, and merges
what is elementwise, as suits the batch; the last decoder adds by a product with ones, and has XLA round before ``exp``.

Exits with 1 when the last of these decoders has a logit of other bits.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_streamk as sk

BYTES, LAYERS, HEADS = 256, 2, 4
INVARIANT = sk.Auto(batch_invariant=True)


def by_xla(x):
    return jnp.sum(x, -1, keepdims=True)


def rounded(x):
    return lax.reduce_precision(x, 8, 23)  # to float32, which it is


def by_ones(x):
    return jnp.matmul(x, jnp.ones((x.shape[-1], 1), x.dtype), precision="high")  # on a GPU, more than TF32


# What decoders multiply by, and add by; and what comes before exp, which XLA may merge with a subtraction.
DECODERS = {
    "XLA": (None, by_xla, lambda x: x),
    "jax_streamk": (sk.Auto(), by_xla, lambda x: x),
    "batch-invariant products": (INVARIANT, by_xla, lambda x: x),
    "batch-invariant products and sums": (INVARIANT, by_ones, rounded),
}


def parameters(key, width, dtype):
    shapes = dict(qkv=(width, 3 * width), out=(width, width), gate=(width, 4 * width), up=(width, 4 * width))
    shapes |= dict(down=(4 * width, width))
    keys = iter(jax.random.split(key, 2 + LAYERS * len(shapes)))
    new = lambda shape: jax.random.normal(next(keys), shape, dtype) * shape[0] ** -0.5
    layers = [{name: new(shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    return dict(embed=new((BYTES, width)) * BYTES**0.5, head=new((width, BYTES)), layers=layers)


def norm(x, total):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(total(wide * wide) / x.shape[-1] + 1e-6)).astype(x.dtype)


def attention(x, layer, cache, position, total, rounded):
    batch, time, width = x.shape
    q, k, v = jnp.moveaxis((x @ layer["qkv"]).reshape(batch, time, 3, HEADS, -1), (2, 3), (0, 2))
    k, v = cache = [lax.dynamic_update_slice_in_dim(old, new, position, 2) for old, new in zip(cache, (k, v))]
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * (width // HEADS) ** -0.5
    seen = jnp.arange(k.shape[2]) <= position + jnp.arange(time)[:, None]
    below = rounded(scores - jnp.max(scores, -1, where=seen, initial=-jnp.inf, keepdims=True))
    weights = jnp.where(seen, jnp.exp(below), 0)
    mixed = jnp.einsum("bhqk,bhkd->bqhd", (weights / total(weights)).astype(v.dtype), v)
    return mixed.reshape(batch, time, width) @ layer["out"], cache


def decode(parameters, tokens, caches, position, total, rounded):
    """Of (batch, time) tokens: their logits, and the caches with their keys and values."""
    x, new_caches = parameters["embed"][tokens], []
    for layer, cache in zip(parameters["layers"], caches):
        mixed, cache = attention(norm(x, total), layer, cache, position, total, rounded)
        x, y = x + mixed, norm(x + mixed, total)
        x += (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
        new_caches.append(cache)
    return (norm(x, total) @ parameters["head"]).astype(jnp.float32), new_caches


def logits_of(decoder, parameters, tokens, chunk):
    """Those of the first of some texts, which are read in chunks with a cache of keys and values."""
    width, dtype = parameters["head"].shape[0], parameters["head"].dtype
    empty = jnp.zeros((len(tokens), HEADS, tokens.shape[1], width // HEADS), dtype)
    caches, parts = [[empty, empty]] * LAYERS, []
    for begin in range(0, tokens.shape[1], chunk):
        logits, caches = decoder(parameters, tokens[:, begin : begin + chunk], caches, begin)
        parts.append(np.asarray(logits[0]))
    return np.concatenate(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(prompt=128, batch=16, width=256).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    of_weights, of_tokens = jax.random.split(jax.random.key(0))
    weights = parameters(of_weights, options.width, options.dtype)
    tokens = jax.random.randint(of_tokens, (options.batch, options.prompt), 0, BYTES)
    print(f"{options.prompt} bytes; jax {jax.__version__} on {jax.devices()[0]}, {options.dtype}")
    ways = {f"in a batch of {n}": (n, options.prompt) for n in (2, options.batch)}
    ways |= {f"in chunks of {n}": (1, n) for n in (1, 16, options.prompt // 2)}
    for name, (schedule, total, rounded) in DECODERS.items():
        decoder = functools.partial(decode, total=total, rounded=rounded)
        decoder = jax.jit(decoder if schedule is None else sk.accelerate(decoder, schedule=schedule))
        alone, changed = logits_of(decoder, weights, tokens[:1], options.prompt), 0
        print(f"\n{name}: logits with other bits than those of the text alone")
        for way, (batch, chunk) in ways.items():
            differs = logits_of(decoder, weights, tokens[:batch], chunk).view(np.uint32) != alone.view(np.uint32)
            changed += differs.sum()
            print(f"  {way}: {differs.mean():.1%}")
    sys.exit(int(changed > 0))


if __name__ == "__main__":
    main()
