"""One of several workers that read the same data: what its replicas got, and what it was refused."""

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.workers import replica_placement
from keras_paragrad.distribution.data import distributed_dataset

ROWS = np.arange(20)


class Batches(keras.utils.PyDataset):
    num_batches = 3

    def __getitem__(self, index):
        return (ROWS[index * 3 : index * 3 + 3],)


def uneven():
    for start, stop in ((0, 3), (3, 11), (11, 12)):
        yield (ROWS[start:stop],)


def read(strategy, data, **options):
    try:
        distributed = distributed_dataset(strategy, data, **options)
    except ValueError as error:
        return str(error)
    flat = [tf.nest.flatten(step)[0] for step in distributed]
    pieces = [[piece.numpy().tolist() for piece in strategy.experimental_local_results(step)] for step in flat]
    return {"steps": distributed.num_batches, "pieces": pieces}


def with_policy(policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return tf.data.Dataset.range(20).batch(8).with_options(options)


def main(_: None) -> dict:
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
    )
    worker = replica_placement(strategy).worker
    policy = tf.data.experimental.AutoShardPolicy
    return {
        "arrays": read(strategy, ROWS, batch_size=8),
        "dataset of unknown length": read(strategy, tf.data.Dataset.range(20).batch(8).filter(lambda rows: True)),
        "uneven generator": read(strategy, uneven()),
        "fewer rows": read(strategy, ROWS[:9], batch_size=8),
        "py dataset": read(strategy, Batches(), shuffle=True),
        # Without a seed, each worker would draw another order.
        "shuffled": read(strategy, ROWS, batch_size=8, shuffle=True),
        "sharded": read(strategy, ROWS[: 10 + 4 * worker] + 100 * worker, batch_size=8, shard_policy="already_sharded"),
        "options say off": read(strategy, with_policy(policy.OFF)),
        "options say file": read(strategy, with_policy(policy.FILE)),
        "other sizes": read(strategy, np.arange(1000 - 100 * worker), batch_size=8),
        "other rows": read(strategy, tf.data.Dataset.range(20).shuffle(20, seed=worker).batch(8)),
        "other types": read(strategy, ROWS.astype("float32" if worker else "int32"), batch_size=8),
        "one fails": read(strategy, ROWS, batch_size=8, shuffle="rows" if worker else False),
    }
