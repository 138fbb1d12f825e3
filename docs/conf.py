"""Sphinx configuration: Markdown pages, the furo theme, nothing fetched from the network."""

project = "pytest-quack"
author = "The pytest-quack authors"
project_copyright = "The pytest-quack authors"

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
nitpicky = True
myst_heading_anchors = 3

html_theme = "furo"
html_title = "pytest-quack"
