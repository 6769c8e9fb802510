"""A llama-type decoder: grouped-query attention, rotary positions, a key-value cache; also by weights of int4.

And what its layers do beside attention.

The sizes are Llama-3.1-8B's.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_streamk.tools.programs import UserProgram

SMALL = dict(layers=1, d_model=64, heads=4, kv_heads=2, d_ff=96, vocab=160)
REAL = dict(layers=8, d_model=4096, heads=32, kv_heads=8, d_ff=14336, vocab=128256)


def init(key, dtype, layers, d_model, heads, kv_heads, d_ff, vocab):
    d_kv = kv_heads * d_model // heads

    def weight(key, rows, columns):
        return (jax.random.normal(key, (rows, columns)) * rows**-0.5).astype(dtype)

    def layer(key):
        q, k, v, o, gate, up, down = jax.random.split(key, 7)
        return dict(
            attention_norm=jnp.ones(d_model, dtype),
            q=weight(q, d_model, d_model),
            k=weight(k, d_model, d_kv),
            v=weight(v, d_model, d_kv),
            o=weight(o, d_model, d_model),
            mlp_norm=jnp.ones(d_model, dtype),
            gate=weight(gate, d_model, d_ff),
            up=weight(up, d_model, d_ff),
            down=weight(down, d_ff, d_model),
        )

    first, head, *keys = jax.random.split(key, 2 + layers)
    embedding = jax.random.normal(first, (vocab, d_model)).astype(dtype)
    norm = jnp.ones(d_model, dtype)
    return dict(embedding=embedding, layers=[*map(layer, keys)], norm=norm, head=weight(head, d_model, vocab))


def random_weights(dtype, **sizes):
    return jax.jit(lambda key: init(key, dtype, **sizes))(jax.random.key(0))


def quantized(weights, group):
    """All matrices as int4, with a scale for each group of rows in each column."""

    def quantize(w):
        if w.ndim < 2:
            return w
        groups = w.reshape(-1, group, w.shape[1]).astype(jnp.float32)
        scale = jnp.abs(groups).max(1, keepdims=True) / 7
        return dict(
            values=jnp.round(groups / scale).astype(jnp.int4).reshape(w.shape), scale=scale.astype(w.dtype)[:, 0]
        )

    return jax.tree.map(quantize, weights)


def but_the_embedding(params, group):
    others = {name: w for name, w in params.items() if name != "embedding"}
    return quantized(others, group) | dict(embedding=params["embedding"])


def product(x, w):
    """By an array, or by one of int4, which is dequantized first."""
    if isinstance(w, dict):
        values, scale = w["values"], w["scale"]
        groups = values.reshape(len(scale), -1, values.shape[1]).astype(x.dtype)
        w = (groups * scale[:, None]).reshape(values.shape)
    return x @ w


def empty_cache(batch, context, dtype, layers, d_model, heads, kv_heads, **_):
    shape = batch, context, kv_heads, d_model // heads
    return [dict(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype)) for _ in range(layers)]


def rms_norm(x, weight):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * weight


def rotary(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 500000.0 ** (-jnp.arange(half) / half)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).astype(x.dtype)


def attention(layer, x, cache, position, heads, kv_heads):
    batch, time, d_model = x.shape
    positions = position + jnp.arange(time)
    q = rotary(product(x, layer["q"]).reshape(batch, time, heads, -1), positions)
    k = rotary(product(x, layer["k"]).reshape(batch, time, kv_heads, -1), positions)
    v = product(x, layer["v"]).reshape(batch, time, kv_heads, -1)
    k, v = (lax.dynamic_update_slice_in_dim(cache[name], new, position, 1) for name, new in dict(k=k, v=v).items())
    q = q.reshape(batch, time, kv_heads, heads // kv_heads, -1)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    seen = jnp.arange(k.shape[1]) <= positions[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)).astype(v.dtype)
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(batch, time, d_model)
    return product(mixed, layer["o"]), dict(k=k, v=v)


def forward(params, tokens, cache, position, heads, kv_heads):
    """Logits of each text's last token, and the cache."""
    x, caches = params["embedding"][tokens], []
    for layer, old in zip(params["layers"], cache):
        mixed, new = attention(layer, rms_norm(x, layer["attention_norm"]), old, position, heads, kv_heads)
        x, normed = x + mixed, rms_norm(x + mixed, layer["mlp_norm"])
        hidden = jax.nn.silu(product(normed, layer["gate"])) * product(normed, layer["up"])
        x = x + product(hidden, layer["down"])
        caches.append(new)
    return product(rms_norm(x[:, -1], params["norm"]), params["head"]).astype(jnp.float32), caches


