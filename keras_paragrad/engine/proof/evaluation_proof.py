"""Proves, on the first batch evaluated on replicas, that its parts give the loss and metrics of the whole."""

from collections.abc import Mapping

import keras

from keras_paragrad.compat.model import overrides_test_step
from keras_paragrad.compat.state import log_once, warn_once
from keras_paragrad.compat.types import Batch
from keras_paragrad.compat.workers import gather, worker_strategy
from keras_paragrad.engine.losses.weightings import weighting_of
from keras_paragrad.engine.proof import questions
from keras_paragrad.engine.proof.call_trials import CallTrials
from keras_paragrad.engine.proof.first_batch import ELSEWHERE
from keras_paragrad.engine.proof.model_proof import PartsOfBatch
from keras_paragrad.engine.proof.questions import Answer
from keras_paragrad.engine.proof.rows import local_rows, part_size
from keras_paragrad.engine.step.building import losses_built
from keras_paragrad.engine.step.stages import Stages, Take


class EvaluationProof:
    """Asks once, before the first batch is evaluated.

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

    @property
    def pending(self) -> bool:
        """Whether the first batch is still to come."""
        if self._proves and losses_built(self.model) and questions.are_needless(self.model, self._normalize):
            self._proves = overrides_test_step(self.model)
        return self._proves

    def __call__(self, batch: Batch, update: bool) -> None:
        """Takes the first batch before its step is traced. Ignores `update`."""
        self._proves = False
        model, normalize, rows = self.model, self._normalize, local_rows(batch)
        assert normalize is not None
        answer = Answer()
        if not overrides_test_step(model) and rows is not None:
            questions.build(model, rows)
            size, _ = part_size(model, Stages(take=self._take), batch)
            parts = PartsOfBatch(size, False, True, weighting_of(normalize.weighting))
            asked = questions.of_layers(model, rows, parts, normalize, training=False)
            answer = questions.ask([*asked, *questions.of_loss(model, rows, size, normalize, training=False)])
        auto = normalize.weighting == "auto"
        if overrides_test_step(model) or auto:
            self.entered = CallTrials(model, model.test_step, rows).find()
        differs = bool(gather(worker_strategy(model), [int(bool(answer.found))]).any())
        self.whole_losses = auto and differs
        if self.whole_losses:
            reason = answer.found or ELSEWHERE
            log_once(model, f"{reason}, so the loss of {model.name!r} is computed on the outputs of whole batches.")
        elif answer.difference:
            warn_once(model, questions.as_stated(answer.difference, normalize))
        elif answer.unproved:
            warn_once(model, answer.unproved)
