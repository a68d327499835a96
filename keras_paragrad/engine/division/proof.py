"""The proof on the first batch: parts of its rows, weighted as `fit` weights them, give the gradient of the whole.

In all functions, `size` is the number of rows of a part, and `parts` the number of parts of an update.
"""

from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import call_model, mask_of, with_mask
from keras_paragrad.compat.model import overrides_compute_loss, overrides_train_step
from keras_paragrad.compat.types import Batch, Structure
from keras_paragrad.engine.division.comparison import (
    Difference,
    PartComparison,
    WeightedGradient,
    perturb,
)
from keras_paragrad.engine.division.cut import RowCut
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.losses.terms import compute_loss
from keras_paragrad.engine.probes.pure_function import PureFunction, watch_weights
from keras_paragrad.engine.probes.row_independence import (
    RowPair,
    computes_rows_independently,
    find_changed_outputs,
    has_losses_per_example,
)
from keras_paragrad.engine.probes.tolerances import GRADIENT
from keras_paragrad.engine.probes.trial import Inconclusive, relative_error, row_count, run_trial, take_rows

# The most bytes that the tensors of a whole batch may take together, beside a step. A larger batch is proved on its
# outputs, if they take no more than this limit or than the tensors of one part's forward pass.
MOST_BYTES = 2**24
Unproved = TypeVar("Unproved")


def is_known_to_divide(model: keras.Model) -> bool:
    """Whether a model's layers, losses and step are all Keras's own, and known to compute row by row.

    The losses must be built.
    """
    return (
        not (overrides_compute_loss(model) or overrides_train_step(model))
        and computes_rows_independently(model)
        and has_losses_per_example(model)
    )


def find_difference(
    model: keras.Model,
    data: Batch,
    size: int,
    parts: int,
    normalize: LossNormalization | None,
    *,
    loss_alone: bool = False,
    otherwise: Unproved = None,
) -> Difference | Unproved | None:
    """Computes rows of the first batch whole and in parts; `None` if they differ only by rounding or randomness.

    Args:
        normalize: Computes the weight of a part; all weigh the same, if `None`.
        loss_alone: Whether to differentiate only the loss, with respect to the outputs.
        otherwise: What to return if they can't be compared.
    """

    def find(cut: RowCut) -> Difference | None:
        try:
            if loss_alone:
                return _DividedLoss(model, normalize, len(cut.rows)).compare(data, cut)
            division = _DividedPass(model, normalize, len(cut.rows))
            if bytes_of(division.function.graph(take_rows(data, 0, size))) * len(cut.bounds) <= MOST_BYTES:
                return division.compare(data, cut)
            # The whole takes too much memory: compare half of a part, and then only the loss, on all rows.
            difference = None
            if size > 1:
                half = RowCut.of_part(size)
                difference = _DividedPass(model, normalize, len(half.rows)).compare(data, half)
            return difference or _DividedLoss(model, normalize, len(cut.rows)).compare(data, cut)
        except IndivisibleError:
            # The trace that follows refuses the step, or computes whole losses.
            return None

    cut = RowCut.of_parts(row_count(data), size, parts)
    return run_trial(find, cut, otherwise=otherwise, question="whether parts of the first batch give its gradient")


def find_layer_that_mixes(model: keras.Model, data: Batch, size: int) -> str | None:
    """The first layer whose outputs for some rows of the first batch depend on the batch's other rows."""
    x, *_ = keras.utils.unpack_x_y_sample_weight(data)
    count = min(size, row_count(x))
    if count < 2 or computes_rows_independently(model):
        return None
    first, second = take_rows(x, 0, count), take_rows(x, 1, count)

    def find() -> str | None:
        pair = RowPair((first,), (second,), slice(1, count), slice(None), GRADIENT.half)
        return find_changed_outputs(model, pair, training=True)

    return run_trial(lambda _: find(), 0, otherwise=None, question=None)


