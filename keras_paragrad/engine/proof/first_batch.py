"""Proves the division of a batch on its first rows, before the first update of each epoch, and acts on a difference.

before the first update of an epoch, on rows of the first one:
    ask what isn't known of Keras's own classes: the model on a few rows, the loss on outputs, both in uneven parts
    if a part differs from the whole: compute the loss on whole batches, and divide calls of layers,
        or, where that can't be, refuse; a stated weighting that differs is warned of
    what couldn't be asked is warned of, if parts are computed all the same
"""

import contextlib
import functools

import keras

from keras_paragrad.compat.model import overrides_train_step, train_step_of
from keras_paragrad.compat.state import warn_once
from keras_paragrad.compat.types import Batch
from keras_paragrad.compat.workers import all_or_none, gather, worker_strategy
from keras_paragrad.engine.losses.known_classes import metrics_are_known
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.losses.weightings import weighting_of
from keras_paragrad.engine.proof import questions
from keras_paragrad.engine.proof.call_trials import CallTrials, WindowProof, innermost
from keras_paragrad.engine.proof.division import Divisions
from keras_paragrad.engine.proof.model_proof import PartsOfBatch
from keras_paragrad.engine.proof.questions import Answer, Question
from keras_paragrad.engine.proof.rows import MOST_BATCHES, join_rows, local_rows, part_size
from keras_paragrad.engine.step.building import losses_built
from keras_paragrad.engine.step.execution import PostTraceCheck
from keras_paragrad.engine.step.stages import Stages
from keras_paragrad.engine.trials.trial import few_rows, row_count, run_alone
from keras_paragrad.storage.storage import any_divided

ELSEWHERE = "On another worker's rows of the first batch, parts differ from the whole"


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
        if self._window == [] and losses_built(self.model) and questions.are_needless(self.model, self._normalize):
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
        asked = self._asked(window, size, normalize, first=first, ends=ends)
        self._questions += asked
        answer = questions.ask(asked)
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
        answer = questions.ask(self._questions)
        if self._turns_to_calls(answer):
            return True
        all_or_none(worker_strategy(self.model), functools.partial(self._act, answer))
        return False

    def _asked(
        self, rows: Batch, size: int, normalize: LossNormalization, *, first: bool, ends: bool
    ) -> list[Question]:
        """What to ask of the rows of a window so far; of all that a batch has, if it is no window."""
        model, asked = self.model, list[Question]()
        in_sequence, summed = bool(self.stages.split or self.stages.apply), self._replicas > 1
        if first:
            questions.build(model, rows)
        # A micro-batch of one row has no parts: layers are asked about with the others.
        several = bool(gather(worker_strategy(model), [int(row_count(rows) > 1)]).all())
        if (several or ends) and not any(question.of_layers for question in self._questions):
            self._rows = few_rows(rows)
            parts = PartsOfBatch(size, in_sequence, summed, weighting_of(normalize.weighting))
            asked = questions.of_layers(model, rows, parts, normalize)
        if not ends:
            return asked
        asked += questions.of_loss(model, rows, size, normalize)
        # Replicas and fixed parts update metrics with whole batches.
        if in_sequence and not self.stages.ordered and not metrics_are_known(model):
            summed = summed and self.stages.split is not None
            asked.append(questions.of_metrics(model, rows, size, normalize, summed=summed))
        return asked

    def _of_window(self, rows: Batch, size: int, normalize: LossNormalization) -> Answer:
        """Whether the micro-batches of a custom `train_step` weigh what is stated."""
        weighting = weighting_of(normalize.weighting)
        # Other workers hold some of the weights, and don't take part.
        if weighting is not None and not any_divided(self.model.trainable_variables):
            proof = functools.cache(lambda: WindowProof(self.model, rows, size, weighting))
            self._questions = [Question("whether micro-batches of train_step weigh what is stated", proof)]
        return questions.ask(self._questions)

    def _after_trace(self, answer: Answer) -> PostTraceCheck:
        """The action on an answer. What one worker refuses, none goes on with."""
        return functools.partial(all_or_none, worker_strategy(self.model), functools.partial(self._act, answer))

    def _warn_of_rows(self) -> None:
        """Warns that nothing was proved, unless there is nothing to prove."""
        if not questions.are_needless(self.model, self._normalize):
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
            message = f"{answer.difference}." if question.warns else questions.as_stated(answer.difference, normalize)
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
                names += run_alone(question.proof().find_metric_differences)
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
