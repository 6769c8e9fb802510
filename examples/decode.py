"""Generates text with a key-value cache in one jitted scan, by this library's products and by XLA's, and times both.

    python examples/decode.py
    python examples/decode.py --batch 16 --layers 24 --new 512    # a size for a GPU

The weights are random and the same in both: what is shown is speed and agreement. Every token is the likeliest
(greedy). Two that are almost as likely may swap places when sums are taken in another order, and all that follows is
then another text. So tokens are judged in their own context: XLA's model, without a cache, reads the text that this
library wrote, and at every place its logit for the token written must come within a tolerance of its largest.

Exits with 1 when a token does not.
"""

import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from transformer import BYTES, PRODUCTS, Size, Transformer, parser, products_of

# In standard deviations of the logits. A GPU's float32 products are TF32.
TOLERANCE = {"float32": 1e-3 if jax.default_backend() == "cpu" else 1e-2, "bfloat16": 0.1}


@functools.partial(nnx.jit, static_argnames="new")
def generate(model, prompt, new):
    """(batch, new) tokens that follow the prompt, (batch, time)."""

    def step(carry, position):
        caches, token = carry
        logits, caches, _ = model(token[:, None], caches, position)
        return (caches, jnp.argmax(logits[:, -1], -1)), token

    batch, length = prompt.shape
    logits, caches, _ = model(prompt, model.empty_cache(batch))
    first = jnp.argmax(logits[:, -1], -1)
    _, tokens = lax.scan(step, (caches, first), length + jnp.arange(new))
    return tokens.T


def taking_turns(functions, rounds=5):
    """What each returns, and the median time of a call in seconds, compilation apart."""
    results = {name: jax.block_until_ready(function()) for name, function in functions.items()}
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            begin = time.perf_counter()
            jax.block_until_ready(function())
            times[name].append(time.perf_counter() - begin)
    return results, {name: statistics.median(taken) for name, taken in times.items()}


def check_in_context(judge, prompt, tokens, dtype):
    """Exits if a token's logit is too far from the largest of ``judge``, a model, which reads the whole text."""
    logits, *_ = nnx.jit(lambda model, tokens: model(tokens))(judge, jnp.concatenate([prompt, tokens], 1)[:, :-1])
    logits = logits[:, prompt.shape[1] - 1 :]
    chosen = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    worst, tolerance = float(jnp.max(logits.max(-1) - chosen) / logits.std()), TOLERANCE[dtype]
    print(
        f"In context every token is within {worst:.1e} standard deviations of XLA's likeliest; "
        f"the tolerance is {tolerance:g}."
    )
    if not worst <= tolerance:
        sys.exit("A token is not.")


def main():
    options = parser(
        __doc__.splitlines()[0], "bfloat16", batch=4, prompt=32, new=32, layers=2, d_model=2048, heads=16
    ).parse_args()
    size = Size(options.layers, options.d_model, options.heads, options.prompt + options.new)
    dtype = jnp.dtype(options.dtype)
    prompt = jax.random.randint(jax.random.key(0), (options.batch, options.prompt), 0, BYTES)
    print(
        f"{options.batch} texts of {options.prompt} + {options.new} bytes; "
        f"jax {jax.__version__} on {jax.devices()[0]}, {dtype}"
    )
    models = {products: Transformer(size, products, dtype=dtype, param_dtype=dtype) for products in PRODUCTS}
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(models["XLA"], nnx.Param)))
    print(f"{weights / 1e6:.0f} MB of weights, which every step reads")
    written, seconds = taking_turns(
        {products: lambda model=model: generate(model, prompt, new=options.new) for products, model in models.items()}
    )
    for products, model in models.items():
        print(f"\n{products}: {products_of(generate.lower(model, prompt, new=options.new))}")
        speed = options.batch * options.new / seconds[products]
        print(f"  {speed:.0f} tokens/s, {seconds[products] / options.new * 1e3:.2f} ms a step, prompt included")

    ours = written["jax_streamk"]
    print(f"\n{np.mean(ours == written['XLA']):.1%} of the tokens are the same in both texts.")
    check_in_context(models["XLA"], prompt, ours, options.dtype)


if __name__ == "__main__":
    main()
