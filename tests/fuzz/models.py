"""Models, losses, optimizers and data of a case."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fuzz.cases import LABELS, SEQUENCES, TOKENS, Case
from keras import layers, ops

FEATURES, OUTPUTS, LENGTH, WORDS = 4, 3, 5, 7
_registered = keras.saving.register_keras_serializable(package="fuzz")


def _squares(y: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y - y_pred), axis=-1)


@_registered
def bends(y: Any, y_pred: Any) -> Any:
    """A value for each row, or each position of it."""
    return ops.mean(ops.sqrt(1 + ops.square(y - y_pred)), axis=-1)


@_registered
def one_number(y: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y - y_pred))


@_registered
class Pairs(keras.losses.Loss):
    """Compares the rows of a batch."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        distances = ops.sum(ops.square(y_pred[:, None] - y_pred[None]), -1)
        wanted = ops.sum(ops.square(y_true[:, None] - y_true[None]), -1)
        return ops.mean(ops.square(ops.tanh(distances) - ops.tanh(wanted)), -1)


@_registered
class Own(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return bends(y_true, y_pred) + 0.1 * _squares(y_true, y_pred)


def loss_of(name: str) -> Any:
    sparse = keras.losses.SparseCategoricalCrossentropy
    mean = "mean_with_sample_weight"
    return {
        "mse": lambda: "mse",
        "object": lambda: keras.losses.LogCosh(),
        "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
        "weighted mean": lambda: keras.losses.MeanSquaredError(reduction=mean),
        "not reduced": lambda: keras.losses.MeanSquaredError(reduction=None),
        "function": lambda: bends,
        "own class": lambda: Own(),
        "one number": lambda: one_number,
        "labels": lambda: sparse(from_logits=True),
        "ignored labels": lambda: sparse(from_logits=True, ignore_class=0),
        "labels, weighted mean": lambda: sparse(from_logits=True, reduction=mean),
        "smoothed": lambda: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        "binary": lambda: keras.losses.BinaryCrossentropy(from_logits=True),
        "cosine": lambda: keras.losses.CosineSimilarity(),
        "pairs": lambda: Pairs(),
    }[name]()


@_registered
class SummedEmbedding(layers.Embedding):
    """An embedding whose gradient is dense: all lookups of a row are one."""

    def call(self, inputs: Any) -> Any:
        return ops.matmul(ops.one_hot(inputs, self.input_dim), self.embeddings)


@_registered
class AddsLoss(layers.Layer):
    """Adds a mean, or a value for each row."""

    def __init__(self, values: bool = False, **options: Any):
        super().__init__(**options)
        self.values = values

    def call(self, inputs: Any) -> Any:
        squares = 0.1 * ops.square(inputs)
        self.add_loss(ops.mean(squares, -1) if self.values else ops.mean(squares))
        return inputs

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "values": self.values}


@_registered
class Counting(layers.Layer):
    """A state that counts calls in training and changes what they give."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1.0)
        return inputs * (1 + 0.1 * self.calls)


@_registered
class ComputesLoss(keras.Model):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        added = 0.1 * ops.mean(ops.square(y_pred))
        return super().compute_loss(x, y, y_pred, sample_weight, training) + added


@_registered
class Guide(keras.Model):
    """A `train_step` as Keras's guide writes it."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.metrics[0].update_state(loss, sample_weight=ops.shape(keras.tree.flatten(x)[0])[0])
        return self.compute_metrics(x, y, y_pred, sample_weight)


@_registered
class MeanStep(keras.Model):
    """A loss that the step computes itself, and returns as it is."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - self(x, training=True))) + sum(self.losses)
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@_registered
class TwoPhases(keras.Model):
    """Two updates for each batch, of the first half of the weights and of the second."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data[:2]
        middle = len(self.trainable_weights) // 2
        for weights in (self.trainable_weights[:middle], self.trainable_weights[middle:]):
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(y - self(x, training=True)))
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


