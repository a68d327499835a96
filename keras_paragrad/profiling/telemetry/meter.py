"""Measures updates: a small vector that the compiled step writes and the host reads."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_index
from keras_paragrad.compat.local import place_of, replica_variable
from keras_paragrad.engine.telemetry.watch import Update
from keras_paragrad.profiling.telemetry.report import HEADER, QUANTITIES, Weight
from keras_paragrad.sums import row_sums


class Meter:
    """Measures updates; fills the *telemetry* stage of `keras_paragrad.engine.step.builder.StepBuilder`.

    An unbuilt model gets its weights in its first step, so the vector is created while that step is traced. With
    several replicas Keras has built the model before, and the vector is created at once.

    Args:
        model: A compiled model.
        every: The updates whose number is a multiple of this are measured.
        tell: Called with each measured vector.
        named: Called with the names of the measured weights, once known.
    """

    def __init__(
        self,
        model: Any,
        every: int,
        tell: Callable[[np.ndarray], None],
        named: Callable[[list[Weight]], None] = lambda weights: None,
    ):
        self.model, self.every, self.tell, self._named = model, every, tell, named
        self._trainable = model.trainable_variables
        self._chosen: list[Any] = []
        self._vector: Any = None
        self._local_replicas = place_of(model.distribute_strategy).local
        by_xla = bool(model.jit_compile) and model.distribute_strategy.num_replicas_in_sync == 1
        self._measured = functools.partial(_measured, square=_half_square_by_xla if by_xla else _half_square)
        if model.distribute_strategy.num_replicas_in_sync > 1:
            self._choose(self._trainable)
        else:
            self._named(weights_of(model, self._trainable))
        self._told = 0
        self._number = 0
        self._batches: int | None = None

    def is_of(self, model: Any) -> bool:
        """Whether the model still trains the measured weights."""
        return self.model is model and [*map(id, model.trainable_variables)] == [*map(id, self._trainable)]

    def begin(self) -> None:
        """Reads how many updates the optimizer has made."""
        self._number = int(self.model.optimizer.iterations.numpy())

    def watch(self, updated: Sequence[Any], known: Sequence[Any]) -> Sequence[Any]:
        """The measured weights: those that the model trains and the optimizer updates."""
        if not self._chosen:
            self._trainable = self.model.trainable_variables
            own, others = {id(weight) for weight in self._trainable}, {id(weight) for weight in self.model.weights}
            outside = [weight for weight in known if id(weight) not in others]
            also = [weight for weight in updated if id(weight) in others - own]
            places = {id(weight) for weight in known}
            self._choose([*(weight for weight in self._trainable if id(weight) in places), *also, *outside])
        chosen = {id(weight) for weight in self._chosen}
        if late := [weight.path for weight in updated if id(weight) not in chosen]:
            raise ValueError(
                f"{', '.join(late)} is updated, but was not among the trainable weights when GradientTelemetry "
                "started. Build the model before fit(), with these weights trainable."
            )
        return self._chosen

    def show(self, update: Update) -> None:
        """Measures an update, while a step is traced."""
        # The update is the same on all replicas, so one per worker measures it.
        if replica_index() % self._local_replicas:
            return
        if self.every == 1:
            self._vector.assign(self._measured(update))
            return
        due = tf.equal(tf.math.floormod(update.number, self.every), 0)
        self._vector.assign(tf.cond(due, lambda: self._measured(update), lambda: tf.identity(self._vector)))

    def wants(self, updates: int | None) -> bool:
        """Whether an update to be measured is among the next ones."""
        if updates is None:
            self._batches = self._batches or 0
            return True
        before, self._number = self._number, self._number + updates
        return before // self.every != self._number // self.every

    def latest(self) -> tf.Tensor:
        """The vector, while a step is traced; zeros if the step makes no update."""
        return tf.zeros([len(HEADER)], "float64") if self._vector is None else self._vector.value()

    def ran(self, watched: bool, batches: int, latest: tf.Tensor | None) -> None:
        """Reads the vector, if it may have changed."""
        if self._batches is not None:
            # It is unknown which batches update; each makes at most one update.
            self._batches += batches
            if self._batches < self.every:
                return
            self._batches = 0
        if watched and not self.read(latest) and self._batches is None:
            # The optimizer has made fewer updates than batches: the scaled loss has overflowed.
            self.begin()

    def read(self, latest: Any = None) -> bool:
        """Reports the measurement if it is new, and returns whether it was."""
        if latest is None and self._vector is None:
            return False
        if latest is None:
            # The first of this worker's replicas holds it.
            latest = getattr(self._vector, "values", (self._vector,))[0]
        vector = latest.numpy()
        # 0 as long as no update was measured.
        new = int(vector[0]) not in (0, self._told)
        if new:
            self._told = int(vector[0])
            # The squares were stored halved.
            vector[len(HEADER) : -len(self._chosen)] *= 2
            self.tell(vector)
        return new

    def _choose(self, variables: Sequence[Any]) -> None:
        self._chosen = list(variables)
        self._named(weights_of(self.model, variables))
        with tf.init_scope(), self.model.distribute_strategy.scope():
            # 64 bits, so that it can count updates.
            size = len(HEADER) + len(QUANTITIES) * len(self._chosen)
            self._vector = replica_variable([size], tf.float64)


def weights_of(model: keras.Model, variables: Sequence[Any]) -> list[Weight]:
    """Unique names of a model's weights."""
    found: dict[tuple[str, str], int] = {}
    named = []
    for variable in variables:
        layer, _, name = variable.path.removeprefix(f"{model.name}/").rpartition("/")
        # The model's own weights belong to no layer.
        layer = layer or model.name
        found[layer, name] = found.get((layer, name), 0) + 1
        count = found[layer, name]
        named.append(Weight(layer, name if count == 1 else f"{name}_{count}"))
    return named


def _measured(update: Update, square: Callable[[Any], tf.Tensor]) -> tf.Tensor:
    gradients = [square(gradient) for gradient in update.gradients]
    # Without clipping they are the same tensors.
    both = list(zip(update.gradients, update.clipped, strict=True))
    clipped = [gradients[place] if after is before else square(after) for place, (before, after) in enumerate(both)]
    weights = [square(weight) for weight in update.before]
    change = [square(each) for each in update.change]
    # Counted only where there is something to count.
    nonfinite = tf.cond(
        tf.math.is_finite(tf.add_n(gradients)),
        lambda: tf.zeros([len(gradients)]),
        lambda: tf.stack([_nonfinite(gradient) for gradient in update.gradients]),
    )
    figures = tf.stack([update.learning_rate, update.loss_scale, *gradients, *clipped, *weights, *change])
    figures = tf.concat([figures, nonfinite], 0)
    return tf.concat([tf.cast(update.number, "float64")[tf.newaxis], tf.cast(figures, "float64")], 0)


def _float(tensor: Any) -> tf.Tensor:
    return tf.cast(tensor, "float32")


def _half_square(tensor: Any) -> tf.Tensor:
    # One operation, where a square and a sum are two.
    return tf.constant(0.0) if tensor is None else tf.nn.l2_loss(_float(tensor))


def _half_square_by_xla(tensor: Any) -> tf.Tensor:
    return tf.constant(0.0) if tensor is None else row_sums(tf.square(tf.reshape(_float(tensor), [1, -1])) / 2, True)[0]


def _nonfinite(tensor: Any) -> tf.Tensor:
    if tensor is None:
        return tf.constant(0.0)
    return tf.reduce_sum(tf.cast(tf.logical_not(tf.math.is_finite(tensor)), "float32"))
