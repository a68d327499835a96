"""Proves the division on the first batch, before the first update, and acts on a difference.

A proof computes rows of the batch whole and in *parts*: replicas' shares, slices or micro-batches. In all functions,
`size` is the number of rows of a part, `parts` the number of parts of an update, and `normalize` weights a part.
"""

import functools
from collections.abc import Callable, Mapping

import keras

from keras_paragrad.compat.model import overrides_test_step, overrides_train_step, train_step_of
from keras_paragrad.compat.state import log_once, warn_once
from keras_paragrad.compat.types import Batch
from keras_paragrad.compat.workers import all_or_none, gather, worker_strategy
from keras_paragrad.engine.calls.divisible import find_mixing_layers
from keras_paragrad.engine.division.comparison import Difference
from keras_paragrad.engine.division.cut import MOST_PARTS, join_rows, local_rows, part_size
from keras_paragrad.engine.division.division import Divisions
from keras_paragrad.engine.division.metrics_proof import find_metric_differences, metrics_are_known
from keras_paragrad.engine.division.proof import (
    find_difference,
    find_layer_that_mixes,
    is_known_to_divide,
    measure_batch_statistics,
)
from keras_paragrad.engine.division.window_proof import find_difference_in_window
from keras_paragrad.engine.losses.loss_normalization import LossNormalization, find_weightings
from keras_paragrad.engine.losses.refusals import IndivisibleError, layers_of_batch_statistics
from keras_paragrad.engine.losses.terms import arguments_of, is_summed
from keras_paragrad.engine.losses.weightings import WEIGHTINGS, weighting_of
from keras_paragrad.engine.probes.independence import USE_SUMS, find_layers_dependent_on, states_refusal
from keras_paragrad.engine.step.building import build_by_calling, build_losses, losses_built
from keras_paragrad.engine.step.stages import Stages, Take

# Rows whose memory is negligible.
_FEW_ROWS = 16
# Refuses or warns; called after the step is traced, since errors of the trace are more informative.
Conclusion = Callable[[], None]
_UNPROVED = "The weighted gradients of parts of the first batch couldn't be compared with the gradient of the whole"
_ELSEWHERE = (
    "On another worker's rows of the first batch, the weighted gradients of the parts don't sum to the gradient of the "
    "whole"
)


class EvaluationProof:
    """Proves that the parts of the first batch evaluated on replicas give the loss and the metrics of the whole.

    Attributes:
        whole_losses: Whether the loss differs, so that it is computed on the outputs of whole batches.
        entered: Why calls of layers are not divided, by the layers' ids; `None` until they are tried.
    """

    def __init__(self, model: keras.Model, take: Take):
        self.model, self._stages, self.whole_losses = model, Stages(take=take), False
        self.entered: Mapping[int, str] | None = None
        replicas = model.distribute_strategy.num_replicas_in_sync
        self._proves = take.prove and take.normalize is not None and replicas > 1

    @property
    def pending(self) -> bool:
        """Whether the first batch is still to come."""
        if self._proves and losses_built(self.model) and is_known_to_divide(self.model):
            self._proves = not metrics_are_known(self.model)
        return self._proves

    def __call__(self, batch: Batch, update: bool) -> Conclusion | None:
        """Takes the first batch before its step is traced; returns the proof of its metrics. Ignores `update`."""
        self._proves = False
        model, normalize, rows = self.model, self._stages.normalization(of_slices=False), local_rows(batch)
        own = overrides_test_step(model)
        if own or normalize is None or normalize.weighting == "auto":
            self.entered = find_mixing_layers(model, model.test_step, rows)
        if rows is None or normalize is None or own:
            return None
        size, parts = part_size(model, self._stages, batch)
        if not _build_known_to_divide(model, rows):
            self._prove_loss(rows, size, parts, normalize)
        prove = functools.partial(_prove_metrics, model, rows, size, parts, normalize.refusals.anyway, summed=True)
        return functools.partial(all_or_none, worker_strategy(model), prove)

    def _prove_loss(self, data: Batch, size: int, parts: int, normalize: LossNormalization) -> None:
        """Sets `whole_losses` if the loss differs, or warns if its weighting is stated."""
        difference = find_difference(self.model, data, size, parts, normalize, loss_alone=True)
        if normalize.weighting == "auto":
            self.whole_losses = _any_worker(self.model, difference is not None)
        if self.whole_losses:
            log_once(self.model, _loss_of_whole_batches(self.model, difference or _ELSEWHERE))
        elif difference:
            warn_once(self.model, _as_stated(difference, normalize))


