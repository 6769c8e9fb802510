"""Mixtures of experts in both kinds of Flax, against every token by every expert in float64."""

import functools

import flax.linen
import flax.nnx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_streamk import EXPORT_CHECKS, DataParallel, SplitK
from jax_streamk.flax import linen, nnx

ON_GPU = jax.default_backend() == "gpu"
TARGET = "jax_streamk_cuda_gemm" if ON_GPU else "jax_streamk_host_gemm"
BF16, F32, F64 = jnp.bfloat16, jnp.float32, jnp.float64
TOLERANCE = {BF16: 3e-2, F32: 2e-5, F64: 1e-12}
KINDS = ["linen", "nnx"]
FEATURES, HIDDEN, EXPERTS = 24, 20, 5
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def layer(kind, hidden=HIDDEN, experts=EXPERTS, of_a_token=2, seed=0, **fields):
    """(a function of a dict of parameters and the input, the parameters)"""
    fields = dict(precision="highest") | fields  # a router in TF32 would choose other experts
    if kind == "linen":
        module = linen.MoE(hidden, experts, of_a_token, **fields)
        params = module.init(jax.random.key(seed), jnp.zeros((1, FEATURES), fields.get("param_dtype", F32)))["params"]
        return lambda params, x: module.apply(dict(params=params), x), params
    graph, state = flax.nnx.split(nnx.MoE(FEATURES, hidden, experts, of_a_token, rngs=flax.nnx.Rngs(seed), **fields))

    def function(params, x):
        replaced = flax.nnx.split(flax.nnx.merge(graph, state))[1]
        flax.nnx.replace_by_pure_dict(replaced, params)
        return flax.nnx.merge(graph, replaced)(x)

    return function, flax.nnx.to_pure_dict(state)


def by_all_experts(params, x, of_a_token=2, normalize=True, activation=jax.nn.silu):
    """What the layers compute, by products of every token and every expert."""
    gate, up, down = (params["experts"][name]["kernel"] for name in PROJECTIONS)
    likely = jax.nn.softmax(x @ params["gate"]["kernel"])
    weights, chosen = jax.lax.top_k(likely, of_a_token)
    if normalize:
        weights /= weights.sum(-1, keepdims=True)
    takes = jax.nn.one_hot(chosen, gate.shape[0], dtype=x.dtype)
    hidden = activation(jnp.einsum("...k,ekn->...en", x, gate)) * jnp.einsum("...k,ekn->...en", x, up)
    out = jnp.einsum("...en,enk,...je,...j->...k", hidden, down, takes, weights)
    share = takes.sum(-2).reshape(-1, gate.shape[0]).mean(0)
    return out, gate.shape[0] * jnp.sum(share * likely.reshape(-1, gate.shape[0]).mean(0))


def in_float64(function, *args):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, function(*jax.tree.map(lambda x: jnp.asarray(x, F64), args)))


def tokens(*shape, dtype=F32, seed=1):
    return jax.random.normal(jax.random.key(seed), (*shape, FEATURES)).astype(dtype)


