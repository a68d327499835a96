"""Small models with a `train_step` of their own, as Keras's examples write them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.uniform(size=(32, 4, 4, 1)).astype("float32")
NOISE = GENERATOR.normal(size=(32, 3)).astype("float32")
ROWS = GENERATOR.normal(size=(32, 5)).astype("float32")
LABELS = GENERATOR.integers(0, 3, 32)


def sgd(rate=0.05):
    return keras.optimizers.SGD(rate, momentum=0.9)


def _encoder(width=6):
    return keras.Sequential([keras.Input((4, 4, 1)), layers.Flatten(), layers.Dense(width, activation="tanh")])


class Autoencoder(keras.Model):
    """A variational autoencoder whose loss is a sum over pixels and a mean over images; noise is data."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (
            _encoder(6),
            keras.Sequential([keras.Input((3,)), layers.Dense(16), layers.Reshape((4, 4, 1))]),
        )
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        images, noise = data[0]
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(images, training=True), 2, axis=-1)
            decoded = self.decoder(mean + ops.exp(0.5 * log_variance) * noise, training=True)
            reconstruction = ops.mean(ops.sum(ops.square(images - decoded), axis=(1, 2, 3)))
            divergence = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            loss = reconstruction + ops.mean(ops.sum(divergence, axis=1))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result(), "reconstruction": reconstruction}


class Gan(keras.Model):
    """A generator and a discriminator with an optimizer each, one after the other."""

    def __init__(self, critic_steps=1, penalty=0.0, clip=None):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((3,)), layers.Dense(16, activation="tanh"), layers.Reshape((4, 4, 1))]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((4, 4, 1)), layers.Flatten(), layers.Dense(8, activation="tanh"), layers.Dense(1)]
        )
        self.critic_steps, self.penalty, self.clip = critic_steps, penalty, clip
        self.d_metric, self.g_metric = keras.metrics.Mean(name="d"), keras.metrics.Mean(name="g")

    def compile(self, d_optimizer, g_optimizer, **options):
        super().compile(**options)
        self.optimizers = [d_optimizer, g_optimizer]

    @property
    def metrics(self):
        return [self.d_metric, self.g_metric]

    def _penalty(self, real, fake):
        mixed = 0.3 * real + 0.7 * fake
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            score = self.discriminator(mixed, training=True)
        slopes = tape.gradient(score, mixed)
        norm = ops.sqrt(ops.sum(ops.square(slopes), axis=(1, 2, 3)) + 1e-6)
        return ops.mean(ops.square(norm - 1.0))

    def train_step(self, data):
        real, noise = data[0]
        entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        for _ in range(self.critic_steps):
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                scores = self.discriminator(fake, training=True), self.discriminator(real, training=True)
                d_loss = entropy(ops.zeros_like(scores[0]), scores[0]) + entropy(ops.ones_like(scores[1]), scores[1])
                if self.penalty:
                    d_loss += self.penalty * self._penalty(real, fake)
            weights = self.discriminator.trainable_weights
            self.optimizers[0].apply(tape.gradient(d_loss, weights), weights)
            if self.clip:
                for weight in weights:
                    weight.assign(ops.clip(weight, -self.clip, self.clip))
        with tf.GradientTape() as tape:
            score = self.discriminator(self.generator(noise, training=True), training=True)
            g_loss = entropy(ops.ones_like(score), score)
        weights = self.generator.trainable_weights
        self.optimizers[1].apply(tape.gradient(g_loss, weights), weights)
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {"d": self.d_metric.result(), "g": self.g_metric.result(), "d_loss": d_loss}


