"""A layer of a mixture of experts as MaxText writes it, by ``lax.ragged_dot``, also in float8 or by experts of MXFP4.

The sizes are Qwen3-30B-A3B's.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_streamk.tools.programs import UserProgram

SMALL = dict(tokens=96, d_model=64, d_expert=96, experts=8, of_a_token=2)
REAL = dict(tokens=8192, d_model=2048, d_expert=768, experts=128, of_a_token=8)
GROUP = 32


def init(key, dtype, d_model, d_expert, experts):
    def weight(key, *shape):
        return (jax.random.normal(key, shape) * shape[-2] ** -0.5).astype(dtype)

    router, gate, up, down = jax.random.split(key, 4)
    return dict(
        router=weight(router, d_model, experts),
        gate=weight(gate, experts, d_model, d_expert),
        up=weight(up, experts, d_model, d_expert),
        down=weight(down, experts, d_expert, d_model),
    )


def quantized(w):
    """An expert's matrices in MXFP4: numbers of four bits, and a power of two for each group of rows in each column."""
    groups = w.reshape(len(w), -1, GROUP, w.shape[2]).astype(jnp.float32)
    most = jnp.abs(groups).max(2, keepdims=True)
    scale = jnp.exp2(jnp.ceil(jnp.log2(most / 6)))
    values = (groups / scale).astype(jnp.float4_e2m1fn).reshape(w.shape)
    return dict(values=values, scale=scale[:, :, 0].astype(jnp.float8_e8m0fnu))


def dequantized(values, scale, dtype):
    groups = values.reshape(*scale.shape[:2], GROUP, -1).astype(dtype)
    return (groups * scale[:, :, None].astype(dtype)).reshape(values.shape)


def to_float8(x, dtype):
    """Numbers whose largest is the dtype's, and their scale."""
    wide, largest = x.astype(jnp.float32), float(jnp.finfo(dtype).max)
    most = jnp.abs(wide).max()
    scale = jnp.where(most > 0, most, 1) / largest
    return jnp.clip(wide / scale, -largest, largest).astype(dtype), scale


def ragged_product(x, w, sizes, dtype, contract, group=()):
    """Of numbers with scales: x has rows by group, and w each group's matrix, or as many rows that are summed."""
    numbers = lax.RaggedDotDimensionNumbers((contract, ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=group)
    (x, x_scale), (w, w_scale) = x, w
    out = lax.ragged_dot_general(x, w, sizes, numbers, preferred_element_type=dtype)
    return out * (x_scale * w_scale).astype(dtype)


@jax.custom_vjp
def ragged_dot_float8(x, w, sizes):
    """``lax.ragged_dot`` of float8_e4m3fn, whose gradients are float8_e5m2, with a scale for each array."""
    return forward_float8(x, w, sizes)[0]


def forward_float8(x, w, sizes):
    numbers = to_float8(x, jnp.float8_e4m3fn), to_float8(w, jnp.float8_e4m3fn)
    return ragged_product(*numbers, sizes, x.dtype, ((1,), (1,)), [0]), (*numbers, sizes)


def backward_float8(saved, gradient):
    (x, w, sizes), numbers = saved, to_float8(gradient, jnp.float8_e5m2)
    of_x = ragged_product(numbers, w, sizes, gradient.dtype, ((1,), (2,)), [0])
    of_w = ragged_product(x, numbers, sizes, gradient.dtype, ((0,), (0,)))
    return of_x, of_w, None


ragged_dot_float8.defvjp(forward_float8, backward_float8)


def layer(params, x, of_a_token, ragged_dot=lax.ragged_dot):
    likely = jax.nn.softmax((x @ params["router"]).astype(jnp.float32))
    weights, chosen = lax.top_k(likely, of_a_token)
    weights = (weights / weights.sum(-1, keepdims=True)).astype(x.dtype)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=params["router"].shape[1])
    rows = x[order // of_a_token]
    hidden = jax.nn.silu(ragged_dot(rows, params["gate"], sizes)) * ragged_dot(rows, params["up"], sizes)
    out = ragged_dot(hidden, params["down"], sizes)[jnp.argsort(order)]
    return jnp.einsum("tkn,tk->tn", out.reshape(*chosen.shape, -1), weights)


def inputs(dtype, tokens, **sizes):
    params, x = jax.random.split(jax.random.key(0))
    return jax.jit(lambda key: init(key, dtype, **sizes))(params), jax.random.normal(
        x, (tokens, sizes["d_model"])
    ).astype(dtype)


def forward(dtype, of_a_token, ragged_dot=lax.ragged_dot, **sizes):
    return lambda params, x: layer(params, x, of_a_token, ragged_dot), inputs(dtype, **sizes)


def forward_mxfp4(dtype, of_a_token, **sizes):
    def step(router, experts, x):
        return layer(router | {name: dequantized(**w, dtype=x.dtype) for name, w in experts.items()}, x, of_a_token)

    params, x = inputs(dtype, **sizes)
    router = dict(router=params.pop("router"))
    return step, (router, jax.jit(lambda params: {name: quantized(w) for name, w in params.items()})(params), x)


def backward(dtype, of_a_token, ragged_dot=lax.ragged_dot, **sizes):
    def loss(params, x):
        return jnp.mean(layer(params, x, of_a_token, ragged_dot).astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, (0, 1)), inputs(dtype, **sizes)


PROGRAMS = [
    UserProgram("moe_forward", forward, small=SMALL, real=REAL),
    UserProgram("moe_decode_mxfp4", forward_mxfp4, small=SMALL, real=REAL | dict(tokens=64)),
    UserProgram("moe_gradient", backward, small=SMALL, real=REAL),
    *(
        UserProgram(f"{name}_float8", functools.partial(make, ragged_dot=ragged_dot_float8), small=SMALL, real=REAL)
        for name, make in dict(moe_forward=forward, moe_gradient=backward).items()
    ),
]
