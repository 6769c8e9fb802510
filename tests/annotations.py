"""Calls that mypy must refuse: ``.ci/lint`` fails where a line is ignored for nothing."""

import jax

import jax_streamk


def mistakes(x: jax.Array, sizes: jax.Array) -> None:
    jax_streamk.linear(x, x, activation="sillu")  # type: ignore[arg-type]
    jax_streamk.gated_linear(x, x, x, activation="gelu-tanh")  # type: ignore[arg-type]
    jax_streamk.ragged_dot(x, x, sizes, activation="swish")  # type: ignore[arg-type]
    jax_streamk.ragged_gated(x, x, x, sizes, activation="Silu")  # type: ignore[arg-type]
    jax_streamk.plan(x, x, activation="none")  # type: ignore[call-overload]
    jax_streamk.SplitK(2, "orderly")  # type: ignore[arg-type]
