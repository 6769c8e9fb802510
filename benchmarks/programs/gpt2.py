"""GPT-2 of the small size: a forward pass in half precision, and a training step of float32 weights with AdamW."""

import jax
import jax.numpy as jnp
import optax

from jax_streamk.tools.programs import UserProgram

SMALL = dict(batch=2, context=24, layers=1, d_model=48, heads=4, vocab=131)
REAL = dict(batch=8, context=1024, layers=12, d_model=768, heads=12, vocab=50257)


def init(key, dtype, context, layers, d_model, vocab):
    def weight(key, *shape):
        return (0.02 * jax.random.normal(key, shape)).astype(dtype)

    def dense(key, inputs, outputs):
        return dict(w=weight(key, inputs, outputs), b=jnp.zeros(outputs, dtype))

    def norm():
        return dict(scale=jnp.ones(d_model, dtype), bias=jnp.zeros(d_model, dtype))

    def block(key):
        qkv, out, up, down = jax.random.split(key, 4)
        return dict(
            ln_1=norm(),
            qkv=dense(qkv, d_model, 3 * d_model),
            out=dense(out, d_model, d_model),
            ln_2=norm(),
            up=dense(up, d_model, 4 * d_model),
            down=dense(down, 4 * d_model, d_model),
        )

    wte, wpe, *keys = jax.random.split(key, 2 + layers)
    return dict(
        wte=weight(wte, vocab, d_model), wpe=weight(wpe, context, d_model), blocks=[*map(block, keys)], ln_f=norm()
    )


def layer_norm(x, p):
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-5)
    return normed.astype(x.dtype) * p["scale"] + p["bias"]


def dense(x, p):
    return x @ p["w"] + p["b"]


def attention(x, p, heads):
    batch, time, d_model = x.shape
    q, k, v = (y.reshape(batch, time, heads, -1) for y in jnp.split(dense(x, p["qkv"]), 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tri(time, dtype=bool), scores.astype(jnp.float32), -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(x.dtype), v)
    return dense(mixed.reshape(batch, time, d_model), p["out"])


def forward(params, tokens, heads):
    """Logits, (batch, time, vocab)."""
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    for p in params["blocks"]:
        x = x + attention(layer_norm(x, p["ln_1"]), p, heads)
        x = x + dense(jax.nn.gelu(dense(layer_norm(x, p["ln_2"]), p["up"])), p["down"])
    return layer_norm(x, params["ln_f"]) @ params["wte"].T


def inference(dtype, batch, heads, **sizes):
    tokens = jax.random.randint(jax.random.key(1), (batch, sizes["context"]), 0, sizes["vocab"])
    params = jax.jit(lambda key: init(key, dtype, **sizes))(jax.random.key(0))
    return lambda params, tokens: forward(params, tokens, heads), (params, tokens)


def training(dtype, batch, heads, **sizes):
    optimizer = optax.adamw(3e-4, weight_decay=0.1)

    def loss(params, tokens):
        half = jax.tree.map(lambda x: x.astype(dtype), params)
        logits = forward(half, tokens[:, :-1], heads).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state, tokens):
        params, moments = state
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    tokens = jax.random.randint(jax.random.key(1), (batch, sizes["context"] + 1), 0, sizes["vocab"])
    wide = jnp.promote_types(dtype, jnp.float32)
    params = jax.jit(lambda key: init(key, wide, **sizes))(jax.random.key(0))
    return step, ((params, jax.jit(optimizer.init)(params)), tokens)


PROGRAMS = [
    UserProgram("gpt2_forward", inference, small=SMALL, real=REAL),
    UserProgram("gpt2_step", training, small=SMALL, real=REAL, carries=True),
]
