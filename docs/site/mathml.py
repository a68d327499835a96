"""Formulas as MathML, which browsers draw by themselves: nothing is fetched, and no LaTeX is run."""

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator


def _visit(display: bool):
    def visit(self: HTML5Translator, node: nodes.Element) -> None:
        self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=display))
        raise nodes.SkipNode

    return visit


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the renderer, which Sphinx then takes as the only one that it has been told of."""
    app.add_html_math_renderer("mathml", (_visit(False), None), (_visit(True), None))
    app.config.html_math_renderer_name = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
