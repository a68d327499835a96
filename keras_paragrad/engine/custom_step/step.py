"""`CustomStep`: runs a custom `train_step` exactly in slices, on replicas or on a window's micro-batches.

A window is the micro-batches between two updates of an accumulating optimizer. A phase is a pass over all slices; see
`keras_paragrad.engine.custom_step.analysis`.
"""

import contextlib
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import as_one_replica, replica_count, sum_over_replicas
from keras_paragrad.compat.model import train_step_of
from keras_paragrad.compat.optimizer import build_optimizer, find_accumulator
from keras_paragrad.compat.state import log_once
from keras_paragrad.compat.types import Batch, Gradients, StepLogs
from keras_paragrad.engine.custom_step.analysis import ApplyCall, StepAnalysis, analyze_step
from keras_paragrad.engine.custom_step.run import SlicedStep, next_call
from keras_paragrad.engine.custom_step.versions import PhaseScope, WeightVersions, make_variables, suspended_scope
from keras_paragrad.engine.custom_step.weighting import find_step_weightings, sums_in_step
from keras_paragrad.engine.losses.log_reducer import LogReducer, reducing_metrics
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.number_updates import counting_numbers
from keras_paragrad.engine.losses.part_numbers import SliceNumbers
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.losses.weightings import WEIGHTINGS, Weighting, weighting_of
from keras_paragrad.engine.replicas.replica_batch import ReplicaBatch
from keras_paragrad.engine.step.apply import Contribution, apply_gradient
from keras_paragrad.engine.step.building import build_layers_by_step
from keras_paragrad.engine.step.interception import capturing_applies
from keras_paragrad.engine.step.stages import BatchSlices
from keras_paragrad.storage.row_gradients import scale_gradients
from keras_paragrad.storage.storage import any_divided
from keras_paragrad.storage.updating import check_optimizer_of_shards, install_storages


