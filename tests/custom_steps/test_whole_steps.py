"""Steps that compare rows, clip gradients themselves or draw for a whole batch: each replica runs them on all rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from runner import own_process
from sample_models import step_models as models
from sample_models import whole_steps
from sample_models.step_models import compiled, data_of

from keras_paragrad import DistributedFit

CLOSE = 2e-6


def check(found, shard):
    assert found["weights"] < CLOSE
    assert found["logs"] < CLOSE
    assert found["moved"] > 1e-3
    assert (found["in_shards"] > 0) == (shard is not None)


# Also with a last batch of one row, of which a replica gets none.
@pytest.mark.slow(60)
@pytest.mark.few(2)
@pytest.mark.own_process(seconds=300)
@pytest.mark.parametrize(
    ("name", "rows", "shard"),
    [
        ("Everything", 31, "parameters"),
        ("Contrastive", 11, None),
        ("Everything", 11, None),
        ("Everything", 11, "optimizer"),
        ("Texts", 31, "parameters"),
        ("Texts", 11, None),
        ("Contrastive", 31, "optimizer"),
    ],
)
def test_two_devices(name, rows, shard):
    check(whole_steps.trained([name, rows, shard, "mirrored"]), shard)


@pytest.mark.slow(60)
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "rows", "shard"),
    [("Everything", 31, "parameters"), ("Everything", 11, None), ("Diffusion", 11, "parameters")],
)
def test_two_workers(name, rows, shard):
    for found in own_process.on_workers(whole_steps.trained, [name, rows, shard, "multi_worker"], seconds=300):
        check(found, shard)


class Compared(models.Captions):
    """Compares the rows of what its layers return."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(1)

    def similar(self, x, rows):
        return ops.matmul(rows, ops.transpose(rows))

    def encoded(self, x):
        return self.head(x, training=True)

    def train_step(self, data):
        weights = self.head.trainable_weights
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.similar(data[0], self.encoded(data[0])) - 1))
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Centered(keras.layers.Layer):
    def call(self, rows):
        return rows - ops.mean(rows, axis=0)


class AddsLosses(keras.layers.Layer):
    def call(self, rows):
        self.add_loss(ops.mean(ops.square(rows)))
        return rows


class Mixed(Compared):
    """Calls a layer that mixes rows."""

    def __init__(self, layer=Centered):
        super().__init__()
        self.head = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), layer()])


class Noisy(Compared):
    """Draws from a state that each replica has for itself."""

    def similar(self, x, rows):
        return super().similar(x, rows + self.generator.normal(tf.shape(rows)))


class ByRow(Compared):
    """Takes a gradient for each row."""

    def similar(self, x, rows):
        with tf.GradientTape() as tape:
            tape.watch(x)
            encoded = self.encoded(x)
        return super().similar(x, rows) + ops.mean(ops.square(tape.batch_jacobian(encoded, x)))


@pytest.mark.slow(30)
@pytest.mark.few(2)
@pytest.mark.own_process
@pytest.mark.parametrize("made", [Mixed, Noisy, ByRow, lambda: Mixed(AddsLosses)])
def test_what_replicas_would_compute_otherwise_is_refused_before_the_first_step(made):
    dist = DistributedFit("mirrored", devices=whole_steps.DEVICES)
    with dist.scope():
        model = compiled(made, jit_compile=False)
    before = model.get_weights()
    with pytest.raises(ValueError, match="The train_step of .* compares rows"):
        dist.fit(model, *data_of(model), batch_size=11, verbose=0)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow(30)
@pytest.mark.own_process
def test_random_numbers_without_a_seed_are_the_same_on_all_replicas():
    class Drawing(Compared):
        def similar(self, x, rows):
            return super().similar(x, rows + tf.random.normal(tf.shape(rows)))

    dist = DistributedFit("mirrored", devices=whole_steps.DEVICES)
    with dist.scope():
        model = compiled(Drawing, jit_compile=False)
    dist.fit(model, *data_of(model), batch_size=11, verbose=0)
    for weight in model.weights:
        first, second = dist.strategy.experimental_local_results(weight.value)
        np.testing.assert_array_equal(first, second)


class DrawsForAll(Compared):
    """Draws as many rows of noise as batches have, so that a part of one doesn't fit."""

    def similar(self, x, rows):
        return super().similar(x, rows + keras.random.normal((10, 3), seed=5))


@pytest.mark.slow(30)
@pytest.mark.own_process
def test_noise_for_all_rows_of_a_batch():
    def data():
        return tf.data.Dataset.from_tensor_slices((models.ROWS, models.LABELS)).batch(10, drop_remainder=True)

    dist = DistributedFit("mirrored", devices=whole_steps.DEVICES)
    with dist.scope():
        model = compiled(DrawsForAll, jit_compile=False)
    plain = compiled(DrawsForAll, jit_compile=False)
    plain.fit(data(), epochs=2, shuffle=False, verbose=0)
    dist.fit(model, data(), epochs=2, shuffle=False, verbose=0)
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=CLOSE)
