"""What a ``Device`` may be, and two devices of one process at once, as XLA's CPU client can have them without a GPU."""

import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from jax_streamk import Device, plan

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
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (("gpu", 90, 132), ValueError, "Device: platform='gpu': must be 'cpu', or 'cuda' for NVIDIA GPUs"),
        ((None, 90, 132), TypeError, "Device: platform=None: must be a string"),
        (("cpu", 0, 4, 7), TypeError, "Device: kind=7: must be a string"),
        (("cpu", 0, -4), ValueError, r"Device: sms=-4: must be an integer from 1 to 2\^31 - 1"),
        (("cpu", 0, 0), ValueError, "Device: sms=0: must be an integer from 1 to"),
        (("cuda", 90, 132.0), ValueError, r"Device: sms=132\.0: must be an integer"),
        (("cuda", 90, 2**31), ValueError, r"Device: sms=2147483648: must be .* to 2\^31 - 1"),
        (("cuda", "90", 132), ValueError, "Device: arch='90': must be an integer from 0 to"),
        (("cuda", -90, 132), ValueError, "Device: arch=-90: must be an integer from 0 to"),
        (
            ("cuda", 0, 132),
            ValueError,
            r"Device: arch=0: .* 10 \* major \+ minor of a GPU's compute capability, such as 90",
        ),
        (("cpu", 90, 4), ValueError, "Device: arch=90: must be 0 on a CPU"),
    ],
)
def test_refused_devices(arguments, error, message):
    with pytest.raises(error, match=message):
        Device(*arguments)


def test_integers_of_any_type_are_ints_of_a_device():
    device = Device("cuda", np.int32(90), np.int64(132))
    assert device == Device("cuda", 90, 132) and type(device.arch) is type(device.sms) is int


def test_a_device_of_jax_that_nothing_runs_on_leaves_products_to_xla(monkeypatch):
    monkeypatch.setattr(jax, "Device", types.SimpleNamespace)
    a = jax.ShapeDtypeStruct((8, 8), np.float32)
    made = plan(a, a, device=types.SimpleNamespace(platform="tpu"))
    assert made.kernel is None and made.device.platform == "tpu" and "no kernel" in str(made)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_host_has_the_threads_that_it_may_use():
    """XLA's thread pool has a thread for each of them."""
    program = (
        "import os; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1]); "
        "import jax; import jax_streamk; a = jax.ShapeDtypeStruct((512, 512), 'float32'); "
        "print(jax_streamk.plan(a, a, device='cpu').device.sms)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd="/")
    assert done.stdout == "1\n", done.stderr
