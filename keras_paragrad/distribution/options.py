"""`Options`: the arguments of `DistributedFit`, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
import tensorflow as tf

from keras_paragrad.distribution.names import canonical_devices, kind_of_strategy

STRATEGIES = ("auto", "none", "one_device", "mirrored", "multi_worker", "tpu", "parameter_server")
COMMUNICATIONS = ("auto", "nccl", "ring", "hierarchical_copy", "one_device")
SHARD_POLICIES = ("auto", "data", "file", "already_sharded")
WEIGHTINGS = ("auto", "examples", "sample_weight", "mask")
CHOICES = {
    "communication": COMMUNICATIONS,
    "jit": ("auto", True, False),
    "batch": ("global", "per_replica"),
    "lr_scaling": (None, "linear", "sqrt"),
    "exact": (True, False),
    "weighting": WEIGHTINGS,
    "shard_policy": SHARD_POLICIES,
}


@dataclass(frozen=True)
class Options:
    """What a user asks of `DistributedFit`; `"auto"` leaves a decision to the plan.

    Args:
        strategy: `"auto"`, `"none"`, `"one_device"`, `"mirrored"`, `"multi_worker"`, `"tpu"`, `"parameter_server"`, or
            a `tf.distribute.Strategy` that is used as it is.
        devices: Names of this process's devices, such as `["CPU:0", "CPU:1"]`, all of one kind.
        communication: How gradients meet: `"auto"`, `"nccl"`, `"ring"`, `"hierarchical_copy"` or `"one_device"`.
        jit: `"auto"`, or whether XLA compiles.
        precision: The name of a Keras dtype policy. `"auto"` keeps the one that is set, and says whether another would
            be faster; `None` keeps it and says nothing.
        batch: Whether the dataset's batch is `"global"`, and divided among the replicas, or `"per_replica"`.
        lr_scaling: How the learning rate grows with the batch, under `batch="per_replica"`: not (`None`), `"linear"`
            (Goyal et al., https://arxiv.org/abs/1706.02677) or `"sqrt"` (Krizhevsky, https://arxiv.org/abs/1404.5997).
        warmup_steps: Over how many updates the learning rate grows to that.
        exact: Whether the answer must be that of one device.
        weighting: What a part of a batch counts for where the model computes its loss itself: `"examples"`,
            `"sample_weight"` or `"mask"`.
        shard_policy: How workers share the data: `"auto"`, `"data"`, `"file"`, or `"already_sharded"` where each
            worker's dataset holds its own part.
        pack_bytes: How many bytes of gradients meet in one collective; 0 is one pack for all, without those of 1 MiB
            and more between CPUs, which meet by themselves.
        startup_timeout: For how many seconds to wait for the other workers at the start.
        collective_timeout: After how many seconds without the other workers a collective fails.

    Raises:
        ValueError: An argument is none of those, or two of them contradict each other.

    Example:

    >>> from keras_paragrad.distribution.options import Options
    >>> Options(strategy="mirrored", devices=["/device:CPU:0", "cpu:1"]).devices
    ('CPU:0', 'CPU:1')
    """

    strategy: str | tf.distribute.Strategy = "auto"
    devices: Sequence[str] | None = None
    communication: str = "auto"
    jit: bool | Literal["auto"] = "auto"
    precision: str | None = "auto"
    batch: str = "global"
    lr_scaling: str | None = None
    warmup_steps: int = 0
    exact: bool = True
    weighting: str = "auto"
    shard_policy: str = "auto"
    pack_bytes: int | None = None
    startup_timeout: float = 60.0
    collective_timeout: float | None = None

    def __post_init__(self):
        for name, choices in CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        _check_strategy(self.strategy)
        _check_precision(self.precision)
        _check_number("warmup_steps", self.warmup_steps, int, 0)
        if self.pack_bytes is not None:
            _check_number("pack_bytes", self.pack_bytes, int, 0)
        _check_number("startup_timeout", self.startup_timeout, (int, float), 1)
        if self.collective_timeout is not None:
            _check_number("collective_timeout", self.collective_timeout, (int, float), 1)
        if self.devices is not None:
            object.__setattr__(self, "devices", canonical_devices(self.devices))
        self._check_together()

    @property
    def given(self) -> tf.distribute.Strategy | None:
        """The strategy that was handed over, if one was."""
        return None if isinstance(self.strategy, str) else self.strategy

    def _check_together(self) -> None:
        if self.lr_scaling and self.batch == "global":
            raise ValueError(
                f'lr_scaling="{self.lr_scaling}" scales the learning rate with the batch, and batch="global" leaves '
                'the batch as it is on any number of replicas. Write batch="per_replica" with it, or lr_scaling=None.'
            )
        if self.warmup_steps and not self.lr_scaling:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} warms a scaled learning rate up, and none is scaled. Write "
                'lr_scaling="linear" or "sqrt" with it; else, use a keras.optimizers.schedules.LearningRateSchedule.'
            )
        own = {"devices", "communication", "pack_bytes", "collective_timeout"}
        changed = sorted(name for name in own if getattr(self, name) not in (None, "auto"))
        if self.given is not None and changed:
            raise ValueError(
                f"strategy is a {type(self.given).__name__}, which was made with its own {', '.join(changed)}. Leave "
                'them out, or name the strategy instead, as in strategy="mirrored".'
            )
        self._check_devices()

    def _check_devices(self) -> None:
        if self.devices is None:
            return
        if self.strategy in ("none", "tpu", "parameter_server"):
            raise ValueError(
                f'strategy="{self.strategy}" takes no devices. Leave devices={list(self.devices)} out, or write '
                'strategy="one_device" or "mirrored".'
            )
        if self.strategy == "one_device" and len(self.devices) > 1:
            raise ValueError(
                f'strategy="one_device" takes one device, and devices={list(self.devices)} names {len(self.devices)}. '
                'Name one of them, or write strategy="mirrored".'
            )


def _check_choice(name: str, found: Any, choices: tuple) -> None:
    # 1 == True, and is no choice.
    if not any(found is choice or (isinstance(found, str) and found == choice) for choice in choices):
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} is {found!r}. Expected one of {listed}.")


def _check_strategy(found: Any) -> None:
    if isinstance(found, tf.distribute.Strategy):
        kind_of_strategy(found)
        return
    if not isinstance(found, str) or found not in STRATEGIES:
        names = ", ".join(repr(name) for name in STRATEGIES)
        raise ValueError(f"strategy is {found!r}. Expected one of {names}, or a tf.distribute.Strategy.")


def _check_precision(found: Any) -> None:
    if found is None or found == "auto":
        return
    try:
        keras.DTypePolicy(found)
    except (TypeError, ValueError):
        raise ValueError(
            f"precision is {found!r}. Expected 'auto', None, or the name of a Keras dtype policy, such as 'float32', "
            "'mixed_float16' or 'mixed_bfloat16'."
        ) from None


def _check_number(name: str, found: Any, kind: type | tuple[type, ...], least: int) -> None:
    if isinstance(found, bool) or not isinstance(found, kind) or not least <= found < float("inf"):
        whole = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} is {found!r}. Expected {whole} that is {least} or more.")
