"""`Division`: how batches of one signature are divided, found before a step is traced.

In a step, `take` divides batches among replicas, `split` cuts them into slices, and `apply` accumulates micro-batches,
which `weigh` weights.

if the step is Keras's, and the divisor of its loss is read off Keras's losses or stated: divide the loss
otherwise: run the step whole, and divide the calls of layers in it
if neither can be done: leave a batch of one slice whole, and refuse a larger one
"""

import contextlib
import re
import weakref
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from keras_paragrad.compat.collectives import as_on_replica, as_one_replica, replica_count
from keras_paragrad.compat.compiled_call import needs_whole_pass
from keras_paragrad.compat.layers import override_attributes
from keras_paragrad.compat.model import all_layers, check_no_row_states, overrides_train_step
from keras_paragrad.compat.optimizer import find_accumulator
from keras_paragrad.compat.state import log_once
from keras_paragrad.compat.types import Batch, LossArguments, Specs
from keras_paragrad.engine.batches.replica_batch import no_examples, static_row_count
from keras_paragrad.engine.losses.dividers import INSTEAD_OF_WINDOWS, IndivisibleError, layers_of_batch_statistics
from keras_paragrad.engine.losses.known_classes import is_keras_own
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.losses.terms import MEANS, LossTerm, compute_loss
from keras_paragrad.engine.step.building import build_by_calling, build_layers_by_step, build_losses
from keras_paragrad.engine.step.stages import Split, Stages
from keras_paragrad.engine.tracing.untouched import never_run, trace_rows, untouched
from keras_paragrad.engine.trials.trial import without_replicas
from keras_paragrad.storage.reading import zeros_in_place_of_shards

Result = TypeVar("Result")
# Matches shape-mismatch errors from TensorFlow and Keras, never our own.
_OF_SHAPES = re.compile(
    r"Dimensions? (\d+ in both shapes )?must|[Ii]ncompatible|Shapes? \S+ must|[Cc]annot reshape|equal rank"
)


class Division(NamedTuple):
    """How a batch is divided.

    Attributes:
        cut: Whether the batch is cut, if it is larger than a slice.
        calls: Whether the step runs whole, and the calls of layers in it are divided.
        why_whole: Why the batch can't be cut, or `None`. If it is set, a batch larger than a slice raises.
    """

    cut: bool = False
    calls: bool = False
    why_whole: str | None = None


