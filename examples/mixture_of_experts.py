"""Trains a small mixture of experts on the sources of Python's standard library, and lets it continue a text.

    python examples/mixture_of_experts.py

The transformer of language_model.py with a mixture of experts in place of each MLP, two for every token,
trained twice: same parameters at the start, same batches, same optimizer. In the first run the layer is this library's:
each expert multiplies the tokens that the router sends it, whatever their number. In the second, XLA multiplies all
tokens by all experts, and the router's weights, mostly zeros, choose. The losses fall together. Then the first model
continues a text, and the second, with the same parameters and no cache, judges each byte in its context.

Exits with 1 when the runs' final losses differ by more than 2%, or a byte is not the likeliest.
"""

import jax
import jax.numpy as jnp
from decode import check_in_context, generate
from flax import nnx
from jax import lax
from language_model import compare, options_and_text, train
from transformer import PRODUCTS

from jax_streamk.flax.nnx import MoE

EXPERTS, OF_A_TOKEN = 8, 2


class Mixture(MoE):
    """As many hidden features for each token as the MLP that it replaces."""

    def __init__(self, size, products, **fields):
        super().__init__(size.d_model, 4 * size.d_model // OF_A_TOKEN, EXPERTS, OF_A_TOKEN, **fields)


class AllExperts(Mixture):
    """The same of the same parameters, by products of all tokens and all experts."""

    def __call__(self, x):
        gate, up, down = (
            projection.kernel[...].astype(x.dtype)
            for projection in (self.experts.gate_proj, self.experts.up_proj, self.experts.down_proj)
        )
        router = self.gate.kernel[...].astype(x.dtype)
        likely = jax.nn.softmax(jnp.matmul(x, router, preferred_element_type=jnp.float32))
        weights, chosen = lax.top_k(likely, OF_A_TOKEN)
        weights /= weights.sum(-1, keepdims=True)
        takes = jax.nn.one_hot(chosen, EXPERTS)
        of_expert = jnp.sum(weights[..., None] * takes, -2).astype(x.dtype)
        hidden = nnx.silu(jnp.einsum("btk,ekn->bten", x, gate)) * jnp.einsum("btk,ekn->bten", x, up)
        out = jnp.einsum("bten,enk->btk", hidden * of_expert[..., None], down)
        return out, EXPERTS * jnp.sum(takes.sum(-2).mean((0, 1)) * likely.mean((0, 1)))


def main():
    options, text = options_and_text(__doc__.splitlines()[0])
    runs = [train(products, text, options, mlp) for products, mlp in zip(PRODUCTS, (Mixture, AllExperts))]
    compare([losses for losses, _ in runs], options)

    (_, ours), (_, xlas) = runs
    prompt = jnp.asarray(text[None, : options.context // 2], jnp.int32)
    tokens = generate(ours, prompt, new=options.context - prompt.shape[1])
    print(f"\n{prompt.size} bytes and {tokens.size} that the first model writes, with a cache of keys and values.")
    nnx.update(xlas, nnx.state(ours))
    check_in_context(xlas, prompt, tokens, options.dtype)


if __name__ == "__main__":
    main()
