"""The stages of a step, and the protocols of what fills them.

A batch may be divided among replicas, and a replica's batch into slices. Accumulated batches are the micro-batches of a
window, which ends with an update. A part is a replica batch, a slice or a micro-batch.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import keras
import tensorflow as tf

from keras_paragrad.compat.model import overrides_train_step
from keras_paragrad.compat.types import Batch, Step
from keras_paragrad.engine.batches.replica_batch import ReplicaBatch
from keras_paragrad.engine.losses.logs import LossSums
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.step.gradient import Gradient, Present, StepContext, is_slower_in_xla_loop
from keras_paragrad.engine.telemetry.watch import Observe, Telemetry

# Maps a batch to the predictions and the losses.
ComputeLosses = Callable[[Batch], tuple[Any, LossSums]]
# Files save the states of transforms as attributes of the optimizer, numbered in their order.
_STATE = "gradient_transform_"


class Transform(Protocol):
    """Fills the *transform* stage.

    With a true attribute `outside_xla`, it stays out of what XLA compiles.
    """

    def __call__(self, gradients: list[tf.Tensor], variables: list[keras.Variable]) -> Sequence[tf.Tensor]:
        """Returns the gradients that the optimizer clips and applies instead.

        It is called while a step is traced, on every replica, and must return the same on each.

        Args:
            gradients: Dense gradients of all replicas and micro-batches of the update, without loss scale.
            variables: The gradients' weights: all weights that have a gradient.
        """
        ...


class Chain(NamedTuple):
    """Applies transforms one after the other."""

    transforms: tuple[Transform, ...]

    @property
    def outside_xla(self) -> bool:
        """Whether XLA can't compile one of the transforms."""
        return any(getattr(transform, "outside_xla", False) for transform in self.transforms)

    def __call__(self, gradients: list[tf.Tensor], variables: list[keras.Variable]) -> Sequence[tf.Tensor]:
        """Applies all transforms."""
        for transform in self.transforms:
            gradients = list(transform(gradients, variables))
        return gradients


def save_states(optimizer: keras.optimizers.Optimizer, transforms: Sequence[Any]) -> None:
    """Attaches the states of transforms to the outermost optimizer, which saves them. Removes all other states."""
    states = {
        f"{_STATE}{index}": transform.state for index, transform in enumerate(transforms) if transform.state is not None
    }
    for name in [name for name in vars(optimizer) if name.startswith(_STATE)]:
        if states.get(name) is not getattr(optimizer, name):
            delattr(optimizer, name)
    for name, state in states.items():
        if name not in vars(optimizer):
            setattr(optimizer, name, state)


class Take(NamedTuple):
    """Fills the *take* stage: divides batches among replicas, and combines their logs.

    Attributes:
        loss_divisor: The loss divisor of a replica batch, or `None` if all count equally.
        by_xla: Whether XLA compiles each replica's forward and backward pass.
        prove: Whether the first batch must prove that parts give the same results as the whole.
        ordered: The fixed parts in which batches are also evaluated; `None` without `deterministic=`.
    """

    loss_divisor: LossDivisor | None = None
    by_xla: bool = False
    prove: bool = True
    ordered: "OrderedSplit | None" = None


class Split(Protocol):
    """Fills the *split* stage: divides a batch into slices, and combines their gradients."""

    @property
    def loss_divisor(self) -> LossDivisor:
        """Computes the weight of a slice."""
        ...

    @property
    def prove(self) -> bool:
        """Whether the first batch must prove that its slices give the same results as the whole."""
        ...

    @property
    def size(self) -> int:
        """The size of a slice, in examples."""
        ...

    @property
    def refusal_prefix(self) -> str:
        """The first sentence of the error for a model whose batches can't be divided."""
        ...

    def part_rows(self, rows: int) -> int:
        """The rows of a slice, for a batch of `rows` rows."""
        ...

    def cuts(self, data: Batch) -> bool | None:
        """Whether a batch is larger than a slice; `None` if its static shape doesn't say."""
        ...

    @property
    def refusal_of_calls(self) -> str | None:
        """Why calls of layers aren't divided in place of the loss, or `None`."""
        ...

    def __call__(self, context: StepContext, data: Batch) -> Gradient:
        """The gradient of a batch. Its slices are computed in `context`."""
        ...


