"""Batches in a fixed number of parts, whose sums are added in one order: the same bits on any number of replicas."""

import contextlib
from collections.abc import Generator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import (
    replica_count,
    replica_index,
    replicas_are_traced_apart,
)
from keras_paragrad.compat.types import Batch, Structure
from keras_paragrad.compat.workers import first_row, parts_per_replica
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch, cut_rows_of
from keras_paragrad.engine.calls.replicas import update_metrics_of
from keras_paragrad.engine.losses.divisors import Normalizer
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.losses.sums import LossSums
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.step.batch_part import BatchPart
from keras_paragrad.engine.step.gradient import Gradient, StepContext, call_in_function, forward_backward
from keras_paragrad.engine.step.part_function import PartFunction, join_outputs
from keras_paragrad.engine.step.stages import ComputeLosses

_ANY_ROWS = 2**31 - 1
# The option that turns off TensorFlow's graph optimizers: in a large graph, they merge sums of parts.
_NO_REWRITING = "disable_meta_optimizer"


def enable_determinism() -> None:
    """Makes TensorFlow's operations deterministic: the same bits in each run of this process."""
    tf.config.experimental.enable_op_determinism()


class FixedParts(NamedTuple):
    """Fills the *split* stage: parts of a batch that are the same wherever they are computed.

    Attributes:
        parts: The number of parts of every batch.
        normalize: Computes the weight of a part.
        prove: Whether the first batch must prove that its parts give the same results as the whole.
        most_rows: The most rows that a part may have.
        by_xla: Whether XLA compiles parts.
        for_replicas: Advice, for the error on replicas that don't get whole parts.
        replicas: The number of replicas among which the parts are divided.
    """

    parts: int
    normalize: LossNormalization
    prove: bool = True
    most_rows: int = _ANY_ROWS
    by_xla: bool = False
    for_replicas: str = ""
    replicas: int = 1

    def on_replicas(self, replicas: int, *, prove: bool, by_xla: bool) -> "FixedParts":
        """The same parts, divided among `replicas` replicas."""
        return self._replace(replicas=replicas, prove=prove, by_xla=by_xla)

    @property
    def size(self) -> int:
        """The most rows that a part may have."""
        return self.most_rows

    @property
    def refusal_prefix(self) -> str:
        """The first sentence of the error for a batch that can't be cut."""
        return f"With deterministic={self.parts} every batch is computed in {self.parts} parts."

    def part_rows(self, rows: int) -> int:
        """The number of rows of the largest part, for a replica batch of `rows` rows."""
        return max(1, -(-rows // min(self.parts, parts_per_replica(self.parts, self.replicas))))

    def cuts(self, data: Batch) -> bool:
        """Every batch is cut."""
        return True

    @property
    def refusal_of_calls(self) -> str:
        """Why calls of layers aren't divided: the sums of their parts aren't added in a fixed order."""
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
        return call_in_function(BatchPart.finish, total, by_xla=False)._replace(reduced=True)

    def evaluate(self, model: keras.Model, batch: ReplicaBatch, data: Batch, compute: ComputeLosses) -> LossSums:
        """The losses of the whole batch, on every replica; updates the metrics."""

        def evaluated(context: StepContext, data: Batch) -> tuple[Gradient, Structure]:
            y_pred, losses = compute(data)
            # Nothing uses the weight.
            return Gradient([None] * len(model.trainable_weights), None, Normalizer(tf.constant(1.0)), losses), y_pred

        part = PartFunction(StepContext(model, batch, by_xla=self.by_xla), self.parts, evaluated)
        return self._total(part, batch, data).losses

    def _total(self, part: PartFunction, batch: ReplicaBatch, data: Batch) -> BatchPart:
        """The sums over all parts of a batch, on every replica; adds to the states of metrics and layers."""
        self._check_replicas()
        parts, outputs = list[BatchPart](), list[Structure]()
        for number, bounds in self._bounds(batch, data):
            # One after the other: a device has memory for one part.
            with tf.control_dependencies([previous.weight.value for previous in parts[-1:]]):
                computed, of_part = part(data, number, *bounds)
            parts.append(computed)
            outputs.append(of_part)
        total = part.add_in_order(parts)
        if replica_count() > 1:
            total = part.add_in_order(total.by_replica())
        part.assign(total.effects)
        if part.whole_metrics:
            update_metrics_of(part.model, arguments_of(data, join_outputs(outputs)), batch)
        return total

    def _check_replicas(self) -> None:
        """Refuses replicas that don't get whole parts."""
        if replica_count() > 1 and not replicas_are_traced_apart():
            raise IndivisibleError(
                f"deterministic={self.parts} needs a program for each replica, and TensorFlow traces one for all cores "
                "of a TPU. Leave it out on TPUs."
            )
        if replica_count() != self.replicas:
            raise IndivisibleError(
                f"The batches of {replica_count()} replicas aren't divided into {self.parts} parts. {self.for_replicas}"
            )

    def _bounds(self, batch: ReplicaBatch, data: Batch) -> list[tuple[int, tuple[Any, Any]]]:
        """For each part that this replica computes: its number in the batch, and its first row and row count here.

        A replica beyond the last part computes that part without rows.
        """
        count = parts_per_replica(self.parts, replica_count())
        first = min(replica_index() * count, self.parts - 1)
        count = max(1, min(count, self.parts - replica_index() * count))
        # A replica without rows has a filler, which isn't an example.
        rows = cut_rows_of(data) if batch.nonempty is None else batch.rows
        if self.most_rows < _ANY_ROWS:
            _check_size(rows, count, self.most_rows, self.parts)
        firsts = [first_row(rows, part, count) for part in range(count + 1)]
        return [(first + part, (firsts[part], firsts[part + 1] - firsts[part])) for part in range(count)]


def _check_size(rows: tf.Tensor | int, count: int, most_rows: int, parts: int) -> None:
    """Refuses parts that are larger than stated."""
    largest = -(-rows // count)
    message = (
        f"A batch in deterministic={parts} parts has parts of more than size={most_rows} rows. Write a larger size, a "
        f"smaller batch_size, or deterministic={2 * parts}."
    )
    if isinstance(largest, int):
        if largest > most_rows:
            raise ValueError(message)
    else:
        tf.debugging.Assert(largest <= most_rows, [message])
