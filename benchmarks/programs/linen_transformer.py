"""An encoder from the layers of ``flax.linen``: a forward pass, and a training step of a ``TrainState``."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from jax_streamk.tools.programs import UserProgram

SMALL = dict(batch=2, time=24, layers=1, d_model=48, heads=4, vocab=120)
REAL = dict(batch=16, time=512, layers=12, d_model=1024, heads=16, vocab=32768)


class Encoder(nn.Module):
    layers: int
    d_model: int
    heads: int
    vocab: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.d_model, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            normed = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(normed)
            h = nn.Dense(4 * self.d_model, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            x = x + nn.Dense(self.d_model, dtype=self.dtype)(nn.gelu(h))
        return nn.Dense(self.vocab, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


def made(dtype, batch, time, **sizes):
    """The model, its weights, tokens and as many more."""
    model = Encoder(**sizes, dtype=dtype)
    tokens, targets = jax.random.randint(jax.random.key(1), (2, batch, time), 0, sizes["vocab"])
    return model, jax.jit(model.init)(jax.random.key(0), tokens), tokens, targets


def forward(dtype, **sizes):
    model, variables, tokens, _ = made(dtype, **sizes)
    return model.apply, (variables, tokens)


def training(dtype, **sizes):
    def step(state, tokens, targets):
        def loss_of(params):
            logits = state.apply_fn({"params": params}, tokens).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    model, variables, tokens, targets = made(dtype, **sizes)
    create = functools.partial(TrainState.create, apply_fn=model.apply, tx=optax.adamw(1e-4))
    state = jax.jit(lambda params: create(params=params))(variables["params"])
    return step, (state, tokens, targets)


PROGRAMS = [
    UserProgram("linen_forward", forward, small=SMALL, real=REAL),
    UserProgram("linen_step", training, small=SMALL, real=REAL, carries=True),
]
