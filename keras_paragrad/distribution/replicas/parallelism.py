"""`DataParallel`: replicas of the model divide each batch, on one machine or several."""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.model import may_choose_xla
from keras_paragrad.compat.workers import NamedDevicesStrategy
from keras_paragrad.distribution.decisions.strategy import decide_strategy
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Decisions, Options, refuse_devices
from keras_paragrad.distribution.parallelism import Parallelism, PlannedRun, Strategies
from keras_paragrad.distribution.plan import Plan
from keras_paragrad.distribution.preparation import Preparation
from keras_paragrad.distribution.rendezvous import await_workers, join_workers
from keras_paragrad.distribution.replicas.preparation import ReplicaPreparation

_ALL_REDUCE = {
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
    "one_device": tf.distribute.ReductionToOneDevice,
    # TensorFlow's default between CPUs.
    "ring": lambda: None,
    "none": lambda: None,
}
_BETWEEN_WORKERS = {
    "nccl": tf.distribute.experimental.CommunicationImplementation.NCCL,
    "ring": tf.distribute.experimental.CommunicationImplementation.RING,
}


class DataParallel(Parallelism):
    """One replica or several; the default."""

    precedence = 100

    @classmethod
    def asked(cls, options: Options, hardware: Hardware | None) -> "DataParallel":
        return cls()

    @classmethod
    def check_options(cls, options: Options) -> None:
        if options.devices is None:
            return
        if options.strategy in ("none", "tpu"):
            refuse_devices(options)
        if options.strategy == "one_device" and len(options.devices) > 1:
            raise ValueError(
                f'strategy="one_device" takes one device, and devices={list(options.devices)} names '
                f'{len(options.devices)}. Name one of them, or write strategy="mirrored".'
            )

    def decide(self, hardware: Hardware, options: Options) -> Decisions:
        strategy = decide_strategy(hardware, options)
        return Decisions([strategy], launched=strategy.value == "multi_worker")

    def strategy(self, plan: Plan, hardware: Hardware, options: Options) -> Strategies:
        if options.given is not None:
            return Strategies.same(options.given)
        return Strategies.same(_MAKERS[plan.strategy.value](plan, hardware, options))

    def prepare(self, model: keras.Model, run: PlannedRun) -> Preparation:
        options, jit = run.options, run.options.jit
        if jit == "auto":
            # Keras disables XLA under every strategy, unless it is requested explicitly.
            unset = run.strategies.models.num_replicas_in_sync > 1 and may_choose_xla(model)
            jit = run.plan.jit.value != "none" if unset else None
        return ReplicaPreparation.of(model, options.exact, options.weighting, jit, options.shard_policy)


def _mirrored(plan: Plan, hardware: Hardware, options: Options) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(list(plan.devices.value), _ALL_REDUCE[plan.communication.value]())


def _multi_worker(plan: Plan, hardware: Hardware, options: Options) -> tf.distribute.Strategy:
    cluster, timeout = hardware.cluster, plan.collective_timeout.value
    if cluster is None:
        raise ValueError("The plan is for several workers, but the hardware has no cluster.")
    facts = {"replicas": len(plan.devices.value), "communication": plan.communication.value}
    instead = ", or pass its strategy on: DistributedFit(strategy=first.strategy)"
    await_workers(cluster, options.startup_timeout, facts, instead=instead)
    communication = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=plan.pack_bytes.value or 0,
        timeout_seconds=None if timeout is None else float(timeout),
        implementation=_BETWEEN_WORKERS[plan.communication.value],
    )
    return join_workers(NamedDevicesStrategy, cluster, plan.devices.value, communication)


def _tpu(plan: Plan, hardware: Hardware, options: Options) -> tf.distribute.Strategy:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver.connect(hardware.tpu_name or "local")
    return tf.distribute.TPUStrategy(resolver)


_MAKERS: dict[str, Any] = {
    "none": lambda plan, hardware, options: tf.distribute.get_strategy(),
    "one_device": lambda plan, hardware, options: tf.distribute.OneDeviceStrategy(f"/{plan.devices.value[0]}"),
    "mirrored": _mirrored,
    "multi_worker": _multi_worker,
    "tpu": _tpu,
}
PARALLELISM = DataParallel