class FirstBatchProof:
    """Proves that the parts of the first batch give the gradient of the whole.

    If they don't, the loss is computed on the outputs of whole batches from then on, if the component can do that.
    """

    def __init__(self, model: keras.Model, stages: Stages, divisions: Divisions):
        self.model, self.stages, self._divisions = model, stages, divisions
        replicas = model.distribute_strategy.num_replicas_in_sync
        divides = stages.split or stages.apply or (stages.take and replicas > 1)
        # The first update's batches so far; `None` once there is nothing to prove.
        self._window: list[Batch] | None = [] if divides and stages.prove else None

    @property
    def pending(self) -> bool:
        """Whether batches of the first update are still to come, or one that shows which calls can be divided."""
        if self._window == [] and losses_built(self.model) and self._is_known:
            self._window = None
        return self._window is not None or self._is_untried

    @property
    def _is_untried(self) -> bool:
        """Whether calls of layers are divided, and it wasn't tried which can be; also without a proof."""
        return self._divisions.calls and self._divisions.entered is None

    @property
    def _is_known(self) -> bool:
        """Whether no proof is needed: the model is Keras's own, weighted by its loss's divisor, and mixes no rows."""
        return (
            is_known_to_divide(self.model)
            and self.stages.normalization(of_slices=True) is not None
            and metrics_are_known(self.model)
            and not _parts_have_own_statistics(self.model)
        )

    def __call__(self, batch: Batch, update: bool) -> Conclusion | None:
        """Takes a batch before its step runs; at the first update's last batch, returns the action on a difference.

        `update` says whether the batch ends an update.
        """
        size, parts = part_size(self.model, self.stages, batch)
        normalize, rows = self.stages.normalization(of_slices=True), local_rows(batch)
        if overrides_train_step(self.model):
            several = self.stages.split or self.model.distribute_strategy.num_replicas_in_sync > 1
            if several and self._divisions.entered is None:
                self._find_entered(rows)
            if not self.stages.apply or normalize is None:
                self._window = None
                return None
        if self._window is None or parts == 1 or rows is None:
            self._window = None
            if self._is_untried:
                self._find_entered(rows)
            return None
        self._window = [*self._window, rows][:MOST_PARTS]
        if self.stages.apply and not update:
            return None
        window, self._window = join_rows(self._window), None
        conclusion = self._conclude(window, size, parts, normalize)
        # What one worker refuses, none goes on with.
        return conclusion and functools.partial(all_or_none, worker_strategy(self.model), conclusion)

    def _conclude(self, data: Batch, size: int, parts: int, normalize: LossNormalization | None) -> Conclusion | None:
        """Proves the gradient, now or after the trace; without `normalize`, all parts weigh the same."""
        if normalize is not None and overrides_train_step(self.model):
            return functools.partial(self._prove_window, data, size, parts, normalize)
        if normalize is None:
            return functools.partial(self._measure_equal_weights, data, size, parts)
        if not self._divisions.calls:
            conclusion = self._prove(data, size, parts, normalize)
            if self._divisions.by_calls is None:
                return conclusion or functools.partial(self._prove_rest, data, size, parts, normalize)
        self._find_entered(data)
        return None

    def _prove_window(self, data: Batch, size: int, parts: int, normalize: LossNormalization) -> None:
        """Warns if the micro-batches of a custom `train_step` don't weigh what is stated."""
        weighting = weighting_of(normalize.weighting)
        difference = weighting and find_difference_in_window(self.model, weighting, data, size, parts)
        if difference:
            warn_once(self.model, _as_stated(difference, normalize))

    def _find_entered(self, data: Batch | None) -> None:
        """Finds the layers whose calls can't be divided, before the step is traced."""
        self._divisions.entered = find_mixing_layers(self.model, train_step_of(self.model), data)

    def _prove(self, data: Batch, size: int, parts: int, normalize: LossNormalization) -> Conclusion | None:
        """Returns the action to take if the parts of an update's rows don't give the rows' gradient.

        If they don't, and calls of layers can be divided instead, they are from now on.
        """
        model = self.model
        if _build_known_to_divide(model, data):
            return None
        if normalize.weighting == "auto" and normalize.divider.divides_calls and not self.stages.combine:
            unproved = None if self._divisions.find_refusal_of_calls(self.stages) else _UNPROVED
            difference = find_difference(model, data, size, parts, normalize, otherwise=unproved)
            if _any_worker(model, difference is not None):
                self._divisions.by_calls = f"{difference or _ELSEWHERE}."
            return None
        difference = find_difference(model, data, size, parts, normalize)
        if normalize.weighting != "auto":
            return difference and _warn_of_stated(model, data, difference, normalize)
        if difference and (layer := find_layer_that_mixes(model, data, size)):
            mixes = f"The output of {layer!r} for one example depends on the others. {difference}."
            return functools.partial(_refuse, f"{mixes} {normalize.refusals.anyway}")
        return difference and functools.partial(_refuse, normalize.refusals.of_difference(str(difference)))

    def _prove_rest(self, data: Batch, size: int, parts: int, normalize: LossNormalization) -> None:
        """Proves states and metrics after they are built, and measures the effect of batch statistics."""
        _prove_states(self.model, data, size, normalize)
        summed = self.stages.sums_replicas or self.model.distribute_strategy.num_replicas_in_sync > 1
        _prove_metrics(self.model, data, size, parts, normalize.refusals.anyway, summed=summed)
        _measure_statistics(self.model, data, size, parts, normalize)

    def _measure_equal_weights(self, data: Batch, size: int, parts: int) -> None:
        """Warns if uniform weighting, as stated, changes the gradient of the first batch."""
        stated = "weighting='uniform'" if self.stages.apply else "exact=False"
        # Replicas sum the gradients of a sum loss, rather than average them.
        if self.stages.apply or not _sums(self.model, data):
            difference = find_difference(self.model, data, size, parts, None)
            if difference is not None:
                warn_once(self.model, f"{difference}, with {stated}, which weights all parts equally.")
        _measure_statistics(self.model, data, size, parts, None)


