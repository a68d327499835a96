"""`Options`: the validated arguments of `DistributedFit`."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
import tensorflow as tf

from keras_paragrad._keras.storage.partition import MIN_SHARD_BYTES
from keras_paragrad.arguments import check_choice, check_integer, check_number, check_text, refusal
from keras_paragrad.distribution.choices import (
    BATCHES,
    COMMUNICATIONS,
    LAYOUTS,
    LONGEST_WAIT,
    LR_SCALINGS,
    SHARD_POLICIES,
    SHARDS,
    STRATEGIES,
    WEIGHTINGS,
)
from keras_paragrad.distribution.mesh.checks import check_mesh_options
from keras_paragrad.distribution.mesh.mesh import DISTRIBUTIONS, check_mesh
from keras_paragrad.distribution.names import canonical_devices, kind_of_strategy
from keras_paragrad.distribution.pipeline.checks import check_pipeline, devices_of_stages
from keras_paragrad.distribution.pipeline.pipeline import Pipeline

CHOICES = {
    "communication": COMMUNICATIONS,
    "jit": ("auto", True, False),
    "batch": BATCHES,
    "lr_scaling": LR_SCALINGS,
    "exact": (True, False),
    "weighting": WEIGHTINGS,
    "shard_policy": SHARD_POLICIES,
    "shard": SHARDS,
    "layout": LAYOUTS,
}


@dataclass(frozen=True)
class Options:
    """The arguments of `DistributedFit`; `"auto"` leaves a decision to the plan.

    Args:
        strategy: `"auto"`, `"none"`, `"one_device"`, `"mirrored"`, `"multi_worker"`, `"tpu"`, `"parameter_server"`, or
            a `tf.distribute.Strategy` to use as is, a `Pipeline`, or a `keras.distribution.DataParallel` or
            `ModelParallel`.
        devices: Names of this process's devices, such as `["CPU:0", "CPU:1"]`, all of one kind. For a pipeline with
            data parallelism, a list of names for each stage.
        communication: The all-reduce of gradients: `"auto"`, `"nccl"`, `"ring"`, `"hierarchical_copy"` or
            `"one_device"`.
        jit: `"auto"`, or whether to compile with XLA.
        precision: The name of a Keras dtype policy. `"auto"` keeps the current one and reports whether another would
            be faster; `None` keeps it silently.
        batch: Whether the dataset's batch is `"global"`, and divided among the replicas, or `"per_replica"`.
        lr_scaling: How the learning rate grows with the batch, under `batch="per_replica"`: not (`None`), `"linear"`
            (Goyal et al., https://arxiv.org/abs/1706.02677) or `"sqrt"` (Krizhevsky, https://arxiv.org/abs/1404.5997).
        warmup_steps: Number of updates over which the learning rate grows to that.
        exact: Whether the result must be that of one device.
        weighting: The weight of a shard if the model has a custom loss: `"examples"`, `"sample_weight"`, `"mask"` or
            `"sum"`.
        shard_policy: How workers share the data: `"auto"`, `"data"`, `"file"`, or `"already_sharded"` if each
            worker's dataset holds its own shard.
        pack_bytes: Bytes of gradients per bucket; 0 is a single bucket, except that between CPUs gradients of 1 MiB
            and more are reduced separately.
        startup_timeout: Seconds to wait for the other workers at startup.
        collective_timeout: Seconds after which a collective without the other workers fails.
        shard: What replicas hold shards of: nothing (`None`), the `"optimizer"`'s state, or all `"parameters"`; or
            `"auto"`, the first of these that fits the devices.
        min_shard_bytes: The size of variables from which they are cut into shards.
        device_bytes: The memory of a device, for `shard="auto"`; by default as detected.
        mesh: The sizes of the axes `"batch"` and `"model"` of a mesh of devices, or `None`.
        layout: `"auto"`, with `mesh`: variables are divided by the model's structure.

    Raises:
        ValueError: An argument is invalid, or two arguments contradict each other.

    Example:

    >>> from keras_paragrad.distribution import Options
    >>> Options(strategy="mirrored", devices=["/device:CPU:0", "cpu:1"]).devices
    ('CPU:0', 'CPU:1')
    """

    strategy: Any = "auto"
    devices: Sequence[Any] | None = None
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
    shard: str | None = None
    min_shard_bytes: int = MIN_SHARD_BYTES
    device_bytes: int | None = None
    mesh: Mapping[str, int] | None = None
    layout: str | None = None

    def __post_init__(self):
        checked = {name: check_choice(name, getattr(self, name), choices) for name, choices in CHOICES.items()}
        checked["strategy"] = _checked_strategy(self.strategy)
        checked["precision"] = _checked_precision(self.precision)
        checked["warmup_steps"] = check_integer("warmup_steps", self.warmup_steps, least=0)
        checked["min_shard_bytes"] = check_integer("min_shard_bytes", self.min_shard_bytes, least=1)
        checked["device_bytes"] = check_integer("device_bytes", self.device_bytes, example=16 * 2**30, optional=True)
        checked["pack_bytes"] = check_integer("pack_bytes", self.pack_bytes, least=0, optional=True)
        seconds = functools.partial(check_number, least=1, most=LONGEST_WAIT)
        checked["startup_timeout"] = seconds("startup_timeout", self.startup_timeout)
        checked["collective_timeout"] = seconds("collective_timeout", self.collective_timeout, optional=True)
        checked["mesh"] = check_mesh(self.mesh)
        canonical = devices_of_stages if isinstance(checked["strategy"], Pipeline) else canonical_devices
        checked["devices"] = None if self.devices is None else canonical(self.devices)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_together()

    @property
    def given(self) -> tf.distribute.Strategy | None:
        """The strategy object that was passed, if any."""
        return self.strategy if isinstance(self.strategy, tf.distribute.Strategy) else None

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline that was passed, if any."""
        return self.strategy if isinstance(self.strategy, Pipeline) else None

    @property
    def device_names(self) -> tuple[str, ...]:
        """The names in `devices`, of all stages of a pipeline."""
        return tuple(name for each in self.devices or () for name in ([each] if isinstance(each, str) else each))

    @property
    def distribution(self) -> Any:
        """The `keras.distribution` that was passed, or `None`."""
        return self.strategy if isinstance(self.strategy, DISTRIBUTIONS) else None

    @property
    def on_mesh(self) -> bool:
        """Whether devices are arranged in a mesh."""
        return self.mesh is not None or self.distribution is not None

    def _check_together(self) -> None:
        if self.lr_scaling and self.batch == "global":
            raise ValueError(
                f'lr_scaling="{self.lr_scaling}" scales the learning rate with the batch, but batch="global" keeps the '
                'batch the same on any number of replicas. Add batch="per_replica", or write lr_scaling=None.'
            )
        if self.warmup_steps and not self.lr_scaling:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} warms up a scaled learning rate, but lr_scaling is None. Add "
                'lr_scaling="linear" or "sqrt", or use a keras.optimizers.schedules.LearningRateSchedule instead.'
            )
        if self.device_bytes is not None and self.shard != "auto":
            raise ValueError(
                f'device_bytes={self.device_bytes} is what shard="auto" chooses by, but shard is {self.shard!r}. Write '
                'shard="auto", or leave device_bytes out.'
            )
        own = {"devices", "communication", "pack_bytes", "collective_timeout"}
        changed = sorted(name for name in own if getattr(self, name) not in (None, "auto"))
        if self.given is not None and changed:
            raise ValueError(
                f"strategy is a {type(self.given).__name__}, which was created with its own {', '.join(changed)}. "
                'Leave them out, or name the strategy instead, as in strategy="mirrored".'
            )
        if self.pipeline is not None:
            check_pipeline(self, self.pipeline)
        check_mesh_options(self)
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


def _checked_strategy(found: Any) -> Any:
    if isinstance(found, (Pipeline, *DISTRIBUTIONS)):
        return found
    if isinstance(found, tf.distribute.Strategy):
        kind_of_strategy(found)
        return found
    try:
        return check_choice("strategy", found, STRATEGIES)
    except ValueError as error:
        raise ValueError(
            f"{error} Or pass a tf.distribute.Strategy, a Pipeline, or a keras.distribution.DataParallel or "
            "ModelParallel."
        ) from None


def _checked_precision(found: Any) -> str | None:
    if found is None:
        return None
    try:
        name = check_text("precision", found)
        if name != "auto":
            keras.DTypePolicy(name)
    except (TypeError, ValueError):
        expected = "'auto', None, or the name of a Keras dtype policy, such as 'float32' or 'mixed_bfloat16'"
        raise refusal("precision", found, expected) from None
    return name
