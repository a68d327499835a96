"""Models trained on meshes, in processes that have the devices for it, and by Keras on one device."""

import contextlib
import functools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from trainings import placed_models
from trainings.placed_models import DEVICES, LENGTH, apart, configure, data_for

from keras_paragrad import DistributedFit, recompute
from keras_paragrad.distribution import Backup
from keras_paragrad.engine.mesh.running import variables_on_mesh
from keras_paragrad.storage.dtensor import bytes_by_device, computing_on_mesh, relayout

made = functools.partial(placed_models.made, jit_compile=False)


class MeshCase(NamedTuple):
    """How to train.

    Attributes:
        model: Which model.
        mesh: The sizes of the axes `"batch"` and `"model"`.
        optimizer: Which optimizer.
        settings: Of the optimizer, and of the run.
    """

    model: str
    mesh: tuple[int, int] = (2, 2)
    optimizer: str = "sgd"
    settings: tuple[str, ...] = ()


def layout_of(model: keras.Model, mesh: Any) -> Any:
    """A layout map that divides whatever can be divided, the last dimension or the first."""
    found, size = keras.distribution.LayoutMap(mesh), mesh.shape[1]
    for index, variable in enumerate(model.trainable_variables):
        dimensions = [place for place, length in enumerate(variable.shape) if length % size == 0]
        if dimensions:
            chosen = dimensions[-1 if index % 4 < 2 else 0]
            found[re.escape(variable.path)] = tuple(
                "model" if place == chosen else None for place in range(len(variable.shape))
            )
    return found


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] = ("batch", "model")) -> Any:
    count = int(np.prod(shape))
    return keras.distribution.DeviceMesh(shape, list(names), [name.lower() for name in DEVICES[:count]])


def distribution_for(case: MeshCase) -> Any:
    if "data" in case.settings:
        return keras.distribution.DataParallel(devices=[name.lower() for name in DEVICES])
    # The paths of variables are those of a model that is made in the same way.
    keras.backend.clear_session()
    layout = layout_of(made(case, alone=True), mesh_of(case.mesh))
    keras.backend.clear_session()
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")


def compared(listed: list[list[Any]]) -> list[dict[str, Any]]:
    """How far training on meshes is from training by Keras alone, and what they divide; in a process of its own."""
    configure()
    cases = [MeshCase(each[0], tuple(each[1]), each[2], tuple(each[3])) for each in listed]
    # Of the first, batches that can't be divided are evaluated too.
    return [_compared(case, evaluated=None if index else 11) for index, case in enumerate(cases)]


def _compared(case: MeshCase, evaluated: int | None) -> dict[str, Any]:
    def change(model: keras.Model) -> None:
        if "recompute" in case.settings:
            recompute(model, every=2)
        if "recompute layers" in case.settings:
            recompute(model, [layer.name for layer in model.layers if layer.weights])

    if "auto" in case.settings:
        dist = DistributedFit(mesh=dict(zip(("batch", "model"), case.mesh, strict=True)), layout="auto")
    else:
        dist = DistributedFit(distribution_for(case))
    compiled = {
        "jit_compile": "jit" in case.settings,
        "steps_per_execution": 2 if "several steps" in case.settings else 1,
    }
    batch = 16 if "accumulate" in case.settings else 8
    model, found = placed_models.compared(case, dist, batch, change, evaluated, **compiled)
    found["divided"] = {each.path: storage.axes for each, storage in variables_on_mesh(model) if any(storage.axes)}
    return found


