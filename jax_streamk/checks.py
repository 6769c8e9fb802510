"""Checks of the installation, and of arguments that several functions have in common."""

import functools
import importlib
import importlib.metadata
import importlib.util
import operator
import pathlib
import sys

import jax
import jaxlib

_OLDEST_JAX = "0.9.0"  # as in pyproject.toml


@functools.cache
def version():
    """The package's version, or "unknown" if it is not installed."""
    try:
        return importlib.metadata.version("jax-streamk")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def check_installation():
    """Raises ImportError, with the remedy, if jax is too old or the module _ffi was not compiled for this Python."""
    if jax.__version_info__ < tuple(map(int, _OLDEST_JAX.split("."))):
        raise ImportError(
            f"jax_streamk needs jax {_OLDEST_JAX} or later, and found {jax.__version__}: "
            f"pip install -U 'jax>={_OLDEST_JAX}'"
        )
    if importlib.util.find_spec("jax_streamk._ffi") is None:
        python = "{}.{}".format(*sys.version_info) + sys.abiflags  # "3.13t" has no global lock
        raise ImportError(
            f"{pathlib.Path(__file__).parent} has no compiled module _ffi for Python {python}. If it is the source "
            "folder of a clone, it hides the installed package: start Python in another folder, run pytest instead of "
            "python -m pytest, or install with pip install -e ."
        )
    try:
        importlib.import_module("jax_streamk._ffi")
    except ImportError as error:
        where = f"Python {sys.version.split()[0]} and jaxlib {jaxlib.__version__}"
        raise ImportError(
            f"the compiled module of jax_streamk {version()} does not load with {where}: {error}. Install it anew: "
            "pip install --force-reinstall --no-deps jax-streamk"
        ) from None


def check_static(name, value):
    """Raises TypeError if an argument that is part of the program, or a part of that argument, is traced."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
        raise TypeError(
            f"{name} is traced; it must be static, that is, known before tracing: close over its value, or name it in "
            "jax.jit's static_argnums or static_argnames"
        )


def integer(name, value, least=1):
    """An argument that is an integer of any type, as an int.

    Raises:
      TypeError: it is traced.
      ValueError: it is not an integer from ``least`` to 2^31 - 1.
    """
    check_static(name, value)
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if isinstance(value, bool) or number is None or not least <= number < 2**31:
        raise ValueError(f"{name}={value!r}: must be an integer from {least} to 2^31 - 1")
    return number
