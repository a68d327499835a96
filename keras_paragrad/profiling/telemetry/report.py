"""The reports of telemetry."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

QUANTITIES = ("gradient_norm", "clipped_gradient_norm", "weight_norm", "update_ratio", "nonfinite")
HEADER = ("step", "learning_rate", "loss_scale")


class Weight(NamedTuple):
    """One of the model's weights.

    Attributes:
        layer: The path of its layer.
        name: Its name within the layer.
    """

    layer: str
    name: str


class Norms(NamedTuple):
    """Figures of some weights: arrays with an axis of reports, and one of weights unless all are taken together.

    Attributes:
        gradient_norm: The norm of the gradient before it was clipped.
        clipped_gradient_norm: The norm of the gradient after it was clipped.
        weight_norm: The norm of the weights before the update.
        update_ratio: The norm of the weights' change, divided by that of the weights; NaN for weights of zeros.
        nonfinite: How many values of the gradient are infinite or NaN.
    """

    gradient_norm: np.ndarray
    clipped_gradient_norm: np.ndarray
    weight_norm: np.ndarray
    update_ratio: np.ndarray
    nonfinite: np.ndarray

    @classmethod
    def of(cls, squares: np.ndarray) -> "Norms":
        """From sums of squares and counts: gradient, clipped, weights, change, non-finite, along the first axis."""
        gradient, clipped, weights, change = np.sqrt(squares[:4])
        ratio = np.divide(change, weights, out=np.full_like(weights, np.nan), where=weights != 0)
        return cls(gradient, clipped, weights, ratio, squares[4])


class Reports(NamedTuple):
    """Some updates of the weights.

    Attributes:
        steps: Which of the optimizer's updates they were, counted from 1, shape `(reports,)`.
        epochs: In which epochs, counted from 0, shape `(reports,)`.
        learning_rate: The learning rate of the update, shape `(reports,)`.
        loss_scale: The loss scale, 1 without one, shape `(reports,)`.
        weights: Figures of each weight, in the model's order, shape `(reports, weights)`.
        layers: Figures of each layer, in the order in which they first have a weight, shape `(reports, layers)`.
        model: Figures of the whole model, shape `(reports,)`.
    """

    steps: np.ndarray
    epochs: np.ndarray
    learning_rate: np.ndarray
    loss_scale: np.ndarray
    weights: Norms
    layers: Norms
    model: Norms


class Reader:
    """Parses the vectors that the compiled step writes into reports.

    Args:
        weights: The model's trainable weights.

    Example:

    >>> import numpy as np
    >>> from keras_paragrad.profiling.telemetry.report import Reader, Weight
    >>> reader = Reader([Weight("dense", "kernel"), Weight("dense", "bias")])
    >>> squares = [[9.0, 16.0], [9.0, 16.0], [4.0, 0.0], [0.04, 0.01], [0.0, 0.0]]
    >>> reports = reader.read(np.array([[7, 0.1, 1.0, *np.ravel(squares)]]), [0])
    >>> reports.steps, reports.weights.gradient_norm, reports.layers.gradient_norm
    (array([7]), array([[3., 4.]]), array([[5.]]))
    """

    def __init__(self, weights: Sequence[Weight]):
        self.weights = tuple(weights)
        self.layers = tuple(dict.fromkeys(weight.layer for weight in weights))
        belongs = [[weight.layer == layer for layer in self.layers] for weight in weights]
        self._in_order = sorted(range(len(weights)), key=lambda place: self.layers.index(weights[place].layer))
        sizes = [sum(column) for column in zip(*belongs, strict=True)]
        self._starts = np.cumsum([0, *sizes[:-1]])

    def read(self, vectors: np.ndarray, epochs: Sequence[int]) -> Reports:
        """The reports that vectors hold.

        Args:
            vectors: Update, learning rate, loss scale, and five figures of each weight, shape `(reports, size)`.
            epochs: The epoch of each.
        """
        steps, learning_rate, loss_scale = vectors[:, : len(HEADER)].T
        figures = vectors[:, len(HEADER) :].reshape(len(vectors), len(QUANTITIES), -1).swapaxes(0, 1)
        by_layer = np.add.reduceat(figures[..., self._in_order], self._starts, axis=-1)
        norms = Norms.of(figures), Norms.of(by_layer), Norms.of(figures.sum(-1))
        return Reports(steps.astype(int), np.array(epochs, int), learning_rate, loss_scale, *norms)
