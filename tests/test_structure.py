"""What docs/design.md says of the structure: imports and includes go down its drawings of modules and folders."""

import ast
import graphlib
import pathlib
import re

import pytest

import jax_streamk

ROOT = pathlib.Path(jax_streamk.__file__).parent
DESIGN = pathlib.Path(__file__).parents[1] / "docs" / "design.md"
MODULES = {
    ".".join(("jax_streamk", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def imported(name):
    """The modules of the package that one imports, in functions and for annotations too, without the package itself."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found.update((node.module, *(f"{node.module}.{x.name}" for x in node.names)))
        elif isinstance(node, ast.Import):
            found.update(x.name for x in node.names)
    folders = {x for x, path in MODULES.items() if path.name == "__init__.py" and x != "jax_streamk.machines"}
    return found & MODULES.keys() - {name} - folders


def rows():
    """The modules and folders of each row of the drawing, from the top."""
    (drawing,) = re.findall(r"```text\n(api .*?)```", DESIGN.read_text(), re.S)
    return [line.split("  ")[0].split() for line in drawing.splitlines()]


def row_of(name):
    """The number of the row that names a module, or the folder that it is in."""
    parts = name.removeprefix("jax_streamk.").split(".")
    found = {of: at for at, row in enumerate(rows()) for of in row}
    return next(found[of] for of in (".".join(parts), parts[0]) if of in found)


FOLDERS = ("cutlass_kernels", "ffi")


def cpp_folders():
    """The row of each C++ folder in the drawing, from the top."""
    (drawing,) = re.findall(r"```text\n(ffi .*?)```", DESIGN.read_text(), re.S)
    return {name: at for at, line in enumerate(drawing.splitlines()) for name in line.split("  ")[0].split()}


def test_includes_go_down():
    rows, root = cpp_folders(), DESIGN.parents[1]
    sources = [x for folder in FOLDERS for x in (root / folder).rglob("*") if x.suffix in (".h", ".cc", ".cu", ".cuh")]
    assert {x.parent.name for x in sources} == rows.keys()
    upwards = {
        (str(source.relative_to(root)), path)
        for source in sources
        for path, folder in re.findall(r'#include "((?:cutlass_kernels/)?(\w+)/[\w.]+)"', source.read_text())
        if folder in rows and rows[folder] < rows[source.parent.name]
    }
    assert not upwards, "which are above it in the drawing of docs/design.md"


def test_an_activation_is_in_the_files_that_are_named():
    text = (DESIGN.parent / "contributing.md").read_text()
    (paragraph,) = (x for x in text.split("\n\n") if x.startswith("An activation is"))
    folders = (DESIGN.parents[1] / folder for folder in ("jax_streamk", *FOLDERS))
    files = (x for folder in folders for x in folder.rglob("*") if x.suffix in (".py", ".h", ".cc", ".cu", ".cuh"))
    found = {f"{x.relative_to(DESIGN.parents[1])}" for x in files if re.search("gelu_tanh|kGeluTanh", x.read_text())}
    assert found == set(re.findall(r"`([\w/]+\.\w+)`", paragraph))


def test_imports_have_no_circle():
    order = graphlib.TopologicalSorter({name: imported(name) for name in MODULES.keys() - {"jax_streamk"}})
    order.prepare()  # raises CycleError, which names a circle


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"jax_streamk", "jax_streamk.__main__"}))
def test_imports_go_down(name):
    upwards = {x for x in imported(name) if row_of(x) < row_of(name)}
    assert not upwards, "which are above it in the drawing of docs/design.md"
