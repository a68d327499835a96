"""Errors for models whose batches can't be divided, with advice. A loss's *normalizer* is what it is divided by."""

from collections.abc import Sequence
from typing import NamedTuple

import keras

from keras_paragrad.compat.model import added_losses, all_layers
from keras_paragrad.compat.state import warn_once
from keras_paragrad.engine.division.dividers import Divider
from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.probes.weighting_trial import FIRST, ROWS, WeightingTrial


class IndivisibleError(ValueError):
    """The gradients of parts of a batch can't be combined into the batch's gradient, as their weights are unknown."""


class Refusals(NamedTuple):
    """The errors of a divider, in its words."""

    divider: Divider

    @property
    def anyway(self) -> str:
        """Advice for training anyway, if there is a way."""
        return f"To train anyway, {self.divider.to_train_anyway}." if self.divider.to_train_anyway else ""

    @property
    def to_state_it(self) -> str:
        """Advice by which parts of the loss are computed, which is faster."""
        return (
            f"If it is a mean over the examples, write {self.divider.configured_by}(..., weighting='examples'): it is "
            "computed in parts then, which is faster. weighting also takes 'sample_weight', 'mask', 'sum' or a "
            "function."
        )

    def of_train_step(self, model: keras.Model) -> str:
        """The error for a custom `train_step`, which the divider doesn't divide."""
        return (
            f"{type(model).__name__} defines its own train_step, so the normalizer of its loss is unknown, and parts "
            "of a batch with different sizes or weights would bias the gradient. If all parts have the same size and "
            f"weights, {self.divider.for_equal_parts}; otherwise move what train_step does into compute_loss."
        )

    def check_by_example(self, terms: list[LossTerm], name: str) -> None:
        """Refuses a weighting that contradicts the gradient of a mean of the examples' masked means."""
        if any(term.by_example for term in terms) and name in ("sample_weight", "mask"):
            raise ValueError(
                f"weighting={name!r}, but with PerExampleGradients(..., masked_mean='example') the gradient "
                f"is divided by the number of examples. Write {self.divider.configured_by}(..., "
                "weighting='examples'), or leave it out."
            )

    def advice(self, model: keras.Model, trial: WeightingTrial | None) -> str:
        """Advice where a trial doesn't find the loss's divisor."""
        if trial is None or trial.ambiguous or trial.random:
            name = self.divider.configured_by
            return (
                f"If you know the normalizer, state it: {name}(..., weighting=...) takes 'examples', 'sample_weight', "
                "'mask', 'sum' or a function of (x, y, y_pred, sample_weight) that returns it for a part of a batch."
            )
        added = added_losses(model)
        multiplies = ", or multiplies means over them, as the load balancing of experts does" if added else ""
        compiled = None if added else self.divider.for_compiled_losses
        return (
            "It divides by something else, such as a count of tokens, or divides its terms by different things, or "
            f"compares examples{multiplies}. {self._to_state} {compiled or self.divider.for_any_loss}"
        )

    def of_difference(self, difference: str) -> str:
        """The error for a loss whose parts, on rows of the first batch, don't give the batch's gradient."""
        compiled = self.divider.for_compiled_losses
        return (
            f"{difference}: its loss divides by a number that depends on the rows' values, such as a count of labels "
            f"that aren't missing, or compares examples. {self._to_state} {compiled or self.divider.for_any_loss}"
        )

    @property
    def _to_state(self) -> str:
        return (
            f"In the first case state what it divides by: {self.divider.configured_by}(..., weighting=lambda x, y, "
            "y_pred, sample_weight: keras.ops.sum(y != 0)), for instance."
        )


def problem_of(trial: WeightingTrial | None) -> str | None:
    """Why a trial doesn't find a loss's divisor, or `None` if it does; `trial` is `None` if it failed."""
    if trial is None:
        return "It could not be tried on made-up rows; the log says why."
    if trial.random:
        return "It draws random numbers that are not the same for the rows of a part, so a trial shows nothing."
    if not trial.fitting:
        return seen(trial)
    if trial.ambiguous:
        return "On made-up rows the mask of the output hides nothing, so whether it divides by the mask is unknown."
    return None


def seen(trial: WeightingTrial) -> str:
    """Describes the evidence of a trial."""
    return (
        f"On {ROWS} made-up rows, and on {FIRST} and {ROWS - FIRST} of them, the weighted gradients of the parts don't "
        f"add up to the gradient of the whole: {trial}."
    )


def layers_of_batch_statistics(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The layers that normalize with batch statistics, which differ between a batch and its parts."""
    layers = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
    return [layer for layer in layers if layer.trainable]


def count_layers(layers: Sequence[keras.layers.BatchNormalization], verb: str) -> str:
    """The number of layers, as the subject of a sentence: a model has dozens."""
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
