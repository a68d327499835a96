"""Miniatures of examples with a `train_step` of their own, of one optimizer or several."""

import keras
import tensorflow as tf
from foreign.keras_io.miniature import compiled, dense, integers, miniature, normal
from keras import layers, ops
from sample_models import step_models

IMAGES, NOISE, ROWS = ops.convert_to_numpy(ops.sigmoid(normal(4, 4, 1))), normal(3, seed=2), normal(5, seed=3)
LABELS = integers(3)
FROM_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

STEP, OPTIMIZERS = "own train_step", "several optimizers"


def networks(*names):
    """The parts of a model by these names."""
    return lambda model: [getattr(model, name) for name in names]


@miniature(STEP, "generative/vae", data=((IMAGES, NOISE),), blocks=networks("encoder", "decoder"))
def autoencoder(optimizer):
    return compiled(step_models.Autoencoder(), optimizer())


@miniature(STEP, "generative/ddim", "generative/ddpm", data=(ROWS,), blocks=networks("network"))
def diffusion(optimizer):
    return compiled(step_models.Diffusion(), optimizer(), loss="mse")


@miniature(STEP, "vision/image_captioning", data=(ROWS, LABELS), blocks=networks("head"))
def captions(optimizer):
    return compiled(step_models.Captions(), optimizer())


@miniature(
    OPTIMIZERS,
    "generative/dcgan_overriding_train_step",
    "generative/conditional_gan",
    data=((IMAGES, NOISE),),
    blocks=networks("generator", "discriminator"),
)
def gan(optimizer):
    return compiled(step_models.Gan(), optimizer(), optimizer())


@miniature(
    OPTIMIZERS,
    "generative/wgan_gp",
    "generative/wgan-graphs",
    data=((IMAGES, NOISE),),
    blocks=networks("generator"),
)
def wgan_gp(optimizer):
    return compiled(step_models.Gan(2, 10.0, 0.3), optimizer(), optimizer())


@miniature(
    OPTIMIZERS,
    "generative/cyclegan",
    data=((ROWS, ROWS[::-1].copy()),),
    blocks=lambda model: [*model.generators, *model.discriminators],
)
def cyclegan(optimizer):
    return compiled(step_models.Cycle(), [optimizer() for _ in range(4)])


class Reported(keras.Model):
    """A model whose step reports means of what it computes."""

    def __init__(self, *names):
        super().__init__()
        self.trackers = [keras.metrics.Mean(name=name) for name in names]

    @property
    def metrics(self):
        return self.trackers

    def report(self, *values):
        for tracker, value in zip(self.trackers, values, strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}

    def minimize(self, tape, loss, weights):
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


class MaskedAutoencoder(Reported):
    """Encodes a part of an image's patches, and is compared on the others."""

    def __init__(self):
        super().__init__("loss")
        self.encoder, self.decoder = dense(8, 6, inputs=(None, 4)), dense(8, 4, inputs=(None, 6))
        self.missing = self.add_weight(shape=(1, 1, 6), initializer="normal", name="missing")

    def train_step(self, data):
        patches, order = data[0]
        masked, kept = order[:, :2], order[:, 2:]
        with tf.GradientTape() as tape:
            encoded = self.encoder(tf.gather(patches, kept, batch_dims=1), training=True)
            missing = ops.repeat(ops.repeat(self.missing, 2, axis=1), ops.shape(patches)[0], axis=0)
            decoded = self.decoder(ops.concatenate([missing, encoded], axis=1), training=True)
            loss = self.compute_loss(y=tf.gather(patches, masked, batch_dims=1), y_pred=decoded[:, :2])
        self.minimize(tape, loss, self.trainable_weights)
        return self.report(loss)


ORDER = normal(4, seed=9).argsort(axis=1).astype("int32")


@miniature(
    STEP,
    "vision/masked_image_modeling",
    data=((IMAGES.reshape(-1, 4, 4), ORDER),),
    blocks=networks("encoder", "decoder"),
)
def masked_autoencoder(optimizer):
    return compiled(MaskedAutoencoder(), optimizer(), loss="mse")


class Speech(Reported):
    """Predicts the tokens of a text from sounds, and leaves out the padding with a mask of its own."""

    def __init__(self):
        super().__init__("loss")
        self.sounds, self.words = layers.Conv1D(6, 3, strides=2, activation="tanh"), layers.Embedding(9, 6)
        self.attention, self.head = layers.MultiHeadAttention(2, 3), layers.Dense(9)

    def call(self, inputs):
        sounds, words = inputs
        words = self.words(words)
        return self.head(words + self.attention(words, self.sounds(sounds)))

    def train_step(self, data):
        sounds, words = data[0]
        with tf.GradientTape() as tape:
            predicted = self([sounds, words[:, :-1]])
            mask = ops.cast(words[:, 1:] != 0, "float32")
            loss = self.compute_loss(y=ops.one_hot(words[:, 1:], 9), y_pred=predicted, sample_weight=mask)
        self.minimize(tape, loss, self.trainable_weights)
        return self.report(loss)