class CustomStep:
    """A custom `train_step`, analyzed for one signature of the data, weighting and divider.

    `data` has the shapes and dtypes of a batch or a slice. With the weighting `"auto"`, a trial finds the losses'
    divisors.

    Raises:
        IndivisibleError: The step can't be divided.
    """

    def __init__(self, model: keras.Model, data: Batch, normalize: LossNormalization):
        self.model = model
        build_layers_by_step(model, data)
        self.analysis: StepAnalysis = analyze_step(model, data)
        self.weightings, self.scalars = find_step_weightings(
            model, self.analysis, data, _stated(normalize), normalize.divider
        )
        # Whether to sum numbers in the logs that are neither known sums nor known means.
        self.summed = all(weighting.divisor is None for weighting in self.weightings)
        log_once(model, self.describe())
        prepare_optimizers(self.analysis.calls)
        self.versions = WeightVersions(self.analysis)

    @property
    def calls(self) -> list[ApplyCall]:
        """The step's optimizer calls."""
        return self.analysis.calls

    def describe(self) -> str:
        """Describes how the step is divided."""
        pairs = zip(self.calls, self.weightings, strict=True)
        listed = "; ".join(
            f"{call.optimizer.name}: {weighting.name}, phase {call.phase + 1}" for call, weighting in pairs
        )
        name = type(self.model).__name__
        return f"The train_step of {name} is divided. Parts of a batch are weighted by: {listed}."

    def run_in_slices(self, slices: BatchSlices, batch: Batch, replica_batch: ReplicaBatch) -> StepLogs:
        """Runs the step on the slices of a batch or replica batch, and returns its logs."""
        self._check_slices()
        weights = _BatchWeights(batch, replica_batch, self.weightings)

        def update(call: ApplyCall, gradients: Gradients) -> None:
            # Slices are weighted by the batch of all replicas.
            gradients = replica_batch.gradients(gradients)
            apply_gradient(call.optimizer, call.variables, gradients, whole=True)

        analyzed = self.model, self.analysis, self.versions, self.weightings
        sliced = SlicedStep(*analyzed, weights.share, update, self.scalars, self.summed)
        if replica_count() == 1:
            return sliced.run(slices)
        with as_one_replica():
            reducer = self._log_reducer(batch, replica_batch)
            logs = sliced.run(slices, lambda: reducing_metrics(reducer, updates=False), replica_batch.nonempty)
        flat = keras.tree.flatten(logs)
        averaged = [index for index, log in enumerate(self.analysis.logs) if log and log.by_slice]
        for index, total in zip(averaged, sum_over_replicas([flat[index] for index in averaged]), strict=True):
            flat[index] = total
        return keras.tree.pack_sequence_as(logs, flat)

    def run_whole(
        self,
        data: Batch,
        replica_batch: ReplicaBatch,
        end: Callable[[], None] | None = None,
        *,
        in_window: bool = False,
    ) -> StepLogs:
        """Runs the step on a whole (replica) batch, and updates with the gradients of all replicas; returns its logs.

        In a window, `end` updates the weights after the last micro-batch. For the others it is `None`: then the step's
        assignments have no effect, except for states with `by_slice`, such as metrics and seeds.
        """
        if in_window:
            self._check_window()
        batch = replica_batch.filled(data)
        weights = _BatchWeights(batch, replica_batch, self.weightings)
        # Holds the step's assignments, unless the micro-batch ends the window.
        scope = PhaseScope([], self.versions, 0, last=False) if in_window and not end else None

        def run() -> StepLogs:
            calls, weightings = iter(self.analysis.calls), iter(self.weightings)

            def apply(optimizer: keras.optimizers.Optimizer, gradients: Gradients, variables: object) -> None:
                call = next_call(self.model, calls, optimizer)
                with not_capturing(), suspended_scope():
                    weights.apply(call, next(weightings), gradients)
                    if end:
                        end()
                if scope:
                    scope.advance(call.variables)

            with capturing_applies(apply) as not_capturing:
                return train_step_of(self.model)(batch)

        reducer = self._log_reducer(batch, replica_batch)
        if not in_window:
            return reducer.run(run)
        rows = tf.cast(replica_batch.rows, "float32")
        numbers = SliceNumbers(self.model, rows, self.scalars, summed=False, in_window=True)
        with scope or contextlib.nullcontext(), counting_numbers(self.model, numbers):
            logs = run() if replica_count() == 1 else reducer.run(run, updates=False)
        for state in self.analysis.states:
            if scope and state.by_slice:
                state.variable.assign(scope.value_of(state.variable))
        return logs

    def _check_slices(self) -> None:
        """Refuses logs that are computed both from a metric's result and from rows."""
        mixed = [log.mixed for log in self.analysis.logs if log and log.mixed]
        if mixed:
            raise IndivisibleError(
                f"The train_step of {type(self.model).__name__} returns {', '.join(mixed)}, computed from the result "
                "of a metric and from the rows of the batch: the last slice alone would be shown. Return both by "
                "themselves, or update a metric with what is computed from the rows."
            )

    def _check_window(self) -> None:
        """Refuses steps whose micro-batches can't be accumulated: with several updates, or by another optimizer."""
        name, optimizers = type(self.model).__name__, [call.optimizer for call in self.analysis.calls]
        if len(optimizers) > 1 or self.analysis.phases > 1:
            raise IndivisibleError(
                f"The train_step of {name} updates weights {len(optimizers)} times, or computes something from updated "
                "ones, so its micro-batches can't be accumulated one after the other. Leave AccumulatingOptimizer and "
                "ExactAccumulation out, and write keras_paragrad.microbatch(model, size), which runs slices of a batch "
                "once for each update."
            )
        if optimizers[0] is not self.model.optimizer:
            raise IndivisibleError(
                f"The train_step of {name} updates weights with {optimizers[0].name!r}, and model.optimizer, which "
                "accumulates, is another. Use self.optimizer in train_step, or write keras_paragrad.microbatch(model, "
                "size)."
            )

    def _log_reducer(self, batch: Batch, replica_batch: ReplicaBatch) -> LogReducer:
        return LogReducer(
            self.model, batch, replica_batch, None, [], summed=self.summed, scalars=self.scalars, exact=True
        )


