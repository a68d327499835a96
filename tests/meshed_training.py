"""Models trained on meshes, in processes that have the devices for it, and by Keras on one device."""

import re
from typing import Any, NamedTuple

import keras
import numpy as np
import pipelined_training
import sharded_training
import tensorflow as tf
from keras import layers
from pipelined_training import DEVICES, LENGTH, VOCABULARY, apart, configure

from keras_paragrad import AccumulatingOptimizer, DistributedFit
from keras_paragrad._keras.mesh.dtensor import bytes_by_device, computing_on_mesh, relayout
from keras_paragrad._keras.mesh.placing import variables_on_mesh
from keras_paragrad.distribution import Backup

SIDE = 8


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


def cnn() -> keras.Model:
    inputs = keras.Input((SIDE, SIDE, 4))
    hidden = layers.Conv2D(8, 3, padding="same", activation="tanh", name="wide")(inputs)
    hidden = layers.BatchNormalization(synchronized=True)(layers.MaxPooling2D(2)(hidden))
    hidden = layers.GroupNormalization(4)(layers.Conv2D(8, 3, strides=2, padding="same", name="strided")(hidden))
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.GlobalAveragePooling2D()(hidden)))


def tied() -> keras.Model:
    """With an embedding that is tied to the outputs, and a layer that is shared."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    embedding, shared = layers.ReversibleEmbedding(VOCABULARY, 16), layers.Dense(16, "gelu", name="shared")
    hidden = embedding(inputs)
    hidden = layers.LayerNormalization()(hidden + layers.GroupQueryAttention(4, 4, 2)(hidden, hidden))
    hidden = shared(hidden + shared(hidden))
    return keras.Model(inputs, embedding(hidden, reverse=True))


class Subclassed(keras.Model):
    """With a weight of its own, and what comes after a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(VOCABULARY, 16, mask_zero=True)
        self.last = layers.LSTM(8)
        self.head = self.add_weight(shape=(8, 4), name="head")

    def call(self, inputs):
        return keras.ops.matmul(self.last(self.embedding(inputs)), self.head)


MODELS = {**pipelined_training.MODELS, "cnn": cnn, "tied": tied, "subclassed": Subclassed}


def data_for(name: str) -> tuple[Any, Any, Any]:
    if name == "cnn":
        generator = np.random.default_rng(0)
        images = generator.normal(size=(22, SIDE, SIDE, 4)).astype("float32")
        return images, generator.integers(0, 4, 22), np.linspace(0.5, 2.0, 22).astype("float32")
    if name == "tied":
        tokens, _, weights = pipelined_training.data_for("transformer")
        return tokens, np.roll(tokens, 1, axis=1), weights
    return pipelined_training.data_for("masked" if name == "subclassed" else name)


def made(case: MeshCase, *, alone: bool) -> keras.Model:
    keras.utils.set_random_seed(1)
    if "mixed" in case.settings:
        keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = MODELS[case.model]()
    finally:
        keras.config.set_dtype_policy("float32")
    x, _, _ = data_for(case.model)
    if not model.built:
        model(x[:1])
    options = {key: value for name in case.settings for key, value in sharded_training.SETTINGS.get(name, {}).items()}
    optimizer: Any = sharded_training.OPTIMIZERS[case.optimizer](**options)
    if "excluded" in case.settings:
        optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[:2])
    if "accumulate" in case.settings:
        optimizer = AccumulatingOptimizer(optimizer, 2)
    if "loss_scale" in case.settings:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    several = case.model == "several"
    model.compile(
        optimizer,
        [loss, loss] if several else loss,
        loss_weights=[0.3, 0.7] if several else None,
        metrics=[["accuracy"], ["accuracy"]] if several else ["accuracy"],
        jit_compile="jit" in case.settings,
        steps_per_execution=2 if "several steps" in case.settings else 1,
    )
    return model


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
    """How far training on meshes is from training by Keras alone, by what is compared."""
    configure()
    return [_compared(MeshCase(each[0], tuple(each[1]), each[2], tuple(each[3]))) for each in listed]


