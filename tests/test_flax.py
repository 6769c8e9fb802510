"""Our layers against Flax's own, and Flax's own layers on our products."""

import functools
import re
import subprocess
import sys
import types
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streamk
from jax_streamk import Auto, DataParallel, PerPass, QuantizedArray, SplitK, StreamK, quantize
from jax_streamk.flax import linen, nnx
from jax_streamk.product.epilogue import ACTIVATIONS

PLATFORM = "cuda" if jax.default_backend() == "gpu" else "cpu"
TARGET = {"cuda": "jax_streamk_cuda_gemm", "cpu": "jax_streamk_host_gemm"}[PLATFORM]
BF16, F32, F64 = jnp.bfloat16, jnp.float32, jnp.float64
# Relative to the largest entry. In bfloat16 Flax's layers round up to three times, ours once; on a GPU float32 is
# TF32.
TOLERANCE = {BF16: 2e-2, F32: 1e-5 if PLATFORM == "cpu" else 5e-3}
KINDS = ["linen", "nnx"]
K, N = 48, 32
BIASED = {"bias_init": jax.nn.initializers.normal(1.0)}


def normal(*shape, dtype=F32):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), dtype)


def functional(layer, key=0, k=K):
    """(a function of parameters and input, the parameters) of a linen layer, or of an nnx layer made from rngs."""
    if isinstance(layer, flax.linen.Module):
        return layer.apply, layer.init(jax.random.key(key), jnp.zeros((2, k)))
    graph, state = flax.nnx.split(layer(rngs=flax.nnx.Rngs(key)))
    return lambda state, *args: flax.nnx.merge(graph, state)(*args), state


def stock(kind, **fields):
    fields = BIASED | fields
    return flax.linen.Dense(N, **fields) if kind == "linen" else functools.partial(flax.nnx.Linear, K, N, **fields)


def ours(kind, **fields):
    fields = BIASED | fields
    return linen.Dense(N, **fields) if kind == "linen" else functools.partial(nnx.Linear, K, N, **fields)


def kernel_of(state):
    return state["params"]["kernel"] if isinstance(state, dict) else state["kernel"][...]


