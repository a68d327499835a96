"""Types that a signature names, in place of the unions and nestings that they stand for, and a list of them."""

from docutils.nodes import Element
from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

from keras_paragrad.compat.types import FitData, Specs, Structure
from keras_paragrad.engine.losses.divisors import DivisorFunction
from keras_paragrad.inputs.selection import Wrt
from keras_paragrad.per_example.functional import LossArgument

# The innermost first, as others contain them.
ALIASES = {
    "Structure": (
        Structure,
        "Tensors, nested in lists, tuples and dictionaries, as a model takes and returns them.",
    ),
    "DivisorFunction": (
        DivisorFunction,
        "A function of `(x, y, y_pred, sample_weight)` of a part of a batch: the number that the part's loss is "
        "divided by, as a scalar tensor.",
    ),
    "FitData": (
        FitData,
        "What `fit` takes: arrays, nested or not, a dataset, or an iterable of batches.",
    ),
    "Specs": (Specs, "The `tf.TypeSpec` of each tensor of a batch, nested as the batch is."),
    "Wrt": (
        Wrt,
        "What to differentiate by: names or indices of inputs, nested, or the name of a layer.",
    ),
    "LossArgument": (
        LossArgument,
        "A loss, as `compile` takes it: a name, an object or a function, or one for each output.",
    ),
}


def _replaced(annotation: str, expanded: dict[str, str]) -> str:
    """Puts aliases in place of what they stand for, until nothing changes: an alias may contain itself."""
    before = None
    while annotation != before:
        before = annotation
        for name, each in expanded.items():
            annotation = annotation.replace(each, name)
    return annotation


_EXPANDED: dict[str, str] = {}
for _name, (_value, _) in ALIASES.items():
    _EXPANDED[_name] = _replaced(stringify_annotation(_value, "smart"), _EXPANDED)


def listed(_: str) -> str:
    """Each alias, with what it stands for."""
    parts = (f".. py:type:: {name}\n\n   {said}\n" for name, (_, said) in ALIASES.items())
    return "\n".join(parts)


def _shorten(app: Sphinx, domain: str, kind: str, content: Element) -> None:
    for annotations in app.env.current_document.autodoc_annotations.values():
        annotations.update(
            {name: _replaced(annotation, _EXPANDED) for name, annotation in annotations.items()}
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Shortens types before autodoc puts them into the description of parameters."""
    app.connect("object-description-transform", _shorten, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
