"""What goes wrong around a program: it raises what names the remedy, and the process goes on."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import persistent_cache
from jax._src import compilation_cache
from jax.experimental import serialize_executable

import jax_streamk as sk
from jax_streamk import StreamK, matmul

A, B = (np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32) for shape in ((130, 600), (600, 90)))
OF_ANOTHER_BUILD = (
    "this build has no kernel {}; the program was lowered by another build of jax_streamk: install the same one here, "
    "or lower it again"
)


def product():
    return jax.jit(lambda a, b: matmul(jnp.abs(a), b, schedule=StreamK()))


def of_another_build(program):
    """(a compiled program as if its build had another kernel, that kernel's name)"""
    kernel = sk.plan(A, B, schedule=StreamK()).kernel
    other = kernel[:-1] + "?"
    assert kernel.encode() in program
    return program.replace(kernel.encode(), other.encode()), other


def in_a_new_process(program, *arguments):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, cwd="/")


def test_a_program_that_another_build_compiled_is_refused():
    program, *trees = serialize_executable.serialize(product().lower(A, B).compile())
    load = lambda program: serialize_executable.deserialize_and_load(
        program, *trees, execution_devices=jax.devices()[:1]
    )
    np.testing.assert_array_equal(load(program)(A, B), np.abs(A) @ B)
    program, other = of_another_build(program)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        load(program)(A, B)
    assert OF_ANOTHER_BUILD.format(other) in str(error.value)


def test_a_program_that_another_build_cached_is_compiled_anew(tmp_path):
    with persistent_cache(tmp_path):
        product()(A, B)
        (entry,) = tmp_path.glob("*-cache")
        program, other = of_another_build(compilation_cache.decompress_executable(entry.read_bytes()))
        entry.write_bytes(compilation_cache.compress_executable(program))
        jax.clear_caches()
        with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry") as told:
            np.testing.assert_array_equal(product()(A, B), np.abs(A) @ B)
        assert any(OF_ANOTHER_BUILD.format(other) in str(warning.message) for warning in told)


# Splits of 4 MB each, for which there is no room.
OUT_OF_MEMORY = """
import resource
import jax, numpy as np
import jax_streamk as sk

a, b = jax.device_put((np.ones((1024, 8192), np.float32), np.ones((8192, 1024), np.float32)))
schedules = sk.SplitK(128, "separate"), sk.SplitK(2), sk.DataParallel()
needed, *others = (sk.plan(a, b, schedule=schedule).workspace_bytes for schedule in schedules)
assert needed > 500e6 > 100e6 > max(others)
programs = [jax.jit(lambda a, b: sk.matmul(a, b, schedule=schedule)).lower(a, b).compile() for schedule in schedules]
with open("/proc/self/statm") as file:
    held = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 300_000_000,) * 2)
try:
    programs[0](a, b).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    assert "RESOURCE_EXHAUSTED: Out of memory allocating " in str(error), error
else:
    raise AssertionError
for program in programs[1:]:
    assert (program(a, b) == 8192).all()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux how much memory it holds")
def test_no_memory_for_the_workspace():
    """docs/matmul.md quotes the message, and says what needs less."""
    done = in_a_new_process(OUT_OF_MEMORY)
    assert done.returncode == 0, done.stderr


AT_THE_END = """
import sys
import jax, jax.numpy as jnp, numpy as np
import jax_streamk as sk

f = jax.jit(jnp.matmul if sys.argv[1] == "xla" else lambda x, y: sk.matmul(x, y, schedule=sk.StreamK()))
x, y = np.ones((600, 4000), np.float32), np.ones((4000, 600), np.float32)
assert (f(x, y) == 4000).all()
results = [f(x, y) for _ in range(20)]
print("ends", flush=True)
"""


@pytest.mark.parametrize("which", ["ours", "xla"])
def test_the_interpreter_may_end_during_calls(which):
    done = in_a_new_process(AT_THE_END, which)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")
