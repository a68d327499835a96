"""A model's gradient on a mesh, compared with that on one device."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import all_variables
from keras_paragrad.engine.mesh.errors import explained
from keras_paragrad.engine.probes.untouched import untouched
from keras_paragrad.storage.dtensor import discard_assignments, gather, on_mesh
from keras_paragrad.storage.storage import storage_of

# A gradient that is smaller than this share of the largest is rounding, as is that of an attention's key bias.
SHARE = 1e-3
_TINY = 1e-30
_ZERO = tf.UnconnectedGradients.ZERO


def gradient_differs(model: Any, data: Any, on_the_mesh: Any) -> tuple[float, str]:
    """How far a model's gradient on a mesh is from that on one device, without dropout.

    Args:
        model: A compiled and built model, whose variables are on a mesh.
        data: A batch, as `train_step` takes it.
        on_the_mesh: The `OnMesh` that runs the model.

    Returns:
        The largest difference within a variable's gradient, in parts of its own largest entry or of a small share of
        that of the whole gradient, and the variable's path.
    """
    variables = list(model.trainable_variables)
    if not variables:
        return 0.0, ""
    expected = _alone(model, data, variables)
    function = tf.function(
        lambda batch: _on_mesh(model, batch, variables, on_the_mesh), jit_compile=None, autograph=False
    )
    batch = on_the_mesh.batch(data)
    with on_mesh(on_the_mesh.mesh), explained(model):
        found = function(batch)
    pairs = zip(variables, map(_array, expected), map(_array, found), strict=True)
    least = SHARE * max(_most(_array(each)) for each in expected)
    # Without a gradient, any difference is too large.
    return max(
        (_most(ours - theirs) / max(_most(theirs), least, _TINY), str(each.path)) for each, theirs, ours in pairs
    )


def _most(array: Any) -> float:
    return float(np.abs(array).max(initial=0))


def _array(gradient: Any) -> Any:
    return np.asarray(gather(gradient)).astype("float64")


def _alone(model: Any, data: Any, variables: list[keras.Variable]) -> list[Any]:
    # In the host's memory, where the model was made.
    with tf.device("CPU:0"):
        own = all_variables(model)
        places = [index for index, variable in enumerate(own) if any(variable is each for each in variables)]

        # In a graph, as `fit` computes: executed eagerly, Keras's layers lose some masks.
        @tf.function(autograph=False)
        def gradient(data: Any, values: list[Any]) -> list[Any]:
            watched = [values[place] for place in places]
            with tf.GradientTape() as tape:
                tape.watch(watched)
                mapping = list(zip(own, values, strict=True))
                with untouched(model, keras.StatelessScope(state_mapping=mapping, collect_losses=True)):
                    loss = _loss(model, data)
            return [_dense(each) for each in tape.gradient(loss, watched, unconnected_gradients=_ZERO)]

        data = keras.tree.map_structure(lambda leaf: None if leaf is None else tf.identity(leaf), data)
        values = [tf.convert_to_tensor(variable.value) for variable in own]
        found = dict(zip((id(own[place]) for place in places), gradient(data, values), strict=True))
    return [found[id(variable)] for variable in variables]


def _on_mesh(model: Any, data: Any, variables: list[keras.Variable], on_the_mesh: Any) -> list[Any]:
    with on_the_mesh.tracing():
        with tf.GradientTape() as tape, untouched(model, discard_assignments()):
            loss = _loss(model, data)
        sources: list[Any] = [storage_of(variable).local for variable in variables]
        return [_dense(each) for each in tape.gradient(loss, sources, unconnected_gradients=_ZERO)]


def _loss(model: Any, data: Any) -> Any:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = model(x, training=False) if model._call_has_training_arg else model(x)
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=False)


def _dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient)
