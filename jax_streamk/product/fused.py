"""What ``accelerate`` fused: a product of ours in the place of the equations that a program was written with.

Each device runs the product; derivatives are those of the equations.
"""

import functools

from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad

from jax_streamk import compat
from jax_streamk.product import primitive

# Parameters are closed jaxprs: ``call_jaxpr``, one of our products with what its operands need, and ``written``, the
# equations that it replaces.
fused_p = Primitive("streamk_fused")
fused_p.def_abstract_eval(lambda *operands, call_jaxpr, written: written.out_avals[0])
compat.check_nan(fused_p)


@fused_p.def_impl
def _fused(*operands, call_jaxpr, written):
    """Equation by equation: a program for each new jaxpr would have to be compiled."""
    is_divided = any(compat.is_concrete(x) and x.sharding.num_devices > 1 for x in operands)
    return jaxpr_as_fun(written if is_divided else call_jaxpr)(*operands)[0]


def _evaluated(*operands, written, call_jaxpr):
    del call_jaxpr
    return jaxpr_as_fun(written)(*operands)[0]


def _jvp(primals, tangents, *, written, call_jaxpr):
    del call_jaxpr
    (out,), (tangent,) = compat.jvp_of(written, primals, tangents)
    return out, tangent


def _transpose(cotangent, *operands, **params):
    return primitive.transposed(functools.partial(_evaluated, **params), cotangent, operands)


def _batch(axis_data, operands, dims, *, call_jaxpr, written):
    (call_jaxpr, written), (out_dim,) = compat.batched_alike(axis_data, dims, call_jaxpr, written)
    return fused_p.bind(*operands, call_jaxpr=call_jaxpr, written=written), out_dim


ad.primitive_jvps[fused_p] = _jvp
ad.primitive_transposes[fused_p] = _transpose
compat.def_batching(fused_p, _batch)
compat.def_expansion(fused_p, "call_jaxpr", "written")
compat.def_jet(fused_p, _evaluated)
primitive.of_sparse[fused_p] = _evaluated