def refused(which: str) -> str:
    """What is said of a model that can't be trained as it is on a mesh; of one, not at first."""
    configure()
    layers_of = {
        "loop": lambda: [layers.Lambda(lambda x: tf.map_fn(lambda row: 2.0 * row, x), name="looped")],
        "wrong": lambda: [],
        "not a number": lambda: [],
        "eager": lambda: [],
        "pattern": lambda: [],
        "batch": lambda: [],
        "output": lambda: [],
        "pooled": lambda: [layers.Reshape((4, 2)), layers.AveragePooling1D(2, name="pooled"), layers.Flatten()],
        "depthwise": lambda: [layers.Reshape((4, 2)), layers.DepthwiseConv1D(2, name="depthwise"), layers.Flatten()],
        "dilated": lambda: [
            layers.Reshape((4, 2)),
            layers.Conv1D(2, 2, dilation_rate=2, name="dilated"),
            layers.Flatten(),
        ],
        "rolled": lambda: [layers.Lambda(lambda x: keras.ops.roll(x, 1, 1), name="rolled")],
        "strided": lambda: [
            layers.Reshape((2, 2, 2)),
            layers.Conv2D(2, 2, padding="same"),
            layers.Conv2D(2, 2, strides=2, padding="same"),
            layers.Flatten(),
        ],
    }[which]
    mesh = mesh_of((2, 2))
    layout = keras.distribution.LayoutMap(mesh)
    if which not in ("pattern", "output"):
        layout[".*first/kernel"] = (None, "model")
    if which == "pattern":
        layout[".*second/kernel"] = (None, "model")
    if which == "output":
        layout[".*second/output"] = ("batch", None)
    dist = DistributedFit(keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))
    with dist.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(8, name="first"), *layers_of(), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=which == "eager")
    if which == "strided":
        recompute(model, every=3)
    rows = 7 if which == "batch" else 8
    x, y = np.ones((rows, 8), "float32"), np.ones((rows, 2), "float32")
    if which == "wrong":
        dist.fit(model, x, y, verbose=0)
        model.compile("sgd", lambda y, found: keras.ops.square(_doubled(found) - tf.concat([y, -y], -1)))
    if which == "not a number":
        model.compile("sgd", lambda y, found: (y - found) ** 2 * (float("nan") if computing_on_mesh() else 1.0))
    before = model.get_weights()
    try:
        dist.fit(model, x, y, batch_size=rows, verbose=0)
    except (RuntimeError, ValueError) as error:
        assert apart(model.get_weights(), before) == 0
        return str(error)
    return "trained"


def _doubled(inputs: Any) -> Any:
    """What DTensor computes wrong: a concatenation along a dimension that is divided."""
    divided = relayout(inputs, (None, "model")) if computing_on_mesh() else inputs
    joined = tf.concat([divided, -divided], -1)
    return relayout(joined, (None, "model")) if computing_on_mesh() else joined