def _compared(case: MeshCase) -> dict[str, Any]:
    x, y, weights = data_for(case.model)
    settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    keras.backend.clear_session()
    alone = made(case, alone=True)
    expected = alone.fit(x, y, sample_weight=weights, **settings).history
    if "auto" in case.settings:
        dist = DistributedFit(mesh=dict(zip(("batch", "model"), case.mesh, strict=True)), layout="auto")
    else:
        dist = DistributedFit(distribution_for(case))
    keras.backend.clear_session()
    with dist.scope():
        model = made(case, alone=False)
    history = dist.fit(model, x, y, sample_weight=weights, **settings).history
    # Batches that can't be divided.
    evaluated, also = (each.evaluate(x, y, sample_weight=weights, verbose=0, batch_size=11) for each in (model, alone))
    predicted, those = (keras.tree.flatten(each.predict(x, verbose=0, batch_size=11)) for each in (model, alone))
    divided = {each.path: storage.axes for each, storage in variables_on_mesh(model) if any(storage.axes)}
    return {
        "weights": apart(model.get_weights(), alone.get_weights()),
        "history": apart(map(np.asarray, history.values()), [np.asarray(expected[name]) for name in history]),
        "evaluated": apart([np.asarray(evaluated)], [np.asarray(also)]),
        "predicted": apart(predicted, those),
        "names": list(history) == list(expected),
        "divided": divided,
        "explained": str(dist.explain()),
    }


def refused(which: str) -> str:
    """What is said of a model that can't be trained as it is on a mesh."""
    configure()
    layers_of = {
        "loop": lambda: [layers.Lambda(lambda x: tf.map_fn(lambda row: 2.0 * row, x), name="looped")],
        "wrong": lambda: [layers.Lambda(_doubled, name="doubled")],
        "accumulating": lambda: [],
        "eager": lambda: [],
        "pattern": lambda: [],
        "batch": lambda: [],
        "output": lambda: [],
    }[which]
    mesh = mesh_of((2, 2))
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*first/kernel"] = (None, "model")
    if which == "pattern":
        layout[".*second/kernel"] = (None, "model")
    if which == "output":
        layout[".*second/output"] = ("batch", None)
    dist = DistributedFit(keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))
    with dist.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(8, name="first"), *layers_of(), layers.Dense(2)])
        optimizer: Any = keras.optimizers.SGD(0.1)
        accumulating = AccumulatingOptimizer(optimizer, 2) if which == "accumulating" else optimizer
        model.compile(accumulating, "mse", run_eagerly=which == "eager")
    rows = 7 if which == "batch" else 8
    before = model.get_weights()
    try:
        dist.fit(model, np.ones((rows, 8), "float32"), np.ones((rows, 2), "float32"), batch_size=rows, verbose=0)
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
    """How far files, a backup and what is undone are from what is on the mesh."""
    configure()
    case = MeshCase("mlp", (2, 2), "adam")
    x, y, _ = data_for(case.model)
    settings = {"batch_size": 22, "shuffle": False, "verbose": 0}
    uninterrupted = made(case, alone=True)
    uninterrupted.fit(x, y, epochs=2, **settings)

    def dist() -> DistributedFit:
        return DistributedFit(mesh={"batch": 2, "model": 2}, layout="auto")

    first = dist()
    with first.scope():
        model = made(case, alone=False)
    first.fit(model, x, y, epochs=1, callbacks=[Backup(f"{directory}/backup", delete_when_done=False)], **settings)
    model.save(f"{directory}/model.keras")
    model.save_weights(f"{directory}/model.weights.h5")
    loaded: Any = keras.saving.load_model(f"{directory}/model.keras")
    other, resumed = made(case, alone=True), made(case, alone=True)
    other.load_weights(f"{directory}/model.weights.h5")
    weights, slots = model.get_weights(), [each.numpy() for each in model.optimizer.variables]
    read: Any = keras.saving.load_model(f"{directory}/model.keras")
    dist().fit(loaded, x, y, initial_epoch=1, epochs=2, **settings)
    resumed.fit(x, y, epochs=2, callbacks=[Backup(f"{directory}/backup")], **settings)
    model.set_weights(weights)
    again = model.get_weights()
    first.prepare(model).undo()
    model.fit(x, y, initial_epoch=1, epochs=2, **settings)
    expected = uninterrupted.get_weights()
    return {
        "keras": apart(read.get_weights(), weights),
        "slots": apart([each.numpy() for each in read.optimizer.variables], slots),
        "weights": apart(other.get_weights(), weights),
        "set": apart(again, weights),
        "loaded": apart(loaded.get_weights(), expected),
        "resumed": apart(resumed.get_weights(), expected),
        "undone": apart(model.get_weights(), expected),
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
