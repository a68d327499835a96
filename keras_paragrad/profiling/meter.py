"""Measures updates for `GradientTelemetry`: the compiled step writes a small vector, and the host reads it.

The vector has the values of `HEADER`, then for each of `QUANTITIES` one value per weight. A call is a call of the train
function; a watched one runs the step that measures.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_index
from keras_paragrad.compat.model import optimizers_of, other_optimizers, overrides_train_step
from keras_paragrad.compat.workers import replica_placement, replica_variable
from keras_paragrad.engine.telemetry.watch import Update
from keras_paragrad.profiling.telemetry_reports import HEADER, QUANTITIES, Weight
from keras_paragrad.sums import row_sums


class Meter:
    """Measures updates; the training step calls it as the *telemetry* stage of its `StepBuilder`.

    An unbuilt model gets its weights in its first step, so the vector is created while that step is traced. With
    several replicas Keras has built the model before, and the vector is created at once.
    """

    def __init__(
        self,
        model: keras.Model,
        every: int,
        on_update: Callable[[np.ndarray], None],
        on_weights: Callable[[list[Weight]], None],
    ):
        self.model, self.every, self._on_update, self._on_weights = model, every, on_update, on_weights
        self._trainable = model.trainable_variables
        # Whether a custom `train_step` has several optimizers, for different weights.
        self._several = overrides_train_step(model) and bool(other_optimizers(model))
        # The optimizer whose updates are counted: with several, the one that a step calls last.
        self._counted: keras.optimizers.Optimizer = model.optimizer
        self._weights: list[keras.Variable] = []
        self._vector: Any = None
        self._local_replicas = replica_placement(model.distribute_strategy).local
        by_xla = bool(model.jit_compile) and model.distribute_strategy.num_replicas_in_sync == 1
        self._measure = functools.partial(_measure, by_xla=by_xla)
        if model.distribute_strategy.num_replicas_in_sync > 1:
            self._set_weights(self._trainable)
        else:
            self._on_weights(weights_of(model, self._trainable))
        # With several optimizers: whether `_counted` is known from tracing, and whether `begin` has run since.
        self._traced = self._begun = False
        # The number of the update that was read last, and how many updates there were before the next call.
        self._last_read = self._updates = 0
        # How many batches have run since the vector was read, if which of them update is unknown.
        self._unread_batches: int | None = None

    def is_of(self, model: keras.Model) -> bool:
        """Whether the model still trains the measured weights."""
        return self.model is model and [*map(id, model.trainable_variables)] == [*map(id, self._trainable)]

    def begin(self) -> None:
        """Reads from the optimizer how many updates it has made; from there on, `wants` counts."""
        self._updates = self.updates()

    def updates(self) -> int:
        """The number of updates that the optimizer has made."""
        counted = self._counted if not self._several or self._traced else None
        counters = optimizers_of(self.model) if counted is None else [counted]
        return max(int(counter.iterations.numpy()) for counter in counters)

    def watch(self, updated: Sequence[keras.Variable], known: Sequence[keras.Variable]) -> Sequence[keras.Variable]:
        """Chooses the measured weights in the first call.

        Returns:
            The weights that `show` gets: all measured ones; with several optimizers, the updated ones.

        Raises:
            ValueError: A weight is updated that was not chosen.
        """
        if not self._weights:
            self._trainable = self.model.trainable_variables
            trainable = {id(weight) for weight in self._trainable}
            of_model = {id(weight) for weight in self.model.weights}
            known_ids = {id(weight) for weight in known}
            weights = [weight for weight in self._trainable if id(weight) in known_ids]
            # Frozen after the optimizer was built, and still updated.
            weights += [weight for weight in updated if id(weight) in of_model - trainable]
            # Weights outside of the model.
            weights += [weight for weight in known if id(weight) not in of_model]
            self._set_weights(self._trainable if self._several else weights)
        measured = {id(weight) for weight in self._weights}
        if late := [weight.path for weight in updated if id(weight) not in measured]:
            raise ValueError(
                f"{', '.join(late)} is updated, but was not among the trainable weights when GradientTelemetry "
                "started. Build the model before fit(), with these weights trainable."
            )
        return updated if self._several else self._weights

    def show(self, update: Update) -> None:
        """Measures an update, while a step is traced."""
        # One replica per worker measures the update, which is the same on all.
        if replica_index() % self._local_replicas:
            return
        if self._several:
            # It isn't known yet which update is the last, so all updates of a watched call are measured.
            self._counted, self._traced = update.optimizer, True
            merged = tf.tensor_scatter_nd_update(
                self._vector.value(), self._places(update.weights), self._measure(update)
            )
            self._vector.assign(merged)
            return
        if self.every == 1:
            self._vector.assign(self._measure(update))
            return
        due = tf.equal(tf.math.floormod(update.number, self.every), 0)
        self._vector.assign(tf.cond(due, lambda: self._measure(update), lambda: tf.identity(self._vector)))

    def _places(self, weights: Sequence[keras.Variable]) -> list[list[int]]:
        """The indices in the vector of the header and of these weights' values, for `tensor_scatter_nd_update`."""
        position = {id(weight): index for index, weight in enumerate(self._weights)}
        starts = range(len(HEADER), len(HEADER) + len(QUANTITIES) * len(self._weights), len(self._weights))
        of_weights = [start + position[id(weight)] for start in starts for weight in weights]
        return [[place] for place in (*range(len(HEADER)), *of_weights)]

    def wants(self, updates: int | None) -> bool:
        """Whether to watch the next call, which makes so many updates; always if only the optimizer knows (`None`)."""
        if updates is None:
            self._unread_batches = self._unread_batches or 0
            return True
        before, self._updates = self._updates, self._updates + updates
        return before // self.every != self._updates // self.every

    def latest(self) -> tf.Tensor:
        """The vector, while a step is traced; zeros if the step makes no update."""
        return tf.zeros([len(HEADER)], "float64") if self._vector is None else self._vector.value()

    def ran(self, watched: bool, batches: int, latest: tf.Tensor | None) -> None:
        """Reads the vector after a call, if it may have changed."""
        if self._several and self._traced and not self._begun:
            self._begun = True
            self.begin()
        if self._unread_batches is not None:
            # Which batches update is unknown; each makes at most one update.
            self._unread_batches += batches
            if self._unread_batches < self.every:
                return
            self._unread_batches = 0
        if watched and not self.read(latest) and self._unread_batches is None:
            # The optimizer has made fewer updates than batches: the scaled loss has overflowed.
            self.begin()

    def read(self, latest: Any = None) -> bool:
        """Passes the vector to `on_update` if it is of an update not read before; returns whether it is."""
        if latest is None:
            if self._vector is None:
                return False
            # The first of this worker's replicas holds it.
            latest = getattr(self._vector, "values", (self._vector,))[0]
        vector = latest.numpy()
        # 0 before an update was measured.
        number = int(vector[0])
        is_new = number not in (0, self._last_read)
        if self._several:
            # All updates of a watched call are measured, and an epoch's last call may end before the one that is due.
            is_new = is_new and number // self.every != self._last_read // self.every
        self._last_read = number
        if is_new:
            # The step stores half squares; counts, at the end, stay.
            vector[len(HEADER) : -len(self._weights)] *= 2
            self._on_update(vector)
        return is_new

    def _set_weights(self, variables: Sequence[keras.Variable]) -> None:
        """Sets the measured weights, and creates the vector's variable for them."""
        self._weights = list(variables)
        self._on_weights(weights_of(self.model, variables))
        with tf.init_scope(), self.model.distribute_strategy.scope():
            size = len(HEADER) + len(QUANTITIES) * len(self._weights)
            # 64 bits, as it also holds the number of the update.
            self._vector = replica_variable([size], tf.float64)


