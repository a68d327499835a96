"""`FittedMemory`: what `fit_memory` has applied to a model, and how it is undone."""

from collections.abc import Callable
from typing import NamedTuple

import keras

from keras_paragrad.compat.state import Slot
from keras_paragrad.distribution.decisions.decision import Decision
from keras_paragrad.memory.plan_table import MemoryPlan


class FittedMemory(NamedTuple):
    """How a model is trained in the memory of its devices.

    Attributes:
        plan: The ways to train it, as `explain` shows them, and which was chosen.
        undo: Undoes the recomputation and the slices.
        shard: The decision on shards, if it was open.
    """

    plan: MemoryPlan
    undo: Callable[[], None]
    shard: Decision | None


# Of models: what was applied, whichever `DistributedFit` has planned it.
FITTED = Slot[FittedMemory | None]("fitted_memory", None)


def undo_fitted_memory(model: keras.Model) -> None:
    """Ends the recomputation and slices that `fit_memory` has applied to a model."""
    if (fitted := FITTED.of(model)) is not None:
        FITTED.attach(model, None)
        fitted.undo()
