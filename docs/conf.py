"""How Sphinx builds these pages: ``sphinx-build -W docs docs/_build/html``."""

import sys
from pathlib import Path

import lazytpu

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "lazytpu"
author = "the lazytpu authors"
copyright = "2026, the lazytpu authors"
release = version = lazytpu.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "ops_table",
    "settings_table",
    "compat_table",
    "dump_files",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"lazytpu {release}"
html_show_sourcelink = False

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
# Names in single backquotes in docstrings are names of the package.
default_role = "any"