def assert_close(got, wanted, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        assert x.dtype == y.dtype and x.shape == y.shape
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.abs(x - y).max(initial=0) <= tolerance * np.abs(y).max(initial=0)


def assert_same_bits(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        np.testing.assert_array_equal(x, y, strict=True)


def loss(function):
    """A scalar whose derivative is different for each element of the result."""
    return lambda *args: jnp.sum(jnp.sin(function(*args).astype(F32)))


def calls(function, *args):
    """(attributes of our calls in a lowered program, number of products that are left to XLA)."""
    text = jax.jit(function).lower(*args).as_text()
    found = re.findall(rf"custom_call @{TARGET}\(.*?backend_config = \{{(.*?)\}}", text)
    return [dict(re.findall(r"(\w+) = ([^\s,]+)", attributes)) for attributes in found], text.count(
        "stablehlo.dot_general"
    )


class StockMLP(flax.linen.Module):
    """The gated MLP from Flax's own layers."""

    use_bias: bool
    dtype: Any = None

    @flax.linen.compact
    def __call__(self, x):
        fields = BIASED | dict(use_bias=self.use_bias, dtype=self.dtype)
        gate, up = (flax.linen.Dense(N, name=name, **fields)(x) for name in ("gate_proj", "up_proj"))
        return flax.linen.Dense(x.shape[-1], name="down_proj", **fields)(flax.linen.silu(gate) * up)


@pytest.mark.parametrize("dtype", [None, BF16])
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_gated_mlp(kind, use_bias, dtype):
    fields = BIASED | dict(use_bias=use_bias, dtype=dtype)
    theirs, params = functional(StockMLP(use_bias, dtype))
    if kind == "linen":
        mine, own_params = functional(linen.GatedMLP(N, **fields))
        assert_same_bits(own_params, params)
    else:
        model = nnx.GatedMLP(K, N, rngs=flax.nnx.Rngs(0), **fields)
        graph, state = flax.nnx.split(model)
        own = flax.nnx.to_pure_dict(state)
        assert jax.tree.map(jnp.shape, {"params": own}) == jax.tree.map(jnp.shape, params)

        def mine(params, x):
            flax.nnx.replace_by_pure_dict(state, params["params"])
            return flax.nnx.merge(graph, state)(x)

    x = normal(2, 5, K)
    wanted = theirs(params, x)
    tolerance = TOLERANCE[dtype or F32]
    assert_close(jax.jit(mine)(params, x), wanted, tolerance)
    got, wanted = (jax.jit(jax.grad(loss(f), (0, 1)))(params, x) for f in (mine, theirs))
    assert_close(got, wanted, 4 * tolerance)
    _, left = calls(jax.grad(loss(mine), (0, 1)), params, x)
    assert left == 0


def test_gated_mlp_has_the_fields_of_layers():
    x = normal(3, K)
    mine, params = functional(linen.GatedMLP(N, 16, activation="relu", schedule=DataParallel()))
    assert mine(params, x).shape == (3, 16)
    model = nnx.GatedMLP(K, N, 16, activation="relu", schedule=DataParallel(), rngs=flax.nnx.Rngs(0))
    assert model(x).shape == (3, 16)
    for make in (lambda **f: linen.GatedMLP(N, **f), lambda **f: nnx.GatedMLP(K, N, rngs=flax.nnx.Rngs(0), **f)):
        with pytest.raises(ValueError, match="GatedMLP: activation='swish'"):
            make(activation="swish")
        with pytest.raises(TypeError, match="schedule=3"):
            make(schedule=3)
    with pytest.raises(ValueError, match="dot_general must not be given"):
        nnx.GatedMLP(K, N, rngs=flax.nnx.Rngs(0), dot_general=jax_streamk.dot_general)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize(
    "x_dtype, dtype, param_dtype",
    [(F32, None, F32), (BF16, None, BF16), (BF16, None, F32), (F32, BF16, F32), (F32, BF16, BF16), (BF16, F32, BF16)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, x_dtype, dtype, param_dtype, use_bias):
    fields = {"dtype": dtype, "param_dtype": param_dtype, "use_bias": use_bias}
    theirs, params = functional(stock(kind, **fields))
    mine, own_params = functional(ours(kind, **fields))
    assert_same_bits(own_params, params)
    x = normal(5, K, dtype=x_dtype)
    tolerance = TOLERANCE[BF16 if BF16 in (x_dtype, dtype, param_dtype) else F32]
    wanted = theirs(params, x)
    assert_close(mine(params, x), wanted, tolerance)
    assert_close(jax.jit(mine)(params, x), wanted, tolerance)
    got, wanted = (jax.jit(jax.grad(loss(f), (0, 1)))(params, x) for f in (mine, theirs))
    assert_close(got, wanted, tolerance)
    found, left = calls(mine, params, x)
    assert len(found) == 1 and left == 0
    assert found[0]["has_bias"] == ("true" if use_bias else "false")
    found, left = calls(jax.grad(loss(mine), (0, 1)), params, x)
    assert len(found) == 3 and left == 0


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_rounded_once(kind):
    mine, params = functional(ours(kind, dtype=BF16, activation="silu"))
    exact, _ = functional(stock(kind, precision="highest"))
    x = normal(64, K, dtype=BF16)
    rounded = jax.tree.map(lambda p: p.astype(BF16).astype(F32), params)
    wanted = np.asarray(jax.nn.silu(exact(rounded, x.astype(F32))))
    got = np.asarray(mine(params, x), np.float32)
    # Half a unit in the last place of 8 bits, and the order of float32 sums.
    assert np.all(np.abs(got - wanted) <= 2.0**-8 * np.abs(wanted) + 1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_activation(kind, activation):
    mine, params = functional(ours(kind, activation=activation))
    theirs, _ = functional(stock(kind))
    x = normal(9, K)

    def wanted(params, x):
        return ACTIVATIONS[activation](theirs(params, x))

    assert_close(mine(params, x), wanted(params, x), TOLERANCE[F32])
    assert_close(jax.grad(loss(mine), (0, 1))(params, x), jax.grad(loss(wanted), (0, 1))(params, x), TOLERANCE[F32])
    (call,), left = calls(mine, params, x)
    assert int(call["activation"]) == list(ACTIVATIONS).index(activation) and left == 0


@pytest.mark.parametrize("shape", [(K,), (1, K), (7, K), (2, 3, K), (2, 1, 3, K), (0, K), (2, 0, K)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes(kind, shape):
    mine, params = functional(ours(kind, activation="relu"))
    theirs, _ = functional(stock(kind))
    x = normal(*shape)
    assert_close(mine(params, x), jax.nn.relu(theirs(params, x)), TOLERANCE[F32])
    wanted = jax.grad(lambda *args: loss(jax.nn.relu)(theirs(*args)), (0, 1))(params, x)
    assert_close(jax.grad(loss(mine), (0, 1))(params, x), wanted, TOLERANCE[F32])


@pytest.mark.parametrize("kind", KINDS)
def test_integers_and_numpy(kind):
    mine, params = functional(ours(kind))
    theirs, _ = functional(stock(kind))
    x = np.arange(3 * K, dtype=np.int32).reshape(3, K)
    assert_close(mine(params, x), theirs(params, x), TOLERANCE[F32])


@pytest.mark.parametrize("kind", KINDS)
def test_float64_and_complex(kind):
    with jax.enable_x64(True):
        for dtype, calls_of_ours in ((F64, 1), (jnp.complex128, 0)):
            mine, params = functional(ours(kind, param_dtype=dtype, activation="tanh"))
            theirs, _ = functional(stock(kind, param_dtype=dtype))
            x = normal(5, K, dtype=dtype) / 4
            np.testing.assert_allclose(mine(params, x), jnp.tanh(theirs(params, x)), rtol=1e-12)
            assert len(calls(mine, params, x)[0]) == calls_of_ours


@pytest.mark.parametrize("kind", KINDS)
def test_precision_reaches_every_product(kind):
    mine, params = functional(ours(kind, precision="highest", activation="relu"))
    text = str(jax.make_jaxpr(jax.grad(loss(mine), (0, 1)))(params, normal(5, K)))
    precisions = re.findall(r"precision=(.*)", text)
    assert len(precisions) == 3 and all("HIGHEST" in precision for precision in precisions)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("preferred", [F32, BF16, None])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_preferred_element_type(dtype, preferred, use_bias):
    fields = {"dtype": dtype, "preferred_element_type": preferred, "use_bias": use_bias}
    mine, params = functional(ours("nnx", **fields))
    theirs, _ = functional(stock("nnx", **fields))
    x = normal(5, K)
    assert_close(mine(params, x), theirs(params, x), TOLERANCE[F32 if dtype == F32 and preferred != BF16 else BF16])


def keep_bias_wide(*args, dtype):
    inputs, kernel, bias = args if len(args) == 3 else args[0]
    return inputs.astype(BF16), kernel.astype(BF16), bias.astype(F32)


@pytest.mark.parametrize("kind", KINDS)
def test_promotion_of_the_users_own(kind):
    fields = {"promote_dtype": keep_bias_wide}
    mine, params = functional(ours(kind, **fields))
    theirs, _ = functional(stock(kind, **fields))
    x = normal(5, K)
    assert mine(params, x).dtype == F32
    assert_close(mine(params, x), theirs(params, x), TOLERANCE[BF16])


def test_linen_checkpoints_load_both_ways():
    theirs, mine = stock("linen"), ours("linen", activation="relu", schedule=StreamK())
    x = normal(5, K)
    for source, target in ((theirs, mine), (mine, theirs)):
        saved = source.init(jax.random.key(1), x)
        loaded = serialization.from_bytes(target.init(jax.random.key(2), x), serialization.to_bytes(saved))
        assert_same_bits(loaded, saved)
        assert_close(mine.apply(loaded, x), jax.nn.relu(theirs.apply(loaded, x)), TOLERANCE[F32])


class Two(flax.linen.Module):
    dense: type

    @flax.linen.compact
    def __call__(self, x):
        return self.dense(3)(self.dense(4)(x))


def test_linen_names_layers_alike():
    x = normal(5, K)
    params = Two(flax.linen.Dense).init(jax.random.key(0), x)
    assert sorted(params["params"]) == ["Dense_0", "Dense_1"]
    assert_same_bits(Two(linen.Dense).init(jax.random.key(0), x), params)


def test_nnx_checkpoints_load_both_ways():
    fields = BIASED | {"param_dtype": BF16}
    x = normal(5, K)
    for source, target in ((flax.nnx.Linear, nnx.Linear), (nnx.Linear, flax.nnx.Linear)):
        saved = source(K, N, rngs=flax.nnx.Rngs(1), **fields)
        loaded = target(K, N, rngs=flax.nnx.Rngs(2), **fields)
        state = flax.nnx.state(saved)
        assert jax.tree.structure(state) == jax.tree.structure(flax.nnx.state(loaded))
        before, after = map(flax.nnx.to_pure_dict, (flax.nnx.state(loaded), state))
        flax.nnx.update(loaded, serialization.from_bytes(before, serialization.to_bytes(after)))
        assert_same_bits(flax.nnx.state(loaded), state)
        assert_close(loaded(x), saved(x), TOLERANCE[BF16])


SCHEDULES = [(DataParallel(), 0, 1), (SplitK(2, "separate"), 1, 2), (StreamK(), 2, None)]


@pytest.mark.parametrize("schedule, kind_of_schedule, splits", SCHEDULES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_schedule_is_obeyed(kind, schedule, kind_of_schedule, splits):
    k = 1024
    if kind == "linen":
        mine, params = functional(linen.Dense(N, schedule=schedule, activation="relu"), k=k)
    else:
        mine, params = functional(functools.partial(nnx.Linear, k, N, schedule=schedule, activation="relu"))
    x = normal(16, k)
    (call,), _ = calls(mine, params, x)
    assert int(call["schedule"]) == kind_of_schedule
    assert splits is None or int(call["splits"]) == splits
    assert_close(mine(params, x), jax.nn.relu(x @ kernel_of(params)), TOLERANCE[F32])


def test_schedules_per_pass():
    schedule = PerPass(SplitK(2), lhs=Auto(), rhs=SplitK(3))
    mine, params = functional(functools.partial(nnx.Linear, 1024, 16, schedule=schedule, activation="relu"))
    found, _ = calls(jax.grad(loss(mine)), params, normal(1024, 1024))
    assert sorted(int(call["splits"]) for call in found) == [2, 3]


def test_what_is_refused():
    def makers(**fields):
        return lambda: linen.Dense(N, **fields), lambda: nnx.Linear(K, N, rngs=flax.nnx.Rngs(0), **fields)

    for make, name in zip(makers(activation="swish"), ("Dense", "Linear")):
        with pytest.raises(ValueError, match=f"{name}: activation='swish'.*'silu'"):
            make()
    for make in makers(schedule="stream-k"):
        with pytest.raises(TypeError, match="schedule='stream-k'"):
            make()
    for make in makers(schedule=StreamK(), dot_general=jax_streamk.dot_general):
        with pytest.raises(ValueError, match=r"schedule=StreamK\(.*dot_general=<function"):
            make()
    with pytest.raises(ValueError, match="dot_general=<function"):
        linen.Dense(N, schedule=StreamK(), dot_general_cls=lambda: jax_streamk.dot_general)
    for layer in (ours("linen", schedule=SplitK(1000)), ours("nnx", schedule=SplitK(1000))):
        with pytest.raises(ValueError, match="1000"):
            function, params = functional(layer)
            function(params, normal(5, K))


def doubled(*args, **kwargs):
    return 2 * jax.lax.dot_general(*args, **kwargs)


@pytest.mark.parametrize("field", ["linen dot_general", "linen dot_general_cls", "nnx dot_general"])
def test_product_of_the_users_own(field):
    kind, _, name = field.partition(" ")
    fields = {name: (lambda: doubled) if name == "dot_general_cls" else doubled}
    mine, params = functional(ours(kind, activation="tanh", **fields))
    theirs, _ = functional(stock(kind, **fields))
    x = normal(2, 3, K)
    assert_close(mine(params, x), jnp.tanh(theirs(params, x)), TOLERANCE[F32])
    assert len(calls(mine, params, x)[0]) == 0


def test_linen_partitioning_metadata():
    fields = {
        "kernel_init": flax.linen.with_partitioning(jax.nn.initializers.lecun_normal(), (None, "model")),
        "bias_init": flax.linen.with_partitioning(jax.nn.initializers.normal(), ("model",)),
    }
    params = linen.Dense(N, **fields).init(jax.random.key(0), jnp.zeros((1, K)))
    assert flax.linen.get_partition_spec(params) == {"params": {"kernel": P(None, "model"), "bias": P("model")}}
    mine, theirs = linen.Dense(N, **fields, activation="relu"), flax.linen.Dense(N, **fields)
    x = normal(5, K)
    assert_close(mine.apply(params, x), jax.nn.relu(theirs.apply(params, x)), TOLERANCE[F32])


def test_nnx_sharding_metadata():
    make = functools.partial(
        nnx.Linear,
        K,
        N,
        rngs=flax.nnx.Rngs(0),
        kernel_init=flax.nnx.with_partitioning(flax.nnx.initializers.lecun_normal(), (None, "model")),
        bias_metadata={"note": "kept"},
    )
    mesh = jax.make_mesh((1, 1), ("data", "model"), (AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        layer = make(activation="relu")
        assert P(None, "model") in jax.tree.leaves(flax.nnx.get_partition_spec(flax.nnx.state(layer)))
        assert layer.bias.note == "kept"
        x = jax.device_put(normal(4, K), NamedSharding(mesh, P("data", None)))
        for sharding in (P("data", "model"), P("data", None)):
            out = layer(x, out_sharding=sharding)
            assert jax.typeof(out).sharding.spec == sharding
            assert_close(out, jax.nn.relu(x @ layer.kernel[...] + layer.bias[...]), TOLERANCE[F32])


class Block(flax.linen.Module):
    dense: type

    @flax.linen.compact
    def __call__(self, x, _):
        return jnp.tanh(self.dense(K, bias_init=BIASED["bias_init"])(x)), None


class Stack(flax.linen.Module):
    dense: type

    @flax.linen.compact
    def __call__(self, x):
        block = flax.linen.scan(
            flax.linen.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return block(self.dense)(x, None)[0]


class Experts(flax.linen.Module):
    dense: type

    @flax.linen.compact
    def __call__(self, x):
        experts = flax.linen.vmap(
            self.dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3
        )
        return experts(N, bias_init=BIASED["bias_init"])(x)


@pytest.mark.parametrize("model", [Stack, Experts])
def test_linen_lifted(model):
    mine, params = functional(model(linen.Dense))
    theirs, stock_params = functional(model(flax.linen.Dense))
    assert_same_bits(params, stock_params)
    x = normal(5, K)
    assert_close(mine(params, x), theirs(params, x), TOLERANCE[F32])
    got, wanted = (jax.jit(jax.grad(loss(f), (0, 1)))(params, x) for f in (mine, theirs))
    assert_close(got, wanted, TOLERANCE[F32])
    found, left = calls(mine, params, x)
    assert len(found) == 1 and left == 0


def nnx_stack(linear, **fields):
    @flax.nnx.split_rngs(splits=3)
    @flax.nnx.vmap
    def create(rngs):
        return linear(K, K, rngs=rngs, **BIASED, **fields)

    return create(flax.nnx.Rngs(0))


def nnx_scanned(layers, x):
    @flax.nnx.scan(in_axes=(0, flax.nnx.Carry), out_axes=flax.nnx.Carry)
    @flax.nnx.remat
    def forward(layer, x):
        return jnp.tanh(layer(x))

    return forward(layers, x)


def nnx_mapped(layers, x):
    return flax.nnx.vmap(lambda layer, x: jnp.tanh(layer(x)), in_axes=(0, None))(layers, x)


@pytest.mark.parametrize("apply", [nnx_scanned, nnx_mapped])
def test_nnx_lifted(apply):
    mine, theirs = nnx_stack(nnx.Linear), nnx_stack(flax.nnx.Linear)
    x = normal(5, K)
    got, wanted = (flax.nnx.jit(flax.nnx.value_and_grad(loss(apply)))(layers, x) for layers in (mine, theirs))
    assert_close(got, wanted, TOLERANCE[F32])
    text = flax.nnx.jit(apply).lower(mine, x).as_text()
    assert text.count(f"@{TARGET}(") == 1 and "stablehlo.dot_general" not in text


def dense_general(dot_general):
    return flax.linen.DenseGeneral((4, 8), axis=(1, -1), batch_dims=(0,), dot_general=dot_general)


def linen_attention(dot_general):
    products = {"qkv_dot_general": dot_general, "out_dot_general": dot_general}
    if dot_general is not None:
        products |= {
            f"{name}_einsum_cls": lambda: jax_streamk.einsum for name in ("qk_attn_weights", "attn_weights_value")
        }
    return flax.linen.MultiHeadDotProductAttention(num_heads=4, **products)


def attention_by_einsum(query, key, value, *, mask=None, **_):
    weights = jax_streamk.einsum("...qhd,...khd->...hqk", query, key) / np.sqrt(query.shape[-1])
    weights = jax.nn.softmax(weights if mask is None else jnp.where(mask, weights, -1e30))
    return jax_streamk.einsum("...hqk,...khd->...qhd", weights, value)


def nnx_attention(dot_general):
    products = {"qkv_dot_general": dot_general, "out_dot_general": dot_general}
    products |= {} if dot_general is None else {"attention_fn": attention_by_einsum}
    return functools.partial(flax.nnx.MultiHeadAttention, 4, K, decode=False, **products)


def nnx_linear(dot_general):
    return functools.partial(flax.nnx.Linear, K, N, dot_general=dot_general or jax.lax.dot_general)


def nnx_linear_general(dot_general):
    return functools.partial(
        flax.nnx.LinearGeneral, (6, K), (4, 8), axis=(1, -1), batch_axis={0: 2}, dot_general=dot_general
    )


def nnx_einsum(dot_general):
    einsum_op = jnp.einsum if dot_general is None else jax_streamk.einsum
    return functools.partial(flax.nnx.Einsum, "btk,hkd->bthd", (4, K, 8), (4, 8), einsum_op=einsum_op)


LAYERS = [
    (lambda dot_general: flax.linen.Dense(N, dot_general=dot_general), (2, 6, K), 1),
    (dense_general, (2, 6, 3, K), 1),
    (linen_attention, (2, 6, K), 6),
    (nnx_linear, (2, 6, K), 1),
    (nnx_linear_general, (2, 6, 3, K), 1),
    (nnx_einsum, (2, 6, K), 1),
    (nnx_attention, (2, 6, K), 6),
]


NAMES = [
    "Dense",
    "DenseGeneral",
    "MultiHeadDotProductAttention",
    "Linear",
    "LinearGeneral",
    "Einsum",
    "MultiHeadAttention",
]


@pytest.mark.parametrize("layer, shape, products", LAYERS, ids=NAMES)
def test_flax_layers_on_our_products(layer, shape, products):
    x = normal(*shape)
    made = layer(None), layer(jax_streamk.dot_general)
    if isinstance(made[0], flax.linen.Module):
        params = made[0].init(jax.random.key(0), x)
        theirs, mine = (module.apply for module in made)
    else:
        (theirs, params), (mine, _) = map(functional, made)
    assert_close(mine(params, x), theirs(params, x), TOLERANCE[F32])
    got, wanted = (jax.jit(jax.grad(loss(f), (0, 1)))(params, x) for f in (mine, theirs))
    # The key's bias adds the same to every weight of a softmax: its gradient is only rounding errors.
    for x_grad, y_grad in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        scale = max(np.abs(y_grad).max(), 1e-2 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted)))
        assert np.abs(x_grad - y_grad).max() <= TOLERANCE[F32] * scale
    found, left = calls(mine, params, x)
    assert len(found) == products and left == 0


class DenseLayers(flax.linen.Module):
    """All ways to use our products, or the same layers with Flax's and JAX's own."""

    ours: bool

    @flax.linen.compact
    def __call__(self, x):
        if not self.ours:
            x = flax.linen.relu(flax.linen.Dense(N, name="a", **BIASED)(x))
            x = flax.linen.Dense(N, name="b")(x)
            w = self.param("w", jax.nn.initializers.normal(1.0), (N, K))
            return jax.lax.dot_general(jnp.einsum("mk,kn->mn", x, w), w, (((1,), (1,)), ((), ())))
        x = linen.Dense(N, name="a", activation="relu", schedule=DataParallel(), **BIASED)(x)
        x = flax.linen.Dense(N, name="b", dot_general=jax_streamk.dot_general)(x)
        w = self.param("w", jax.nn.initializers.normal(1.0), (N, K))
        return jax_streamk.dot_general(jax_streamk.einsum("mk,kn->mn", x, w), w, (((1,), (1,)), ((), ())))


def patched_product(monkeypatch, counted):
    """Patches as qwix does: replaces the function's code, so that modules that imported it call the replacement."""
    stock = types.FunctionType(jax.lax.dot_general.__code__, jax.lax.dot_general.__globals__)
    stock.__defaults__, stock.__kwdefaults__ = jax.lax.dot_general.__defaults__, jax.lax.dot_general.__kwdefaults__
    jax.lax.dot_general.__globals__["_counted"], jax.lax.dot_general.__globals__["_stock"] = counted, stock

    def patch(*args, **kwargs):
        _counted.append(args)  # noqa: F821
        return _stock(*args, **kwargs)  # noqa: F821

    monkeypatch.setattr(jax.lax.dot_general, "__code__", patch.__code__)
    monkeypatch.setattr(jax.lax.dot_general, "__defaults__", None)
    monkeypatch.setattr(jax.lax.dot_general, "__kwdefaults__", None)


def test_a_library_that_patches_laxs_product_finds_ours(monkeypatch):
    mine, theirs, x = DenseLayers(True), DenseLayers(False), normal(5, K)
    params = theirs.init(jax.random.key(0), x)
    before = mine.apply(params, x)
    layer = nnx.Linear(K, N, rngs=flax.nnx.Rngs(0), activation="gelu")
    w, bias = normal(K, N), normal(N)
    products = [
        lambda: jax_streamk.matmul(x, w),
        lambda: jax_streamk.linear(x, w, bias, activation="silu", residual=bias[None], alpha=2.0, schedule=StreamK()),
        lambda: layer(x),
    ]
    unpatched = [product() for product in products]
    with monkeypatch.context() as patching:
        counted = []
        patched_product(patching, counted)
        with jax.disable_jit():  # as qwix does
            assert_close(mine.apply(params, x), before, TOLERANCE[F32] * 10)
            assert len(counted) == 4
        for product, wanted in zip(products, unpatched):
            counted.clear()
            with jax.disable_jit():
                assert_close(product(), wanted, TOLERANCE[F32])
            assert len(counted) == 1
    assert len(calls(lambda x: mine.apply(params, x), x)[0]) == 4


def test_qwix():
    qwix = pytest.importorskip("qwix")
    x = normal(5, K)
    mine, theirs = DenseLayers(True), DenseLayers(False)
    quantization = qwix.QtProvider([qwix.QtRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)])
    params = theirs.init(jax.random.key(0), x)
    quantized = [qwix.quantize_model(model, quantization) for model in (mine, theirs)]
    got, wanted = (model.apply(params, x) for model in quantized)
    assert_close(got, wanted, TOLERANCE[F32] * 10)
    accelerated = jax_streamk.accelerate(quantized[0].apply)
    # Scales are in the kernel: what is rounded otherwise may become another number of eight bits.
    assert_close(accelerated(params, x), wanted, 0.01)
    assert len(calls(accelerated, params, x)[0]) == 4
    assert np.abs(got - theirs.apply(params, x)).max() > 0.01
    lora = qwix.LoraProvider(module_path="[ab]", rank=2, alpha=1.0)
    adapted, stock = (qwix.apply_lora_to_model(model, lora).init(jax.random.key(0), x) for model in (mine, theirs))
    assert jax.tree.structure(adapted) == jax.tree.structure(stock)
    assert "kernel_lora_a" in adapted["params"]["a"] and "kernel_lora_b" in adapted["params"]["b"]
    assert len(calls(lambda x: mine.apply(params, x), x)[0]) == 4


class Stateful(flax.nnx.Module):
    """Has dropout, BatchNorm, a cache, an attribute added by a call, and one that is not an array."""

    def __init__(self):
        rngs = flax.nnx.Rngs(0)
        self.linear, self.norm = flax.nnx.Linear(K, K, rngs=rngs), flax.nnx.BatchNorm(K, rngs=rngs)
        self.dropout, self.rnn = flax.nnx.Dropout(0.5, rngs=rngs), flax.nnx.RNN(flax.nnx.GRUCell(K, K, rngs=rngs))
        self.attention = flax.nnx.MultiHeadAttention(2, K, rngs=rngs, decode=True)
        self.attention.init_cache((2, 5, K))
        self.calls = 0

    def __call__(self, x, times=1):
        self.calls += times
        self.last = flax.nnx.Intermediate(x)
        return self.attention(self.rnn(self.dropout(self.norm(self.linear(x))))[:, -1:])


def arrays_of(tree):
    return [x for x in jax.tree.leaves(tree) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


def mean_square(model, x):
    return jnp.mean(model(x) ** 2)


def gradients(f, model, x):
    return jnp.concatenate([g.ravel() for g in arrays_of(f(model, x)[1])])


CALLS = {
    "function": (lambda model, x: (model(x, times=3), {"m": model, "f": jnp.tanh}), lambda f, model, x: f(model, x)[0]),
    "keywords": (lambda *, models, x: models[0](x), lambda f, model, x: f(models=[model], x=x)),
    "module": (None, lambda f, model, x: f(x)),
    "method": (None, lambda f, model, x: f(x, times=2)),
    "gradient": (flax.nnx.value_and_grad(mean_square), gradients),
    "jit": (mean_square, lambda f, model, x: flax.nnx.jit(f)(model, x)),
}


@pytest.mark.parametrize("name", CALLS)
def test_accelerate_updates_modules(name):
    fn, call = CALLS[name]
    x, mine, theirs = normal(2, 7, K), Stateful(), Stateful()

    def run(model, accelerate):
        function = accelerate({"module": model, "method": model.__call__}.get(name, fn))
        return [call(function, model, x) for _ in range(2)]

    got = run(mine, functools.partial(nnx.accelerate, schedule=DataParallel()))
    assert_close(got, run(theirs, lambda fn: fn), TOLERANCE[F32] * 10)
    assert_close(arrays_of(flax.nnx.state(mine)), arrays_of(flax.nnx.state(theirs)), TOLERANCE[F32] * 10)
    assert mine.calls == theirs.calls == {"function": 6, "method": 4}.get(name, 2)
    found, left = calls(lambda x: nnx.accelerate(Stateful())(x), x)
    # On GPUs XLA multiplies the scores and values of a single query in float32.
    assert len(found) > 5 and left == (2 if jax.default_backend() == "gpu" else 0)


def test_accelerate_of_modules_that_are_returned_and_shared():
    @nnx.accelerate(where=lambda problem: problem.n == N)
    def apply(layers, x):
        layers["a"].bias[...] = layers["b"].bias[...] + 1
        return layers["b"], layers["a"](x)

    layer, x = flax.nnx.Linear(K, N, rngs=flax.nnx.Rngs(0)), normal(5, K)
    same, out = apply({"a": layer, "b": layer}, x)
    assert same is layer
    assert_close(out, x @ layer.kernel[...] + 1, TOLERANCE[F32])
    with pytest.raises(TypeError, match="a result of type set holds arrays"):
        nnx.accelerate(lambda layer, x: {lambda: y for y in [layer(x)]})(layer, x)


class Counting(flax.nnx.Module):
    def __init__(self, cache):
        rngs = flax.nnx.Rngs(0)
        self.linear, self.norm = flax.nnx.Linear(K, K, rngs=rngs), flax.nnx.BatchNorm(K, rngs=rngs)
        self.dropout, self.cache = flax.nnx.Dropout(0.5, rngs=rngs), cache

    def __call__(self, x):
        self.cache[...] += x.sum()
        return self.dropout(self.norm(self.linear(x)))


@pytest.mark.parametrize("ref", [False, True])
def test_accelerate_updates_variables_of_every_kind(ref):
    """Also those that are backed by references."""

    def states(wrap):
        with flax.nnx.var_defaults(ref=ref):
            model = Counting(flax.nnx.Cache(jnp.zeros(())))

        def step(models, x, *, cache):
            cache[...] += 1  # the model's
            return models[0](x)

        step = wrap(step)
        for _ in range(3):
            out = step([model], jnp.ones((5, K)), cache=model.cache)
        return [x[...] for x in arrays_of(flax.nnx.state(model))], model.cache[...], out

    ours, theirs = states(functools.partial(nnx.accelerate, schedule=DataParallel())), states(flax.nnx.jit)
    assert ours[1] == 3 * (1 + 5 * K)
    assert_close(ours, theirs, TOLERANCE[F32] * 10)


def run_python(code, cwd):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=cwd)


def test_flax_is_imported_on_request_only(tmp_path):
    done = run_python("import sys, jax_streamk; assert 'flax' not in sys.modules", tmp_path)
    assert done.returncode == 0, done.stderr


def test_without_flax(tmp_path):
    done = run_python("import sys; sys.modules['flax'] = None; import jax_streamk; import jax_streamk.flax", tmp_path)
    assert "ImportError: jax_streamk.flax needs Flax: pip install jax-streamk[flax]" in done.stderr


@pytest.mark.parametrize("fn, schedule", [(3, None), (jnp.sin, "split")], ids=["fn", "schedule"])
def test_nnx_accelerate_checks_its_arguments_at_once(fn, schedule):
    with pytest.raises(TypeError, match="must be"):
        jax_streamk.flax.nnx.accelerate(fn, schedule=schedule)


QUANTIZED = {
    "Dense": functools.partial(linen.Dense, N, activation="silu"),
    "GatedMLP": functools.partial(linen.GatedMLP, 64, use_bias=True),
    "MoE": functools.partial(linen.MoE, 64, 4, 2),
    "nnx.Linear": functools.partial(nnx.Linear, K, N, activation="silu"),
    "nnx.GatedMLP": functools.partial(nnx.GatedMLP, K, 64, use_bias=True),
    "nnx.MoE": functools.partial(nnx.MoE, K, 64, 4, 2),
}


@pytest.mark.parametrize("dtype", [None, BF16], ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_kernels(name, dtype):
    """Kernels of parameters may be numbers with scales, which reach the products as they are."""
    make = functools.partial(QUANTIZED[name], dtype=dtype, param_dtype=BF16)
    layer, params = functional(make if "nnx" in name else make())

    def quantized(path, x):
        path = jax.tree_util.keystr(path)
        is_kernel = "kernel" in path and ("MoE" not in name or "experts" in path)
        return quantize(x, "int4", block=16) if is_kernel else x

    is_leaf = lambda x: isinstance(x, QuantizedArray)
    numbers = jax.tree_util.tree_map_with_path(quantized, params)
    arrays = jax.tree.map(lambda x: x.dequantize() if is_leaf(x) else x, numbers, is_leaf=is_leaf)
    x = normal(6, K, dtype=BF16)
    result = lambda params, x: jax.tree.leaves(layer(params, x))[0]
    assert PLATFORM == "cuda" or "_s4_" in jax.jit(result).lower(numbers, x).as_text()
    assert_close(jax.jit(result)(numbers, x), result(arrays, x), TOLERANCE[BF16])
    loss = lambda x, params: (result(params, x).astype(F32) ** 2).sum()
    assert_close(jax.grad(loss)(x, numbers), jax.grad(loss)(x, arrays), TOLERANCE[BF16])


@pytest.mark.parametrize("dtype", ["int4", "uint8", "float8_e4m3fn", "float4_e2m1fn"])
def test_checkpoints_of_quantized_kernels(dtype, tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    layer = linen.Dense(N, param_dtype=BF16)
    params = layer.init(jax.random.key(0), jnp.zeros((2, K)))
    params["params"]["kernel"] = quantize(params["params"]["kernel"], dtype, block=16)
    target = jax.tree.map(jnp.zeros_like, params)
    assert_same_bits(serialization.from_bytes(target, serialization.to_bytes(params)), params)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", params)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "params", jax.eval_shape(lambda: params))
    assert_same_bits(restored, params)
    other = quantize(normal(K, N, dtype=BF16), "int4" if dtype == "uint8" else "uint4", block=16)  # another zero point
    with pytest.raises(ValueError, match="cannot be restored"):
        serialization.from_state_dict(other, serialization.to_state_dict(params["params"]["kernel"]))