def run_inexact_step(model: keras.Model, data: Batch) -> StepLogs:
    """Runs a custom `train_step` on a replica, and updates with the mean or sum of the replicas' gradients.

    Gradients are summed if a loss is found to be a sum over the rows. (Keras sums all gradients, and divides its own
    losses.) Numbers in the logs are summed, or averaged weighted by examples: as a trial finds, or else equally.
    """
    sums, scalars = sums_in_step(model, data)
    calls = iter(sums)

    def capture(optimizer: keras.optimizers.Optimizer, gradients: Gradients, variables: list[keras.Variable]) -> None:
        factor = tf.constant(1.0 if next(calls, False) else 1 / replica_count())
        with not_capturing():
            optimizer.apply(scale_gradients(gradients, variables, factor), variables)

    summed = bool(sums) and all(sums)
    reducer = LogReducer(model, data, ReplicaBatch.of(data), None, [], summed=summed, scalars=scalars)
    with capturing_applies(capture) as not_capturing:
        return reducer.run(lambda: model.train_step(data))


class _BatchWeights:
    """The weights of a replica batch and its slices in the batch of all replicas."""

    def __init__(self, batch: Batch, replica_batch: ReplicaBatch, weightings: Sequence[Weighting]):
        self.batch, self.replica_batch = batch, replica_batch
        divided = {
            weighting.name: weighting for weighting in (WEIGHTINGS["examples"], *weightings) if weighting.divisor
        }
        # Sum here and not in `share`: TensorFlow can't run collectives in a loop over slices.
        totals = sum_over_replicas([self.divisor(weighting, batch) for weighting in divided.values()])
        self._totals = dict(zip(divided, totals, strict=True))

    def divisor(self, weighting: Weighting, rows: Batch) -> tf.Tensor:
        """The divisor of some rows: zero on a replica without rows."""
        assert weighting.divisor, "sums are not divided"
        return self.replica_batch.weight(weighting.divisor(arguments_of(rows)))

    def share(self, weighting: Weighting, rows: Batch) -> tf.Tensor:
        """The weight of some rows in the batch of all replicas."""
        if weighting.divisor is None:
            return tf.constant(1.0)
        return tf.math.divide_no_nan(self.divisor(weighting, rows), self._totals[weighting.name])

    def apply(self, call: ApplyCall, weighting: Weighting, gradients: Gradients) -> None:
        """Updates with the sum of all replicas' weighted gradients, or accumulates it in the optimizer's window."""
        gradients, contribution = self.replica_batch.gradients(gradients), None
        if find_accumulator(call.optimizer) is None:
            gradients = scale_gradients(gradients, call.variables, self.share(weighting, self.batch))
        elif weighting.divisor is None:
            contribution = Contribution.of(WEIGHTINGS["sum"].normalizer({}))
        else:
            divisor = self.divisor(weighting, self.batch)
            contribution = Contribution(divisor, divisor)
        apply_gradient(call.optimizer, call.variables, gradients, contribution, whole=True)


def step_signature(data: Batch, normalize: LossNormalization) -> tuple[object, ...]:
    """The cache key of an analysis: the weighting, the divider, and the shapes and dtypes of rows."""
    rows = (leaf if leaf is None else (leaf.dtype, *leaf.shape[1:]) for leaf in keras.tree.flatten(data))
    return normalize.weighting, normalize.divider, *rows


def prepare_optimizers(calls: Sequence[ApplyCall]) -> None:
    """Checks and builds the optimizers that a step calls, and installs the weights' storages in them."""
    for call in calls:
        if any_divided(call.variables):
            check_optimizer_of_shards(call.optimizer)
    make_variables(lambda: [build_optimizer(call.optimizer, call.variables) for call in calls])
    for call in calls:
        install_storages(call.optimizer, call.variables)


def _stated(normalize: LossNormalization) -> Weighting | None:
    """The weighting that the user states, or `None` if it is to be found."""
    if normalize.weighting == "mask":
        raise IndivisibleError(
            "weighting='mask' needs the outputs of the model, which a custom train_step keeps to itself. Write "
            f"{normalize.divider.configured_by}(..., weighting='auto'), 'examples', 'sample_weight', 'sum', or a "
            "function of (x, y, y_pred, sample_weight), where y_pred is None."
        )
    return weighting_of(normalize.weighting)
