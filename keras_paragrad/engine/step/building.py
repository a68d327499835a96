"""Builds models, losses, metrics and optimizers before steps, and checks how they were built."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.collectives import as_on_replica, replica_count, replicas_are_local
from keras_paragrad.compat.data import EpochIterator, first_batch, loses_prefetched_batches
from keras_paragrad.compat.model import (
    all_layers,
    optimizers_of,
    other_optimizers,
    overrides_compute_loss,
    overrides_train_step,
    train_step_of,
)
from keras_paragrad.compat.operations import Variable
from keras_paragrad.compat.optimizer import build_optimizer, held_optimizers
from keras_paragrad.compat.private import FuncGraph, SymbolicScope, compute_output_spec
from keras_paragrad.compat.process_patch import ProcessPatch, Replacement
from keras_paragrad.compat.state import MethodPatch, patched
from keras_paragrad.compat.types import Batch, Specs
from keras_paragrad.engine.step.interception import capturing_applies
from keras_paragrad.engine.tracing.announcing import announcing
from keras_paragrad.engine.tracing.untouched import untouched
from keras_paragrad.engine.trials.trial import SIZES, run_trial, synthetic_rows
from keras_paragrad.storage.reading import zeros_in_place_of_shards
from keras_paragrad.storage.storage import any_divided
from keras_paragrad.storage.updating import check_optimizer_of_shards, install_storages

_MIRRORED = (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy)


def build_by_calling(layer: keras.layers.Layer, *arguments: Any, **keywords: Any) -> None:
    """Builds a layer and its sublayers, unless they are built, by a call on symbolic tensors."""
    if layer.built and all(inner.built for inner in layer._flatten_layers()):
        return

    compute_output_spec(layer, *keras.tree.map_structure(_of_any_size, arguments), **keywords)


def _of_any_size(tensor: tf.Tensor | np.ndarray | keras.KerasTensor | None) -> keras.KerasTensor | None:
    """A symbolic tensor with any number of rows, as weights depend on an example's shape only."""
    if tensor is None:  # an optional input
        return None
    return keras.KerasTensor((None, *tensor.shape[1:]), keras.backend.standardize_dtype(tensor.dtype))


def has_build(layer: keras.layers.Layer) -> bool:
    """Whether a layer's class defines `build`."""
    return type(layer).build is not keras.layers.Layer.build


def build_from_data(model: keras.Model, iterator: EpochIterator | None = None, data_batch: Batch = None) -> None:
    """Builds what Keras's `_maybe_symbolic_build` builds, from one replica's rows of the first batch.

    The first batch is the iterator's, or else `data_batch`. Keras averages the replicas' batches to read their shape,
    which fails if their sizes differ.
    """
    if all(layer.built for layer in model._flatten_layers()) and is_fully_built(model):
        return
    strategy = model.distribute_strategy
    if iterator is not None:
        data_batch = _first_batch(iterator)

    local = keras.tree.map_structure(lambda tensor: strategy.experimental_local_results(tensor)[0], data_batch)
    data_batch = keras.tree.map_structure(_of_any_size, local)
    with announcing("building the model"), as_on_replica(strategy), _optimizer_left_to_step(model):
        try:
            model._symbolic_build(data_batch=data_batch)
        except Exception:
            # A custom `train_step` need not call the model.
            if not overrides_train_step(model):
                raise
            build_layers_by_step(model, data_batch)


def _optimizer_left_to_step(model: keras.Model) -> contextlib.AbstractContextManager[object]:
    """Context in which Keras doesn't build the optimizer. A custom `train_step` may update only some weights."""
    if not overrides_train_step(model) or model.optimizer is None or model.optimizer.built:
        return contextlib.nullcontext()
    return patched(model, lambda: _ReplacedBuild([model.optimizer], lambda build, variables: None))


class _ReplacedBuild(MethodPatch):
    """Makes `build` of optimizers call a function, with the original `build` and the variables."""

    def __init__(self, optimizers: Sequence[keras.optimizers.Optimizer], build: Callable[..., None]):
        super().__init__()
        self.optimizers, self.build = optimizers, build

    def patch_all(self) -> None:
        for optimizer in self.optimizers:
            self.replace(optimizer, "build", functools.partial(self.build, optimizer.build))


def build_layers_by_step(model: keras.Model, data: Batch) -> None:
    """Builds layers and metrics by a run of the model's own `train_step`: on two synthetic rows, without an update."""
    # Compiled losses and metrics create their variables in their first call.
    compiled = [container for container in (model._compile_loss, model._compile_metrics) if container is not None]
    built = all(layer.built for layer in all_layers(model))
    if built and all(container.built for container in compiled):
        return
    strategy = model.distribute_strategy
    specs = keras.tree.map_structure(_spec, data)

    def build(size: int) -> None:
        rows = synthetic_rows(specs, 2, seed=0, size=size)
        with (
            zeros_in_place_of_shards(),
            as_on_replica(strategy),
            capturing_applies(lambda *call: None),
            _WITHOUT_UPDATES.open(replica_count()),
        ):
            train_step_of(model)(rows)

    run_trial(build, *SIZES, otherwise=None, question=None if built else "which weights train_step makes")


def _spec(tensor: Any) -> Any:
    return None if tensor is None else tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype)


