"""Least squares of many observations: ridge regression, and a Gauss-Newton step for a small network."""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from jax_streamk.tools.programs import UserProgram


def solve(gram, moments):
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(gram), moments)


def ridge(dtype, observations, features, targets):
    def fit(x, y):
        return solve(x.T @ x + 1e-2 * observations * jnp.eye(features, dtype=dtype), x.T @ y)

    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (observations, features)).astype(dtype)
    truth = jax.random.normal(keys[1], (features, targets)).astype(dtype)
    noise = jax.random.normal(keys[2], (observations, targets)).astype(dtype)
    return fit, (x, jnp.matmul(x, truth, precision="highest") + noise)


def network(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[0]


def gauss_newton(dtype, observations, inputs, width):
    """Levenberg's damping; the Jacobian has a row per observation and a column per weight."""

    def step(params, x, y):
        flat, unravel = ravel_pytree(params)

        def residual(flat, x, y):
            return network(unravel(flat), x) - y

        residuals, jacobian = jax.vmap(jax.value_and_grad(residual), (None, 0, 0))(flat, x, y)
        damped = jacobian.T @ jacobian + 1e-2 * observations * jnp.eye(flat.size, dtype=dtype)
        return unravel(flat - solve(damped, jacobian.T @ residuals)), jnp.mean(residuals**2)

    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (inputs, width), (width, width), (width, 1)
    params = [
        dict(w=(jax.random.normal(key, size) * size[0] ** -0.5).astype(dtype), b=jnp.zeros(size[1], dtype))
        for key, size in zip(keys, sizes)
    ]
    x = jax.random.normal(keys[3], (observations, inputs)).astype(dtype)
    return step, (params, x, jnp.sin(x.sum(-1)))


PROGRAMS = [
    UserProgram(
        "ridge_f32",
        ridge,
        small=dict(observations=2000, features=24, targets=8),
        real=dict(observations=1_000_000, features=512, targets=16),
        dtype="float32",
    ),
    UserProgram(
        "ridge_f64",
        ridge,
        small=dict(observations=2000, features=24, targets=8),
        real=dict(observations=1_000_000, features=256, targets=16),
        dtype="float64",
    ),
    UserProgram(
        "gauss_newton_f32",
        gauss_newton,
        small=dict(observations=1000, inputs=4, width=6),
        real=dict(observations=400_000, inputs=8, width=16),
        dtype="float32",
        carries=True,
    ),
    UserProgram(
        "gauss_newton_f64",
        gauss_newton,
        small=dict(observations=1000, inputs=4, width=6),
        real=dict(observations=100_000, inputs=8, width=16),
        dtype="float64",
        carries=True,
    ),
]