_CLASSES = {
    "Keras's": keras.Model,
    "compute_loss": ComputesLoss,
    "guide": Guide,
    "mean": MeanStep,
    "two phases": TwoPhases,
}


def model_of(case: Case, summed: bool = False) -> keras.Model:
    """The model, not compiled. `summed` gives embeddings dense gradients."""
    name, regularizer = case["model"], case["regularizer"]
    tokens, two = name in TOKENS, name in ("two inputs", "named inputs")
    inputs: Any = keras.Input((LENGTH,), dtype="int32") if tokens else keras.Input((FEATURES,))
    x: Any = inputs
    if tokens:
        embedding = SummedEmbedding if summed else layers.Embedding
        x = embedding(WORDS, 6, mask_zero=name != "embedding", name="words")(x)
    if two:
        inputs = [inputs, keras.Input((2,))]
        x = layers.Concatenate()(inputs)
        if name == "named inputs":
            inputs = {"b": inputs[0], "a": inputs[1]}
    constraint = keras.constraints.MaxNorm(0.8) if name == "constrained" else None
    first = layers.Dense(
        6,
        activation="tanh",
        kernel_regularizer=regularizer,
        kernel_constraint=constraint,
        activity_regularizer=keras.regularizers.L2(0.1) if name == "activity" else None,
        trainable=name != "frozen",
        name="first",
    )
    if name == "convolution":
        x = layers.Conv1D(3, 2, activation="tanh", name="windows")(layers.Reshape((FEATURES, 1))(x))
        x = layers.Flatten()(x)
    x = first(x)
    if name in ("shared", "residual"):
        again = layers.Dense(6, activation="gelu", name="again")
        x = again(again(x)) if name == "shared" else x + again(x)
    elif name == "nested":
        within = keras.Input((6,))
        x = keras.Sequential([within, layers.Dense(5, activation="tanh"), layers.Dense(6)], name="inner")(x)
    elif name == "masked LSTM":
        x = layers.LSTM(4, return_sequences=True)(x)
    elif name == "masked attention":
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 3)(x, x))
    elif name in ("embedding", "masked mean"):
        x = layers.GlobalAveragePooling1D()(x)
    elif name == "layer norm":
        x = layers.LayerNormalization()(x)
    elif name in ("adds a mean", "adds values"):
        x = AddsLoss(name == "adds values")(x)
    elif name == "counting":
        x = Counting()(x)
    elif "batch norm" in name:
        x = layers.BatchNormalization(synchronized=name.startswith("synchronized"))(x)
    outputs: Any = layers.Dense(OUTPUTS, name="out")(x)
    if name == "two outputs":
        outputs = [outputs, layers.Dense(OUTPUTS, name="other", kernel_regularizer=regularizer)(x)]
    return _CLASSES[case["step"]](inputs, outputs)


def compile_options(case: Case) -> dict[str, Any]:
    """Of `compile`, all but the optimizer and how steps are run."""
    loss = loss_of(case["loss"])
    two = case["model"] == "two outputs"
    options: dict[str, Any] = {"loss": [loss, loss_of(case["loss"])] if two else loss}
    if case["loss_weights"] != "none":
        weights = [0.3, 2.0] if two else [0.7]
        annealed = case["loss_weights"] == "annealed"
        options["loss_weights"] = [keras.Variable(each, trainable=False) for each in weights] if annealed else weights
    # No accuracy: rounding turns it by a whole row.
    metric = "sparse_categorical_crossentropy" if case["loss"] in LABELS else "mae"
    metrics = [[metric], [metric]] if two else [metric]
    if case["metrics"] in ("plain", "both"):
        options["metrics"] = metrics
    if case["metrics"] in ("weighted", "both"):
        options["weighted_metrics"] = [["mse"], ["mse"]] if two else ["mse"]
        if case["loss"] in LABELS:
            options["weighted_metrics"] = metrics
    return options


