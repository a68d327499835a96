"""Slow, obvious references: what one device does with whole batches."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def largest_difference(left: keras.Model, right: keras.Model) -> float:
    """The largest difference between two models' weights, as a share of the largest weight (at least 1)."""
    ours, theirs = left.get_weights(), right.get_weights()
    scale = max(1.0, *(float(np.abs(weight).max()) for weight in ours))
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True)) / scale


def windows(
    batches: Sequence, steps: Callable[[int], int], epochs: int, tail: str = "flush"
) -> Iterator[tuple[int, list]]:
    """The micro-batches that make each update, epoch by epoch.

    Args:
        batches: The micro-batches of an epoch.
        steps: From the number of updates made so far to the micro-batches that the next one takes.
        epochs: How often the batches are gone through.
        tail: What becomes of an epoch's last window if it isn't full; the last one of all is flushed unless dropped.

    Yields:
        The number of the update, and its micro-batches.
    """
    update, window = 0, []
    for _ in range(epochs):
        for batch in batches:
            window.append(batch)
            if len(window) >= steps(update):
                yield update, window
                update, window = update + 1, []
        if window and tail == "flush":
            yield update, window
            update, window = update + 1, []
        if tail == "drop":
            window = []


def train_on_whole_windows(model: keras.Model, windows_of_batches: Iterator[tuple[int, list]]) -> None:
    """Takes one plain Keras step on each window's examples, put together into one batch."""
    # Tracing takes longer than a few small steps.
    model.run_eagerly = True
    for _, window in windows_of_batches:
        whole = [np.concatenate(parts) for parts in zip(*window, strict=True)]
        model.train_on_batch(whole[0], whole[1], sample_weight=whole[2] if len(whole) > 2 else None)
    model.optimizer.finalize_variable_values(model.trainable_weights)


def example_gradients(
    model: keras.Model, x: Any, loss: Callable[[Any, Any], Any], *data: np.ndarray
) -> list[np.ndarray]:
    """Each example's gradient, from a forward and backward pass of its own.

    Args:
        model: The model.
        x: Its inputs.
        loss: From an example's data and what the model says of it, as batches of one, to its loss.
        *data: What else there is of each example, such as targets and weights.

    Returns:
        An array `(examples, *shape)` for each trainable variable.
    """
    variables = [variable.value for variable in model.trainable_variables]

    def gradients_of_one(x, *data):
        with tf.GradientTape() as tape:
            value = loss(model(x), *data)
        gradients = tape.gradient(value, variables, unconnected_gradients="zero")
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    rows = len(keras.tree.flatten(x)[0])
    # Tracing takes longer than a few small passes.
    run = tf.function(gradients_of_one, autograph=False) if rows > 30 else gradients_of_one
    found = []
    for row in range(rows):
        one = keras.tree.map_structure(lambda each, row=row: tf.constant(each[row : row + 1]), (x, *data))
        found.append([gradient.numpy().astype("float32") for gradient in run(*one)])
    return [np.stack(parts) for parts in zip(*found, strict=True)]


def norms_of(gradients: list[np.ndarray]) -> np.ndarray:
    """The norm of each example's gradient over all weights."""
    return np.sqrt(sum(np.square(gradient.reshape(len(gradient), -1)).sum(1) for gradient in gradients))


def gradient_error(ours: Sequence, theirs: Sequence[np.ndarray], scale: float | None = None) -> float:
    """The largest difference, as a share of the largest norm of an example's gradient."""
    scale = float(norms_of(list(theirs)).max()) if scale is None else scale
    return max(float(np.abs(np.asarray(a) - b).max()) for a, b in zip(ours, theirs, strict=True)) / (scale or 1.0)
