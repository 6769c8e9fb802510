"""Checks that arguments of several kinds have in common."""

import operator

import jax


def check_static(name, value):
    """Raises TypeError where an argument, or a part of it, is traced: it is a part of the program, not an input."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
        raise TypeError(
            f"{name} is traced, and must be static, that is known before tracing: close over its value, or name it in the "
            "static_argnums or static_argnames of jax.jit"
        )


def integer(name, value, least=1):
    """An argument that is an integer of any type, as an int.

    Raises:
      TypeError: it is traced.
      ValueError: it is no integer, or not from ``least`` to 2^31 - 1.
    """
    check_static(name, value)
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if isinstance(value, bool) or number is None or not least <= number < 2**31:
        raise ValueError(f"{name}={value!r}: must be an integer of at least {least} and below 2^31")
    return number
