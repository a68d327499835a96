"""Models to place on several devices, trained there and by Keras on one device; in processes that have the devices."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from oracles.histories import defined
from trainings.sharded_training import OPTIMIZERS, SETTINGS

from keras_paragrad import AccumulatingOptimizer, DistributedFit
from keras_paragrad.distribution import Backup

ROWS, LENGTH, VOCABULARY, SIDE = 22, 6, 40, 8
DEVICES = [f"CPU:{index}" for index in range(4)]


class AddsLoss(layers.Layer):
    """Passes on what it gets, and adds a loss of it."""

    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(inputs**2))
        return inputs


def mlp() -> keras.Model:
    regular = {"kernel_regularizer": "l2", "kernel_constraint": keras.constraints.MaxNorm(1.0)}
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(12, "tanh", name="one", **regular),
            layers.Dense(10, "tanh", name="two"),
            layers.Dropout(0.0, name="none"),
            layers.Dense(4, name="three"),
        ]
    )


def skips() -> keras.Model:
    """One tensor is used in every stage, and one layer is called several times in the same."""
    inputs = keras.Input((8,))
    skip = hidden = layers.Dense(8, "tanh", name="first")(inputs)
    for index in range(4):
        hidden = layers.Add(name=f"add_{index}")([layers.Dense(8, "gelu", name=f"dense_{index}")(hidden), skip])
        hidden = layers.LayerNormalization(name=f"norm_{index}")(hidden)
    shared = layers.Dense(8, "tanh", name="shared")
    last = layers.Add(name="last")([shared(shared(hidden)), skip])
    return keras.Model(inputs, layers.Dense(4, name="head")(last))


def transformer() -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, 16, mask_zero=True, name="embedding")(inputs)
    for index in range(2):
        attention = layers.MultiHeadAttention(2, 8, name=f"attention_{index}")(hidden, hidden)
        hidden = layers.LayerNormalization(name=f"norm_{index}")(layers.Add(name=f"add_{index}")([hidden, attention]))
        narrow = layers.Dense(16, "gelu", name=f"narrow_{index}")(hidden)
        hidden = layers.LayerNormalization(name=f"block_{index}")(layers.Add(name=f"sum_{index}")([hidden, narrow]))
    return keras.Model(inputs, layers.Dense(4, name="head")(hidden))


def recurrent() -> keras.Model:
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, 8, mask_zero=True, name="embedding")(inputs)
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.GRU(8, name="gru")(hidden)))


def several() -> keras.Model:
    """Two inputs and two outputs, one of which is made in the first stage."""
    numbers, tokens = keras.Input((8,), name="numbers"), keras.Input((LENGTH,), dtype="int32", name="tokens")
    hidden = layers.Dense(8, "tanh", name="one")(numbers)
    early = layers.Dense(4, name="early")(hidden)
    words = layers.GlobalAveragePooling1D(name="pool")(layers.Embedding(VOCABULARY, 8, name="embedding")(tokens))
    late = layers.Dense(4, name="late")(AddsLoss(name="adds")(layers.Concatenate(name="both")([hidden, words])))
    return keras.Model([numbers, tokens], [early, late])


def masked() -> keras.Model:
    """A mask that every stage uses."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, 8, mask_zero=True, name="embedding")(inputs)
    attended = layers.MultiHeadAttention(2, 8, name="attention")(hidden, hidden)
    pooled = [
        layers.GlobalAveragePooling1D(name=f"pool_{index}")(each) for index, each in enumerate([hidden, attended])
    ]
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.Concatenate(name="both")(pooled)))


def stateful() -> keras.Model:
    """State that each micro-batch finds as the one before it left it."""
    inputs = keras.Input((8,))
    hidden = layers.Dropout(0.3, name="dropout", seed=3)(layers.Dense(8, "tanh", name="one")(inputs))
    hidden = layers.BatchNormalization(name="statistics")(layers.Dense(8, "tanh", name="two")(hidden))
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.Dropout(0.3, name="again", seed=4)(hidden)))


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


