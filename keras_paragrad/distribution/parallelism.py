"""`Parallelism`, a way to train, and `Preparation`, a model set up for it: the interface that `DistributedFit` uses."""

import abc
import contextlib
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import strategy_name
from keras_paragrad.compat.optimizer import find_accumulator
from keras_paragrad.compat.state import Slot, replace_methods, restore_methods
from keras_paragrad.compat.types import FitData, Specs
from keras_paragrad.distribution.consistency.compare import SAME_SCRIPT
from keras_paragrad.distribution.data import DistributedData, distributed_dataset
from keras_paragrad.distribution.fitted_memory import FittedMemory
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.options import Decision, Decisions, Options, Planner, planner_of
from keras_paragrad.distribution.plan import Plan
from keras_paragrad.engine.losses.dividers import layers_of_batch_statistics
from keras_paragrad.engine.step.building import check_compiled_in_scope
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.memory.estimate import Estimate, estimate_memory
from keras_paragrad.plain_text import counted

# The names that a user's parallelism needs.
__all__ = ["Decision", "Decisions", "Parallelism", "PlannedRun", "Preparation", "Strategies", "parallelism_of"]
# Each model's preparations, by their class.
PREPARATIONS = Slot[Mapping[type, Any]]("preparations", {})


class Preparation(abc.ABC):
    """A model whose `fit`, `evaluate` and `predict` are changed until `undo`.

    A subclass defines `renew`, which installs what a step needs, and `stop`, which uninstalls it; optionally `start`,
    for what is needed once, and `table`, for `explain`.

    Args:
        model: A compiled model.
        *settings: The arguments of the preparation.

    Attributes:
        model: The model.
        settings: The arguments of the preparation.
        changes_in_place: Whether `renew` can apply other settings, without `stop` and `start`.
    """

    changes_in_place: ClassVar[bool] = False

    def __init__(self, model: keras.Model, *settings: Any):
        self.model: keras.Model = model
        self.settings = settings
        self._methods: set[str] = set()
        # The original `jit_compile`, and the value that it was set to.
        self._jit_compile: tuple[Any, Any] | None = None
        self._undoing: Callable[[], None] | None = None
        self.start()
        self.renew()
        PREPARATIONS.attach(model, {**PREPARATIONS.of(model), type(self): self})

    @classmethod
    def of(cls, model: keras.Model, *settings: Any) -> Self:
        """The model's preparation with these settings: a new one, or the existing one, renewed."""
        before = PREPARATIONS.of(model).get(cls)
        if before is not None and before.settings != settings and not cls.changes_in_place:
            before.undo()
            before = None
        if before is None:
            return cls(model, *settings)
        old_settings, before.settings = before.settings, settings
        try:
            before.renew()
        except BaseException:
            before.settings = old_settings
            raise
        return before

    def start(self) -> None:  # noqa: B027  (most prepare nothing that outlasts `compile`)
        """Sets up what `compile` doesn't reset; called once."""

    @abc.abstractmethod
    def renew(self) -> None:
        """Installs what a step needs; called again after `compile`, which may have replaced it.

        Raises:
            ValueError: The model can't be trained in this way. The message says what to write.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Uninstalls what `start` and `renew` have installed, except methods and `jit_compile`."""

    def undo(self) -> None:
        """Restores the methods of the model's class, and its `jit_compile`."""
        preparations = PREPARATIONS.of(self.model)
        if preparations.get(type(self)) is not self:
            return
        self.stop()
        restore_methods(self.model, *self._methods)
        # The model may have been compiled with another value since.
        if self._jit_compile is not None and self.model.jit_compile == self._jit_compile[1]:
            self.model.jit_compile = self._jit_compile[0]
        PREPARATIONS.attach(self.model, {kind: other for kind, other in preparations.items() if other is not self})
        if self._undoing is not None:
            self._undoing()

    def undo_with(self, undo: Callable[[], None]) -> None:
        """Has `undo()` call a function last, in place of one that was given before."""
        self._undoing = undo

    @property
    def not_exact(self) -> str:
        """The layers that normalize parts of a batch, and so differ from those on one device; empty for none."""
        model, layers = self.model, layers_of_batch_statistics(self.model)
        divides = StepBuilder.of(model).stages.split is not None or find_accumulator(model.optimizer) is not None
        replicas = model.distribute_strategy.num_replicas_in_sync
        count = sum(divides or (replicas > 1 and not layer.synchronized) for layer in layers)
        return counted(count, "BatchNormalization layer") if count else ""

    @property
    def table(self) -> Any:
        """A table of what each device holds, for `explain`, or `None`."""
        return None

    def replace(self, **methods: Callable[..., object]) -> None:
        """Replaces methods of the model, until `undo`."""
        replace_methods(self.model, **methods)
        self._methods.update(methods)

    def set_jit_compile(self, jit: bool) -> None:
        """Sets the model's `jit_compile`, until `undo`."""
        original = self.model.jit_compile
        if self._jit_compile is not None and original == self._jit_compile[1]:
            # The model has not been compiled since.
            original = self._jit_compile[0]
        self.model.jit_compile = jit
        self._jit_compile = original, self.model.jit_compile


class Strategies(NamedTuple):
    """The strategies of a run.

    Attributes:
        models: Models are built under it.
        workers: The workers' collectives run under it; a strategy of one worker, if each works independently.
        readers: Data is divided among its replicas.
    """

    models: tf.distribute.Strategy
    workers: tf.distribute.Strategy
    readers: tf.distribute.Strategy

    @classmethod
    def same(cls, strategy: tf.distribute.Strategy) -> "Strategies":
        """Uses one strategy for everything."""
        return cls(strategy, strategy, strategy)