def measure_batch_statistics(
    model: keras.Model, data: Batch, size: int, parts: int, normalize: LossNormalization | None
) -> Difference | None:
    """Measures how much the gradient changes if `BatchNormalization` uses the statistics of each part.

    If a whole batch takes too many bytes, uses fewer parts, or the halves of one part.
    """

    def measure(rows: Batch) -> Difference | None:
        count, cut = row_count(rows), RowCut.of_parts(row_count(rows), size, parts)
        division = _DividedPass(model, normalize, len(cut.rows), as_trained=True)
        fitting = MOST_BYTES // bytes_of(division.function.graph(take_rows(rows, 0, size)))
        if fitting < len(cut.bounds):
            if fitting < 2 and size == 1:
                return None
            cut = RowCut.of_parts(count, size, fitting) if fitting > 1 else RowCut.of_parts(count, size // 2, 2)
            if division.function.draws:
                # Random numbers by row depend on the whole's number of rows, which has changed.
                division = _DividedPass(model, normalize, len(cut.rows), as_trained=True)
        return division.difference(rows, cut)

    return run_trial(measure, data, otherwise=None, question=None)


class _DividedPass(PartComparison):
    """Computes the gradient of the weights and the divisor of the loss, for the whole and for its parts.

    If `as_trained`, uses batch statistics and the actual weights.
    """

    def __init__(
        self, model: keras.Model, normalize: LossNormalization | None, total: int, *, as_trained: bool = False
    ):
        self.model, self.normalize = model, normalize
        self.function = PureFunction(model, self.compute, any_rows=True, as_trained=as_trained, total=total)

    def difference(self, data: Batch, cut: RowCut) -> Difference | None:
        """The difference between the parts and the whole, including rounding; `None` if there is no gradient."""
        ((whole, total),) = self.gradients(cut.take(data), cut)
        error = relative_error(whole, total)
        return None if error is None else Difference(error, len(cut.rows), len(cut.bounds))

    def run(self, rows: Batch, first: int, *, changed: bool = False) -> list[WeightedGradient]:
        state = perturb(self.function.reseed()) if changed else None
        (gradients, divisor), _ = self.function(rows, state, first)
        return [WeightedGradient([np.asarray(gradient, "float64") for gradient in gradients], float(divisor))]

    def compute(self, data: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Traces the gradient."""
        with watch_weights(self.model) as gradients_of:
            loss, divisor = self.loss(data)
        return gradients_of(loss), divisor

    def loss(self, data: Batch, y_pred: Structure = None) -> tuple[tf.Tensor, tf.Tensor]:
        """The loss and its divisor: 0 for a sum, and the number of rows if all parts weigh the same."""
        loss, arguments, terms = compute_loss(self.model, data, y_pred=y_pred)
        # Keras differentiates the sum of an unreduced loss.
        total = tf.cast(tf.reduce_sum(loss), "float32")
        if self.normalize is None:
            return total, tf.constant(float(row_count(arguments["x"])))
        weight = self.normalize.normalizer(self.model, arguments, terms, tried=False)
        return total, tf.zeros([]) if weight.summed else tf.cast(weight.never_zero.value, "float32")


class _DividedLoss(_DividedPass):
    """Computes only the gradient of the outputs: a whole batch's outputs may fit where its activations don't."""

    def prepare(self, rows: Batch, cut: RowCut) -> Batch | None:
        """The rows with their outputs; `None` if these are too large."""
        outputs = outputs_of_parts(self.model, rows, cut)
        return None if outputs is None else (rows, outputs)

    def compute(self, data: Any) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Traces the gradient with respect to the outputs."""
        rows, outputs = data
        real = [output for output in keras.tree.flatten(outputs[0]) if output.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(real)
            loss, divisor = self.loss(rows, mark_outputs(outputs))
        gradients: Any = tape.gradient(loss, real, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return [tf.cast(tf.convert_to_tensor(gradient), "float32") for gradient in gradients], divisor

    def add(self, total: list[np.ndarray], gradient: list[np.ndarray], weight: float, start: int, stop: int) -> None:
        """Writes the weighted gradient of a part's outputs into the part's rows."""
        for sums, part in zip(total, gradient, strict=True):
            sums[start:stop] = weight * part

    def run(self, rows: Any, first: int, *, changed: bool = False) -> list[WeightedGradient]:
        if changed:
            data, (y_pred, masks) = rows
            rows = data, (perturb(y_pred), masks)
        return super().run(rows, first, changed=changed)

    def reordered(self, rows: Batch) -> list[list[np.ndarray]]:
        """The gradient of the outputs, computed in another order."""
        return [[array[::-1] for array in gradient] for gradient in super().reordered(rows)]


def outputs_of_parts(model: keras.Model, rows: Batch, cut: RowCut) -> Structure | None:
    """The outputs for all rows, computed part by part, and their masks; `None` if they take too many bytes.

    They may take as many as the tensors of one part's forward pass. See `mark_outputs`.
    """

    def forward(data: Any) -> tuple[Structure, list[tf.Tensor | None]]:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = call_model(model, x, training=True)
        leaves = keras.tree.flatten(y_pred)
        if any(leaf.shape.rank == 0 or leaf.shape[0] != row_count(x) for leaf in leaves):
            raise Inconclusive("the outputs have no row for each example")
        return y_pred, [mask_of(leaf) for leaf in leaves]

    compute, outputs = PureFunction(model, forward), []
    most_bytes = max(MOST_BYTES, bytes_of(compute.graph(take_rows(rows, *cut.bounds[0]))))
    for bounds in cut.bounds:
        outputs.append(compute(take_rows(rows, *bounds))[0])
        if sum(map(_bytes, outputs)) > most_bytes:
            return None
    return keras.tree.map_structure(lambda *parts: None if parts[0] is None else tf.concat(parts, 0), *outputs)


def mark_outputs(outputs: tuple[Structure, list[tf.Tensor | None]]) -> Structure:
    """Outputs with their masks, as a model returns them."""
    y_pred, masks = outputs
    marked = [with_mask(*arguments) for arguments in zip(keras.tree.flatten(y_pred), masks, strict=True)]
    return keras.tree.pack_sequence_as(y_pred, marked)


def bytes_of(graph: tf.Graph) -> int:
    """The bytes of all tensors of a graph."""
    return sum(_bytes(list(operation.outputs)) for operation in graph.get_operations())


def _bytes(nested: Structure) -> int:
    tensors = [tensor for tensor in keras.tree.flatten(nested) if tensor is not None and tensor.dtype != tf.resource]
    return sum((tensor.shape.num_elements() or 0) * tensor.dtype.size for tensor in tensors)
