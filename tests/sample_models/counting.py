"""A model that counts whatever is done with it, in each way that there is."""

import collections
import copy
import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

# Where nothing that is put back reaches: so a test knows that a probe called what it would call.
CALLED: collections.Counter[str] = collections.Counter()


class Notes:
    """What a user's own class keeps."""

    def __init__(self) -> None:
        self.number, self.rows = 0, []


class Counts:
    """Counts in Python attributes: numbers, containers, an array and an object."""

    def begin(self) -> None:
        self.calls, self.rows, self.by_name, self.latest = 0, [], {"calls": 0}, collections.deque(maxlen=3)
        self.array, self.notes = np.zeros(2), Notes()

    def note(self, what: str) -> None:
        CALLED[what] += 1
        self.calls += 1
        self.by_name["calls"] += 1
        self.array += 1
        self.notes.number += 1
        for each in (self.rows, self.latest, self.notes.rows):
            each.append(random.random() + np.random.random())

    @property
    def counted(self) -> list[Any]:
        return [
            *(self.calls, self.by_name["calls"], self.array.tolist(), list(self.rows), list(self.latest)),
            *(self.notes.number, self.notes.rows),
        ]


class CountingLayer(layers.Layer, Counts):
    """Counts its calls, follows its inputs, draws random numbers, and adds a loss."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.begin()
        self.seeds, self.seen = keras.random.SeedGenerator(3), keras.metrics.Sum(name="inputs_seen")

    def build(self, input_shape: Any) -> None:
        self.number = self.add_weight(shape=(), initializer="zeros", trainable=False, name="number")
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False, name="mean")
        self.kernel = self.add_weight(shape=(input_shape[-1],), initializer="ones", name="kernel")

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.note("layer")
        self.number.assign_add(1.0)
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(inputs))
        self.seen.update_state(ops.sum(ops.ones_like(inputs)))
        noise = keras.random.normal(ops.shape(inputs)[-1:], seed=self.seeds)
        return self.kernel * inputs + (0.0 if training else 1e-6) * noise


class CountingLoss(keras.losses.Loss, Counts):
    """Counts its calls.

    Args:
        number: A variable that counts them too, or `None`.
    """

    def __init__(self, number: keras.Variable | None = None):
        super().__init__(name="counting")
        self.begin()
        self.number = number

    def call(self, y_true: Any, y_pred: Any) -> Any:
        self.note("loss")
        if self.number is not None:
            self.number.assign_add(1.0)
        return ops.mean(ops.square(y_true - y_pred), -1)


class CountingMetric(keras.metrics.Mean, Counts):
    """Counts its updates."""

    def __init__(self) -> None:
        super().__init__(name="counting")
        self.begin()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.note("metric")
        super().update_state(ops.mean(ops.abs(y_true - y_pred), -1), sample_weight)


@keras.saving.register_keras_serializable("counting")
class CountingModel(keras.Model, Counts):
    """Functional, and counts how often its loss is computed."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.begin()
        self.losses_computed = keras.metrics.Sum(name="losses_computed")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.note("model")
        self.losses_computed.update_state(1.0)
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def counting_model(size: int = 4, kind: Any = CountingModel, loss: Any = None, optimizer: Any = None) -> Any:
    """A compiled model that counts."""
    inputs = keras.Input((size,))
    hidden = layers.Dense(8, "tanh", name="first")(CountingLayer(name="counting")(inputs))
    hidden = layers.Dense(8, "tanh", name="second")(hidden)
    model: Any = kind(inputs, layers.Dense(size, name="last")(hidden))
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss or CountingLoss(), metrics=[CountingMetric()])
    return model


def state_of(model: Any) -> dict[str, Any]:
    """All that a trace could be left in: values, attributes, losses, nodes and generators."""
    parts = [model, *model._flatten_layers(include_self=False)]
    metrics = [metric for part in parts for metric in part._metrics] + [*model.metrics]
    variables = [*model.variables, *(each for metric in metrics for each in metric.variables)]
    others = [model.loss, *(each for metric in metrics for each in getattr(metric, "metrics", (metric,)))]
    return {
        "values": [np.asarray(each).tolist() for each in (*variables, *model.optimizer.variables)],
        "counted": [copy.deepcopy(each.counted) for each in (*parts, *others) if isinstance(each, Counts)],
        "losses": [len(part._losses) for part in parts],
        "calls": [len(part._inbound_nodes) for part in parts],
        "attributes": [sorted(name for name in vars(part) if "keras_paragrad" not in name) for part in parts],
        "generators": (random.getstate(), str(np.random.get_state())),
    }


def begin_anew() -> None:
    """Sets what this process and thread have in common with other models: seeds, and counters of names."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(2)


def next_ones() -> list[Any]:
    """What generators give next, and what the next layer is called."""
    return [float(tf.random.uniform(())), float(keras.random.uniform(())), keras.layers.Dense(1).name]
