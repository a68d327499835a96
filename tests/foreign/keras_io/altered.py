"""Miniatures of examples with a `train_step` that does something to the batch, the gradients or a state besides."""

import keras
import tensorflow as tf
from foreign.keras_io.miniature import compiled, dense, miniature, normal
from foreign.keras_io.stepped import FROM_LOGITS, LABELS, NOISE, OPTIMIZERS, ROWS, STEP, WORDS, Reported, networks
from keras import layers, ops


class Normalized(Reported):
    """Two views of a row, each of which is to predict the other; batch normalization trains."""

    def __init__(self, synchronized):
        super().__init__("loss")
        normalization = layers.BatchNormalization(epsilon=0.1, synchronized=synchronized)
        self.encoder = keras.Sequential([keras.Input((5,)), layers.Dense(6), normalization, layers.Dense(4)])
        self.predictor = dense(3, 4, inputs=4)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            views = [self.encoder(each, training=True) for each in data[0]]
            loss = 0.0
            for one, other in (views, views[::-1]):
                one, other = ops.normalize(self.predictor(one)), ops.normalize(ops.stop_gradient(other))
                loss -= ops.mean(ops.sum(one * other, axis=1)) / 2
        self.minimize(tape, loss, self.encoder.trainable_variables + self.predictor.trainable_variables)
        return self.report(loss)


@miniature(STEP, "vision/simsiam", data=((ROWS, ROWS + 0.1 * normal(5, seed=6)),), blocks=networks("predictor"))
def normalizing_step(optimizer, synchronized=False):
    return compiled(Normalized(synchronized), optimizer())


class Adversaries(Reported):
    """Two networks and their optimizers."""

    def __init__(self, count=None, counts=False, synchronized=None):
        super().__init__("d", "g")
        self.generator, self.discriminator = dense(6, 5, inputs=3), dense(6, 1, inputs=5)
        if synchronized is not None:
            normalization = layers.BatchNormalization(synchronized=synchronized)
            self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(6), normalization, layers.Dense(5)])
        self.count, self.steps = count, tf.Variable(0.0) if counts else None

    def compile(self, d_optimizer, g_optimizer, **options):
        super().compile(**options)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, data):
        real, noise = data[0]
        if self.steps is not None:
            self.steps.assign_add(1)
        if self.count:
            noise = keras.random.normal((self.count, 3), seed=4)
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            fake, true = self.discriminator(self.generator(noise, training=True)), self.discriminator(real)
            d_loss = entropy(ops.ones_like(true), true) + entropy(ops.zeros_like(fake), fake)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            fake = self.discriminator(self.generator(noise, training=True))
            g_loss = entropy(ops.ones_like(fake), fake)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        return self.report(d_loss, g_loss)


ADVERSARIES = {"data": ((ROWS, NOISE),), "blocks": networks("discriminator")}


@miniature(OPTIMIZERS, "generative/wgan_gp", "generative/gaugan", **ADVERSARIES)
def normalizing_gan(optimizer, synchronized=False):
    return compiled(Adversaries(synchronized=synchronized), optimizer(), optimizer())


@miniature(OPTIMIZERS, "generative/gan_ada", **ADVERSARIES)
def fixed_noise_gan(optimizer):
    """Draws as many rows of noise as a whole batch has."""
    return compiled(Adversaries(count=8), optimizer(), optimizer())


@miniature(OPTIMIZERS, "generative/stylegan", **ADVERSARIES)
def counting_gan(optimizer):
    """Counts its steps in a variable of TensorFlow's."""
    return compiled(Adversaries(counts=True), optimizer(), optimizer())


class Network(Reported):
    """One network."""

    def __init__(self):
        super().__init__("loss")
        self.network = dense(6, 3, inputs=5)


class FixedNoise(Network):
    """Draws as many rows of noise as a whole batch has."""

    def train_step(self, rows):
        noise = keras.random.normal((8, 5), seed=4)[: ops.shape(rows)[0]]
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.network(rows + noise)))
        self.minimize(tape, loss, self.network.trainable_weights)
        return self.report(loss)


@miniature(STEP, "generative/ddim", data=(ROWS,), blocks=networks("network"))
def fixed_noise(optimizer):
    return compiled(FixedNoise(), optimizer())


