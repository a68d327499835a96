"""Selects the output to differentiate: by name, by index, by label, or by a function of all outputs."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import LARGEST, check_integer, refusal, shown
from keras_paragrad.inputs.labels import checked_labels

Output = str | int | Callable[[Any], Any] | np.ndarray | None


def checked_output(output: Any) -> Output:
    """Validates the `output` argument: a name, an index, a function, `None`, or a label per row.

    Labels are returned as an int32 array of shape `(rows,)`.
    """
    if output is None or isinstance(output, str) or (callable(output) and not isinstance(output, type)):
        return output
    try:
        return check_integer("output", output, least=-LARGEST)
    except ValueError:
        labels = checked_labels(output)
        if labels is not None:
            return labels
        expected = (
            "the name of an output, the index of an entry on its last axis such as a class, integer labels of shape "
            "(rows,) or (rows, 1), a function, or None"
        )
        raise refusal("output", output, expected, "lambda outputs: outputs[:, 0] - outputs[:, 1]") from None


def select(model: keras.Model, outputs: Any, output: Output, labels: tf.Tensor | None = None) -> Any:
    """The output, or the function of the outputs, that `output` stands for.

    Args:
        model: The model.
        outputs: Its outputs for a chunk of rows.
        output: The checked argument.
        labels: The chunk's labels, if `output` is an array of labels.
    """
    if callable(output):
        return output(outputs)
    names = output_names(model, outputs)
    if isinstance(output, str):
        if output not in names:
            known = f"are {', '.join(map(repr, names))}" if names else "have no names"
            raise ValueError(f"`output` is {shown(output)}, and the model's outputs {known}. {_WRITE_A_FUNCTION}")
        return keras.tree.flatten(outputs)[names.index(output)]
    leaves = keras.tree.flatten(outputs)
    if len(leaves) != 1 and isinstance(output, np.ndarray):
        raise ValueError(
            f"`output` has one label per row, and the model has {len(leaves)} outputs. Build a model with only the "
            "output that the labels are for, such as keras.Model(model.inputs, model.outputs[0]), and pass that."
        )
    if len(leaves) != 1:
        write = f"Set output= to one of {', '.join(map(repr, names))}." if names else _WRITE_A_FUNCTION
        raise ValueError(f"The model has {len(leaves)} outputs. {write}")
    if output is None:
        return leaves[0]
    last = leaves[0].shape[-1] if len(leaves[0].shape) > 1 else None
    if isinstance(output, np.ndarray):
        if last is None or output.max() >= last:
            row = int(output.argmax())
            only = " It has one score per row: remove `output`." if last in (None, 1) else ""
            raise ValueError(
                f"`output` has label {output[row]} for row {row}, which is out of range for the last axis of the "
                f"model's output, of shape {leaves[0].shape}.{only}"
            )
        return tf.gather(leaves[0], labels, axis=-1, batch_dims=1)
    if last is None or not -last <= output < last:
        raise ValueError(
            f"`output` is {output}, which is out of range for the model's output, of shape {leaves[0].shape}."
        )
    return leaves[0][..., output]


_WRITE_A_FUNCTION = "Write a function of the outputs, such as output=lambda outputs: outputs[0]."


def output_names(model: keras.Model, outputs: Any) -> list[str]:
    """The outputs' names, in the order in which they are flattened, or none."""
    paths = [path for path, _ in keras.tree.flatten_with_path(outputs)]
    if all(path and isinstance(path[-1], str) for path in paths):
        return [path[-1] for path in paths]
    names = list(getattr(model, "output_names", None) or [])
    return names if len(names) == len(paths) else []
