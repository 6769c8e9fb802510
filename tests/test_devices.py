"""Two devices of one process at once, as XLA's CPU client can have them without a GPU."""

import os
import subprocess
import sys

PROGRAM = """
import concurrent.futures
import jax, jax.numpy as jnp, numpy as np
from jax_streamk import SplitK, StreamK, matmul

assert jax.device_count() == 2, jax.devices()
rng = np.random.default_rng(0)
a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((130, 1500), (1500, 90)))
schedules = [StreamK(), SplitK(7), SplitK(5, "separate")]
product = jax.jit(lambda a, b: [matmul(a, b, schedule=schedule) for schedule in schedules])

def bits(device, count):
    operands = jax.device_put((a, b), device)
    found = set()
    for _ in range(count):
        out = product(*operands)
        assert all(x.devices() == {device} for x in out)
        found.add(b"".join(np.asarray(x).tobytes() for x in out))
    return found

alone = bits(jax.devices()[0], 1)
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    together = list(pool.map(lambda device: bits(device, 40), jax.devices()))
assert together == [alone, alone]
"""


def test_two_devices_at_once_give_the_bits_of_one():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr
