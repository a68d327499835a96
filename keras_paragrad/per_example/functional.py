"""`per_example_gradients` and `per_example_norms`: for custom training loops and for inspecting data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import check_flag, check_instance, check_integer, refusal
from keras_paragrad.compat.losses import LossMatching
from keras_paragrad.compat.model import compile_if_supported
from keras_paragrad.compat.types import FitData, Structure
from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.step.building import build_by_calling
from keras_paragrad.engine.tracing.gradient_functions import releasing
from keras_paragrad.engine.trials.trial import take_rows
from keras_paragrad.per_example.capture import Capture
from keras_paragrad.per_example.probing import units_for
from keras_paragrad.per_example.quantities import Quantities
from keras_paragrad.per_example.units import Unit, check_separable_layer, check_separable_loss, example_losses

# A name, a loss, a function of targets and predictions, or one of these for each output, where `None` means no loss.
LossArgument: TypeAlias = (
    str | keras.losses.Loss | Callable[[Any, Any], Any] | Sequence["LossArgument | None"] | Mapping[str, Any]
)

# Intermediate per-example tensors are as large as the result, so this bounds the memory.
_BATCH_SIZE = 256
_PROVED = 8

# Computes tensors `(batch, ...)` from the quantities of one backward pass.
Quantity = Callable[[Quantities], list[tf.Tensor]]


def _compute_in_batches(
    quantity: Quantity,
    model: keras.Model,
    x: FitData,
    y: FitData,
    loss: LossArgument,
    sample_weight: FitData,
    batch_size: int | None,
    training: bool,
    jit_compile: bool,
) -> list[Any]:
    """A quantity for all rows; see `per_example_gradients`.

    `quantity` computes tensors `(batch, ...)`. Each becomes an array `(N, ...)`, or within a `tf.function` a tensor.
    """
    check_instance("model", model, keras.Model, "a Keras model")
    batch_size = check_integer("batch_size", batch_size, example=256, optional=True)
    training = check_flag("training", training)
    jit_compile = check_flag("jit_compile", jit_compile)
    if tf.executing_eagerly():
        x = _check_rows("x", x)
        build_by_calling(model, x)
    if not model.trainable_variables:
        raise ValueError(
            f"{model.name!r} has no trainable weights: set trainable=True on its layers. Within a tf.function, build "
            "it first."
        )
    _check_loss(loss)
    compute = _compile(quantity, model, loss, training, compile_if_supported(model, jit_compile))
    if not tf.executing_eagerly():
        return compute(x, y, sample_weight)
    data = (
        x,
        _check_rows("y", y, optional=keras.tree.is_nested(y)),
        _check_rows("sample_weight", sample_weight, optional=True),
    )
    counts = {len(rows) for rows in keras.tree.flatten(data) if rows is not None}
    if len(counts) != 1:
        raise ValueError(f"x, y and sample_weight must have the same number of rows, and have {sorted(counts)}.")
    (count,) = counts
    # With values, so that the units are proved on real rows.
    _checked_units(model, keras.tree.map_structure(tf.constant, take_rows(x, 0, _PROVED)), training)
    results: list[np.ndarray] = []
    for rows, batch in _batches(data, count, min(batch_size or _BATCH_SIZE, count)):
        parts = [part.numpy() for part in compute(*batch)]
        results = results or [np.empty((count, *part.shape[1:]), part.dtype) for part in parts]
        for result, part in zip(results, parts, strict=True):
            result[rows] = part[: rows.stop - rows.start]
    return results


def _batches(data: Sequence[Structure], count: int, size: int) -> Iterator[tuple[slice, Sequence[Structure]]]:
    """Yields a slice and its rows; the last batch is padded with the last row, so that all have the same size."""
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        indices = np.minimum(np.arange(start, start + size), count - 1)
        yield rows, keras.tree.map_structure(lambda leaf, i=indices: None if leaf is None else leaf[i], data)


def _compile(
    quantity: Quantity, model: keras.Model, loss: LossArgument, training: bool, jit_compile: bool
) -> Callable[..., list[tf.Tensor]]:
    """A compiled function from `(x, y, sample_weight)` to a quantity of a batch.

    Traced anew for each call: a trace depends on all that Python can change in a model and a loss.
    """

    @tf.function(jit_compile=jit_compile, autograph=False)
    @releasing
    def compute(x: Structure, y: Structure, sample_weight: Structure):
        anchor = tf.zeros([])
        units = _checked_units(model, x, training)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(anchor)
            capture = Capture(model, units, anchor, True)
            y_pred = capture(x, training=training)
            matching = LossMatching(loss, getattr(model, "output_names", None))
            # A match begins with the path of its output.
            terms = [LossTerm(*match[1:]) for match in matching.match(y, y_pred, sample_weight)]
            for term in terms:
                check_separable_loss(term, model.trainable_variables)
            total = tf.add_n([tf.reduce_sum(example_losses(term)) for term in terms])
        # The backward pass records the cotangents; the anchor's own gradient is 0.
        tape.gradient(total, anchor)
        return quantity(Quantities(capture.recorded, model.trainable_variables))

    return compute


def _checked_units(model: keras.Model, x: Structure, training: bool) -> list[Unit]:
    """The units of a model that doesn't mix examples, found once for rows of these shapes."""
    check_separable_layer(model, x, training=training)
    return units_for(model, (x,), {"training": training})


def _check_loss(loss: object) -> None:
    """Refuses an argument that Keras doesn't accept as a loss."""
    nested = keras.tree.is_nested(loss)
    for item in keras.tree.flatten(loss) or [None]:
        # By these names, Keras picks a crossentropy by the shapes of targets and predictions.
        if (item is None and nested) or (isinstance(item, str) and item.lower() in ("crossentropy", "ce")):
            continue
        try:
            valid = callable(keras.losses.get(item))
        except Exception:  # whatever Keras raises for an invalid loss
            valid = False
        if not valid:
            raise refusal("loss", item, "a Keras loss, its name, or a function of targets and predictions", "'mse'")


def _check_rows(name: str, nested: FitData, *, optional: bool = False) -> Any:
    """Converts every leaf of an argument, which may be `None` if `optional`, to an array of at least one row."""

    def check(leaf: object) -> np.ndarray | None:
        if leaf is None and optional:
            return None
        try:
            rows = keras.ops.convert_to_numpy(leaf)
        except Exception:  # the backend's error for a value that is not an array
            rows = np.empty(0)
        if not rows.ndim or not len(rows) or rows.dtype.kind in "OUST":
            expected = "arrays of numbers of shape (rows, ...), nested as the model takes them"
            raise refusal(name, leaf, f"{expected}; encode text, as in np.unique(text, return_inverse=True)[1]")
        return rows

    return keras.tree.map_structure(check, nested)


def per_example_gradients(
    model: keras.Model,
    x: FitData,
    y: FitData,
    loss: LossArgument,
    sample_weight: FitData = None,
    batch_size: int | None = None,
    *,
    training: bool = False,
    jit_compile: bool = False,
) -> list[np.ndarray]:
    """The exact gradient of each example's own loss, in one forward and backward pass per `batch_size` rows.

    Each call traces the model anew, as it is then. For many calls, call it within a `tf.function`.

    Args:
        model: A model. If it is not built yet, it is built from `x`, except within a `tf.function`.
        x: Inputs, arrays or tensors `(N, ...)`, nested as the model takes them.
        y: Targets, `(N, ...)`, for several outputs nested as `fit` takes them: as the outputs are, or by their names.
        loss: A Keras loss, its name, or a function of targets and predictions that returns a value per example; nested
            as `compile` takes them for several outputs, whose losses are summed. An example's own loss is its loss
            in a batch of one.
        sample_weight: Multiplies each example's loss, `(N,)`; for several outputs also nested as `y`.
        batch_size: Rows per pass; 256 by default.
        training: Whether to call the model in training mode, with dropout.
        jit_compile: Whether to compile with XLA.

    Returns:
        A list of float32 arrays `(N, *shape)`, one for each of the model's `trainable_variables`, in their order.
        Within a `tf.function`, tensors, computed for all rows at once.

    Raises:
        ValueError: The loss or a layer mixes examples, or the rows don't match.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import per_example_gradients
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> kernel, bias = per_example_gradients(model, np.ones((100, 8)), np.ones((100, 1)), "mse")
    >>> kernel.shape, bias.shape
    ((100, 8, 1), (100, 1))
    """

    def gradients(quantities: Quantities) -> list[tf.Tensor]:
        return [tf.cast(gradient, "float32") for gradient in quantities.gradients()]

    return _compute_in_batches(gradients, model, x, y, loss, sample_weight, batch_size, training, jit_compile)


def per_example_norms(
    model: keras.Model,
    x: FitData,
    y: FitData,
    loss: LossArgument,
    sample_weight: FitData = None,
    batch_size: int | None = None,
    *,
    training: bool = False,
    jit_compile: bool = False,
) -> np.ndarray:
    """The global norm of the gradient of each example's own loss, mostly without materializing the gradients.

    Args:
        model: See `per_example_gradients`, also for the other arguments.
        x: Inputs.
        y: Targets.
        loss: Loss.
        sample_weight: Multiplies each example's loss, `(N,)`.
        batch_size: Rows per pass; 256 by default.
        training: Whether to call the model in training mode.
        jit_compile: Whether to compile with XLA.

    Returns:
        A float32 array `(N,)`; within a `tf.function`, a tensor.

    Raises:
        ValueError: The loss or a layer mixes examples, or the rows don't match.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import per_example_norms
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> per_example_norms(model, np.ones((100, 8)), np.ones((100, 1)), "mse").shape
    (100,)
    """

    def norms(quantities: Quantities) -> list[tf.Tensor]:
        return [tf.sqrt(quantities.squared_norms())]

    return _compute_in_batches(norms, model, x, y, loss, sample_weight, batch_size, training, jit_compile)[0]
