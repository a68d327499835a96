"""Evaluates and predicts on replicas: every example once, and in order.

for each batch to evaluate, on each replica:
    compute the losses of this replica's rows, or of a padding row if there is none
    update metrics with the replica's rows, or if they aren't Keras's, with all rows
    sum numerators, divisors and states over the replicas
if the first batch shows that the losses of parts differ: run `test_step` on the whole batch, and divide calls
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import as_one_replica, replica_count, sum_over_replicas
from keras_paragrad.compat.compiled_call import compile_by_layer
from keras_paragrad.compat.data import without_optionals
from keras_paragrad.compat.layers import call_model
from keras_paragrad.compat.model import overrides_predict_step, overrides_test_step
from keras_paragrad.compat.state import log_once, warn_once
from keras_paragrad.compat.types import Batch, StepLogs, Structure, TrainFunction
from keras_paragrad.compat.workers import gather, local_replica_values, worker_strategy
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch, rows_of
from keras_paragrad.engine.calls.replicas import update_metrics_of
from keras_paragrad.engine.losses.dividers import IndivisibleError
from keras_paragrad.engine.losses.logs import (
    AllReducedResults,
    LossSums,
    TrackedLosses,
    loss_sums,
    metrics_result,
    update_metrics,
)
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.losses.terms import arguments_of, compute_loss
from keras_paragrad.engine.proof.call_trials import CallTrials
from keras_paragrad.engine.proof.division import DividedLoss
from keras_paragrad.engine.proof.first_batch import (
    ELSEWHERE,
    Answer,
    are_needless,
    as_stated,
    ask,
    build,
    of_layers,
    of_loss,
    part_size,
)
from keras_paragrad.engine.proof.model_proof import PartsOfBatch
from keras_paragrad.engine.step.building import build_by_calling, losses_built
from keras_paragrad.engine.step.execution import StepExecution
from keras_paragrad.engine.step.gradient import in_function
from keras_paragrad.engine.step.stages import Stages, Take
from keras_paragrad.engine.tracing.gradient_functions import releasing
from keras_paragrad.engine.training.whole_step import CallDivider
from keras_paragrad.engine.trials.trial import local_rows
from keras_paragrad.storage.gathering import compiles_each_layer, gather_before_pass


def build_test_function(model: keras.Model, take: Take) -> TrainFunction:
    """Builds `model.test_function`."""
    # The first batch shows whether the replicas' losses give the whole batch's.
    proof, loss = EvaluationProof(model, take), DividedLoss(model)

    def step(data: Batch) -> StepLogs:
        if overrides_test_step(model):
            return _test_whole(model, data, proof.entered)
        replica_batch = ReplicaBatch.of(data)
        filled = replica_batch.filled(data)
        loss_divisor = take.ordered.loss_divisor if take.ordered else take.loss_divisor
        if (
            loss_divisor
            and loss_divisor.weighting == "auto"
            and (replica_count() > 1 or take.ordered)
            and (proof.whole_losses or loss.find_refusal(loss_divisor, None, filled, training=False))
        ):
            if take.ordered:
                raise IndivisibleError(
                    "The loss compares examples of different parts of a batch. Evaluate without deterministic: call "
                    "undo() of what dist.prepare(model) returned."
                )
            return _test_whole(model, data, proof.entered)
        if take.ordered:
            compute = functools.partial(_compute_losses, model, loss_divisor=loss_divisor)
            # Each part is a function of its own, in which weights can't be gathered.
            with gather_before_pass(model):
                sums = take.ordered.evaluate(model, replica_batch, filled, compute)
            return _results(model, TrackedLosses(model, sums, same=True))
        evaluate = _compiled_alone(functools.partial(_compute_losses, loss_divisor=loss_divisor), take)
        y_pred, sums = evaluate(model, filled)
        sums = sums.zero_unless(replica_batch.nonempty)
        batch = arguments_of(filled, y_pred)
        update_metrics_of(model, batch, replica_batch)
        return _results(model, TrackedLosses(model, sums))

    return StepExecution(model, Stages(take=take, split=take.ordered), proof=proof).function([step])


def _test_whole(model: keras.Model, data: Batch, entered: Mapping[int, str] | None) -> StepLogs:
    """Runs the model's `test_step` on the whole batch, with the calls of layers divided between the replicas."""
    if replica_count() == 1:
        return model.test_step(data)
    return CallDivider(model, None, entered).run(model.test_step, data)


def _results(model: keras.Model, losses: TrackedLosses) -> StepLogs:
    """The logs of all replicas, after each has updated metrics with its own examples."""
    shared = AllReducedResults(model, losses)
    return shared.results(sum_over_replicas(shared.parts))


def static_test_step(model: keras.Model, data: Batch) -> StepLogs:
    """A `test_step` for batches of a static size. Unlike Keras's, it doesn't weight losses by the static size."""
    y_pred, sums = _compute_losses(model, data, None, divided=True)
    TrackedLosses(model, sums).track()
    update_metrics(model, arguments_of(data, y_pred))
    return metrics_result(model)


