"""Models that evaluate, or train, in steps of their own, as Keras's guides write them."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from oracles.histories import MicroBatches

ROWS = 15


def _loss(y: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y - y_pred))


class Guide(keras.Model):
    """As keras.io/guides/custom_train_step_in_tensorflow: a loss that Keras computes, in trackers of its own."""

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            elif metric.name == "compile_metrics":
                metric.update_state(y, y_pred)
        return {**self.get_metrics_result(), "batch_loss": loss, "twice": 2 * self.metrics[0].result()}


class Loss(keras.Model):
    """A loss of the model's own, in a tracker that `metrics` names and in another, and as it is."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.tracker, self.hidden = keras.metrics.Mean(name="own"), keras.metrics.MeanSquaredError(name="hidden")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker]

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        y_pred = self(x, training=False)
        self.tracker.update_state(_loss(y, y_pred))
        self.hidden.update_state(y, y_pred)
        return {"own": self.tracker.result(), "loss": _loss(y, y_pred), "hidden": self.hidden.result()}


class Tracking(keras.Model):
    """A loss of the model's own, which gives a tracker one number for each batch."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.tracker = keras.metrics.Mean(name="own")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = _loss(y, y_pred)
        self.tracker.update_state(loss)
        return loss

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        loss = self.compute_loss(y=y, y_pred=self(x, training=False))
        return {"own": self.tracker.result(), "loss": loss}


class Counted(keras.Model):
    """Numbers of a whole batch, in trackers that count them by weights of the model's own."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        names = ("sum", "mean", "weighted", "compiled")
        self.totals = {name: keras.metrics.Sum(name=f"total_{name}") for name in ("sum", "compiled")}
        self.trackers = {name: keras.metrics.Mean(name=f"own_{name}") for name in names}
        self.once = {name: keras.metrics.Mean(name=f"once_{name}") for name in ("sum", "compiled")}

    @property
    def metrics(self) -> list[Any]:
        return [*self.trackers.values(), *self.totals.values(), *self.once.values()]

    def counted(self, y: Any, y_pred: Any, sample_weight: Any) -> dict[str, tuple[Any, Any]]:
        rows, losses = keras.ops.shape(y)[0], keras.ops.sum(keras.ops.square(y - y_pred), -1)
        weights = keras.ops.sum(sample_weight)
        return {
            "sum": (keras.ops.sum(losses), rows),
            "mean": (keras.ops.mean(losses), rows),
            "weighted": (keras.ops.sum(losses * sample_weight) / weights, weights),
            "compiled": (self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight), rows),
        }

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, sample_weight = data
        counted = self.counted(y, self(x, training=False), sample_weight)
        for name, (value, weight) in counted.items():
            self.trackers[name].update_state(value, sample_weight=weight)
            for metrics in (self.totals, self.once):
                if name in metrics:
                    metrics[name].update_state(value)
        shown = {metric.name: metric.result() for metric in self.metrics}
        return {**shown, **{f"last_{name}": counted[name][0] for name in self.once if name in counted}}


class CountedOnce(Counted):
    """The mean of a batch, whose rows don't count."""

    def counted(self, y: Any, y_pred: Any, sample_weight: Any) -> dict[str, tuple[Any, Any]]:
        return {"mean": (_loss(y, y_pred), 1.0)}


class Numbers(keras.Model):
    """Trains, and gives numbers of a whole batch to metrics: sums over its rows, and means; some are returned."""

    summed = False

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.sums = {name: keras.metrics.Sum(name=f"sum_of_{name}") for name in ("sums", "means", "rows", "batches")}
        self.means = {name: keras.metrics.Mean(name=f"mean_of_{name}") for name in ("sums", "means")}
        self.counted = {name: keras.metrics.Mean(name=f"counted_{name}") for name in ("sums", "means")}

    @property
    def metrics(self) -> list[Any]:
        return [*self.sums.values(), *self.means.values(), *self.counted.values()]

    def numbers(self, rows: Any, losses: Any) -> dict[str, Any]:
        return {"sums": keras.ops.sum(losses), "means": keras.ops.mean(losses), "rows": rows, "batches": 1}

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            losses = keras.ops.sum(keras.ops.square(y - self(x, training=True)), -1)
            loss = keras.ops.sum(losses) if self.summed else keras.ops.mean(losses)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        rows = keras.ops.shape(x)[0]
        numbers = self.numbers(rows, losses)
        for name, number in numbers.items():
            self.sums[name].update_state(number)
            if name in self.means:
                self.means[name].update_state(number)
                self.counted[name].update_state(number, sample_weight=rows)
        returned = {f"last_{name}": numbers[name] for name in self.means if name in numbers}
        return {**{metric.name: metric.result() for metric in self.metrics}, **returned}