class Clipped(Network):
    """Clips each gradient by itself, before the optimizer gets it."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self.network(x))
        weights = self.network.trainable_weights
        gradients = [tf.clip_by_norm(each, 0.1) for each in tape.gradient(loss, weights)]
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return self.report(loss)


@miniature(
    STEP,
    "generative/finetune_stable_diffusion",
    "generative/dreambooth",
    data=(ROWS, LABELS),
    blocks=networks("network"),
)
def clipping_step(optimizer):
    return compiled(Clipped(), optimizer(), loss=FROM_LOGITS)


class MaskedCaptions(Reported):
    """Two captions of an image, with an update for each; a loss is a mean over the words that are not padding."""

    def __init__(self):
        super().__init__("loss")
        self.image, self.words, self.head = layers.Dense(4), layers.Embedding(9, 4), dense(9, inputs=(None, 4))
        self.image.build((None, 5))
        self.words.build()

    def train_step(self, data):
        images, captions = data[0]
        total, weights = 0.0, self.trainable_variables
        for shift in range(2):
            words = ops.roll(captions, shift, axis=1)
            with tf.GradientTape() as tape:
                predicted = self.head(self.image(images)[:, None] + self.words(words[:, :-1]))
                losses = keras.losses.sparse_categorical_crossentropy(words[:, 1:], predicted, from_logits=True)
                mask = ops.cast(words[:, 1:] != 0, "float32")
                loss = ops.sum(losses * mask) / ops.sum(mask)
            self.minimize(tape, loss, weights)
            total += loss
        return self.report(total)


@miniature(STEP, "vision/image_captioning", data=((ROWS, WORDS),), blocks=networks("head"))
def masked_captions(optimizer):
    return compiled(MaskedCaptions(), optimizer())


class OneToken(Reported):
    """Trains what an embedding has for one token, by what its sparse gradient says of rows."""

    def __init__(self):
        super().__init__("loss")
        self.words, self.head = layers.Embedding(9, 4), dense(5, inputs=(None, 4))
        self.words.build()

    def train_step(self, data):
        words, rows = data[0]
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(ops.mean(self.head(self.words(words)), axis=1) - rows))
        weights = self.words.trainable_weights
        (gradient,) = tape.gradient(loss, weights)
        values = tf.where((gradient.indices == 3)[:, None], gradient.values, 0.0)
        self.optimizer.apply([tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)], weights)
        return self.report(loss)


@miniature(STEP, "generative/fine_tune_via_textual_inversion", data=((WORDS, ROWS),), blocks=networks("head"))
def one_token(optimizer):
    return compiled(OneToken(), optimizer())


class Thresholded(Network):
    """Learns from the rows of which it is surer than of most of the batch, and from what it says of them."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self.network(x)
            chances = ops.softmax(predicted)
            sure = ops.cast(ops.max(chances, 1) >= 0.9 * ops.mean(ops.max(chances, 1)), "float32")
            losses = keras.losses.sparse_categorical_crossentropy(ops.argmax(chances, 1), predicted, from_logits=True)
            loss = FROM_LOGITS(y, predicted) + ops.mean(losses * ops.stop_gradient(sure))
        self.minimize(tape, loss, self.network.trainable_weights)
        return self.report(loss)


@miniature(STEP, "vision/adamatch", "vision/depth_estimation", data=(ROWS, LABELS), blocks=networks("network"))
def thresholded(optimizer):
    return compiled(Thresholded(), optimizer())


class Shuffled(Network):
    """Tells rows with their labels from rows with the labels of others in the batch."""

    def train_step(self, data):
        x, y = data
        wrong = tf.random.shuffle(y, seed=1)
        with tf.GradientTape() as tape:
            good, bad = (ops.sum(self.network(x) * ops.one_hot(each, 3), 1) for each in (y, wrong))
            loss = ops.mean(ops.log(1 + ops.exp(bad - good)))
        self.minimize(tape, loss, self.network.trainable_weights)
        return self.report(loss)


@miniature(STEP, "vision/forwardforward", data=(ROWS, LABELS), blocks=networks("network"))
def shuffled(optimizer):
    return compiled(Shuffled(), optimizer())
