"""Warnings about unhealthy gradients, once per layer and kind."""

from collections.abc import Iterator, Sequence

import numpy as np

_SAYS = {
    "non-finite": "the gradient is infinite or NaN in {layers} at update {step}. Lower the learning rate, clip with "
    "clipnorm=1.0, or look there for a division by 0 or a logarithm of 0.",
    "exploding": "the gradient explodes in {layers} at update {step}: its norm is more than {exploding:g} times "
    "the median of the layers, or its own earlier mean. Lower the learning rate, clip with clipnorm=1.0, or "
    "initialize smaller weights.",
    "vanishing": "the gradient vanishes in {layers} at update {step}: its norm is less than {vanishing:g} times "
    "the largest. Add residual connections or normalization there, or use an activation that doesn't saturate.",
    "dead": "the gradient is 0 in {layers} at update {step}: nothing is learned there. Look for a ReLU whose "
    "input is negative for all examples, or for an output that the loss doesn't depend on.",
}


class Alarms:
    """Warns once per layer and kind of problem with its gradient.

    - Non-finite: it has an infinity or NaN.
    - Exploding: its norm is more than `exploding` times the median of all layers, or the geometric mean of its own
      norms before.
    - Vanishing: its norm is less than `vanishing` times the largest of the other layers.
    - Dead: it is zero, while that of another layer is not.

    Vanishing and dead require `patience` consecutive reports.

    Args:
        layers: The layers' names.
        vanishing: A share of the largest norm.
        exploding: A multiple of the median norm.
        patience: A number of reports.

    Example:

    >>> from keras_paragrad.profiling.telemetry.alarms import Alarms
    >>> alarms = Alarms(["first", "second"], patience=2)
    >>> import numpy as np
    >>> norms, counts = np.array([[0.0, 1.0]]), np.zeros((1, 2))
    >>> list(alarms.check(np.array([10]), norms, counts)), len(list(alarms.check(np.array([20]), norms, counts)))
    ([], 1)
    """

    def __init__(
        self, layers: Sequence[str], vanishing: float = 1e-6, exploding: float = 1e3, patience: int = 3
    ) -> None:
        self.layers, self.vanishing, self.exploding, self.patience = layers, vanishing, exploding, patience
        count = len(layers)
        self._said = {kind: np.zeros(count, bool) for kind in _SAYS}
        self._in_a_row = {kind: np.zeros(count, int) for kind in ("vanishing", "dead")}
        # Sum and count of the logarithms of earlier norms.
        self._logarithms, self._norms = np.zeros(count), np.zeros(count)

    def check(self, steps: np.ndarray, norms: np.ndarray, nonfinite: np.ndarray) -> Iterator[str]:
        """Yields the warnings for reports, in order.

        Args:
            steps: The reports' steps, shape `(reports,)`.
            norms: Each layer's gradient norm before clipping, shape `(reports, layers)`.
            nonfinite: How many values of each layer's gradient are not finite, shape `(reports, layers)`.
        """
        if not nonfinite.any() and self._all_well(norms):
            self._remember(norms)
            return
        for step, norm, count in zip(steps, norms, nonfinite, strict=True):
            yield from self._check(int(step), norm, count)

    def _all_well(self, norms: np.ndarray) -> bool:
        """Whether all reports are certainly healthy, in one vectorized check."""
        least, most = norms.min(initial=np.inf), norms.max(initial=0)
        known = self._norms > 0
        before = np.exp(np.divide(self._logarithms, self._norms, out=np.zeros_like(self._norms), where=known))
        lowest = min(least, before[known].min(initial=np.inf))
        # Means and medians are at least the minimum, so a norm within the bound of the minimum is within theirs.
        return bool(least > 0 and self.vanishing * most <= least and most <= self.exploding * lowest)

    def _remember(self, norms: np.ndarray) -> None:
        self._logarithms += np.log(norms).sum(0)
        self._norms += len(norms)
        for count in self._in_a_row.values():
            count[:] = 0

    def _check(self, step: int, norms: np.ndarray, nonfinite: np.ndarray) -> Iterator[str]:
        finite = np.isfinite(norms)
        alive = finite & (norms > 0)
        found = {
            "non-finite": nonfinite > 0,
            "exploding": self._explodes(norms, finite, alive) & (nonfinite == 0),
            "vanishing": self._lasts("vanishing", alive & (norms < self.vanishing * norms[alive].max(initial=0))),
            "dead": self._lasts("dead", (norms == 0) & alive.any()),
        }
        self._logarithms[alive] += np.log(norms[alive])
        self._norms[alive] += 1
        for kind, layers in found.items():
            new = layers & ~self._said[kind]
            if new.any():
                self._said[kind] |= new
                names = ", ".join(repr(layer) for layer, said in zip(self.layers, new, strict=True) if said)
                yield _SAYS[kind].format(layers=names, step=step, exploding=self.exploding, vanishing=self.vanishing)

    def _explodes(self, norms: np.ndarray, finite: np.ndarray, alive: np.ndarray) -> np.ndarray:
        before = np.exp(self._logarithms / np.maximum(self._norms, 1))
        rises = (self._norms > 0) & (norms > self.exploding * before)
        # Overflowing squares give finite values an infinite norm.
        return rises | ~finite | (alive & (norms > self.exploding * _lower_median(norms[alive])))

    def _lasts(self, kind: str, now: np.ndarray) -> np.ndarray:
        self._in_a_row[kind] = np.where(now, self._in_a_row[kind] + 1, 0)
        return self._in_a_row[kind] >= self.patience


def _lower_median(values: np.ndarray) -> float:
    """The lower median; infinity for an empty array."""
    return np.sort(values)[(len(values) - 1) // 2] if len(values) else np.inf
