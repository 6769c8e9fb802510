"""Everything here comes from inside JAX and may move between versions: the one file to look at when it does."""

from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src.lax import lax as _lax
from jax._src.lax.lax import dot_general_p

__all__ = ["apply_primitive", "canonicalize_precision", "dot_general_p", "match_varying"]

apply_primitive = _dispatch.apply_primitive
canonicalize_precision = _lax.canonicalize_precision

# Makes operands of one primitive vary over the same axes of shard_map's mesh, so that their gradients are right.
match_varying = getattr(_core, "auto_insert_reshard", None) or _core.standard_insert_pvary
