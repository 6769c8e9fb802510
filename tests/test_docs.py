"""Every Python block of every page runs: those of a page in order, in a process of their own.

What pages say that blocks print, commands, links, counts and lists of pages and names are checked too.
"""

import collections
import csv
import inspect
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap

import jax
import pytest

import jax_streamk
import jax_streamk.flax
from jax_streamk import _ffi
from jax_streamk.__main__ import COMMANDS, main

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
FENCE = re.compile(r"^( *)(```+)([^\n`]*)\n(.*?)^\1\2$", re.DOTALL | re.MULTILINE)


def blocks(page, *languages):
    return [textwrap.dedent(code) for _, _, info, code in FENCE.findall(page.read_text()) if info.strip() in languages]


def shown(page):
    """For each Python block the output that the page shows, after a paragraph that begins with "prints"; or None."""
    text = page.read_text()
    fences = list(FENCE.finditer(text))
    for fence, following in zip(fences, [*fences[1:], None]):
        if fence[3].strip() == "python":
            between = "" if following is None else text[fence.end() : following.start()].strip()
            yield following[4] if between.startswith("prints") and "\n\n" not in between else None


def as_pattern(output):
    """Lines of "..." stand for any lines."""
    lines = output.splitlines(keepends=True)
    return "".join(r"(?:.*\n)*?" if line.strip() == "..." else re.escape(line) for line in lines)


def name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_page(page, tmp_path):
    if page.stem == "sharding" and jax.default_backend() == "gpu" and len(jax.devices()) < 4:
        pytest.skip("needs four GPUs")
    after_each = "\nprint('end of block')\n"
    program = after_each.join([*blocks(page, "python"), ""])
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    if _ffi.has_cuda:  # pages show what a build without CUDA kernels prints
        return
    for output, expected in zip(done.stdout.split("end of block\n"), shown(page)):
        assert expected is None or re.fullmatch(as_pattern(expected), output), output


def test_output_on_pages_is_found_and_compared():
    for page in ("matmul", "explain"):
        assert any(shown(ROOT / "docs" / f"{page}.md")), page
    assert re.fullmatch(as_pattern("a: 1\n...\nb*\n"), "a: 1\nc\nd\nb*\n")
    assert not re.fullmatch(as_pattern("a: 1\n"), "a: 1\nb: 2\n")


def test_every_topic_has_a_page_that_runs():
    running = {page.stem for page in PAGES if blocks(page, "python")}
    assert running >= {"README", "start", "matmul", "dot_general", "flax", "sharding", "numerics", "tuning"}


def test_no_block_escapes():
    """By a language that the tests do not know, or a fence that is not closed."""
    for page in PAGES:
        text = page.read_text()
        assert "```" not in FENCE.sub("", text), name(page)
        languages = {info.strip() for _, _, info, _ in FENCE.findall(text)}
        known = {"", "python", "sh", "bash", "console", "text", "c++", "{toctree}", "{eval-rst}"}
        assert languages <= known, name(page)


def commands(option):
    """What follows ``python -m`` or ``python -c`` in shell blocks, as lists of arguments."""
    lines = "\n".join(block for page in PAGES for block in blocks(page, "sh", "bash")).replace("\\\n", "").splitlines()
    found = [
        re.split(r" [&|>]", line.partition(f"{option} ")[2])[0]
        for line in lines
        if f"python {option} " in line or f"python -P {option} " in line
    ]
    return [shlex.split(text, comments=True) for text in dict.fromkeys(found)]


@pytest.mark.parametrize("arguments", commands("-m"), ids=" ".join)
def test_commands_have_the_options_that_pages_name(arguments, monkeypatch):
    package, *rest = arguments
    ran = []
    for command in COMMANDS:
        monkeypatch.setattr(f"jax_streamk.tools.{command}.run", ran.append)
    main(rest)
    assert package == "jax_streamk" and len(ran) == 1


@pytest.mark.parametrize("arguments", commands("-c"))
def test_programs_of_one_line_run(arguments, tmp_path):
    subprocess.run([sys.executable, "-c", *arguments], cwd=tmp_path, check=True)


def test_the_reference_has_every_public_name():
    names = {f"jax_streamk.{name}" for name in jax_streamk.__all__}
    for module in (jax_streamk.flax.linen, jax_streamk.flax.nnx):
        names |= {
            f"{module.__name__}.{name}"
            for name, value in vars(module).items()
            if not name.startswith("_") and inspect.getmodule(value) is module and callable(value)
        }
    reference = (ROOT / "docs" / "api.md").read_text()
    # A directive names several objects one below the other.
    documented = re.findall(r"^(?:\.\. (?:auto|py:)\w+:: |  +)([\w.]+)(?:\(.*)?$", reference, re.MULTILINE)
    documented = {found if found.startswith("jax_streamk.") else f"jax_streamk.{found}" for found in documented}
    assert names <= documented, names - documented


def test_the_page_on_installing_counts_the_kernels():
    with (pathlib.Path(jax_streamk.__file__).parent / "cuda_kernels.csv").open() as file:
        families = collections.Counter(row["family"] for row in csv.DictReader(file))
    page = " ".join((ROOT / "docs" / "install.md").read_text().split())
    found = re.findall(r"Hopper's (\d+) of the (\d+) kernels", page)
    assert found == [(str(families["sm90"]), str(families.total()))]


def test_the_site_has_every_page():
    listed = {line.strip() for tree in blocks(ROOT / "docs" / "index.md", "{toctree}") for line in tree.splitlines()}
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} <= {"index", *listed}


def anchors(page):
    """Those that GitHub gives to headings, as the site does."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", FENCE.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if found.is_relative_to(ROOT / "jax_streamk"):  # it may be installed elsewhere
            found = pathlib.Path(jax_streamk.__file__).parent / found.relative_to(ROOT / "jax_streamk")
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_code_is_not_cut():
    """At 1280 pixels the site has room for 88 columns, and GitHub for few more."""
    code = [line for block in blocks(ROOT / "README.md", "python", "sh") for line in block.splitlines()]
    assert not [line for line in code if len(line) > 88]
    style = (ROOT / "docs" / "_static" / "site.css").read_text()
    assert re.search(r"^\.highlight pre {\s*white-space: pre-wrap;", style, re.MULTILINE)
    printed = [block for page in PAGES if page.parent.name == "docs" for block in blocks(page, "", "text")]
    tables = [line for block in printed for line in block.splitlines() if re.search(r"\S   +\S", line)]
    assert tables and max(map(len, tables)) <= 88 / 0.75, "in letters of 0.75 em instead of 0.875"


def test_drawings_can_be_read_on_a_phone():
    """Of 390 pixels, of which pages leave 358. Plots of measurements are for wider screens."""
    for name in ("schedules", "architecture"):
        drawing = (ROOT / "docs" / f"{name}.svg").read_text()
        width = re.search(r'viewBox="0 0 (\d+) ', drawing)[1]
        sizes = [float(size) for size in re.findall(r'font-size(?:="|: )([\d.]+)', drawing)]
        assert sizes and min(sizes) * 358 / int(width) >= 8.5


def test_measurements_are_a_few_small_files():
    sizes = [
        path.stat().st_size for path in (ROOT / "benchmarks").rglob("*") if path.is_file() and path.suffix != ".pyc"
    ]
    assert sum(sizes) <= 3e6
