"""The site, made of the pages of this folder: ``sphinx-build -W docs build/site``."""

import inspect
import pathlib
import re

from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import stringify_signature

import jax_streamk

ROOT = pathlib.Path(__file__).parents[1]
REPOSITORY = "https://github.com/jax-streamk/jax_streamk"

project = "jax_streamk"
author = "the jax_streamk authors"
version = release = jax_streamk.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 3  # GitHub's, so that links with anchors work in both places
nitpicky = True
# Types of others, which only a network would resolve, and those that an argument's description explains.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|flax|jax|jaxlib|(jax_streamk\.)?_ffi|numpy|os|typing)\..*"),
    ("py:class", "ArrayLike|DTypeLike|NamedSharding|PartitionSpec|PrecisionLike"),
    ("py:class", r"P|jax_streamk\.accelerate\.rewrite\.(Accelerated|R)"),
    ("py:class", r"Activation|Any|Callable|DimensionNumbers|Shaped|Where|lax\.RaggedDotDimensionNumbers"),
]

autodoc_preserve_defaults = True
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "sphinx_book_theme"
html_title = "jax_streamk"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "repository_url": REPOSITORY,
    "path_to_docs": "docs",
    "use_repository_button": True,
    "use_source_button": True,
    "use_download_button": False,
    "navbar_persistent": [],  # the search field is in the sidebar
}
copybutton_exclude = ".linenos, .gp, .go"


def link_to_repository(app, docname, source):
    """Links that lead out of this folder lead to the repository."""

    def absolute(link):
        path = (ROOT / "docs" / link[1]).resolve()
        kind = "tree" if path.is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{path.relative_to(ROOT)})"

    source[0] = re.sub(r"\]\((\.\./[^)]+)\)", absolute, source[0])


def as_written(app, what, name, obj, options, signature, returns):
    """Annotations as they are written: ``ArrayLike``, and not the union that it is."""
    if what in ("function", "method"):
        written = inspect.signature(obj)
        of_call = list(written.parameters.values())[what == "method" :]
        signature, _, returns = stringify_signature(written.replace(parameters=of_call)).rpartition(" -> ")
    elif signature:
        signature = signature.replace("<factory>", "...")  # what dataclasses have for a default is no Python
    return signature, returns


def setup(app):
    for module in ("jax_streamk.accelerate", "jax_streamk.flax.nnx"):
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        analyzer.overloads.clear()  # the implementation's signature says it once
    app.connect("autodoc-process-signature", as_written)
    app.connect("source-read", link_to_repository)