def _gradient_or_zeros(
    replicas: int,
    original: Callable[..., Any],
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `tape.gradient`, which is `original`, while a step is built: returns zeros for several replicas.

    Mirrored variables have no gradient outside of their replicas. No update uses the zeros.
    """
    if replicas == 1:
        return original(tape, target, sources, *args, **kwargs)
    return tf.nest.map_structure(lambda source: tf.zeros(source.shape, source.dtype), sources)


# While it is open, with the number of replicas, variables are created but never assigned.
_WITHOUT_UPDATES = ProcessPatch[int](
    lambda: (
        Replacement(Variable, "assign", lambda replicas, original, variable, value: variable),
        Replacement(tf.GradientTape, "gradient", _gradient_or_zeros),
    )
)


def losses_built(model: keras.Model) -> bool:
    """Whether a model's compiled losses, if any, are built."""
    return model._compile_loss is None or model._compile_loss.built


def build_losses(model: keras.Model, data: Batch, *, metrics: bool = False) -> None:
    """Builds the compiled losses, and with `metrics` the compiled metrics, from a batch or a slice.

    It is called before a step or within it.
    """
    compiled = model._compile_metrics if metrics else None
    if losses_built(model) and (compiled is None or compiled.built):
        return
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    # The model is built before the graph below, which would own the variables.
    build_by_calling(model, x)
    scope = keras.StatelessScope(collect_losses=True)
    # The losses need the structure of the outputs, so the model is called in a graph that never runs.
    with (
        FuncGraph("losses").as_default(),
        SymbolicScope(),
        untouched(model, scope, but=(model._compile_loss, model._compile_metrics)),
    ):
        y_pred = model(x)
        if not losses_built(model):
            if overrides_compute_loss(model):
                model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=False)
            else:
                model._compile_loss(y, y_pred, sample_weight)
        if compiled is not None and not compiled.built:
            compiled.build(y, y_pred)


def build_losses_of(model: keras.Model, spec: Specs) -> bool:
    """Builds the compiled losses and metrics from nested `tf.TensorSpec`; returns `False` for other specs."""
    specs = keras.tree.flatten(spec)
    if not all(type(leaf) is tf.TensorSpec for leaf in specs):
        return False
    with FuncGraph("batch").as_default():
        data = keras.tree.map_structure(lambda leaf: tf.compat.v1.placeholder(leaf.dtype, leaf.shape), spec)
        build_losses(model, data, metrics=True)
    return True


def is_fully_built(model: keras.Model) -> bool:
    """Whether a model's compiled metrics, losses and optimizer are built."""
    parts = (model._compile_metrics, model._compile_loss, model.optimizer)
    return all(part is None or part.built for part in parts)


def _first_batch(iterator: EpochIterator) -> Batch:
    """Reads the first batch. If the data adapter can peek, `fit` reads that batch again."""
    first = getattr(iterator.data_adapter, "first_batch", None)
    if first:
        return first()
    if loses_prefetched_batches(iterator.data_adapter):
        return first_batch(iterator.data_adapter)
    for _, _, batches in iterator:
        return next(batches)
    raise ValueError("The data has no batches. Pass fit() data with at least one.")


def check_compiled_in_scope(model: keras.Model) -> None:
    """Refuses a model built in a strategy's scope whose optimizer or metrics were created outside of it."""
    if not isinstance(model.distribute_strategy, _MIRRORED):
        return
    if outside := [
        optimizer.name for optimizer in other_optimizers(model) if not all(map(_is_distributed, _counters(optimizer)))
    ]:
        raise ValueError(
            f"{', '.join(outside)}, optimizers of {model.name!r}, were created outside of the scope that it was built "
            "in, so that each replica would count an update. Create them in `with dist.scope():` as well."
        )
    if not all(map(_is_distributed, [*_counters(model.optimizer), *model.metrics_variables])):
        raise ValueError(
            f"{model.name!r} was built within a scope and compiled outside of it, so that its optimizer or metrics are "
            "on one device. Write `with dist.scope(): model.compile(...)`, and create the optimizer and metrics there "
            "as well, also in a callback."
        )


def _counters(optimizer: keras.optimizers.Optimizer | None) -> list[keras.Variable]:
    # Under Keras's own accumulation, `iterations` isn't a variable.
    counters = [held.iterations for held in held_optimizers(optimizer)]
    return [counter for counter in counters if isinstance(counter, keras.Variable)]


def _is_distributed(variable: keras.Variable) -> bool:
    return isinstance(variable.value, tf.distribute.DistributedValues)


def build_optimizers_outside_of_graphs(model: keras.Model) -> contextlib.AbstractContextManager[object]:
    """Context of a custom `train_step` in which the model's optimizers create their variables eagerly.

    In a graph, optimizers would create variables in a branch, which TensorFlow can't do on several devices.
    """
    if replica_count() == 1 or not replicas_are_local() or tf.executing_eagerly():
        return contextlib.nullcontext()

    def build_eagerly(build: Callable[..., None], variables: Sequence[keras.Variable]) -> None:
        with tf.init_scope():
            build(variables)

    unbuilt = [optimizer for optimizer in optimizers_of(model) if not optimizer.built]
    return patched(model, lambda: _ReplacedBuild(unbuilt, build_eagerly))


def build_for(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Checks an optimizer, builds it, and makes it update variables by their storages."""
    if any_divided(variables):
        check_optimizer_of_shards(optimizer)
    if not optimizer.built:
        strategy = tf.distribute.get_strategy()

        def build_in_scope() -> None:
            with strategy.scope():
                build_optimizer(optimizer, variables)

        # TensorFlow refuses to make variables in a thread that retraces a function.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(build_in_scope).result()
    install_storages(optimizer, variables)
