"""Under MirroredStrategy: what each replica gets, and stock `fit` on it."""

import gc
import itertools

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from tensorflow.python.framework.func_graph import FuncGraph

from keras_paragrad import DistributedFit
from keras_paragrad.compat.workers import replica_placement
from keras_paragrad.distribution.data import FollowEpochs, distributed_dataset

own_process = pytest.mark.own_process(seconds=280)
X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def steps_of(strategy, data):
    return [[piece.numpy() for piece in strategy.experimental_local_results(step)] for step in data]


@own_process
def test_every_replica_gets_its_piece(mirrored):
    @given(st.integers(2, 40), st.integers(2, 12), st.sampled_from(["arrays", "dataset", "unknown length"]))
    def check(rows, batch_size, kind):
        x = np.arange(rows)
        if kind == "arrays":
            data = distributed_dataset(mirrored, x, batch_size=batch_size)
        else:
            batches = tf.data.Dataset.from_tensor_slices(x).batch(batch_size)
            batches = batches if kind == "dataset" else batches.filter(lambda rows: True)
            data = distributed_dataset(mirrored, batches)
        steps = steps_of(mirrored, data)
        assert data.num_batches == (None if kind == "unknown length" else len(steps))
        expected = [np.array_split(x[start : start + batch_size], 2) for start in range(0, rows, batch_size)]
        assert [[p.tolist() for p in step] for step in steps] == [[p.tolist() for p in step] for step in expected]

    check()


def an_epoch_begun_in_its_middle_leaves_out_the_batches_of_all_replicas(mirrored):
    data = distributed_dataset(mirrored, np.arange(11), batch_size=4)
    data.set_epoch(0, skip=1)
    assert [[piece.tolist() for piece in step] for step in steps_of(mirrored, data)] == [
        [[4, 5], [6, 7]],
        [[8, 9], [10]],
    ]


def the_replicas_are_known(mirrored):
    assert replica_placement(mirrored) == (2, 2, 0, None)
    assert replica_placement(tf.distribute.get_strategy()) == (1, 1, 0, None)
    assert replica_placement(tf.distribute.OneDeviceStrategy("CPU:0")) == (1, 1, 0, None)


def batches_too_small_for_the_replicas_are_read(mirrored):
    for make in (
        lambda: distributed_dataset(mirrored, np.arange(8), batch_size=1),
        lambda: distributed_dataset(mirrored, tf.data.Dataset.range(8).batch(1, drop_remainder=True)),
    ):
        with pytest.warns(UserWarning, match="1 row for 2 replicas"):
            data = make()
        rows = [part for batch in data for part in mirrored.experimental_local_results(batch)]
        assert [each.numpy().tolist() for each in rows] == [part for row in range(8) for part in ([row], [])]


def data_that_is_distributed_already_is_refused(mirrored):
    with pytest.raises(ValueError, match="already distributed"):
        distributed_dataset(mirrored, mirrored.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(2)))


@own_process
def test_sizes_places_and_refusals(mirrored):
    an_epoch_begun_in_its_middle_leaves_out_the_batches_of_all_replicas(mirrored)
    the_replicas_are_known(mirrored)
    batches_too_small_for_the_replicas_are_read(mirrored)
    data_that_is_distributed_already_is_refused(mirrored)


class Batches(keras.utils.PyDataset):
    num_batches = 4

    def __getitem__(self, index):
        return X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]


KINDS = {
    "arrays": lambda: ((X, Y), {"batch_size": 8}),
    "shuffled": lambda: ((X, Y), {"batch_size": 8, "shuffle": True, "seed": 1}),
    "dataset": lambda: ((tf.data.Dataset.from_tensor_slices((X, Y)).batch(8),), {}),
    "cached": lambda: ((tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).cache(),), {}),
    "py-dataset": lambda: ((Batches(workers=2),), {"shuffle": True, "seed": 1}),
}


def normalizing(strategy, **compile_arguments):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input((3,))
        normalization = keras.layers.Normalization()
        outputs = keras.layers.Dense(1)(normalization(inputs))
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), loss="mse", jit_compile=False, **compile_arguments)
    normalization.adapt(X)
    return model


def fitted(model, strategy, kind, start):
    """From the same weights for each kind, by a step that is traced once."""
    model.set_weights(start)
    data, options = KINDS[kind]()
    batches = distributed_dataset(strategy, *data, **options)
    # Two devices take 0.1 s for each iterator over data.
    validation = distributed_dataset(strategy, X, Y, batch_size=16) if kind == "arrays" else None
    history = model.fit(
        batches, epochs=2, verbose=0, shuffle=False, callbacks=[FollowEpochs(batches)], validation_data=validation
    )
    assert history.params["steps"] == 4
    return history.history


# A shuffled dataset has the order of shuffled arrays, and a cached one is read as one that is not.
@pytest.mark.long
@own_process
@pytest.mark.parametrize(
    "kinds",
    [("cached", "py-dataset"), pytest.param(tuple(KINDS), marks=pytest.mark.long)],
    ids=["few", "all"],
)
def test_stock_fit_trains_as_on_one_device(mirrored, kinds):
    default = tf.distribute.get_strategy()
    two, one = normalizing(mirrored), normalizing(default, run_eagerly=True)
    for a, b in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    start = one.get_weights()
    for kind in kinds:
        history, expected = fitted(two, mirrored, kind, start), fitted(one, default, kind, start)
        assert not np.allclose(one.get_weights()[-1], start[-1])
        for a, b in zip(one.get_weights(), two.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, atol=1e-5)
    data = distributed_dataset(mirrored, X, batch_size=8)
    np.testing.assert_allclose(two.predict(data, verbose=0), one.predict(X, verbose=0), atol=1e-5)


@own_process
def test_the_graph_of_a_step_is_there_once(mirrored):
    """For batches of all sizes, and in no graph around it."""
    dist = DistributedFit(mirrored)
    with dist.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    dist.fit(model, X[:21], Y[:21], batch_size=8, epochs=2, verbose=0)
    graphs = [each for each in gc.get_objects() if isinstance(each, FuncGraph)]
    assert [graph.name for graph in graphs].count("one_step") == 1
    inner = {graph.name: [each.signature.name for each in graph.as_graph_def().library.function] for graph in graphs}
    assert not [graph for graph, functions in inner.items() if any("one_step" in name for name in functions)]


class Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index):
        return X[index % 30 : index % 30 + 2], Y[index % 30 : index % 30 + 2]


@pytest.mark.long
@own_process
@pytest.mark.parametrize("all_ways", [False, True], ids=["each once", "all"])
def test_batches_that_no_second_reader_gets_are_those_of_one_device(mirrored, all_ways):
    dist = DistributedFit(mirrored)
    endless = Endless()

    def trained(fit, data, prepare=lambda model: None):
        keras.utils.set_random_seed(0)
        # Not built, so that Keras asks for a batch before the first epoch.
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), loss="mse", jit_compile=False)
        prepare(model)
        history = fit(model, data(), steps_per_epoch=4, epochs=2, shuffle=False, verbose=0)
        return [*history.history["loss"], model.evaluate(data(), steps=3, verbose=0)]

    expected = trained(keras.Model.fit, lambda: endless)
    kinds = (lambda: Endless(workers=2), lambda: (endless[index] for index in itertools.count()))
    ways = ((keras.Model.fit, dist.prepare), (dist.fit,))
    with dist.scope():
        for data, (fit, *prepare) in itertools.product(kinds, ways) if all_ways else zip(kinds, ways, strict=True):
            np.testing.assert_allclose(trained(fit, data, *prepare), expected, rtol=1e-5)