WORDS = integers(8, 6, seed=5) * (normal(6, seed=4) > -1)


@miniature(STEP, "audio/transformer_asr", data=((normal(12, 2), WORDS),), blocks=networks("attention"))
def speech(optimizer):
    return compiled(Speech(), optimizer(), loss=keras.losses.CategoricalCrossentropy(from_logits=True))


class Triplets(Reported):
    """A network of three images, and how much further away the third is than the second."""

    def __init__(self):
        super().__init__("loss")
        self.embedding = dense(8, 4, inputs=5)

    def train_step(self, data):
        anchor, positive, negative = data[0]
        with tf.GradientTape() as tape:
            center = self.embedding(anchor)
            near, far = (ops.sum(ops.square(center - self.embedding(x)), -1) for x in (positive, negative))
            loss = 0.02 * ops.maximum(near - far + 0.5, 0.0)
        self.minimize(tape, loss, self.embedding.trainable_weights)
        return self.report(loss)


TRIPLETS = tuple(normal(5, seed=seed) for seed in (5, 6, 7))


@miniature(STEP, "vision/siamese_network", data=(TRIPLETS,), blocks=networks("embedding"))
def triplets(optimizer):
    """Its loss is one number for each row, whose sum Keras's gradient tape takes."""
    return compiled(Triplets(), optimizer())


class Words(Reported):
    """Predicts the words that were masked, by a sum over them."""

    def __init__(self):
        super().__init__("loss")
        self.network = keras.Sequential([keras.Input((6,), dtype="int32"), layers.Embedding(9, 4), layers.Dense(9)])

    def train_step(self, data):
        words, labels, weights = data
        with tf.GradientTape() as tape:
            losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
            loss = 0.05 * losses(labels, self.network(words, training=True), sample_weight=weights)
        self.minimize(tape, loss, self.network.trainable_variables)
        self.trackers[0].update_state(loss, sample_weight=weights)
        return {"loss": self.trackers[0].result()}


MASKED = (normal(6, seed=7) > 0.3).astype("float32")


@miniature(STEP, "nlp/masked_language_modeling", data=(WORDS * (MASKED < 1), WORDS, MASKED), blocks=networks("network"))
def summed_step(optimizer):
    return compiled(Words(), optimizer())


@miniature(STEP, "vision/nerf", "vision/edsr", "nlp/masked_language_modeling", data=(ROWS, LABELS))
def guide(optimizer):
    """The step of Keras's guide: `compute_loss`, one optimizer, all metrics."""

    class Guide(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=predicted)
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, predicted)
            return {metric.name: metric.result() for metric in self.metrics}

    network = dense(6, 3, inputs=5)
    model = Guide(network.inputs, network.outputs)
    return compiled(model, optimizer(), loss=FROM_LOGITS, metrics=["accuracy"])


class Distiller(Reported):
    """Two heads, one for the labels and one for what a frozen teacher says."""

    def __init__(self):
        super().__init__("distillation_loss")
        self.student, self.teacher = dense(8, 6, inputs=5), dense(12, 3, inputs=5)
        self.teacher.trainable = False

    def call(self, x, training=False):
        return ops.split(self.student(x, training=training), 2, axis=-1)

    def train_step(self, data):
        x, y = data
        taught = ops.softmax(self.teacher(x, training=False))
        with tf.GradientTape() as tape:
            one, other = self(x, training=True)
            soft = keras.losses.CategoricalCrossentropy(from_logits=True)(taught, other)
            loss = 0.5 * FROM_LOGITS(y, one) + 0.5 * soft
        self.minimize(tape, loss, self.student.trainable_weights)
        return self.report(loss)


@miniature(
    STEP,
    "vision/deit",
    "keras_recipes/better_knowledge_distillation",
    "vision/consistency_training",
    data=(ROWS, LABELS),
    blocks=networks("student"),
)
def two_heads(optimizer):
    return compiled(Distiller(), optimizer())


class VectorQuantized(Reported):
    """Encoded rows become the nearest of learned vectors; the distance to them is a loss that a layer adds."""

    class Nearest(layers.Layer):
        def __init__(self):
            super().__init__()
            self.vectors = self.add_weight(shape=(4, 6), initializer="uniform", name="vectors")

        def call(self, x):
            distances = ops.sum(ops.square(x), 1, keepdims=True) + ops.sum(ops.square(self.vectors), 0)
            found = ops.one_hot(ops.argmin(distances - 2 * ops.matmul(x, self.vectors), axis=1), 6)
            nearest = ops.matmul(found, ops.transpose(self.vectors))
            commitment = ops.mean(ops.square(ops.stop_gradient(nearest) - x))
            self.add_loss(0.25 * commitment + ops.mean(ops.square(nearest - ops.stop_gradient(x))))
            return x + ops.stop_gradient(nearest - x)

    def __init__(self):
        super().__init__("loss", "reconstruction")
        inputs = keras.Input((5,))
        self.network = keras.Model(inputs, dense(6, 5, inputs=4)(self.Nearest()(dense(6, 4, inputs=5)(inputs))))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            reconstruction = ops.mean(ops.square(data - self.network(data))) / 0.7
            loss = reconstruction + sum(self.network.losses)
        self.minimize(tape, loss, self.network.trainable_variables)
        return self.report(loss, reconstruction)


