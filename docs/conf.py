"""The documentation's site, for Sphinx: ``.venv/bin/sphinx-build -W docs build/docs``.

Pages are the Markdown files beside this one, as a forge shows them. Where a page tells what other files know better,
that is added when the site is made: see :mod:`drawn_pages`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from drawn_pages import DRAWN  # noqa: E402  found by the line above

project = "kvferry"
project_copyright = "the kvferry authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_title = "kvferry"
# What is quoted is typed.
smartquotes = False

myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_use_ivar = True


def add_drawn(app: Sphinx, page: str, source: list[str]) -> None:
    """Give a page what is drawn from other files; Sphinx calls it for each page that it has read."""
    if page in DRAWN:
        source[0] = DRAWN[page](source[0])


def setup(app: Sphinx) -> None:
    """Sphinx calls it once."""
    app.connect("source-read", add_drawn)
    # The picture of the layers, which a test reads too.
    app.add_lexer("layers", TextLexer)
