"""Every Python block of the README and of the guides runs: those of a page in order, in a process of their own."""

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
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks(page))], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr


def test_every_topic_has_a_page_that_runs():
    pages = {page.stem: len(blocks(page)) for page in PAGES}
    assert all(pages[topic] for topic in ("README", "matmul", "dot_general", "sharding", "numerics", "tuning"))


def test_links_lead_somewhere():
    for page in [*PAGES, *ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_measurements_are_a_few_small_files():
    sizes = [
        path.stat().st_size for path in (ROOT / "benchmarks").rglob("*") if path.is_file() and path.suffix != ".pyc"
    ]
    assert sum(sizes) <= 3e6
