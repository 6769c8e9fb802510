"""A physics-informed MLP: a training step for Poisson's equation, whose loss has the Hessian at every point."""

import jax
import jax.numpy as jnp
import optax

from jax_streamk.tools.programs import UserProgram


def init(key, dtype, width, depth, dimensions):
    sizes = [dimensions, *[width] * depth, 1]
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        dict(w=(jax.random.normal(key, (m, n)) * m**-0.5).astype(dtype), b=jnp.zeros(n, dtype))
        for key, m, n in zip(keys, sizes, sizes[1:])
    ]


def network(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[0]


def loss(params, inside, boundary):
    """Of -laplacian(u) = f inside and u = 0 on the boundary, for u = sin(pi x) sin(pi y) sin(pi z)."""

    def residual(x):
        source = x.size * jnp.pi**2 * jnp.prod(jnp.sin(jnp.pi * x))
        return jnp.trace(jax.hessian(network, argnums=1)(params, x)) + source

    on_boundary = jax.vmap(network, (None, 0))(params, boundary)
    return jnp.mean(jax.vmap(residual)(inside) ** 2) + 100 * jnp.mean(on_boundary**2)


def make(dtype, points, dimensions, **sizes):
    optimizer = optax.adam(1e-4)

    def step(state, inside, boundary):
        params, moments = state
        value, gradient = jax.value_and_grad(loss)(params, inside, boundary)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments), value

    inside, boundary = jax.random.uniform(jax.random.key(1), (2, points, dimensions)).astype(dtype)
    boundary = boundary.at[:, 0].set(jnp.round(boundary[:, 0]))
    params = jax.jit(lambda key: init(key, dtype, dimensions=dimensions, **sizes))(jax.random.key(0))
    return step, ((params, jax.jit(optimizer.init)(params)), inside, boundary)


PROGRAMS = [
    UserProgram(
        "pinn_step",
        make,
        small=dict(points=24, dimensions=3, width=32, depth=3),
        real=dict(points=16384, dimensions=3, width=256, depth=5),
        dtype="float32",
        carries=True,
    )
]
