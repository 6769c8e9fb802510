"""Every Python block of the README and of the guides runs, in order, a page in a process of its own with four devices."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_page(page, tmp_path):
    if page.stem == "sharding" and jax.default_backend() == "gpu" and len(jax.devices()) < 4:
        pytest.skip("needs four GPUs")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks(page))], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


def test_every_topic_has_a_page_that_runs():
    pages = {page.stem: len(blocks(page)) for page in PAGES}
    assert all(pages[topic] for topic in ("README", "matmul", "dot_general", "sharding", "numerics", "tuning"))
    # Links between pages lead somewhere.
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
