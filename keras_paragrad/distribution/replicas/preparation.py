"""The exact data-parallel step: makes `fit` on replicas take the step of one device."""

import functools
import inspect
import logging
import warnings
from collections.abc import Callable
from typing import Any

import keras

from keras_paragrad.compat.capabilities import accumulating, accumulation_steps
from keras_paragrad.compat.local import place_of
from keras_paragrad.compat.model import all_layers, check_no_row_states, has_own_predict, has_own_train_step
from keras_paragrad.compat.workers import barrier
from keras_paragrad.distribution.consistency import ComparedFit
from keras_paragrad.distribution.data import DistributedData, distributed_dataset
from keras_paragrad.distribution.preparation import Preparation
from keras_paragrad.engine.losses.normalization import LossNormalization
from keras_paragrad.engine.replicas.prepared import distributing_by, spread_over_replicas, uninstall
from keras_paragrad.engine.step.indivisible import DeferredRefusal
from keras_paragrad.engine.step.stages import Take
from keras_paragrad.storage.creation import may_be_in_shards
from keras_paragrad.storage.updating import overridden_method

_log = logging.getLogger("keras_paragrad")


class ReplicaPreparation(Preparation):
    """A model whose `fit`, `evaluate` and `predict` on replicas give the results of one device on whole batches.

    Each replica's shard is weighted by its loss normalizer, so uneven and weighted shards are exact; gradients are
    all-reduced before they are clipped; if any replica overflows under a `LossScaleOptimizer`, all skip the update;
    metrics cover all examples; with `jit_compile=True` each replica's forward and backward pass is compiled by XLA.

    Args:
        model: A compiled model, built with or without a strategy's scope.
        exact: Whether gradients are weighted and all-reduced before they are clipped.
        weighting: The weight of a shard: `"auto"`, or for a custom `compute_loss` `"examples"`, `"sample_weight"`,
            `"mask"` or `"sum"`. See `AccumulatingOptimizer`.
        jit: Whether to compile with XLA; if `None`, as the model was compiled.
        shard_policy: How several workers share data that is passed to `fit` and `evaluate` unsharded.

    Raises:
        ValueError: There are several replicas, and the model has a custom `train_step` or loss, so the weight of a
            shard is unknown. The message says what to write. On one replica, this is logged.
    """

    changes_in_place = True

    def __init__(
        self,
        model: keras.Model,
        exact: bool = True,
        weighting: str = "auto",
        jit: bool | None = None,
        shard_policy: str = "auto",
    ):
        super().__init__(model, exact, weighting, jit, shard_policy)

    def renew(self) -> None:
        model = self.model
        exact, weighting, jit, shard_policy = self.settings
        _check_shards(model)
        replicas = model.distribute_strategy.num_replicas_in_sync
        if replicas > 1:
            check_no_row_states(
                model, f"each of {replicas} replicas gets", 'train on one device: DistributedFit("none")'
            )
        measure = self._measure(weighting) if exact else None
        deferred_refusal = (
            DeferredRefusal(measure, "is trained on one replica. Two") if measure and replicas == 1 else None
        )
        if deferred_refusal:
            deferred_refusal.check(model)
        elif measure:
            measure.check(model)
            self._warn_of_batch_statistics()
        if jit is not None:
            self.set_jit_compile(jit)
        by_xla = replicas > 1 and bool(model.jit_compile) and not self._reduces_in_the_forward_pass()
        several = place_of(model.distribute_strategy).workers > 1
        compared = ComparedFit.of(model, shard_policy) if several else None
        spread_over_replicas(
            model,
            Take(None if deferred_refusal else measure, by_xla, deferred_refusal),
            compared.sharded if compared else None,
        )
        if compared:
            evaluate = functools.partial(_with_barrier, type(model).evaluate, model)
            predict = functools.partial(_with_barrier, _predict_in_order, model)
            self.replace(fit=compared, evaluate=evaluate, predict=predict)

    def stop(self) -> None:
        uninstall(self.model)

    def _measure(self, weighting: str) -> LossNormalization:
        accumulator = accumulating(self.model.optimizer)
        stated = accumulator.weighting if accumulator else "auto"
        # Even if micro-batches are weighted uniformly, replicas have uneven shards of them.
        return LossNormalization(weighting if stated in ("auto", "uniform") else stated, "DistributedFit")

    def _warn_of_batch_statistics(self) -> None:
        names = [layer.name for layer in self._batch_normalizations() if not layer.synchronized]
        if names:
            warnings.warn(
                f"{', '.join(names)} normalize each replica's shard by its own statistics, so training differs from "
                "that on the whole batch. Write BatchNormalization(synchronized=True), or set trainable=False.",
                stacklevel=4,
            )

    def _reduces_in_the_forward_pass(self) -> bool:
        names = [layer.name for layer in self._batch_normalizations() if layer.synchronized]
        if names:
            _log.warning(
                "%s: statistics are all-reduced in the forward pass, which XLA can't compile, so this model is trained "
                "without it.",
                ", ".join(names),
            )
        return bool(names)

    def _batch_normalizations(self) -> list[keras.layers.BatchNormalization]:
        layers = all_layers(self.model)
        return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable]


def _with_barrier(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = method(*args, **kwargs)
    barrier()
    return result


def _predict_in_order(
    model: Any,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """`predict` on several workers, with rows in order: TensorFlow's own sharding interleaves them."""
    strategy = model.distribute_strategy
    if isinstance(x, DistributedData) or not has_own_predict(model):
        if not isinstance(x, DistributedData):
            x = distributed_dataset(strategy, x, batch_size=batch_size, steps_per_epoch=steps)
        return type(model).predict(model, x, verbose=verbose, steps=steps, callbacks=callbacks)
    # An overridden `predict` makes its own dataset, which is then sharded.
    given = {"batch_size": batch_size, "verbose": verbose, "steps": steps, "callbacks": callbacks}
    usual = inspect.signature(keras.Model.predict).parameters
    own = {name: value for name, value in given.items() if value is not usual[name].default}
    model.make_predict_function()
    with distributing_by(model, lambda data: distributed_dataset(strategy, data, steps_per_epoch=steps)):
        return type(model).predict(model, x, **own)


def _check_shards(model: Any) -> None:
    """Refuses what would read or update shards as if they were whole."""
    if not may_be_in_shards(model):
        return
    if has_own_train_step(model):
        raise ValueError(
            f"{type(model).__name__} defines its own train_step, which hands the optimizer whole gradients, and this "
            "optimizer updates shards. Move what train_step does into compute_loss, or write DistributedFit(..., "
            "shard=None)."
        )
    optimizer = model.optimizer
    if accumulation_steps(optimizer) > 1:
        raise ValueError(
            f"{optimizer.name} accumulates gradients itself (gradient_accumulation_steps), in a branch in which "
            "TensorFlow can't scatter them. Remove that argument, and compile with AccumulatingOptimizer(optimizer, "
            f"steps={accumulation_steps(optimizer)})."
        )
    if own := overridden_method(optimizer):
        raise ValueError(
            f"{own} is an optimizer's own, and would be given shards in place of whole gradients and weights. Move "
            "what it does into update_step, as keras.optimizers.Optimizer documents it, which is given whole ones; or "
            "write DistributedFit(..., shard=None)."
        )
