"""The training step of one replica.

if calls of layers are divided, or the model has a `train_step` of its own:
    run it as it is written, on the whole batch, or on the micro-batch of a window
otherwise run the stages:
    split, gradient, weigh: the gradient of the batch, or of its slices, weighted by what their losses divide by
    apply: hand it to the optimizer, which adds it to a window, or reduces, observes, transforms and applies it
    log: the losses and metrics of all replicas
"""

import contextlib
import functools
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, sum_over_replicas
from keras_paragrad.compat.compiled_call import compile_by_layer
from keras_paragrad.compat.model import all_layers, overrides_train_step, train_step_of
from keras_paragrad.compat.optimizer import find_accumulator
from keras_paragrad.compat.types import Batch, Gradients, Step, StepLogs
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch
from keras_paragrad.engine.calls.divided import RowSlices
from keras_paragrad.engine.losses.dividers import IndivisibleError
from keras_paragrad.engine.losses.divisors import Divisor
from keras_paragrad.engine.losses.logs import AllReducedResults, LossWindow, TrackedLosses, metrics_result
from keras_paragrad.engine.losses.terms import compute_loss
from keras_paragrad.engine.proof.division import Division, Divisions, explaining_rows
from keras_paragrad.engine.step.apply import Contribution, apply_gradient, apply_same
from keras_paragrad.engine.step.building import build_optimizers_outside_of_graphs
from keras_paragrad.engine.step.gradient import (
    Gradient,
    ReplicaWeight,
    StepContext,
    equal_share,
    gradient_of,
    scale_by_replica,
    track_loss,
)
from keras_paragrad.engine.step.interception import capturing_applies, noticing_applies
from keras_paragrad.engine.step.stages import Split, Stages
from keras_paragrad.engine.telemetry.watch import observe_before_all_reduce, refuse_unwatched
from keras_paragrad.engine.training.whole_step import CallDivider
from keras_paragrad.engine.training.window_step import WindowStep
from keras_paragrad.storage.gathering import compiles_each_layer, gather_before_pass
from keras_paragrad.storage.regathering import forget_gathers


