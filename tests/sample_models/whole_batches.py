"""Steps that need the whole batch: each trains otherwise if a part of it is taken for the whole."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(22, 6)).astype("float32")
Y = GENERATOR.integers(0, 3, 22)
TOKENS = GENERATOR.integers(0, 9, (22, 5))


def mlp(inputs, outputs, *more):
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(8, activation="tanh"), *more, layers.Dense(outputs)])


class Encoder(keras.Model):
    """A head on six numbers, a step of one update, and a metric of the loss."""

    def __init__(self, *more):
        super().__init__()
        self.head = mlp(6, 4, *more)
        self.tracker = keras.metrics.Mean(name="loss")
        self.seeds = keras.random.SeedGenerator(5)

    @property
    def metrics(self):
        return [self.tracker]

    def loss_of(self, x, y):
        return ops.mean(ops.square(self.head(x, training=True)))

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        return loss, tape.gradient(loss, self.trainable_weights)

    def train_step(self, data):
        loss, gradients = self.gradients(*data)
        self.optimizer.apply(gradients, self.trainable_weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "number": loss}


class Clipped(Encoder):
    """Clips by hand, to a norm of the whole gradient."""

    def gradients(self, x, y):
        loss, gradients = super().gradients(x, y)
        return loss, tf.clip_by_global_norm(gradients, 0.05)[0]


class Projected(Encoder):
    """Two tasks, of which one's gradient is projected on the other's normal (PCGrad)."""

    def gradients(self, x, y):
        with tf.GradientTape(persistent=True) as tape:
            outputs = self.head(x)
            losses = [ops.mean(ops.square(outputs[:, 0] - 1)), ops.mean(ops.square(outputs[:, 1:] + outputs[:, :1]))]
        weights = self.trainable_weights
        one, other = (tape.gradient(loss, weights, unconnected_gradients="zero") for loss in losses)
        dot = sum(ops.sum(a * b) for a, b in zip(one, other, strict=True))
        share = ops.minimum(dot, 0.0) / sum(ops.sum(b * b) for b in other)
        return sum(losses), [a - share * b + b for a, b in zip(one, other, strict=True)]


class GradNorm(Encoder):
    """Penalizes the norm of a gradient with respect to weights: a derivative of second order."""

    def gradients(self, x, y):
        kernel = self.head.layers[-1].kernel
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                loss = super().loss_of(x, y)
            slope = inner.gradient(loss, kernel)
            loss += 0.3 * ops.sum(ops.square(slope))
        return loss, tape.gradient(loss, self.trainable_weights)


class Sam(Encoder):
    """Sharpness-aware minimization: moves the weights, differentiates, and moves them back."""

    def gradients(self, x, y):
        _, first = super().gradients(x, y)
        norm = ops.sqrt(sum(ops.sum(ops.square(each)) for each in first))
        moves = [0.05 * each / norm for each in first]
        for weight, move in zip(self.trainable_weights, moves, strict=True):
            weight.assign_add(move)
        loss, second = super().gradients(x, y)
        for weight, move in zip(self.trainable_weights, moves, strict=True):
            weight.assign_sub(move)
        return loss, second


class BarlowTwins(Encoder):
    """Decorrelates the features of a batch, of views that differ by noise drawn in the step."""

    def loss_of(self, x, y):
        views = [self.head(x + 0.1 * keras.random.normal(ops.shape(x), seed=self.seeds)) for _ in range(2)]
        one, other = ((view - ops.mean(view, 0)) / (ops.std(view, 0) + 1e-3) for view in views)
        similar = ops.matmul(ops.transpose(one), other) / ops.cast(ops.shape(x)[0], "float32")
        return ops.mean(ops.square(similar - ops.eye(4)))


class Triplets(Encoder):
    """Compares each row with the farthest of its class and the nearest of others."""

    def loss_of(self, x, y):
        rows = self.head(x)
        far = ops.sum(ops.square(rows[:, None] - rows[None]), -1)
        same = ops.cast(y[:, None] == y[None], "float32")
        return ops.mean(ops.relu(ops.max(far * same, 1) - ops.min(far + 100 * same, 1) + 1))


class MeanTeacher(Encoder):
    """Follows an average of its own weights, and divides by how many rows the teacher is sure of."""

    def __init__(self):
        super().__init__()
        self.teacher = keras.models.clone_model(self.head)
        self.teacher.trainable = False
        self.teacher.set_weights(self.head.get_weights())

    def loss_of(self, x, y):
        taught = ops.tanh(self.teacher(x))
        sure = ops.cast(ops.max(taught, -1) > 0.1, "float32")
        error = ops.sum(ops.square(self.head(x, training=True) - taught), -1) + 0.1 * ops.cast(y, "float32")
        return ops.sum(sure * error * ops.square(self.head(x))[:, 0]) / (ops.sum(sure) + 1)

    def train_step(self, data):
        logs = super().train_step(data)
        for ours, average in zip(self.head.weights, self.teacher.weights, strict=True):
            average.assign(0.9 * average + 0.1 * ours)
        return logs


class CenterLoss(Encoder):
    """A loss with a state of its own: the center of each class, which moves with each batch."""

    def __init__(self):
        super().__init__()
        self.centers = self.add_weight(shape=(3, 4), initializer="zeros", trainable=False, name="centers")

    def loss_of(self, x, y):
        rows, hot = self.head(x), ops.one_hot(y, 3)
        means = ops.matmul(ops.transpose(hot), rows) / (ops.sum(hot, 0)[:, None] + 1)
        loss = ops.mean(ops.square(rows - ops.take(self.centers + 0, y, axis=0)))
        self.centers.assign(0.5 * self.centers + 0.5 * ops.stop_gradient(means))
        return loss + ops.mean(ops.square(rows))


class Centered(layers.Layer):
    """Mixes rows."""

    def call(self, rows):
        return rows - ops.mean(rows, axis=0, keepdims=True)


class Adds(layers.Layer):
    """Adds a loss of all rows."""

    def call(self, rows):
        self.add_loss(0.1 * ops.mean(ops.square(rows)) ** 2)
        return rows


class InItsGradient(layers.Layer):
    """Has a number of all rows in its gradient, and not in its output."""

    def call(self, rows):
        mean = ops.mean(rows, 0, keepdims=True)
        return rows + mean - ops.stop_gradient(mean)


class Counts(layers.Layer):
    """Counts its calls, and scales by the count."""

    def __init__(self):
        super().__init__()
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, rows):
        self.calls.assign_add(1.0)
        return rows * (1 + 0.1 * self.calls)


class Mixed(Encoder):
    """A network of which one layer can't be divided, and the others can."""

    def __init__(self, layer=Centered):
        super().__init__(layer())

    def loss_of(self, x, y):
        outputs = self.head(x, training=True)
        return ops.mean(ops.square(outputs - 1)) + sum(self.losses)


