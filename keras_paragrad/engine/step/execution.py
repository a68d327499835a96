"""The train function, which `fit` calls with an iterator: runs compiled steps on batches.

for each call, with the next `steps_per_execution` batches of the iterator:
    before an epoch's first batch, ask again how batches are divided: the function may be made anew     (renew)
    take the batches that a resumed training has seen                                                   (seen)
    plan which of the others end with an update                                                         (stages.apply)
    before a step is traced, find how its batches are divided                                           (prepare)
    prove it on the batches of the first update, before their steps run                                 (proof)
    run a step on each: one that only accumulates, or one that ends with an update
    tell the schedule and the telemetry how many batches have run
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.collectives import first_replica_values
from keras_paragrad.compat.data import without_optionals
from keras_paragrad.compat.model import begins_epoch
from keras_paragrad.compat.private import NO_INLINE, reduce_per_replica
from keras_paragrad.compat.types import Batch, BatchIterator, Specs, Step, StepLogs, TrainFunction
from keras_paragrad.engine.batches.replica_batch import divide_batch, explain_different_rows, rows_of
from keras_paragrad.engine.losses.dividers import IndivisibleError
from keras_paragrad.engine.step.stages import Split, Stages
from keras_paragrad.engine.telemetry.train_functions import LATEST, batch_spec
from keras_paragrad.engine.telemetry.watch import updates_each_batch
from keras_paragrad.engine.tracing.announcing import announcing, announcing_part
from keras_paragrad.engine.tracing.effects import draws_from_graph
from keras_paragrad.engine.tracing.gradient_functions import releasing

# Raises or warns. It is called after the step is traced, whose own errors say more.
PostTraceCheck = Callable[[], None]
# Gets a batch before its step is traced. What it returns is called after the trace, before the step runs.
Check = Callable[[Batch], PostTraceCheck | None]
# Maps an iterator, and whether each batch ends with an update, to the last batch's logs; `None` without a batch.
Execute = Callable[[BatchIterator, list[bool]], StepLogs | None]
# TensorFlow quotes an assertion's message, but cuts long ones.
_TOO_LARGE = "keras_paragrad: a batch is larger than a slice"


class Proof(Protocol):
    """Compares the parts of the first batches with the whole batches."""

    @property
    def pending(self) -> bool:
        """Whether another batch is needed."""
        ...

    def __call__(self, batch: Batch, update: bool) -> PostTraceCheck | None:
        """Gets a batch before its step is traced; `update` says whether the step ends with an update."""
        ...


class SeenBatches:
    """Batches that a train function reads without training on them; `left` of them are still to come."""

    def __init__(self):
        self.left = 0
        self._then: Callable[[Batch], None] | None = None

    def expect(self, batches: int, then: Callable[[Batch], None] | None = None) -> None:
        """Skips the next batches, and then calls `then` with the last of them."""
        self.left, self._then = batches, then

    def skip(self, iterator: Any, limit: int) -> int:
        """Reads up to `limit` of the batches to skip, and returns how many it has read."""
        skipped, batch = min(self.left, limit), None
        try:
            for _ in range(skipped):
                batch = iterator.get_next() if hasattr(iterator, "get_next") else next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            # Otherwise the model's next `fit` would skip the rest.
            self.left = 0
            raise ValueError(
                "The data ended before the batch at which training was to resume. Give fit the data, batch_size and "
                "steps_per_epoch that it had, or give Backup another directory to begin anew."
            ) from None
        self.left -= skipped
        if skipped and not self.left and self._then:
            then, self._then = self._then, None
            then(batch)
        return skipped


class StepExecution(NamedTuple):
    """How steps of a model are compiled and run on the batches of an iterator.

    Attributes:
        model: The model. Its `jit_compile`, `run_eagerly` and `steps_per_execution` apply.
        stages: The filled stages. Those within a step are run by the step itself.
        seen: The batches to skip.
        why_whole: Returns why a batch that is larger than a slice can't be trained on, or `None`.
        prepare: Called before a step may be traced, with the iterator and the specs of a replica's batches.
        proof: Gets the first batch, or the batches of the first update, before their steps run.
        renew: Called first in each call. Returns a new train function if batches are to be divided in another way.
    """

    model: keras.Model
    stages: Stages
    seen: SeenBatches | None = None
    why_whole: Callable[[], str | None] = lambda: None
    prepare: Callable[[Any, Specs], None] | None = None
    proof: Proof | None = None
    renew: Callable[[], TrainFunction | None] | None = None

    def function(self, steps: Sequence[Step], watched: Sequence[Step] = ()) -> TrainFunction:
        """Makes a function for `model.train_function` that runs one of several compiled steps on each batch.

        The host picks the step, outside of the compiled code, so the other steps cost nothing.

        Args:
            steps: One step; or two, without and with an update: the *apply* stage chooses.
            watched: The steps of calls that telemetry watches.
        """
        model, schedule, telemetry, split = self.model, self.stages.apply, self.stages.telemetry, self.stages.split
        in_graph = model.distribute_strategy.num_replicas_in_sync == 1 and not self.stages.mesh

        def compiled(steps: Sequence[Step]) -> tuple[Execute, Execute, list[CompiledStep]]:
            """Runs several batches: of TensorFlow's iterators, or of any iterator. Also returns the compiled steps."""
            functions = [CompiledStep(self, step) for step in steps]
            by_host = _by_host(self, functions)
            return _in_graph(model, functions) if in_graph else by_host, by_host, functions

        plain = compiled(steps)
        watching = compiled(watched) if watched else plain
        has_run = False

        def train_function(iterator: BatchIterator) -> StepLogs:
            nonlocal has_run
            with contextlib.nullcontext() if has_run else announcing("tracing, compiling, running the first step"):
                logs = run_call(iterator)
            has_run = True
            return logs

        def run_call(iterator: BatchIterator) -> StepLogs:
            if self.renew and (function := self.renew()):
                return function(iterator)
            skipped = self.seen.skip(iterator, model.steps_per_execution) if self.seen else 0
            if schedule and skipped:
                schedule.skipped(skipped)
            batches = model.steps_per_execution - skipped
            if not batches:
                return {}
            updates = schedule.plan(batches) if schedule else [False] * batches
            watches = False
            if telemetry and not skipped:
                each = batches if updates_each_batch(model.optimizer) else None
                watches = telemetry.wants(sum(updates) if schedule else each)
            # After skipped batches, fewer are left than `_in_graph` runs.
            of_tensors = isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)) and not skipped
            if self.prepare and of_tensors and not model.run_eagerly:
                with announcing_part("finding how batches are divided"):
                    self.prepare(iterator, keras.tree.map_structure(_without_optional, batch_spec(iterator)))
            within, by_host, functions = watching if watches else plain
            try:
                with self.stages.running():
                    proves = self.proof is not None and self.proof.pending
                    # Another graph would repeat the random numbers that the first batch, which ran alone, has drawn.
                    alone = proves or not of_tensors or any(step.draws for step in functions)
                    logs = (by_host if alone else within)(iterator, updates)
            except tf.errors.InvalidArgumentError as error:
                explain_different_rows(error)
                if split and _TOO_LARGE in error.message and (refusal := self.why_whole()):
                    raise IndivisibleError(f"{split.refusal_prefix} {refusal}") from None
                raise
            if schedule:
                schedule.ended(batches, exhausted=logs is None)
            if logs is None:
                if not skipped:
                    check_not_dry(model)
                raise StopIteration
            if telemetry and watched and not skipped:
                latest: Any = logs.pop(LATEST, None)
                telemetry.ran(watches, batches, latest)
            return logs

        return train_function