def weights_of(model: keras.Model, variables: Sequence[keras.Variable]) -> list[Weight]:
    """The layer and the name of each weight of a model; a name that a layer has twice is numbered."""
    counts: dict[tuple[str, str], int] = {}
    weights = []
    for variable in variables:
        layer, _, name = variable.path.removeprefix(f"{model.name}/").rpartition("/")
        # The model's own weights belong to no layer.
        layer = layer or model.name
        count = counts[layer, name] = counts.get((layer, name), 0) + 1
        weights.append(Weight(layer, name if count == 1 else f"{name}_{count}"))
    return weights


def _measure(update: Update, by_xla: bool) -> tf.Tensor:
    """The vector of an update: its number, learning rate and loss scale, then half squares and non-finite counts."""

    def square(tensor: tf.Tensor | None) -> tf.Tensor:
        if tensor is None:
            return tf.constant(0.0)
        values = tf.cast(tensor, "float32")
        # `l2_loss` is a single operation. On CPUs, XLA would add up a tensor sequentially; `row_sums` divides it.
        return row_sums(tf.square(tf.reshape(values, [1, -1])) / 2, True)[0] if by_xla else tf.nn.l2_loss(values)

    def count_nonfinite(tensor: tf.Tensor | None) -> tf.Tensor:
        if tensor is None:
            return tf.constant(0.0)
        return tf.reduce_sum(tf.cast(tf.logical_not(tf.math.is_finite(tensor)), "float32"))

    gradients = [square(gradient) for gradient in update.gradients]
    # Without clipping, both are the same tensors.
    clipped = [
        half_square if after is before else square(after)
        for half_square, before, after in zip(gradients, update.gradients, update.clipped, strict=True)
    ]
    weights = [square(weight) for weight in update.before]
    change = [square(change) for change in update.change]
    # Only counted if a sum isn't finite.
    nonfinite = tf.cond(
        tf.math.is_finite(tf.add_n(gradients)),
        lambda: tf.zeros([len(gradients)]),
        lambda: tf.stack([count_nonfinite(gradient) for gradient in update.gradients]),
    )
    figures = tf.stack([update.learning_rate, update.loss_scale, *gradients, *clipped, *weights, *change])
    figures = tf.concat([figures, nonfinite], 0)
    return tf.concat([tf.cast(update.number, "float64")[tf.newaxis], tf.cast(figures, "float64")], 0)
