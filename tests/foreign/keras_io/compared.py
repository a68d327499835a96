"""Miniatures of examples whose loss or step compares the rows of a batch."""

import keras
import tensorflow as tf
from foreign.keras_io.miniature import compiled, dense, integers, miniature, normal
from foreign.keras_io.stepped import FROM_LOGITS, LABELS, ROWS, Reported, networks
from keras import layers, ops
from sample_models import step_models

GROUP = "losses that compare rows"
VIEWS = ROWS + 0.1 * normal(5, seed=6)


def unit(rows):
    return ops.normalize(rows, axis=-1)


def _in_batch(one, other):
    """Each row of one is to be most similar to the same of the other."""
    similar = ops.matmul(one, ops.transpose(other))
    return keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(one)[0]), similar, from_logits=True)


class SupervisedContrastive(keras.losses.Loss):
    """Rows of a label are to be similar."""

    def call(self, y_true, y_pred):
        rows, labels = unit(y_pred), ops.reshape(y_true, (-1,))
        same = ops.cast(labels[:, None] == labels[None, :], "float32")
        return -ops.sum(same * ops.log_softmax(ops.matmul(rows, ops.transpose(rows)) / 0.5), 1) / ops.sum(same, 1)


@miniature(GROUP, "vision/supervised-contrastive-learning", data=(ROWS, LABELS))
def supervised_contrastive(optimizer):
    return compiled(dense(8, 4, inputs=5), optimizer(), loss=SupervisedContrastive())