class CompiledStep:
    """Runs a replica's step on all replicas, as a function that TensorFlow never inlines.

    An inlined step could advance its counters for a batch that turns out not to exist. The model's `jit_compile` and
    `run_eagerly` apply.
    """

    def __init__(self, execution: StepExecution, step: Step):
        model, stages = execution.model, execution.stages
        strategy = model.distribute_strategy
        several = strategy.num_replicas_in_sync > 1

        def one_step(data: Batch) -> StepLogs:
            logs = strategy.run(step, args=(data,))
            if stages.take:
                return first_replica_values(strategy, logs)
            return reduce_per_replica(logs, strategy, reduction="auto")

        if not model.run_eagerly:
            one_step = tf.function(
                releasing(one_step),
                # DTensor knows static shapes only.
                reduce_retracing=stages.mesh is None,
                # XLA can't compile collectives between these devices.
                jit_compile=model.jit_compile
                and not stages.by_xla_alone(model, strategy.num_replicas_in_sync)
                and not (stages.take and several),
                autograph=False,
                experimental_attributes={NO_INLINE: True},
            )
        checked = _checking_size(model, stages.split, execution.why_whole, one_step) if stages.split else one_step
        compiled = without_optionals(model, checked)
        self._run = stages.mesh(compiled) if stages.mesh else compiled
        self._function: Any = one_step
        # Whether batches are arguments of a `tf.function`. On a mesh, TensorFlow can't pass them.
        self._in_functions = not stages.mesh and not model.run_eagerly
        self._get_next = tf.function(
            releasing(lambda iterator: iterator.get_next()), reduce_retracing=True, autograph=False
        )
        self._take = tf.function(
            releasing(lambda iterator: self(iterator.get_next())), reduce_retracing=True, autograph=False
        )
        # The iterator for which the step was last traced, and whether Python passes its batches to the step.
        self._iterator: Callable[[], object] = lambda: None
        self._through_python = True
        # Whether the traced step draws random numbers from states of its graph, which begin anew in another graph.
        self.draws = False

    def __call__(self, data: Batch) -> StepLogs:
        return self._run(data)

    def run_next(self, iterator: Any, check: Check | None = None) -> StepLogs:
        """Runs the step on the next batch. It is traced for the iterator's specs, and not for the batch's shape.

        A function that gets the batch and runs the step would store the step's graph twice: 5 kB per operation.
        """
        if check is not None or not self._in_functions:
            with announcing_part("waiting for the first batch"):
                batch = iterator.get_next()
            return self.run_checked(batch, check, functools.partial(self._trace, iterator))
        self._trace(iterator)
        return self(self._get_next(iterator)) if self._through_python else self._take(iterator)

    def run_checked(self, batch: Batch, check: Check | None, trace: Callable[[], object] | None = None) -> StepLogs:
        """Calls `check`, traces the step, and runs it. Without `trace`, it is traced for the batch's shape."""
        with announcing_part("proving on the first batch how it is divided"):
            conclude = check(batch) if check else None
        if trace:
            trace()
        elif self._in_functions:
            self._function.get_concrete_function(batch)
        if conclude:
            with announcing_part("proving states and metrics on the first batch"):
                conclude()
        return self(batch)

    def _trace(self, iterator: Any) -> None:
        """Traces the step for an iterator's batches, once. A step on a mesh, or in eager mode, isn't traced here."""
        if not self._in_functions or self._iterator() is iterator:
            return
        self._iterator = weakref.ref(iterator)
        spec = keras.tree.map_structure(_without_optional, iterator.element_spec)
        # TensorFlow loses the inner dimensions of empty ragged tensors that pass through Python.
        self._through_python = not any(map(_is_ragged, keras.tree.flatten(spec)))
        if self._through_python:
            with announcing_part("tracing the step"):
                graph = self._function.get_concrete_function(spec).graph
            self.draws = self.draws or draws_from_graph(graph.get_operations())


