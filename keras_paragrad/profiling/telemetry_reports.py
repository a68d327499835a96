"""The reports of `GradientTelemetry`, and its warnings about unhealthy gradients."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

QUANTITIES = ("gradient_norm", "clipped_gradient_norm", "weight_norm", "update_ratio", "nonfinite")
HEADER = ("step", "learning_rate", "loss_scale")
_WARNINGS = {
    "non-finite": "the gradient is infinite or NaN in {layers} at update {step}. Look for NaN in the data first: "
    "np.isfinite(x).all(), and y. If there is none, lower the learning rate, clip with clipnorm=1.0, or look there for "
    "a division by 0 or a logarithm of 0.",
    "exploding": "the gradient explodes in {layers} at update {step}: its norm is more than {exploding:g} times "
    "the median of the layers, or its own earlier mean. Lower the learning rate, clip with clipnorm=1.0, or "
    "initialize smaller weights.",
    "vanishing": "the gradient vanishes in {layers} at update {step}: its norm is less than {vanishing:g} times "
    "the largest. Add residual connections or normalization there, or use an activation that doesn't saturate.",
    "dead": "the gradient is 0 in {layers} at update {step}: nothing is learned there. Look for a ReLU whose "
    "input is negative for all examples, or for an output that the loss doesn't depend on.",
}


class Weight(NamedTuple):
    """One of the model's weights."""

    layer: str
    name: str


class Norms(NamedTuple):
    """L2 norms and counts, of shape `(reports, weights)`, `(reports, layers)`, or `(reports,)` for the whole model.

    Attributes:
        gradient_norm: Of the gradient before clipping.
        clipped_gradient_norm: Of the gradient after clipping.
        weight_norm: Of the weights before the update.
        update_ratio: Of the weights' change, over `weight_norm`; NaN for weights of zeros.
        nonfinite: Number of values of the gradient that are infinite or NaN.
    """

    gradient_norm: np.ndarray
    clipped_gradient_norm: np.ndarray
    weight_norm: np.ndarray
    update_ratio: np.ndarray
    nonfinite: np.ndarray

    @classmethod
    def of(cls, squares: np.ndarray) -> "Norms":
        """Norms from sums of squares of gradient, clipped gradient, weights and change, and from non-finite counts.

        These five are the first axis of `squares`.
        """
        gradient, clipped, weights, change = np.sqrt(squares[:4])
        ratio = np.divide(change, weights, out=np.full_like(weights, np.nan), where=weights != 0)
        return cls(gradient, clipped, weights, ratio, squares[4])


class Reports(NamedTuple):
    """Reported updates; arrays have the shape `(reports,)`.

    Attributes:
        steps: The numbers of the optimizer's updates, from 1.
        epochs: Their epochs, from 0.
        learning_rate: Their learning rates.
        loss_scale: Their loss scales, 1 without one.
        weights: Norms of each weight, in the model's order.
        layers: Norms of each layer, in the order of their first weights.
        model: Norms of the whole model.
    """

    steps: np.ndarray
    epochs: np.ndarray
    learning_rate: np.ndarray
    loss_scale: np.ndarray
    weights: Norms
    layers: Norms
    model: Norms


class ReportReader:
    """Parses the vectors that the compiled step writes: `HEADER`, then for each of `QUANTITIES` a figure per weight.

    Figures are as `Norms.of` takes them.
    """

    def __init__(self, weights: Sequence[Weight]):
        self.weights = tuple(weights)
        self.layers = tuple(dict.fromkeys(weight.layer for weight in weights))
        # Weights layer by layer, and where each layer begins, for `np.add.reduceat`.
        layers = np.array([self.layers.index(weight.layer) for weight in weights], int)
        self._in_order = np.argsort(layers, kind="stable")
        self._starts = np.searchsorted(np.sort(layers), range(len(self.layers)))

    def read(self, vectors: np.ndarray, epochs: Sequence[int]) -> Reports:
        """Parses the vectors of reports, of shape `(reports, size)`, with the epoch of each."""
        steps, learning_rate, loss_scale = vectors[:, : len(HEADER)].T
        figures = vectors[:, len(HEADER) :].reshape(len(vectors), len(QUANTITIES), -1).swapaxes(0, 1)
        by_layer = np.add.reduceat(figures[..., self._in_order], self._starts, axis=-1)
        norms = Norms.of(figures), Norms.of(by_layer), Norms.of(figures.sum(-1))
        return Reports(steps.astype(int), np.array(epochs, int), learning_rate, loss_scale, *norms)


class Alarms:
    """Warns once per layer and kind of problem with its gradient.

    - Non-finite: it has an infinity or NaN.
    - Exploding: its norm is more than `exploding` times the median of all layers, or the geometric mean of its own
      norms before.
    - Vanishing: its norm is less than `vanishing` times the largest of the other layers.
    - Dead: it is zero, while another layer's is not.

    Vanishing and dead require `patience` consecutive reports.
    """

    def __init__(
        self, layers: Sequence[str], vanishing: float = 1e-6, exploding: float = 1e3, patience: int = 3
    ) -> None:
        self.layers, self.vanishing, self.exploding, self.patience = layers, vanishing, exploding, patience
        count = len(layers)
        self._warned = {kind: np.zeros(count, bool) for kind in _WARNINGS}
        self._consecutive = {kind: np.zeros(count, int) for kind in ("vanishing", "dead")}
        # For the geometric means of earlier norms.
        self._log_sums, self._counts = np.zeros(count), np.zeros(count)

    def check(self, steps: np.ndarray, norms: np.ndarray, nonfinite: np.ndarray) -> Iterator[str]:
        """Updates the statistics, and yields new warnings in the order of the reports."""
        for step, norm, count in zip(steps, norms, nonfinite, strict=True):
            finite = np.isfinite(norm)
            alive = finite & (norm > 0)
            means = np.exp(self._log_sums / np.maximum(self._counts, 1))
            # The lower one; finite values have an infinite norm if their squares overflow.
            median = np.percentile(norm[alive], 50, method="lower") if alive.any() else np.inf
            explodes = ~finite | (self._counts > 0) & (norm > self.exploding * means)
            problems = {
                "non-finite": count > 0,
                "exploding": (explodes | alive & (norm > self.exploding * median)) & (count == 0),
                "vanishing": self._lasts("vanishing", alive & (norm < self.vanishing * norm[alive].max(initial=0))),
                "dead": self._lasts("dead", (norm == 0) & alive.any()),
            }
            self._log_sums[alive] += np.log(norm[alive])
            self._counts[alive] += 1
            for kind, layers in problems.items():
                new = layers & ~self._warned[kind]
                if new.any():
                    self._warned[kind] |= new
                    names = ", ".join(repr(layer) for layer, is_new in zip(self.layers, new, strict=True) if is_new)
                    figures = {"step": int(step), "exploding": self.exploding, "vanishing": self.vanishing}
                    yield _WARNINGS[kind].format(layers=names, **figures)

    def _lasts(self, kind: str, now: np.ndarray) -> np.ndarray:
        """Counts the reports in a row in which layers have a problem; returns which have had it for long enough."""
        self._consecutive[kind] = np.where(now, self._consecutive[kind] + 1, 0)
        return self._consecutive[kind] >= self.patience
