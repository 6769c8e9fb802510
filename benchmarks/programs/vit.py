"""A Vision Transformer's forward pass, ViT-B/16: 196 patches and a class token, which no tile divides."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_streamk.tools.programs import UserProgram


def init(key, dtype, image, patch, layers, d_model, classes):
    def weight(key, *shape, inputs):
        return (jax.random.normal(key, shape) * inputs**-0.5).astype(dtype)

    def norm():
        return dict(scale=jnp.ones(d_model, dtype), bias=jnp.zeros(d_model, dtype))

    def dense(key, inputs, outputs):
        return dict(w=weight(key, inputs, outputs, inputs=inputs), b=jnp.zeros(outputs, dtype))

    def block(key):
        keys = iter(jax.random.split(key, 6))
        square = {name: dense(next(keys), d_model, d_model) for name in ("q", "k", "v", "out")}
        mlp = dict(up=dense(next(keys), d_model, 4 * d_model), down=dense(next(keys), 4 * d_model, d_model))
        return dict(norm_1=norm(), norm_2=norm(), **square, **mlp)

    patches, positions, token, head, *keys = jax.random.split(key, 4 + layers)
    return dict(
        patches=weight(patches, patch, patch, 3, d_model, inputs=3 * patch**2),
        positions=0.02 * jax.random.normal(positions, (1 + (image // patch) ** 2, d_model)).astype(dtype),
        token=0.02 * jax.random.normal(token, (1, 1, d_model)).astype(dtype),
        blocks=[*map(block, keys)],
        norm=norm(),
        head=dense(head, d_model, classes),
    )


def layer_norm(x, p):
    wide = x.astype(jnp.float32)
    normed = jax.nn.standardize(wide, epsilon=1e-6)
    return normed.astype(x.dtype) * p["scale"] + p["bias"]


def dense(x, p):
    return x @ p["w"] + p["b"]


def encode(x, p, heads):
    batch, time, d_model = x.shape
    normed = layer_norm(x, p["norm_1"])
    q, k, v = (dense(normed, p[name]).reshape(batch, time, heads, -1) for name in "qkv")
    x = x + dense(jax.nn.dot_product_attention(q, k, v).reshape(batch, time, d_model), p["out"])
    return x + dense(jax.nn.gelu(dense(layer_norm(x, p["norm_2"]), p["up"]), approximate=False), p["down"])


def make(dtype, batch, heads, **sizes):
    def forward(params, images):
        strides = (sizes["patch"],) * 2
        x = lax.conv_general_dilated(
            images, params["patches"], strides, "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ).reshape(batch, -1, sizes["d_model"])
        x = jnp.concatenate([jnp.broadcast_to(params["token"], (batch, 1, sizes["d_model"])), x], 1)
        x = x + params["positions"]
        for block in params["blocks"]:
            x = encode(x, block, heads)
        return dense(layer_norm(x[:, 0], params["norm"]), params["head"])

    images = jax.random.normal(jax.random.key(1), (batch, sizes["image"], sizes["image"], 3)).astype(dtype)
    return forward, (jax.jit(lambda key: init(key, dtype, **sizes))(jax.random.key(0)), images)


PROGRAMS = [
    UserProgram(
        "vit_b16_forward",
        make,
        small=dict(batch=2, image=24, patch=8, layers=1, d_model=48, heads=4, classes=10),
        real=dict(batch=128, image=224, patch=16, layers=12, d_model=768, heads=12, classes=1000),
    )
]
