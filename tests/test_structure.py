"""What docs/design.md says of the structure: imports go one way."""

import ast
import graphlib
import pathlib

import jax_streamk

ROOT = pathlib.Path(jax_streamk.__file__).parent
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
    return found & MODULES.keys() - {name, "jax_streamk"}


def test_imports_have_no_circle():
    order = graphlib.TopologicalSorter({name: imported(name) for name in MODULES.keys() - {"jax_streamk"}})
    order.prepare()  # raises CycleError, which names a circle


def test_plans_know_nothing_of_what_shows_them():
    below = ["jax_streamk.plan.planner"]
    reached = set(below)
    while below:
        new = imported(below.pop()) - reached
        reached |= new
        below += new
    assert reached.isdisjoint({f"jax_streamk.{name}" for name in ("api", "explain", "plot", "products", "lowering")})
