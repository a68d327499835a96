"""The stages of a step, and what fills them."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from keras_paragrad.compat.model import has_own_train_step
from keras_paragrad.engine.losses.normalization import LossNormalization
from keras_paragrad.engine.step.forward import Normalize, Present, StepContext
from keras_paragrad.engine.step.gradient import Gradient, is_slower_in_xla_loop
from keras_paragrad.engine.step.indivisible import DeferredRefusal
from keras_paragrad.engine.step.transform import Chain, Transform
from keras_paragrad.engine.telemetry.execution import Telemetry
from keras_paragrad.engine.telemetry.observe import Observe


class Take(NamedTuple):
    """Fills the *take* stage: batches are spread over replicas, and what is shown is put together from all of them.

    Attributes:
        normalize: The loss normalization of a replica's shard, or `None` if all count the same.
        by_xla: Whether XLA compiles each replica's forward and backward pass.
        deferred_refusal: On one replica, says what more of them would refuse.
    """

    normalize: LossNormalization | None = None
    by_xla: bool = False
    deferred_refusal: DeferredRefusal | None = None


class Split(Protocol):
    """Fills the *split* stage: a batch cut into slices, and its gradient put together again from theirs."""

    normalize: LossNormalization

    @property
    def size(self) -> int:
        """The most examples in a batch that is never cut."""
        ...

    @property
    def deferred_refusal(self) -> DeferredRefusal:
        """Says of batches that are one slice what several would refuse."""
        ...

    @property
    def undivided(self) -> str:
        """Which batch can't be cut, for the error of a model that allows no slices."""
        ...

    def cuts(self, data: Any) -> bool | None:
        """Whether a batch has more examples than a slice; `None` where its shapes don't say."""
        ...

    def __call__(self, context: StepContext, data: Any) -> Gradient:
        """The gradient of a batch, from those of its slices, which each have what `context` says."""
        ...


class Apply(Protocol):
    """Fills the *combine* and *apply* stages: when gradients that were gathered reach the weights."""

    @property
    def deferred_refusal(self) -> DeferredRefusal | None:
        """Where each batch makes an update by itself, says what several would refuse."""
        ...

    def plan(self, batches: int) -> list[bool]:
        """Whether each of the next batches ends with an update; asked by the host before they are run."""
        ...

    def ended(self, batches: int, exhausted: bool) -> None:
        """Tells that the planned batches have run, or that the data ran out before the first of them."""
        ...

    def skipped(self, batches: int) -> None:
        """Tells that so many batches of the epoch were taken and not run, as training has seen them already."""
        ...

    def abandoned(self, name: str) -> None:
        """Tells that the `fit` of the model of that name has failed, and another step is about to be built."""
        ...

    def gathering(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the optimizer gathers gradients, and `end` ends the micro-batch."""
        ...

    def end(self, update: bool) -> None:
        """Ends the step on this replica, with an update or without."""
        ...


class MeshRunner(Protocol):
    """Runs the steps of a model on a mesh of devices, and changes no number."""

    def running(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A compiled step, run on the mesh with batches from outside of it."""
        ...


class Stages(NamedTuple):
    """What the stages of a model's step are filled with, in the order in which a step goes through them.

    Attributes:
        take: How batches are spread over replicas, or `None` for Keras's way.
        split: Cuts a batch and combines the gradients of its slices, or `None`.
        combine: The loss normalization of micro-batches, by which their gradients are weighted, or `None`.
        transform: Changes the gradient of a whole update, or `None`.
        transforms: Change what `transform` has made of it, in this order, or `None`.
        apply: Decides when gradients reach the weights, or `None`.
        observe: Is shown gradients before they are transformed, or `None`. It changes nothing.
        telemetry: Is shown some updates of the weights, or `None`. It changes nothing.
        present: Says which rows of a batch are examples, where others only fill it up and weigh 0; or `None` if all
            are. Losses and metrics are shown of these alone.
        place: Makes the context that puts a step's operations on devices, or `None` to leave that to TensorFlow. It
            changes nothing else.
        mesh: Runs steps on a mesh of devices, or `None` to run them on one.
    """

    take: Take | None = None
    split: Split | None = None
    combine: Normalize | None = None
    transform: Transform | None = None
    transforms: tuple[Transform, ...] | None = None
    apply: Apply | None = None
    observe: Observe | None = None
    telemetry: Telemetry | None = None
    present: Present | None = None
    place: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    mesh: MeshRunner | None = None

    @property
    def chain(self) -> Chain | None:
        """All that changes the gradient of a whole update, in order, or `None`."""
        transforms = (*((self.transform,) if self.transform else ()), *(self.transforms or ()))
        return Chain(transforms) if transforms else None

    @property
    def filled(self) -> list[str]:
        """The names of the stages that are not left to Keras."""
        return [name for name, filler in self._asdict().items() if filler is not None]

    def normalization(self, *, of_slices: bool) -> Normalize | None:
        """What measures the gradient of a part of a batch, as it is weighted among the others.

        All components weight a part of a batch by what its loss divides by. Where several are given a `weighting`, that
        of the accumulated micro-batches decides, then that of slices, then that of replicas' shards.

        Args:
            of_slices: Whether the batch is cut into slices, or accumulated with others that are.
        """
        split = self.split.normalize if self.split and of_slices else None
        return self.combine or split or (self.take.normalize if self.take else None)

    def by_xla_alone(self, model: Any, replicas: int) -> bool:
        """Whether XLA compiles each forward and backward pass by itself, and nothing else of the step."""
        if replicas > 1:
            return bool(self.take and self.take.by_xla)
        transform = self.chain and self.chain.outside_xla
        slices = self.split and is_slower_in_xla_loop(model) and not has_own_train_step(model)
        return bool(model.jit_compile and (transform or slices))

    @property
    def deferred_refusal(self) -> DeferredRefusal | None:
        """Says what larger batches, more replicas or larger windows would refuse, where there are none."""
        found = (stage.deferred_refusal for stage in (self.split, self.take, self.apply) if stage)
        return next((each for each in found if each), None)
