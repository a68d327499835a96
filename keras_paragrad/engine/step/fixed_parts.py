"""`deterministic=8`: adds 8 parts in one order, for the same bits on any number of replicas.

for each part of this replica:
    compute it as a function of its rows and number, without side effects
add the parts as a tree, on each replica and then over replicas: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
add the parts' changes to the states of metrics and layers, and update the checksum of the batches
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import (
    as_one_replica,
    cross_replica,
    replica_count,
    replica_index,
)
from keras_paragrad.compat.layers import WeightScope, mask_of, with_mask
from keras_paragrad.compat.model import all_variables, is_seed, step_metrics
from keras_paragrad.compat.optimizer import warn_of_summed_rows
from keras_paragrad.compat.types import Batch, Structure
from keras_paragrad.compat.workers import first_row, parts_per_replica
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch, cut_rows_of, rows_at
from keras_paragrad.engine.calls.replicas import update_metrics_of
from keras_paragrad.engine.losses.dividers import IndivisibleError, layers_of_batch_statistics
from keras_paragrad.engine.losses.divisors import Divisor
from keras_paragrad.engine.losses.known_classes import metrics_are_known
from keras_paragrad.engine.losses.logs import LossSums, has_metrics, update_metrics
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.step.batch_part import BatchPart, scales_loss
from keras_paragrad.engine.step.data_order import DataOrder, checksum_of_part
from keras_paragrad.engine.step.gradient import Gradient, StepContext, forward_backward, in_function
from keras_paragrad.engine.step.stages import ComputeLosses
from keras_paragrad.engine.tracing.effects import find_hidden_state
from keras_paragrad.storage.updating import clips_norms_of_shards

_ANY_ROWS = 2**31 - 1
# This option turns off TensorFlow's graph optimizers, which merge sums of parts in a large graph.
_NO_REWRITING = "disable_meta_optimizer"
# The distance between the seeds of two parts: the golden ratio times 2**32, so that parts draw different numbers.
_BETWEEN_SEEDS = 0x9E3779B9
# Maps the context of a pass and a batch to its gradient, with weight and losses, and the predictions.
RunPart = Callable[[StepContext, Batch], tuple[Gradient, Structure]]


class FixedParts(NamedTuple):
    """Fills the *split* stage. A batch's parts are the same on any number of replicas.

    Attributes:
        parts: The number of parts of every batch.
        loss_divisor: Computes the weight of a part.
        prove: Whether the first batch must prove that its parts give the same results as the whole.
        size: The most rows that a part may have.
        by_xla: Whether XLA compiles parts.
        for_replicas: Advice, for the error on another number of replicas.
        replicas: The number of replicas among which the parts are divided.
    """

    parts: int
    loss_divisor: LossDivisor
    prove: bool = True
    size: int = _ANY_ROWS
    by_xla: bool = False
    for_replicas: str = ""
    replicas: int = 1

    def on_replicas(self, replicas: int, *, prove: bool, by_xla: bool) -> "FixedParts":
        """The same parts, divided among `replicas` replicas."""
        return self._replace(replicas=replicas, prove=prove, by_xla=by_xla)

    @property
    def refusal_prefix(self) -> str:
        return f"With deterministic={self.parts} every batch is computed in {self.parts} parts."

    def part_rows(self, rows: int) -> int:
        return max(1, -(-rows // min(self.parts, parts_per_replica(self.parts, self.replicas))))

    def cuts(self, data: Batch) -> bool:
        return True

    @property
    def refusal_of_calls(self) -> str:
        return (
            f"deterministic={self.parts} requires Keras's own train_step, and a loss that is a sum or mean over the "
            "rows, whose parts are added in a fixed order. Override compute_loss instead of train_step, state the "
            "weighting of the loss, or leave deterministic out."
        )

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        """Context in which steps are traced and run, without TensorFlow's graph optimizers."""
        options = tf.config.optimizer.get_experimental_options()
        tf.config.optimizer.set_experimental_options({_NO_REWRITING: True})
        try:
            yield
        finally:
            tf.config.optimizer.set_experimental_options({_NO_REWRITING: options.get(_NO_REWRITING, False)})

    def __call__(self, context: StepContext, data: Batch) -> Gradient:
        """The gradient of the whole batch, on every replica."""
        part = PartFunction(context._replace(by_xla=self.by_xla), self.parts, forward_backward)
        total = self._total(part, context.replica_batch, data)
        return in_function(BatchPart.finish, by_xla=False)(total)._replace(reduced=True)

    def evaluate(self, model: keras.Model, batch: ReplicaBatch, data: Batch, compute: ComputeLosses) -> LossSums:
        """The losses of the whole batch, on every replica; updates the metrics."""

        def evaluated(context: StepContext, data: Batch) -> tuple[Gradient, Structure]:
            y_pred, losses = compute(data)
            # Nothing uses the weight.
            return Gradient([None] * len(model.trainable_weights), None, Divisor(tf.constant(1.0)), losses), y_pred

        part = PartFunction(StepContext(model, batch, by_xla=self.by_xla), self.parts, evaluated)
        return self._total(part, batch, data).losses

    def _total(self, part: "PartFunction", batch: ReplicaBatch, data: Batch) -> BatchPart:
        """The sum of all parts of a batch, on every replica. Adds to the states of metrics and layers."""
        parts, outputs = list[BatchPart](), list[Structure]()
        for number, bounds in self._bounds(batch, data):
            # A part waits for the one before: a device may have memory for one part only.
            with tf.control_dependencies([previous.weight.value for previous in parts[-1:]]):
                computed, of_part = part(data, number, *bounds)
            parts.append(computed)
            outputs.append(of_part)
        total = part.add_in_order(parts)
        if replica_count() > 1:
            total = part.add_in_order(total.by_replica())
        part.assign(total.effects)
        if part.whole_metrics:
            whole = keras.tree.map_structure(_join, *outputs)
            update_metrics_of(part.model, arguments_of(data, whole), batch)
        return total

    def _bounds(self, batch: ReplicaBatch, data: Batch) -> list[tuple[int, tuple[Any, Any]]]:
        """This replica's parts, each as (number in the batch, (first row here, row count)).

        A replica beyond the last part computes the last part, without rows. Refuses another number of replicas.
        """
        if replica_count() != self.replicas:
            raise IndivisibleError(
                f"The batches of {replica_count()} replicas aren't divided into {self.parts} parts. {self.for_replicas}"
            )
        count = parts_per_replica(self.parts, replica_count())
        first = min(replica_index() * count, self.parts - 1)
        count = max(1, min(count, self.parts - replica_index() * count))
        # A replica without rows has a padding row, which isn't an example.
        rows = cut_rows_of(data) if batch.nonempty is None else batch.rows
        if self.size < _ANY_ROWS:
            self._check_size(-(-rows // count))
        firsts = [first_row(rows, part, count) for part in range(count + 1)]
        return [(first + part, (firsts[part], firsts[part + 1] - firsts[part])) for part in range(count)]

    def _check_size(self, largest: tf.Tensor | int) -> None:
        """Refuses parts that are larger than stated."""
        message = (
            f"A batch in deterministic={self.parts} parts has parts of more than size={self.size} rows. Write a larger "
            f"size, a smaller batch_size, or deterministic={2 * self.parts}."
        )
        if not isinstance(largest, int):
            tf.debugging.Assert(largest <= self.size, [message])
        elif largest > self.size:
            raise ValueError(message)


class Effects(NamedTuple):
    """What a part changes beside the gradient. Effects of parts are added.

    Attributes:
        metrics: The increments of the states of metrics.
        states: The change of each of `PartFunction.states`, or `None` if unchanged.
        parts: 1, or 0 for a part without rows.
        data: The part's `checksum_of_part`, or nothing in evaluation.
    """

    metrics: list[tf.Tensor]
    states: list[tf.Tensor | None]
    parts: tf.Tensor
    data: list[tf.Tensor]


class PartFunction:
    """A part as a function of its rows and number. Each replica traces it once for each shape of the rows."""

    def __init__(self, context: StepContext, parts: int, run: RunPart):
        self.context, self.model, self.parts, self._run = context, context.model, parts, run
        self.variables = self.model.trainable_weights
        metrics = {id(variable): variable for metric in step_metrics(self.model) for variable in metric.variables}
        # Metrics of the user's own get the outputs of the whole batch, after its last part.
        self.whole_metrics = has_metrics(self.model) and not metrics_are_known(self.model)
        self.metrics = [each for each in metrics.values() if each.aggregation == "sum" or not self.whole_metrics]
        # All states that a part may change: seeds, and statistics of batches.
        layers = layers_of_batch_statistics(self.model)
        changing = {id(variable) for layer in layers for variable in layer.non_trainable_variables}
        changing -= {*map(id, self.variables), *metrics}
        self.states = [each for each in all_variables(self.model) if is_seed(each) or id(each) in changing]
        self._check()
        self._compute = in_function(self._part, by_xla=context.by_xla)
        self._add = in_function(_add_pair, by_xla=False)
        # The factor of a part's loss. Without it, a part's mean could overflow under a loss scale.
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
        """Computes the part with `count` rows from `first` on. Also returns outputs, if metrics need them."""
        rows = rows_at(data, first, count)
        never_empty = isinstance(count, int) and count > 0
        batch = ReplicaBatch(tf.convert_to_tensor(count), None if never_empty else tf.convert_to_tensor(count > 0))
        part, outputs = self._compute((batch.filled(rows), tf.constant(number, tf.uint32), batch.nonempty))
        return part, keras.tree.map_structure(lambda output: _first_rows(output, count), outputs)

    def _part(self, arguments: tuple[Batch, tf.Tensor, tf.Tensor | None]) -> tuple[BatchPart, Structure]:
        """Computes a part without side effects. `arguments` are rows, number, and whether the rows are examples.

        If they aren't, they are padding, and all that the part gives is zero. `None` says that they are.
        """
        data, number, nonempty = arguments
        starts: dict[int, Any] = {id(seed): _seed_of_part(seed, number) for seed in self.states if is_seed(seed)}
        mapping = [(seed, starts[id(seed)]) for seed in self.states if is_seed(seed)]
        mapping += [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in self.metrics]
        context = self.context._replace(weigh_replica=lambda weight: tf.constant(self._share))
        with as_one_replica(), RecordingScope(mapping, self.variables) as scope:
            gradient, y_pred = self._run(context, data)
            if has_metrics(self.model) and not self.whole_metrics:
                update_metrics(self.model, arguments_of(data, y_pred))
            added = [tf.convert_to_tensor(scope.get_current_value(variable)) for variable in self.metrics]
        self._check_states(scope)
        changes = list[tf.Tensor | None]()
        for state in self.states:
            change = None
            if id(state) in scope.assigned:
                start = tf.convert_to_tensor(starts.get(id(state), state.value))
                change = tf.convert_to_tensor(scope.get_current_value(state)) - start
                if is_seed(state):
                    # All parts change a seed equally, so only the first part's change counts.
                    change = tf.where(tf.equal(number, 0), change, tf.zeros_like(change))
            changes.append(change)
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
        """Adds neighbors, then neighboring sums, and so on. Each replica adds a whole subtree, as one device does."""
        sums = list(parts)
        while len(sums) > 1:
            pairs = [sums[index : index + 2] for index in range(0, len(sums), 2)]
            sums = [pair[0] if len(pair) == 1 else self._add(pair) for pair in pairs]
        return sums[0]

    def assign(self, effects: Effects) -> None:
        """Adds a batch's effects to the states of metrics and layers.

        Metrics change on the first replica only, as their states are summed over replicas. Layers' states change on
        all replicas, by the mean of the parts' changes.
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


def _join(*pieces: Any) -> Any:
    """Concatenates rows, with their masks."""
    masks: list[Any] = list(map(mask_of, pieces))
    return with_mask(tf.concat(pieces, 0), None if masks[0] is None else tf.concat(masks, 0))


def _first_rows(output: Any, count: tf.Tensor | int) -> Any:
    mask: Any = mask_of(output)
    return with_mask(output[:count], None if mask is None else mask[:count])


def _add_pair(pair: Sequence[BatchPart]) -> BatchPart:
    return pair[0] + pair[1]


class RecordingScope(WeightScope):
    """A stateless scope that records assigned variables, by `id`, and refuses assignments to trained weights."""

    def __init__(self, mapping: Sequence[tuple[keras.Variable, tf.Tensor]], weights: Sequence[keras.Variable]):
        super().__init__(mapping, collect_losses=True)
        self.assigned: dict[int, keras.Variable] = {}
        self._weights = set(map(id, weights))

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable = update[0]
        if id(variable) in self._weights:
            raise IndivisibleError(
                f"The step assigns to {variable.path}, which is trained, as keras.layers.SpectralNormalization does. "
                "Each part of a batch would assign to it. Leave deterministic out."
            )
        self.assigned[id(variable)] = variable
        super().add_update(update)


def _seed_of_part(seed: keras.Variable, number: tf.Tensor) -> tf.Tensor:
    """The state of a seed generator in a part. Each part draws random numbers of its own."""
    value = tf.convert_to_tensor(seed.value)
    return value + tf.cast(tf.stack([number * tf.constant(_BETWEEN_SEEDS, tf.uint32), 0]), value.dtype)


def _assign_on_all(variable: keras.Variable, value: tf.Tensor) -> None:
    """Assigns a value that is the same on all replicas. Averaging it, as Keras does, would round."""
    if not isinstance(variable.value, tf.distribute.DistributedValues):
        variable.assign(value)
        return
    extended = tf.distribute.get_strategy().extended

    def assign(per_replica: Callable[..., Any], values: Any) -> None:
        extended.update(variable.value, lambda local, new: local.assign(new), args=(values,), group=False)

    cross_replica(assign, value)
