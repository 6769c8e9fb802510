"""Chains: products of ours that follow each other, with what lies between them on rows, as one call.

A chain is the equations that it replaces: each device may run them as one call of kernels that start early, and all
else, derivatives too, takes them one by one.
"""

import functools

from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad

from jax_streamk import compat
from jax_streamk.product import primitive

# Its parameter is the closed jaxpr of the equations.
chain_p = Primitive("streamk_chain")
chain_p.multiple_results = True
chain_p.def_abstract_eval(lambda *operands, jaxpr: jaxpr.out_avals)
compat.check_nan(chain_p)


@chain_p.def_impl
def _evaluated(*operands, jaxpr):
    return jaxpr_as_fun(jaxpr)(*operands)


def _jvp(primals, tangents, *, jaxpr):
    return compat.jvp_of(jaxpr, primals, tangents)


def _transpose(cotangents, *operands, jaxpr):
    return primitive.transposed(functools.partial(_evaluated, jaxpr=jaxpr), compat.filled(cotangents), operands)


def _batch(axis_data, operands, dims, *, jaxpr):
    (jaxpr,), out_dims = compat.batched_alike(axis_data, dims, jaxpr)
    return chain_p.bind(*operands, jaxpr=jaxpr), out_dims


ad.primitive_jvps[chain_p] = _jvp
ad.primitive_transposes[chain_p] = _transpose
compat.def_batching(chain_p, _batch)
compat.def_expansion(chain_p, "jaxpr")
compat.def_jet(chain_p, _evaluated)
primitive.of_sparse[chain_p] = _evaluated