def _without_optional(spec: Specs) -> Specs:
    """Replaces the spec of an optional by `None`, which a step gets for an optional without a value."""
    return None if isinstance(spec, tf.OptionalSpec) else spec


def _is_ragged(spec: Specs) -> bool:
    return any(isinstance(part, tf.RaggedTensorSpec) for part in getattr(spec, "_value_specs", (spec,)))


def check_not_dry(model: keras.Model) -> None:
    """Refuses an epoch that ends without a batch: Keras shows losses of 0.0 for it."""
    if begins_epoch(inspect.currentframe(), model):
        raise without_batches(model)


def without_batches(model: keras.Model) -> ValueError:
    """The error for an epoch or evaluation without a batch."""
    return ValueError(
        f"The data has no batch left for this epoch or evaluation of {model.name!r}, for which Keras shows losses of "
        "0.0. A generator that ends can be read once: pass a tf.data.Dataset or a keras.utils.PyDataset, or a "
        "generator that begins again (`while True:`) with steps_per_epoch=... or validation_steps=...."
    )


def _in_graph(model: keras.Model, steps: Sequence[CompiledStep]) -> Execute:
    """Makes a function that runs all batches of a call in one graph."""
    per_call = model.steps_per_execution

    # `steps` has one step; or one that only accumulates, and then one that ends with an update.
    def pick(update: tf.Tensor, data: Batch) -> StepLogs:
        return steps[0](data) if len(steps) == 1 else tf.cond(update, lambda: steps[1](data), lambda: steps[0](data))

    def take(iterator: Any, updates: tf.Tensor) -> StepLogs:
        logs = pick(updates[0], iterator.get_next())
        if per_call == 1:
            return logs

        def next_batch(index: tf.Tensor, logs: StepLogs, _: tf.Tensor):
            batch = iterator.get_next_as_optional()
            return tf.cond(
                batch.has_value(),
                lambda: (index + 1, pick(updates[index], batch.get_value()), True),
                lambda: (index, logs, False),
            )

        def more(index: tf.Tensor, _: StepLogs, has_batch: tf.Tensor):
            return tf.logical_and(index < per_call, has_batch)

        return tf.while_loop(more, next_batch, (tf.constant(1), logs, tf.constant(True)), parallel_iterations=1)[1]

    if not model.run_eagerly:
        take = tf.function(releasing(take), reduce_retracing=True, autograph=False)

    def execute(iterator: BatchIterator, updates: list[bool]) -> StepLogs | None:
        try:
            return take(iterator, tf.constant(updates))
        except tf.errors.OutOfRangeError:
            return None

    return execute


