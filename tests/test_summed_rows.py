"""Rows that a batch looks up twice: steps are Keras's own, or a warning says that they differ."""

import contextlib
import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_paragrad as kp
from keras_paragrad import DistributedFit, Pipeline

X = np.random.default_rng(0).integers(0, 5, (16, 4))
Y = X.sum(1, keepdims=True).astype("float32") / 10
DEVICES = ["CPU:0", "CPU:1"]
SAYS = "the gradients of all lookups of a row are summed"


class WordsAndPlaces(keras.layers.Layer):
    """Looks up the words of each example, and once for all examples their places, in the same table and another."""

    def __init__(self):
        super().__init__()
        self.words, self.places = keras.layers.Embedding(5, 3), keras.layers.Embedding(4, 3)
        # The size of the last slice of those of three rows: what is a constant for all may look like one for each.
        self.numbers = np.arange(4)[None]

    def build(self, shape):
        self.words.build()
        self.places.build()

    def call(self, words):
        places = keras.ops.arange(4)
        return self.words(words) + self.words(places) + self.places(places) + self.places(self.numbers)


def build(optimizer, make=lambda layers: keras.Sequential(layers), table=None, **options):
    keras.utils.set_random_seed(0)
    embedding = table() if table else keras.layers.Embedding(5, 3, name="words")
    layers = [keras.Input((4,), dtype="int64"), embedding, keras.layers.Flatten(), keras.layers.Dense(1, "tanh")]
    model = make(layers)
    model.compile(optimizer, "mse", **{"jit_compile": False, **options})
    return model


def train(fit, size=8, **options):
    fit(x=X, y=Y, batch_size=size, epochs=2, shuffle=False, verbose=0, **options)


def plain(optimizer, change=lambda model: None):
    model = build(optimizer())
    change(model)
    train(model.fit)
    return model


def accumulated(optimizer):
    model = build(kp.AccumulatingOptimizer(optimizer(), steps=2))
    train(model.fit, 4, callbacks=[kp.ExactAccumulation()])
    return model


def wrapped(optimizer):
    model = build(optimizer(), lambda layers: kp.wrap(keras.Sequential(layers)))
    train(model.fit)
    return model


def distributed(dist, optimizer):
    with dist.scope():
        model = build(optimizer())
    train(functools.partial(dist.fit, model))
    return model


WAYS = {
    "accumulation": accumulated,
    "microbatch": lambda o: plain(o, lambda model: kp.microbatch(model, 4)),
    "microbatch, slices of two sizes": lambda o: plain(o, lambda model: kp.microbatch(model, 6)),
    "recompute": lambda o: plain(o, lambda model: kp.recompute(model, ["words"])),
    "transform_gradients": lambda o: plain(o, lambda model: kp.transform_gradients(model, lambda g, v: g)),
    "wrap": wrapped,
    "pipeline": lambda o: distributed(DistributedFit(Pipeline(stages=2, microbatches=2), devices=DEVICES), o),
    "mesh": lambda o: distributed(DistributedFit(mesh={"batch": 2, "model": 1}, layout="auto", devices=DEVICES), o),
}


@functools.cache
def expected(name):
    return plain(OPTIMIZERS[name]).get_weights()


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "sgd": lambda: keras.optimizers.SGD(0.1),
}


# Their sums can't keep lookups apart.
SUMMED = {"accumulation", "transform_gradients"}


def check(way, name, summed):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = way(OPTIMIZERS[name])
    pairs = zip(model.get_weights(), expected(name), strict=True)
    differs = max(np.abs(one - other).max() for one, other in pairs) > 1e-5
    said = [each for each in caught if SAYS in str(each.message)]
    assert len(said) == differs == (summed and name == "adam")


@pytest.mark.covering
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_steps_are_kerass_or_a_warning_says_once_that_they_differ(way, name):
    check(WAYS[way], name, way in SUMMED)


@pytest.mark.few(0, "parameters")
@pytest.mark.own_process
@pytest.mark.parametrize("shard", [None, "parameters"])
def test_steps_on_replicas_are_kerass(shard, mirrored):
    dist = DistributedFit(mirrored, shard=shard, min_shard_bytes=1)
    check(functools.partial(distributed, dist), "adam", False)
    with dist.scope():
        model = build(clipping(), table=WordsAndPlaces)
    train(functools.partial(dist.fit, model))
    for one, other in zip(model.get_weights(), with_places(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def clipping():
    return keras.optimizers.Adam(0.01, clipnorm=0.05)


def with_places(change=lambda model: None, table=WordsAndPlaces, **options):
    """Trains on batches of static size."""
    model = build(clipping(), table=table, **options)
    change(model)
    model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, True), epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


# Eight rows of static size in slices of seven: the last one has one row, as the numbers of the places have.
@pytest.mark.few(0, "False-4")
@pytest.mark.parametrize("size", [4, 7])
@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.long)])
def test_slices_look_places_up_once(size, jit):
    found = with_places(lambda model: kp.microbatch(model, size), jit_compile=jit)
    for one, other in zip(found, with_places(jit_compile=jit), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


class Counted(WordsAndPlaces):
    """Places are counted by what only the shape of the words says, or by the first example."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def call(self, words):
        return self.words(words) + self.places(self.count(words))


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (lambda words: tf.range(tf.unstack(tf.shape(words))[1]), None),
        (lambda words: tf.cumsum(tf.ones_like(words[:1]), 1) - 1, "Whether .* is looked up once for all examples"),
    ],
)
def test_places_that_shapes_count(count, says):
    with pytest.warns(UserWarning, match=says) if says else contextlib.nullcontext():
        sliced = build(clipping(), table=lambda: Counted(count))
        kp.microbatch(sliced, 3)
        train(sliced.fit, 6)
    if not says:
        whole = build(clipping(), table=lambda: Counted(count))
        train(whole.fit, 6)
        for one, other in zip(sliced.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_eager_slices_of_sparse_rows_are_refused():
    inputs = keras.Input((5,), sparse=True)
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("adam", "mse", run_eagerly=True)
    kp.microbatch(model, 2)
    rows = tf.data.Dataset.from_tensors((tf.sparse.from_dense(np.eye(5, dtype="float32")), np.ones((5, 1))))
    with pytest.raises(ValueError, match="run_eagerly=True hides whether a part of a batch has summed"):
        model.fit(rows, shuffle=False, verbose=0)


def test_eager_slices_say_that_places_may_be_looked_up_once():
    with pytest.warns(UserWarning, match="Whether .* is looked up once for all examples"):
        with_places(lambda model: kp.microbatch(model, 4), run_eagerly=True)


def test_clips_are_said():
    with pytest.warns(UserWarning, match=SAYS):
        accumulated(lambda: keras.optimizers.SGD(0.1, clipvalue=0.01))
