"""Decides how workers share the data."""

from keras_paragrad.distribution.decisions.decision import NO_CHOICE, Decision, decides
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Options, StrategyKind


@decides(90)
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
