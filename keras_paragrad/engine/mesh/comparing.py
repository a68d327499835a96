"""Compares a model's gradient on a mesh with its gradient on one device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import all_variables
from keras_paragrad.compat.types import Batch, GradientTensor, TensorVariable
from keras_paragrad.engine.losses.terms import compute_loss
from keras_paragrad.engine.mesh.mesh_tracing import explaining_errors
from keras_paragrad.engine.tracing.untouched import untouched
from keras_paragrad.storage.dtensor import discard_assignments, gather_dtensor, on_mesh
from keras_paragrad.storage.storage import storage_of

if TYPE_CHECKING:
    from keras_paragrad.engine.mesh.running import ModelOnMesh

# Gradients smaller than this, relative to the largest, are rounding errors, such as an attention's key bias has.
_SMALL = 1e-3
_TINY = 1e-30
_ZERO = tf.UnconnectedGradients.ZERO


def gradient_error(model: keras.Model, data: Batch, model_on_mesh: "ModelOnMesh") -> tuple[float, str]:
    """The largest error of a variable's gradient on a mesh, without dropout, and the variable's path.

    The error is relative to the largest entry of the variable's gradient on one device, or, if that is smaller, to
    `_SMALL` times the largest entry of all gradients.
    """
    variables = list(model.trainable_variables)
    if not variables:
        return 0.0, ""
    expected = list(map(_to_numpy, _gradients_on_one_device(model, data, variables)))
    function = tf.function(
        lambda batch: _gradients_on_mesh(model, batch, variables, model_on_mesh), jit_compile=None, autograph=False
    )
    batch = model_on_mesh.batch(data)
    with on_mesh(model_on_mesh.mesh), explaining_errors(model):
        actual = list(map(_to_numpy, function(batch)))
    least = _SMALL * max(map(_largest, expected))
    # If the gradient is zero, any difference is too large.
    errors = (
        (_largest(ours - theirs) / max(_largest(theirs), least, _TINY), str(variable.path))
        for variable, theirs, ours in zip(variables, expected, actual, strict=True)
    )
    return max(errors)


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0))


def _to_numpy(gradient: tf.Tensor) -> np.ndarray:
    return np.asarray(gather_dtensor(gradient)).astype("float64")


def _gradients_on_one_device(model: keras.Model, data: Batch, trainable: list[keras.Variable]) -> list[tf.Tensor]:
    """Computes the gradients on the host, with the variables' values as arguments."""
    # On the host, where the model was made.
    with tf.device("CPU:0"):
        variables = all_variables(model)
        indices = {id(variable): index for index, variable in enumerate(variables)}

        # In a graph, as in `fit`: eagerly, Keras's layers lose some masks.
        @tf.function(autograph=False)
        def gradients(data: Batch, values: list[tf.Tensor]) -> list[tf.Tensor]:
            sources = [values[indices[id(variable)]] for variable in trainable]
            with tf.GradientTape() as tape:
                tape.watch(sources)
                mapping = list(zip(variables, values, strict=True))
                with untouched(model, keras.StatelessScope(state_mapping=mapping, collect_losses=True)):
                    loss = compute_loss(model, data, training=False).loss
            return _dense(tape.gradient(loss, sources, unconnected_gradients=_ZERO))

        data = keras.tree.map_structure(lambda leaf: None if leaf is None else tf.identity(leaf), data)
        return gradients(data, [tf.convert_to_tensor(variable.value) for variable in variables])


def _gradients_on_mesh(
    model: keras.Model, data: Batch, trainable: list[keras.Variable], model_on_mesh: "ModelOnMesh"
) -> list[tf.Tensor]:
    """Traces the gradients on a mesh; the variables keep their values."""
    with model_on_mesh.tracing():
        with tf.GradientTape() as tape, untouched(model, discard_assignments()):
            loss = compute_loss(model, data, training=False).loss
        sources: list[TensorVariable] = [storage_of(variable).local for variable in trainable]
        return _dense(tape.gradient(loss, sources, unconnected_gradients=_ZERO))


def _dense(gradients: Sequence[GradientTensor]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(gradient) for gradient in gradients]
