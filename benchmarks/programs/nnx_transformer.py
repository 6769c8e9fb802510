"""An encoder from the layers of ``flax.nnx``: a forward pass, and a training step that updates module and optimizer."""

import jax
import optax
from flax import nnx

from jax_streamk.flax.nnx import accelerate
from jax_streamk.tools.programs import UserProgram

SMALL = dict(batch=2, time=24, layers=1, d_model=48, heads=4, vocab=120)
REAL = dict(batch=16, time=512, layers=12, d_model=1024, heads=16, vocab=32768)


class Block(nnx.Module):
    def __init__(self, d_model, heads, dtype, rngs):
        self.norm_1 = nnx.LayerNorm(d_model, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, d_model, dtype=dtype, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(d_model, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(d_model, 4 * d_model, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * d_model, d_model, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Encoder(nnx.Module):
    def __init__(self, layers, d_model, heads, vocab, dtype, rngs):
        self.embed = nnx.Embed(vocab, d_model, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(d_model, heads, dtype, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(d_model, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(d_model, vocab, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def forward(dtype, batch, time, **sizes):
    tokens = jax.random.randint(jax.random.key(1), (batch, time), 0, sizes["vocab"])
    model = Encoder(**sizes, dtype=dtype, rngs=nnx.Rngs(0))
    return lambda model, tokens: model(tokens), (model, tokens)


def training(dtype, batch, time, **sizes):
    def step(model, optimizer, tokens, targets):
        def loss_of(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(tokens).astype("float32"), targets).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    model = Encoder(**sizes, dtype=dtype, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)
    tokens, targets = jax.random.randint(jax.random.key(1), (2, batch, time), 0, sizes["vocab"])
    return step, (model, optimizer, tokens, targets)


PROGRAMS = [
    UserProgram("nnx_forward", forward, small=SMALL, real=REAL, jit=nnx.jit, accelerate=accelerate),
    UserProgram("nnx_step", training, small=SMALL, real=REAL, jit=nnx.jit, accelerate=accelerate),
]