@miniature("losses that layers add", "generative/vq_vae", data=(ROWS,), blocks=lambda model: [model.network.layers[1]])
def vector_quantized(optimizer):
    return compiled(VectorQuantized(), optimizer())


class Flow(Reported):
    """Log-likelihoods under a density that a network bends."""

    def __init__(self):
        super().__init__("loss")
        self.scale, self.shift = dense(6, 2, inputs=3), dense(6, 2, inputs=3)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            fixed, bent = data[:, :3], data[:, 3:]
            scale = ops.tanh(self.scale(fixed))
            latent = bent * ops.exp(scale) + self.shift(fixed)
            loss = -ops.mean(-0.5 * ops.sum(ops.square(latent), 1) + ops.sum(scale, 1))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.report(loss)


@miniature(STEP, "generative/real_nvp", data=(ROWS,), blocks=networks("scale", "shift"))
def flow(optimizer):
    return compiled(Flow(), optimizer())


class ForwardForward(Reported):
    """Each layer trains itself, to tell rows with their labels from rows with others'."""

    def __init__(self):
        super().__init__("loss")
        self.parts = [dense(6, inputs=8), dense(6, inputs=6)]

    def compile(self, optimizers, **options):
        super().compile(**options)
        self.optimizers = optimizers

    def train_step(self, data):
        x, y = data
        good, bad = (ops.concatenate([x, ops.one_hot(ops.mod(y + shift, 3), 3)], 1) for shift in (0, 1))
        total = 0.0
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                goods, bads = (ops.relu(part(each)) for each in (good, bad))
                signs = [1.5 - ops.mean(ops.square(goods), 1), ops.mean(ops.square(bads), 1) - 1.5]
                loss = ops.mean(ops.log(1 + ops.exp(ops.concatenate(signs, 0))))
            optimizer.apply(tape.gradient(loss, part.trainable_weights), part.trainable_weights)
            good, bad = (ops.stop_gradient(each) for each in (goods, bads))
            total += loss
        return self.report(total)


@miniature(OPTIMIZERS, "vision/forwardforward", data=(ROWS, LABELS), blocks=lambda model: model.parts)
def forward_forward(optimizer):
    return compiled(ForwardForward(), [optimizer(), optimizer()])


class Sharpness(Reported):
    """Updates by the gradient at weights to which the first gradient has led it, and goes back from there."""

    def __init__(self):
        super().__init__("loss")
        self.network = dense(6, 3, inputs=5)

    def train_step(self, data):
        x, y = data
        weights, moves = self.network.trainable_weights, []
        with tf.GradientTape() as tape:
            loss = FROM_LOGITS(y, self.network(x))
        gradients = tape.gradient(loss, weights)
        norm = ops.sqrt(sum(ops.sum(ops.square(gradient)) for gradient in gradients))
        for weight, gradient in zip(weights, gradients, strict=True):
            moves.append(0.05 * gradient / (norm + 1e-12))
            weight.assign_add(moves[-1])
        with tf.GradientTape() as tape:
            there = FROM_LOGITS(y, self.network(x))
        gradients = tape.gradient(there, weights)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply(gradients, weights)
        return self.report(loss)


@miniature(STEP, "vision/sam", "vision/shiftvit", data=(ROWS, LABELS), blocks=networks("network"))
def sharpness_aware(optimizer):
    return compiled(Sharpness(), optimizer())


class ZeroReference(Reported):
    """Losses of images alone, without targets, each in a tracker of its own."""

    def __init__(self):
        super().__init__("total", "exposure", "smoothness")
        curves = layers.Conv2D(1, 3, padding="same", activation="tanh")
        self.network = keras.Sequential([keras.Input((4, 4, 1)), curves])

    def train_step(self, images):
        with tf.GradientTape() as tape:
            curves = self.network(images)
            brighter = images + curves * (ops.square(images) - images)
            exposure = ops.mean(ops.square(ops.mean(brighter, axis=(1, 2, 3)) - 0.6))
            smoothness = ops.sum(ops.square(curves[:, 1:] - curves[:, :-1])) / ops.cast(ops.shape(images)[0], "float32")
            total = 10 * exposure + smoothness
        self.minimize(tape, total, self.network.trainable_weights)
        return self.report(total, exposure, smoothness)


@miniature(STEP, "vision/zero_dce", "generative/adain", data=(IMAGES,), blocks=networks("network"))
def zero_reference(optimizer):
    return compiled(ZeroReference(), optimizer())
