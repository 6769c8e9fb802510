"""Residual MLPs whose hidden dimension is divided over GPUs: up by columns, down by rows, one sum over GPUs each."""

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_streamk.tools.programs import UserProgram

SMALL = dict(width=48, hidden=96)
REAL = dict(width=8192, hidden=28672)


def make(dtype, devices, layers, tokens, width, hidden):
    mesh = jax.make_mesh((devices,), ("model",), (AxisType.Auto,), devices=jax.devices()[:devices])
    by_columns, by_rows, whole = (NamedSharding(mesh, spec) for spec in (P(None, "model"), P("model"), P()))

    def forward(params, x):
        for up, down in params:
            x = jax.lax.with_sharding_constraint(x + jax.nn.gelu(x @ up) @ down, whole)
        return x

    def init(key):
        def layer(key):
            up, down = jax.random.split(key)
            return (
                (jax.random.normal(up, (width, hidden)) * width**-0.5).astype(dtype),
                (jax.random.normal(down, (hidden, width)) * hidden**-0.5).astype(dtype),
            )

        return [layer(key) for key in jax.random.split(key, layers)]

    params = jax.jit(init, out_shardings=[(by_columns, by_rows)] * layers)(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (tokens, width)).astype(dtype)
    return forward, (params, jax.device_put(x, whole))


PROGRAMS = [
    UserProgram(
        f"tp{devices}_{layers}_layers_{tokens}_tokens",
        make,
        small=dict(devices=devices, layers=layers, tokens=tokens, **SMALL),
        real=dict(devices=devices, layers=layers, tokens=tokens, **REAL),
        devices=devices,
    )
    for devices in (2, 4)
    for layers in (1, 8)
    for tokens in (1, 16, 128)
]
