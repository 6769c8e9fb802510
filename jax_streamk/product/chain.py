"""Chains: products of ours that follow each other, with what lies between them on rows, as one call.

A chain is the equations that it replaces: each device may run them as one call of kernels that start early, and all
else, derivatives too, takes them one by one.
"""

import functools

from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad

from jax_streamk import compat
from jax_streamk.product import primitive

# Its parameters are the closed jaxpr of the equations, and the schedule of those products in it that are JAX's.
chain_p = Primitive("streamk_chain")
chain_p.multiple_results = True
chain_p.def_abstract_eval(lambda *operands, jaxpr, schedule: jaxpr.out_avals)
compat.check_nan(chain_p)


@chain_p.def_impl
def _evaluated(*operands, jaxpr, schedule):
    del schedule
    return jaxpr_as_fun(jaxpr)(*operands)


def _jvp(primals, tangents, *, jaxpr, schedule):
    del schedule
    return compat.jvp_of(jaxpr, primals, tangents)


def _transpose(cotangents, *operands, **params):
    return primitive.transposed(functools.partial(_evaluated, **params), compat.filled(cotangents), operands)


def _batch(axis_data, operands, dims, *, jaxpr, schedule):
    (jaxpr,), out_dims = compat.batched_alike(axis_data, dims, jaxpr)
    return chain_p.bind(*operands, jaxpr=jaxpr, schedule=schedule), out_dims


ad.primitive_jvps[chain_p] = _jvp
ad.primitive_transposes[chain_p] = _transpose
compat.def_batching(chain_p, _batch)
compat.def_expansion(chain_p, "jaxpr")
compat.def_jet(chain_p, _evaluated)
primitive.of_sparse[chain_p] = _evaluated
