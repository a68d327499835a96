"""A part of a batch as a function without side effects, and the addition of parts in a fixed order.

Deterministic training computes each batch in a fixed number of parts, whatever the number of replicas.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import as_one_replica, cross_replica, replica_index
from keras_paragrad.compat.layers import mask_of, with_mask
from keras_paragrad.compat.model import all_variables, is_seed, step_metrics
from keras_paragrad.compat.optimizer import warn_of_summed_rows
from keras_paragrad.compat.types import Batch, Structure
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch, rows_at
from keras_paragrad.engine.losses.known_classes import metrics_are_known
from keras_paragrad.engine.losses.logs import has_metrics, update_metrics
from keras_paragrad.engine.losses.refusals import IndivisibleError, layers_of_batch_statistics
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.step.batch_part import BatchPart, scales_loss
from keras_paragrad.engine.step.data_order import DataOrder, checksum_of_part
from keras_paragrad.engine.step.gradient import Gradient, StepContext, forward_backward, in_function
from keras_paragrad.engine.tracing.effects import find_hidden_state
from keras_paragrad.storage.updating import clips_norms_of_shards

# The distance between the seeds of two parts: the golden ratio times 2**32, so that parts draw different numbers.
_BETWEEN_SEEDS = 0x9E3779B9
# Maps the context of a pass and a batch to its gradient, with weight and losses, and the predictions.
RunPart = Callable[[StepContext, Batch], tuple[Gradient, Structure]]


class Effects(NamedTuple):
    """A part's changes of states, as sums.

    Attributes:
        metrics: The increments of the states of metrics.
        states: The change of each of `PartFunction.states`, or `None` if unchanged.
        parts: 1, or 0 for a part without rows.
        data: The part's `checksum_of_part`, in training.
    """

    metrics: list[tf.Tensor]
    states: list[tf.Tensor | None]
    parts: tf.Tensor
    data: list[tf.Tensor]


class PartFunction:
    """One part of a batch as a function of its rows and number, traced once for each shape of rows on each replica."""

    def __init__(self, context: StepContext, parts: int, run: RunPart):
        self.context, self.model, self.parts, self._run = context, context.model, parts, run
        self.variables = self.model.trainable_weights
        metrics = {id(variable): variable for metric in step_metrics(self.model) for variable in metric.variables}
        weights = set(map(id, self.variables))
        # Metrics of the user's own get the outputs of the whole batch, once all its parts have been computed.
        self.whole_metrics = has_metrics(self.model) and not metrics_are_known(self.model)
        self.metrics = [each for each in metrics.values() if each.aggregation == "sum" or not self.whole_metrics]
        others = [
            variable
            for variable in all_variables(self.model)
            if id(variable) not in weights and id(variable) not in metrics
        ]
        # All states that a part may change: seeds, and statistics of batches.
        layers = layers_of_batch_statistics(self.model)
        statistics = {id(variable) for layer in layers for variable in layer.non_trainable_variables}
        self.states = [variable for variable in others if is_seed(variable) or id(variable) in statistics]
        self._check()
        self._compute = in_function(self._part, by_xla=context.by_xla)
        self._add = in_function(_add_pair, by_xla=False)
        # The factor of a part's loss: its mean is larger than the batch's, and could overflow where losses are scaled.
        self._share = 1 / parts if scales_loss(self.model) else 1.0
        self._order = DataOrder.of(self.model) if run is forward_backward else None

    def _check(self) -> None:
        """Refuses sums whose order depends on the number of replicas."""
        if self.model.optimizer is not None and clips_norms_of_shards(self.model.optimizer, self.variables):
            raise IndivisibleError(
                "The norm of a gradient in shards is added shard by shard, so its last bits depend on their number. "
                f"Write clipvalue in place of clipnorm, or leave shard or deterministic={self.parts} out."
            )
        if names := [metric.path for metric in self.metrics if metric.aggregation != "sum"]:
            raise IndivisibleError(
                f"The states of metrics {', '.join(names)} aren't summed over replicas, so they can't be added in a "
                "fixed order. Create them with add_variable(..., aggregation='sum'), or leave "
                f"deterministic={self.parts} out."
            )

    def __call__(
        self, data: Batch, number: int, first: tf.Tensor | int, count: tf.Tensor | int
    ) -> tuple[BatchPart, Structure]:
        """Computes the part with `count` rows from `first` on; also returns its outputs, if metrics need them."""
        rows = rows_at(data, first, count)
        never_empty = isinstance(count, int) and count > 0
        batch = ReplicaBatch(tf.convert_to_tensor(count), None if never_empty else tf.convert_to_tensor(count > 0))
        part, outputs = self._compute((batch.filled(rows), tf.constant(number, tf.uint32), batch.nonempty))
        return part, keras.tree.map_structure(lambda output: _first_rows(output, count), outputs)

    def _part(self, arguments: tuple[Batch, tf.Tensor, tf.Tensor | None]) -> tuple[BatchPart, Structure]:
        """Computes a part without side effects, from its rows, its number, and whether it has rows (`None` if it does).

        The contribution of a part without rows is zero; its rows are filler.
        """
        data, number, nonempty = arguments
        starts = {id(seed): _seed_of_part(seed, number) for seed in self.states if is_seed(seed)}
        mapping = [(seed, starts[id(seed)]) for seed in self.states if is_seed(seed)]
        mapping += [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in self.metrics]
        context = self.context._replace(weigh_replica=lambda weight: tf.constant(self._share))
        with as_one_replica(), RecordingScope(mapping, self.variables) as scope:
            gradient, y_pred = self._run(context, data)
            batch = arguments_of(data, y_pred)
            if has_metrics(self.model) and not self.whole_metrics:
                update_metrics(self.model, batch)
            added = [tf.convert_to_tensor(scope.get_current_value(variable)) for variable in self.metrics]
        self._check_states(scope)
        changes = [
            _change(state, starts.get(id(state), state.value), scope.get_current_value(state), number)
            if id(state) in scope.assigned
            else None
            for state in self.states
        ]
        dense: list[Any] = [None if leaf is None else tf.convert_to_tensor(leaf) for leaf in gradient.gradients]
        if self.model.optimizer is not None:
            warn_of_summed_rows(self.model.optimizer, gradient.gradients, self.variables)
        read = [checksum_of_part(data, number)] if self._order else []
        part = BatchPart.of(self.model, gradient._replace(gradients=dense), self._share)
        part = part._replace(effects=Effects(added, changes, tf.constant(1.0), read))
        if nonempty is not None:
            part = part.with_tensors([tf.where(nonempty, tensor, tf.zeros_like(tensor)) for tensor in part.sums])
        return part, y_pred if self.whole_metrics else ()

    def _check_states(self, scope: "RecordingScope") -> None:
        """Refuses changes of states that Keras or the model doesn't know."""
        otherwise = f", or leave deterministic={self.parts} out."
        known = set(map(id, [*self.metrics, *self.states]))
        if unknown := [variable.path for key, variable in scope.assigned.items() if key not in known]:
            raise IndivisibleError(
                f"The step assigns to {', '.join(unknown)}, and parts of a batch would leave a state that differs "
                "from the whole's. Give layers that draw random numbers a keras.random.SeedGenerator as an attribute, "
                f"and update other states once per batch, in on_train_batch_end of a callback{otherwise}"
            )
        graph = tf.compat.v1.get_default_graph()
        if hidden := find_hidden_state(graph.get_operations()):
            raise IndivisibleError(
                f"The step's operation {hidden.operation.name!r} ({hidden.operation.type}) {hidden.problem}. "
                f"{hidden.advice}{otherwise}"
            )

    def add_in_order(self, parts: Sequence[BatchPart]) -> BatchPart:
        """Adds parts pairwise, then these sums pairwise, and so on: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).

        In this order, rounding is the same however many replicas the parts are spread over.
        """
        sums = list(parts)
        while len(sums) > 1:
            pairs = [sums[index : index + 2] for index in range(0, len(sums), 2)]
            sums = [pair[0] if len(pair) == 1 else self._add(pair) for pair in pairs]
        return sums[0]

    def assign(self, effects: Effects) -> None:
        """Adds a batch's effects to the states of metrics and layers.

        Only the first replica's metrics change, as the replicas' states are summed. Layers' states change on all
        replicas, by the mean of the parts' changes.
        """
        if replica_index() == 0:
            for variable, added in zip(self.metrics, effects.metrics, strict=True):
                variable.assign_add(added)
        for variable, change in zip(self.states, effects.states, strict=True):
            if change is not None:
                change = change if is_seed(variable) else change / tf.cast(effects.parts, change.dtype)
                _assign_on_all(variable, tf.convert_to_tensor(variable.value) + change)
        if self._order:
            _assign_on_all(self._order.state, self._order.after(*effects.data))


