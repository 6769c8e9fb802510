"""``jax.export``: programs that are serialized here and run elsewhere."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_streamk
from jax_streamk import EXPORT_CHECKS, Auto, SplitK, StreamK, _ffi, matmul

PLATFORM = "cuda" if jax.default_backend() == "gpu" else "cpu"
TARGETS = {"cpu": "jax_streamk_host_gemm", "cuda": "jax_streamk_cuda_gemm"}
RNG = np.random.default_rng(0)
A, B = (RNG.integers(-3, 4, shape).astype(np.float32) for shape in ((70, 520), (520, 90)))


def exported(schedule=None, platforms=None):
    f = jax.jit(lambda a, b: jnp.sin(matmul(a, b, schedule=schedule)))
    return f, export.export(f, platforms=platforms, disabled_checks=EXPORT_CHECKS)(A, B)


@pytest.mark.parametrize("schedule", [Auto(), SplitK(3), StreamK()], ids=str)
def test_round_trip(schedule):
    f, program = exported(schedule)
    again = export.deserialize(program.serialize())
    assert TARGETS[PLATFORM] in again.mlir_module()
    assert np.asarray(again.call(A, B)).tobytes() == np.asarray(f(A, B)).tobytes()


def test_export_asks_for_consent():
    with pytest.raises(ValueError, match="custom calls whose targets have no compatibility guarantees"):
        export.export(jax.jit(lambda a, b: matmul(a, b, schedule=StreamK())))(A, B)


IN_ANOTHER_PROCESS = """
import pathlib, sys
import numpy as np
from jax import export
import jax_streamk

folder = pathlib.Path(sys.argv[1])
program = export.deserialize(bytearray((folder / "program").read_bytes()))
np.save(folder / "product.npy", program.call(np.load(folder / "a.npy"), np.load(folder / "b.npy")))
"""


def test_in_another_process(tmp_path):
    f, program = exported(StreamK())
    (tmp_path / "program").write_bytes(program.serialize())
    np.save(tmp_path / "a.npy", A), np.save(tmp_path / "b.npy", B)
    subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path)], check=True, timeout=120, cwd=tmp_path)
    assert np.load(tmp_path / "product.npy").tobytes() == np.asarray(f(A, B)).tobytes()


def test_a_process_without_the_library_is_told_what_is_missing(tmp_path):
    """docs/matmul.md quotes the message."""
    (tmp_path / "program").write_bytes(exported(StreamK())[1].serialize())
    np.save(tmp_path / "a.npy", A), np.save(tmp_path / "b.npy", B)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS.replace("import jax_streamk\n", ""), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode != 0 and "No FFI handler registered for jax_streamk_" in done.stderr


WITHOUT_A_GPU = """
import pathlib, sys
import jax, jax.numpy as jnp
from jax import export
from jax_streamk import EXPORT_CHECKS, StreamK, matmul

assert jax.default_backend() == "cpu"
shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((70, 520), (520, 90))]
f = jax.jit(jax.value_and_grad(lambda a, b: jnp.sin(matmul(a, b, schedule=StreamK())).astype("float32").sum(), (0, 1)))
program = export.export(f, platforms=["cpu", "cuda"], disabled_checks=EXPORT_CHECKS)(*shapes)
pathlib.Path(sys.argv[1]).write_bytes(program.serialize())
"""


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU")
def test_exported_where_there_is_no_gpu(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", WITHOUT_A_GPU, str(tmp_path / "program")]
    subprocess.run(command, check=True, timeout=120, env=environment, cwd=tmp_path)
    program = export.deserialize(bytearray((tmp_path / "program").read_bytes()))
    a, b = jnp.asarray(A, jnp.bfloat16), jnp.asarray(B, jnp.bfloat16)
    assert jax.jit(program.call).lower(a, b).compile().as_text().count(f'custom_call_target="{TARGETS["cuda"]}"') == 3
    wanted = jax.value_and_grad(lambda a, b: jnp.sin(a @ b).astype("float32").sum(), (0, 1))(a, b)
    for x, y in zip(jax.tree.leaves(program.call(a, b)), jax.tree.leaves(wanted)):
        assert x.devices() == {jax.devices()[0]}
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=0.02, atol=0.02 * np.abs(np.float32(y)).max())


@pytest.mark.skipif(not _ffi.has_cuda, reason="this build has no CUDA kernels")
@pytest.mark.parametrize("schedule", [Auto(), SplitK(3), StreamK()], ids=str)
def test_two_platforms(schedule):
    """Needs no GPU: a program for CUDA is planned for this machine's GPU, or for an H200 if it has none."""
    f, program = exported(schedule, platforms=["cpu", "cuda"])
    assert program.platforms == ("cpu", "cuda")
    assert all(target in program.mlir_module() for target in TARGETS.values())
    assert np.asarray(program.call(A, B)).tobytes() == np.asarray(f(A, B)).tobytes()


