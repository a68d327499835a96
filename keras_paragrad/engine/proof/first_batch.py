"""Proves the division of a batch on its first rows, before the first update of each epoch, and acts on a difference.

before the first update of an epoch, on rows of the first one:
    ask what isn't known of Keras's own classes: the model on a few rows, the loss on outputs, both in uneven parts
    if a part differs from the whole: compute the loss on whole batches, and divide calls of layers,
        or, where that can't be, refuse; a stated weighting that differs is warned of
    what couldn't be asked is warned of, if parts are computed all the same
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
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
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
        proof: Makes the proof that answers, once.
        advice: What to write if the parts differ.
        of_layers: Whether layers are asked about.
        warns: Whether a difference is warned of, and not refused; `None` if that depends on the weighting.
    """

    whether: str
    proof: Callable[[], Any]
    advice: str = ""
    of_layers: bool = False
    warns: bool | None = None


class Answer(NamedTuple):
    """The first difference between parts and the whole, and its question; or what could not be asked, and why.

    `refused` says whether a stated weighting isn't what the loss divides by, since another one is.
    """

    difference: str | None = None
    question: Question | None = None
    unproved: str | None = None
    refused: bool = False

    @property
    def found(self) -> str | None:
        return self.difference or self.unproved


def ask(questions: list[Question]) -> Answer:
    """Asks until there is a difference."""
    unproved = None
    for question in questions:
        proof = question.proof
        try:
            difference = run_alone(lambda proof=proof: proof().ask())
        except WrongWeightingError as wrong:
            return Answer(str(wrong), question, refused=True)
        except IndivisibleError:
            # The trace that follows refuses the step too.
            continue
        except Exception as error:
            unproved = f"It was not checked {question.whether}: {first_line(error).removesuffix('.')}"
            continue
        if difference:
            return Answer(difference, question)
    return Answer(unproved=unproved)


def of_layers(model: keras.Model, data: Batch, parts: PartsOfBatch) -> list[Question]:
    """Whether a built model computes each row by itself, unless its classes are known to."""
    if computes_rows_independently(model):
        return []
    whether, divider = f"whether {model.name!r} computes each example by itself", parts.normalize.divider
    proof = functools.cache(lambda: ModelProof(model, data, parts))
    return [Question(whether, proof, f"{divider.whole_batches} {divider.anyway}", of_layers=True)]


def of_loss(model: keras.Model, data: Batch, parts: PartsOfBatch) -> list[Question]:
    """Whether parts give the loss, unless it is Keras's own and its weighting isn't stated."""
    normalize, divider = parts.normalize, parts.normalize.divider
    if normalize.weighting == "auto" and not overrides_compute_loss(model) and has_losses_per_example(model):
        return []
    proof = functools.cache(lambda: LossProof(model, data, parts))
    whether = f"whether the loss of {model.name!r} is the same in parts"
    return [Question(whether, proof, f"{divider.for_any_loss} {divider.anyway}")]


def are_needless(model: keras.Model, normalize: LossNormalization | None) -> bool:
    """Whether nothing has to be asked of layers and losses: they are Keras's own, and no weighting is stated."""
    return is_keras_own(model) and normalize is not None and normalize.weighting == "auto"


def build(model: keras.Model, data: Batch) -> None:
    """Builds the layers, losses and metrics that the proof runs."""
    x, *_ = keras.utils.unpack_x_y_sample_weight(data)
    build_by_calling(model, x)
    build_losses(model, data, metrics=True)


def as_stated(difference: str, normalize: LossNormalization) -> str:
    """The warning of a stated weighting that isn't what the loss divides by."""
    return f"{difference}, with weighting={normalize.weighting!r} as stated."