def _by_host(execution: StepExecution, steps: Sequence[CompiledStep]) -> Execute:
    """Makes a function that runs batches one by one from Python, as `tf.cond` can't contain collectives."""
    strategy, proof, take = execution.model.distribute_strategy, execution.proof, execution.stages.take
    parts = take.ordered.parts if take and take.ordered else None

    def take_next(iterator: BatchIterator) -> Batch:
        # `train_on_batch` and `test_on_batch` have Python's iterators.
        batch = next(iterator)
        if take and strategy.num_replicas_in_sync > 1:
            return divide_batch(strategy, batch, parts)
        return keras.tree.map_structure(
            lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, batch
        )

    def execute(iterator: BatchIterator, updates: list[bool]) -> StepLogs | None:
        logs = None
        for update in updates:
            step = steps[update]
            check = functools.partial(proof, update=update) if proof and proof.pending else None
            try:
                if hasattr(iterator, "get_next"):
                    logs = step.run_next(iterator, check)
                else:
                    batch = take_next(iterator)
                    logs = step.run_checked(batch, check) if check else step(batch)
            except (StopIteration, tf.errors.OutOfRangeError):
                break
        return logs

    return execute


def _checking_size(model: keras.Model, split: Split, why_whole: Callable[[], str | None], step: Step) -> Step:
    """Makes a step check that a batch fits in a slice. XLA would drop assertions within the compiled step."""

    def check(data: Batch) -> None:
        tf.debugging.Assert(rows_of(data) <= split.size, [_TOO_LARGE])

    @functools.partial(tf.function, reduce_retracing=True, autograph=False)
    def check_all(data: Batch) -> None:
        model.distribute_strategy.run(check, args=(data,))

    def checked(data: Batch) -> StepLogs:
        if why_whole():
            check_all(data)
        return step(data)

    return checked
