"""What is asked of the first rows of a batch that is divided, and the answers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from keras_paragrad.compat.model import overrides_compute_loss
from keras_paragrad.compat.types import Batch
from keras_paragrad.engine.losses.known_classes import computes_rows_independently, has_losses_per_example, is_keras_own
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.proof.loss_proof import LossProof, MetricProof, WrongWeightingError
from keras_paragrad.engine.proof.model_proof import ModelProof, PartsOfBatch
from keras_paragrad.engine.step.building import build_by_calling, build_losses
from keras_paragrad.engine.trials.trial import first_line, run_alone


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
        """The difference, or else what could not be asked."""
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


def of_layers(
    model: keras.Model, data: Batch, parts: PartsOfBatch, normalize: LossNormalization, *, training: bool = True
) -> list[Question]:
    """Whether a built model computes each row by itself, unless its classes are known to."""
    if computes_rows_independently(model):
        return []
    proof = functools.cache(lambda: ModelProof(model, data, parts, training=training))
    whether = f"whether {model.name!r} computes each example by itself"
    return [Question(whether, proof, f"{normalize.divider.whole_batches} {normalize.refusals.anyway}", of_layers=True)]


def of_loss(
    model: keras.Model, data: Batch, size: int, normalize: LossNormalization, *, training: bool = True
) -> list[Question]:
    """Whether parts of `size` rows give the loss, unless it is Keras's own and its weighting isn't stated."""
    if normalize.weighting == "auto" and not overrides_compute_loss(model) and has_losses_per_example(model):
        return []
    proof = functools.cache(lambda: LossProof(model, data, size, normalize, training=training))
    whether = f"whether the loss of {model.name!r} is the same in parts"
    return [Question(whether, proof, f"{normalize.divider.for_any_loss} {normalize.refusals.anyway}")]


def of_metrics(model: keras.Model, data: Batch, size: int, normalize: LossNormalization, *, summed: bool) -> Question:
    """Whether parts of `size` rows give the results of compiled metrics; `summed` is as in `MetricProof`."""

    def proof() -> MetricProof:
        return MetricProof(LossProof(model, data, size, normalize), size, summed)

    whether = f"whether the metrics of {model.name!r} are the same in parts"
    return Question(whether, functools.cache(proof), normalize.refusals.anyway, warns=not summed)


def are_needless(model: keras.Model, normalize: LossNormalization | None) -> bool:
    """Whether nothing has to be asked of layers and losses: they are Keras's own, and no weighting is stated."""
    return is_keras_own(model) and normalize is not None and normalize.weighting == "auto"


def build(model: keras.Model, data: Batch) -> None:
    """Builds a model's layers, losses and metrics, of which questions are asked."""
    x, *_ = keras.utils.unpack_x_y_sample_weight(data)
    build_by_calling(model, x)
    build_losses(model, data, metrics=True)


def as_stated(difference: str, normalize: LossNormalization) -> str:
    """The warning of a stated weighting that isn't what the loss divides by."""
    return f"{difference}, with weighting={normalize.weighting!r} as stated."
