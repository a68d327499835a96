"""How data is divided among workers; what would train every worker on all data is refused."""

from typing import Any

import tensorflow as tf

from keras_paragrad.arguments import check_choice
from keras_paragrad.compat.data import count_files, share_of_files
from keras_paragrad.compat.local import Place
from keras_paragrad.distribution.choices import SHARD_POLICIES
from keras_paragrad.distribution.data.batch_sharding import split_batches

AutoShardPolicy = tf.data.experimental.AutoShardPolicy


def check_policy(policy: str) -> str:
    """Checks a shard policy, and returns it."""
    if isinstance(policy, str) and policy.lower() == "off":
        raise ValueError(
            '`shard_policy` is "off", which would train every worker on all the data it reads. If each worker reads '
            'its own shard, write shard_policy="already_sharded"; if all read the same data, shard_policy="data".'
        )
    return check_choice("shard_policy", policy, SHARD_POLICIES)


def choose_policy(policy: str, x: Any, workers: int) -> str:
    """The policy for some data: the requested one, that of the dataset's options, or "data"."""
    check_policy(policy)
    if workers == 1:
        return "data"
    if policy == "auto" and isinstance(x, tf.data.Dataset):
        policy = _policy_of_options(x)
    if policy == "file":
        _check_files(x, workers)
    return "data" if policy == "auto" else policy


def worker_batches(batches: tf.data.Dataset, policy: str, place: Place) -> tuple[tf.data.Dataset, Place]:
    """What this worker reads, and the replicas that it is sharded over."""
    if policy == "data" or place.workers == 1:
        return batches, place
    if policy == "file":
        batches = split_batches(share_of_files(batches, place.workers, place.worker), place.workers)
    return batches, Place(replicas=place.local, local=place.local, first=0)


def _policy_of_options(dataset: tf.data.Dataset) -> str:
    asked = dataset.options().experimental_distribute.auto_shard_policy
    if asked == AutoShardPolicy.OFF:
        raise ValueError(
            "The dataset's options set AutoShardPolicy.OFF, which would train every worker on all the data it reads. "
            'If each worker reads its own shard, write shard_policy="already_sharded"; if all read the same data, '
            'shard_policy="data".'
        )
    return "file" if asked == AutoShardPolicy.FILE else "data"


def _check_files(x: Any, workers: int) -> None:
    files = count_files(x) if isinstance(x, tf.data.Dataset) else None
    if files is None:
        raise ValueError(
            f'shard_policy="file" divides the files that a tf.data.Dataset reads, but this {type(x).__name__} reads '
            "none that can be counted. Start it with tf.data.Dataset.list_files, a list of file names or a "
            'TFRecordDataset, or write shard_policy="data".'
        )
    if files < workers:
        raise ValueError(
            f'shard_policy="file" needs at least one file per worker: there are {files} files and {workers} workers. '
            'Split the data into more files, or write shard_policy="data".'
        )
