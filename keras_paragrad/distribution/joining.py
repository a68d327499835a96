"""Has this process join its cluster, once."""

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.workers import NamedDevicesStrategy, has_joined_a_cluster
from keras_paragrad.distribution.alike import versions
from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.rendezvous import rendezvous


def meet(cluster: Cluster, timeout: float, facts: dict[str, Any], *, instead: str = "") -> None:
    """Waits for the other workers, and compares what has to be the same on all of them."""
    if has_joined_a_cluster():
        # TensorFlow already listens on this worker's address, so a second rendezvous there is impossible.
        raise RuntimeError(
            "This process has already joined its cluster, in an earlier DistributedFit(...) or "
            f"MultiWorkerMirroredStrategy(), and can't join it twice. Reuse that one{instead}."
        )
    rendezvous(cluster, timeout, {**versions(), **facts})


def join_workers(
    kind: type[NamedDevicesStrategy], cluster: Cluster, devices: Sequence[str], communication: Any
) -> tf.distribute.Strategy:
    """The strategy by which workers that have met train together."""
    # TensorFlow configures collectives from this variable, however the cluster was described.
    os.environ["TF_CONFIG"] = cluster.to_tf_config()
    try:
        return kind(devices, communication)
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise RuntimeError(
            "TensorFlow has already created tensors in this process, and several workers have to be set up before "
            "that. Write DistributedFit(...) before the first optimizer, layer, dataset or tensor."
        ) from error
