"""Everything here comes from inside JAX and may move between versions: the one file to look at when it does."""

from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import dtypes as _dtypes
from jax._src import sharding_impls as _sharding_impls
from jax._src.lax import lax as _lax
from jax._src.lax.lax import dot_general_p

__all__ = ["apply_primitive", "as_weak_type", "canonicalize_dtype", "canonicalize_precision", "canonicalize_sharding", "dot_general_p", "match_varying"]

apply_primitive = _dispatch.apply_primitive
canonicalize_precision = _lax.canonicalize_precision
canonicalize_sharding = _sharding_impls.canonicalize_sharding

# The dtype a user asked for; with a warning, its 32-bit sibling where 64-bit types are disabled.
canonicalize_dtype = _dtypes.check_and_canonicalize_user_dtype

# Makes operands of one primitive vary over the same axes of shard_map's mesh, so that their gradients are right.
match_varying = getattr(_core, "auto_insert_reshard", None) or _core.standard_insert_pvary


def as_weak_type(x):
    """``x`` with a dtype that gives way in promotion, as Python's numbers do."""
    return _lax._convert_element_type(x, weak_type=True)