class TrainStep(NamedTuple):
    """One replica's step on a batch, of which `division` says how it is divided.

    If the *apply* stage is filled, `window` has the losses of the micro-batches since the last update, and `update`
    says whether the step ends with an update.
    """

    model: keras.Model
    stages: Stages
    divisions: Divisions
    division: Division
    replica_batch: ReplicaBatch
    window: LossWindow | None
    update: bool

    def run(self, data: Batch) -> StepLogs:
        """Runs the stages on parts of the loss, or the model's `train_step` as it is written."""
        if self.division.calls or overrides_train_step(self.model):
            check = functools.partial(refuse_unwatched, self.model)
            with noticing_applies(check) if self.stages.telemetry else contextlib.nullcontext():
                logs = self._run_whole(data)
            # The backward pass of a custom step reuses gathered weights.
            forget_gathers()
            return logs
        logs = self._run_stages(data)
        self.end()
        return logs

    def _run_whole(self, data: Batch) -> StepLogs:
        """Runs the model's `train_step` on the whole batch. `division.calls` divides calls of layers."""
        with build_optimizers_outside_of_graphs(self.model), noticing_applies(self.divisions.note_call):
            if self.stages.apply:
                return self._in_window(data)
            if not self.division.calls:
                return self.model.train_step(data)
            divider = self._call_divider()
            logs = divider.run(train_step_of(self.model), data)
        if divider.refusal and self.stages.split and replica_count() == 1 and self.stages.split.cuts(data) is None:
            # Batches that fit in one slice are trained on.
            self.divisions.why_whole = divider.refusal
        elif divider.refusal:
            raise IndivisibleError(divider.refusal)
        return logs

    def _call_divider(self, **options: Any) -> CallDivider:
        in_xla = bool(self.model.jit_compile) and replica_count() == 1
        slices = RowSlices(self.stages.split.size, in_xla=in_xla) if self.stages.split and self.division.cut else None
        return CallDivider(self.model, slices, self.divisions.entered, by_xla=self._by_xla, **options)

    def _in_window(self, data: Batch) -> StepLogs:
        """Runs the custom `train_step` on a micro-batch of a window."""
        assert self.stages.apply
        # If every batch is a whole window, nothing has to be weighed.
        loss_divisor = None if self.stages.apply.always_whole else self.stages.weigh
        window, step = WindowStep(self.model, loss_divisor, self.update, self.end), train_step_of(self.model)
        with self._accumulating():
            if replica_count() > 1:
                divider = self._call_divider(apply=window.apply)
                logs = window.run(divider.run, step, data)
                if divider.refusal:
                    raise IndivisibleError(divider.refusal)
                return logs

            def run(step: Step, data: Batch) -> StepLogs:
                with capturing_applies(window.apply):
                    return step(data)

            return window.run(run, step, data)

    def end(self) -> None:
        """Ends a micro-batch, with or without an update."""
        if self.stages.apply:
            self.stages.apply.end(self.update)

    def _run_stages(self, data: Batch) -> StepLogs:
        several = replica_count() > 1
        replica_weight = ReplicaWeight(self.replica_batch) if several else None
        # An accumulating optimizer weights the replicas itself.
        weigh = None if self._accumulator else replica_weight
        context = StepContext(self.model, self.replica_batch, weigh_replica=weigh)
        # Split, gradient, weigh.
        gradient = self._gradient(context, self.replica_batch.filled(data))
        if (weigh or self.division.cut) and tf.executing_eagerly():
            _check_rows(self.model, data, gradient.gradients)
        losses = self._track_losses(gradient)
        # Whether gradients are all-reduced before the optimizer gets them.
        whole = gradient.weight is not None or self.stages.chain is not None
        if weigh and whole and not gradient.reduced:
            # The observer gets this replica's gradients without the factor of its loss.
            weight = gradient.weight
            factor = tf.constant(1.0) if weight is None else weigh(weight) / equal_share(weight)
            observe_before_all_reduce(self.model, gradient.gradients, factor)
        # Gradients, losses and metrics may share one collective.
        shared = AllReducedResults(self.model, losses) if self.stages.take and several else None
        if losses and shared is None:
            losses.track()
        contribution = self._contribution(gradient, replica_weight)
        # The optimizer runs observe, transform and apply: see `install_transform`.
        with self._accumulating():
            sums, optimizer, weights = None, self.model.optimizer, self.model.trainable_weights
            if gradient.reduced:
                apply_same(optimizer, gradient.gradients, weights, contribution)
            else:
                also = shared.parts if shared else ()
                sums = apply_gradient(
                    optimizer, weights, gradient.gradients, contribution, reduce_first=whole, also_reduce=also
                )
        # Log.
        if shared is None:
            return gradient.show() if gradient.show else metrics_result(self.model)
        return shared.results(sum_over_replicas(shared.parts) if sums is None else sums)

    @property
    def _accumulator(self) -> Any:
        return find_accumulator(self.model.optimizer)

    def _track_losses(self, gradient: Gradient) -> TrackedLosses | None:
        """The losses to log, or `None` where Keras tracks them."""
        if gradient.sums is not None:
            return TrackedLosses(self.model, gradient.sums, self.window, ends=self.update, same=gradient.reduced)
        if gradient.show is None and (loss := gradient.loss) is not None:
            self.replica_batch.run(lambda: track_loss(self.model, loss, self.replica_batch.rows))
        return None

    def _contribution(self, gradient: Gradient, replica_weight: ReplicaWeight | None) -> Contribution | None:
        """The contribution of a gradient to an accumulation window, on this replica."""
        weight = gradient.weight
        if weight is None or self._accumulator is None:
            return None
        if self._accumulator.weighting != "uniform":
            return Contribution.of(weight, same=gradient.reduced)
        if replica_weight is None or weight.summed or gradient.reduced:
            return None
        # All micro-batches count the same, so the weight is this replica's share of its micro-batch.
        return Contribution.of(Divisor(replica_weight(weight)))

    @property
    def _by_xla(self) -> bool:
        return self.stages.by_xla_alone(self.model, replica_count())

    @property
    def _by_layer(self) -> bool:
        """Whether XLA compiles each layer by itself, because collectives run between layers."""
        return self._by_xla and not self.stages.split and compiles_each_layer(self.model)

    def _accumulating(self) -> contextlib.AbstractContextManager[object]:
        return self.stages.apply.accumulate_only() if self.stages.apply else contextlib.nullcontext()

    def _gradient(self, context: StepContext, data: Batch) -> Gradient:
        """The gradient of a replica batch, summed over its slices if it is cut."""
        split, cut = self.stages.split, self.division.cut
        # TensorFlow can't all-gather weights within XLA, or in a loop over slices.
        gather_first = (self._by_xla and not self._by_layer) or split
        explained = explaining_rows(self.model, data, replica_count(), functools.partial(compute_loss, self.model))
        with (
            gather_before_pass(self.model) if gather_first else compile_by_layer(self._by_layer),
            explained if replica_count() > 1 or cut else contextlib.nullcontext(),
        ):
            if split is None or not cut:
                # A batch of one slice needs a weight only if it is accumulated with others.
                weighed = split if self._accumulator and not self.division.why_whole else None
                return gradient_of(self._context_of(context, weighed)._replace(whole=True), data)
            try:
                gradient = split(self._context_of(context._replace(weigh_replica=None), split), data)
            except IndivisibleError as refusal:
                raise IndivisibleError(f"{split.refusal_prefix} {refusal}") from None
            return scale_by_replica(self.model, gradient, context.weigh_replica)

    @property
    def _is_uniform(self) -> bool:
        """Whether `fit` accumulates micro-batches that all count the same, by `weighting="uniform"`."""
        accumulator = self._accumulator
        return (
            self.stages.apply is not None
            and self.stages.weigh is None
            and accumulator is not None
            and accumulator.weighting == "uniform"
            and not getattr(getattr(accumulator, "schedule", None), "is_always_one", False)
        )

    def _context_of(self, context: StepContext, split: Split | None = None) -> StepContext:
        """The context of a slice, or without `split`, of a whole batch."""
        loss_divisor = self.stages.loss_divisor(of_slices=split is not None)
        # Keras's trackers expect whole batches.
        partial = bool(split or self.stages.apply or self.stages.present or (self.stages.take and replica_count() > 1))
        inexact = loss_divisor is None and self.stages.take is not None and replica_count() > 1
        return context._replace(
            loss_divisor=loss_divisor,
            inexact=inexact,
            # On a mesh, the number of rows is static. Keras's trackers would weight output losses by it.
            sums=partial or self.stages.mesh is not None,
            uniform=self._is_uniform,
            present=self.stages.present,
            by_xla=self._by_xla and not self._by_layer,
        )


def _check_rows(model: keras.Model, data: Batch, gradients: Gradients) -> None:
    """Refuses sparse gradients in eager mode. Only a graph shows whether a part has summed a row's gradients."""
    sparse = any(isinstance(leaf, tf.SparseTensor) for leaf in keras.tree.flatten(data))
    sparse = sparse or any(getattr(layer, "sparse", False) for layer in all_layers(model))
    if sparse and any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        raise ValueError(
            f"{model.name} has sparse inputs, and run_eagerly=True hides whether a part of a batch has summed the "
            "gradients of a row. Write model.compile(..., run_eagerly=False), or run eagerly on one device, "
            "DistributedFit('none'), and without microbatch."
        )
