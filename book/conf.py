"""Sphinx configuration. `make book` copies this folder, the notebooks and the data together first (`lib.book`)."""

project = "leakbook"
author = "the leakbook authors"
copyright = "2026, the leakbook authors. Code and text under the MIT licence"
extensions = ["myst_nb", "sphinx.ext.mathjax", "sphinx_copybutton"]
exclude_patterns = ["exercise_table.md", "notebooks/original", "notebooks/exercises/original"]
language = "en"

nb_execution_mode = "off"  # pages show what was stored
nb_merge_streams = True
nb_ipywidgets_js = {}  # else pages load scripts from a CDN
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "What a language model gives away"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_favicon = "_static/favicon.svg"
html_use_index = False
html_show_sourcelink = False
html_copy_source = False
html_show_search_summary = False  # summaries are fetched, which a page opened from a file may not do
mathjax_path = "mathjax/tex-svg.js"  # bundled; draws with paths, so that no font is fetched