def images() -> keras.Model:
    """With what DTensor has no rule for: another order of places."""
    inputs = keras.Input((SIDE, SIDE, 4))
    hidden = layers.Conv2D(8, 2, 2, "same", activation="tanh", name="convolved")(inputs)
    hidden = layers.TimeDistributed(layers.Dense(8))(hidden)
    hidden = layers.Lambda(lambda each: keras.ops.flip(each, (0, 2)))(hidden)
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.Flatten()(hidden)))


def both_ways() -> keras.Model:
    """With layers that flip what they read: one in both directions."""
    inputs = keras.Input((SIDE, SIDE, 4))
    hidden = layers.Bidirectional(layers.GRU(4, return_sequences=True))(layers.Reshape((4, -1))(inputs))
    hidden = layers.Conv1D(6, 2, activation="tanh")(hidden)
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.LSTM(4, go_backwards=True)(hidden)))


class Subclassed(keras.Model):
    """With a weight of its own, and what comes after a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(VOCABULARY, 16, mask_zero=True)
        self.last = layers.LSTM(8)
        self.head = self.add_weight(shape=(8, 4), name="head")

    def call(self, inputs):
        return keras.ops.matmul(self.last(self.embedding(inputs)), self.head)


MODELS: dict[str, Callable[[], keras.Model]] = {
    **{"mlp": mlp, "skips": skips, "transformer": transformer, "recurrent": recurrent, "several": several},
    **{"masked": masked, "stateful": stateful},
    **{"cnn": cnn, "images": images, "both ways": both_ways, "tied": tied, "subclassed": Subclassed},
}


def data_for(name: str) -> tuple[Any, Any, Any]:
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=(ROWS, 8)).astype("float32")
    tokens = generator.integers(0, VOCABULARY, (ROWS, LENGTH)) * generator.integers(0, 3, (ROWS, LENGTH))
    tokens = np.minimum(tokens, VOCABULARY - 1).astype("int32")
    targets = generator.integers(0, 4, ROWS)
    weights = np.linspace(0.5, 2.0, ROWS).astype("float32")
    if name == "several":
        return [numbers, tokens], [targets, targets[::-1].copy()], [weights, weights]
    if name in ("transformer", "tied"):
        # One target a token: masked ones count for nothing.
        of_tokens = generator.integers(0, 4, (ROWS, LENGTH)) if name == "transformer" else np.roll(tokens, 1, axis=1)
        return tokens, of_tokens, np.repeat(weights[:, None], LENGTH, 1)
    if name in ("cnn", "images", "both ways"):
        return generator.normal(size=(ROWS, SIDE, SIDE, 4)).astype("float32"), targets, weights
    return (tokens if name in ("recurrent", "masked", "subclassed") else numbers), targets, weights


def made(case: Any, *, alone: bool, **compiled: Any) -> keras.Model:
    """The model of a case, which has one's name, an optimizer's and settings."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(next((name for name in case.settings if name.startswith("mixed")), "float32"))
    try:
        model = MODELS[case.model]()
    finally:
        keras.config.set_dtype_policy("float32")
    if not model.built:
        model(data_for(case.model)[0][:1])
    options = {key: value for name in case.settings for key, value in SETTINGS.get(name, {}).items()}
    optimizer: Any = OPTIMIZERS[case.optimizer](**options)
    if "excluded" in case.settings:
        optimizer.exclude_from_weight_decay(var_list=model.trainable_variables[:2])
    if "equal" in case.settings or ("accumulate" in case.settings and not alone):
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
        # One device takes few steps, in less time than tracing. Eagerly, Keras's history of several losses is another.
        run_eagerly=(alone and not several) or "eager" in case.settings,
        **compiled,
    )
    if "built" in case.settings:
        optimizer.build(model.trainable_variables)
    return model


def apart(ours: Any, theirs: Any) -> float:
    """The largest difference between two lists of arrays, in parts of the largest number."""
    most = max(float(np.abs(each).max(initial=0)) for each in theirs)
    return max(float(np.abs(a - b).max(initial=0)) for a, b in zip(ours, theirs, strict=True)) / max(most, 1e-9)


def configure() -> None:
    logical = [tf.config.LogicalDeviceConfiguration()] * len(DEVICES)
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], logical)


