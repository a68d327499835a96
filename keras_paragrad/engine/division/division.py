"""`Division`: how a batch is divided, decided for each signature of batches before a step is traced.

`Stages` hold what components do in a step: `take` divides batches among replicas, `split` cuts them into slices, and
`apply` accumulates micro-batches, weighted by `combine`.
"""

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import as_on_replica, replica_count
from keras_paragrad.compat.model import overrides_train_step
from keras_paragrad.compat.optimizer import find_accumulator
from keras_paragrad.compat.types import Batch, Specs
from keras_paragrad.engine.custom_step.analysis import ApplyCall, analyze_step
from keras_paragrad.engine.custom_step.step import CustomStep, step_signature
from keras_paragrad.engine.custom_step.whole_step import WholeStep, divide_on_replicas
from keras_paragrad.engine.division.dividers import INSTEAD_OF_WINDOWS
from keras_paragrad.engine.division.slices import find_refusal_of_slices, trace_loss
from keras_paragrad.engine.losses.loss_normalization import LossNormalization
from keras_paragrad.engine.losses.refusals import IndivisibleError
from keras_paragrad.engine.probes.comparing import find_row_comparison
from keras_paragrad.engine.step.building import build_by_calling, build_losses
from keras_paragrad.engine.step.indivisible import explaining_rows
from keras_paragrad.engine.step.stages import Split, Stages
from keras_paragrad.engine.tracing.untouched import never_run, untouched

Result = TypeVar("Result")


class Division(NamedTuple):
    """How a batch is divided.

    Attributes:
        cut: Whether the batch is cut into slices, if it is larger than one.
        whole_loss: Whether the loss is computed on the outputs of the whole batch.
        step: The analyzed custom `train_step` run on each part, or `None`.
        undivided: Why the batch can't be cut, or `None`; if set, a batch larger than one slice raises.
    """

    cut: bool = False
    whole_loss: bool = False
    step: CustomStep | WholeStep | None = None
    undivided: str | None = None


