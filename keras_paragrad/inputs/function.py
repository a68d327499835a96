"""The function that is differentiated: from *sources*, inputs or layers' outputs, to a model's output, row by row."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import LARGEST, check_integer, did_you_mean, quote, refusal
from keras_paragrad.compat.types import Structure
from keras_paragrad.inputs.layer_outputs import checked_rows, output_exchanged
from keras_paragrad.inputs.selection import Selection, embedding_hint, indices_of, labels, spellings

# The argument `output`: a name or number, labels, or a function of the outputs.
OutputChoice = str | int | Sequence[int] | np.ndarray | tf.Tensor | Callable[[Any], tf.Tensor] | None
# The same, checked.
Output = str | int | Callable[[Any], Any] | np.ndarray | None
_KEEP_ROWS = "Keep the first axis: output=lambda y: tf.reduce_sum(y, axis=-1)."


class RowFunction(NamedTuple):
    """Calls the model for inference as a function of its sources, with the other inputs fixed.

    The argument `free` of its methods has a tensor `(rows, ...)` for each source, in order.

    Attributes:
        model: The model.
        selection: The sources.
        output: Selects or computes the output to differentiate.
        inputs: All inputs, in order; sources among them are replaced in a call.
        labels: The label of each row, if labels select the output.
    """

    model: keras.Model
    selection: Selection
    output: Output
    inputs: Sequence[tf.Tensor]
    labels: tf.Tensor | None = None

    def __call__(self, free: Sequence[tf.Tensor]) -> tf.Tensor:
        """The output, `(rows, ...)`, for these values of the sources."""
        inputs = list(self.inputs)
        for source, tensor in zip(self.selection.inputs, free, strict=False):
            inputs[source.number] = tensor
        value = _select(self.model, self._call(inputs, lambda _: free[0]), self.output, self.labels)
        return checked_rows(value, self.inputs[0].shape[0], "The output", _KEEP_ROWS)

    def free_values(self) -> list[tf.Tensor]:
        """The sources' own values, to differentiate at: inputs, or the layer's output in a call of the model."""
        if self.selection.layer is None:
            return [self.inputs[source.number] for source in self.selection.inputs]
        values: list[tf.Tensor] = []

        def record(value: tf.Tensor) -> tf.Tensor:
            values.append(tf.identity(value if value.dtype == tf.float64 else tf.cast(value, "float32")))
            return value

        self._call(self.inputs, record)
        return values

    def _call(self, inputs: Sequence[tf.Tensor], exchange: Callable[[tf.Tensor], tf.Tensor]) -> Structure:
        nested, layer = keras.tree.pack_sequence_as(self.selection.structure, list(inputs)), self.selection.layer
        with output_exchanged(layer, inputs[0].shape[0], exchange) if layer else contextlib.nullcontext():
            return self.model(nested, training=False)

    def scalars(self, free: Sequence[tf.Tensor]) -> tf.Tensor:
        """The output as a vector `(rows,)`; refuses an output with several numbers per row."""
        value = self(free)
        if value.shape.num_elements() != value.shape[0]:
            raise ValueError(
                f"The output has shape {(None, *value.shape[1:])}, and a gradient needs one number per row. Write "
                "output=0 for the first entry of its last axis, or a function of the outputs that returns one number "
                "per row, or call input_jacobian()."
            )
        return tf.reshape(value, [-1])

    def gradients(self, free: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The gradient of each row's scalar with respect to `free`."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(free)
            scalars = self.scalars(free)
        return self.check_connected(tape.gradient(scalars, free))

    def check_connected(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[tf.Tensor]:
        """Returns the gradients as tensors; refuses an output that does not depend on one of the sources."""
        inputs, tensors = self.selection.inputs, list[tf.Tensor]()
        for source, gradient in zip(inputs or [self.selection.layer], gradients, strict=True):
            if gradient is None:
                others = [other.name for other in inputs if other is not source]
                hint = f" {hint}" if inputs and (hint := embedding_hint(self.model)) else ""
                raise ValueError(
                    f"The output does not depend on {source}, or only through operations without a derivative, such "
                    f"as rounding or an embedding lookup.{hint}"
                    + (f" To exclude it, write wrt={others}." if others else "")
                )
            tensors.append(tf.convert_to_tensor(gradient))
        return tensors


class Derivative(NamedTuple):
    """The derivative of a chunk of rows.

    Attributes:
        values: A tensor `(rows, ...)` for each source.
        is_valid: Whether two ways to compute it agree, where there are two.
    """

    values: Sequence[tf.Tensor]
    is_valid: tf.Tensor | bool = True


# Takes the function, its `free_values`, and the other arrays that were cut into chunks.
Differentiate = Callable[[RowFunction, list[tf.Tensor], Sequence[tf.Tensor]], Derivative]


@contextlib.contextmanager
def refuse_missing_derivatives(message: str) -> Generator[None]:
    """Context that reports gradients without a second derivative; `{}` in `message` stands for TensorFlow's error."""
    try:
        yield
    except LookupError as error:
        raise ValueError(message.format(str(error).split(". ")[0])) from error


