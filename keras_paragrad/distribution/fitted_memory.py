"""`FittedMemory`: what `fit_memory` has applied to a model, and how it is undone."""

import weakref
from collections.abc import Callable
from typing import NamedTuple, Self

import keras
import tensorflow as tf

from keras_paragrad.compat.state import Slot
from keras_paragrad.compat.types import Specs
from keras_paragrad.distribution.options import Decision
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.memory.plan import MemoryPlan
from keras_paragrad.memory.recomputation import RECOMPUTATIONS


class FittedMemory(NamedTuple):
    """The plan to train a model in the memory of its devices, and what undoes recomputation and slices.

    The decision on shards is `None` if it was made before.
    """

    plan: MemoryPlan
    undo: Callable[[], None]
    shard: Decision | None


class PlannedFor(NamedTuple):
    """What a `FittedMemory` was planned for, and by which `DistributedFit`; for anything else, it is planned again.

    `sizes` are the shapes of a batch's tensors without the number of rows, and `None` if they follow from the model.
    """

    by: object
    batch_size: int
    optimizer: object
    loss: object
    sizes: object = None

    @classmethod
    def of(cls, by: object, model: keras.Model, batch_size: int, batch_spec: Specs) -> Self:
        """What is to be planned for."""
        optimizer, leaves = model.optimizer and weakref.ref(model.optimizer), tf.nest.flatten(batch_spec)
        sizes = batch_spec and [leaf.shape[1:] if isinstance(leaf, tf.TensorSpec) else leaf for leaf in leaves]
        return cls(weakref.ref(by), batch_size, optimizer, model.loss, sizes)

    def find_applied(self, model: keras.Model) -> FittedMemory | None:
        """What was applied to the model for the same, if it still is in effect; else `None`."""
        applied = APPLIED.of(model)
        if applied is None or applied.planned_for[:-1] != self[:-1]:
            return None
        if [*map(id, applied.state)] != [*map(id, _state(model))]:
            return None
        # `None`, from `prepare`, agrees with any sizes.
        sizes = self.sizes, applied.planned_for.sizes
        return applied.fitted if None in sizes or sizes[0] == sizes[1] else None


class _Applied(NamedTuple):
    planned_for: PlannedFor
    fitted: FittedMemory
    state: list[object]


# What was applied to each model, whichever `DistributedFit` has planned it.
APPLIED = Slot[_Applied | None]("fitted_memory", None)


def note_fitted_memory(model: keras.Model, planned_for: PlannedFor, fitted: FittedMemory) -> None:
    """Notes what was applied to a model."""
    APPLIED.attach(model, _Applied(planned_for, fitted, _state(model)))


def undo_fitted_memory(model: keras.Model) -> None:
    """Ends the recomputation and slices that `fit_memory` has applied to a model."""
    if (applied := APPLIED.of(model)) is not None:
        APPLIED.attach(model, None)
        applied.fitted.undo()


def _state(model: keras.Model) -> list[object]:
    """What `microbatch` and `recompute` change; the user may call them too."""
    return [StepBuilder.of(model).stages.split, *RECOMPUTATIONS.of(model)]
