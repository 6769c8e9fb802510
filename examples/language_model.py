"""Trains a small language model on the sources of Python's standard library, by this library's products and by XLA's.

    python examples/language_model.py

A transformer over bytes, trained twice: same parameters at the start, same batches, same optimizer. In the first run
every product, forward and backward, is this library's: the projections and the MLP (with its activation fused), the two
products of attention, and the head. The losses fall together; they do not stay equal to the last bit, because sums are
taken in another order.

Exits with 1 when the runs' final losses differ by more than 2%.
"""

import pathlib
import sys
import sysconfig
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformer import MLP, PRODUCTS, Size, Transformer, parser, products_of

TOLERANCE = 0.02
OF_MLPS = 0.01  # the weight of the MLPs' own losses


def load():
    """The modules at the top of the standard library, one after the other, as bytes."""
    sources = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in sources), np.uint8)


def batches(text, options):
    """(batch, context + 1) bytes from random places, the same in every run."""
    rng = np.random.default_rng(0)
    for _ in range(options.steps):
        start = rng.integers(0, len(text) - options.context - 1, options.batch)
        yield jnp.asarray(text[start[:, None] + np.arange(options.context + 1)], jnp.int32)


def loss(model, batch):
    logits, _, of_mlps = model(batch[:, :-1])
    value = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
    return value + OF_MLPS * of_mlps, value


@nnx.jit
def step(model, optimizer, batch):
    (_, value), gradient = nnx.value_and_grad(loss, has_aux=True)(model, batch)
    optimizer.update(model, gradient)
    return value


def train(products, text, options, mlp=MLP):
    """The loss of every step in nats a byte, and the model."""
    size = Size(options.layers, options.d_model, options.heads, options.context)
    model = Transformer(size, products, mlp, dtype=jnp.dtype(options.dtype), param_dtype=jnp.float32)
    schedule = optax.warmup_cosine_decay_schedule(0, options.learning_rate, options.steps // 10, options.steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    first = next(batches(text, options))
    print(f"\n{products}: {products_of(step.lower(model, optimizer, first))}", flush=True)
    losses, times = [], []
    for batch in batches(text, options):
        begin = time.perf_counter()
        losses.append(float(step(model, optimizer, batch)))
        times.append(time.perf_counter() - begin)
    print(f"  compiled in {times[0]:.1f} s, then {np.median(times[1:]) * 1e3:.1f} ms a step")
    return np.array(losses), model


def options_and_text(description, **others):
    """Of the command line, with other integers by their default, and what it says the model learns from."""
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    parse = parser(description, dtype, steps=200, batch=32, context=64, layers=2, d_model=128, heads=4, **others)
    parse.add_argument("--learning-rate", type=float, default=5e-3)
    options, text = parse.parse_args(), load()
    print(f"{len(text) / 1e6:.1f} MB of text; jax {jax.__version__} on {jax.devices()[0]}, {options.dtype}")
    return options, text


def compare(curves, options):
    """Prints the losses of both runs; exits if the last differ."""
    print("\nLoss, nats a byte, mean of the steps up to each:\n")
    print(f"{'steps':>11}  {'jax_streamk':>11}  {'XLA':>11}")
    for part in np.array_split(np.arange(options.steps), min(10, options.steps)):
        means = [curve[part].mean() for curve in curves]
        print(f"{f'{part[0] + 1}-{part[-1] + 1}':>11}  {means[0]:11.4f}  {means[1]:11.4f}")
    apart = abs(means[0] / means[1] - 1)
    print(f"\nThe last differ by {apart:.1e} of themselves.")
    if not apart < TOLERANCE:
        sys.exit(f"More than {TOLERANCE:.0%}: that is not noise.")


def main():
    options, text = options_and_text(__doc__.splitlines()[0])
    compare([train(products, text, options)[0] for products in PRODUCTS], options)


if __name__ == "__main__":
    main()