def compared(
    case: Any,
    dist: DistributedFit,
    batch: int,
    change: Callable[[keras.Model], Any] = lambda model: None,
    evaluated: int | None = None,
    **compiled: Any,
) -> tuple[keras.Model, dict[str, Any]]:
    """Trains a case in a way and on one device.

    Args:
        case: The case.
        dist: The way.
        batch: How many rows an update takes.
        change: Is called with the model before it is trained.
        evaluated: The batch size for an evaluation and predictions, if there are to be any.
        **compiled: Of `compile`.

    Returns:
        The model, and how far apart they end, by what is compared.
    """
    x, y, weights = data_for(case.model)
    settings = {"sample_weight": weights, "epochs": 2, "shuffle": False, "verbose": 0}
    keras.backend.clear_session(free_memory=False)
    alone = made(case, alone=True)
    expected = defined(alone.fit(x, y, batch_size=batch, **settings).history)
    keras.backend.clear_session(free_memory=False)
    with dist.scope():
        model = made(case, alone=False, **compiled)
    change(model)
    batch = batch // 2 if "accumulate" in case.settings else batch
    if "equal" in case.settings:
        # Without what weights micro-batches: as Keras trains on one device.
        dist.prepare(model)
        history = model.fit(x, y, batch_size=batch, **settings).history
    else:
        history = dist.fit(model, x, y, batch_size=batch, **settings).history
    history = defined(history)
    found = {
        "weights": apart(model.get_weights(), alone.get_weights()),
        "history": apart(map(np.asarray, history.values()), [np.asarray(expected[name]) for name in history]),
        "names": list(history) == list(expected),
        "explained": str(dist.explain()),
    }
    if evaluated is not None:
        options = {"verbose": 0, "batch_size": evaluated}
        shown, also = (
            defined(each.evaluate(x, y, sample_weight=weights, return_dict=True, **options)) for each in (model, alone)
        )
        found["evaluated"] = apart([np.asarray(list(shown.values()))], [np.asarray(list(also.values()))])
        found["predicted"] = apart(*(keras.tree.flatten(each.predict(x, **options)) for each in (model, alone)))
    return model, found


def saved(case: Any, dist: Callable[[], DistributedFit], directory: str, batch: int) -> dict[str, float]:
    """How far files of a model that is placed, and its backup resumed on one device, are from what they hold."""
    x, y, _ = data_for(case.model)
    settings = {"batch_size": batch, "shuffle": False, "verbose": 0}
    uninterrupted, *others = (made(case, alone=True) for _ in range(4))
    uninterrupted.fit(x, y, epochs=2, **settings)
    first = dist()
    with first.scope():
        model = made(case, alone=False)
    first.fit(model, x, y, epochs=1, callbacks=[Backup(f"{directory}/backup", delete_when_done=False)], **settings)
    model.save(f"{directory}/model.keras")
    model.save_weights(f"{directory}/model.weights.h5")
    tf.train.Checkpoint(model=model).save(f"{directory}/checkpoint")
    loaded: Any = keras.saving.load_model(f"{directory}/model.keras")
    others[0].load_weights(f"{directory}/model.weights.h5")
    tf.train.Checkpoint(model=others[1]).restore(f"{directory}/checkpoint-1").assert_existing_objects_matched()
    weights, slots = model.get_weights(), [each.numpy() for each in model.optimizer.variables]
    read: Any = keras.saving.load_model(f"{directory}/model.keras")
    dist().fit(loaded, x, y, initial_epoch=1, epochs=2, **settings)
    others[2].fit(x, y, epochs=2, callbacks=[Backup(f"{directory}/backup")], **settings)
    model.set_weights(weights)
    again = model.get_weights()
    first.prepare(model).undo()
    model.fit(x, y, initial_epoch=1, epochs=2, **settings)
    expected = uninterrupted.get_weights()
    return {
        "keras": apart(read.get_weights(), weights),
        "slots": apart([each.numpy() for each in read.optimizer.variables], slots),
        "weights": apart(others[0].get_weights(), weights),
        "checkpoint": apart(others[1].get_weights(), weights),
        "set": apart(again, weights),
        "loaded": apart(loaded.get_weights(), expected),
        "resumed": apart(others[2].get_weights(), expected),
        "undone": apart(model.get_weights(), expected),
    }
