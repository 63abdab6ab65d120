"""How Sphinx makes a site of these pages: ``python -m sphinx docs site``; of all versions,
``python docs/all_versions.py site``.

The pages are written to be read in a repository too, so they contain no directives of Sphinx: the
navigation is made of the links of ``index.md``, in their order.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer

project = "kjo_django"
author = "The kjo_django authors"
with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as _file:
    release = version = tomllib.load(_file)["project"]["version"]

extensions = ["myst_parser"]
myst_heading_anchors = 4
nitpicky = True
html_theme = "furo"
html_title = f"{project} {release}"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_search_scorer = str(Path(__file__).with_name("_static") / "search_scorer.js")
# What `all_versions.py` tells: the version of these pages, and all that are beside it.
html_context = {
    "version_here": os.environ.get("DOCS_VERSION", ""),
    "versions": os.environ.get("DOCS_VERSIONS", "").split(),
}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "versions.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
exclude_patterns = ["_templates", "_static"]
html_show_copyright = False
html_copy_source = False

_CAPTION = re.compile(r"^\*\*(\w[^*\n]*)\*\*", re.MULTILINE)
_PAGE = re.compile(r"\]\((?!\.\.|[a-z]+:)([^)#]+)\.md\)")


def _add_navigation(app: Any, name: str, source: list[str]) -> None:
    """Add tables of contents to the first page, one for each of its captioned lists of links."""
    if name == "index":
        _, *parts = _CAPTION.split(source[0].partition("## All pages")[2])
        for caption, text in zip(parts[::2], parts[1::2], strict=True):
            pages = "\n".join(dict.fromkeys(_PAGE.findall(text)))
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"
    elif name.startswith("decisions/0"):
        # The list of decisions links each; a navigation with all of them could not be read.
        source[0] = f"---\norphan: true\n---\n{source[0]}"


_navigation: dict[str, str] = {}
"""The navigation beside decisions, by its options: none of them is in it, so it is that of all."""


def _reuse_navigation(
    app: Any, name: str, template: str, context: dict[str, Any], tree: Any
) -> None:
    """Make the navigation once for all decisions: making it takes most of the time of a page."""
    make = context.get("toctree")
    if not name.startswith("decisions/0") or make is None:
        return

    def made_once(**options: Any) -> str:
        key = repr(options)
        if key not in _navigation:
            _navigation[key] = make(**options)
        return _navigation[key]

    context["toctree"] = made_once


def setup(app: Any) -> None:
    app.add_lexer("mermaid", TextLexer)
    app.connect("source-read", _add_navigation)
    app.connect("html-page-context", _reuse_navigation, priority=400)  # before the theme's
