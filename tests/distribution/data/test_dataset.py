"""What `fit` takes means what it means in `fit`; what does not go together is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import DistributedFit
from keras_paragrad.distribution.data import distributed_dataset

DEFAULT = tf.distribute.get_strategy()
ROWS = np.arange(10)


def read(*data, **options):
    return [
        tf.nest.map_structure(lambda leaf: leaf if leaf is None else leaf.numpy().tolist(), batch)
        for batch in distributed_dataset(DEFAULT, *data, **options)
    ]


class Batches(keras.utils.PyDataset):
    num_batches = 3

    def __getitem__(self, index):
        rows = ROWS[index * 4 : index * 4 + 4]
        return rows, rows % 2


def generated():
    for index in range(3):
        yield ROWS[index * 4 : index * 4 + 4], ROWS[index * 4 : index * 4 + 4] % 2


def test_arrays_are_batched_and_converted_as_fit_does():
    assert read(ROWS, batch_size=4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    batch = next(iter(distributed_dataset(DEFAULT, {"a": ROWS, "b": [ROWS * 1.0]}, ROWS, ROWS / 10.0, batch_size=4)))
    (inputs, y, weights) = batch
    assert inputs["b"][0].dtype == weights.dtype == tf.float32
    assert inputs["a"].dtype == y.dtype == tf.int64
    np.testing.assert_allclose(weights, ROWS[:4] / 10.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ((ROWS, ROWS % 2), {"batch_size": 4}),
        lambda: ((tf.constant(ROWS), tf.constant(ROWS % 2)), {"batch_size": 4}),
        lambda: ((tf.data.Dataset.from_tensor_slices((ROWS, ROWS % 2)).batch(4),), {}),
        lambda: ((Batches(),), {}),
        lambda: ((Batches(workers=2),), {}),
        lambda: ((generated(),), {}),
        lambda: ((ROWS, ROWS % 2), {"steps_per_epoch": 3}),
        lambda: ((tf.data.Dataset.from_tensor_slices((ROWS, ROWS % 2)).batch(4),), {"prefetch": 2}),
    ],
    ids=["arrays", "tensors", "dataset", "py-dataset", "threads", "generator", "steps", "prefetch"],
)
def test_every_kind_of_data(make):
    data, options = make()
    expected = [(ROWS[start : start + 4].tolist(), (ROWS[start : start + 4] % 2).tolist()) for start in (0, 4, 8)]
    assert read(*data, **options) == expected


@pytest.mark.parametrize("kind", ["arrays", "dataset", "py-dataset"])
def test_class_weights_become_sample_weights(kind):
    data = {
        "arrays": (ROWS, ROWS % 2),
        "dataset": (tf.data.Dataset.from_tensor_slices((ROWS, ROWS % 2)).batch(4),),
        "py-dataset": (Batches(),),
    }[kind]
    options = {"batch_size": 4} if kind == "arrays" else {}
    weights = [batch[2] for batch in read(*data, class_weight={0: 0.5, 1: 2.0}, **options)]
    assert weights == [[0.5, 2.0, 0.5, 2.0], [0.5, 2.0, 0.5, 2.0], [0.5, 2.0]]


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda: distributed_dataset(DEFAULT, ROWS, batch_size=4), 3),
        (lambda: distributed_dataset(DEFAULT, ROWS), 1),
        (lambda: distributed_dataset(DEFAULT, tf.data.Dataset.range(10).batch(4)), 3),
        (lambda: distributed_dataset(DEFAULT, tf.data.Dataset.range(10).batch(4).filter(lambda rows: True)), None),
        (lambda: distributed_dataset(DEFAULT, tf.data.Dataset.range(9).batch(4).repeat(), steps_per_epoch=5), None),
        (lambda: distributed_dataset(DEFAULT, Batches()), 3),
        (lambda: distributed_dataset(DEFAULT, generated()), None),
    ],
    ids=["arrays", "arrays-of-32", "dataset", "unknown", "endless", "py-dataset", "generator"],
)
def test_the_number_of_steps_is_known_where_it_can_be(make, steps):
    assert make().num_batches == steps


def test_a_generator_is_read_on_not_again():
    data = distributed_dataset(DEFAULT, generated())
    assert tf.nest.flatten(data.first_batch())[0].tolist() == [0, 1, 2, 3]
    assert len(list(data)) == 3
    assert list(data) == []


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        ((ROWS,), {"batch_size": 0}, "an integer of at least 1"),
        ((ROWS,), {"steps_per_epoch": True}, "an integer of at least 1"),
        ((ROWS,), {"prefetch": -1}, "an integer of at least 1"),
        ((ROWS,), {"shuffle": "rows"}, " or 'batch'"),
        ((ROWS,), {"seed": 1.5}, "`seed` is 1.5"),
        ((ROWS,), {"shard_policy": "off"}, "already_sharded"),
        ((ROWS,), {"shard_policy": "rows"}, "'data' or 'already_sharded'"),
        ((tf.data.Dataset.range(3),), {}, r"dataset\.batch\(64\)"),
        ((tf.data.Dataset.range(3).batch(2),), {"batch_size": 2}, "has to be batched already"),
        ((tf.data.Dataset.range(3).batch(2).repeat(),), {}, "steps_per_epoch"),
        ((tf.data.Dataset.range(3).batch(2), ROWS), {}, "`y`"),
        ((ROWS, ROWS, ROWS), {"class_weight": {0: 1.0}}, "class_weight"),
        ((ROWS, ROWS[:3]), {}, "same number of samples"),
        ((object(),), {}, "Unrecognized data type"),
    ],
)
def test_refusals(data, options, says):
    with pytest.raises(ValueError, match=says):
        distributed_dataset(DEFAULT, *data, **options)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("size", [4, 0], ids=["inputs", "targets of no axis"])
def test_a_dataset_that_is_not_batched(size, prepared):
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"])
    with dist.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((6, 4), "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, : size or 1] if size else x[:, 0]))
    if prepared:
        dist.prepare(model)
    with pytest.raises(ValueError, match=r"dataset\.batch\(64\)"):
        model.fit(dataset, shuffle=False) if prepared else dist.fit(model, dataset)