@runtime_checkable
class OrderedSplit(Split, Protocol):
    """A filler of the *split* stage that also sums over the replicas, in a fixed order."""

    @property
    def parts(self) -> int:
        """The number of parts of a batch; each replica computes some whole parts."""
        ...

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Context in which steps are traced and run."""
        ...

    def evaluate(self, model: keras.Model, batch: ReplicaBatch, data: Batch, compute: ComputeLosses) -> LossSums:
        """The losses of a batch, evaluated in parts by `compute`. Adds to the states of metrics."""
        ...


class Apply(Protocol):
    """Fills the *apply* stage: accumulates gradients, and decides when to update."""

    @property
    def prove(self) -> bool:
        """Whether the first batch must prove that micro-batches give the same results as the whole batch."""
        ...

    @property
    def always_whole(self) -> bool:
        """Whether every batch is a whole window, and needs no weight."""
        ...

    @property
    def batches(self) -> int:
        """The number of batches of the next update."""
        ...

    def plan(self, batches: int) -> list[bool]:
        """For each of the next batches, whether it ends with an update. Called before the batches run."""
        ...

    def ended(self, batches: int, exhausted: bool) -> None:
        """Called when the planned batches have run, or when the data ended before the first one."""
        ...

    def skipped(self, batches: int) -> None:
        """Called when a resumed epoch has skipped batches."""
        ...

    def abandoned(self, name: str) -> None:
        """Cleans up after a `fit` that failed, before another step is built."""
        ...

    def accumulate_only(self) -> contextlib.AbstractContextManager[object]:
        """Context in which the optimizer only accumulates; `end` ends the micro-batch."""
        ...

    def end(self, update: bool) -> None:
        """Ends the micro-batch on this replica, with an update or without."""
        ...


class Stages(NamedTuple):
    """The fillers of a step's stages, in the order in which the step runs them.

    Attributes:
        take: Divides batches among replicas; Keras does, if `None`.
        split: Divides a batch into slices, and combines their gradients.
        weigh: The loss divisor that weights micro-batches.
        transform: Transforms the gradient of an update.
        transforms: Transform the result of `transform`, in this order.
        apply: Accumulates gradients, and decides when to update.
        observe: Receives gradients before they are transformed.
        telemetry: Receives some of the updates.
        present: Masks the rows that are examples, where batches are padded with rows of weight 0. Losses and metrics
            leave padding out. `None` if all rows are examples.
        place: Makes a context that places operations on devices; `None` leaves that to TensorFlow.
        mesh: Makes a compiled step run on a mesh of devices, with batches from the host; `None` without a mesh.
    """

    take: Take | None = None
    split: Split | None = None
    weigh: LossDivisor | None = None
    transform: Transform | None = None
    transforms: tuple[Transform, ...] | None = None
    apply: Apply | None = None
    observe: Observe | None = None
    telemetry: Telemetry | None = None
    present: Present | None = None
    place: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    mesh: Callable[[Step], Step] | None = None

    @property
    def chain(self) -> Chain | None:
        """`transform` and `transforms` as one, or `None`."""
        transforms = (*((self.transform,) if self.transform else ()), *(self.transforms or ()))
        return Chain(transforms) if transforms else None

    @property
    def filled(self) -> list[str]:
        """The names of the filled stages."""
        return [name for name, filler in self._asdict().items() if filler is not None]

    def loss_divisor(self, *, of_slices: bool) -> LossDivisor | None:
        """The loss divisor that weights parts: `weigh`'s, or `split`'s if `of_slices`, or `take`'s.

        A batch that is accumulated with sliced ones is weighted as slices are.
        """
        split = self.split.loss_divisor if self.split and of_slices else None
        return self.weigh or split or (self.take.loss_divisor if self.take else None)

    def by_xla_alone(self, model: keras.Model, replicas: int) -> bool:
        """Whether XLA compiles the forward and backward passes alone, and not the whole step."""
        if replicas > 1:
            return bool(self.take and self.take.by_xla)
        transform = self.chain and self.chain.outside_xla
        slices = self.split and is_slower_in_xla_loop(model) and not overrides_train_step(model)
        return bool(model.jit_compile and (transform or slices or self.ordered))

    @property
    def ordered(self) -> OrderedSplit | None:
        """The filler of *split*, if it adds its parts in a fixed order."""
        return self.split if isinstance(self.split, OrderedSplit) else None

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Context in which steps are traced and run."""
        return self.ordered.running() if self.ordered else contextlib.nullcontext()

    @property
    def prove(self) -> bool:
        """Whether the first batch must prove that parts give the same results as the whole."""
        return self.mesh is None and all(stage.prove for stage in (self.take, self.split, self.apply) if stage)
