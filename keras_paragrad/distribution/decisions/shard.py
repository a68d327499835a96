"""Decides which state is in shards."""

from keras_paragrad.distribution.decisions.decision import NO_CHOICE, Decision, decides
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Options, StrategyKind

_EVIDENCE = "Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054"


@decides(85)
def decide_shard(
    hardware: Hardware, options: Options, strategy: str, kind: StrategyKind, replicas: int | None
) -> Decision:
    """Decides which state each replica holds in shards.

    Returns:
        `"none"`, `"optimizer"` or `"parameters"`; or `"auto"`, until `fit_memory` knows the model.
    """
    name = "shard"
    chosen = options.fit_memory and options.shard is None
    if options.shard is None and not chosen:
        override = 'shard="parameters"' if kind.mirrors else NO_CHOICE
        return Decision(name, "none", "not requested", "each replica holds all variables", override)
    if (chosen and not kind.mirrors) or (replicas == 1 and (chosen or hardware.trains_alone)):
        return Decision(name, "none", "one replica has nobody to share with", "", NO_CHOICE)
    if chosen:
        reason = "chosen when fit or prepare gets the model: the least that fits the devices"
        return Decision(name, "auto", reason, _EVIDENCE, 'shard="optimizer"')
    requested = f'shard="{options.shard}"'
    if not kind.mirrors:
        raise ValueError(
            f"{requested}, but with strategy={strategy!r} there are no replicas that could each hold a shard. Write "
            'strategy="mirrored" with two devices or more, or "multi_worker", or leave shard out.'
        )
    if replicas == 1:
        raise ValueError(
            f"{requested} needs two replicas or more, and there is one. Name more devices, or leave shard out."
        )
    whole = "weights" if options.shard == "optimizer" else "a layer's weights while it is called"
    return Decision(name, options.shard, f"requested; each replica holds {whole} whole", _EVIDENCE, "shard=None")
