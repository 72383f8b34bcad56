"""How Sphinx makes the site of these pages: `make docs`. The pages also read well as they are."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

from polar import __version__

project = "Polar"
author = "the authors of Polar"
release = version = __version__
extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Polar"
html_static_path: list[str] = []
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?!reference/|howto/|[a-z-]+\.md)([^)#]+)\)")
"""A link to a file of the repository that is no page: on the site there is only its name."""


def name_files(_: Sphinx, docname: str, source: list[str]) -> None:
    """Links that leave docs/ become file names."""
    here = Path(docname).parent
    root = "/".join([".."] * (len(here.parts) + 1))
    source[0] = OUTSIDE.sub(r"\1 (`\2`)", source[0]) if root else source[0]


def setup(app: Sphinx) -> None:
    app.connect("source-read", name_files)