class AddsLosses(Mixed):
    def __init__(self):
        super().__init__(Adds)


class MixesGradients(Mixed):
    def __init__(self):
        super().__init__(InItsGradient)


class HasCounter(Mixed):
    def __init__(self):
        super().__init__(Counts)


class Summed(layers.Layer):
    """Sums the rows of ragged groups."""

    def call(self, groups):
        return tf.reduce_sum(groups, axis=1)


class Ragged(Encoder):
    """A layer gets ragged numbers that another has computed."""

    def __init__(self):
        super().__init__()
        self.summed = Summed()

    def loss_of(self, x, y):
        groups = tf.RaggedTensor.from_tensor(self.head(x)[:, :, None], lengths=ops.cast(y + 1, "int64"))
        return ops.mean(ops.square(self.summed(groups) - 1))


class Decoder(keras.Model):
    """A small language model: tokens and positions in one table, or the output tied to it."""

    def __init__(self, tied=False):
        super().__init__()
        self.table, self.mix, self.out = (
            layers.Embedding(9, 4, mask_zero=True),
            layers.LSTM(4, return_sequences=True),
            None,
        )
        self.positions = layers.Embedding(5, 4)
        self.table.build((None, 5))
        self.positions.build((5,))
        self.mix.build((None, 5, 4))
        self.tied = tied
        if not tied:
            self.out = layers.Dense(9)
            self.out.build((None, 5, 4))

    def call(self, tokens):
        rows = self.mix(self.table(tokens) + self.positions(ops.arange(5)))
        return ops.matmul(rows, ops.transpose(self.table.embeddings)) if self.tied else self.out(rows)

    def train_step(self, data):
        tokens = data
        with tf.GradientTape() as tape:
            scores = self(tokens[:, :-1] if False else tokens, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(ops.roll(tokens, -1, 1), scores, from_logits=True)
            loss = ops.sum(losses * ops.cast(tokens > 0, "float32")) / ops.sum(ops.cast(tokens > 0, "float32"))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"number": loss}


class TiedDecoder(Decoder):
    def __init__(self):
        super().__init__(tied=True)


class Reconsidering(keras.Model):
    """A step that scales a part of the loss by a coefficient, which a callback raises from 0."""

    def __init__(self):
        super().__init__()
        self.head = mlp(6, 4)
        self.coefficient = self.add_weight(shape=(), initializer="zeros", trainable=False, name="coefficient")

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            rows = self.head(x)
            loss = ops.mean(ops.square(rows)) + self.coefficient * ops.logsumexp(ops.matmul(rows, ops.transpose(rows)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"number": loss}


class Raise(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.coefficient.assign(float(epoch))


STEPS = {
    kind.__name__: kind
    for kind in (
        *(Clipped, Projected, GradNorm, Sam, BarlowTwins, Triplets, MeanTeacher, CenterLoss, Mixed, AddsLosses),
        *(MixesGradients, HasCounter, Ragged, Decoder, TiedDecoder, Reconsidering),
    )
}


def data_of(kind):
    return (TOKENS,) if issubclass(kind, Decoder) else (X, Y)


def made(kind, **options):
    """The model of a step; embeddings are trained with Adam, whose step for them differs if lookups are added."""
    keras.utils.set_random_seed(1)
    model = kind()
    model.compile(
        keras.optimizers.Adam(0.01) if isinstance(model, Decoder) else keras.optimizers.SGD(0.05, 0.9), **options
    )
    return model


def fitted(model, fit=None, rows=10):
    """The weights and the history of two epochs."""
    callbacks = [Raise()] if isinstance(model, Reconsidering) else []
    options = {"batch_size": rows, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    history = (fit or model.fit)(*data_of(type(model)), **options).history
    return [np.array(each) for each in model.get_weights()], history