def build_predict_function(model: keras.Model, take: Take) -> Callable[[list[Batch]], Structure]:
    """Builds `model.predict_function`."""
    strategy = model.distribute_strategy

    def step(data: Batch) -> Structure:
        if overrides_predict_step(model):
            return model.predict_step(data)
        replica_batch = ReplicaBatch.of(data)
        outputs = _compiled_alone(_predict, take)(model, replica_batch.filled(data))
        return replica_batch.drop_padding(outputs)

    def predict_batch(batch: Batch) -> Structure:
        outputs = strategy.run(without_optionals(model, step), args=(batch,))
        if strategy.num_replicas_in_sync == 1:
            return outputs
        return keras.tree.map_structure(lambda output: _gather(strategy, output), outputs)

    if not model.run_eagerly:
        predict_batch = tf.function(releasing(predict_batch), reduce_retracing=True, autograph=False)

    def predict(batches: list[Batch]) -> Structure:
        if take.by_xla:
            # XLA can't create variables on several devices.
            x = keras.utils.unpack_x_y_sample_weight(batches[0])[0]
            with strategy.scope():
                build_by_calling(model, keras.tree.map_structure(lambda leaf: local_replica_values(leaf)[0], x))
        outputs = [predict_batch(batch) for batch in batches]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    return predict


def _gather(strategy: tf.distribute.Strategy, output: Any) -> tf.Tensor:
    """Concatenates an output over the replicas."""
    parts = strategy.experimental_local_results(output)
    if not isinstance(parts[0], tf.RaggedTensor):
        return strategy.gather(output, axis=0)
    if len(parts) < strategy.num_replicas_in_sync:
        raise ValueError(
            "The model predicts ragged tensors, which several workers can't gather. Let it predict dense ones: end it "
            "with keras.layers.Lambda(lambda x: x.to_tensor(shape=...))."
        )
    return tf.concat(parts, 0)


# Maps a model and data to nested tensors, and objects that are known once it is traced.
ModelFunction = Callable[[keras.Model, Batch], Any]


def _compiled_alone(function: ModelFunction, take: Take) -> ModelFunction:
    """The function, or if `take` says so, one that XLA compiles on each of several replicas."""
    if not take.by_xla or replica_count() == 1:
        return function

    def compiled(model: keras.Model, data: Batch) -> Any:
        if compiles_each_layer(model):
            with compile_by_layer():
                return function(model, data)
        with gather_before_pass(model):
            return in_function(functools.partial(function, model))(data)

    return compiled


def _compute_losses(
    model: keras.Model, data: Batch, loss_divisor: LossDivisor | None, *, divided: bool = False
) -> tuple[Structure, LossSums]:
    with as_one_replica():
        loss, arguments, terms = compute_loss(model, data, training=False)
    weight = loss_divisor.in_evaluation(model, arguments, terms) if loss_divisor else None
    return arguments["y_pred"], loss_sums(model, loss, terms, rows_of(arguments["x"]), weight, divided=divided)


def _predict(model: keras.Model, data: Batch) -> Structure:
    return call_model(model, keras.utils.unpack_x_y_sample_weight(data)[0], training=False)


class EvaluationProof:
    """Compares parts with the whole once, before the first batch is evaluated."""

    def __init__(self, model: keras.Model, take: Take):
        self.model, self._take = model, take
        # Whether the loss of parts differs, so that it is computed on the outputs of whole batches.
        self.whole_losses = False
        # For layers whose calls aren't divided, by id, the reason; `None` until calls are tried.
        self.entered: Mapping[int, str] | None = None
        several = model.distribute_strategy.num_replicas_in_sync > 1
        self._loss_divisor = take.ordered.loss_divisor if take.ordered else take.loss_divisor
        self._proves = take.prove and self._loss_divisor is not None and bool(several or take.ordered)

    @property
    def pending(self) -> bool:
        """Whether the first batch is still to come."""
        if self._proves and losses_built(self.model) and are_needless(self.model, self._loss_divisor):
            self._proves = overrides_test_step(self.model)
        return self._proves

    def __call__(self, batch: Batch, update: bool) -> None:
        """Gets the first batch before its step is traced. Ignores `update`."""
        self._proves = False
        model, loss_divisor, rows = self.model, self._loss_divisor, local_rows(batch)
        assert loss_divisor is not None
        answer = Answer()
        if not overrides_test_step(model) and rows is not None:
            build(model, rows)
            size, _ = part_size(model, Stages(take=self._take), batch)
            parts = PartsOfBatch(loss_divisor, size, in_sequence=False, on_replicas=True, training=False)
            answer = ask([*of_layers(model, rows, parts), *of_loss(model, rows, parts)])
        auto = loss_divisor.weighting == "auto"
        if overrides_test_step(model) or auto:
            self.entered = CallTrials(model, model.test_step, rows).find()
        differs = bool(gather(worker_strategy(model), [int(bool(answer.found))]).any())
        self.whole_losses = auto and differs
        if self.whole_losses:
            reason = answer.found or ELSEWHERE
            log_once(model, f"{reason}, so the loss of {model.name!r} is computed on the outputs of whole batches.")
        elif answer.difference:
            warn_once(model, as_stated(answer.difference, loss_divisor))
        elif answer.unproved:
            warn_once(model, answer.unproved)
