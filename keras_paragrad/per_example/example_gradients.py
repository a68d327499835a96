"""`ExampleGradients`: statistics of per-example gradient norms during `fit`."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_paragrad.arguments import check_each, check_instance, check_integer, check_number
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.types import Logs
from keras_paragrad.per_example.wrapped_model import find_per_example_layer
from keras_paragrad.per_example.wrapper import PerExampleGradients

# More than TensorBoard displays; far more bins would exhaust memory.
_MOST_BINS = 100_000


class Largest(NamedTuple):
    """An example with a large gradient.

    Attributes:
        place: Its position in the order in which `fit` saw the examples.
        norm: The norm of its gradient.
    """

    place: int
    norm: float


class ExampleGradients(keras.callbacks.Callback):
    """Collects an epoch's per-example gradient norms: quantiles, histogram, clipped fraction and largest examples.

    For a model with a `PerExampleGradients` layer that keeps norms. With `fit(shuffle=False)` an example's place is its
    index in the data; to rank the examples of shuffled data, use `per_example_norms`. At the end of each epoch, `logs`
    gets `example_norm_quantile_50` and so on, `example_nonfinite_count`, and `example_clip_fraction` if the layer
    clips; list callbacks that write logs after this one.

    Args:
        layer: The `PerExampleGradients` layer, or `None` for the model's first.
        quantiles: Which quantiles of the norms to compute, each from 0 to 1.
        bins: Number of bins of `histogram`.
        largest: How many of the examples with the largest norms to report.

    Attributes:
        norms: The gradient norms of the last epoch, `(examples,)`, each measured in the step that used the example.
        nonfinite_count: How many of them are not finite.
        quantiles_of_norms: The quantiles of the finite norms.
        histogram: The finite norms' count per bin, and the bin edges, as from `numpy.histogram`.
        clip_fraction: The fraction of examples whose gradients were clipped, or `None` without clipping or before the
            first epoch.
        largest_norms: The examples with the largest norms, a list of `(place, norm)`, largest first; NaN ranks as
            infinity.

    Raises:
        ValueError: An argument is invalid; or, when `fit` begins, the model has no such layer or runs several steps per
            callback.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import ExampleGradients, wrap
    >>> model = wrap(keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]))
    >>> model.compile("sgd", loss="mse")
    >>> x = np.ones((100, 8)) * np.linspace(0, 1, 100)[:, None]
    >>> examples = ExampleGradients(largest=3)
    >>> history = model.fit(x, x[:, 0] + 1, shuffle=False, verbose=0, callbacks=[examples])
    >>> len(examples.norms), len(examples.largest_norms)
    (100, 3)
    """

    def __init__(
        self,
        layer: PerExampleGradients | None = None,
        *,
        quantiles: Sequence[float] = (0.5, 0.9, 0.99),
        bins: int = 30,
        largest: int = 10,
    ):
        check_internals("models")
        super().__init__()
        example = "model.per_example, of model = keras_paragrad.wrap(model)"
        self.layer = check_instance(
            "layer", layer, PerExampleGradients, "a PerExampleGradients layer", example=example, optional=True
        )
        check_fraction = functools.partial(check_number, least=0, most=1)
        self.quantiles = check_each("quantiles", quantiles, check_fraction, "numbers from 0 to 1", example="(0.5, 0.9)")
        self.bins = check_integer("bins", bins, most=_MOST_BINS, example=30)
        self.largest = check_integer("largest", largest, example=10)
        self._batches: list[np.ndarray] = []
        # The layer of the model that is trained.
        self._wrapper: Any = layer
        self.norms = np.empty(0, "float32")

    @property
    def quantiles_of_norms(self) -> np.ndarray:
        norms = self._finite_norms
        return np.quantile(norms, self.quantiles) if len(norms) else np.full(len(self.quantiles), np.nan)

    @property
    def histogram(self) -> tuple[np.ndarray, np.ndarray]:
        return np.histogram(self._finite_norms, self.bins)

    @property
    def nonfinite_count(self) -> int:
        return len(self.norms) - len(self._finite_norms)

    @property
    def _finite_norms(self) -> np.ndarray:
        return self.norms[np.isfinite(self.norms)]

    @property
    def clip_fraction(self) -> float | None:
        if not len(self.norms) or self._wrapper.clip_norm is None:
            return None
        return float(np.sum(self._finite_norms > self._wrapper.clip_norm) / len(self.norms))

    @property
    def largest_norms(self) -> list[Largest]:
        indices = np.argsort(-np.where(np.isnan(self.norms), np.inf, self.norms), kind="stable")[: self.largest]
        return [Largest(int(index), float(self.norms[index])) for index in indices]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Finds the layer."""
        model = self.model
        self._wrapper = self.layer or find_per_example_layer(model)
        if self._wrapper is None:
            raise ValueError("The model has no PerExampleGradients layer. Write model = keras_paragrad.wrap(model).")
        if "norms" not in self._wrapper.stored:
            raise ValueError(
                "The PerExampleGradients layer keeps no norms. Write PerExampleGradients(quantity='norms')."
            )
        if model.steps_per_execution != 1:
            raise ValueError(
                f"With steps_per_execution={model.steps_per_execution}, a callback sees only the last of these "
                "batches. Compile the model with steps_per_execution=1."
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Starts collecting."""
        self._batches = []

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Collects a batch's norms."""
        self._batches.append(self._wrapper.norms)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Adds the statistics to the logs."""
        self.norms = np.concatenate(self._batches) if self._batches else np.empty(0, "float32")
        if not len(self.norms):
            return
        pairs = zip(self.quantiles, self.quantiles_of_norms, strict=True)
        statistics = {f"example_norm_quantile_{100 * quantile:g}": float(norm) for quantile, norm in pairs}
        if self.clip_fraction is not None:
            statistics["example_clip_fraction"] = self.clip_fraction
        statistics["example_nonfinite_count"] = self.nonfinite_count
        if logs is not None:
            logs.update(statistics)
