"""A language model in Haiku, and its training step: float32 throughout, as Haiku has it by default."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from jax_streamk.tools.programs import UserProgram


def language_model(tokens, layers, d_model, heads, vocab):
    time = tokens.shape[1]
    x = hk.Embed(vocab, d_model)(tokens)
    x = x + hk.get_parameter("positions", (time, d_model), x.dtype, init=hk.initializers.TruncatedNormal(0.02))
    causal = jnp.tri(time, dtype=bool)[None, None]
    for _ in range(layers):
        normed = hk.LayerNorm(-1, True, True)(x)
        attention = hk.MultiHeadAttention(heads, d_model // heads, w_init=hk.initializers.VarianceScaling(1 / layers))
        x = x + attention(normed, normed, normed, mask=causal)
        x = x + hk.nets.MLP([4 * d_model, d_model], activation=jax.nn.gelu)(hk.LayerNorm(-1, True, True)(x))
    return hk.Linear(vocab)(hk.LayerNorm(-1, True, True)(x))


def training(dtype, batch, time, **sizes):
    model = hk.without_apply_rng(hk.transform(lambda tokens: language_model(tokens, **sizes)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-4))

    def loss_of(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(state, tokens):
        params, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(params, updates), moments), loss

    tokens = jax.random.randint(jax.random.key(1), (batch, time + 1), 0, sizes["vocab"])
    params = jax.tree.map(lambda x: x.astype(dtype), jax.jit(model.init)(jax.random.key(0), tokens[:, :-1]))
    return step, ((params, jax.jit(optimizer.init)(params)), tokens)


PROGRAMS = [
    UserProgram(
        "haiku_step",
        training,
        small=dict(batch=2, time=24, layers=1, d_model=48, heads=4, vocab=120),
        real=dict(batch=8, time=512, layers=6, d_model=768, heads=12, vocab=32768),
        dtype="float32",
        carries=True,
    )
]
