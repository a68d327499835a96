"""`Plan`: the decisions derived from hardware and options, each with its reason."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from keras_paragrad.distribution.decisions.batch import (
    decide_batch,
    decide_lr_scaling,
    decide_shard_policy,
    decide_warmup,
)
from keras_paragrad.distribution.decisions.communication import (
    decide_communication,
    decide_pack_bytes,
    decide_timeout,
)
from keras_paragrad.distribution.decisions.decision import Decision
from keras_paragrad.distribution.decisions.devices import decide_devices, decide_replicas
from keras_paragrad.distribution.decisions.exact import decide_exact
from keras_paragrad.distribution.decisions.jit import decide_jit
from keras_paragrad.distribution.decisions.precision import decide_precision
from keras_paragrad.distribution.decisions.strategy import decide_strategy
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Options

__all__ = ["Decision", "Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """Decisions in the order they were made; iterable.

    Attributes:
        strategy: `"none"`, `"one_device"`, `"mirrored"`, `"multi_worker"`, `"tpu"` or `"parameter_server"`.
        devices: Names of this process's devices, as a tuple; empty if the strategy defines its own.
        replicas: Number of replicas over all workers; `None` until TensorFlow has connected to a TPU.
        communication: `"nccl"`, `"ring"`, `"hierarchical_copy"`, `"one_device"`, `"none"`, or `"given"` if a strategy
            object was passed.
        pack_bytes: Bytes of gradients per bucket; 0 is a single bucket, except that between CPUs gradients of 1 MiB
            and more are reduced separately; `None` if there are no buckets.
        collective_timeout: Seconds, or `None` for none.
        jit: `"none"`, `"whole_step"` or `"per_replica"`.
        precision: The name of a Keras dtype policy.
        batch: `"global"` or `"per_replica"`.
        lr_scaling: The factor of the learning rate; `None` until the number of replicas is known.
        warmup_steps: Number of updates over which the learning rate grows to that.
        shard_policy: `"data"`, `"file"` or `"already_sharded"`.
        exact: Whether the result is that of one device.
    """

    strategy: Decision
    devices: Decision
    replicas: Decision
    communication: Decision
    pack_bytes: Decision
    collective_timeout: Decision
    jit: Decision
    precision: Decision
    batch: Decision
    lr_scaling: Decision
    warmup_steps: Decision
    shard_policy: Decision
    exact: Decision

    @property
    def on_servers(self) -> bool:
        """Whether the weights lie on parameter servers, and workers do not step together."""
        return self.strategy.value == "parameter_server"

    def __iter__(self) -> Iterator[Decision]:
        return (getattr(self, field.name) for field in fields(self))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The plan as JSON-serializable data.

        Returns:
            For each decision, by name: `value`, `reason`, `evidence` and `override`.
        """
        return {decision.name: decision.to_dict() for decision in self}


def make_plan(hardware: Hardware, options: Options) -> Plan:
    """Decides how to train on the hardware, within the given options.

    Args:
        hardware: From `detect` or `describe`.
        options: The requested options.

    Returns:
        The plan. Nothing is started or changed.

    Raises:
        ValueError: The options can't work on this hardware. The message says what to write instead.

    Example:

    >>> from keras_paragrad.distribution import describe
    >>> from keras_paragrad.distribution import Options
    >>> from keras_paragrad.distribution import make_plan
    >>> plan = make_plan(describe(gpus=4, compute_capability=(9, 0)), Options())
    >>> plan.strategy.value, plan.communication.value, plan.jit.value
    ('mirrored', 'nccl', 'per_replica')
    """
    strategy = decide_strategy(hardware, options)
    kind = strategy.value
    devices = decide_devices(hardware, options, kind)
    replicas = decide_replicas(hardware, options, kind, devices.value)
    communication = decide_communication(hardware, options, kind, devices.value)
    return Plan(
        strategy=strategy,
        devices=devices,
        replicas=replicas,
        communication=communication,
        pack_bytes=decide_pack_bytes(options, communication.value),
        collective_timeout=decide_timeout(options, kind),
        jit=decide_jit(hardware, options, kind, devices.value, replicas.value),
        precision=decide_precision(hardware, options, kind, devices.value),
        batch=decide_batch(options, replicas.value),
        lr_scaling=decide_lr_scaling(options, replicas.value),
        warmup_steps=decide_warmup(options),
        shard_policy=decide_shard_policy(hardware, options, kind),
        exact=decide_exact(hardware, options, kind),
    )
