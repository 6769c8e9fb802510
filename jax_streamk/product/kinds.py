"""The kinds of products that equations of JAX's have, and what each kind says of an equation."""

from typing import Any

from jax_streamk import compat
from jax_streamk.product.dense import Dense
from jax_streamk.product.primitive import product_p
from jax_streamk.product.ragged import Ragged
from jax_streamk.product.spec import Product

KINDS: dict[Any, type[Product]] = {compat.dot_general_p: Dense, compat.ragged_dot_general_p: Ragged}


def of(eqn):
    """The ``Product`` of an equation, ours or JAX's; None if it is another one."""
    if eqn.primitive is product_p:
        return eqn.params["product"]
    kind = KINDS.get(eqn.primitive)
    return None if kind is None else kind.of(eqn)


def is_plain(eqn, *kinds):
    """Whether an equation is a product of ours, of one of these kinds, without epilogue."""
    if eqn.primitive is not product_p:
        return False
    product = eqn.params["product"]
    return isinstance(product, kinds) and product.epilogue.is_plain


def is_scaled(eqn):
    """Whether an equation is a product of ours by numbers with scales."""
    return eqn.primitive is product_p and "scale" in eqn.params["product"].roles


def of_ours(eqn, schedule):
    """The equation with our primitive in the place of JAX's."""
    params = dict(product=of(eqn), schedule=schedule, out_sharding=eqn.params.get("out_sharding"))
    return eqn.replace(primitive=product_p, params=params)