def join_outputs(outputs: Sequence[Structure]) -> Structure:
    """Joins the outputs of the parts of a batch, with their masks."""

    def join(*pieces: Any) -> Any:
        masks: list[Any] = list(map(mask_of, pieces))
        return with_mask(tf.concat(pieces, 0), None if masks[0] is None else tf.concat(masks, 0))

    return keras.tree.map_structure(join, *outputs)


def _first_rows(output: Any, count: tf.Tensor | int) -> Any:
    mask: Any = mask_of(output)
    return with_mask(output[:count], None if mask is None else mask[:count])


def _add_pair(pair: Sequence[BatchPart]) -> BatchPart:
    return pair[0] + pair[1]


class RecordingScope(keras.StatelessScope):
    """A stateless scope that records assigned variables, by `id`, and refuses assignments to trained weights."""

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
        # Keras's regularizers read weights from the scope, which doesn't hold them. `value` asks the scope again, and
        # then has to get `None`.
        self._reads = True
        try:
            return variable.value
        finally:
            self._reads = False


def _seed_of_part(seed: keras.Variable, number: tf.Tensor) -> tf.Tensor:
    """The state of a seed generator in a part: each part draws its own sequence of random numbers."""
    value = tf.convert_to_tensor(seed.value)
    return value + tf.cast(tf.stack([number * tf.constant(_BETWEEN_SEEDS, tf.uint32), 0]), value.dtype)


def _change(variable: keras.Variable, start: Any, after: Any, number: tf.Tensor) -> tf.Tensor:
    """A part's change of a state. All parts change a seed equally, so only the first part's change counts."""
    change = tf.convert_to_tensor(after) - tf.convert_to_tensor(start)
    return tf.where(tf.equal(number, 0), change, tf.zeros_like(change)) if is_seed(variable) else change


def _assign_on_all(variable: keras.Variable, value: tf.Tensor) -> None:
    """Assigns a value that is the same on all replicas, without averaging it, which would round."""
    if not isinstance(variable.value, tf.distribute.DistributedValues):
        variable.assign(value)
        return
    extended = tf.distribute.get_strategy().extended

    def assign(per_replica: Callable[..., Any], values: Any) -> None:
        extended.update(variable.value, lambda local, new: local.assign(new), args=(values,), group=False)

    cross_replica(assign, value)
