"""Proves the division of a batch on its first rows, before the first update of each epoch, and acts on a difference.

before the first update of an epoch, on rows of the first one:
    ask what isn't known of Keras's own classes: the model on a few rows, the loss on outputs, both in uneven parts
    if a part differs from the whole: compute the loss on whole batches, and divide calls of layers,
        or, where that can't be, refuse; a stated weighting that differs is warned of
    what couldn't be asked is warned of, if parts are computed all the same
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras

from keras_paragrad.compat.model import (
    overrides_compute_loss,
    overrides_test_step,
    overrides_train_step,
    train_step_of,
)
from keras_paragrad.compat.state import log_once, warn_once
from keras_paragrad.compat.types import Batch
from keras_paragrad.compat.workers import all_or_none, gather, worker_strategy
from keras_paragrad.engine.calls.divisible import CallTrials, innermost
from keras_paragrad.engine.division.division import Divisions
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.losses.weightings import weighting_of
from keras_paragrad.engine.proof.known_classes import (
    computes_rows_independently,
    has_losses_per_example,
    is_keras_own,
    metrics_are_known,
)
from keras_paragrad.engine.proof.loss_proof import LossProof, WrongWeightingError
from keras_paragrad.engine.proof.metric_proof import MetricProof
from keras_paragrad.engine.proof.model_proof import ModelProof, PartsOfBatch
from keras_paragrad.engine.proof.rows import MOST_BATCHES, join_rows, local_rows, part_size
from keras_paragrad.engine.proof.trial import first_line, row_count, run_alone, take_rows
from keras_paragrad.engine.proof.window_proof import WindowProof
from keras_paragrad.engine.step.building import build_by_calling, build_losses, losses_built
from keras_paragrad.engine.step.stages import Stages, Take
from keras_paragrad.storage.storage import any_divided

# Refuses or warns; called after the step is traced, since errors of the trace are more informative.
Conclusion = Callable[[], None]
# The rows that are kept to find the layer that mixes them.
_FEW = 8
_ELSEWHERE = "On another worker's rows of the first batch, parts differ from the whole"


class _Question(NamedTuple):
    """A question about parts of a batch.

    Attributes:
        whether: What is asked, a clause that begins with "whether".
        proof: Makes what answers, once.
        advice: What to write if there is one.
        of_model: Whether it asks about the layers.
        warns: Whether a difference is warned of, and not refused; `None` if it depends on whether it was stated.
    """

    whether: str
    proof: Callable[[], Any]
    advice: str
    of_model: bool = False
    warns: bool | None = None

    def ask(self) -> str | None:
        """A difference between parts and the whole, or `None`."""
        return self.proof().ask()


class _Answer(NamedTuple):
    """The first difference, and its question; or what could not be asked, and why.

    `refused` says whether a stated weighting isn't what the loss divides by, since another one is.
    """

    difference: str | None = None
    question: _Question | None = None
    unproved: str | None = None
    refused: bool = False


def _ask(questions: list[_Question]) -> _Answer:
    unproved = None
    for question in questions:
        try:
            difference = run_alone(question.ask)
        except WrongWeightingError as wrong:
            return _Answer(str(wrong), question, refused=True)
        except IndivisibleError:
            # The trace that follows refuses the step too.
            continue
        except Exception as error:
            unproved = f"It was not checked {question.whether}: {first_line(error).removesuffix('.')}"
            continue
        if difference:
            return _Answer(difference, question)
    return _Answer(unproved=unproved)


def _questions(
    model: keras.Model, data: Batch, parts: PartsOfBatch, normalize: LossNormalization, *, training: bool = True
) -> list[_Question]:
    """What isn't known of a built model with Keras's step, whose batches are divided."""
    questions = list[_Question]()
    divider, name = normalize.divider, model.name
    if not computes_rows_independently(model):
        advice = f"{divider.whole_batches} {normalize.refusals.anyway}"
        proof = functools.cache(lambda: ModelProof(model, data, parts, training=training))
        whether = f"whether {name!r} computes each example by itself"
        questions.append(_Question(whether, proof, advice, of_model=True))
    if normalize.weighting != "auto" or overrides_compute_loss(model) or not has_losses_per_example(model):
        loss = functools.cache(lambda: LossProof(model, data, parts.size, normalize, training=training))
        whether = f"whether the loss of {name!r} is the same in parts"
        advice = f"{divider.for_any_loss} {normalize.refusals.anyway}"
        questions.append(_Question(whether, loss, advice))
    return questions


class EvaluationProof:
    """Proves that the parts of the first batch evaluated on replicas give the loss of the whole.

    Attributes:
        whole_losses: Whether the loss differs, so that it is computed on the outputs of whole batches.
        entered: Why calls of layers are not divided, by the layers' ids; `None` until they are tried.
    """

    def __init__(self, model: keras.Model, take: Take):
        self.model, self._take, self.whole_losses = model, take, False
        self.entered: Mapping[int, str] | None = None
        several = model.distribute_strategy.num_replicas_in_sync > 1
        self._normalize = take.ordered.normalize if take.ordered else take.normalize
        self._proves = take.prove and self._normalize is not None and bool(several or take.ordered)
        self.begins = False

    @property
    def pending(self) -> bool:
        """Whether the first batch is still to come."""
        if self._proves and losses_built(self.model) and _is_known(self.model, self._normalize):
            in_parts = self._take.ordered is not None and not metrics_are_known(self.model)
            self._proves = overrides_test_step(self.model) or in_parts
        return self._proves

    def again(self) -> bool:
        """Evaluation is proved once."""
        return False

    def __call__(self, batch: Batch, update: bool) -> Conclusion | None:
        """Takes the first batch before its step is traced. Ignores `update`."""
        self._proves = False
        model, normalize, rows = self.model, self._normalize, local_rows(batch)
        assert normalize is not None
        answer = _Answer()
        if not overrides_test_step(model) and rows is not None:
            _build(model, rows)
            size, _ = part_size(model, Stages(take=self._take), batch)
            parts = PartsOfBatch(size, False, True, weighting_of(normalize.weighting))
            answer = _ask(_questions(model, rows, parts, normalize, training=False))
        found = bool(answer.difference or (answer.unproved and normalize.weighting == "auto"))
        found = bool(gather(worker_strategy(model), [int(found)]).any())
        if overrides_test_step(model) or normalize.weighting == "auto":
            self.entered = CallTrials(model, model.test_step, rows).find()
            self.whole_losses = found
        if self.whole_losses:
            log_once(model, _of_whole_batches(model, answer))
        elif answer.difference:
            warn_once(model, _as_stated(answer.difference, normalize))
        if not self._take.ordered or rows is None or metrics_are_known(model):
            return None
        rows_of_part = -(-row_count(rows) // self._take.ordered.parts)
        loss = LossProof(model, rows, rows_of_part, normalize, training=False)
        return functools.partial(_check_metrics, loss, rows_of_part)


class FirstBatchProof:
    """Proves that the parts of the first update's rows give the gradient, states and metrics of the whole.

    Attributes:
        begins: Whether questions are asked again before the first update of an epoch.
    """

    def __init__(self, model: keras.Model, stages: Stages, divisions: Divisions):
        self.model, self.stages, self._divisions = model, stages, divisions
        self._replicas = model.distribute_strategy.num_replicas_in_sync
        divides = stages.split or stages.apply or (stages.take and self._replicas > 1)
        normalizes = stages.normalization(of_slices=True) is not None
        # The first update's batches so far; `None` once there is nothing to prove.
        self._window: list[Batch] | None = [] if divides and normalizes and stages.prove else None
        self._questions, self._data = list[_Question](), None
        self._trials: CallTrials | None = None

    @property
    def pending(self) -> bool:
        """Whether batches of the first update are still to come, or one that shows which calls can be divided."""
        if self._window == [] and losses_built(self.model) and _is_known(self.model, self._normalize):
            self._window = None if metrics_are_known(self.model) else self._window
        return self._window is not None or self._is_untried

    @property
    def begins(self) -> bool:
        return bool(self._questions or self._trials) and self.stages.prove

    @property
    def _is_untried(self) -> bool:
        """Whether calls of layers are divided, and it wasn't tried which can be; also without a proof."""
        return self._divisions.calls and self._divisions.entered is None

    @property
    def _normalize(self) -> LossNormalization | None:
        return self.stages.normalization(of_slices=True)

    def __call__(self, batch: Batch, update: bool) -> Conclusion | None:
        """Takes a batch before its step runs; at the first update's last batch, returns the action on a difference.

        `update` says whether the batch ends an update.
        """
        size, parts = part_size(self.model, self.stages, batch)
        normalize, rows, own = self._normalize, local_rows(batch), overrides_train_step(self.model)
        if self._is_untried:
            self._find_entered(rows)
        if self._window is None or normalize is None or (self._divisions.calls and not own):
            self._window = None
            return None
        if own and not (self.stages.apply and self.stages.combine):
            self._window = None
            return None
        if rows is None:
            self._window = None
            return None if own else functools.partial(self._warn_of_rows, normalize)
        self._window = [*self._window, rows][:MOST_BATCHES]
        if self.stages.apply and not update:
            return None
        window, self._window = join_rows(self._window), None
        if parts == 1 and not own:
            # A batch that isn't divided: what can't be is divided in none, and refused in a larger one.
            self._window = [] if self._is_divided_later(window, size, normalize) else None
            return None
        conclusion = (self._prove_window if own else self._prove)(window, size, normalize)
        # What one worker refuses, none goes on with.
        return conclusion and functools.partial(all_or_none, worker_strategy(self.model), conclusion)

    def again(self) -> bool:
        """Asks again, before the first update of an epoch; returns whether the step has to be traced anew."""
        if self._trials:
            before, self._divisions.entered = self._divisions.entered, self._trials.find()
            return self._divisions.entered != before
        answer = _ask(self._questions)
        if self._turns_to_calls(answer):
            return True
        all_or_none(worker_strategy(self.model), functools.partial(self._act, answer))
        return False

    def _warn_of_rows(self, normalize: LossNormalization) -> None:
        """Warns that nothing was proved, unless there is nothing to prove."""
        if not _is_known(self.model, self._normalize):
            warn_once(self.model, "It was not checked whether parts of a batch add up to it: a tensor has no rows.")

    def _prove_window(self, data: Batch, size: int, normalize: LossNormalization) -> Conclusion | None:
        """Asks whether the micro-batches of a custom `train_step` weigh what is stated."""
        weighting = weighting_of(normalize.weighting)
        # Other workers hold some of the weights, and don't take part.
        if weighting is None or any_divided(self.model.trainable_variables):
            return None
        proof = functools.cache(lambda: WindowProof(self.model, data, size, weighting))
        question = _Question("whether micro-batches of train_step weigh what is stated", proof, "")
        self._questions = [question]
        return lambda: self._act(_ask(self._questions))

    def _prove(self, data: Batch, size: int, normalize: LossNormalization) -> Conclusion | None:
        """Asks before the step is traced: a difference changes how it is divided."""
        answer = self._ask_all(data, size, normalize)
        if self._turns_to_calls(answer):
            return None
        for question in self._questions:
            self._warn_of_metrics_of_calls(question)
        return lambda: self._act(answer)

    def _is_divided_later(self, data: Batch, size: int, normalize: LossNormalization) -> bool:
        """Asks about a batch of one part; returns whether a larger batch has to be asked about too."""
        if row_count(data) < 2:
            return True
        answer = self._ask_all(data, size, normalize)
        return not self._turns_to_calls(answer) and bool(answer.difference or answer.unproved)

    def _ask_all(self, data: Batch, size: int, normalize: LossNormalization) -> _Answer:
        _build(self.model, data)
        in_sequence = bool(self.stages.split or self.stages.apply)
        parts = PartsOfBatch(size, in_sequence, self._replicas > 1, weighting_of(normalize.weighting))
        self._data = take_rows(data, 0, min(row_count(data), _FEW))
        self._questions = _questions(self.model, data, parts, normalize)
        # Replicas update metrics with whole batches.
        if in_sequence and not metrics_are_known(self.model):
            summed = self.stages.sums_replicas or (self._replicas > 1 and self.stages.split is not None)
            proof = functools.cache(lambda: MetricProof(LossProof(self.model, data, size, normalize), size, summed))
            whether = f"whether the metrics of {self.model.name!r} are the same in parts"
            self._questions.append(_Question(whether, proof, normalize.refusals.anyway, warns=not summed))
        return _ask(self._questions)

    def _turns_to_calls(self, answer: _Answer) -> bool:
        """Computes the loss on whole batches from now on, if parts differ or can't be compared, and calls divide."""
        normalize = self._normalize
        assert normalize is not None
        found = bool(answer.difference or answer.unproved)
        if not gather(worker_strategy(self.model), [int(found)]).any():
            return False
        if normalize.weighting != "auto" or not normalize.divider.divides_calls or self.stages.combine:
            return False
        if self._divisions.find_refusal_of_calls(self.stages):
            return False
        self._divisions.by_calls = f"{answer.difference or answer.unproved or _ELSEWHERE}."
        self._questions = []
        self._find_entered(self._data)
        return True

    def _warn_of_metrics_of_calls(self, question: _Question) -> None:
        if not question.of_model:
            return
        try:
            names = run_alone(lambda: question.proof().find_metric_differences())
        except Exception:
            # What the question could not ask is warned of.
            return
        if names:
            warn_once(
                self.model,
                f"The metrics {', '.join(names)}, which call() updates, take one number for each part of a batch, so "
                "their results differ from the whole batch's. Update them with one value per example.",
            )

    def _act(self, answer: _Answer) -> None:
        """Refuses a difference, or warns of one where the weighting is stated; warns of what couldn't be asked."""
        normalize, question = self._normalize, answer.question
        assert normalize is not None
        if answer.unproved:
            warn_once(self.model, answer.unproved)
        if not answer.difference or not question:
            return
        stated = normalize.weighting != "auto" and not answer.refused
        if question.warns or (question.warns is None and stated):
            message = f"{answer.difference}." if question.warns else _as_stated(answer.difference, normalize)
            warn_once(self.model, message)
            # Said once: its numbers change.
            self._questions = [each for each in self._questions if each is not question]
            return
        # Other data are proved anew.
        self._window, self._questions = [], []
        if answer.refused:
            raise IndivisibleError(answer.difference)
        names = innermost(self.model, CallTrials(self.model, train_step_of(self.model), self._data).try_alone())
        culprit = f" Its rows are mixed in {', '.join(map(repr, names))}." if question.of_model and names else ""
        split, calls = self.stages.split, None
        if normalize.divider.divides_calls:
            calls = self._divisions.find_refusal_of_calls(self.stages)
        begins = f"{split.undivided} " if split else ""
        raise IndivisibleError(f"{begins}{answer.difference}.{culprit} {calls or question.advice}".rstrip())

    def _find_entered(self, data: Batch | None) -> None:
        """Finds the layers whose calls can't be divided, before the step is traced."""
        self._trials = CallTrials(self.model, train_step_of(self.model), data)
        self._divisions.entered = self._trials.find()


