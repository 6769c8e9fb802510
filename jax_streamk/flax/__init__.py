"""Flax's dense layers as one kernel each: product, bias and activation.

``linen.Dense`` and ``nnx.Linear`` are subclasses of Flax's, with the same parameters. Any other layer of Flax's multiplies by this
library when it is given ``dot_general=jax_streamk.dot_general`` or, the ones that contract by subscripts, ``jax_streamk.einsum``.
"""

try:
    import flax as _  # noqa: F401
except ImportError as error:
    raise ImportError("jax_streamk.flax needs Flax: pip install jax-streamk[flax]") from error

from jax_streamk.flax import linen, nnx

__all__ = ["linen", "nnx"]