class Divisions:
    """Finds the divisions of a model's batches, until the model is compiled again.

    Attributes:
        why_whole: Why batches of unknown size are left whole, or `None`.
        calls: Whether calls of layers are divided, by the last division.
        entered: For layers whose calls aren't divided, by id, the reason; `None` until calls are tried.
        by_calls: Why parts of the loss don't give the whole's gradient, as the first batch has shown, or `None`.
        called: The optimizers that a custom `train_step` has called.
    """

    def __init__(self, model: keras.Model):
        self.model, self.calls = model, False
        self.why_whole: str | None = None
        self.entered: Mapping[int, str] | None = None
        self.by_calls: str | None = None
        self.called: dict[int, keras.optimizers.Optimizer] = {}
        self._loss = DividedLoss(model)
        # The specs of the last batches on a replica; and the stages and the iterator of the last `find`.
        self._specs: Specs = None
        self._found_for: tuple[Stages | None, weakref.ref[Any] | None] = None, None

    def note_call(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Notes that a custom `train_step` calls an optimizer."""
        self.called[id(optimizer)] = optimizer

    def find(self, stages: Stages, iterator: Any, specs: Specs) -> None:
        """Finds the division of an iterator's batches before a step is traced; `specs` are a replica's."""
        found_for, before = self._found_for
        if found_for is stages and before is not None and before() is iterator:
            return
        self._specs, self._found_for = specs, (stages, weakref.ref(iterator))
        self._trace(lambda data: self.of(stages, data))

    def describe(self, stages: Stages) -> str | None:
        """Describes the division and weighting of the last batches, for `explain`; `None` before any batch."""
        if self._specs is None:
            return None
        with untouched(self.model, never_run()):
            return self._trace(lambda data: self._describe(stages, data))

    def _trace(self, function: Callable[[Batch], Result]) -> Result:
        """Calls a function on a batch of the last specs, in a graph that never runs."""
        results: list[Result] = []

        def call(data: Batch) -> None:
            results.append(function(data))

        with as_on_replica(self.model.distribute_strategy), without_replicas():
            tf.function(call, autograph=False).get_concrete_function(self._specs)
        return results[-1]

    def _describe(self, stages: Stages, data: Batch) -> str:
        division, model = self.of(stages, data), self.model
        if division.why_whole:
            return f"Batches are left whole: {division.why_whole}"
        if division.calls:
            return f"The step of {type(model).__name__} runs on whole batches, and calls of layers are divided."
        loss_divisor = stages.loss_divisor(of_slices=division.cut)
        if loss_divisor is None or overrides_train_step(model):
            return "Nothing is divided, or all parts count the same."
        return loss_divisor.describe(model, *trace_loss(model, data))

    def of(self, stages: Stages, data: Batch) -> Division:
        """Finds the division of a batch, or of a replica's rows. Raises `IndivisibleError` if there is none."""
        find = self._divide_custom_step if overrides_train_step(self.model) else self._divide_keras_step
        division = find(stages, data)
        if division.cut:
            check_no_row_states(self.model, "slices are", "give batches that are one slice")
        self.calls = division.calls
        if division.why_whole and stages.split and stages.split.cuts(data) is None:
            self.why_whole = division.why_whole
        return division

    def _divide_custom_step(self, stages: Stages, data: Batch) -> Division:
        """Finds the division for a custom `train_step`, and builds the layers that the step calls."""
        split, cuts = stages.split, stages.split is not None and stages.split.cuts(data)
        why_whole = split.loss_divisor.find_refusal(self.model) if split else None
        if split and why_whole and cuts:
            raise IndivisibleError(f"{split.refusal_prefix} {why_whole}")
        cut = split is not None and not why_whole and cuts is not False
        if cut:
            _check_slices(self.model, stages)
        calls = cut or replica_count() > 1
        if calls and (refusal := self.find_refusal_of_calls(stages)):
            raise IndivisibleError(refusal)
        if calls or stages.apply:
            build_layers_by_step(self.model, data)
        return Division(cut=cut, calls=calls, why_whole=why_whole)

    def _divide_keras_step(self, stages: Stages, data: Batch) -> Division:
        """Finds the division for Keras's `train_step`: of the loss, or of calls, or none."""
        split, replicas = stages.split, replica_count()
        # Whether the batch is larger than a slice; `None` if the number of rows isn't static.
        cuts = False if split is None else split.cuts(data)
        # The stage that divides this batch, if one does.
        divides = split if cuts is not False else stages.take if replicas > 1 else None
        loss_divisor = divides.loss_divisor if divides else None
        if loss_divisor and not stages.weigh and loss_divisor.divider.divides_calls:
            # A model without compiled losses may not be built yet.
            build_by_calling(self.model, keras.utils.unpack_x_y_sample_weight(data)[0])
            if loss_divisor.weighting == "auto":
                reason = self.by_calls or self._loss.find_refusal(loss_divisor, split, data)
                if reason and (refusal := self.find_refusal_of_calls(stages)):
                    raise IndivisibleError(f"{refusal} {reason}")
                if reason:
                    log_once(
                        self.model,
                        f"The loss of {self.model.name!r} is computed on whole batches, and only calls of layers are "
                        f"divided. {reason}",
                    )
                return Division(cut=cuts is not False, calls=bool(reason))
        why_whole = None
        # Slices need weights. A batch of one slice needs a weight only if it is accumulated with others.
        if split and cuts is not True and (cuts is None or find_accumulator(self.model.optimizer)):
            why_whole = self._loss.find_refusal(split.loss_divisor, split, data)
        return Division(cut=cuts is not False and not why_whole, why_whole=why_whole)

    def find_refusal_of_calls(self, stages: Stages) -> str | None:
        """Why calls of layers can't be divided in a step of the model, or `None`."""
        names = [layer.name for layer in all_layers(self.model) if needs_whole_pass(layer)]
        if names:
            return (
                f"{names[0]!r} takes the gradients of single examples by what the loss divides by, so its calls aren't "
                "divided."
            )
        if stages.split and stages.split.refusal_of_calls:
            return stages.split.refusal_of_calls
        if stages.observe and self.model.distribute_strategy.num_replicas_in_sync > 1:
            return (
                f"{type(stages.observe).__name__} compares the gradients of replicas, and the step of "
                f"{type(self.model).__name__} runs on the whole batch on each of them, so none has a gradient of its "
                "own. Train without that callback."
            )
        in_windows = find_accumulator(self.model.optimizer) and not (stages.apply and stages.apply.always_whole)
        if in_windows and not overrides_train_step(self.model):
            return f"The micro-batches of a window can't be combined into the whole batch. {INSTEAD_OF_WINDOWS}"
        return None


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


@contextlib.contextmanager
def explaining_rows(model: keras.Model, data: Batch, parts: int, trace: Callable[[Any], object]) -> Generator[None]:
    """Context in which a part of a batch is traced. Explains shape errors that the whole batch doesn't raise.

    `data` is one of `parts` equal parts of the batch. `trace` traces the same computation, for the whole batch.
    """
    try:
        yield
    except IndivisibleError:
        raise
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        if not _OF_SHAPES.search(str(error)):
            raise
        rows = static_row_count(data)
        try:
            trace_rows(model, trace, data, rows and rows * parts)
        except Exception:
            # The model's own error.
            raise error from None
        raise IndivisibleError(
            no_examples(f"{type(model).__name__} takes a whole batch, and fails on a part of its rows.")
        ) from error


def trace_loss(model: keras.Model, data: Batch, *, training: bool = True) -> tuple[LossArguments, list[LossTerm]]:
    """Traces a batch's loss into a graph that never runs. Returns the loss's arguments and terms."""
    # No other replica runs this trace, so weights can't be gathered, nor statistics be synchronized.
    with zeros_in_place_of_shards(), as_one_replica(), contextlib.ExitStack() as stack:
        for layer in layers_of_batch_statistics(model):
            stack.enter_context(override_attributes(layer, synchronized=False))
        _, arguments, terms = compute_loss(model, data, training=training)
    return arguments, terms


class DividedLoss:
    """Finds whether losses of parts can be combined, once for each signature of batches."""

    def __init__(self, model: keras.Model):
        self.model = model
        self._refusals: dict[Any, str | None] = {}

    def find_refusal(
        self, loss_divisor: LossDivisor, split: Split | None, data: Batch, *, training: bool = True
    ) -> str | None:
        """Why losses of parts can't be combined, or `None`."""
        leaves = keras.tree.flatten(data)
        signature = [(leaf.dtype, *leaf.shape[1:]) if tf.is_tensor(leaf) else None for leaf in leaves]
        key = (loss_divisor, split and split.size, replica_count(), *signature)
        if key not in self._refusals:
            self._refusals[key] = _find_refusal(self.model, loss_divisor, split, data, training=training)
        return self._refusals[key]


def _find_refusal(
    model: keras.Model, loss_divisor: LossDivisor, split: Split | None, data: Batch, *, training: bool = True
) -> str | None:
    def trace(data: Batch) -> None:
        measure = loss_divisor if training else loss_divisor.in_evaluation
        measure(model, *trace_loss(model, data, training=training))

    build_losses(model, data)
    # Keras's own loss that is a mean over rows needs no trace. A custom `compute_loss` may leave losses unbuilt.
    losses = (model._compile_loss and model._compile_loss._flat_losses) or ()
    adds = any(getattr(layer, "activity_regularizer", None) for layer in all_layers(model))
    if len(losses) == 1 and losses[0].loss.reduction in MEANS and not adds and is_keras_own(model):
        return None
    try:
        with explaining_rows(model, data, parts=replica_count(), trace=trace):
            # Traced for as many rows as a slice has. A pipeline's micro-batches have any number, and a `size` of 1.
            trace_rows(model, trace, data, split.size if split and split.size > 1 else static_row_count(data))
    except IndivisibleError as refusal:
        return str(refusal)
    except Exception:
        # The trace of the step follows. It fails too, with a better error.
        return None
    return None