_OPTIMIZERS = {
    "SGD": ("SGD", 0.1, {}),
    "momentum": ("SGD", 0.05, {"momentum": 0.9, "nesterov": True}),
    "Adam": ("Adam", 0.02, {"epsilon": 1e-3}),
    "AdamW": ("AdamW", 0.02, {"epsilon": 1e-3}),
    "amsgrad": ("Adam", 0.02, {"epsilon": 1e-3, "amsgrad": True}),
    "RMSprop": ("RMSprop", 0.01, {"epsilon": 1e-2, "centered": True}),
    "Adagrad": ("Adagrad", 0.05, {"epsilon": 1e-3}),
    "Adadelta": ("Adadelta", 1.0, {"epsilon": 1e-3}),
    "Adamax": ("Adamax", 0.02, {"epsilon": 1e-3}),
    "Nadam": ("Nadam", 0.02, {"epsilon": 1e-3}),
    "Lamb": ("Lamb", 0.02, {"epsilon": 1e-3}),
    "Ftrl": ("Ftrl", 0.1, {}),
}
ADAPTIVE = tuple(_OPTIMIZERS)[2:]


def optimizer_of(case: Case, kinds: Any = None) -> keras.optimizers.Optimizer:
    """The inner optimizer. `kinds` makes another class of the optimizer's."""
    name, rate, options = _OPTIMIZERS[case["optimizer"]]
    schedules = keras.optimizers.schedules
    if case["schedule"] == "exponential":
        rate = schedules.ExponentialDecay(rate, decay_steps=2, decay_rate=0.7)
    elif case["schedule"] == "piecewise":
        rate = schedules.PiecewiseConstantDecay([1, 3], [rate, rate / 2, rate / 4])
    options = dict(options)
    if case["clip"] != "none":
        options[case["clip"]] = {"clipnorm": 0.1, "global_clipnorm": 0.2, "clipvalue": 0.02}[case["clip"]]
    if case["average"] != "none":
        options |= {"use_ema": True, "ema_momentum": 0.8}
        options |= {"ema_overwrite_frequency": 2} if case["average"] == "ema overwritten" else {}
    if case["decay"]:
        options["weight_decay"] = case["decay"]
    if case["scale"] == "loss_scale_factor":
        options["loss_scale_factor"] = 8.0
    kind = getattr(keras.optimizers, name)
    return (kinds(kind) if kinds else kind)(rate, **options)


def columns_of(case: Case, rows: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Inputs, targets, and sample weights or `None`."""
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return draw.normal(size=(rows, *shape)).astype("float32")

    x: Any = normal(FEATURES)
    if case["model"] in TOKENS:
        x = draw.integers(1, WORDS, (rows, LENGTH)).astype("int32")
        x[np.arange(LENGTH) >= draw.integers(1, LENGTH + 1, rows)[:, None]] = 0
    if case["model"] in ("two inputs", "named inputs"):
        x = {"b": x, "a": normal(2)} if case["model"] == "named inputs" else (x, normal(2))
    shape = (LENGTH,) if case["model"] in SEQUENCES else ()

    def target() -> np.ndarray:
        if case["loss"] in LABELS:
            return draw.integers(0, OUTPUTS, (rows, *shape)).astype("int32")
        if case["loss"] in ("smoothed", "binary"):
            return np.eye(OUTPUTS, dtype="float32")[draw.integers(0, OUTPUTS, (rows, *shape))]
        return normal(*shape, OUTPUTS)

    two = case["model"] == "two outputs"
    y = (target(), target()) if two else target()
    if case["weights"] in ("none", "by class"):
        return x, y, None

    def weights() -> np.ndarray:
        # Of sequences, Keras takes those of rows as a column.
        by_position = case["weights"] == "by position"
        found = draw.uniform(0.2, 3, (rows, *(shape if by_position else (1,) * len(shape)))).astype("float32")
        if case["weights"] == "some zero":
            found[draw.uniform(size=rows) < 0.4] = 0
        return found

    return x, y, (weights(), weights()) if two else weights()