def check_output(output: object) -> Output:
    """Validates the `output` argument; labels are returned as an int32 array `(rows,)`."""
    if output is None or isinstance(output, str) or (callable(output) and not isinstance(output, type)):
        return output
    try:
        return check_integer("output", output, least=-LARGEST)
    except ValueError:
        expected = (
            "the name of an output, the index of an entry on its last axis such as a class, integer labels of shape "
            "(rows,) or (rows, 1), a function, or None"
        )
        refused = refusal("output", output, expected, "lambda outputs: outputs[:, 0] - outputs[:, 1]")
    is_array = isinstance(output, (list, tuple)) or (hasattr(output, "__array__") and not isinstance(output, type))
    try:
        labels = np.asarray(output if is_array else 0)
    except Exception:  # rows of unequal length, or a symbolic tensor
        labels = np.asarray(0)
    if labels.ndim:
        return _check_labels(labels)
    raise refused


def _check_labels(labels: np.ndarray) -> np.ndarray:
    """Validates labels; returns them as a vector of int32."""
    flat = labels.reshape(-1)
    is_vector = labels.ndim == 1 or labels.shape[1:] == (1,)
    if not is_vector or flat.dtype.kind not in "iu" or not flat.size:
        raise ValueError(
            f"`output` has labels of dtype {labels.dtype} and shape {labels.shape}, and must have an integer for each "
            "row, of shape (rows,) or (rows, 1). Write labels.astype('int32') if they are whole numbers, or "
            "np.argmax(labels, axis=-1) if they are one-hot."
        )
    for label in (flat.min(), flat.max()):
        if not 0 <= label <= np.iinfo("int32").max:
            expected = "labels that count from 0, one for each row; leave out rows without one"
            raise refusal("output", int(label), expected)
    return flat.astype("int32")


def _select(model: keras.Model, outputs: Structure, output: Output, row_labels: tf.Tensor | None) -> Structure:
    """The value that the checked argument `output` selects or computes from the model's outputs."""
    if callable(output):
        return output(outputs)
    leaves = keras.tree.flatten(outputs)
    if isinstance(output, str) or len(leaves) != 1:
        return leaves[_output_number(model, outputs, output)]
    (value,) = leaves
    if output is None:
        return value
    size = value.shape[-1] if len(value.shape) > 1 else None
    if isinstance(output, np.ndarray):
        if size is None or output.max() >= size:
            row = int(output.argmax())
            advice = " It has one score per row: remove `output`." if size in (None, 1) else ""
            raise ValueError(
                f"`output` has label {output[row]} for row {row}, which is out of range for the last axis of the "
                f"model's output, of shape {value.shape}.{advice}"
            )
        return tf.gather(value, row_labels, axis=-1, batch_dims=1)
    if size is None or not -size <= output < size:
        raise ValueError(f"`output` is {output}, which is out of range for the model's output, of shape {value.shape}.")
    return value[..., output]


def _output_number(model: keras.Model, outputs: Structure, output: Output) -> int:
    """The index of the output that has the name or path `output`; refuses what names none of several, or more."""
    paths = [path for path, _ in keras.tree.flatten_with_path(outputs)]
    if isinstance(output, np.ndarray):
        raise ValueError(
            f"`output` has one label per row, and the model has {len(paths)} outputs. Build a model with only the "
            "output that the labels are for, such as keras.Model(model.inputs, model.outputs[0]), and pass that."
        )
    names = list(getattr(model, "output_names", None) or [])
    known = spellings(outputs, names if len(names) == len(paths) else [None] * len(paths))
    if isinstance(output, str) and len(matches := indices_of(output, known)) == 1:
        return matches[0]
    unique = [name for name in labels(known) if name]
    choices = ", ".join([*map(repr, unique), *([] if len(unique) == len(paths) else ["a function of the outputs"])])
    path = paths[-1] or (0,)
    raise ValueError(
        f"`output` is {quote(output)}, which names no single one of the model's {len(paths)} outputs."
        f"{did_you_mean(output, unique)} Set output= to one of {choices}, as in output=lambda outputs: "
        f"outputs{''.join(f'[{key!r}]' for key in path)}."
    )
