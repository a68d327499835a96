"""How data is divided among workers, and what would train all of them on everything."""

from typing import Any

import tensorflow as tf

from keras_paragrad._keras.objects.data import count_files, share_of_files
from keras_paragrad._keras.replicas.local import Place
from keras_paragrad.arguments import check_choice
from keras_paragrad.distribution.choices import SHARD_POLICIES
from keras_paragrad.distribution.data.batch_sharding import split_batches

AutoShardPolicy = tf.data.experimental.AutoShardPolicy


def check_policy(policy: str) -> str:
    """The policy, if it is one.

    Raises:
        ValueError: It isn't one; for "off" the message says what to write for what may be meant.
    """
    if isinstance(policy, str) and policy.lower() == "off":
        raise ValueError(
            '`shard_policy` is "off", which would train every worker on everything it is given. If each worker was '
            'given a part of its own, write shard_policy="already_sharded"; if all were given the same, '
            'shard_policy="data".'
        )
    return check_choice("shard_policy", policy, SHARD_POLICIES)


def choose_policy(policy: str, x: Any, workers: int) -> str:
    """The policy for some data: what is asked for, what a dataset's own options ask for, or "data".

    Raises:
        ValueError: The data can't be divided so.
    """
    check_policy(policy)
    if workers == 1:
        return "data"
    if policy == "auto" and isinstance(x, tf.data.Dataset):
        policy = _policy_of_options(x)
    if policy == "file":
        _check_files(x, workers)
    return "data" if policy == "auto" else policy


def worker_batches(batches: tf.data.Dataset, policy: str, place: Place) -> tuple[tf.data.Dataset, Place]:
    """What this worker reads, and the replicas that it is sharded over.

    Args:
        batches: Global batches; with "already_sharded" this worker's part of them.
        policy: "data", "file" or "already_sharded".
        place: Which replicas are here.
    """
    if policy == "data" or place.workers == 1:
        return batches, place
    if policy == "file":
        batches = split_batches(share_of_files(batches, place.workers, place.worker), place.workers)
    return batches, Place(replicas=place.local, local=place.local, first=0)


def _policy_of_options(dataset: tf.data.Dataset) -> str:
    asked = dataset.options().experimental_distribute.auto_shard_policy
    if asked == AutoShardPolicy.OFF:
        raise ValueError(
            "The dataset's options say AutoShardPolicy.OFF, which trains every worker on everything it reads. If each "
            'worker reads a part of its own, write shard_policy="already_sharded"; if all read the same, write '
            'shard_policy="data", and each takes its rows of every batch.'
        )
    return "file" if asked == AutoShardPolicy.FILE else "data"


def _check_files(x: Any, workers: int) -> None:
    files = count_files(x) if isinstance(x, tf.data.Dataset) else None
    if files is None:
        raise ValueError(
            f'shard_policy="file" divides the files that a tf.data.Dataset reads, and this {type(x).__name__} reads '
            "none that can be counted. Begin it with tf.data.Dataset.list_files, a list of file names or a "
            'TFRecordDataset, or write shard_policy="data".'
        )
    if files < workers:
        raise ValueError(
            f'shard_policy="file" needs a file for each worker: there are {files} files and {workers} workers. Write '
            'the data to more files, or write shard_policy="data".'
        )