class Diffusion(keras.Model):
    """Predicts noise, which the step draws; keeps an averaged network and a counter of updates."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential([keras.Input((5,)), layers.Dense(8, activation="tanh"), layers.Dense(5)])
        self.averaged = keras.models.clone_model(self.network)
        self.averaged.set_weights(self.network.get_weights())
        self.updates = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="updates")
        self.tracker = keras.metrics.Mean(name="noise")
        self.seeds = keras.random.SeedGenerator(3)

    @property
    def metrics(self):
        return [self.tracker]

    def noise(self, rows):
        return ops.sin(7 * rows)

    def train_step(self, rows):
        noise = self.noise(rows)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=noise, y_pred=self.network(0.6 * rows + 0.8 * noise, training=True))
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.updates.assign_add(1)
        for weight, average in zip(self.network.weights, self.averaged.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        self.tracker.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


class DrawingDiffusion(Diffusion):
    """The same, with noise from a seed."""

    def noise(self, rows):
        return keras.random.normal(ops.shape(rows), seed=self.seeds)


class Cycle(keras.Model):
    """Four networks with an optimizer each, in a list, and one persistent tape."""

    def __init__(self):
        super().__init__()

        def network(width):
            return keras.Sequential(
                [keras.Input((5,)), layers.Dense(width, activation="tanh"), layers.Dense(5 if width == 6 else 1)]
            )

        self.generators, self.discriminators = [network(6), network(6)], [network(4), network(4)]
        self.tracker = keras.metrics.Mean(name="generator")

    def compile(self, optimizers, **options):
        super().compile(**options)
        self.optimizers = optimizers

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        a, b = data[0]
        (to_b, to_a), (of_a, of_b) = self.generators, self.discriminators
        with tf.GradientTape(persistent=True) as tape:
            fake_b, fake_a = to_b(a, training=True), to_a(b, training=True)
            cycle = ops.mean(ops.abs(to_a(fake_b) - a)) + ops.mean(ops.abs(to_b(fake_a) - b))
            losses = [
                ops.mean(ops.square(of_b(fake_b) - 1)) + cycle,
                ops.mean(ops.square(of_a(fake_a) - 1)) + cycle,
                ops.mean(ops.square(of_a(a) - 1)) + ops.mean(ops.square(of_a(fake_a))),
                ops.mean(ops.square(of_b(b) - 1)) + ops.mean(ops.square(of_b(fake_b))),
            ]
        networks = [*self.generators, *self.discriminators]
        for optimizer, loss, network in zip(self.optimizers, losses, networks, strict=True):
            optimizer.apply(tape.gradient(loss, network.trainable_weights), network.trainable_weights)
        self.tracker.update_state(losses[0])
        return {"generator": self.tracker.result(), "cycle": cycle}


class Captions(keras.Model):
    """Five captions an image, with an update for each, and the metrics of one with all."""

    def __init__(self):
        super().__init__()
        self.head = keras.Sequential([keras.Input((5,)), layers.Dense(8, activation="tanh"), layers.Dense(3)])
        self.tracker = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    @property
    def metrics(self):
        return [self.tracker, self.accuracy]

    def train_step(self, data):
        x, y = data
        for shift in range(3):
            with tf.GradientTape() as tape:
                predicted = self.head(ops.roll(x, shift, axis=1), training=True)
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, predicted)
            weights = self.head.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            self.tracker.update_state(loss)
            self.accuracy.update_state(y, predicted)
        return {"loss": self.tracker.result(), "accuracy": self.accuracy.result()}


class Contrastive(keras.Model):
    """Compares the rows of a batch in its step, and trains a probe on the encoded rows."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((5,)), layers.Dense(8, activation="tanh"), layers.Dense(4)])
        self.probe = keras.Sequential([keras.Input((4,)), layers.Dense(3)])

    def compile(self, encoder_optimizer, probe_optimizer, **options):
        super().compile(**options)
        self.of_encoder, self.of_probe = encoder_optimizer, probe_optimizer

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            encoded = self.encoder(x)
            similar = ops.matmul(encoded, ops.transpose(encoded))
            loss = ops.mean(
                keras.losses.sparse_categorical_crossentropy(ops.arange(ops.shape(x)[0]), similar, from_logits=True)
            )
        weights = self.encoder.trainable_weights
        self.of_encoder.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            predicted = self.probe(ops.stop_gradient(self.encoder(x)))
            probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, predicted)
        weights = self.probe.trainable_weights
        self.of_probe.apply(tape.gradient(probe_loss, weights), weights)
        return {"loss": loss, "probe": probe_loss}


def compiled(kind, *arguments, optimizer=sgd, **options):
    """A model with the optimizers and losses of its kind."""
    keras.utils.set_random_seed(1)
    model = kind(*arguments)
    if isinstance(model, Cycle):
        model.compile([optimizer() for _ in range(4)], **options)
    elif isinstance(model, (Gan, Contrastive)):
        model.compile(optimizer(), optimizer(), **options)
    else:
        model.compile(optimizer(), loss="mse" if isinstance(model, Diffusion) else None, **options)
    return model


def data_of(model):
    """The arguments of `fit`."""
    if isinstance(model, (Autoencoder, Gan)):
        return ((IMAGES, NOISE),)
    if isinstance(model, Cycle):
        return ((ROWS, ROWS[::-1].copy()),)
    return (ROWS,) if isinstance(model, Diffusion) else (ROWS, LABELS)
