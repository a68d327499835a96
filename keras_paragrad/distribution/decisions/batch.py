"""Decides how batches are divided, how the learning rate scales, and how workers share the data."""

import math

from keras_paragrad.distribution.decisions.decision import NO_CHOICE, Decision, decides
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Options, StrategyKind


@decides(90)
def decide_batch(options: Options, replicas: int | None) -> Decision:
    """Decides whether each batch is split over the replicas (`"global"`), or each takes a full batch (`"per_replica"`).

    Returns:
        `"global"` or `"per_replica"`.
    """
    count = f"{replicas} replica{'s' * (replicas != 1)}" if replicas else "counted once the TPU is connected"
    if options.batch == "per_replica":
        reason = "requested: every replica takes a batch, and a step is taken on all of them"
        return Decision("batch", "per_replica", reason, count, 'batch="global"')
    reason = "the batch is divided among the replicas: the step is the same as on one device"
    return Decision("batch", "global", reason, count, 'batch="per_replica"')


@decides(100)
def decide_lr_scaling(options: Options, replicas: int | None) -> Decision:
    """Decides the scale factor for the learning rate; `None` until the number of replicas is known."""
    name, rule = "lr_scaling", options.lr_scaling
    if rule is None:
        reason = "the learning rate is left as it is"
        return Decision(name, 1.0, reason, f'batch="{options.batch}"', 'batch="per_replica", lr_scaling="linear"')
    source = {"linear": "Goyal et al., 2017, arXiv:1706.02677", "sqrt": "Krizhevsky, 2014, arXiv:1404.5997"}[rule]
    reason = f"requested: {rule} in the size of the batch, which grows with the replicas"
    return Decision(name, scaling_factor(rule, replicas), reason, source, "lr_scaling=None")


def scaling_factor(rule: str | None, replicas: int | None) -> float | None:
    """The scale factor for the learning rate when each of several replicas takes a batch.

    Args:
        rule: `None`, `"linear"` or `"sqrt"`.
        replicas: The number of replicas; `None` until it is known.

    Returns:
        The factor, or `None` until the number of replicas is known.

    Example:

    >>> from keras_paragrad.distribution.decisions.batch import scaling_factor
    >>> scaling_factor("linear", 4), scaling_factor("sqrt", 4), scaling_factor(None, 4)
    (4.0, 2.0, 1.0)
    """
    if rule is None:
        return 1.0
    if replicas is None:
        return None
    return float(replicas) if rule == "linear" else math.sqrt(replicas)


@decides(110)
def decide_warmup_steps(options: Options) -> Decision:
    """Decides over how many updates the learning rate grows to its scaled value."""
    if not options.lr_scaling:
        return Decision("warmup_steps", 0, "the learning rate isn't scaled", "lr_scaling=None", 'lr_scaling="linear"')
    reason = "requested" if options.warmup_steps else "no warm-up was requested"
    evidence = "a large learning rate is harmful while weights change rapidly (arXiv:1706.02677, section 2.2)"
    return Decision("warmup_steps", options.warmup_steps, reason, evidence, "warmup_steps=500")


@decides(120)
def decide_shard_policy(hardware: Hardware, options: Options, strategy: str, kind: StrategyKind) -> Decision:
    """Decides how workers share the data.

    Returns:
        `"data"`, `"file"` or `"already_sharded"`.
    """
    name = "shard_policy"
    if not kind.on_workers:
        return Decision(name, "data", "one process reads all the data", f"strategy is {strategy}", NO_CHOICE)
    evidence = f"{hardware.worker_count} workers"
    if options.shard_policy == "already_sharded":
        reason = "requested: each worker's dataset already holds its own shard"
        return Decision(
            name, "already_sharded", reason, "otherwise every worker would train on all the data", 'shard_policy="data"'
        )
    if options.shard_policy != "auto":
        return Decision(name, options.shard_policy, "requested", evidence, 'shard_policy="auto"')
    reason = "works for any data: each worker reads all of it and keeps its shards"
    return Decision(name, "data", reason, evidence, 'shard_policy="file", for a file or more per worker')
