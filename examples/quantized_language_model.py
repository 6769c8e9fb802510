"""Trains the language model of language_model.py, makes its weights int4, and writes a text with both.

    python examples/quantized_language_model.py
    python examples/quantized_language_model.py --d-model 1024 --learning-rate 1e-3 --context 256    # for a GPU

The weights of every dense layer become int4 with a scale for each group of rows in each column, rounded to the nearest
without another look at the text. Products read them as they are, bias and activation in the kernel. Both models are
judged by the same batches, and both continue a text, token by token with a cache of keys and values.

Exits with 1 when the losses differ by more than 2%.
"""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from decode import generate, taking_turns
from flax import nnx
from language_model import batches, loss, options_and_text, train
from transformer import Transformer, products_of

import jax_streamk as sk

TOLERANCE = 0.02


class Int4Linear(nnx.Module):
    """A dense layer, trained, whose weights are int4."""

    def __init__(self, layer, group):
        self.kernel = nnx.data(sk.quantize(layer.kernel[...], jnp.int4, block=group))
        self.bias = None if layer.bias is None else nnx.data(layer.bias[...])
        self.activation, self.out_dtype = layer.activation, layer.preferred_element_type

    def __call__(self, x):
        return sk.linear(x, self.kernel, self.bias, activation=self.activation, preferred_element_type=self.out_dtype)


def in_bfloat16(model):
    """The model for serving: weights and all that is computed in bfloat16."""
    out = Transformer(model.size, "jax_streamk", dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    nnx.update(out, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model, nnx.Param)))
    return out


def in_int4(model, group):
    """The same with weights of int4."""
    out = nnx.clone(model)
    for block in out.blocks:
        for part, name in ((block.attention, "qkv"), (block.attention, "out"), (block.mlp, "up"), (block.mlp, "down")):
            setattr(part, name, Int4Linear(getattr(part, name), group))
    out.head = Int4Linear(out.head, group)
    return out


def main():
    options, text = options_and_text(__doc__.splitlines()[0], group=32)
    _, model = train("jax_streamk", text, options)
    model = in_bfloat16(model)
    models = {"bfloat16": model, "int4": in_int4(model, options.group)}

    judge = nnx.jit(lambda model, batch: loss(model, batch)[1])
    some = list(itertools.islice(batches(text, options), 20))
    losses = {name: np.mean([float(judge(model, batch)) for batch in some]) for name, model in models.items()}
    prompt = jnp.asarray(text[None, : options.context // 2], jnp.int32)
    new = options.context - prompt.shape[1]
    _, seconds = taking_turns(
        {name: lambda model=model: generate(model, prompt, new) for name, model in models.items()}
    )
    for name, model in models.items():
        print(f"\n{name}: {products_of(generate.lower(model, prompt, new=new))}")
        print(f"  loss {losses[name]:.4f} nats a byte, {new / seconds[name]:.0f} tokens/s, prompt included")
    apart = abs(losses["int4"] / losses["bfloat16"] - 1)
    print(f"\nThe losses differ by {apart:.2%} of themselves.")
    if not apart < TOLERANCE:
        sys.exit(f"More than {TOLERANCE:.0%}: rounding cost too much.")


if __name__ == "__main__":
    main()
