"""Data-parallel training of a regression MLP: ``shard_map`` over the batch, gradients summed over GPUs by ``psum``."""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_streamk.tools.programs import UserProgram

SMALL = dict(batch=32, layers=1, width=48, hidden=96)
REAL = dict(batch=8192, layers=4, width=4096, hidden=16384)


def make(dtype, devices, batch, layers, width, hidden):
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    whole, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    optimizer = optax.sgd(1e-3, momentum=0.9)

    def loss_of(params, x, y):
        for up, down in params:
            x = x + jax.nn.gelu(x @ up) @ down
        return jnp.sum((x - y).astype(jnp.float32) ** 2) / (batch * width)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()), check_vma=False
    )
    def summed(params, x, y):
        return jax.lax.psum(jax.value_and_grad(loss_of)(params, x, y), "data")

    def step(state, x, y):
        params, momentum = state
        loss, gradients = summed(params, x, y)
        updates, momentum = optimizer.update(gradients, momentum)
        return (optax.apply_updates(params, updates), momentum), loss

    def init(key):
        keys = jax.random.split(key, (layers, 2))
        params = [
            (
                (jax.random.normal(up, (width, hidden)) * width**-0.5).astype(dtype),
                (jax.random.normal(down, (hidden, width)) * hidden**-0.5).astype(dtype),
            )
            for up, down in keys
        ]
        return params, optimizer.init(params)

    state = jax.jit(init, out_shardings=whole)(jax.random.key(0))
    x, y = jax.random.normal(jax.random.key(1), (2, batch, width)).astype(dtype)
    return step, (state, *jax.device_put((x, y), divided))


PROGRAMS = [
    UserProgram(
        f"data_parallel_{devices}_gpus",
        make,
        small=dict(devices=devices, **SMALL),
        real=dict(devices=devices, **REAL),
        devices=devices,
        carries=True,
    )
    for devices in (2, 4)
]
