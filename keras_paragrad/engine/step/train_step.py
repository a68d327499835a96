"""The training step of one replica, put together from the stages that are filled."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.capabilities import Accumulating, accumulating
from keras_paragrad.compat.collectives import are_local, replica_count, sum_over_replicas
from keras_paragrad.compat.compiled_call import compiled_by_layer
from keras_paragrad.compat.method_patch import MethodPatch, patched
from keras_paragrad.compat.model import all_layers, check_no_row_states
from keras_paragrad.engine.losses.logs import SharedResults
from keras_paragrad.engine.losses.normalization import IndivisibleError
from keras_paragrad.engine.losses.own_logs import trained_by_own_step
from keras_paragrad.engine.losses.tracking import LossWindow, TrackedLosses
from keras_paragrad.engine.replicas.shard import Shard
from keras_paragrad.engine.step.apply import apply_gradient
from keras_paragrad.engine.step.forward import Normalizer, StepContext
from keras_paragrad.engine.step.gradient import (
    Gradient,
    ReplicaWeight,
    gradient_of,
    scaled,
    track_loss,
)
from keras_paragrad.engine.step.indivisible import IndivisibleBatchGuard
from keras_paragrad.engine.step.stages import Split, Stages
from keras_paragrad.engine.telemetry.observe import observe_before_sum
from keras_paragrad.storage.gathering import compiled_in_pieces, gathered_first


def built_outside_of_steps(model: Any) -> contextlib.AbstractContextManager[Any]:
    """While a step is traced in it, an optimizer of the model makes its variables outside of the graph.

    In a graph they would be made in a branch, which TensorFlow can't do on several devices.
    """
    if replica_count() == 1 or not are_local() or tf.executing_eagerly():
        return contextlib.nullcontext()
    return patched(model, lambda: _BuiltOutside(model))


class _BuiltOutside(MethodPatch):
    def __init__(self, model: Any):
        super().__init__()
        values = keras.tree.flatten([value for name, value in vars(model).items() if not name.startswith("_")])
        self.optimizers = [each for each in values if isinstance(each, keras.optimizers.Optimizer) and not each.built]

    def patch_all(self) -> None:
        for optimizer in self.optimizers:
            self.replace(optimizer, "build", _outside(optimizer.build))


def _outside(build: Callable[..., None]) -> Callable[..., None]:
    def built(variables: Any) -> None:
        with tf.init_scope():
            build(variables)

    return built


class TrainStep(NamedTuple):
    """What a model does with a replica's shard of a batch.

    Attributes:
        model: A compiled model.
        stages: What its stages are filled with.
        window: The losses of the micro-batches since the last update, with an *apply* stage.
        update: Whether the step ends with an update, with an *apply* stage.
        guard: How large batches may be that can't be cut, with a *split* stage.
    """

    model: Any
    stages: Stages
    window: LossWindow | None
    update: bool
    guard: IndivisibleBatchGuard

    def in_its_own_way(self, data: Any) -> dict:
        """Takes the step as the model's own `train_step` does, and returns its logs."""
        if self.stages.split:
            try:
                self.stages.split.normalize.check(self.model)
            except IndivisibleError as refusal:
                self.guard.leave_whole(data, refusal)
        if self.stages.chain and replica_count() > 1 and not self._accumulator:
            raise ValueError(
                f"{type(self.model).__name__} defines its own train_step, which applies each replica's gradients "
                "itself, so the gradient of the whole batch can't be transformed. Move what train_step does into "
                "compute_loss."
            )
        with self._gathering(), built_outside_of_steps(self.model):
            if self.stages.take and replica_count() > 1:
                return trained_by_own_step(self.model, data)
            return self.model.train_step(data)

    def __call__(self, data: Any, shard: Shard) -> dict:
        """Takes the step, and returns its logs.

        Args:
            data: A batch, as `train_step` takes it.
            shard: Whether there are examples in it.
        """
        sharing = ReplicaWeight(shard) if replica_count() > 1 else None
        # An accumulating optimizer weighs the replicas itself.
        context = StepContext(self.model, shard, weigh_replica=None if self._accumulator else sharing)
        gradient = self._gradient(context, shard.filled(data))
        if sharing and tf.executing_eagerly() and not self._accumulator:
            _check_rows(self.model, data, gradient.gradients)
        losses = None
        if gradient.sums is not None:
            losses = TrackedLosses(self.model, gradient.sums, self.window, ends=self.update)
        elif gradient.show is None and (loss := gradient.loss) is not None:
            shard.run(lambda: track_loss(self.model, loss, shard.rows))
        whole = gradient.weight is not None or self.stages.chain is not None
        if sharing and whole and not self._accumulator:
            weigh_replica = tf.constant(1.0) if gradient.weight is None else sharing(gradient.weight)
            observe_before_sum(self.model, gradient.gradients, weigh_replica)
        shown = SharedResults(self.model, losses) if self.stages.take and sharing else None
        if losses and shown is None:
            losses.track()
        weight = self._weight_in_window(gradient, sharing)
        with self._gathering():
            sums = apply_gradient(
                self.model, gradient.gradients, weight, whole=whole, beside=shown.parts if shown else ()
            )
        if shown is None:
            return gradient.show() if gradient.show else self.model.get_metrics_result()
        return shown.results(sum_over_replicas(shown.parts) if sums is None else sums)

    @property
    def _accumulator(self) -> Accumulating | None:
        return accumulating(self.model.optimizer)

    def _weight_in_window(self, gradient: Gradient, sharing: ReplicaWeight | None) -> Normalizer | None:
        """What a gradient counts for in an accumulation window, on this replica."""
        weight = gradient.weight
        if weight is None or self._accumulator is None or self._accumulator.weighting != "uniform":
            return weight
        if sharing is None or weight.summed:
            return None
        # Micro-batches are weighted uniformly; this replica has a share of one.
        return Normalizer(sharing(weight) / replica_count())

    @property
    def _by_layer(self) -> bool:
        """Whether XLA compiles layers one by one, as collectives stand between them."""
        return self._by_xla and not self.stages.split and compiled_in_pieces(self.model)

    @property
    def _by_xla(self) -> bool:
        return self.stages.by_xla_alone(self.model, replica_count())

    def _gathering(self) -> contextlib.AbstractContextManager[Any]:
        return self.stages.apply.gathering() if self.stages.apply else contextlib.nullcontext()

    def _gradient(self, context: StepContext, data: Any) -> Gradient:
        # TensorFlow can't gather weights inside of what XLA compiles, or in a loop over slices.
        apart = (self._by_xla and not self._by_layer) or self.stages.split
        with gathered_first(self.model) if apart else compiled_by_layer(self._by_layer):
            return self._of_batch(context, data)

    def _of_batch(self, context: StepContext, data: Any) -> Gradient:
        if self.stages.split:
            try:
                return self._in_slices(self.stages.split, context, data)
            except IndivisibleError as refusal:
                self.guard.leave_whole(data, refusal)
        return gradient_of(self._of_part(context), data)

    def _in_slices(self, split: Split, context: StepContext, data: Any) -> Gradient:
        split.normalize.check(self.model)
        if split.cuts(data) is False:
            # What is not cut needs no weight, but where it is accumulated with what has one.
            return gradient_of(self._of_part(context, split if self._accumulator else None), data)
        check_no_row_states(self.model, "slices are", "give batches that are one slice")
        gradient = split(self._of_part(context._replace(weigh_replica=None), split), data)
        return scaled(gradient, context.weigh_replica) if context.weigh_replica else gradient

    def _of_part(self, context: StepContext, split: Split | None = None) -> StepContext:
        """That of a slice, or without a `split` that of a batch that is not weighed."""
        normalize = self.stages.normalization(of_slices=split is not None)
        # Keras's trackers know nothing of a batch of which there are parts.
        parts = bool(split or self.stages.apply or self.stages.present or (self.stages.take and replica_count() > 1))
        deferred_refusal = None if normalize else self.stages.deferred_refusal
        return context._replace(
            normalize=normalize,
            # On a mesh the number of rows is static, and Keras's trackers would count by it.
            sums=parts or self.stages.mesh is not None,
            look=deferred_refusal and deferred_refusal.look,
            present=self.stages.present,
            by_xla=self._by_xla and not self._by_layer,
        )


def _check_rows(model: Any, data: Any, gradients: list[Any]) -> None:
    """Refuses gradients of rows of which only a graph shows whether each replica has summed them."""
    sparse = any(isinstance(leaf, tf.SparseTensor) for leaf in keras.tree.flatten(data))
    sparse = sparse or any(getattr(layer, "sparse", False) for layer in all_layers(model))
    if sparse and any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        raise ValueError(
            f"{model.name} has sparse inputs, and run_eagerly=True hides whether a replica has summed the gradients of "
            "a row. Write model.compile(..., run_eagerly=False), or run eagerly on one device: DistributedFit('none')."
        )