@pytest.mark.skipif(_ffi.has_cuda, reason="this build has CUDA kernels")
def test_a_build_without_cuda_exports_no_cuda():
    for schedule, platforms in ((StreamK(), ["cpu", "cuda"]), (Auto(), ["cuda"])):
        with pytest.raises(RuntimeError, match=r"To (build|have) them: pip install "):
            exported(schedule, platforms=platforms)


@pytest.mark.skipif(_ffi.has_cuda, reason="this build has CUDA kernels")
def test_a_build_without_cuda_exports_xlas_products_for_gpus_beside_its_own():
    def all_products(a, b, sizes):
        product = jax_streamk.ragged_dot(a, jnp.stack([b, b]), sizes)
        return jnp.sum(product + jax_streamk.linear(a, b, activation="relu") + matmul(b.T, a.T).T)

    sizes = np.array([30, 40], np.int32)
    f = jax.jit(jax.value_and_grad(all_products, (0, 1)))
    with pytest.warns(UserWarning, match="XLA's on GPUs, since this build of jax_streamk has no CUDA kernels"):
        program = export.export(f, platforms=["cpu", "cuda"], disabled_checks=EXPORT_CHECKS)(A, B, sizes)
    again = export.deserialize(program.serialize())
    assert again.platforms == ("cpu", "cuda")
    text = again.mlir_module()
    assert TARGETS["cpu"] in text and TARGETS["cuda"] not in text and "dot_general" in text
    for x, y in zip(jax.tree.leaves(again.call(A, B, sizes)), jax.tree.leaves(f(A, B, sizes))):
        np.testing.assert_array_equal(x, y)


def test_platforms_without_kernels_export_xlas_product():
    _, program = exported(platforms=["tpu"])
    assert "stablehlo.dot_general" in program.mlir_module() and "custom_call" not in program.mlir_module()


def test_plans_of_an_exported_program_are_those_of_its_platform():
    _, program = exported(SplitK(3))
    made = jax_streamk.plan(A, B, schedule=SplitK(3))
    assert f'kernel = "{made.kernel}"' in program.mlir_module()


def on_two_devices(function, *specs):
    """(the function, exported for two devices that divide its operands as ``specs`` say; the operands)."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    operands = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((A, B), specs)]
    program = export.export(jax.jit(function(mesh)), platforms=["cpu"], disabled_checks=EXPORT_CHECKS)(*operands)
    again = export.deserialize(program.serialize())
    assert again.nr_devices == 2
    return again, operands


def test_several_devices_are_given_xlas_product():
    program, operands = on_two_devices(lambda mesh: matmul, P(None, "x"), P("x"))
    assert "dot_general" in program.mlir_module() and "custom_call @CustomSPMDPartitioning" not in program.mlir_module()
    np.testing.assert_array_equal(jax.jit(program.call)(*operands), A @ B)
    with pytest.raises(
        ValueError,
        match=r"schedule=StreamK.* cannot run: only XLA partitions products in an export for several devices; Auto",
    ):
        on_two_devices(lambda mesh: lambda a, b: matmul(a, b, schedule=StreamK()), P(None, "x"), P("x"))


def test_several_devices_run_kernels_in_shard_map():
    def function(mesh):
        local = lambda a, b: jax.lax.psum(matmul(a, b, schedule=StreamK()), "x")
        return jax.shard_map(local, mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P())

    program, operands = on_two_devices(function, P(None, "x"), P("x"))
    assert TARGETS["cpu"] in program.mlir_module()
    np.testing.assert_array_equal(jax.jit(program.call)(*operands), A @ B)