class Divisions:
    """Finds the divisions of a model's batches, until the model is compiled again.

    Attributes:
        steps: The analyzed steps of the custom `train_step`, by signature. Compiled functions use their variables.
        undivided: Why batches of unknown size are left whole, or `None`.
    """

    def __init__(self, model: keras.Model):
        self.model = model
        self.steps: dict[tuple[object, ...], CustomStep | WholeStep] = {}
        self.undivided: str | None = None
        # The specs of the last batches on a replica, and the stages and the iterator for which they were found.
        self._specs: Specs = None
        self._found_for: tuple[Stages | None, weakref.ref[Any] | None] = None, None

    @property
    def calls(self) -> list[ApplyCall]:
        """The calls of optimizers in the analyzed steps."""
        return [call for step in self.steps.values() for call in step.calls]

    def find(self, stages: Stages, iterator: Any, specs: Specs) -> None:
        """Finds the division of an iterator's batches, which have these specs on a replica, before a step is traced.

        Raises:
            IndivisibleError: The batches can't be divided.
        """
        found_for, before = self._found_for
        if found_for is stages and before is not None and before() is iterator:
            return

        self._specs, self._found_for = specs, (stages, weakref.ref(iterator))
        self._trace(stages, lambda data: self.of(stages, data))

    def describe(self, stages: Stages) -> str | None:
        """Describes the division and weighting of the last batches, and how they were found; `None` before any batch.

        A clause for each, for `explain`.
        """
        if self._specs is None:
            return None
        with untouched(self.model, never_run()):
            return self._trace(stages, lambda data: self._describe(stages, data))

    def _trace(self, stages: Stages, function: Callable[[Batch], Result]) -> Result:
        """The result of a function of a batch of the last specs, in a graph that never runs."""
        results: list[Result] = []

        def call(data: Batch) -> None:
            with stages.mesh.as_on_mesh() if stages.mesh else nullcontext():
                results.append(function(data))

        with as_on_replica(self.model.distribute_strategy):
            tf.function(call, autograph=False).get_concrete_function(self._specs)
        return results[-1]

    def _describe(self, stages: Stages, data: Batch) -> str:
        division, model = self.of(stages, data), self.model
        if division.undivided:
            return f"Batches are left whole: {division.undivided}"
        if division.whole_loss:
            return "The loss compares rows, so it is computed on the outputs of the whole batch."
        if division.step:
            return division.step.describe()
        normalize = stages.normalization(of_slices=division.cut)
        if normalize is None or overrides_train_step(model):
            return "Nothing is divided, or all parts count the same."
        return normalize.describe(model, *trace_loss(model, data))

    def of(self, stages: Stages, data: Batch) -> Division:
        """Finds the division of a batch, or of a replica's part; raises `IndivisibleError` if it can't be divided."""
        find = self._divide_custom_step if overrides_train_step(self.model) else self._divide_keras_step
        division = find(stages, data)
        if division.undivided and stages.split:
            if stages.split.cuts(data) is None:
                self.undivided = division.undivided
            stages.split.deferred_refusal.say(self.model, division.undivided)
        return division

    def _divide_custom_step(self, stages: Stages, data: Batch) -> Division:
        """Finds the division for a model with a custom `train_step`, analyzed for a slice, or for all the data."""
        split, take = stages.split, stages.take
        undivided = split.normalize.find_refusal(self.model) if split else None
        if split and undivided and split.cuts(data):
            raise _too_large(split, undivided)
        if split and not undivided and split.cuts(data) is not False:
            _check_slices(self.model, stages)
            return Division(cut=True, step=self._step(split.slices(data).last, split.normalize, data))
        if stages.apply and stages.combine:
            return Division(step=self._step(data, stages.combine, None), undivided=undivided)
        if take and take.normalize and replica_count() > 1:
            return Division(step=self._step(data, take.normalize, data, replicas=True), undivided=undivided)
        return Division(undivided=undivided)

    def _step(
        self, part: Batch, normalize: LossNormalization, explained: Batch, *, replicas: bool = False
    ) -> CustomStep | WholeStep:
        """Analyzes the step for a part of a batch; explains errors that `explained`, the whole batch, doesn't raise."""
        signature = step_signature(part, normalize)
        if signature not in self.steps:
            model, divide = self.model, divide_on_replicas if replicas else CustomStep
            explaining = nullcontext()
            if explained is not None:
                explaining = explaining_rows(model, explained, replica_count(), functools.partial(analyze_step, model))
            with explaining:
                self.steps[signature] = divide(model, part, normalize)
        return self.steps[signature]

    def _divide_keras_step(self, stages: Stages, data: Batch) -> Division:
        """Finds the division for a model with Keras's `train_step`.

        Cuts the batch if its loss can be weighted by slice; computes the loss on the whole batch if it compares rows;
        otherwise leaves the batch whole, with the reason.
        """
        split, replicas = stages.split, replica_count()
        # Whether the batch is larger than a slice; `None` if its number of rows isn't known.
        cuts = False if split is None else split.cuts(data)
        # The stage whose parts have to be combined, if any.
        divides = split if cuts is not False else stages.take if replicas > 1 else None
        undivided = None
        if divides and divides.normalize and not stages.combine and divides.normalize.divider.on_whole_batches:
            compares = self._needs_whole_outputs(stages, data, divides.normalize)
            if compares is True:
                return Division(cut=cuts is not False, whole_loss=True)
            # Replicas can't leave the batch whole; without replicas, slices can.
            if compares and (cuts is False or replicas > 1):
                raise IndivisibleError(compares)
            undivided = compares or None
        # Slices need weights; a batch of one slice needs one only if it is accumulated with others.
        if split and not undivided and cuts is not True and (cuts is None or find_accumulator(self.model.optimizer)):
            undivided = find_refusal_of_slices(self.model, split, data)
        if split and undivided and cuts:
            raise _too_large(split, undivided)
        return Division(cut=cuts is not False and not undivided, undivided=undivided)

    def _needs_whole_outputs(self, stages: Stages, data: Batch, normalize: LossNormalization) -> bool | str:
        """Whether the loss has to be computed on the whole batch's outputs; a string says why it can't be."""
        model = self.model
        # A model without compiled losses may not be built yet, and trials need a built one.
        build_by_calling(model, keras.utils.unpack_x_y_sample_weight(data)[0])
        build_losses(model, data)
        compares = find_row_comparison(model, data, normalize)
        if compares is not True:
            return compares
        if find_accumulator(model.optimizer) and not (stages.apply and stages.apply.deferred_refusal):
            raise IndivisibleError(
                "The loss compares examples, so the micro-batches of a window can't be combined into the whole batch. "
                f"{INSTEAD_OF_WINDOWS}"
            )
        if stages.observe and replica_count() > 1:
            raise IndivisibleError(
                f"{type(stages.observe).__name__} compares the gradients of replicas, and the loss compares the "
                "examples of all replicas, so none has a gradient of its own. Train without that callback."
            )
        return True


def _too_large(split: Split, refusal: str) -> IndivisibleError:
    return IndivisibleError(f"{split.undivided} {refusal}")


def _check_slices(model: keras.Model, stages: Stages) -> None:
    """Refuses slices of a custom `train_step` together with accumulation, or on a mesh."""
    name = type(model).__name__
    if stages.apply:
        raise IndivisibleError(
            f"{name} defines its own train_step, which either microbatch divides or AccumulatingOptimizer. Leave "
            "ExactAccumulation and AccumulatingOptimizer out, and give fit() the batch_size of an update."
        )
    if stages.mesh:
        raise IndivisibleError(
            f"{name} defines its own train_step, which microbatch can't divide on a mesh. Move what it does into "
            "compute_loss, or train on replicas: DistributedFit('mirrored')."
        )
