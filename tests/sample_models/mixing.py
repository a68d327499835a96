"""Layers, losses and metrics that mix the examples of a batch, and some that look as if they did."""

import keras
import tensorflow as tf
from keras import layers, ops

# Labels that are missing.
MARKER = -999.0


class MinusBatchMean(layers.Layer):
    def call(self, inputs):
        return inputs - ops.mean(inputs, 0, keepdims=True)


class MinusLittle(layers.Layer):
    def call(self, inputs):
        return inputs - 1e-4 * ops.mean(inputs, 0)


class OverBatch(layers.Layer):
    def call(self, inputs):
        return ops.cumsum(inputs, 0)


class InTraining(layers.Layer):
    def call(self, inputs, training=False):
        return inputs - ops.mean(inputs, 0) if training else inputs


class ByNumberOfRows(layers.Layer):
    def call(self, inputs):
        return inputs / ops.cast(ops.shape(inputs)[0], inputs.dtype)


class InItsGradient(layers.Layer):
    """Has a number of the whole batch in its gradient, and not in its output."""

    def call(self, inputs):
        mean = ops.mean(inputs, 0, keepdims=True)
        return inputs + mean - ops.stop_gradient(mean)


class NormalizesItsGradient(layers.Layer):
    """Divides what comes back by its norm over the batch."""

    def call(self, inputs):
        @tf.custom_gradient
        def identity(values):
            return tf.identity(values), lambda upstream: upstream / (tf.norm(upstream) + 1e-6)

        return identity(inputs)


class Shifted(layers.Layer):
    """Has a number of the whole batch in its computation, and not in its output."""

    def call(self, inputs):
        return inputs - ops.stop_gradient(ops.max(inputs)) + ops.stop_gradient(ops.max(inputs))


class UnknownToKeras(layers.Layer):
    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0.0)

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs - ops.mean(inputs, 0)


class Recommender(keras.Model):
    """The one of keras.io, whose `tensordot` sums over the batch."""

    def __init__(self):
        super().__init__()
        self.user, self.item = (layers.Embedding(50, 8, embeddings_initializer="he_normal") for _ in range(2))
        self.bias = layers.Embedding(50, 1)

    def call(self, inputs):
        score = ops.tensordot(self.user(inputs[:, 0]), self.item(inputs[:, 1]), 2)
        return ops.sigmoid(score + self.bias(inputs[:, 0]))


class Updating(layers.Layer):
    """Assigns what `update(state, inputs)` returns, and returns what `read(inputs, state)` does."""

    def __init__(
        self, update, read=lambda inputs, state: inputs, start="zeros", shape=(), aggregation="none", **settings
    ):
        super().__init__(**settings)
        self.update, self.read = update, read
        self.state = self.add_weight(shape=shape, initializer=start, trainable=False, aggregation=aggregation)

    def call(self, inputs, training=False):
        # As many do, it reads the state from before.
        outputs = self.read(inputs, self.state + 0)
        if training:
            self.state.assign(self.update(self.state, inputs))
        return outputs


class Codebook(Updating):
    """As of a VQ-VAE: rows are replaced by the nearest of four, which move to the mean of theirs."""

    def __init__(self, **settings):
        super().__init__(self.move, self.nearest, "random_normal", (4, 3), **settings)

    def chosen(self, state, inputs):
        distances = ops.sum(ops.square(inputs[:, None] - state), -1)
        return ops.one_hot(ops.argmin(distances, -1), 4)

    def move(self, state, inputs):
        chosen = self.chosen(state, inputs)
        means = ops.matmul(ops.transpose(chosen), inputs) / ops.maximum(ops.sum(chosen, 0), 1)[:, None]
        return 0.9 * state + 0.1 * means

    def nearest(self, inputs, state):
        return inputs + ops.stop_gradient(ops.matmul(self.chosen(state, inputs), state) - inputs)


def scaled(inputs, state):
    return inputs / (1 + ops.abs(state))


def largest(state, inputs):
    return ops.maximum(state, ops.max(ops.abs(inputs)))


def slow_mean(state, inputs):
    return 0.9999 * state + 0.0001 * ops.mean(inputs)


