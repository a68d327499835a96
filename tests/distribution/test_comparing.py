"""On replicas, losses that compare the examples of a batch are those of one device."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from oracles.whole_batches import largest_difference
from sample_models.comparing_losses import LOSSES, softmax_of_pairs

from keras_paragrad import DistributedFit, microbatch

TOLERANCE = 1e-6
generator = np.random.default_rng(0)
X = generator.normal(size=(30, 6)).astype("float32")
Y = generator.integers(0, 3, 30).astype("float32")
WEIGHTS = generator.uniform(0.2, 3, 30).astype("float32")


def length(y, z):
    return ops.norm(z, axis=-1)


class Temperature(keras.Model):
    """A `compute_loss` of its own, which reads a weight, calls a layer and looks at the inputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = layers.Dense(4), layers.Dense(4), layers.Dense(1, kernel_regularizer="l2")
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")

    def build(self, shape):
        for layer, width in ((self.left, 6), (self.right, 6), (self.head, 4)):
            layer.build((None, width))

    def call(self, inputs):
        return {"left": self.left(inputs), "right": self.right(inputs)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        values = softmax_of_pairs(y_pred["left"], y_pred["right"], self.temperature) * ops.square(x[:, 0])
        values = values if sample_weight is None else values * ops.reshape(sample_weight, (-1,))
        return ops.mean(values) + ops.mean(ops.square(self.head(y_pred["left"]))) + sum(self.losses)


def encoder(*more, loss="classes"):
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
    model = keras.Sequential([keras.Input((6,)), hidden, *more, layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), LOSSES[loss](), metrics=[length])
    return model


def own():
    keras.utils.set_random_seed(0)
    model = Temperature()
    model.build((None, 6))
    model.compile(keras.optimizers.SGD(0.05))
    return model


def check(make, batch_size=12, rows=25, size=None, **how):
    """Compares weights, logs and evaluation with those of one device."""
    data = {"x": X[:rows], "y": Y[:rows], "sample_weight": WEIGHTS[:rows], "batch_size": batch_size, "verbose": 0}
    fit = {**data, "shuffle": False, "validation_data": (X[:7], Y[:7]), "validation_batch_size": 4}
    whole = make()
    whole.run_eagerly = True
    expected = whole.fit(**fit).history
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"], **how)
    with dist.scope():
        model = make()
    if size:
        microbatch(model, size)
    history = dist.fit(model, **fit).history
    assert largest_difference(model, whole) < TOLERANCE
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.own_process
@pytest.mark.slow(20)
@pytest.mark.few(1)
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_one_device(loss):
    # The last batch has one row, so that a replica has none.
    check(lambda: encoder(loss=loss))


@pytest.mark.own_process
@pytest.mark.slow(20)
def test_own_compute_loss_in_slices():
    check(own, batch_size=13, rows=26, size=3)


@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.slow(30)
@pytest.mark.parametrize("case", ["slices", "own", "shard", "shard in slices", "jit", "jit in slices"])
def test_together(case):
    ways = {
        "slices": {"size": 3},
        "own": {"make": own},
        "shard": {"shard": "parameters", "min_shard_bytes": 16},
        "shard in slices": {"shard": "parameters", "min_shard_bytes": 16, "size": 3},
        "jit": {"jit": True},
        "jit in slices": {"jit": True, "size": 3},
    }
    check(**{"make": lambda: encoder(loss="pairs"), **ways[case]})


# In `make test`, test_fit.py normalizes by all replicas.
@pytest.mark.long
@pytest.mark.own_process
def test_synchronized_batch_normalization():
    check(lambda: encoder(layers.BatchNormalization(synchronized=True), loss="pairs"), rows=24)


@pytest.mark.own_process
@pytest.mark.filterwarnings("ignore:1 BatchNormalization layer normalizes:UserWarning")
def test_batch_normalization_of_each_replica_is_refused():
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"])
    with dist.scope():
        model = encoder(layers.BatchNormalization(name="norm"))
    with pytest.raises(ValueError, match=r"'norm' mixes them as well.*synchronized=True"):
        dist.fit(model, X, Y, batch_size=12, verbose=0)


class SameNumber(keras.Sequential):
    """Pulls rows with the same number together."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        y = ops.reshape(y, (-1,))
        same = ops.cast(y[:, None] == y[None, :], "float32")
        similar = ops.log_softmax(ops.matmul(y_pred, ops.transpose(y_pred)), axis=1)
        return -ops.mean(ops.sum(same * similar, axis=1) / ops.sum(same, axis=1))


@pytest.mark.own_process
def test_numbers_of_64_bits_are_gathered_whole():
    """Such as hashes, of which a float64 would make neighbours the same."""
    numbers = 2**60 + np.arange(16) // 2

    def made():
        keras.utils.set_random_seed(0)
        model = SameNumber([keras.Input((6,)), layers.Dense(4)])
        model.compile("sgd", jit_compile=False)
        return model

    options = {"batch_size": 7, "shuffle": False, "verbose": 0}
    whole, dist = made(), DistributedFit("mirrored", ["CPU:0", "CPU:1"])
    whole.fit(X[:16], numbers, **options)
    with dist.scope():
        model = made()
    dist.fit(model, X[:16], numbers, **options)
    assert largest_difference(model, whole) < TOLERANCE
