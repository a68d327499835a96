"""How Sphinx builds the site, offline: `make docs`."""

import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# The width of the commands' help.
os.environ["COLUMNS"] = "100"
sys.path.insert(0, str(DOCS / "site"))

import keras_paragrad  # noqa: E402

project = "keras_paragrad"
author = copyright = "The keras_paragrad authors"
release = version = keras_paragrad.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "pages",
    "aliases",
    "mathml",
]
exclude_patterns = ["site"]
myst_enable_extensions = ["dollarmath"]
# Anchors as GitHub makes them.
myst_heading_anchors = 4
# Messages and code are to be copied as they are.
smartquotes = False

# Tutorials are run by `make docs`, which keeps what they print for the next time; the tests build without.
nb_execution_mode = os.environ.get("TUTORIALS", "off")
nb_execution_cache_path = str(DOCS.parent / "build" / "tutorials")
nb_execution_timeout = 600
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_output_stderr = "remove"
nb_merge_streams = True
# They would be fetched; nothing here is a widget.
nb_ipywidgets_js = {}

# Google's style, with Markdown's backticks.
default_role = "py:obj"
napoleon_numpy_docstring = False
napoleon_attr_annotations = False
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
add_module_names = False
# A longer one has a line for each parameter.
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"keras_paragrad {release}"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_search_scorer = str(DOCS / "site" / "scorer.js")
# A class's methods are below its name already.
toc_object_entries_show_parents = "hide"
html_show_sphinx = False
# It is fetched, which a browser refuses for files.
html_show_search_summary = False
