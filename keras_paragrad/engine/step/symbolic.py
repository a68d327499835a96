"""Builds models, losses and metrics from the shapes of data, before the first step."""

from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec
from keras.src.backend.common.symbolic_scope import SymbolicScope
from keras.src.utils.python_utils import is_default
from tensorflow.python.framework.func_graph import FuncGraph

from keras_paragrad.compat.data import counts_readers, first_batch
from keras_paragrad.compat.model import all_layers, has_own_compute_loss, has_own_train_step
from keras_paragrad.engine.probes.untouched import untouched


def build_by_calling(layer: keras.layers.Layer, *arguments: Any, **keywords: Any) -> None:
    """Builds a layer and its sublayers, by a call on symbolic tensors of its arguments' shapes.

    Args:
        layer: The layer. Nothing happens if it is built.
        *arguments: Nested arrays or tensors with a row for each example.
        **keywords: Other arguments of the call, passed on.
    """
    if layer.built and all(inner.built for inner in layer._flatten_layers()):
        return

    def of_any_size(tensor):
        if tensor is None:
            return None
        # Weights depend on the shape of an example, not on the batch size.
        return keras.KerasTensor((None, *tensor.shape[1:]), keras.backend.standardize_dtype(tensor.dtype))

    compute_output_spec(layer, *keras.tree.map_structure(of_any_size, arguments), **keywords)


def has_build(layer: keras.layers.Layer) -> bool:
    """Whether a layer's class defines `build`."""
    return not is_default(layer.build)


def build_from(model: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Builds what Keras's `_maybe_symbolic_build` builds, from the batch of one replica.

    Keras averages the replica batches to read their shape, which fails if their sizes differ.

    Args:
        model: A model that was created under a strategy.
        iterator: The epoch iterator of Keras's trainer, or `None`.
        data_batch: A batch, or `None`.
    """
    if all(layer.built for layer in model._flatten_layers()) and all_built(model):
        return
    strategy = model.distribute_strategy
    if iterator is not None:
        data_batch = _first_batch(iterator)

    def of_any_size(tensor):
        local = strategy.experimental_local_results(tensor)[0]
        # An optional input that was left out.
        if local is None:
            return None
        return keras.KerasTensor((None, *local.shape[1:]), keras.backend.standardize_dtype(local.dtype))

    with strategy.scope():
        try:
            model._symbolic_build(data_batch=keras.tree.map_structure(of_any_size, data_batch))
        except Exception:
            # A custom `train_step` need not call the model, so only the layers may be built.
            if not has_own_train_step(model) or not all(layer.built for layer in all_layers(model)):
                raise


def build_from_inputs(model: Any, data_batch: Any) -> None:
    """Builds the layers of a model that predicts before it was trained.

    Args:
        model: A model that was created under a strategy.
        data_batch: A batch of `predict_step`, divided among the replicas.
    """
    if all(layer.built for layer in model._flatten_layers()):
        return
    strategy = model.distribute_strategy
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data_batch)
    local = keras.tree.map_structure(lambda tensor: strategy.experimental_local_results(tensor)[0], x)
    with strategy.scope():
        build_by_calling(model, local)


def losses_built(model: Any) -> bool:
    """Whether a model's compiled losses are built, if it has any."""
    return model._compile_loss is None or model._compile_loss.built


def build_losses(model: Any, data: Any, *, metrics: bool = False) -> None:
    """Builds the compiled losses from a batch, unless they are built; within a step or before it.

    Under a strategy, Keras has built them already.

    Args:
        model: A compiled model.
        data: A batch or a slice, as `train_step` takes it.
        metrics: Whether to build the compiled metrics too.
    """
    compiled = model._compile_metrics if metrics else None
    if losses_built(model) and (compiled is None or compiled.built):
        return
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    # Outside of the graph below, so that its variables stay.
    build_by_calling(model, x)
    scope = keras.StatelessScope(collect_losses=True)
    # In a graph that never runs: the call shows the structure of the outputs.
    with (
        FuncGraph("losses").as_default(),
        SymbolicScope(),
        untouched(model, scope, but=(model._compile_loss, model._compile_metrics)),
    ):
        y_pred = model(x)
        if not losses_built(model):
            if has_own_compute_loss(model):
                model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=False)
            else:
                model._compile_loss(y, y_pred, sample_weight)
        if compiled is not None and not compiled.built:
            compiled.build(y, y_pred)


def build_losses_of(model: Any, spec: Any) -> bool:
    """Builds the compiled losses and metrics from what batches look like; returns whether that is plain tensors."""
    specs = keras.tree.flatten(spec)
    if not all(type(each) is tf.TensorSpec for each in specs):
        return False
    with FuncGraph("batch").as_default():
        data = keras.tree.map_structure(lambda each: tf.compat.v1.placeholder(each.dtype, each.shape), spec)
        build_losses(model, data, metrics=True)
    return True


def all_built(model: Any) -> bool:
    """Whether what a model was compiled with has made its variables."""
    parts = (model._compile_metrics, model._compile_loss, model.optimizer)
    return all(part is None or part.built for part in parts)


def _first_batch(iterator: Any) -> Any:
    """The first batch, which is still trained on if the data adapter can peek."""
    first = getattr(iterator.data_adapter, "first_batch", None)
    if first:
        return first()
    if counts_readers(iterator.data_adapter):
        return first_batch(iterator.data_adapter)
    for _, _, batches in iterator:
        return next(batches)
    raise ValueError("The data has no batches. Pass fit() data with at least one.")
