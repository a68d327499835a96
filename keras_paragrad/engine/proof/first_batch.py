"""Proves on rows of the first update that parts give the whole, and acts if they don't.

before the first update of an epoch, on rows of `fit`'s first update:
    what isn't Keras's own is asked about: the model on a few rows, and the loss on outputs, both in uneven parts
    if a part differs from the whole and the weighting is stated: warn
    if a part differs otherwise: compute the loss on whole batches, and divide calls of layers; or refuse
    if a question can't be answered, and parts are computed nevertheless: warn
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from keras_paragrad.compat.model import overrides_compute_loss, overrides_train_step, train_step_of
from keras_paragrad.compat.state import warn_once
from keras_paragrad.compat.types import Batch
from keras_paragrad.compat.workers import all_or_none, gather, local_replica_values, worker_strategy
from keras_paragrad.engine.batches.replica_batch import rows_of
from keras_paragrad.engine.losses.dividers import IndivisibleError
from keras_paragrad.engine.losses.known_classes import (
    computes_rows_independently,
    has_losses_per_example,
    is_keras_own,
    metrics_are_known,
)
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.proof.call_trials import CallTrials, WindowProof, innermost
from keras_paragrad.engine.proof.division import Divisions
from keras_paragrad.engine.proof.loss_proof import LossProof, MetricProof, WrongWeightingError
from keras_paragrad.engine.proof.model_proof import ModelProof, PartsOfBatch
from keras_paragrad.engine.step.building import build_by_calling, build_losses, losses_built
from keras_paragrad.engine.step.execution import PostTraceCheck
from keras_paragrad.engine.step.stages import Stages
from keras_paragrad.engine.trials.trial import few_rows, first_line, join_rows, local_rows, row_count, run_alone
from keras_paragrad.storage.storage import any_divided

# The most batches of a window whose rows are proved together.
MOST_BATCHES = 8
ELSEWHERE = "On another worker's rows of the first batch, parts differ from the whole"


class Question(NamedTuple):
    """A question about parts of a batch.

    Attributes:
        whether: What is asked, a clause that begins with "whether".
        proof: Returns the proof that answers; the same one in each call.
        advice: What to write if the parts differ.
        of_layers: Whether the question is about layers.
        warns: Whether a difference is warned of rather than refused. `None`: it is if the weighting is stated.
    """

    whether: str
    proof: Callable[[], Any]
    advice: str = ""
    of_layers: bool = False
    warns: bool | None = None


class Answer(NamedTuple):
    """What questions have shown.

    Attributes:
        difference: The first difference between parts and the whole, or `None`.
        question: The question that has shown it.
        unproved: What could not be answered, and why, or `None`.
        refused: Whether a stated weighting is wrong, since another one fits.
    """

    difference: str | None = None
    question: Question | None = None
    unproved: str | None = None
    refused: bool = False

    @property
    def found(self) -> str | None:
        return self.difference or self.unproved


def ask(questions: list[Question]) -> Answer:
    """Asks one question after the other, until there is a difference."""
    unproved = None
    for question in questions:
        proof = question.proof
        try:
            difference = run_alone(lambda proof=proof: proof().ask())
        except WrongWeightingError as wrong:
            return Answer(str(wrong), question, refused=True)
        except IndivisibleError:
            # The trace of the step follows, and raises this too.
            continue
        except Exception as error:
            unproved = f"It was not checked {question.whether}: {first_line(error).removesuffix('.')}"
            continue
        if difference:
            return Answer(difference, question)
    return Answer(unproved=unproved)


def of_layers(model: keras.Model, data: Batch, parts: PartsOfBatch) -> list[Question]:
    """Asks whether a built model computes each row by itself, unless its classes are known to."""
    if computes_rows_independently(model):
        return []
    whether, divider = f"whether {model.name!r} computes each example by itself", parts.loss_divisor.divider
    proof = functools.cache(lambda: ModelProof(model, data, parts))
    return [Question(whether, proof, f"{divider.whole_batches} {divider.anyway}", of_layers=True)]


def of_loss(model: keras.Model, data: Batch, parts: PartsOfBatch) -> list[Question]:
    """Asks whether parts give the whole's loss, unless the loss is Keras's and no weighting is stated."""
    loss_divisor, divider = parts.loss_divisor, parts.loss_divisor.divider
    if loss_divisor.weighting == "auto" and not overrides_compute_loss(model) and has_losses_per_example(model):
        return []
    proof = functools.cache(lambda: LossProof(model, data, parts))
    whether = f"whether the loss of {model.name!r} is the same in parts"
    return [Question(whether, proof, f"{divider.for_any_loss} {divider.anyway}")]


def are_needless(model: keras.Model, loss_divisor: LossDivisor | None) -> bool:
    """Whether layers and losses need no questions: they are Keras's own, and no weighting is stated."""
    return is_keras_own(model) and loss_divisor is not None and loss_divisor.weighting == "auto"


