"""Each replica's piece of a batch, for any number of rows, workers and replicas."""

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from runner.covering import examples

from keras_paragrad.compat.workers import ReplicaPlacement
from keras_paragrad.distribution.data.batch_sharding import check_batches, shard_batches

sizes = st.lists(st.integers(1, 11), min_size=1, max_size=4)


def batches_of(sizes):
    """Batches of numbered rows, nested, as a dataset that does not know their sizes."""

    def generate():
        start = 0
        for size in sizes:
            rows = np.arange(start, start + size)
            yield {"a": rows, "b": (np.stack([rows, -rows], axis=1),)}, rows * 10.0
            start += size

    signature = (
        {"a": tf.TensorSpec((None,), tf.int64), "b": (tf.TensorSpec((None, 2), tf.int64),)},
        tf.TensorSpec((None,), tf.float64),
    )
    return tf.data.Dataset.from_generator(generate, output_signature=signature)


def steps_of(dataset, workers, local):
    """For each step, the pieces of all replicas in their order."""
    found = [
        list(shard_batches(dataset, ReplicaPlacement(workers * local, local, worker * local)))
        for worker in range(workers)
    ]
    assert len({len(pieces) for pieces in found}) == 1
    count = len(found[0]) // local
    return [[pieces[step * local + index] for pieces in found for index in range(local)] for step in range(count)]


@examples(3, of=4)
@given(sizes, st.integers(1, 3), st.integers(1, 3))
def test_pieces_are_those_of_array_split(sizes, workers, local):
    steps = steps_of(batches_of(sizes), workers, local)
    whole = list(batches_of(sizes))
    assert len(steps) == len(sizes)
    for pieces, batch in zip(steps, whole, strict=True):
        for index, leaf in enumerate(tf.nest.flatten(batch)):
            expected = np.array_split(leaf.numpy(), workers * local)
            for piece, part in zip(pieces, expected, strict=True):
                np.testing.assert_array_equal(tf.nest.flatten(piece)[index].numpy(), part)
                assert tf.nest.flatten(piece)[index].shape == part.shape


@pytest.mark.parametrize(
    ("rows", "replicas", "expected"), [(20, 3, [7, 7, 6]), (33, 2, [17, 16]), (2, 4, [1, 1, 0, 0]), (4, 1, [4])]
)
def test_sizes(rows, replicas, expected):
    dataset = tf.data.Dataset.from_tensors(np.zeros((rows, 2)))
    assert [piece.shape.as_list() for piece in shard_batches(dataset, ReplicaPlacement(replicas, replicas, 0))] == [
        [size, 2] for size in expected
    ]


@pytest.mark.parametrize("local", [1, 2])
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_ragged_and_sparse(kind, local):
    rows = [[1], [2, 3], [], [4, 0, 5], [6]]
    ragged = tf.ragged.constant(rows)
    leaf = ragged if kind == "ragged" else tf.sparse.from_dense(ragged.to_tensor())
    (pieces,) = steps_of(tf.data.Dataset.from_tensors((leaf, np.arange(5))), 2 // local, local)
    dense = [
        piece[0].to_tensor(shape=(None, 3)) if kind == "ragged" else tf.sparse.to_dense(piece[0]) for piece in pieces
    ]
    np.testing.assert_array_equal(np.concatenate(dense), ragged.to_tensor().numpy())
    assert [len(part) for part in dense] == [3, 2]
    assert [piece[1].numpy().tolist() for piece in pieces] == [[0, 1, 2], [3, 4]]


def test_absent_parts_stay_absent():
    dataset = tf.data.Dataset.from_tensors((np.arange(3), None, np.arange(3)))
    for x, nothing, weight in shard_batches(dataset, ReplicaPlacement(2, 2, 0)):
        assert nothing is None
        assert x.shape == weight.shape


def test_a_tuple_of_one_stays_one():
    assert isinstance(
        next(iter(shard_batches(tf.data.Dataset.from_tensors((np.arange(3),)), ReplicaPlacement(1, 1, 0)))), tuple
    )


def test_unequal_rows_are_an_error():
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([(np.zeros(4), np.zeros(3))]), output_signature=(tf.TensorSpec((None,), tf.float64),) * 2
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="different numbers of rows"):
        list(shard_batches(dataset, ReplicaPlacement(2, 2, 0)))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (tf.TensorSpec((), tf.float32), r"dataset\.batch\(64\)"),
        ((tf.TensorSpec((None, 2)), tf.TensorSpec(())), "is a scalar and not a batch"),
        ((), "no tensor"),
    ],
    ids=["unbatched", "unbatched-targets", "nothing"],
)
def test_what_is_no_batch_is_refused(spec, says):
    with pytest.raises(ValueError, match=says):
        check_batches(spec, 4)


def test_a_replica_that_never_gets_a_row_is_warned_of():
    with pytest.warns(UserWarning, match="3 rows for 4 replicas, so some replicas never get one"):
        check_batches(tf.TensorSpec((3, 2)), 4)


@pytest.mark.parametrize("shape", [(None,), (4, 1), None], ids=["unknown-rows", "enough-rows", "unknown-rank"])
def test_what_may_be_a_batch_is_not_refused(shape):
    check_batches((tf.TensorSpec(shape), {"b": tf.TensorSpec((None, 2))}), 4)
