"""What would break the promise of differential privacy, refused before any example is looked at."""

import weakref
from collections.abc import Sequence
from typing import Any

import keras

from keras_paragrad.compat.capabilities import accumulating, nested
from keras_paragrad.compat.delegation import overrides
from keras_paragrad.compat.model import added_losses, all_layers
from keras_paragrad.engine.probes.states import layers_that_keep_examples
from keras_paragrad.engine.step.builder import StepBuilder

# The names of the layers of a model that keep something of examples, once it was tried.
_KEEP: "weakref.WeakKeyDictionary[keras.layers.Layer, list[str]]" = weakref.WeakKeyDictionary()


def check_model(model: keras.Model) -> None:
    """Refuses a model whose examples have a part in each other, or whose own code decides on the loss.

    Raises:
        ValueError: It is refused. The message says what to write.
    """
    layers = all_layers(model)
    statistics = [
        layer.name for layer in layers if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]
    if statistics:
        raise ValueError(
            f"{', '.join(statistics)} normalize by statistics of the batch, so one example changes the gradients of "
            "all others, and clipping bounds nothing. Write make_private(fix_batch_norm(model), ...), which puts "
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


def check_compiled(model: Any) -> None:
    """Refuses what a private model was compiled with.

    Raises:
        ValueError: It wasn't compiled, or an optimizer or a loss is refused. The message says what to write.
    """
    if not model.compiled:
        raise ValueError(
            "The private model wasn't compiled, and takes over nothing from a compile of the model in it, whose "
            "optimizer may hold what it saw of examples. Write private.compile(optimizer, loss) before fit."
        )
    optimizer = model.optimizer
    if any(isinstance(each, keras.optimizers.LossScaleOptimizer) for each in nested(optimizer)):
        raise ValueError(
            "Loss scaling skips an update if a gradient overflows, so the number of updates depends on the data, "
            "without noise. Use the policy 'mixed_bfloat16', which needs no loss scale, instead of 'mixed_float16'."
        )
    if accumulating(optimizer):
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
    before = [
        type(each).__name__
        for each in nested(optimizer)
        if type(each).apply_gradients is not keras.optimizers.Optimizer.apply_gradients
    ]
    if before:
        raise ValueError(
            f"{', '.join(before)} has its own apply_gradients, which changes or clips gradients before noise is added, "
            "so the noise need not be enough. Write clipnorm=... or the like, which comes after the noise, or do in "
            "update_step what it does."
        )
    losses = [each for each in keras.tree.flatten(model.loss) if isinstance(each, keras.losses.Loss)]
    weighted = [each.name for each in losses if each.reduction == "mean_with_sample_weight"]
    if weighted:
        raise ValueError(
            f"{', '.join(weighted)} divides by the sample weights of the batch (reduction='mean_with_sample_weight'), "
            "so an example changes the gradients of others. Write reduction='sum_over_batch_size'."
        )
    if any(getattr(each, "reduction", "") in (None, "none") for each in losses):
        raise ValueError("A loss isn't reduced (reduction='none'). Write reduction='sum_over_batch_size'.")


def check_added_losses(model: keras.Model) -> None:
    """Refuses losses that layers add: whether they are sums over examples can't be known.

    Raises:
        ValueError: There are such losses.
    """
    if added_losses(model):
        raise ValueError(
            "A layer adds a loss with add_loss() or an activity regularizer. It is not clipped per example. Make it a "
            "part of the loss that is passed to compile, or remove it; regularizers of weights are allowed."
        )


def check_states(layer: keras.layers.Layer, *arguments: Any) -> None:
    """Refuses a model with layers that keep something of the examples, which no noise is added to.

    Args:
        layer: What is trained, built.
        *arguments: What it is called with, of which only shapes and dtypes count.

    Raises:
        ValueError: There are such layers.
    """
    if layer not in _KEEP:
        _KEEP[layer] = layers_that_keep_examples(layer, *arguments)
    if _KEEP[layer]:
        raise ValueError(
            f"Training changes a state of {', '.join(_KEEP[layer])} by what the examples are, and a state gets no "
            "noise: it would be saved with the weights. Leave out what assigns to it in training, or compute it "
            "beforehand from public rows."
        )


def check_fit(
    model: Any,
    callbacks: Sequence[Any],
    batch_size: Any,
    validation_split: Any,
    shuffle: Any,
    steps_per_epoch: Any,
) -> None:
    """Refuses arguments of `fit` that contradict Poisson sampling, or release more than is accounted for.

    Raises:
        ValueError: An argument is refused. The message says what to write.
    """
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
            "`shuffle` is False, and examples are drawn at random for each update: epsilon holds for nothing else. "
            "Leave it out."
        )
    if steps_per_epoch is not None:
        raise ValueError(
            "`steps_per_epoch` is stated, and an epoch has examples / expected_batch_size updates, for which epsilon "
            "is computed. Leave it out, and state epochs."
        )
    for callback in callbacks:
        _check_callback(callback)
    split = StepBuilder.of(model).stages.split
    if split is not None and not getattr(split, "private", False):
        raise ValueError(
            "The batches of this model are cut by microbatch(...) or a Pipeline. Leave that out, and write "
            "make_private(..., physical_batch_size=...)."
        )


def check_transforms(model: Any, seed: int | None) -> None:
    """Refuses transforms of gradients where the same noise may be drawn again.

    Raises:
        ValueError: There are transforms and a seed.
    """
    if seed is not None and StepBuilder.of(model).stages.transforms:
        raise ValueError(
            "A seed gives each training on the same data the same noise, and with other transforms of gradients its "
            "updates are others, whose difference would show gradients without noise. Leave out seed=..., or call "
            "undo() on what transform_gradients returned."
        )


def _check_callback(callback: Any) -> None:
    """Refuses a callback that decides by what is computed from private rows without noise."""
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        raise ValueError(
            "TerminateOnNaN ends training by the loss of private rows, so where it ends isn't private. Leave it out: "
            "an example whose gradient isn't finite counts for nothing."
        )
    monitored = getattr(callback, "monitor", None)
    decides = isinstance(callback, (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau))
    decides = decides or getattr(callback, "save_best_only", False)
    if decides and isinstance(monitored, str) and not monitored.startswith("val_") and monitored != "epsilon":
        raise ValueError(
            f"{type(callback).__name__} goes by {monitored!r}, which is computed from private rows without noise, "
            "so what it decides isn't private. Write monitor='val_loss', with validation_data of public rows."
        )