class PlannedRun(NamedTuple):
    """The hardware, the arguments of `DistributedFit`, the plan for both, and the strategies created for the plan."""

    hardware: Hardware
    options: Options
    plan: Plan
    strategies: Strategies

    @property
    def device_bytes(self) -> int | None:
        """The memory of the smallest planned device of this process, or `None` if it is unknown."""
        return self.options.device_bytes or self.hardware.device_bytes(self.plan.devices.value)


class Parallelism(Planner):
    """How a model is trained: its plan, its strategies, its data, and how it is made exact.

    Derive from this class, and pass an instance as `DistributedFit(strategy=...)`. `decide` and `prepare` are abstract;
    the other methods default to training on one replica.

    Example:

    >>> from keras_paragrad.distribution import Options, detect, make_plan
    >>> from keras_paragrad.distribution.parallelism import Decision, Decisions, Parallelism
    >>> class OnTheLast(Parallelism):
    ...     def decide(self, hardware, options):
    ...         last = hardware.devices[-1].name
    ...         return Decisions([Decision(name="devices", value=(last,), reason="the last device")])
    ...
    ...     def prepare(self, model, run): ...
    >>> plan = make_plan(detect({}), Options(strategy=OnTheLast()))
    >>> plan.strategy.value, len(plan.devices.value), plan.replicas.value
    ('OnTheLast', 1, 1)
    """

    # The keys of `compat.names.NAMES`, groups of private names, that it uses besides what every parallelism uses.
    parts: ClassVar[tuple[str, ...]] = ()
    # Further keys, used where the processes of a cluster have to be started together.
    parts_if_launched: ClassVar[tuple[str, ...]] = ("workers",)

    def strategy(self, plan: Plan, hardware: Hardware, options: Options) -> Strategies:
        """Creates the planned strategies, and waits for the other workers, if any.

        Raises:
            RuntimeError: TensorFlow was already set up differently in this process.
        """
        return Strategies.same(tf.distribute.get_strategy())

    def placement(self) -> contextlib.AbstractContextManager[object]:
        """Context, within the strategy's scope, in which models are built."""
        return contextlib.nullcontext()

    def check(self, model: keras.Model, run: PlannedRun) -> None:
        """Refuses a model, before anything is changed.

        Raises:
            ValueError: The message says what to write.
        """
        strategy = run.strategies.models
        if not model.compiled:
            raise ValueError("The model has not been compiled. Write model.compile(...) before dist.prepare(model).")
        built_under = model.distribute_strategy
        one_replica = built_under.num_replicas_in_sync == strategy.num_replicas_in_sync == 1
        if built_under is not strategy and not one_replica:
            raise ValueError(
                f"The model was built under {strategy_name(built_under)}, but is to be trained under "
                f"{strategy_name(strategy)}. Build and compile it within `with dist.scope():`."
            )
        check_compiled_in_scope(model)

    def check_own_fit(self, model: keras.Model) -> None:
        """Refuses a model whose class overrides `fit`, and so reads its data itself.

        Raises:
            ValueError: The message says what to write.
        """

    @abc.abstractmethod
    def prepare(self, model: keras.Model, run: PlannedRun) -> Preparation:
        """Makes the model's own `fit`, `evaluate` and `predict` exact; called again after each `compile`.

        Raises:
            ValueError: The model can't be trained exactly. The message says what to write.
        """

    def fit_memory(
        self, model: keras.Model, run: PlannedRun, batch_size: int, batch_spec: Specs, log: Callable[[str], None]
    ) -> FittedMemory:
        """Has the model train in the memory of the devices, if `fits_memory`; see `DistributedFit(fit_memory=True)`.

        Raises:
            ValueError: It doesn't fit, or its step can't be traced. The message says what to write.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement fit_memory, as its fits_memory is True.")

    def data(self, run: PlannedRun, x: FitData, y: FitData, sample_weight: FitData, **options: Any) -> DistributedData:
        """Data for `fit`, `evaluate` or `predict` of a prepared model; see `distributed_dataset`."""
        return distributed_dataset(run.strategies.readers, x, y, sample_weight, **options)

    def estimate(self, model: keras.Model, run: PlannedRun, batch_size: int, length: int | None) -> Estimate:
        """The memory of a step on each device; see `DistributedFit.estimate`.

        Raises:
            ValueError: The step can't be traced, or isn't data-parallel.
        """
        return estimate_memory(
            model,
            batch_size,
            run.strategies.models.num_replicas_in_sync,
            length=length,
            min_shard_bytes=run.options.min_shard_bytes,
            device_bytes=run.device_bytes,
        )


def parallelism_of(options: Options, hardware: Hardware) -> Parallelism:
    """The parallelism that the options select on this hardware."""
    parallelism = planner_of(options, hardware)
    assert isinstance(parallelism, Parallelism)
    return parallelism


@contextlib.contextmanager
def build_scope(strategy: tf.distribute.Strategy) -> Generator[None]:
    """The strategy's scope; explains the error if workers with different models fail to build them."""
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        # TensorFlow's default strategy can't be entered within the scope of another.
        yield
        return
    try:
        with strategy.scope():
            yield
    except tf.errors.OpError as error:
        if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise
        shapes = re.search(r"expected shape (.*?) but .* expected shape (\[.*?\])", error.message)
        if shapes:
            found = f"a variable has the shape {shapes[1]} on this worker and {shapes[2]} on another"
            raise ValueError(f"The workers' models differ: {found}.{SAME_SCRIPT}") from None
        raise RuntimeError(
            "This worker could not create the model's variables, which the workers create together: another one has "
            f"failed, and its output says why, or their models differ.{SAME_SCRIPT} TensorFlow says: "
            f"{error.message[:500]}"
        ) from None
