"""`Divider`: what errors say of a component that divides batches. A loss's *divisor* is what it is divided by."""

import dataclasses
from collections.abc import Sequence

import keras

from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.state import warn_once

INSTEAD_OF_WINDOWS = (
    "For any loss, give fit() the whole batch, compile with the inner optimizer, and write "
    "keras_paragrad.microbatch(model, size=...), which computes the loss on the outputs of all slices."
)


class IndivisibleError(ValueError):
    """The gradients of parts can't be combined into the batch's gradient. The message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divider:
    """Describes a component that divides batches into parts: all that the engine knows of the component.

    Errors quote the advice below, which is sentences, or clauses without a period.

    Attributes:
        configured_by: The call that takes a `weighting`.
        parts: What the parts of a batch are called.
        for_equal_parts: A clause: what to write if all parts have the same size and weights.
        to_train_anyway: A clause: what to write for a model that mixes examples; `None` if nothing would help.
        divides_calls: Whether calls of layers can be divided in place of the loss.
        divides_steps: Whether a custom `train_step` is divided.
        takes_weighting: Whether a `weighting` can be stated.
        whole_batches: A sentence: what trains on whole batches instead.
        for_any_loss: A sentence: what takes any loss.
    """

    configured_by: str
    parts: str
    for_equal_parts: str
    to_train_anyway: str | None
    divides_calls: bool = False
    divides_steps: bool = False
    takes_weighting: bool = True
    whole_batches: str = "keras_paragrad.memory.recompute(model) saves memory with whole batches."
    for_any_loss: str = "recompute() saves memory for any loss."

    @property
    def anyway(self) -> str:
        return f"To train anyway, {self.to_train_anyway}." if self.to_train_anyway else ""

    @property
    def to_state_it(self) -> str:
        """Advice for a loss whose divisor Keras doesn't state."""
        if not self.takes_weighting:
            return self.for_any_loss
        return (
            f"If it is a mean over the examples, write {self.configured_by}(..., weighting='examples'). "
            "weighting also takes 'sample_weight', 'mask', 'sum' or a function of (x, y, y_pred, sample_weight) that "
            f"returns what the loss of a part is divided by. {self.for_any_loss}"
        )

    def of_train_step(self, model: keras.Model) -> str:
        """The error for a custom `train_step`, which the divider doesn't divide."""
        return (
            f"{type(model).__name__} defines its own train_step, so the divisor of its loss is unknown, and parts "
            "of a batch with different sizes or weights would bias the gradient. If all parts have the same size and "
            f"weights, {self.for_equal_parts}; otherwise move what train_step does into compute_loss."
        )


def layers_of_batch_statistics(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The layers that normalize with batch statistics, which differ between a batch and its parts."""
    layers = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
    return [layer for layer in layers if layer.trainable]


def count_layers(layers: Sequence[keras.layers.BatchNormalization], verb: str) -> str:
    """The number of layers and a verb, to begin a sentence. A model has dozens of these layers."""
    return f"{len(layers)} BatchNormalization layer{'s' * (len(layers) > 1)} {verb}{'s' * (len(layers) == 1)}"


def warn_of_batch_statistics(model: keras.Model) -> None:
    """Warns that parts of a batch are normalized with their own statistics."""
    if layers := layers_of_batch_statistics(model):
        warn_once(
            model,
            f"{count_layers(layers, 'normalize')} with the statistics of each micro-batch, so training differs from "
            "training on whole batches. keras_paragrad.memory.recompute(model) saves memory on whole batches, and is "
            "exact. With micro-batches, use GroupNormalization, or set trainable=False on these layers.",
        )