class Retrieval(keras.Model):
    """Other rows' items are what a user didn't choose; `compute_loss` embeds them, and `call` doesn't."""

    def __init__(self, reduction):
        super().__init__()
        self.users, self.items, self.ratings = layers.Embedding(7, 4), layers.Embedding(9, 4), dense(4, 1, inputs=4)
        self.entropy = keras.losses.CategoricalCrossentropy(from_logits=True, reduction=reduction)
        self.error, self.top = keras.metrics.RootMeanSquaredError(name="error"), keras.metrics.Mean(name="top")

    def call(self, users, training=False):
        users = self.users(users)
        return {"users": users} if training else {"users": users, "best": ops.matmul(users, self.items.embeddings.T)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        users, items = y_pred["users"], self.items(y["item"])
        count = ops.shape(items)[0]
        return self.entropy(ops.eye(count), ops.matmul(users, ops.transpose(items)), sample_weight)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        """Has more to report of what `call` returns when it doesn't train."""
        self.error.update_state(y["rating"], ops.sum(y_pred["users"], 1), sample_weight)
        if "best" in y_pred:
            self.top.update_state(ops.max(y_pred["best"], 1))
        shown = self.get_metrics_result()
        return shown if "best" in y_pred else {name: value for name, value in shown.items() if name != "top"}


CHOSEN = (integers(7), {"item": integers(9, seed=3), "rating": normal(seed=4)})


def retrieval_model(reduction):
    model = Retrieval(reduction)
    model.users.build()
    model.items.build()
    model.built = True
    return model


@miniature(
    GROUP, "keras_rs/sequential_retrieval", "keras_rs/data_parallel_retrieval", data=CHOSEN, blocks=networks("users")
)
def retrieval(optimizer):
    return compiled(retrieval_model("sum_over_batch_size"), optimizer())


@miniature(GROUP, "keras_rs/multi_task", "keras_rs/scann", data=CHOSEN, blocks=networks("users"))
def summed_retrieval(optimizer):
    return compiled(retrieval_model("sum"), optimizer())


@miniature(GROUP, "vision/metric_learning", data=((ROWS, VIEWS),), blocks=networks("embedding"))
def metric_learning(optimizer):
    """A step whose `compute_loss` takes similarities of a batch."""

    class Metric(Reported):
        def __init__(self):
            super().__init__("loss")
            self.embedding = dense(8, 4, inputs=5)

        def train_step(self, data):
            anchors, positives = data[0]
            with tf.GradientTape() as tape:
                one, other = unit(self.embedding(anchors)), unit(self.embedding(positives))
                similar = ops.matmul(one, ops.transpose(other)) / 0.2
                loss = self.compute_loss(y=ops.arange(ops.shape(anchors)[0]), y_pred=similar)
            self.minimize(tape, loss, self.trainable_variables)
            return self.report(loss)

    return compiled(Metric(), optimizer(), loss=FROM_LOGITS)


@miniature(
    "several optimizers",
    "vision/semisupervised_simclr",
    data=(ROWS, LABELS),
    blocks=networks("encoder", "probe"),
)
def simclr(optimizer):
    """Contrastive pretraining with a probe."""
    return compiled(step_models.Contrastive(), optimizer(), optimizer())


class Queue(Reported):
    """Compares rows with the nearest of a queue of earlier ones."""

    def __init__(self):
        super().__init__("loss")
        self.encoder = dense(8, 4, inputs=5)
        start = unit(normal(4, seed=8))
        self.queue = self.add_weight(shape=(19, 4), initializer=lambda *_, **__: start, trainable=False, name="queue")

    def train_step(self, data):
        one, other = data[0]
        with tf.GradientTape() as tape:
            one, other = unit(self.encoder(one)), unit(self.encoder(other))
            similar = ops.matmul(one, ops.transpose(self.queue))
            nearest = one + ops.stop_gradient(ops.take(self.queue, ops.argmax(similar, axis=1), axis=0) - one)
            loss = ops.mean(_in_batch(nearest, other))
        self.minimize(tape, loss, self.trainable_weights)
        self.queue.assign(ops.concatenate([one, self.queue], axis=0)[:19])
        return self.report(loss)


@miniature(GROUP, "vision/nnclr", data=((ROWS, VIEWS),), blocks=networks("encoder"))
def queue(optimizer):
    return compiled(Queue(), optimizer())


class Correlated(keras.losses.Loss):
    """The correlations of two outputs over a batch are to be those of a unit matrix."""

    def call(self, y_true, y_pred):
        one, other = ((part - ops.mean(part, 0)) / (ops.std(part, 0) + 0.1) for part in ops.split(y_pred, 2, axis=-1))
        correlations = ops.matmul(ops.transpose(one), other) / ops.cast(ops.shape(one)[0], "float32")
        return ops.sum(ops.square(correlations - ops.eye(4)))


@miniature(
    GROUP,
    "vision/barlow_twins",
    "vision/semantic_image_clustering",
    "vision/metric_learning_tf_similarity",
    data=((ROWS, VIEWS), LABELS),
)
def barlow_twins(optimizer, synchronized=False):
    """Its layers compare the rows as well."""
    one, other, inputs = keras.Input((5,)), keras.Input((5,)), keras.Input((5,))
    # By less, variances of three rows make rounding larger: plain Keras with rows in another order is 4e-6 off.
    hidden = layers.BatchNormalization(epsilon=0.1, synchronized=synchronized)(layers.Dense(8)(inputs))
    encoder = keras.Model(inputs, layers.Dense(4)(layers.Activation("tanh")(hidden)))
    model = keras.Model([one, other], layers.Concatenate()([encoder(one), encoder(other)]))
    return compiled(model, optimizer(), loss=Correlated(reduction=None))


@miniature(GROUP, "vision/barlow_twins", data=((ROWS, VIEWS), LABELS))
def correlated(optimizer):
    """The same without them."""
    one, other = keras.Input((5,)), keras.Input((5,))
    encoder = dense(8, 4, inputs=5)
    model = keras.Model([one, other], layers.Concatenate()([encoder(one), encoder(other)]))
    return compiled(model, optimizer(), loss=Correlated(reduction=None))


@miniature(GROUP, "vision/nl_image_search", data=((ROWS, integers(9, seed=3)),), blocks=networks("images"))
def dual_encoder(optimizer):
    """Images and texts, of which those of other rows are wrong; targets are made from both."""

    class Dual(Reported):
        def __init__(self):
            super().__init__("loss")
            self.images, self.texts = dense(6, 4, inputs=5), layers.Embedding(9, 4)

        def train_step(self, data):
            images, texts = data[0]
            with tf.GradientTape() as tape:
                images, texts = self.images(images), self.texts(texts)
                logits = ops.matmul(texts, ops.transpose(images)) / 0.5
                among = ops.matmul(images, ops.transpose(images)) + ops.matmul(texts, ops.transpose(texts))
                targets = ops.softmax(among / 1.0)
                one = keras.losses.categorical_crossentropy(targets, logits, from_logits=True)
                other = keras.losses.categorical_crossentropy(
                    ops.transpose(targets), ops.transpose(logits), from_logits=True
                )
                loss = ops.mean((one + other) / 2)
            self.minimize(tape, loss, self.trainable_variables)
            return self.report(loss)

    return compiled(Dual(), optimizer())