def normalized(_: None) -> float:
    """How far a model with adapted means is from Keras alone."""
    configure()
    x, y, _ = data_for("mlp")

    def fitted(fit: Any = None) -> list[Any]:
        keras.utils.set_random_seed(1)
        adapted = layers.Normalization()
        adapted.adapt(x)
        model = keras.Sequential([keras.Input((8,)), adapted, layers.Dense(4)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        (fit or model.fit)(*([model] if fit else []), x, y, batch_size=22, verbose=0)
        return [each.numpy() for each in model.trainable_variables]

    return apart(fitted(DistributedFit(mesh={"batch": 2, "model": 2}, layout="auto").fit), fitted())


def saved(directory: str) -> dict[str, float]:
    """How far files of a model on a mesh are from what they hold."""
    configure()
    return placed_models.saved(MeshCase("mlp", (2, 2), "adam"), lambda: way_to_train("(2, 2)"), directory, 22)


class Interrupt(keras.callbacks.Callback):
    def __init__(self, after: int):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.after:
            raise InterruptedError


def way_to_train(name: str) -> DistributedFit:
    mirrored = {"strategy": "mirrored", "devices": DEVICES[:2]}
    meshes = {str(shape): shape for shape in ((4, 1), (2, 2), (1, 4))}
    if name in meshes:
        return DistributedFit(mesh=dict(zip(("batch", "model"), meshes[name], strict=True)), layout="auto")
    return {
        "one device": lambda: DistributedFit("none"),
        "replicas": lambda: DistributedFit(**mirrored),
        "shards": lambda: DistributedFit(**mirrored, shard="parameters", min_shard_bytes=64),
    }[name]()


def reloaded(given: tuple[str, list[tuple[str, str]]]) -> list[float]:
    """How far training ends from that of one device, if it was interrupted in the middle of a window.

    Args:
        given: A directory, and pairs of ways to train, before and after.
    """
    configure()
    directory, pairs = given
    case = MeshCase("mlp", (2, 2), "adam", ("accumulate",))
    x, y, weights = data_for(case.model)
    alone = made(case, alone=True)
    alone.fit(x, y, sample_weight=weights, batch_size=8, epochs=2, shuffle=False, verbose=0)

    def fit(way: str, *callbacks: Any) -> keras.Model:
        keras.backend.clear_session()
        dist = way_to_train(way)
        with dist.scope():
            model = made(case, alone=False)
        settings = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
        dist.fit(model, x, y, sample_weight=weights, **settings)
        return model

    found = []
    for first in dict(pairs):
        with contextlib.suppress(InterruptedError):
            fit(first, Interrupt(3), Backup(f"{directory}/{first}", every=3, delete_when_done=False))
        for second in [after for before, after in pairs if before == first]:
            copied = shutil.copytree(f"{directory}/{first}", f"{directory}/{first} {second}")
            found.append(apart(fit(second, Backup(copied)).get_weights(), alone.get_weights()))
    return found


def on_a_worker(given: tuple[str, list[Any]]) -> list[dict[str, float]]:
    """How far training on a mesh of two workers with two devices each is from training by Keras alone.

    Args:
        given: A directory, and for each case the mesh, `None` for `DataParallel`, before what a `MeshCase` has. A
            process joins its cluster once, so the meshes are of the same shape.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    directory, listed = given
    shape = listed[0][0]
    if shape is None:
        dist = DistributedFit(keras.distribution.DataParallel(devices=[name.lower() for name in DEVICES]))
    else:
        dist = DistributedFit(mesh=dict(zip(("batch", "model"), shape, strict=True)), layout="auto")
    found = [_on_this_worker(f"{directory}/{index}", dist, MeshCase(*each[1:])) for index, each in enumerate(listed)]
    divides = shape is not None and shape[1] > 1
    return [{**each, "divided": float(each["divided"] != divides)} for each in found]


def _on_this_worker(directory: str, dist: DistributedFit, case: MeshCase) -> dict[str, float]:
    x, y, weights = data_for(case.model)
    # The last batch can't be divided among four devices.
    settings = {"epochs": 2, "shuffle": False, "verbose": 0, "sample_weight": weights}
    alone = made(case, alone=True)
    expected = alone.fit(x, y, batch_size=16 if "accumulate" in case.settings else 8, **settings).history
    mine = f"{directory}-{json.loads(os.environ['TF_CONFIG'])['task']['index']}"

    def fit(*callbacks: Any) -> tuple[keras.Model, Any]:
        keras.backend.clear_session()
        with dist.scope():
            model = made(case, alone=False)
        return model, dist.fit(model, x, y, batch_size=8, callbacks=list(callbacks), **settings)

    # What is broken off and gone on with ends where an undisturbed training does: two are traced, and no third.
    with contextlib.suppress(InterruptedError):
        fit(Interrupt(1), Backup(directory, every=1, delete_when_done=False, on_sigterm=False))
    wrote = {path.name.split("-")[-3] for path in Path(directory).glob("*-of-*.npz")}
    model, history = fit(Backup(directory))
    divides = any(any(storage.axes) for _, storage in variables_on_mesh(model))
    evaluated, predicted = model.evaluate(x, y, sample_weight=weights, verbose=0), model.predict(x, verbose=0)
    model.save_weights(f"{mine}.weights.h5")
    loaded = made(case, alone=True)
    loaded.load_weights(f"{mine}.weights.h5")
    return {
        "weights": apart(model.get_weights(), alone.get_weights()),
        "history": apart(map(np.asarray, history.history.values()), [np.asarray(each) for each in expected.values()]),
        "evaluated": apart(
            [np.asarray(evaluated)], [np.asarray(alone.evaluate(x, y, sample_weight=weights, verbose=0))]
        ),
        "predicted": apart(*map(keras.tree.flatten, (predicted, alone.predict(x, verbose=0)))) / 3,
        "loaded": apart(loaded.get_weights(), model.get_weights()),
        "written": float(wrote != ({"00000", "00001"} if divides else set())),
        "divided": divides,
    }


def held(shape: tuple[int, int]) -> dict[str, int]:
    """The bytes of variables and slots on each device of a Transformer with an automatic layout."""
    configure()
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(512, 64, name="embedding")(inputs)
    for index in range(2):
        hidden = hidden + layers.MultiHeadAttention(4, 16, name=f"attention_{index}")(hidden, hidden)
        hidden = layers.LayerNormalization(name=f"norm_{index}")(hidden)
        hidden = hidden + layers.Dense(64, name=f"narrow_{index}")(
            layers.Dense(256, "gelu", name=f"wide_{index}")(hidden)
        )
    dist = DistributedFit(mesh=dict(zip(("batch", "model"), shape, strict=True)), layout="auto")
    with dist.scope():
        model = keras.Model(inputs, layers.Dense(512, name="head")(hidden))
        model.compile("adam", "mse")
    dist.prepare(model)
    found: dict[str, int] = {"whole": 0}
    for variable, storage in variables_on_mesh(model):
        found["whole"] += variable.numpy().nbytes
        for name, size in bytes_by_device(storage).items():
            found[name] = found.get(name, 0) + size
    return found
