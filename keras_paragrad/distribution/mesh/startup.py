"""A check, once in a process, that this TensorFlow adds gradients up right on a mesh."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_paragrad.distribution.mesh.mesh import Mesh
from keras_paragrad.storage.dtensor import (
    COMBINE_PASS,
    divided,
    make_mesh,
    on_mesh,
    turn_combine_pass_off,
)
from keras_paragrad.storage.mesh_variable import MeshVariable

_RATE = 0.1


def check_steps(mesh: Mesh) -> None:
    """Compares two steps of a small model on a mesh with those of one device."""
    turn_combine_pass_off()
    error = steps_differ(tuple(mesh.shape.items()), mesh.devices, mesh.batch_axis, mesh.workers, mesh.worker)
    if error > 1e-5:
        raise RuntimeError(
            f"On a mesh of {mesh.words} this process trains a small model wrong, by {error:.1e} of its largest weight. "
            f"TensorFlow may have compiled something on a mesh before DistributedFit was made, without "
            f"{COMBINE_PASS}=0 in the environment. Start Python with it, or write "
            'DistributedFit("mirrored", shard="parameters").'
        )


@functools.cache
def steps_differ(
    shape: tuple[tuple[str, int], ...], devices: tuple[str, ...], batch_axis: str | None, workers: int, worker: int
) -> float:
    """How far two steps of a perceptron with several all-reduces are from one device's, of its largest weight."""
    sizes = dict(shape)
    mesh = make_mesh(sizes, devices, workers, worker)
    # Every axis divides every size.
    unit = int(np.prod(list(sizes.values())))
    random = np.random.default_rng(0)
    shapes = [(unit, 2 * unit), (2 * unit, 3 * unit), (3 * unit, unit), 2 * unit, 3 * unit, unit]
    weights = [random.normal(size=shape).astype("float32") for shape in shapes]
    x, y = random.normal(size=(2, 4 * unit, unit)).astype("float32")
    model_axis = next((name for name in sizes if name != batch_axis), None)
    # The first two weights form a pair, column then row.
    axes = [(None, model_axis), (model_axis, None), (None, None), (model_axis,), (None,), (None,)]
    with tf.device("CPU:0"):
        alone: list[Any] = [tf.Variable(tf.constant(weight)) for weight in weights]
        _two_steps(alone, tf.constant(x), tf.constant(y))
    parted: list[Any] = [
        MeshVariable(value=weight, mesh=mesh, axes=each, name="checked", trainable=True)
        for weight, each in zip(weights, axes, strict=True)
    ]
    data = [divided(each, mesh, (batch_axis, None)) for each in (x, y)]
    with on_mesh(mesh):
        _two_steps(parted, *data)
    found = [np.abs(each.numpy() - one.numpy()).max() for each, one in zip(parted, alone, strict=True)]
    return float(max(found) / max(np.abs(one.numpy()).max() for one in alone))


def _two_steps(variables: list[Any], x: Any, y: Any) -> None:
    step: Callable[..., None] = tf.function(functools.partial(_step, variables), autograph=False)
    for _ in range(2):
        step(x, y)


def _step(variables: list[Any], x: Any, y: Any) -> None:
    first, second, third, *biases = variables
    with tf.GradientTape() as tape:
        hidden = tf.nn.tanh(x @ first + biases[0])
        hidden = tf.nn.tanh(hidden @ second + biases[1])
        loss = tf.reduce_mean(tf.square(hidden @ third + biases[2] - y))
    gradients: list[Any] = tape.gradient(loss, variables)
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(_RATE * gradient)
