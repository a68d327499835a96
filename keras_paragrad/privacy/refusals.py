"""Refuses models and arguments that would break differential privacy, before any example is read."""

from collections.abc import Sequence

import keras

from keras_paragrad.compat.delegation import overrides
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.optimizer import find_accumulator, nested_optimizers
from keras_paragrad.engine.losses.dividers import count_layers
from keras_paragrad.engine.training.builder import StepBuilder


def check_private_layers(model: keras.Model) -> None:
    """Refuses a model in which an example's output depends on others, or that computes its loss itself."""
    layers = all_layers(model)
    statistics = [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable]
    if statistics:
        raise ValueError(
            f"{count_layers(statistics, 'normalize')} by statistics of the batch, so one example changes the gradients "
            "of all others, and clipping bounds nothing. Write make_private(fix_batch_norm(model), ...), which puts "
            "GroupNormalization in their place, or set trainable=False on these layers."
        )
    stateful = [layer.name for layer in layers if getattr(layer, "stateful", False)]
    if stateful:
        raise ValueError(
            f"{', '.join(stateful)} keep their state from one batch to the next (stateful=True), without noise. Remove "
            "that argument."
        )
    if overrides(model, "compute_loss"):
        raise ValueError(
            f"{type(model).__name__} has its own compute_loss, and whether what it computes is a sum over the examples "
            "can't be known. Pass a loss to compile, which may be a subclass of keras.losses.Loss, and make the model "
            "private without that method."
        )


def check_compiled(model: keras.Model) -> None:
    """Refuses an optimizer or a loss that breaks the accounting, and a model that isn't compiled."""
    if not model.compiled:
        raise ValueError(
            "The private model wasn't compiled, and takes over nothing from the wrapped model's compile, whose "
            "optimizer may have a state computed from examples. Write private.compile(optimizer, loss) before fit."
        )
    optimizer = model.optimizer
    if any(isinstance(inner, keras.optimizers.LossScaleOptimizer) for inner in nested_optimizers(optimizer)):
        raise ValueError(
            "Loss scaling skips an update if a gradient overflows, so the number of updates depends on the data, "
            "without noise. Use the policy 'mixed_bfloat16', which needs no loss scale, instead of 'mixed_float16'."
        )
    if find_accumulator(optimizer):
        raise ValueError(
            f"{optimizer.name} accumulates gradients, and an update of a private model is one step: noise comes once, "
            "and no file can hold a sum without it. Compile with the inner optimizer, and write "
            "make_private(..., physical_batch_size=...) for batches that fit the memory."
        )
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            f"{optimizer.name} accumulates gradients itself (gradient_accumulation_steps). Remove that argument, and "
            "write make_private(..., physical_batch_size=...) for batches that fit the memory."
        )
    wrapping = [
        type(inner).__name__
        for inner in nested_optimizers(optimizer)
        if type(inner).apply_gradients is not keras.optimizers.Optimizer.apply_gradients
    ]
    if wrapping:
        raise ValueError(
            f"{', '.join(wrapping)} has its own apply_gradients, which changes gradients before noise is added, so the "
            "noise may be too small. Write clipnorm=... or the like, which applies after the noise, or move what it "
            "does into update_step."
        )
    losses = [loss for loss in keras.tree.flatten(model.loss) if isinstance(loss, keras.losses.Loss)]
    weighted = [loss.name for loss in losses if loss.reduction == "mean_with_sample_weight"]
    if weighted:
        raise ValueError(
            f"{', '.join(weighted)} divides by the sample weights of the batch (reduction='mean_with_sample_weight'), "
            "so an example changes the gradients of others. Write reduction='sum_over_batch_size'."
        )
    if any(getattr(loss, "reduction", "") in (None, "none") for loss in losses):
        raise ValueError("A loss isn't reduced (reduction='none'). Write reduction='sum_over_batch_size'.")


def check_private_fit(
    model: keras.Model,
    callbacks: Sequence[keras.callbacks.Callback],
    batch_size: int | None,
    validation_split: float,
    shuffle: bool,
    steps_per_epoch: int | None,
) -> None:
    """Refuses arguments of `fit` that contradict Poisson sampling, or release more than is accounted for."""
    settings = model.privacy.settings
    if batch_size not in (None, settings.expected_batch_size):
        raise ValueError(
            f"`batch_size` is {batch_size}, and batches are drawn with expected_batch_size="
            f"{settings.expected_batch_size}. Leave batch_size out, or write make_private(..., "
            f"expected_batch_size={batch_size})."
        )
    if validation_split:
        raise ValueError(
            "`validation_split` would show losses of private rows at each epoch, outside of epsilon. Pass "
            "validation_data=(x, y) of public rows, or of rows for which you account otherwise."
        )
    if not shuffle:
        raise ValueError(
            "`shuffle` is False, and examples are drawn at random for each update: epsilon holds for random samples "
            "only. Leave it out."
        )
    if steps_per_epoch is not None:
        raise ValueError(
            "`steps_per_epoch` is stated, and epsilon is computed for epochs of examples / expected_batch_size "
            "updates. Leave it out, and state epochs."
        )
    for callback in callbacks:
        _check_callback(callback)
    split = StepBuilder.of(model).stages.split
    if split is not None and not getattr(split, "private", False):
        raise ValueError(
            "The batches of this model are cut by microbatch(...) or a Pipeline. Leave that out, and write "
            "make_private(..., physical_batch_size=...)."
        )


def check_transforms(model: keras.Model, seed: int | None) -> None:
    """Refuses transforms of gradients with a seed, by which the same noise may be drawn again."""
    if seed is not None and StepBuilder.of(model).stages.transforms:
        raise ValueError(
            "A seed repeats the noise in each training on the same data. Two trainings with different transforms of "
            "gradients would show, by their difference, gradients without noise. Leave out seed=..., or call undo() on "
            "what transform_gradients returned."
        )


def _check_callback(callback: keras.callbacks.Callback) -> None:
    """Refuses a callback whose decisions depend on private rows without noise."""
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        raise ValueError(
            "TerminateOnNaN ends training by the loss of private rows, so where it ends isn't private. Leave it out: "
            "an example whose gradient isn't finite has no part in the update."
        )
    monitored = getattr(callback, "monitor", None)
    decides = isinstance(callback, (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau))
    decides = decides or getattr(callback, "save_best_only", False)
    if decides and isinstance(monitored, str) and not monitored.startswith("val_") and monitored != "epsilon":
        raise ValueError(
            f"{type(callback).__name__} goes by {monitored!r}, which is computed from private rows without noise, "
            "so what it decides isn't private. Write monitor='val_loss', with validation_data of public rows."
        )
