"""`Options`: the validated arguments of `DistributedFit`; and the parallelism that they select."""

import abc
import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import tensorflow as tf

from keras_paragrad.arguments import (
    check_choice,
    check_choice_or_function,
    check_integer,
    check_number,
    check_parts,
)
from keras_paragrad.distribution.hardware import Hardware, canonical_devices
from keras_paragrad.engine.losses.divisors import PARAMETERS, DivisorFunction
from keras_paragrad.storage.sharding import MIN_SHARD_BYTES

STRATEGIES = ("auto", "none", "one_device", "mirrored", "multi_worker", "parameter_server")
SHARD_POLICIES = ("data", "already_sharded")
WEIGHTINGS = ("auto", "examples", "sample_weight", "mask", "sum")
# A year, in seconds: the waiting system calls do not accept more.
LONGEST_WAIT = 365 * 24 * 3600
CHOICES = {
    "jit": ("auto", True, False),
    "exact": (True, False),
    "prove": (True, False),
    "fit_memory": (True, False),
    "shard_policy": SHARD_POLICIES,
    "shard": (None, "optimizer", "parameters"),
    "layout": (None, "auto"),
}


class StrategyKind(NamedTuple):
    """TensorFlow's classes of a strategy; whether it mirrors variables on devices, and whether on several workers."""

    classes: tuple[type, ...] = ()
    mirrors: bool = False
    on_workers: bool = False


STRATEGY_KINDS = {
    "none": StrategyKind(),
    "one_device": StrategyKind((tf.distribute.OneDeviceStrategy,)),
    "mirrored": StrategyKind((tf.distribute.MirroredStrategy,), mirrors=True),
    "multi_worker": StrategyKind((tf.distribute.MultiWorkerMirroredStrategy,), mirrors=True, on_workers=True),
    "parameter_server": StrategyKind((tf.distribute.ParameterServerStrategy,)),
}


