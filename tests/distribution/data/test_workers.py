"""Two workers in processes of their own: what each of their replicas gets, and one error on both."""

import re

import numpy as np
import pytest
import tensorflow as tf
from runner import own_process
from workers import data_worker

from keras_paragrad.compat.workers import all_or_none, gather
from keras_paragrad.distribution.workers import agree

ROWS = np.arange(20)


@pytest.fixture(scope="module")
def found():
    return own_process.on_workers(data_worker.main, None, seconds=240)


def global_batches(found, name):
    """The concatenation of all replicas' pieces, step after step, and the sizes of the pieces."""
    first, second = (worker[name] for worker in found)
    assert first["steps"] == second["steps"]
    steps = [a + b for a, b in zip(first["pieces"], second["pieces"], strict=True)]
    return [sum(step, []) for step in steps], [[len(piece) for piece in step] for step in steps]


BY_EIGHT = [ROWS[:8].tolist(), ROWS[8:16].tolist(), ROWS[16:].tolist()]


@pytest.mark.parametrize(
    ("name", "batches", "sizes"),
    [
        ("arrays", BY_EIGHT, [[4, 4], [4, 4], [2, 2]]),
        ("dataset of unknown length", BY_EIGHT, [[4, 4], [4, 4], [2, 2]]),
        ("uneven generator", [[0, 1, 2], list(range(3, 11)), [11]], [[2, 1], [4, 4], [1, 0]]),
        ("fewer rows", [list(range(8)), [8]], [[4, 4], [1, 0]]),
        ("options say off", BY_EIGHT, [[4, 4], [4, 4], [2, 2]]),
        ("options say file", BY_EIGHT, [[4, 4], [4, 4], [2, 2]]),
    ],
)
def test_the_pieces_make_up_the_global_batch(found, name, batches, sizes):
    assert global_batches(found, name) == (batches, sizes)


def test_all_workers_draw_the_same_order(found):
    batches, sizes = global_batches(found, "shuffled")
    assert sizes == [[4, 4], [4, 4], [2, 2]]
    rows = sum(batches, [])
    assert sorted(rows) == ROWS.tolist() != rows
    batches, sizes = global_batches(found, "py dataset")
    assert sizes == [[2, 1]] * 3
    assert sorted(batches) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_shards_of_ones_own_are_read_whole(found):
    batches, sizes = global_batches(found, "sharded")
    assert sizes == [[4, 4], [4, 4], [2, 4], [0, 2]]
    assert sorted(sum(batches, [])) == [*range(10), *range(100, 114)]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other sizes", "examples: 1000 on worker 0, 900 on worker 1"),
        ("other rows", r"first batches of data.*ds\.shuffle\(1000, seed=0\)"),
        ("other types", "different nesting, types or shapes of the data"),
    ],
)
def test_the_same_error_on_every_worker(found, name, says):
    first, second = (worker[name] for worker in found)
    assert first == second
    assert re.search(says, first)


def test_what_fails_on_one_worker_fails_on_all(found):
    assert "Worker 1 has failed here; the error" in found[0]["one fails"]
    assert "`shuffle` is 'rows'" in found[1]["one fails"]


def test_one_worker_agrees_with_itself():
    strategy = tf.distribute.get_strategy()
    agree(strategy, {"examples": 3, "batches": -1}, "data")
    np.testing.assert_array_equal(gather(strategy, [1.5, 2.0]), [[1.5, 2.0]])
    assert all_or_none(strategy, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        all_or_none(strategy, lambda: 1 // 0)
