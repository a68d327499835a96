"""A part of a batch as a function without side effects, and the sums of parts, added in one order."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import (
    as_one_replica,
    cross_replica,
    replica_count,
    replica_index,
    sum_over_replicas,
)
from keras_paragrad.compat.model import all_variables, step_metrics
from keras_paragrad.compat.optimizer import say_rows_are_summed, unwrap_loss_scale
from keras_paragrad.compat.types import Batch, Gradients, Structure
from keras_paragrad.engine.losses.divisors import Normalizer
from keras_paragrad.engine.losses.logs import has_metrics, update_metrics
from keras_paragrad.engine.losses.refusals import IndivisibleError, layers_of_batch_statistics
from keras_paragrad.engine.losses.sums import LossSums
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.probes.independence import check_metrics
from keras_paragrad.engine.probes.pure_function import is_seed
from keras_paragrad.engine.replicas.replica_batch import ReplicaBatch, rows_at
from keras_paragrad.engine.step.data_order import DataOrder, checksum_of_part
from keras_paragrad.engine.step.gradient import Gradient, StepContext, forward_backward, in_function
from keras_paragrad.engine.step.operations import find_hidden_state
from keras_paragrad.storage.row_gradients import accumulate_gradient, is_overwritten, scale_gradients
from keras_paragrad.storage.updating import clips_norms_of_shards

# Steps between the seeds of two parts: the golden ratio times 2**32, so that no two parts draw each other's numbers.
_BETWEEN_SEEDS = 0x9E3779B9
# Maps the context of a pass and a batch to its gradients, weight and losses, and to the predictions.
RunPart = Callable[[StepContext, Batch], tuple[Gradient, Structure]]


class PartSums(NamedTuple):
    """What a part of a batch adds to the whole.

    Attributes:
        gradients: The gradients of the trainable weights that have one, times the part's weight.
        divisor: The weight: what the loss of the part was divided by.
        losses: The part's `LossSums.vector`.
        metrics: What it adds to the states of metrics.
        states: How it changes the states of layers.
        parts: 1, or 0 for a part without rows.
        data: The part's `checksum_of_part`, in training.
    """

    gradients: list[tf.Tensor]
    divisor: tf.Tensor
    losses: tf.Tensor
    metrics: list[tf.Tensor]
    states: list[tf.Tensor]
    parts: tf.Tensor
    data: list[tf.Tensor]


class PartFunction:
    """One part of a batch as a function of its rows and number, traced once for each shape of rows on each replica."""

    def __init__(self, context: StepContext, parts: int, run: RunPart):
        self.context, self.model, self.parts, self._run = context, context.model, parts, run
        self.variables = self.model.trainable_weights
        metrics = {id(variable): variable for metric in step_metrics(self.model) for variable in metric.variables}
        weights = set(map(id, self.variables))
        self.metrics = list(metrics.values())
        known = [each for each in all_variables(self.model) if id(each) not in weights and id(each) not in metrics]
        # All states that a part may change: seeds, and statistics of batches. Then those that it does change.
        self.seeds = [each for each in known if is_seed(each)]
        layers = layers_of_batch_statistics(self.model)
        self.statistics = {id(each) for layer in layers for each in layer.non_trainable_variables if not is_seed(each)}
        self.states: list[keras.Variable] = []
        self._check()
        self._compute = in_function(self._sums, by_xla=context.by_xla)
        self._add = in_function(self._sum_of_two, by_xla=False)
        # A mean over a part is larger than over the batch, and could overflow where the loss is scaled.
        optimizer = self.model.optimizer
        self._share = 1 / parts if optimizer is not None and unwrap_loss_scale(optimizer) is not optimizer else 1.0
        self._order = DataOrder.of(self.model) if run is forward_backward else None
        self._present: list[int] = []
        self._last: Any = None
        self._after: list[tf.Tensor] = []

    def _check(self) -> None:
        """Refuses sums whose order depends on the number of replicas."""
        if self.model.optimizer is not None and clips_norms_of_shards(self.model.optimizer, self.variables):
            raise IndivisibleError(
                "The norm of a gradient in shards is added shard by shard, so its last bits depend on their number. "
                f"Write clipvalue in place of clipnorm, or leave shard or deterministic={self.parts} out."
            )
        if names := [each.path for each in self.metrics if each.aggregation != "sum"]:
            raise IndivisibleError(
                f"The states of metrics {', '.join(names)} aren't summed over replicas, so they can't be added in a "
                "fixed order. Create them with add_variable(..., aggregation='sum'), or leave "
                f"deterministic={self.parts} out."
            )

    def __call__(self, data: Batch, number: int, first: tf.Tensor | int, count: tf.Tensor | int) -> PartSums:
        """The sums of the rows from `first` on, after those of the parts before it on this device."""
        rows = rows_at(data, first, count)
        never_empty = isinstance(count, int) and count > 0
        batch = ReplicaBatch(tf.convert_to_tensor(count), None if never_empty else tf.convert_to_tensor(count > 0))
        with tf.control_dependencies(None if tf.executing_eagerly() else self._after):
            sums = self._compute((batch.filled(rows), tf.constant(number, tf.uint32), batch.nonempty))
        self._after = [sums.divisor]
        return sums

    def _sums(self, arguments: tuple[Batch, tf.Tensor, tf.Tensor | None]) -> PartSums:
        """Computes a part without side effects."""
        data, number, nonempty = arguments
        starts = {id(seed): _seed_of_part(seed, number) for seed in self.seeds}
        mapping = [(seed, starts[id(seed)]) for seed in self.seeds]
        mapping += [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in self.metrics]
        context = self.context._replace(weigh_replica=lambda weight: tf.constant(self._share))
        with as_one_replica(), RecordingScope(mapping, self.variables) as scope:
            gradient, y_pred = self._run(context, data)
            batch = arguments_of(data, y_pred)
            if has_metrics(self.model):
                update_metrics(self.model, batch)
            added = [tf.convert_to_tensor(scope.get_current_value(variable)) for variable in self.metrics]
        check_metrics(self.model, batch, summed=True, anyway=f"Or leave deterministic={self.parts} out.")
        self._check_states(scope)
        assert gradient.weight is not None and gradient.sums is not None, "the split stage weights every part"
        self._last = gradient
        changes = []
        for variable in self.states:
            start = starts.get(id(variable), variable.value)
            changes.append(_change(variable, start, scope.get_current_value(variable), number))

        weight = tf.constant(1.0) if gradient.weight.summed else tf.cast(gradient.weight.value, "float32")
        gradients = self._weighted(gradient.gradients, weight)
        read = [checksum_of_part(data, number)] if self._order else []
        sums = PartSums(gradients, weight, gradient.sums.vector, added, changes, tf.constant(1.0), read)
        if nonempty is None:
            return sums
        return keras.tree.map_structure(lambda tensor: tf.where(nonempty, tensor, tf.zeros_like(tensor)), sums)

    def _weighted(self, gradients: Gradients, weight: tf.Tensor) -> list[tf.Tensor]:
        """Dense gradients times the weight of the part, where there are any."""
        self._present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        factor = weight / self._share
        for index in self._present:
            say_rows_are_summed(self.model.optimizer, [gradients[index]], [self.variables[index]])
        dense: list[Any] = [tf.convert_to_tensor(cast(Any, gradients[index])) for index in self._present]
        return [
            accumulate_gradient(self.variables[index], None, gradient, factor)
            for index, gradient in zip(self._present, dense, strict=True)
        ]

    def _check_states(self, scope: "RecordingScope") -> None:
        """Notes the states that a part changes, and refuses those that Keras or the model doesn't know."""
        otherwise = f", or leave deterministic={self.parts} out."
        metrics = set(map(id, self.metrics))
        changed = [each for each in scope.assigned.values() if id(each) not in metrics]
        known = {*map(id, self.seeds), *self.statistics}
        if unknown := [each.path for each in changed if id(each) not in known]:
            raise IndivisibleError(
                f"The step assigns to {', '.join(unknown)}, and parts of a batch would leave another state than the "
                "whole. Give layers that draw random numbers a keras.random.SeedGenerator as an attribute, and update "
                f"other states once a batch, in on_train_batch_end of a callback{otherwise}"
            )
        graph = tf.compat.v1.get_default_graph()
        if hidden := find_hidden_state(graph.get_operations()):
            raise IndivisibleError(
                f"The step's operation {hidden.operation.name!r} ({hidden.operation.type}) {hidden.problem}. "
                f"{hidden.advice}{otherwise}"
            )
        self.states = changed

    def add_in_order(self, sums: Sequence[PartSums]) -> PartSums:
        """Adds neighbors, then neighbors of these sums, and so on: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))."""
        sums = list(sums)
        while len(sums) > 1:
            pairs = [sums[index : index + 2] for index in range(0, len(sums), 2)]
            sums = [pair[0] if len(pair) == 1 else self._add(pair) for pair in pairs]
        return sums[0]

    def _sum_of_two(self, pair: Sequence[PartSums]) -> PartSums:
        """The sum of two neighbors; of float8 scales, which are no sums, the larger one."""
        overwritten = [is_overwritten(self.variables[index]) for index in self._present]
        one, other = pair
        gradients = [
            tf.maximum(first, second) if larger else first + second
            for larger, first, second in zip(overwritten, one.gradients, other.gradients, strict=True)
        ]
        rest = [keras.tree.map_structure(tf.add, *fields) for fields in zip(one[1:], other[1:], strict=True)]
        return PartSums(gradients, *rest)

    def assign(self, total: PartSums) -> None:
        """Adds the sums to the states of metrics, on the first replica, and of layers, on all."""
        if replica_index() == 0:
            for variable, added in zip(self.metrics, total.metrics, strict=True):
                variable.assign_add(added)
        for variable, change in zip(self.states, total.states, strict=True):
            change = change if is_seed(variable) else change / tf.cast(total.parts, change.dtype)
            _assign_on_all(variable, tf.convert_to_tensor(variable.value) + change)
        if self._order:
            _assign_on_all(self._order.state, self._order.after(*total.data))

    def gradient(self, total: PartSums) -> Gradient:
        """The gradient of the batch, on the first replica; zeros on the others."""
        weight = self._last.weight
        first = replica_index() == 0
        divisor = tf.constant(1.0) if weight.summed else total.divisor
        gradients: list[Any] = [None] * len(self.variables)
        finish = in_function(self._mean, by_xla=False)
        for index, gradient in zip(self._present, finish((total.gradients, divisor)), strict=True):
            larger = is_overwritten(self.variables[index])
            gradients[index] = gradient if first or larger else tf.zeros_like(gradient)
        value = divisor if first else tf.zeros_like(divisor)
        normalizer = Normalizer(value, weight.summed, weight.stated, of_one_device=True)
        return Gradient(gradients, None, normalizer, self.losses(total))

    def losses(self, total: PartSums) -> LossSums:
        """The losses of the batch, on the first replica; zeros on the others."""
        vector = total.losses if replica_index() == 0 else tf.zeros_like(total.losses)
        return LossSums(vector, self._last.sums.form)

    def _mean(self, arguments: tuple[list[tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
        """The sums divided by the divisor. Adding zero makes -0.0 what a sum over replicas makes of it."""
        total, divisor = arguments
        variables = [self.variables[index] for index in self._present]
        means: list[Any] = scale_gradients(total, variables, tf.math.reciprocal_no_nan(divisor))
        return [tf.cast(mean + 0.0, variable.dtype) for mean, variable in zip(means, variables, strict=True)]


class RecordingScope(keras.StatelessScope):
    """A stateless scope that remembers the variables that are assigned in it, by `id`; no trained weight may be."""

    def __init__(self, mapping: Sequence[tuple[keras.Variable, tf.Tensor]], weights: Sequence[keras.Variable]):
        super().__init__(mapping, collect_losses=True)
        self.assigned: dict[int, keras.Variable] = {}
        self._weights, self._reads = set(map(id, weights)), False

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable = update[0]
        if id(variable) in self._weights:
            raise IndivisibleError(
                f"The step assigns to {variable.path}, which is trained, as keras.layers.SpectralNormalization does. "
                "Each part of a batch would assign to it. Leave deterministic out."
            )
        self.assigned[id(variable)] = variable
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        if value is not None or self._reads or variable.regularizer is None:
            return value
        # Keras asks a stateless scope for weights with a regularizer, and these aren't mapped.
        self._reads = True
        try:
            return variable.value
        finally:
            self._reads = False


def _seed_of_part(seed: keras.Variable, number: tf.Tensor) -> tf.Tensor:
    """The state of a seed generator in a part: another sequence of random numbers for each part."""
    value = tf.convert_to_tensor(seed.value)
    return value + tf.cast(tf.stack([number * tf.constant(_BETWEEN_SEEDS, tf.uint32), 0]), value.dtype)


def _change(variable: keras.Variable, start: Any, after: Any, number: tf.Tensor) -> tf.Tensor:
    """How a part changes a state. All parts change seeds alike, so the first part's change counts."""
    change = tf.convert_to_tensor(after) - tf.convert_to_tensor(start)
    return tf.where(tf.equal(number, 0), change, tf.zeros_like(change)) if is_seed(variable) else change


def gather_from_replicas(sums: PartSums) -> list[PartSums]:
    """The sums of all replicas, in order, on each of them: a sum with zeros moves bits and changes none."""
    tensors = keras.tree.flatten(sums)
    rows = [
        tf.stack([part if replica == replica_index() else tf.zeros_like(part) for replica in range(replica_count())])
        for part in tensors
    ]
    gathered = sum_over_replicas(rows)
    by_replica = zip(*(tf.unstack(each, replica_count()) for each in gathered), strict=True)
    return [keras.tree.pack_sequence_as(sums, list(each)) for each in by_replica]


def _assign_on_all(variable: keras.Variable, value: tf.Tensor) -> None:
    """Assigns a value that is the same on all replicas, without averaging it, which would round."""
    if not isinstance(variable.value, tf.distribute.DistributedValues):
        variable.assign(value)
        return
    extended = tf.distribute.get_strategy().extended

    def assign(per_replica: Callable[..., Any], values: Any) -> None:
        extended.update(variable.value, lambda local, new: local.assign(new), args=(values,), group=False)

    cross_replica(assign, value)
