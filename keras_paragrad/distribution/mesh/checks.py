"""Refuses options, models, batches and TensorFlow processes that don't work, or compute wrong results, on a mesh."""

import functools
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import all_layers, percent
from keras_paragrad.distribution.launch.tasks import WORLD
from keras_paragrad.distribution.mesh.mesh import DISTRIBUTIONS, Mesh
from keras_paragrad.distribution.options import Options
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.storage.dtensor import COMBINE_PASS, distribute, make_mesh, on_mesh, turn_combine_pass_off
from keras_paragrad.storage.mesh_variable import MeshVariable

# The learning rate of the steps that are checked.
_RATE = 0.1


def check_mesh_options(options: Options) -> None:
    """Refuses options that contradict a mesh."""
    if options.mesh is None and options.layout is not None:
        raise ValueError(
            f"layout={options.layout!r} needs a mesh to divide variables over. Write "
            'mesh={"batch": 2, "model": 2}, or leave layout out.'
        )
    if options.mesh is not None and options.layout is None:
        raise ValueError(
            'mesh needs a layout. Write layout="auto" for one that follows from the model\'s structure; for your own, '
            "write strategy=keras.distribution.ModelParallel(layout_map=..., batch_dim_name=...) in place of mesh."
        )
    if options.mesh is not None and options.strategy != "auto":
        raise ValueError(
            f"mesh={options.mesh} and strategy={options.strategy!r} both arrange devices. Pass one of them."
        )
    is_distribution = isinstance(options.strategy, DISTRIBUTIONS)
    if options.mesh is None and not is_distribution:
        return
    if is_distribution and options.devices is not None:
        raise ValueError(
            f"devices={list(options.devices)}, but a keras.distribution names its own devices. Leave devices out, and "
            "name them in keras.distribution.DeviceMesh(shape, axis_names, devices)."
        )
    if world := os.environ.get(WORLD):
        raise ValueError(
            f"A mesh needs all of its devices, and the launcher may go on with fewer: it was started with {world}. "
            f"Write one number there, of workers or nodes: {world.rpartition(':')[2]}, with --max-restarts 10."
        )
    if not options.exact:
        raise ValueError("exact=False, but a mesh trains as one device does. Leave exact out.")
    if options.shard is not None:
        raise ValueError(
            f"shard={options.shard!r} shards variables over replicas, and a mesh counts as one replica, whose layout "
            'divides variables. Remove shard, or write strategy="mirrored" in place of the mesh.'
        )
    names = ("communication", "pack_bytes", "collective_timeout", "weighting")
    unused = [name for name in names if getattr(options, name) not in (None, "auto")]
    if unused:
        raise ValueError(f"These have no effect on a mesh, which is one replica: {', '.join(unused)}. Remove them.")


def check_mesh_model(model: keras.Model) -> None:
    """Refuses a model that can't be trained on a mesh."""
    if not model.built or not all(layer.built for layer in all_layers(model)):
        raise ValueError(
            f"{model.name!r} has no weights yet that could be divided. Call model.build(input_shape), or call it on "
            "a batch, within `with dist.scope():`."
        )
    if model.run_eagerly:
        raise ValueError(
            "The model is compiled with run_eagerly=True, and a mesh only runs compiled steps. Leave it out."
        )
    if not all(getattr(each, "trains_on_meshes", True) for each in [model, *all_layers(model)]):
        raise ValueError(
            f"{model.name!r} has PerExampleGradients, whose rules have not been verified on a mesh. "
            'Train it with DistributedFit("mirrored").'
        )
    stages = StepBuilder.of(model).stages
    accumulate = ", and compile with AccumulatingOptimizer, which accumulates there"
    for stage, name, advice in (("split", "microbatch", accumulate), ("take", "DistributedFit's replicas", "")):
        if getattr(stages, stage) is not None:
            raise ValueError(
                f"{model.name!r} already uses {name}, which can't be combined with a mesh. Call undo() of the handle "
                f"that it returned{advice}."
            )
    if stages.place is not None and stages.mesh is None:
        raise ValueError(
            f"{model.name!r} is in the stages of a pipeline. Call undo() of the handle that dist.prepare returned."
        )