def sum_of_rows(state, inputs):
    return state + ops.sum(inputs)


def power_iteration(state, inputs):
    return ops.normalize(ops.matmul(ops.reshape(ops.arange(9.0) + 1, (3, 3)), state[:, None])[:, 0], axis=0)


class InBatchNegatives(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return -ops.diagonal(ops.log_softmax(ops.matmul(y_pred, ops.transpose(y_true))))


class OfPairs(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.relu(1.0 - (y_pred[::2] - y_pred[1::2]))


class OfNeighbours(keras.losses.Loss):
    def call(self, y_true, y_pred):
        pairs = ops.flip(ops.reshape(y_pred, (-1, 2, y_pred.shape[-1])), 1)
        return ops.mean(ops.square(y_pred - ops.reshape(pairs, ops.shape(y_pred))), -1)


class DividesItself(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_pred - y_true), -1) / ops.cast(ops.shape(y_pred)[0], y_pred.dtype)


class OfElements(keras.losses.Loss):
    """Flattens the examples' elements, as losses of tokens do."""

    def call(self, y_true, y_pred):
        return ops.reshape(ops.square(y_pred - y_true), (-1,))


def by_row(y, p):
    return ops.mean(ops.square(y - p), -1)


def marked(y, p):
    """A value per example, which the number of labels that aren't missing divides."""
    present = ops.cast(ops.not_equal(y, MARKER), "float32")
    return ops.mean(present * ops.square(y - p), -1) / ops.maximum(ops.mean(present), 0.01)


def unless_nan(y, p):
    present = ops.logical_not(ops.isnan(y))
    return marked(ops.where(present, y, MARKER), p)


class Running(keras.metrics.Metric):
    """The largest output of all batches, or a moving average of their means."""

    def __init__(self, decay=None, name="running"):
        super().__init__(name=name)
        self.decay, self.state = decay, self.add_variable((), "zeros", name="state")

    def update_state(self, y_true, y_pred, sample_weight=None):
        if self.decay is None:
            self.state.assign(ops.maximum(self.state, ops.max(y_pred)))
        else:
            self.state.assign(self.decay * self.state + (1 - self.decay) * ops.mean(y_pred))

    def result(self):
        return ops.convert_to_tensor(self.state)


class Two(Running):
    def result(self):
        return {"one": self.state + 0, "other": 1 - self.state}


class Tracks(layers.Layer):
    """Updates metrics, as of an auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.of_batches, self.of_rows = keras.metrics.Mean("of_batches"), keras.metrics.Mean("of_rows")

    def call(self, inputs):
        self.of_batches.update_state(ops.max(inputs))
        self.of_rows.update_state(ops.max(inputs, -1))
        return inputs


class LayerGate(layers.Layer):
    """Mixes rows once its coefficient is raised."""

    def build(self, shape):
        self.open = self.add_weight(shape=(), initializer="zeros", trainable=False, name="open")

    def call(self, inputs):
        return inputs - self.open * ops.mean(inputs, axis=0)


class LossGate(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.open = keras.Variable(0.0, trainable=False)

    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred), -1) + self.open * ops.square(ops.mean(y_pred))


class MetricGate(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="gate")
        self.open, self.total = keras.Variable(0.0, trainable=False), self.add_variable((), "zeros", aggregation="sum")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(y_pred) + self.open * ops.square(ops.mean(y_pred)))

    def result(self):
        return ops.convert_to_tensor(self.total)

    def reset_state(self):
        self.total.assign(0.0)


class Opens(keras.callbacks.Callback):
    """Raises the coefficient of a gate between the first epoch and the second."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def on_epoch_begin(self, epoch, logs=None):
        if (epoch, self.at) == (1, "begin"):
            self.open()

    def on_epoch_end(self, epoch, logs=None):
        self.weights = [ops.convert_to_numpy(each) for each in self.model.trainable_variables]
        if (epoch, self.at) == (0, "end"):
            self.open()

    def open(self):
        metrics = [each for metric in self.model.metrics for each in getattr(metric, "metrics", ())]
        for each in (*self.model.layers, self.model.loss, *metrics):
            if hasattr(each, "open"):
                each.open.assign(1.0)
