"""Sums over replicas: what meets in one collective, and what in one of its own."""

import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad.compat.collectives import LARGE, SMALL, sum_over_replicas
from keras_paragrad.compat.workers import NamedDevicesStrategy

own_process = pytest.mark.own_process
REPLICAS = 2
LARGE_ROWS = LARGE // (4 * 64)
SHAPES = ((LARGE_ROWS, 64), (3,), (2, 5), (LARGE_ROWS + 1, 64), (LARGE_ROWS - 1, 64))


def packed_by(bytes_per_pack):
    """Two replicas on a ring, which packs as it is asked to."""
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring, bytes_per_pack=bytes_per_pack)
    return NamedDevicesStrategy(("CPU:0", "CPU:1"), options)


def collectives(strategy):
    """How many collectives each replica's sums of tensors of `SHAPES` take; they have to be right."""

    def on_replica():
        index = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        tensors = [tf.fill(shape, 10.0**place) * (1 + index) for place, shape in enumerate(SHAPES)]
        rows = tf.IndexedSlices(tf.fill((2, 1), 1 + index), tf.constant([0, 2]), tf.constant([4, 1]))
        *sums, sparse = sum_over_replicas([*tensors, rows])
        return [*sums, tf.math.unsorted_segment_sum(sparse.values, sparse.indices, 4)]

    step = tf.function(lambda: strategy.run(on_replica), autograph=False)
    for local in zip(*(strategy.experimental_local_results(each) for each in step()), strict=True):
        *sums, sparse = local
        for place, (shape, total) in enumerate(zip(SHAPES, sums, strict=True)):
            np.testing.assert_array_equal(total, np.full(shape, 3 * 10.0**place))
        np.testing.assert_array_equal(sparse, [[3], [0], [3], [0]])
    return collectives_in(step)


def collectives_in(step):
    operations = step.get_concrete_function().graph.get_operations()
    return sum(each.type == "CollectiveReduceV2" for each in operations) // REPLICAS


@own_process
def test_large_tensors_meet_by_themselves_and_the_others_together(mirrored):
    assert collectives(mirrored) == 2 + 1


@own_process
def test_with_the_strategy_of_several_workers_too():
    assert collectives(packed_by(0)) == 2 + 1


@own_process
def test_packs_that_were_asked_for_hold_the_large_ones_too():
    assert collectives(packed_by(64 * LARGE)) == 1


@own_process
def test_added_up_in_one_place():
    one_device = tf.distribute.ReductionToOneDevice()
    assert collectives(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=one_device)) == 0


@own_process
@pytest.mark.parametrize(("size", "expected"), [(SMALL // 4 - 1, 0), (SMALL // 4, 1)])
def test_small_tensors_of_one_process_need_no_collective(mirrored, size, expected):
    def on_replica():
        index = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        return sum_over_replicas([tf.fill([size], 1 + index), index])

    step = tf.function(lambda: mirrored.run(on_replica), autograph=False)
    many, one = (mirrored.experimental_local_results(each) for each in step())
    for local in zip(many, one, strict=True):
        np.testing.assert_array_equal(local[0], np.full(size, 3))
        assert local[1] == 1
    assert collectives_in(step) == expected


@own_process
def test_dtypes_do_not_meet_in_one_pack_and_integers_are_exact():
    strategy = packed_by(0)
    large = 2**40 + 1

    def on_replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        dtypes = ("float32", "int64", "float64", "int32", "float32", "float16")
        many = [tf.cast(tf.fill((40,), index + 1), dtype) for dtype in dtypes]
        return sum_over_replicas([*many, tf.constant(large, "int64")])

    step = tf.function(lambda: strategy.run(on_replica), autograph=False)
    *many, one = (strategy.experimental_local_results(each)[0] for each in step())
    for total, dtype in zip(many, ("float32", "int64", "float64", "int32", "float32", "float16"), strict=True):
        assert total.dtype == dtype
        np.testing.assert_array_equal(total, np.full(40, 3))
    assert one == 2 * large
    assert collectives_in(step) == 3