def decode(dtype, batch, context, group=None, **sizes):
    """A token for each of ``batch`` texts, whose caches are half full; with a ``group``, by weights of int4."""
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]

    def step(state, params, tokens):
        logits, cache = forward(params, tokens[:, None], state["cache"], state["position"], heads, kv_heads)
        return dict(cache=cache, position=state["position"] + 1), logits

    state = dict(cache=empty_cache(batch, context, dtype, **sizes), position=jnp.int32(context // 2))
    tokens = jax.random.randint(jax.random.key(1), (batch,), 0, sizes["vocab"])
    params = random_weights(dtype, **sizes)
    return step, (state, jax.jit(but_the_embedding, static_argnums=1)(params, group) if group else params, tokens)


def prefill(dtype, batch, prompt, **sizes):
    def step(params, tokens):
        cache = empty_cache(batch, prompt, dtype, **sizes)
        return forward(params, tokens, cache, 0, sizes["heads"], sizes["kv_heads"])

    tokens = jax.random.randint(jax.random.key(1), (batch, prompt), 0, sizes["vocab"])
    return step, (random_weights(dtype, **sizes), tokens)


def beside_attention(dtype, rows, layers, d_model, heads, kv_heads, d_ff, group=None, **_):
    """What layers do beside attention: products of few rows that follow each other, and norms."""
    qkv = d_model + 2 * kv_heads * d_model // heads
    matrices = dict(o=(d_model, d_model), gate=(d_model, d_ff), up=(d_model, d_ff), down=(d_ff, d_model))
    shapes = matrices | dict(qkv=(d_model, qkv))

    def layer(key):
        keys = dict(zip(shapes, jax.random.split(key, len(shapes))))
        drawn = {name: jax.random.normal(keys[name], shape) * shape[0] ** -0.5 for name, shape in shapes.items()}
        weights = {name: w.astype(dtype) for name, w in drawn.items()}
        return dict(quantized(weights, group) if group else weights, norms=jnp.ones((2, d_model), dtype))

    def step(state, weights):
        x, qkv = state
        for w in weights:
            mixed = qkv[:, :d_model] * 0.5 + 0.25 * x  # in the place of attention
            x = x + product(mixed, w["o"])
            normed = rms_norm(x, w["norms"][0])
            x = x + product(jax.nn.silu(product(normed, w["gate"])) * product(normed, w["up"]), w["down"])
            qkv = product(rms_norm(x, w["norms"][1]), w["qkv"])
        return x, qkv

    weights = [jax.jit(layer)(key) for key in jax.random.split(jax.random.key(0), layers)]
    keys = jax.random.split(jax.random.key(1))
    state = [jax.random.normal(key, (rows, n)).astype(dtype) for key, n in zip(keys, (d_model, qkv))]
    return step, (state, weights)


PROGRAMS = [
    *(
        UserProgram(
            f"llama_decode_{m}",
            decode,
            small=dict(batch=m, context=16, **SMALL),
            real=dict(batch=m, context=512, **REAL),
            carries=True,
        )
        for m in (1, 8, 16, 32, 64, 128, 256)
    ),
    *(
        UserProgram(
            f"llama_decode_{m}_int4",
            decode,
            small=dict(batch=m, context=16, group=32, **SMALL),
            real=dict(batch=m, context=512, group=128, **REAL),
            carries=True,
        )
        for m in (1, 16)
    ),
    *(
        UserProgram(
            f"llama_layers_{rows}" + ("_int4" if group else ""),
            beside_attention,
            small=dict(rows=rows, group=group and 32, **SMALL),
            real=dict(rows=rows, group=group, **REAL | dict(layers=6)),
        )
        for rows, group in ((1, None), (32, None), (1, 128), (16, 128))
    ),
    UserProgram(
        "llama_prefill_2048",
        prefill,
        small=dict(batch=1, prompt=32, **SMALL),
        real=dict(batch=1, prompt=2048, **REAL),
    ),
]
