"""Checks of the installation, and those that arguments of several kinds have in common."""

import importlib.util
import operator
import pathlib
import sys

import jax

_OLDEST_JAX = "0.9.0"  # as in pyproject.toml


def check_installation():
    """Raises ImportError, with the remedy, where jax is too old or the module _ffi was not compiled for this Python."""
    if jax.__version_info__ < tuple(map(int, _OLDEST_JAX.split("."))):
        raise ImportError(
            f"jax_streamk needs jax {_OLDEST_JAX} or later, and found {jax.__version__}: "
            f"pip install -U 'jax>={_OLDEST_JAX}'"
        )
    if importlib.util.find_spec("jax_streamk._ffi") is None:
        python = "{}.{}".format(*sys.version_info)
        raise ImportError(
            f"{pathlib.Path(__file__).parent} has no compiled module _ffi for Python {python}. In a clone it is the "
            "source folder, which hides the installed package: start Python elsewhere, with pytest instead of "
            "python -m pytest, or install by pip install -e ."
        )


def check_static(name, value):
    """Raises TypeError where an argument, or a part of it, is traced: it is a part of the program, not an input."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
        raise TypeError(
            f"{name} is traced, and must be static, that is, known before tracing: close over its value, or name it in "
            "the static_argnums or static_argnames of jax.jit"
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
