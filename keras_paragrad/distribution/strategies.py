"""Creates the `tf.distribute.Strategy` for a plan."""

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_paragrad._keras.mesh.dtensor import join, turn_combine_pass_off
from keras_paragrad._keras.mesh.tracing import let_keras_lay_out
from keras_paragrad._keras.replicas.workers import BesideMesh, NamedDevicesStrategy, has_joined_a_cluster
from keras_paragrad.distribution.alike import versions
from keras_paragrad.distribution.cluster import Cluster
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Options
from keras_paragrad.distribution.plan import Plan
from keras_paragrad.distribution.rendezvous import rendezvous
from keras_paragrad.distribution.servers import make_parameter_server_strategy, serve_if_asked

_IMPLEMENTATIONS = {
    "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
    "ring": tf.distribute.experimental.CommunicationImplementation.RING,
}


_JOINED = (
    "This process has already joined its cluster, in an earlier DistributedFit(...) or MultiWorkerMirroredStrategy(), "
    "and can't join it twice. Reuse that one"
)


def make_strategy(plan: Plan, hardware: Hardware, options: Options) -> tf.distribute.Strategy:
    """Creates the planned strategy, and waits for the other workers if there are any.

    Args:
        plan: The plan.
        hardware: The hardware it was made for.
        options: The requested options; a strategy object in them is returned as is.

    Returns:
        The strategy; if the plan has none, TensorFlow's default, which distributes nothing. With parameter servers,
        this never returns on a worker or server.

    Raises:
        RuntimeError: TensorFlow was already set up for several workers in this process, or it is too late to do so.
    """
    if options.given is not None:
        return options.given
    if plan.on_servers:
        serve_if_asked(hardware.cluster)
    if plan.strategy.value == "multi_worker" and hardware.cluster:
        if has_joined_a_cluster():
            # TensorFlow already listens on this worker's address, so a second rendezvous there is impossible.
            raise RuntimeError(f"{_JOINED}, or pass its strategy on: DistributedFit(strategy=first.strategy).")
        rendezvous(hardware.cluster, options.startup_timeout, _facts(plan))
    return _MAKERS[plan.strategy.value](plan, hardware)


def _facts(plan: Plan) -> dict[str, Any]:
    return {**versions(), "replicas": len(plan.devices.value), "communication": plan.communication.value}


def _mirrored(plan: Plan, hardware: Hardware) -> tf.distribute.Strategy:
    ways = {
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
        "one_device": tf.distribute.ReductionToOneDevice,
        # TensorFlow's default between CPUs.
        "ring": lambda: None,
        "none": lambda: None,
    }
    return tf.distribute.MirroredStrategy(list(plan.devices.value), ways[plan.communication.value]())


def _multi_worker(plan: Plan, hardware: Hardware) -> tf.distribute.Strategy:
    cluster = hardware.cluster
    if cluster is None:
        raise ValueError("The plan is for several workers, but the hardware has no cluster.")
    timeout = plan.collective_timeout.value
    communication = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=plan.pack_bytes.value or 0,
        timeout_seconds=None if timeout is None else float(timeout),
        implementation=_IMPLEMENTATIONS[plan.communication.value],
    )
    return _joined(NamedDevicesStrategy, cluster, plan.devices.value, communication)


def _joined(
    kind: type[NamedDevicesStrategy], cluster: Cluster, devices: Sequence[str], communication: Any
) -> tf.distribute.Strategy:
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


def _tpu(plan: Plan, hardware: Hardware) -> tf.distribute.Strategy:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(hardware.tpu_name or "local")
    return tf.distribute.TPUStrategy(resolver)


def _mesh(plan: Plan, hardware: Hardware) -> tf.distribute.Strategy:
    # Before TensorFlow compiles anything on it.
    turn_combine_pass_off()
    let_keras_lay_out()
    return tf.distribute.get_strategy()


def strategy_between(plan: Plan, hardware: Hardware, options: Options) -> tf.distribute.Strategy | None:
    """The strategy by which workers that hold a mesh together talk to each other; `None` if there is no such mesh.

    They meet here. The model's own strategy is TensorFlow's default.

    Raises:
        RuntimeError: TensorFlow was already set up in this process.
    """
    cluster = hardware.cluster
    if plan.strategy.value != "mesh" or cluster is None or hardware.worker_count == 1:
        return None
    if has_joined_a_cluster():
        raise RuntimeError(f"{_JOINED}.")
    rendezvous(
        cluster, options.startup_timeout, {**versions(), "mesh": str(options.mesh), "devices": len(plan.devices.value)}
    )
    join(cluster.jobs["worker"], cluster.index)
    communication = tf.distribute.experimental.CommunicationOptions(implementation=_IMPLEMENTATIONS["ring"])
    return _joined(BesideMesh, cluster, plan.devices.value[:1], communication)


_MAKERS = {
    "none": lambda plan, hardware: tf.distribute.get_strategy(),
    "one_device": lambda plan, hardware: tf.distribute.OneDeviceStrategy(f"/{plan.devices.value[0]}"),
    "mirrored": _mirrored,
    "multi_worker": _multi_worker,
    "tpu": _tpu,
    # One replica, whose stages are on several devices.
    "pipeline": lambda plan, hardware: tf.distribute.get_strategy(),
    # One replica, whose variables and batches are on several devices.
    "mesh": _mesh,
    "parameter_server": lambda plan, hardware: make_parameter_server_strategy(hardware.cluster),
}
