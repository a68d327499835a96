"""The exact data-parallel step: what makes `fit` on replicas take the step of one device."""

import contextlib
import functools
import inspect
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad._keras.losses.normalization import LossNormalization
from keras_paragrad._keras.objects.capabilities import accumulating
from keras_paragrad._keras.objects.model import all_layers, has_own_predict
from keras_paragrad._keras.replicas.local import place_of
from keras_paragrad._keras.replicas.prepared import distributing_by, spread_over_replicas, uninstall
from keras_paragrad._keras.step.stages import Take
from keras_paragrad._keras.step.uncut import Foreseen
from keras_paragrad.distribution.alike import SAME_CODE, ComparedFit
from keras_paragrad.distribution.data import DistributedData, distributed_dataset

_log = logging.getLogger("keras_paragrad")


class Preparation:
    """A model whose `fit`, `evaluate` and `predict` on replicas give what one device gives on whole batches.

    What a replica's part of a batch counts for is measured, so that uneven and weighted parts are exact; gradients are
    added up before they are clipped; a `LossScaleOptimizer` sees every replica's gradients; metrics are those of all
    examples; with `jit_compile=True` each replica's forward and backward pass is compiled by XLA.

    Args:
        model: A compiled model, made under a strategy's scope or without one.
        exact: Whether replicas' gradients are weighed and added up before they are clipped.
        weighting: What a part of a batch counts for: `"auto"`, or for a `compute_loss` of your own `"examples"`,
            `"sample_weight"`, `"mask"` or `"sum"`. See `AccumulatingOptimizer`.
        jit: Whether to compile with XLA; as the model was compiled, if `None`.
        shard_policy: How several workers share data that `fit` and `evaluate` are given as they are.

    Raises:
        ValueError: There are several replicas, and the model has a `train_step` or loss of its own, so that what a part
            of its batch counts for can't be known. The message says what to write. On one replica, it is logged.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        exact: bool = True,
        weighting: str = "auto",
        jit: bool | None = None,
        shard_policy: str = "auto",
    ) -> None:
        self.model: Any = model
        self.exact = exact
        self._jit_compile = self.model.jit_compile
        replicas = self.model.distribute_strategy.num_replicas_in_sync
        measure = self._measure(weighting) if exact else None
        foreseen = Foreseen(measure, "is trained on one replica. Two") if measure and replicas == 1 else None
        if foreseen:
            foreseen.check(model)
        elif measure:
            measure.check(model)
            self._warn_of_batch_statistics()
        if jit is not None:
            self.model.jit_compile = jit
        by_xla = replicas > 1 and bool(self.model.jit_compile) and not self._reduces_in_the_forward_pass()
        several = place_of(self.model.distribute_strategy).workers > 1
        compared = ComparedFit.of(model, shard_policy) if several else None
        spread_over_replicas(
            model, Take(None if foreseen else measure, by_xla, foreseen), compared.cut if compared else None
        )
        if compared:
            self.model.__dict__["fit"] = compared
            self.model.__dict__["predict"] = functools.partial(_predict_in_order, model)

    def undo(self) -> None:
        """Gives the model its own methods and settings back."""
        self.model.jit_compile = self._jit_compile
        for method in ("fit", "predict"):
            self.model.__dict__.pop(method, None)
        uninstall(self.model)

    def _measure(self, weighting: str) -> LossNormalization:
        accumulator = accumulating(self.model.optimizer)
        stated = accumulator.weighting if accumulator else "auto"
        # Uniform micro-batches count the same, but replicas have uneven parts of them.
        return LossNormalization(weighting if stated in ("auto", "uniform") else stated, "DistributedFit")

    def _warn_of_batch_statistics(self) -> None:
        names = [layer.name for layer in self._batch_normalizations() if not layer.synchronized]
        if names:
            warnings.warn(
                f"{', '.join(names)} normalize by the statistics of one replica's part of a batch, so that training is "
                "not that of the whole batch. Write BatchNormalization(synchronized=True), or set trainable=False.",
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


def _predict_in_order(
    model: Any,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """What `predict` does on several workers: TensorFlow itself deals rows out to them by turns."""
    strategy = model.distribute_strategy
    if isinstance(x, DistributedData) or not has_own_predict(model):
        if not isinstance(x, DistributedData):
            x = distributed_dataset(strategy, x, batch_size=batch_size, steps_per_epoch=steps)
        return type(model).predict(model, x, verbose=verbose, steps=steps, callbacks=callbacks)
    # It makes a dataset of what it is given, and that is cut up.
    given = {"batch_size": batch_size, "verbose": verbose, "steps": steps, "callbacks": callbacks}
    usual = inspect.signature(keras.Model.predict).parameters
    own = {name: value for name, value in given.items() if value is not usual[name].default}
    model.make_predict_function()
    with distributing_by(model, lambda data: distributed_dataset(strategy, data, steps_per_epoch=steps)):
        return type(model).predict(model, x, **own)


@contextlib.contextmanager
def building_together(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """The strategy's scope; if a model can't be built within it because workers differ, says so.

    Raises:
        RuntimeError: TensorFlow failed while several workers made variables, which they make together.
    """
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        # TensorFlow's default strategy can't be entered within the scope of another.
        yield
        return
    try:
        with strategy.scope():
            yield
    except tf.errors.OpError as error:
        if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise
        raise RuntimeError(
            "This worker could not make its part of the model. The workers make every variable together: either one of "
            f"them has died, or their models differ.{SAME_CODE} TensorFlow says: {error.message[:500]}"
        ) from error


def check_scope(model: Any, strategy: tf.distribute.Strategy) -> None:
    """Refuses a model that is not compiled, or was made under another strategy.

    Raises:
        ValueError: It is one. The message says what to write.
    """
    if not model.compiled:
        raise ValueError("The model has not been compiled. Write model.compile(...) before dist.prepare(model).")
    found = model.distribute_strategy
    if found is not strategy and (found.num_replicas_in_sync, strategy.num_replicas_in_sync) != (1, 1):
        raise ValueError(
            f"The model was made under {type(found).__name__}, and is to be trained under {type(strategy).__name__}. "
            "Build and compile it within `with dist.scope():`."
        )
