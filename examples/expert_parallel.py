"""A mixture of experts over several devices: each has some of the tokens and some of the experts.

    python examples/expert_parallel.py

A device routes its own tokens and sends every token to the devices of its experts: one all-to-all. It multiplies what
it received, and another all-to-all brings the results back. No token is dropped: between two devices there is room for
all tokens of one. The rest of that room is in no group, and costs nothing but the way.

Compares result and gradients with those of the layer ``MoE`` on one device, from the same parameters. Exits with 1 when
they differ.
"""

import argparse
import functools
import re
import sys

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_streamk as sk
from jax_streamk.flax.nnx import MoE

DIVISIONS = dict(gate=P(), experts=P("expert"))


def exchange(x):
    """What each device has for this one, of what each has for every other."""
    return lax.all_to_all(x, "expert", 0, 0)


def mixture(params, x, experts_per_token):
    """The result of one device's tokens. ``params`` has its experts, and the whole router."""
    router, experts = params["gate"]["kernel"], params["experts"]
    gate, up, down = (experts[name]["kernel"] for name in ("gate_proj", "up_proj", "down_proj"))
    likely = jax.nn.softmax(sk.matmul(x, router, precision="highest"))  # in TF32 others would be chosen
    weights, chosen = lax.top_k(likely, experts_per_token)
    weights /= weights.sum(-1, keepdims=True)

    # Rows in the order of their experts, so also of the devices of these.
    expert = chosen.reshape(-1)
    order, at = jnp.argsort(expert), jnp.arange(expert.size)
    sizes = jnp.sum(expert[:, None] == jnp.arange(router.shape[1]), 0).reshape(-1, up.shape[0])
    device = expert[order] // up.shape[0]
    place = device, at - (jnp.cumsum(sizes.sum(1)) - sizes.sum(1))[device]
    sent = jnp.zeros((sizes.shape[0], expert.size, x.shape[1])).at[place].set(x[order // experts_per_token])
    received, sizes = exchange(sent), exchange(sizes)

    # Every device sent its rows in that order. What is not a row comes last, and is in no group.
    of_row = jax.vmap(lambda ends: jnp.searchsorted(ends, at, side="right"))(jnp.cumsum(sizes, 1))
    by_expert = jnp.argsort(of_row.reshape(-1))
    rows, group_sizes = received.reshape(-1, x.shape[1])[by_expert], sizes.sum(0)
    out = sk.ragged_dot(sk.ragged_gated(rows, gate, up, group_sizes), down, group_sizes)

    returned = exchange(jnp.zeros_like(out).at[by_expert].set(out).reshape(received.shape))[place]
    parts = jnp.zeros_like(returned).at[order].set(returned).reshape(*chosen.shape, -1)
    return jnp.sum(parts * weights[:, :, None], 1)


def result_and_gradients(layer):
    """Of a function of parameters and tokens: its result, and the gradients of the mean square for both."""

    def loss(params, x):
        out = layer(params, x)
        return jnp.mean(out**2), out

    return jax.jit(lambda params, x: jax.grad(loss, (0, 1), has_aux=True)(params, x)[::-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in dict(devices=4, tokens=256, width=64, hidden=96, experts=8, experts_per_token=2).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, help=f"default {default}")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    devices = jax.devices()[: options.devices]
    mesh = jax.make_mesh((len(devices),), ("expert",), axis_types=(AxisType.Auto,), devices=devices)

    if options.tokens % len(devices) or options.experts % len(devices):
        sys.exit(f"The numbers of tokens and experts must be multiples of {len(devices)}, that of devices.")
    size = options.width, options.hidden, options.experts, options.experts_per_token
    moe = MoE(*size, precision="highest", rngs=nnx.Rngs(0))
    graph, state = nnx.split(moe)
    params, x = nnx.to_pure_dict(state), jax.random.normal(jax.random.key(0), (options.tokens, options.width))

    def whole(params, x):
        filled = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(filled, params)
        return nnx.merge(graph, filled)(x)[0]

    divided = jax.shard_map(
        functools.partial(mixture, experts_per_token=options.experts_per_token),
        mesh=mesh,
        in_specs=(DIVISIONS, P("expert")),
        out_specs=P("expert"),
    )
    program = result_and_gradients(divided).lower(params, x).compile()
    calls = re.findall(r" all-to-all(?:-start)?\(", program.as_text())
    print(
        f"{options.tokens} tokens of width {options.width}, {options.experts} experts of {options.hidden}, "
        f"{options.experts_per_token} for each token; {len(devices)} x {devices[0].device_kind}, jax {jax.__version__}"
    )
    print(f"{len(calls)} all-to-alls forward and backward, one of them of group sizes\n")
    names, far = ("result", "gradients"), []
    for name, found, wanted in zip(names, program(params, x), result_and_gradients(whole)(params, x)):
        apart = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))), found, wanted)
        far.append(max(jax.tree.leaves(apart)))
        print(f"largest difference from one device, {name}: {far[-1]:.1e}")
    tolerance = 1e-5 if jax.default_backend() == "cpu" else 1e-2  # a GPU's float32 products are TF32
    if not max(far) < tolerance:
        sys.exit(f"More than {tolerance:g}.")


if __name__ == "__main__":
    main()
