"""Flax's dense layers as one kernel each: product, bias and activation.

``linen.Dense`` and ``nnx.Linear`` are subclasses of Flax's, with the same parameters; ``GatedMLP`` in both is made of
their parameters, and ``MoE`` of one for each expert. Flax's own layers use this library if their fields
``dot_general``, ``qkv_dot_general`` and the like are set to ``jax_streamk.dot_general``, and those for einsums
(``einsum_op`` of ``nnx.Einsum``, ``qk_attn_weights_einsum_cls`` of linen's attention) to ``jax_streamk.einsum``.
``linen.Einsum`` has no such field.
"""

try:
    import flax as _  # noqa: F401
except ImportError as error:
    raise ImportError("jax_streamk.flax needs Flax: pip install jax-streamk[flax]") from error

from jax_streamk.flax import checkpoints, linen, nnx

checkpoints.register()

__all__ = ["linen", "nnx"]