@dataclass(frozen=True)
class Options:
    """The arguments of `DistributedFit`, which documents them; `"auto"` leaves a decision to the plan.

    Raises:
        ValueError: An argument is invalid, or two arguments contradict each other.

    Example:

    >>> from keras_paragrad.distribution import Options
    >>> Options(strategy="mirrored", devices=["/device:CPU:0", "cpu:1"]).devices
    ('CPU:0', 'CPU:1')
    """

    strategy: Any = "auto"
    devices: Sequence[Any] | None = None
    jit: bool | Literal["auto"] = "auto"
    _: KW_ONLY
    exact: bool = True
    weighting: str | DivisorFunction = "auto"
    prove: bool = True
    deterministic: bool | int = False
    shard_policy: str = "data"
    shard: str | None = None
    min_shard_bytes: int = MIN_SHARD_BYTES
    fit_memory: bool = False
    device_bytes: int | None = None
    mesh: Mapping[str, int] | None = None
    layout: str | None = None
    startup_timeout: float = 60.0

    def __post_init__(self):
        checked = {name: check_choice(name, getattr(self, name), choices) for name, choices in CHOICES.items()}
        checked["weighting"] = check_choice_or_function("weighting", self.weighting, WEIGHTINGS, PARAMETERS)
        checked["strategy"] = _check_strategy(self.strategy)
        checked["min_shard_bytes"] = check_integer("min_shard_bytes", self.min_shard_bytes, least=1)
        checked["device_bytes"] = check_integer("device_bytes", self.device_bytes, example=16 * 2**30, optional=True)
        checked["deterministic"] = check_parts(self.deterministic)
        checked["startup_timeout"] = check_number("startup_timeout", self.startup_timeout, least=1, most=LONGEST_WAIT)
        for planner in planners():
            checked |= planner.checked_options(self)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.devices is not None:
            object.__setattr__(self, "devices", planner_of(self).canonical_devices(self.devices))
        self._check_together()

    @property
    def given(self) -> tf.distribute.Strategy | None:
        """The strategy object that was passed, if any."""
        return self.strategy if isinstance(self.strategy, tf.distribute.Strategy) else None

    def _check_together(self) -> None:
        """Refuses arguments that contradict each other."""
        if self.device_bytes is not None and not self.fit_memory:
            raise ValueError(
                f"device_bytes={self.device_bytes} is only used by fit_memory=True. Write fit_memory=True, or leave "
                "device_bytes out."
            )
        if self.fit_memory and not planner_of(self).fits_memory:
            raise ValueError(
                "fit_memory=True chooses among recomputation, slices and shards on replicas of the model, not on a "
                'mesh, in a pipeline or with parameter servers. Leave it out, or write strategy="auto".'
            )
        if self.fit_memory and self.deterministic:
            raise ValueError(
                f"fit_memory=True chooses into how many parts batches are cut, but deterministic={self.deterministic} "
                "fixes that number. Leave one of the two out: dist.estimate(model, batch_size) says what a step takes."
            )
        if self.deterministic and not planner_of(self).adds_in_order:
            raise ValueError(
                f"deterministic={self.deterministic} adds the gradients of parts of a batch in a fixed order, which "
                "replicas of the whole model do: not a mesh, a pipeline or parameter servers. Leave it out, or write "
                'strategy="auto".'
            )
        for name, needed in (("exact", True), ("shard_policy", "data")):
            if self.deterministic and (value := getattr(self, name)) != needed:
                raise ValueError(
                    f"{name}={value!r} has batches or gradients depend on the number of replicas, and with "
                    f"deterministic={self.deterministic} they don't. Leave one of the two out."
                )
        if self.given is not None and self.devices is not None:
            raise ValueError(
                f"strategy is a {type(self.given).__name__}, which was created with its own devices. Leave devices "
                'out, or name the strategy instead, as in strategy="mirrored".'
            )
        for planner in planners():
            planner.check_options(self)
        # A parallelism that isn't this package's.
        if isinstance(self.strategy, Planner):
            self.strategy.check_options(self)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One decision of a plan.

    Attributes:
        name: The subject.
        value: The outcome: a string, number, bool, `None`, or a tuple of strings.
        reason: Why, in a sentence.
        override: What to write instead.
    """

    name: str
    value: Any
    reason: str
    override: str = "nothing to choose"


class Decisions(NamedTuple):
    """A parallelism's part of the plan.

    Attributes:
        decisions: The parallelism's. The functions in `decisions.py` make the others.
        counted: In words such as "2 stages", the parts that the model is divided into; replicas, if empty.
        launched: Whether the processes of a cluster train together, and have to be started together.
    """

    decisions: Sequence[Decision]
    counted: str = ""
    launched: bool = False


class Planner(abc.ABC):
    """The part of a `Parallelism` that plans: how options select it, its own options, and its decisions.

    Attributes:
        precedence: `asked` is called on the classes of the package in ascending order.
        accepts: The classes of the objects that select it as `strategy`.
        adds_in_order: Whether it takes `deterministic`, and adds the gradients of parts in a fixed order.
        fits_memory: Whether it takes `fit_memory`, and chooses among recomputation, slices and shards.
    """

    precedence: ClassVar[int] = 0
    adds_in_order: ClassVar[bool] = False
    fits_memory: ClassVar[bool] = False
    accepts: ClassVar[tuple[type, ...]] = ()

    @classmethod
    def asked(cls, options: Options, hardware: Hardware | None) -> "Planner | None":
        """The parallelism, if the options select it; `hardware` is `None` while options are checked."""
        return None

    @classmethod
    def checked_options(cls, options: Options) -> dict[str, Any]:
        """The checked values of options that only this parallelism has, by name.

        Raises:
            ValueError: One is invalid. The message says what to write.
        """
        return {}

    @classmethod  # noqa: B027  (most parallelisms contradict no options)
    def check_options(cls, options: Options) -> None:
        """Refuses options that contradict each other; called on every parallelism, selected or not.

        Raises:
            ValueError: The message says what to write.
        """

    def kind(self, strategy: str) -> StrategyKind:
        """The properties of the strategy that `decide` has chosen, by its name."""
        return STRATEGY_KINDS.get(strategy, StrategyKind())

    def canonical_devices(self, devices: Any) -> tuple[Any, ...]:
        """The argument `devices` in canonical form.

        Raises:
            ValueError: A name is malformed, or named twice.
        """
        return canonical_devices(devices)

    @abc.abstractmethod
    def decide(self, hardware: Hardware, options: Options) -> Decisions:
        """Its part of the plan.

        Raises:
            ValueError: It can't work on the hardware. The message says what to write.
        """


@functools.cache
def planners() -> tuple[type[Planner], ...]:
    """The parallelisms in the package: `PARALLELISM` in each `<folder>/parallelism.py`."""
    folders = [path.parent.name for path in Path(__file__).parent.glob("*/parallelism.py")]
    classes = [importlib.import_module(f"{__package__}.{folder}.parallelism").PARALLELISM for folder in folders]
    return tuple(sorted(classes, key=lambda planner: planner.precedence))


def planner_of(options: Options, hardware: Hardware | None = None) -> Planner:
    """The parallelism that the options select; `DataParallel`, the last one asked, takes all options."""
    if isinstance(options.strategy, Planner):
        return options.strategy
    selected = (planner.asked(options, hardware) for planner in planners())
    return next(planner for planner in selected if planner is not None)


def refuse_devices(options: Options) -> None:
    """Refuses `devices` with a named strategy that takes none."""
    if options.devices is not None:
        raise ValueError(
            f'strategy="{options.strategy}" takes no devices. Leave devices={list(options.devices)} out, or write '
            'strategy="one_device" or "mirrored".'
        )


def _check_strategy(strategy: object) -> Any:
    """The argument `strategy`, of one of the accepted types or names."""
    if isinstance(strategy, (Planner, *(accepted for planner in planners() for accepted in planner.accepts))):
        return strategy
    if isinstance(strategy, tf.distribute.Strategy):
        # Refuses a strategy that isn't supported.
        kind_of_strategy(strategy)
        return strategy
    try:
        return check_choice("strategy", strategy, STRATEGIES)
    except ValueError as error:
        raise ValueError(
            f"{error} Or pass a tf.distribute.Strategy, a Pipeline, or a keras.distribution.DataParallel or "
            "ModelParallel."
        ) from None


def kind_of_strategy(strategy: tf.distribute.Strategy) -> str:
    """The plan's name for a strategy; a `ValueError` if it isn't supported."""
    for name, kind in STRATEGY_KINDS.items():
        if isinstance(strategy, kind.classes):
            return name
    # Outside any scope, TensorFlow returns its default strategy, which distributes nothing.
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        return "none"
    central = isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy)
    reason = " Under it, Keras's metrics are wrong." if central else ""
    raise ValueError(
        f"strategy is a {type(strategy).__name__}, which DistributedFit doesn't support.{reason} Pass a "
        "OneDeviceStrategy, MirroredStrategy, MultiWorkerMirroredStrategy or ParameterServerStrategy, or "
        'write strategy="auto".'
    )
