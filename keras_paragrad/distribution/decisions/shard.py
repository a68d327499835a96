"""Decides what is held in shards: nothing, the optimizer's state, or all that is trained."""

from keras_paragrad.distribution.decisions.decision import NO_CHOICE, Decision
from keras_paragrad.distribution.decisions.registry import decides
from keras_paragrad.distribution.options import Options

_EVIDENCE = "Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054"


@decides(85)
def decide_shard(options: Options, strategy: str, replicas: int | None) -> Decision:
    """Decides what each replica holds a shard of.

    Returns:
        `"none"`, `"optimizer"` or `"parameters"`; or `"auto"`, until the model is known.
    """
    name = "shard"
    possible = strategy in ("mirrored", "multi_worker")
    if options.shard == "auto":
        if not possible or replicas == 1:
            return Decision(name, "none", "one replica has nobody to share with", "", NO_CHOICE)
        reason = "chosen when fit or prepare is given the model: the least that fits the devices"
        return Decision(name, "auto", reason, _EVIDENCE, "shard=None")
    if options.shard is None:
        override = 'shard="parameters"' if possible else NO_CHOICE
        return Decision(name, "none", "not requested", "each replica holds all variables", override)
    asked = f'shard="{options.shard}"'
    if not possible:
        raise ValueError(
            f"{asked}, but with strategy={strategy!r} there are no replicas that could each hold a shard. Write "
            'strategy="mirrored" with two devices or more, or "multi_worker", or leave shard out.'
        )
    if replicas == 1:
        raise ValueError(
            f"{asked} needs two replicas or more, and there is one. Name more devices, or leave shard out."
        )
    whole = "weights" if options.shard == "optimizer" else "a layer's weights while it is called"
    return Decision(name, options.shard, f"requested; each replica holds {whole} whole", _EVIDENCE, "shard=None")
