"""Slow, obvious references: what one device does with whole batches."""

from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np


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
    for _, window in windows_of_batches:
        whole = [np.concatenate(parts) for parts in zip(*window, strict=True)]
        model.train_on_batch(whole[0], whole[1], sample_weight=whole[2] if len(whole) > 2 else None)
    model.optimizer.finalize_variable_values(model.trainable_weights)
