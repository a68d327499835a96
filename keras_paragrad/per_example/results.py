"""The per-example results of a training step: written in the step, read by the host."""

from collections.abc import Collection, Sequence

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import compiled_by_xla
from keras_paragrad.per_example.factored_gradients import FactoredGradients
from keras_paragrad.per_example.quantities import Quantities
from keras_paragrad.per_example.rows import ReplicaRows, Total

# A norm takes four bytes, so this capacity costs a step nothing.
NORMS_CAPACITY = 2**14


class StepResults:
    """The results of the last training step.

    Args:
        kept: Which of `"norms"`, `"gradients"` and `"second_moment"` to keep.
        variables: The weights.
        capacity: Most examples on one replica, for steps compiled by XLA, which needs static shapes; `None` for any
            number.
    """

    def __init__(self, kept: Collection[str], variables: Sequence[keras.Variable], capacity: int | None):
        self.variables = list(variables)
        self.capacity = capacity
        self.count = Total([], tf.int32)
        # Gradients are scaled when they are read. Scaling in the step would take another pass over them, or over
        # cotangents whose products the backward pass may already have computed.
        self.factor = Total([])
        self.norms = ReplicaRows([], capacity, self.count) if "norms" in kept else None
        with_gradients = self.variables if "gradients" in kept else []
        self.gradients = [FactoredGradients(v.shape, capacity, self.count, self.factor) for v in with_gradients]
        self.second_moment = [Total(v.shape) for v in variables] if "second_moment" in kept else []

    def keep(self, quantities: Quantities, factor: tf.Tensor) -> tf.Tensor | None:
        """Stores a step's results; called within the step, on each replica.

        Args:
            quantities: The quantities of the step's backward pass.
            factor: Scales its gradients to those of each example's own loss.

        Returns:
            The norms, if they are kept.
        """
        self.count.assign(quantities.batch)
        if self.gradients:
            self.factor.assign(factor)
            for kept, gradients in zip(self.gradients, quantities.gradients_to_keep(), strict=True):
                kept.assign(gradients)
        if self.second_moment:
            for total, moment in zip(self.second_moment, quantities.second_moments(), strict=True):
                total.assign(tf.cast(moment, "float32") * tf.square(factor))
        if self.norms is None:
            return None
        norms = tf.sqrt(quantities.squared_norms()) * factor
        self.norms.assign(norms)
        return norms


def capacity_for(kept: Collection[str]) -> int | None:
    """The default capacity of a step, or `None` where shapes may vary.

    Args:
        kept: See `StepResults`.
    """
    return NORMS_CAPACITY if compiled_by_xla() and "gradients" not in kept else None


def check_capacity(kept: Collection[str], capacity: int | None) -> None:
    """Refuses steps that XLA compiles without a capacity for gradients.

    Raises:
        ValueError: Gradients are kept, and there is no capacity.
    """
    if capacity is None and "gradients" in kept and compiled_by_xla():
        raise ValueError(
            "This step is compiled by XLA, which needs to know the largest number of examples. Write "
            "PerExampleGradients(..., quantity='gradients', capacity=256), for batches of up to 256 on each device, or "
            "remove jit_compile=True."
        )