Proof = EvaluationProof | FirstBatchProof


def _check_metrics(outputs: LossProof, size: int) -> None:
    """Refuses metrics that differ in parts of `size` rows, whose states are added."""
    proof = functools.cache(lambda: MetricProof(outputs, size, True))
    answer = _ask([_Question("whether metrics are the same in parts", proof, "")])
    if answer.difference:
        raise IndivisibleError(f"{answer.difference}. {outputs.normalize.refusals.anyway}")


def _is_known(model: keras.Model, normalize: LossNormalization | None) -> bool:
    """Whether nothing has to be asked of layers and losses: they are Keras's own, and no weighting is stated."""
    return is_keras_own(model) and normalize is not None and normalize.weighting == "auto"


def _build(model: keras.Model, data: Batch) -> None:
    """Builds a model's layers and losses."""
    x, *_ = keras.utils.unpack_x_y_sample_weight(data)
    build_by_calling(model, x)
    build_losses(model, data, metrics=True)


def _as_stated(difference: str, normalize: LossNormalization) -> str:
    return f"{difference}, with weighting={normalize.weighting!r} as stated."


def _of_whole_batches(model: keras.Model, answer: _Answer) -> str:
    reason = answer.difference or answer.unproved or _ELSEWHERE
    return f"{reason}, so the loss of {model.name!r} is computed on the outputs of whole batches."