class SummedNumbers(Numbers):
    """With a loss that is a sum."""

    summed = True


class Largest(Numbers):
    """A number that no parts give."""

    def numbers(self, rows: Any, losses: Any) -> dict[str, Any]:
        return {"sums": keras.ops.max(losses)}


class Examples(keras.Model):
    """Metrics that are given every example, and losses that are not compiled."""

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self.total, self.mean = keras.metrics.Sum(name="total"), keras.metrics.Mean(name="mean")

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        y_pred = self(x, training=False)
        self.total.update_state(keras.ops.abs(y - y_pred))
        self.mean.update_state(keras.ops.max(keras.ops.abs(y - y_pred), axis=-1))
        return {"total": self.total.result(), "mean": self.mean.result()}


class Perplexity(keras.Model):
    """Shows what it computes of a metric, by `compute_metrics` alone."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**found, "perplexity": keras.ops.exp(found["mae"])}


class PerplexityOfParts(Perplexity):
    """By `get_metrics_result` too, as parts of a batch need it."""

    def get_metrics_result(self) -> dict[str, Any]:
        found = super().get_metrics_result()
        return {**found, "perplexity": keras.ops.exp(found["mae"])}


class WithoutError(keras.Model):
    """Leaves a metric out that isn't updated in training."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        del found["mae"]
        return found


# Of a step, what is compiled.
CASES = {
    "Guide": (Guide, {}),
    "Guide, weighted": (Guide, {"loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")}),
    "Guide, sum": (Guide, {"loss": keras.losses.MeanSquaredError(reduction="sum")}),
    "Loss": (Loss, {}),
    "Tracking": (Tracking, {"metrics": None}),
    "Counted": (Counted, {"metrics": None}),
    "Counted, sum": (Counted, {"metrics": None, "loss": keras.losses.MeanSquaredError(reduction="sum")}),
    "Counted, weighted": (
        Counted,
        {"metrics": None, "loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")},
    ),
    "CountedOnce": (CountedOnce, {"metrics": None}),
    "Examples": (Examples, {"metrics": None}),
    "PerplexityOfParts": (PerplexityOfParts, {}),
    "WithoutError": (WithoutError, {}),
}


def evaluated(case: str, make: Callable[[], Any] | None, **mode: Any) -> dict[str, float]:
    """What `evaluate` shows of a case, in the fit that `make` makes or, if that is `None`, on one device."""
    made, compiled = CASES[case]
    ours = make() if make else None
    with ours.scope() if ours else contextlib.nullcontext():
        found = model(made, **compiled, **mode)
    # The last batch leaves a replica without rows.
    batches = MicroBatches((*data(), np.linspace(0.1, 3, ROWS, dtype="float32")), (7, 7, 1))
    if ours:
        ours.prepare(found)
    shown = found.evaluate(ours.dataset(batches) if ours else batches, verbose=0, return_dict=True)
    return {name: float(value) for name, value in shown.items()}


def data() -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(0)
    return tuple(draw.normal(size=(ROWS, width)).astype("float32") for width in (4, 2))


def model(made: Callable[..., keras.Model], loss: Any = "mse", **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    found = made(inputs, keras.layers.Dense(2)(inputs))
    found.compile(keras.optimizers.SGD(0.05), loss, **{"metrics": ["mae"], "jit_compile": False, **options})
    return found
