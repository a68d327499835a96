"""Orders that are drawn: permutations, new in each epoch, and the same wherever they are drawn."""

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from keras_paragrad.distribution.data import FollowEpochs, distributed_dataset
from keras_paragrad.distribution.data.sources import common_seed, row_order

DEFAULT = tf.distribute.get_strategy()


@given(st.integers(1, 50), st.integers(1, 9), st.sampled_from([True, "batch"]), st.integers(0, 5))
def test_an_order_is_a_permutation_and_repeats(rows, batch_size, shuffle, epoch):
    order = row_order(rows, batch_size, shuffle, 1, epoch)
    assert sorted(order) == list(range(rows))
    np.testing.assert_array_equal(order, row_order(rows, batch_size, shuffle, 1, epoch))
    if shuffle == "batch":
        np.testing.assert_array_equal(order // batch_size, np.arange(rows) // batch_size)


def test_orders_differ_between_epochs_and_seeds():
    found = {tuple(row_order(20, 4, True, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(found) == 9


def rows_read(data):
    return np.concatenate([batch.numpy() for batch in data]).tolist()


def test_keras_seed_makes_the_order():
    def read():
        keras.utils.set_random_seed(3)
        return rows_read(distributed_dataset(DEFAULT, np.arange(30), batch_size=7, shuffle=True))

    assert read() == read() == row_order(30, 7, True, 3, 0).tolist()


def test_a_given_seed_comes_first():
    assert common_seed(DEFAULT, 7) == 7
    data = distributed_dataset(DEFAULT, np.arange(30), batch_size=7, shuffle=True, seed=5)
    assert [rows_read(data) for _ in range(2)] == [row_order(30, 7, True, 5, epoch).tolist() for epoch in range(2)]


def test_an_epoch_can_be_named_and_begun_in_its_middle():
    data = distributed_dataset(DEFAULT, np.arange(30), batch_size=7, shuffle=True, seed=5)
    data.set_epoch(4, skip=2)
    assert rows_read(data) == row_order(30, 7, True, 5, 4).tolist()[14:]
    assert rows_read(data) == row_order(30, 7, True, 5, 5).tolist()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_py_dataset_is_read_in_a_new_order_each_epoch(workers):
    class Batches(keras.utils.PyDataset):
        epochs = 0

        @property
        def num_batches(self):
            return 9

        def __getitem__(self, index):
            return (np.arange(index * 2, index * 2 + 2),)

        def on_epoch_end(self):
            self.epochs += 1

    batches = Batches(workers=workers)
    data = distributed_dataset(DEFAULT, batches, shuffle=True, seed=5)
    for epoch in range(2):
        found = [batch[0].numpy().tolist() for batch in data]
        assert found == [[2 * index, 2 * index + 1] for index in row_order(9, 1, True, 5, epoch)]
    assert batches.epochs == 2


@pytest.mark.parametrize("count", [None, 40])
def test_a_dataset_read_by_several_workers_goes_on_in_the_next_epoch(count):
    class Batches(keras.utils.PyDataset):
        num_batches = count

        def __getitem__(self, index):
            return (np.array([index]),)

    data = distributed_dataset(DEFAULT, Batches(workers=2, max_queue_size=2), steps_per_epoch=3)
    batches = iter(data.get_tf_dataset())
    found = []
    # More than is read ahead.
    for _ in range(10):
        data.on_epoch_begin()
        found += [int(next(batches)[0][0]) for _ in range(3)]
        data.on_epoch_end()
        found.append(int(next(batches)[0][0]))
    assert found == list(range(40))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_order_lasts_until_all_batches_are_read(workers):
    class Batches(keras.utils.PyDataset):
        num_batches = 12

        def __getitem__(self, index):
            return (np.array([index]),)

    data = distributed_dataset(DEFAULT, Batches(workers=workers), shuffle=True, seed=5, steps_per_epoch=3)
    for read in range(2):
        batches, found = iter(data.get_tf_dataset()), []
        for _ in range(4):
            data.on_epoch_begin()
            found += [int(next(batches)[0][0]) for _ in range(3)]
            data.on_epoch_end()
        assert found == row_order(12, 1, True, 5, read).tolist()


@pytest.mark.long
def test_a_resumed_fit_reads_what_an_undisturbed_one_reads():
    x = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")

    def model():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", loss="mse", jit_compile=False)
        return model

    def fit(model, **epochs):
        data = distributed_dataset(DEFAULT, x, x[:, :1], batch_size=5, shuffle=True, seed=1)
        model.fit(data, verbose=0, callbacks=[FollowEpochs(data)], **epochs)

    whole, resumed = model(), model()
    fit(whole, epochs=4)
    fit(resumed, epochs=2)
    fit(resumed, epochs=4, initial_epoch=2)
    for a, b in zip(whole.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