def check_batch(rows: int | None, mesh: Mesh) -> None:
    """Refuses a batch size that isn't divisible by the batch axis."""
    size = 1 if mesh.batch_axis is None else mesh.shape[mesh.batch_axis]
    if rows is not None and rows % size:
        larger = -(-rows // size) * size
        raise ValueError(
            f"Batches of {rows} rows can't be divided by the axis {mesh.batch_axis!r}, of {size}. Write "
            f"batch_size={larger}. Only the last batch of an epoch may be smaller: each device computes all of it."
        )


def check_steps(mesh: Mesh) -> None:
    """Refuses a mesh on which two steps of a small model differ from two steps on one device."""
    turn_combine_pass_off()
    error = _step_error(tuple(mesh.shape.items()), mesh.devices, mesh.batch_axis, mesh.workers, mesh.worker)
    if error > 1e-5:
        raise RuntimeError(
            f"On a mesh of {mesh.in_words} this process trains a small model incorrectly: its weights are off by "
            f"{percent(error)} of the largest one. TensorFlow may have compiled something on a mesh before "
            f"DistributedFit was made, without {COMBINE_PASS}=0 in the environment. Start Python with it, or write "
            'DistributedFit("mirrored", shard="parameters").'
        )


@functools.cache
def _step_error(
    shape: tuple[tuple[str, int], ...], devices: tuple[str, ...], batch_axis: str | None, workers: int, worker: int
) -> float:
    """The error of two steps of a multilayer perceptron with several all-reduces, relative to the largest weight."""
    sizes = dict(shape)
    mesh = make_mesh(sizes, devices, workers, worker)
    # A multiple of the size of every axis.
    unit = int(np.prod(list(sizes.values())))
    random = np.random.default_rng(0)
    shapes = [(unit, 2 * unit), (2 * unit, 3 * unit), (3 * unit, unit), 2 * unit, 3 * unit, unit]
    weights = [random.normal(size=shape).astype("float32") for shape in shapes]
    x, y = random.normal(size=(2, 4 * unit, unit)).astype("float32")
    model_axis = next((name for name in sizes if name != batch_axis), None)
    # The first two weights form a pair, column then row.
    axes = [(None, model_axis), (model_axis, None), (None, None), (model_axis,), (None,), (None,)]
    with tf.device("CPU:0"):
        on_device: list[Any] = [tf.Variable(tf.constant(weight)) for weight in weights]
        _two_steps(on_device, tf.constant(x), tf.constant(y))
    divided_variables: list[Any] = [
        MeshVariable(value=weight, mesh=mesh, axes=weight_axes, name="checked", trainable=True)
        for weight, weight_axes in zip(weights, axes, strict=True)
    ]
    data = [distribute(array, mesh, (batch_axis, None)) for array in (x, y)]
    with on_mesh(mesh):
        _two_steps(divided_variables, *data)
    expected = [variable.numpy() for variable in on_device]
    pairs = zip(divided_variables, expected, strict=True)
    error = max(np.abs(variable.numpy() - value).max() for variable, value in pairs)
    return float(error / max(np.abs(value).max() for value in expected))


def _two_steps(variables: list[Any], x: tf.Tensor, y: tf.Tensor) -> None:
    """Takes two compiled steps that change the variables."""
    step: Callable[..., None] = tf.function(functools.partial(_step, variables), autograph=False)
    for _ in range(2):
        step(x, y)


def _step(variables: list[Any], x: tf.Tensor, y: tf.Tensor) -> None:
    """A step of gradient descent of a small network."""
    first, second, third, *biases = variables
    with tf.GradientTape() as tape:
        hidden = tf.nn.tanh(x @ first + biases[0])
        hidden = tf.nn.tanh(hidden @ second + biases[1])
        loss = tf.reduce_mean(tf.square(hidden @ third + biases[2] - y))
    gradients: list[Any] = tape.gradient(loss, variables)
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(_RATE * gradient)
