"""Sphinx builds the pages as HTML, and the API reference from docstrings: `make docs`.

`api.md` lists the public names in tables, which a test compares with the package. Here each table
is replaced by the full reference of its names.
"""

import re
from typing import Any

project = "jaxspeed"
author = "the jaxspeed developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px"}
html_static_path: list[str] = []
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
add_module_names = False

NAMES = re.compile(r"<!-- names of: ([\w.]+)(?:: ([\w ]+))? -->\n(?:\|.*\n)*")


def _reference(match: re.Match[str]) -> str:
    module, names = match[1], (match[2] or "").split()
    lines = [f".. automodule:: {module}", "   :no-members:", ""]
    for name in names or __import__(module, fromlist=["x"]).__all__:
        value = getattr(__import__(module, fromlist=["x"]), name)
        directive = "class" if isinstance(value, type) else "function"
        if not callable(value):
            directive = "data"
        lines += [f".. auto{directive}:: {module}.{name}"]
        lines += ["   :members:", ""] if directive == "class" else [""]
    return "```{eval-rst}\n" + "\n".join(lines) + "\n```\n"


def _with_reference(app: Any, name: str, source: list[str]) -> None:
    # A link to a file outside of this folder, which is no page of the site, is left as its text.
    outside = "../" * (name.count("/") + 1)
    source[0] = re.sub(rf"\[([^\]]+)\]\({re.escape(outside)}[^)]*\)", r"\1", source[0])
    if name == "api":
        source[0] = NAMES.sub(_reference, source[0])
    if name == "index":
        pages = "\n".join(dict.fromkeys(re.findall(r"\]\(([\w/-]+)\.md\)", source[0])))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n\n{pages}\n```\n"


def setup(app: Any) -> None:
    app.connect("source-read", _with_reference)