def build(model: keras.Model, data: Batch) -> None:
    """Builds the layers, losses and metrics that the proof runs."""
    x, *_ = keras.utils.unpack_x_y_sample_weight(data)
    build_by_calling(model, x)
    build_losses(model, data, metrics=True)


def as_stated(difference: str, loss_divisor: LossDivisor) -> str:
    """The warning for a stated weighting that is wrong."""
    return f"{difference}, with weighting={loss_divisor.weighting!r} as stated."


def part_size(model: keras.Model, stages: Stages, batch: Batch) -> tuple[int, int]:
    """The number of rows of a part, and of parts in an update. A part is a slice, or else a replica's share."""
    leaves = map(local_replica_values, keras.tree.flatten(batch))
    size = max(int(rows_of(value)) for value in next(values for values in leaves if values[0] is not None))
    parts = model.distribute_strategy.num_replicas_in_sync
    if stages.split:
        rows = stages.split.part_rows(size)
        size, parts = rows, parts * -(-size // rows)
    return size, parts * (stages.apply.batches if stages.apply else 1)


class FirstBatchProof:
    """Compares the gradient, states and metrics of parts of the first update's rows with the whole's."""

    def __init__(self, model: keras.Model, stages: Stages, divisions: Divisions):
        self.model, self.stages, self._divisions = model, stages, divisions
        self._replicas = model.distribute_strategy.num_replicas_in_sync
        self._loss_divisor = stages.loss_divisor(of_slices=True)
        divides = stages.split or stages.apply or (stages.take and self._replicas > 1)
        proves = divides and self._loss_divisor is not None and stages.prove
        # The first update's batches so far; `None` once there is nothing to prove.
        self._window: list[Batch] | None = [] if proves else None
        # Asked again each epoch: the questions, and the trials of calls. The few rows show which layer mixes rows.
        self._questions, self._rows = list[Question](), None
        self._trials: CallTrials | None = None

    @property
    def pending(self) -> bool:
        """Whether another batch is needed, of the first update, or to try which calls can be divided."""
        if self._window == [] and losses_built(self.model) and are_needless(self.model, self._loss_divisor):
            self._window = None if metrics_are_known(self.model) else self._window
        return self._window is not None or self._is_untried

    @property
    def asks_again(self) -> bool:
        """Whether something will be asked again before the first update of another epoch."""
        return bool(self._questions or self._trials) and self.stages.prove and not self.pending

    @property
    def _is_untried(self) -> bool:
        """Whether calls of layers are divided, but none was tried yet. This is needed without a proof, too."""
        return self._divisions.calls and self._divisions.entered is None

    def __call__(self, batch: Batch, update: bool) -> PostTraceCheck | None:
        """Gets a batch before its step runs. Returns what to call after the trace, which refuses or warns.

        Questions about layers come before a window's first micro-batch, which changes states. Questions about losses
        come at the window's end, where `update` is true.
        """
        rows, custom_step = local_rows(batch), overrides_train_step(self.model)
        if self._is_untried:
            self._find_entered(rows)
        loss_divisor, in_windows = self._loss_divisor, self.stages.apply is not None and self.stages.weigh is not None
        if self._window is None or loss_divisor is None or (not in_windows if custom_step else self._divisions.calls):
            self._window = None
            return None
        if rows is None:
            self._window = None
            return None if custom_step else self._warn_of_rows
        size, parts = part_size(self.model, self.stages, batch)
        first, ends = not self._window, update or not self.stages.apply
        self._window = [*self._window, rows][:MOST_BATCHES]
        if not first and not ends:
            return None
        window = join_rows(self._window)
        if ends:
            self._window = None
        if custom_step:
            return self._after_trace(self._ask_about_window(window, size, loss_divisor)) if ends else None
        in_sequence = bool(self.stages.split or self.stages.apply)
        divided = PartsOfBatch(loss_divisor, size, in_sequence, self._replicas > 1)
        asked = self._new_questions(window, divided, first=first, ends=ends)
        self._questions += asked
        answer = ask(asked)
        if parts > 1:
            return self._after_trace(answer) if asked and not self._turns_to_calls(answer) else None
        # This batch isn't divided. A larger batch, which is, is asked about anew, and refused if its parts differ.
        if row_count(window) < 2 or (answer.found and not self._turns_to_calls(answer)):
            self._window, self._questions = [], []
        return None

    def again(self) -> bool:
        """Repeats questions or trials before an epoch's first update. Returns whether to trace the step anew."""
        if self._trials:
            before, self._divisions.entered = self._divisions.entered, self._trials.find()
            return self._divisions.entered != before
        answer = ask(self._questions)
        if self._turns_to_calls(answer):
            return True
        all_or_none(worker_strategy(self.model), functools.partial(self._act, answer))
        return False

    def _new_questions(self, rows: Batch, parts: PartsOfBatch, *, first: bool, ends: bool) -> list[Question]:
        """The questions about the rows of a window so far, or about those of a batch."""
        model, asked = self.model, list[Question]()
        if first:
            build(model, rows)
        # A micro-batch of one row has no parts, so questions about layers wait for more rows.
        several = bool(gather(worker_strategy(model), [int(row_count(rows) > 1)]).all())
        if (several or ends) and not any(question.of_layers for question in self._questions):
            self._rows = few_rows(rows)
            asked = of_layers(model, rows, parts)
        if not ends:
            return asked
        asked += of_loss(model, rows, parts)
        # Replicas and fixed parts update metrics with whole batches.
        if parts.in_sequence and not self.stages.ordered and not metrics_are_known(model):
            summed = parts.on_replicas and self.stages.split is not None
            proof = functools.cache(lambda: MetricProof(LossProof(model, rows, parts), summed))
            whether = f"whether the metrics of {model.name!r} are the same in parts"
            asked.append(Question(whether, proof, parts.loss_divisor.divider.anyway, warns=not summed))
        return asked

    def _ask_about_window(self, rows: Batch, size: int, loss_divisor: LossDivisor) -> Answer:
        """Asks whether the micro-batches of a custom `train_step` weigh what is stated."""
        weighting = loss_divisor.stated
        # If other workers hold some of the weights, this worker can't run the step alone.
        if weighting is not None and not any_divided(self.model.trainable_variables):
            proof = functools.cache(lambda: WindowProof(self.model, rows, size, weighting))
            self._questions = [Question("whether micro-batches of train_step weigh what is stated", proof)]
        return ask(self._questions)

    def _after_trace(self, answer: Answer) -> PostTraceCheck:
        """A function that acts on an answer. If one worker raises, all raise."""
        return functools.partial(all_or_none, worker_strategy(self.model), functools.partial(self._act, answer))

    def _warn_of_rows(self) -> None:
        """Warns that a batch without rows proves nothing, unless there is nothing to prove."""
        if not are_needless(self.model, self._loss_divisor):
            warn_once(self.model, "It was not checked whether parts of a batch add up to it: a tensor has no rows.")

    def _turns_to_calls(self, answer: Answer) -> bool:
        """Divides calls from now on, if parts differ or can't be compared. Returns whether it does."""
        loss_divisor = self._loss_divisor
        assert loss_divisor is not None
        if not gather(worker_strategy(self.model), [int(bool(answer.found))]).any():
            return False
        if loss_divisor.weighting != "auto" or not loss_divisor.divider.divides_calls or self.stages.weigh:
            return False
        if self._divisions.find_refusal_of_calls(self.stages):
            return False
        self._divisions.by_calls = f"{answer.found or ELSEWHERE}."
        self._questions = []
        self._find_entered(self._rows)
        return True

    def _act(self, answer: Answer) -> None:
        """Refuses a difference, or warns of it if the weighting is stated. Warns of unanswered questions."""
        loss_divisor, question = self._loss_divisor, answer.question
        assert loss_divisor is not None
        if answer.unproved:
            warn_once(self.model, answer.unproved)
        if not answer.difference or not question:
            self._warn_of_metrics()
            return
        stated = loss_divisor.weighting != "auto" and not answer.refused
        if question.warns or (question.warns is None and stated):
            message = f"{answer.difference}." if question.warns else as_stated(answer.difference, loss_divisor)
            warn_once(self.model, message)
            # Don't ask again: the numbers in the message would differ, and so the warning would repeat.
            self._questions = [each for each in self._questions if each is not question]
            return
        # The next `fit`, which may have other data, is proved anew.
        self._window, self._questions = [], []
        raise IndivisibleError(answer.difference if answer.refused else self._refusal(answer.difference, question))

    def _refusal(self, difference: str, question: Question) -> str:
        """The error for a difference: the layer that mixes rows, if one does, and what to write."""
        split, divider = self.stages.split, self._loss_divisor and self._loss_divisor.divider
        begins, advice = f"{split.refusal_prefix} " if split else "", question.advice
        if question.of_layers:
            trials = CallTrials(self.model, train_step_of(self.model), self._rows)
            names = ", ".join(map(repr, innermost(self.model, trials.try_alone())))
            difference += f". Its rows are mixed in {names}" if names else ""
        if divider and divider.divides_calls and question.warns is None:
            advice = self._divisions.find_refusal_of_calls(self.stages) or advice
        return f"{begins}{difference}. {advice}".rstrip()

    def _warn_of_metrics(self) -> None:
        """Warns of metrics that layers or `compute_loss` update, and whose results parts would change."""
        names = list[str]()
        for question in self._questions:
            # If this fails, the question has failed before, with a warning.
            with contextlib.suppress(Exception):
                names += run_alone(getattr(question.proof(), "find_metric_differences", list))
        if names:
            warn_once(
                self.model,
                f"The metrics {', '.join(names)}, which call() or compute_loss() updates, take one number for each "
                "part, so their results differ from the whole batch's. Update them with one value per example.",
            )

    def _find_entered(self, data: Batch | None) -> None:
        """Finds the layers whose calls can't be divided, before the step is traced."""
        self._trials = CallTrials(self.model, train_step_of(self.model), data)
        self._divisions.entered = self._trials.find()