def part_size(model: keras.Model, stages: Stages, batch: Batch) -> tuple[int, int]:
    """The number of rows of a part, a slice or else a replica's share, and the number of parts of an update."""
    leaf = next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None)
    size = max(int(rows_of(value)) for value in local_replica_values(leaf))
    parts = model.distribute_strategy.num_replicas_in_sync
    if stages.split:
        rows = stages.split.part_rows(size)
        size, parts = rows, parts * -(-size // rows)
    return size, parts * (stages.apply.batches if stages.apply else 1)


class FirstBatchProof:
    """Proves that the parts of the first update's rows give the gradient, states and metrics of the whole."""

    def __init__(self, model: keras.Model, stages: Stages, divisions: Divisions):
        self.model, self.stages, self._divisions = model, stages, divisions
        self._replicas = model.distribute_strategy.num_replicas_in_sync
        self._normalize = stages.normalization(of_slices=True)
        divides = stages.split or stages.apply or (stages.take and self._replicas > 1)
        proves = divides and self._normalize is not None and stages.prove
        # The first update's batches so far; `None` once there is nothing to prove.
        self._window: list[Batch] | None = [] if proves else None
        # What is asked again, a few rows that show which layer mixes them, and which calls are tried again.
        self._questions, self._rows = list[Question](), None
        self._trials: CallTrials | None = None

    @property
    def pending(self) -> bool:
        """Whether batches of the first update are still to come, or one that shows which calls can be divided."""
        if self._window == [] and losses_built(self.model) and are_needless(self.model, self._normalize):
            self._window = None if metrics_are_known(self.model) else self._window
        return self._window is not None or self._is_untried

    @property
    def asks_again(self) -> bool:
        """Whether something is asked before the first update of another epoch."""
        return bool(self._questions or self._trials) and self.stages.prove and not self.pending

    @property
    def _is_untried(self) -> bool:
        """Whether calls of layers are divided, and it wasn't tried which can be; also without a proof."""
        return self._divisions.calls and self._divisions.entered is None

    def __call__(self, batch: Batch, update: bool) -> PostTraceCheck | None:
        """Takes a batch before its step runs; returns the action on a difference.

        Layers are asked about before the first micro-batch of a window changes their states, and losses at its end,
        which `update` says.
        """
        rows, own = local_rows(batch), overrides_train_step(self.model)
        if self._is_untried:
            self._find_entered(rows)
        normalize, in_windows = self._normalize, self.stages.apply is not None and self.stages.combine is not None
        if self._window is None or normalize is None or (not in_windows if own else self._divisions.calls):
            self._window = None
            return None
        if rows is None:
            self._window = None
            return None if own else self._warn_of_rows
        size, parts = part_size(self.model, self.stages, batch)
        first, ends = not self._window, update or not self.stages.apply
        self._window = [*self._window, rows][:MOST_BATCHES]
        if not first and not ends:
            return None
        window = join_rows(self._window)
        if ends:
            self._window = None
        if own:
            return self._after_trace(self._of_window(window, size, normalize)) if ends else None
        in_sequence = bool(self.stages.split or self.stages.apply)
        divided = PartsOfBatch(normalize, size, in_sequence, self._replicas > 1)
        asked = self._asked(window, divided, first=first, ends=ends)
        self._questions += asked
        answer = ask(asked)
        if parts > 1:
            return self._after_trace(answer) if asked and not self._turns_to_calls(answer) else None
        # A batch that isn't divided: what can't be is divided in none, and refused in a larger one.
        if row_count(window) < 2 or (answer.found and not self._turns_to_calls(answer)):
            self._window, self._questions = [], []
        return None

    def again(self) -> bool:
        """Asks again, before the first update of an epoch; returns whether the step has to be traced anew."""
        if self._trials:
            before, self._divisions.entered = self._divisions.entered, self._trials.find()
            return self._divisions.entered != before
        answer = ask(self._questions)
        if self._turns_to_calls(answer):
            return True
        all_or_none(worker_strategy(self.model), functools.partial(self._act, answer))
        return False

    def _asked(self, rows: Batch, parts: PartsOfBatch, *, first: bool, ends: bool) -> list[Question]:
        """What to ask of the rows of a window so far; of all that a batch has, if it is no window."""
        model, asked = self.model, list[Question]()
        if first:
            build(model, rows)
        # A micro-batch of one row has no parts: layers are asked about with the others.
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
            asked.append(Question(whether, proof, parts.normalize.divider.anyway, warns=not summed))
        return asked

    def _of_window(self, rows: Batch, size: int, normalize: LossNormalization) -> Answer:
        """Whether the micro-batches of a custom `train_step` weigh what is stated."""
        weighting = normalize.stated
        # Other workers hold some of the weights, and don't take part.
        if weighting is not None and not any_divided(self.model.trainable_variables):
            proof = functools.cache(lambda: WindowProof(self.model, rows, size, weighting))
            self._questions = [Question("whether micro-batches of train_step weigh what is stated", proof)]
        return ask(self._questions)

    def _after_trace(self, answer: Answer) -> PostTraceCheck:
        """The action on an answer. What one worker refuses, none goes on with."""
        return functools.partial(all_or_none, worker_strategy(self.model), functools.partial(self._act, answer))

    def _warn_of_rows(self) -> None:
        """Warns that nothing was proved, unless there is nothing to prove."""
        if not are_needless(self.model, self._normalize):
            warn_once(self.model, "It was not checked whether parts of a batch add up to it: a tensor has no rows.")

    def _turns_to_calls(self, answer: Answer) -> bool:
        """Computes the loss on whole batches from now on, if parts differ or can't be compared, and calls divide."""
        normalize = self._normalize
        assert normalize is not None
        if not gather(worker_strategy(self.model), [int(bool(answer.found))]).any():
            return False
        if normalize.weighting != "auto" or not normalize.divider.divides_calls or self.stages.combine:
            return False
        if self._divisions.find_refusal_of_calls(self.stages):
            return False
        self._divisions.by_calls = f"{answer.found or ELSEWHERE}."
        self._questions = []
        self._find_entered(self._rows)
        return True

    def _act(self, answer: Answer) -> None:
        """Refuses a difference, or warns of one where the weighting is stated; warns of what couldn't be asked."""
        normalize, question = self._normalize, answer.question
        assert normalize is not None
        if answer.unproved:
            warn_once(self.model, answer.unproved)
        if not answer.difference or not question:
            self._warn_of_metrics()
            return
        stated = normalize.weighting != "auto" and not answer.refused
        if question.warns or (question.warns is None and stated):
            message = f"{answer.difference}." if question.warns else as_stated(answer.difference, normalize)
            warn_once(self.model, message)
            # Said once: its numbers change.
            self._questions = [each for each in self._questions if each is not question]
            return
        # Other data are proved anew.
        self._window, self._questions = [], []
        raise IndivisibleError(answer.difference if answer.refused else self._refusal(answer.difference, question))

    def _refusal(self, difference: str, question: Question) -> str:
        """The error for a difference, with the layer in which it comes about, and what to write."""
        split, divider = self.stages.split, self._normalize and self._normalize.divider
        begins, advice = f"{split.refusal_prefix} " if split else "", question.advice
        if question.of_layers:
            trials = CallTrials(self.model, train_step_of(self.model), self._rows)
            names = ", ".join(map(repr, innermost(self.model, trials.try_alone())))
            difference += f". Its rows are mixed in {names}" if names else ""
        if divider and divider.divides_calls and question.warns is None:
            advice = self._divisions.find_refusal_of_calls(self.stages) or advice
        return f"{begins}{difference}. {advice}".rstrip()

    def _warn_of_metrics(self) -> None:
        """Warns of metrics that layers and `compute_loss` update, and that parts show otherwise."""
        names = list[str]()
        for question in self._questions:
            # What a question couldn't ask was warned of.
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
