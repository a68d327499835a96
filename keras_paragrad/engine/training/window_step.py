"""Runs a `train_step` of the model's own on a micro-batch of an accumulation window.

for each micro-batch of the window:
    run the step, and add its gradient to the window, with the stated weight of the micro-batch
    keep assignments within calls of layers, to seeds and to metrics
    if the micro-batch is the last: update, and keep other assignments too, such as to counters and averages
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_paragrad.compat.layers import (
    WeightScope,
    assign_now,
    get_global_attribute,
    outermost_layer,
    set_global_attribute,
)
from keras_paragrad.compat.model import is_seed, step_metrics
from keras_paragrad.compat.process_patch import ProcessPatch, Replacement
from keras_paragrad.compat.types import Batch, Gradients, Step, StepLogs
from keras_paragrad.engine.losses.dividers import IndivisibleError
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.losses.terms import arguments_of
from keras_paragrad.engine.step.apply import Contribution, apply_same

_INSTEAD = (
    "To have a batch in slices that may update as often as it likes, leave AccumulatingOptimizer and ExactAccumulation "
    "out, give fit() the batch_size of an update, and write keras_paragrad.microbatch(model, size=4), with the number "
    "of rows that fit into memory."
)


class WindowStep:
    """Runs the `train_step` of a model that is compiled with an accumulating optimizer.

    Without `loss_divisor`, all micro-batches count the same. `update` says whether the micro-batch is the last of its
    window, and `end` is called at its end.
    """

    def __init__(self, model: keras.Model, loss_divisor: LossDivisor | None, update: bool, end: Callable[[], None]):
        self.model, self.loss_divisor, self.update, self.end = model, loss_divisor, update, end
        self._applied, self._contribution = False, Contribution(1.0, 1.0)
        if loss_divisor and loss_divisor.weighting in ("auto", "mask"):
            raise IndivisibleError(
                f"{type(model).__name__} defines its own train_step, so what a micro-batch of a window counts has to "
                "be stated. Write AccumulatingOptimizer(..., weighting='examples') if its loss is a mean over the "
                "examples; weighting also takes 'sample_weight', 'sum' or a function of (x, y, y_pred, sample_weight), "
                f"where y_pred is None. {_INSTEAD}"
            )

    def run(self, run: Callable[[Step, Batch], StepLogs], step: Step, data: Batch) -> StepLogs:
        """Runs the step by `run`, which gets a function of the batch, and this replica's data. Returns the logs."""

        def in_window(batch: Batch) -> StepLogs:
            weighting = self.loss_divisor and self.loss_divisor.stated
            weight = weighting.of_part(arguments_of(batch)) if weighting else None
            self._contribution = Contribution.of(weight, same=True)
            kept = {id(variable) for metric in step_metrics(self.model) for variable in metric.variables}
            scope = contextlib.nullcontext() if self.update else _WindowScope(kept, self._check_assigned)
            with scope, _COUNTING.open(_Counted(self._contribution, self.update)):
                return step(batch)

        logs = run(in_window, data)
        if not self._applied:
            self.end()
        return logs

    def apply(
        self, optimizer: keras.optimizers.Optimizer, gradients: Gradients, variables: list[keras.Variable]
    ) -> None:
        """Adds the gradient of the micro-batch to the window, and ends the micro-batch."""
        if self._applied or optimizer is not self.model.optimizer:
            which = "several times" if self._applied else f"with {optimizer.name!r}, which isn't model.optimizer"
            raise IndivisibleError(
                f"The train_step of {type(self.model).__name__} updates weights {which}, so its micro-batches can't be "
                f"accumulated one after the other. {_INSTEAD}"
            )
        self._applied = True
        with suspended_scope():
            apply_same(optimizer, gradients, variables, self._contribution)
            self.end()

    def _check_assigned(self, variable: keras.Variable) -> None:
        """Refuses an assignment to a weight before the update. The gradient would be that of the new weight."""
        if variable.trainable and not self._applied:
            raise IndivisibleError(
                f"The train_step of {type(self.model).__name__} assigns to its weight {variable.path!r} before it "
                f"calls the optimizer, so its micro-batches can't be accumulated one after the other. {_INSTEAD}"
            )


class _WindowScope(WeightScope):
    """Discards what a step assigns that no update follows. Keeps what calls of layers, seeds and metrics assign."""

    def __init__(self, kept: set[int], check: Callable[[keras.Variable], None]):
        # `collect_losses`: otherwise losses that layers add would be dropped.
        super().__init__(collect_losses=True)
        self._kept, self._check = kept, check

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if id(variable) in self._kept or is_seed(variable) or outermost_layer() is not None:
            assign_now(variable, value)
        else:
            self._check(variable)
            super().add_update(update)


@contextlib.contextmanager
def suspended_scope() -> Generator[None]:
    """Context in which a stateless scope has no effect on variables."""
    scope = get_global_attribute("stateless_scope")
    set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        set_global_attribute("stateless_scope", scope)


class _Counted(NamedTuple):
    """What a scalar for a whole micro-batch counts, and whether the micro-batch ends its window."""

    contribution: Contribution
    update: bool


def _update_mean(
    counted: _Counted,
    original: Callable[..., None],
    metric: keras.metrics.Mean,
    values: Any,
    sample_weight: Any = None,
) -> None:
    """Replaces `Mean.update_state`. A scalar has its micro-batch's weight, or is summed over the window."""
    number = tf.convert_to_tensor(values)
    if number.shape.rank or sample_weight is not None or not number.dtype.is_floating:
        original(metric, values, sample_weight=sample_weight)
    elif counted.contribution.decay:
        original(metric, number, sample_weight=counted.contribution.weight)
    else:
        original(metric, number)
        if not counted.update:
            metric.count.assign_sub(tf.ones_like(metric.count.value))


def _update_sum(
    counted: _Counted, original: Callable[..., None], metric: keras.metrics.Sum, values: Any, sample_weight: Any = None
) -> None:
    """Replaces `Sum.update_state`. Refuses scalars that are means, as their sum over a window isn't the batch's."""
    number = tf.convert_to_tensor(values)
    if not number.shape.rank and number.dtype.is_floating and counted.contribution.decay:
        raise IndivisibleError(
            f"The train_step gives {metric.name!r} a number for the whole batch, and its micro-batches' numbers don't "
            "add up to the batch's. Give it a value for each row, as in metric.update_state(values), or use "
            "keras.metrics.Mean."
        )
    original(metric, values, sample_weight=sample_weight)


_COUNTING = ProcessPatch[_Counted](
    lambda: (
        Replacement(keras.metrics.Mean, "update_state", _update_mean),
        Replacement(keras.metrics.Sum, "update_state", _update_sum),
    )
)