Proof = EvaluationProof | FirstBatchProof


def _build_known_to_divide(model: keras.Model, data: Batch) -> bool:
    """Builds a model's layers and losses; returns whether all are known to divide, so that nothing has to be proved."""
    x, *_ = keras.utils.unpack_x_y_sample_weight(data)
    build_by_calling(model, x)
    build_losses(model, data)
    return is_known_to_divide(model)


def _any_worker(model: keras.Model, found: bool) -> bool:
    """Whether any worker has found something: all must trace the same step."""
    return bool(gather(worker_strategy(model), [int(found)]).any())


def _warn_of_stated(
    model: keras.Model, data: Batch, difference: Difference, normalize: LossNormalization
) -> Conclusion | None:
    """Returns the warning of a stated weighting that doesn't fit, unless the trace that follows refuses it."""
    try:
        normalize.check_stated(model, arguments_of(data))
    except IndivisibleError:
        # With a reason found on synthetic rows.
        return None
    return functools.partial(warn_once, model, _as_stated(difference, normalize))


def _as_stated(difference: Difference, normalize: LossNormalization) -> str:
    return f"{difference}, with weighting={normalize.weighting!r} as stated."


def _loss_of_whole_batches(model: keras.Model, difference: Difference | str) -> str:
    return f"{difference}, so the loss of {model.name!r} is computed on the outputs of whole batches."


def _prove_states(model: keras.Model, data: Batch, size: int, normalize: LossNormalization) -> None:
    """Refuses layers whose state after parts of the first batch differs from the state after the whole, or warns."""
    x, *_ = keras.utils.unpack_x_y_sample_weight(data)
    divider = normalize.divider
    # Where parts are large, half of one: its copies fit beside the step.
    names = find_layers_dependent_on(model, x, max(min(2 * size, _FEW_ROWS), size // 2), divider)
    if names and divider.takes_weighting and normalize.weighting == "auto":
        _refuse(f"{states_refusal(names, divider)} {normalize.refusals.anyway}".rstrip())
    if names:
        warn_once(model, states_refusal(names, divider))


def _prove_metrics(model: keras.Model, data: Batch, size: int, parts: int, anyway: str, *, summed: bool) -> None:
    """Refuses metrics whose results change with the division, if the parts' states are summed; otherwise warns."""
    if metrics_are_known(model):
        return
    differences = find_metric_differences(model, data, size, parts, on_replicas=summed)
    if not differences:
        return
    message = f"{'; '.join(map(str, differences))}. {USE_SUMS}"
    if summed:
        _refuse(f"{message} {anyway}")
    warn_once(model, message)


def _parts_have_own_statistics(model: keras.Model) -> bool:
    """Whether layers normalize each part of a batch with its own statistics; a warning has said so."""
    layers = layers_of_batch_statistics(model)
    # Synchronized statistics of replicas aren't computed here.
    replicas = model.distribute_strategy.num_replicas_in_sync > 1
    return bool(layers) and not (replicas and any(layer.synchronized for layer in layers))


def _measure_statistics(
    model: keras.Model, data: Batch, size: int, parts: int, normalize: LossNormalization | None
) -> None:
    """Warns if the parts' batch statistics change the gradient of the first batch, and by how much."""
    if _parts_have_own_statistics(model):
        difference = measure_batch_statistics(model, data, size, parts, normalize)
        if difference is not None:
            warn_once(model, f"{difference}, as BatchNormalization normalizes each part with its own statistics.")


def _sums(model: keras.Model, data: Batch) -> bool:
    """Whether the loss is a sum, which isn't divided by the number of replicas."""
    trial = None if is_summed(model) else find_weightings(model, arguments_of(data))
    return trial is None or trial.fitting == [WEIGHTINGS["sum"]]


def _refuse(message: str) -> None:
    raise IndivisibleError(message)
