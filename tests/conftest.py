"""Fixtures that every test file may use."""

import os
import tempfile

import jax
import pytest

# Neither these tests nor the processes they start see the user's tuned plans and machine files.
_cache = tempfile.TemporaryDirectory(prefix="jax_streamk_tests_")
os.environ["XDG_CACHE_HOME"] = os.environ["XDG_DATA_HOME"] = _cache.name

# pytest-xdist's processes, and those that tests start, share a GPU.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

# Simulated devices for the tests of sharding; all other tests use the first one.
jax.config.update("jax_num_cpu_devices", 8)


def pytest_report_header(config):
    import jaxlib

    import jax_streamk

    devices = ", ".join(str(device) for device in jax.devices())
    return (
        f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, {devices}, {len(jax_streamk.kernels())} kernels compiled"
    )


@pytest.fixture(autouse=True)
def small_products_are_ours(monkeypatch, request):
    """Most tests multiply small matrices, on any GPU: ``Auto()`` would leave these to XLA, or to be merged by it."""
    if "left_to_xla" not in request.keywords:
        from jax_streamk.accelerate import decisions
        from jax_streamk.plan import left_to_xla

        monkeypatch.setattr(left_to_xla, "too_small", lambda problem, device: None)
        monkeypatch.setattr(left_to_xla, "not_measured", lambda device: None)
        monkeypatch.setattr(decisions, "merged_by_xla", lambda eqn, program: None)


@pytest.fixture
def store(tmp_path):
    """Puts an empty store of tuned plans in use, as if this process had not warned yet."""
    from jax_streamk.tuning import tuned

    tuned._warned.clear()
    with tuned.using(tuned.Store(tmp_path / "plans")) as store:
        yield store
    tuned._warned.clear()


def has_gpu():
    return jax.default_backend() == "gpu"


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "left_to_xla: small products, and all on unknown GPUs, are left to XLA, as for users"
    )
    config.addinivalue_line("markers", "gpu: runs on an NVIDIA GPU with a build that has CUDA kernels")


def pytest_collection_modifyitems(config, items):
    if has_gpu():
        return
    skip = pytest.mark.skip(reason="no GPU is visible to JAX")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