def assert_close(got, wanted, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        assert x.shape == y.shape
        x = np.asarray(x, np.float64)
        assert np.abs(x - y).max(initial=0) <= tolerance * np.abs(y).max(initial=0)


@pytest.mark.parametrize(
    "kind, of_a_token, normalize",
    [("nnx", 1, True), ("nnx", 1, False), ("linen", 2, True), ("linen", 3, False), ("nnx", EXPERTS, True)],
)
def test_result_and_loss(kind, of_a_token, normalize):
    function, params = layer(kind, of_a_token=of_a_token, normalize=normalize)
    for shape in ((1,), (2, 1, 65)):
        x = tokens(*shape)
        out, loss = jax.jit(function)(params, x)
        assert out.dtype == x.dtype and loss.shape == () and loss.dtype == F32
        reference = functools.partial(by_all_experts, of_a_token=of_a_token, normalize=normalize)
        assert_close((out, loss), in_float64(reference, params, x), TOLERANCE[F32])


@pytest.mark.parametrize("dtype", [BF16, F64])
def test_dtypes(dtype):
    with jax.enable_x64(dtype == F64):
        function, params = layer("nnx", dtype=dtype, param_dtype=dtype)
        assert all(x.dtype == dtype for x in jax.tree.leaves(params))
        # Experts that are almost as likely could change places where the router's sums are rounded.
        params["gate"]["kernel"] = params["gate"]["kernel"] * 0 + jnp.eye(FEATURES, EXPERTS, dtype=dtype) * 4
        x = jnp.round(tokens(40, dtype=F32) * 4).astype(dtype) / 4 + jnp.linspace(0, 0.1, FEATURES, dtype=dtype)
        out, loss = jax.jit(function)(params, x)
        assert out.dtype == dtype and loss.dtype == jnp.promote_types(dtype, F32)
        assert_close((out, loss), in_float64(by_all_experts, params, x), TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_compute_dtype_is_apart_from_the_parameters(kind):
    function, params = layer(kind, dtype=BF16)
    assert all(x.dtype == F32 for x in jax.tree.leaves(params))
    assert function(params, tokens(4))[0].dtype == BF16


@pytest.mark.parametrize("favoured", [0, EXPERTS - 1])
def test_all_tokens_by_one_expert_and_none(favoured):
    function, params = layer("nnx", of_a_token=1, activation="relu")
    params["gate"]["kernel"] = jnp.zeros((FEATURES, EXPERTS)).at[:, favoured].set(9.0)
    x = jnp.abs(tokens(33))
    out, loss = function(params, x)
    reference = functools.partial(by_all_experts, of_a_token=1, activation=jax.nn.relu)
    assert_close((out, loss), in_float64(reference, params, x), TOLERANCE[F32])
    assert abs(loss - EXPERTS) < 1e-3  # the worst balance
    out, loss = function(params, x[:0])
    assert out.shape == (0, FEATURES) and loss == 0


def test_indices_take_no_pass_of_their_own():
    """They are in bounds: none is to be counted from the end, or moved."""
    function, params = layer("nnx", of_a_token=1)
    assert "gathers='promise_in_bounds'" in str(jax.make_jaxpr(function)(params, tokens(9)))


def test_loss_of_experts_that_share_alike():
    function, params = layer("nnx", experts=4)
    params["gate"]["kernel"] = jnp.zeros((FEATURES, 4)).at[:4, :4].set(1e-3 * jnp.eye(4))
    x = jnp.zeros((8, FEATURES)).at[jnp.arange(8), jnp.arange(8) % 4].set(1.0)
    x = x.at[jnp.arange(8), (jnp.arange(8) + 1) % 4].set(0.5)
    assert abs(function(params, x)[1] - 2) < 1e-5


def test_derivatives():
    function, params = layer("nnx")
    x = tokens(3, 11)

    def scalar(of):
        return lambda params, x: jnp.sum(jnp.sin(of(params, x)[0])) + of(params, x)[1]

    mine, reference = jax.jit(jax.grad(scalar(function), (0, 1))), jax.grad(scalar(by_all_experts), (0, 1))
    assert_close(mine(params, x), in_float64(reference, params, x), 5 * TOLERANCE[F32])

    def of_move(of):
        def move(x):
            return jnp.sin(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype)

        return lambda *args: jax.jvp(jax.grad(scalar(of), 1), args, jax.tree.map(move, args))

    assert_close(of_move(function)(params, x), in_float64(of_move(by_all_experts), params, x), 20 * TOLERANCE[F32])


def test_batches():
    """Each of a batch is a mixture of its own, with a loss of its own."""
    function, params = layer("nnx")
    x = tokens(3, 5)
    out, losses = jax.vmap(function, (None, 0))(params, x)
    each = [function(params, one) for one in x]
    assert_close((out, losses), (jnp.stack([y for y, _ in each]), jnp.stack([y for _, y in each])), TOLERANCE[F32])
    gradient = jax.vmap(jax.grad(lambda x: jnp.sum(function(params, x)[0])))(x)
    assert_close(gradient, jnp.stack([jax.grad(lambda x: jnp.sum(function(params, x)[0]))(one) for one in x]), 1e-4)


def test_one_program_for_all_routings_and_the_same_bits():
    dtype = BF16 if ON_GPU else F32
    function, params = layer("nnx", hidden=24, dtype=dtype, precision=None)
    jitted = jax.jit(function)
    for seed in range(3):
        x = tokens(50, dtype=dtype, seed=seed)
        np.testing.assert_array_equal(jitted(params, x)[0], jitted(params, x)[0])
    assert jitted._cache_size() == 1
    text = jitted.lower(params, x).as_text()
    # The router, gate and up in one kernel or two, and down.
    assert text.count(TARGET) in (3, 4) and "stablehlo.dot_general" not in text
    assert "while" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_parameters(kind):
    """Names and shapes of stacked checkpoints; each expert's initial values are those of a layer of its own."""
    _, params = layer(kind, hidden=200, experts=3)
    shapes = jax.tree.map(jnp.shape, params)
    into, out = {"kernel": (3, FEATURES, 200)}, {"kernel": (3, 200, FEATURES)}
    assert shapes == dict(gate={"kernel": (FEATURES, 3)}, experts=dict(gate_proj=into, up_proj=into, down_proj=out))
    for name, fan_in in (("gate_proj", FEATURES), ("up_proj", FEATURES), ("down_proj", 200)):
        kernel = params["experts"][name]["kernel"]
        assert abs(float(kernel.std()) * fan_in**0.5 - 1) < 0.1
        assert not jnp.allclose(kernel[0], kernel[1])
    assert not jnp.allclose(params["experts"]["gate_proj"]["kernel"], params["experts"]["up_proj"]["kernel"])
    zeros = jax.nn.initializers.zeros
    _, params = layer(kind, kernel_init=zeros)
    assert params["gate"]["kernel"].any() and not any(x.any() for x in jax.tree.leaves(params["experts"]))
    _, params = layer(kind, router_init=zeros)
    assert not params["gate"]["kernel"].any() and all(x.any() for x in jax.tree.leaves(params["experts"]))


def test_partitioning_metadata():
    """Names of an initializer are those of one expert's dimensions."""
    init = jax.nn.initializers.lecun_normal()
    names = dict(gate_proj=("embed", "mlp"), up_proj=("embed", "mlp"), down_proj=("embed", "mlp"))
    for partition_name in (None, "expert"):
        fields = dict(partition_name=partition_name)
        module = linen.MoE(
            HIDDEN, EXPERTS, 2, kernel_init=flax.linen.with_partitioning(init, names["up_proj"]), **fields
        )
        specs = flax.linen.get_partition_spec(jax.eval_shape(module.init, jax.random.key(0), tokens(3)))["params"]
        for name in PROJECTIONS:
            assert specs["experts"][name]["kernel"] == P(partition_name, *names[name])
        assert specs["gate"]["kernel"] == P()
        made = functools.partial(
            nnx.MoE,
            FEATURES,
            HIDDEN,
            EXPERTS,
            2,
            kernel_init=flax.nnx.with_partitioning(init, names["up_proj"]),
            **fields,
        )
        axes = ("expert", "embed", "mlp")
        mesh = jax.make_mesh((1, 1, 1), axes, axis_types=(jax.sharding.AxisType.Auto,) * 3, devices=jax.devices()[:1])
        with jax.set_mesh(mesh):
            moe = flax.nnx.eval_shape(lambda made=made: made(rngs=flax.nnx.Rngs(0)))
        for name in PROJECTIONS:
            kernel = getattr(moe.experts, name).kernel
            assert tuple(kernel.get_metadata()["out_sharding"]) == (partition_name, *names[name])
            assert kernel.shape[0] == EXPERTS


@pytest.mark.parametrize("check_vma", [False, True])
def test_tokens_over_devices(check_vma):
    """In a shard_map each device routes its own."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    function, params = layer("nnx")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    parts = jax.shard_map(
        lambda params, x: function(params, x)[0],
        mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"), check_vma=check_vma,
    )  # fmt: skip
    x = tokens(16)
    assert_close(jax.jit(parts)(params, x), function(params, x)[0], TOLERANCE[F32])
    gradients = (jax.grad(lambda params, f=f: jnp.sum(jnp.sin(f(params, x))))(params) for f in (parts, whole(function)))
    assert_close(*gradients, 5 * TOLERANCE[F32])


def whole(function):
    return lambda params, x: function(params, x)[0]


def test_explicit_mesh():
    """That of ``jax.make_mesh``, by default."""
    function, params = layer("nnx")
    x = tokens(9)
    want = jax.device_get(function(params, x))
    explicit = (jax.sharding.AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=explicit, devices=jax.devices()[:1])):
        assert_close(jax.jit(function)(params, x), want, TOLERANCE[F32])
        jax.jit(jax.grad(lambda params: jnp.sum(function(params, x)[0])))(params)


def test_export_of_any_number_of_tokens():
    function, params = layer("nnx")
    (b,) = jax.export.symbolic_shape("b")
    args = params, jax.ShapeDtypeStruct((b, 3, FEATURES), F32)
    exported = jax.export.export(jax.jit(function), disabled_checks=EXPORT_CHECKS)(*args)
    x = tokens(4, 3)
    assert_close(exported.call(params, x), function(params, x), TOLERANCE[F32])


@jax.default_matmul_precision("highest")
def test_a_router_of_ones_own():
    moe = nnx.MoE(FEATURES, HIDDEN, EXPERTS, 2, rngs=flax.nnx.Rngs(0))
    moe.gate = lambda x: jnp.zeros((*x.shape[:-1], EXPERTS)).at[..., 3].set(9.0).at[..., 1].set(5.0)
    x = tokens(6)
    weights = jax.nn.softmax(jnp.array([9.0, 5.0]))
    each = [flax.nnx.merge(*expert_of(moe, i))(x) for i in (3, 1)]
    assert_close(moe(x)[0], weights[0] * each[0] + weights[1] * each[1], TOLERANCE[F32])


def expert_of(moe, i):
    """One expert, a ``GatedMLP`` of its own."""
    graph, state = flax.nnx.split(moe.experts)
    return graph, jax.tree.map(lambda x: x[i], state)


def test_both_kinds_compute_the_same():
    function, params = layer("linen", activation="gelu")
    other, _ = layer("nnx", activation="gelu")
    x = tokens(2, 8)
    jax.tree.map(np.testing.assert_array_equal, function(params, x), other(params, x))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_strict_promotion(kind, dtype):
    """As Flax's own layers, of operands that have one dtype."""
    function, params = layer(kind, dtype=dtype, param_dtype=dtype)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = layer(kind, dtype=dtype, param_dtype=dtype)[0](params, tokens(3, dtype=dtype))
    np.testing.assert_array_equal(got[0], function(params, tokens(3, dtype=dtype))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input(kind):
    for fields, error, message in (
        (dict(of_a_token=2.0), ValueError, "MoE: experts_per_token=2.0: must be an integer from 1"),
        (dict(of_a_token=True), ValueError, "MoE: experts_per_token=True: must be an integer from 1"),
        (dict(of_a_token=0), ValueError, "MoE: experts_per_token=0: must be an integer from 1"),
        (dict(of_a_token=6), ValueError, "MoE: experts_per_token is 6; it must be from 1 to num_experts, 5"),
        (dict(activation="swish"), ValueError, "MoE: activation='swish'"),
        (dict(schedule="fast"), TypeError, "schedule"),
    ):
        with pytest.raises(error, match=message):
            layer(kind, **fields)
    function, params = layer(kind, experts=np.int64(4), of_a_token=np.int32(2))
    assert jax.jit(function)(params, tokens(3))[0].shape == (3, FEATURES)
    with pytest.raises(TypeError, match="MoE: input and parameters promote to complex64"):
        function(params, tokens(3).astype(np.complex64))
    function, params = layer(kind, hidden=24, schedule=DataParallel(), dtype=BF16, precision=None)
    assert function(params, tokens(9))[0].shape == (9, FEATURES)
    _, params = layer(kind)
    with pytest.raises(ValueError, match="schedule=SplitK"):
        layer(kind, schedule=SplitK(2))[0](params, tokens(9))
