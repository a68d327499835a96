"""`fix_batch_norm`: replaces batch statistics, which private training can't have, by group statistics."""

import contextlib
import functools
import math
from typing import Any

import keras

from keras_paragrad.arguments import check_instance
from keras_paragrad.compat.types import Structure
from keras_paragrad.per_example.units import layer_and_sublayers

_MOST_GROUPS = 32


def fix_batch_norm(model: keras.Model) -> keras.Model:
    """Copies a model and its weights, with GroupNormalization in place of BatchNormalization.

    Batch statistics make an example's output depend on the rest of its batch, so its gradient can't be clipped alone.
    Group normalization uses an example's own statistics, over groups of its channels (Wu and He, 2018,
    https://arxiv.org/abs/1803.08494). The scale and offset of each channel are copied; moving averages have no
    counterpart, so the copy has to be trained, or fine-tuned, before it is as good.

    The number of groups is the largest divisor of the channels up to 32, or 1 for inputs without positions, where
    groups would hold few numbers. Frozen layers stay, as they use moving averages. Group normalization ignores masks,
    so an example's padding enters its statistics.

    Args:
        model: A built Functional or Sequential model. Nested ones are changed too; a shared layer stays shared.

    Returns:
        A model of the same kind, not compiled; `model` itself, if it trains no BatchNormalization.

    Raises:
        ValueError: BatchNormalization is inside a subclassed model or another layer, whose code has to replace it; or
            it normalizes single numbers, which group normalization would set to 0.

    Example:

    >>> import keras
    >>> from keras_paragrad.privacy import fix_batch_norm
    >>> layers = [keras.layers.Conv2D(48, 3), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    >>> fixed = fix_batch_norm(keras.Sequential([keras.Input((28, 28, 1)), *layers]))
    >>> fixed.layers[1].groups
    24
    """
    check_instance("model", model, keras.Model, "a Keras model", example="keras.Sequential([keras.layers.Dense(10)])")
    if not any(map(_is_replaced, layer_and_sublayers(model))):
        return model
    copier = _Copier()
    copy = copier.copy_layer(model, "")
    copier.assign_weights()
    return copy


class _Copier:
    """Copies layers, each once, so that shared layers stay shared.

    Attributes:
        copies: Each layer with its copy, by the layer's `id`.
    """

    def __init__(self) -> None:
        self.copies: dict[int, tuple[keras.layers.Layer, keras.layers.Layer]] = {}

    def _copy_model(self, model: keras.Model, path: str) -> keras.Model:
        """A copy of a model, whose layers are copied by `copy_layer`."""
        if not model.built:
            raise ValueError(
                f"The model {path!r} is not built, so the channels of its BatchNormalization are unknown. Begin it "
                "with keras.Input, or call it on a batch."
            )
        # Sequential models don't take a call_function.
        calls = {} if isinstance(model, keras.Sequential) else {"call_function": _call}
        copy = keras.models.clone_model(model, clone_function=lambda layer: self.copy_layer(layer, path), **calls)
        if not copy.built:
            copy.build(model.input_shape)
        return copy

    def copy_layer(self, layer: keras.layers.Layer, path: str) -> keras.layers.Layer:
        """The copy of a layer, model or operation, made in the first call; `path` names its parents in errors."""
        if id(layer) not in self.copies:
            self.copies[id(layer)] = layer, self._make_copy(layer, f"{path}/{layer.name}".strip("/"))
        return self.copies[id(layer)][1]

    def assign_weights(self) -> None:
        """Assigns the layers' weights to their copies."""
        for layer, copy in self.copies.values():
            if not isinstance(layer, keras.layers.Layer) or _is_plain_model(layer):
                continue
            if _is_replaced(layer):
                pairs = [(layer.gamma, copy.gamma), (layer.beta, copy.beta)]
                pairs = [(old, new) for old, new in pairs if old is not None]
            else:
                pairs = list(zip(layer.weights, copy.weights, strict=True))
                if hasattr(layer, "lora_alpha"):
                    # Some layers' configs lack it.
                    copy.lora_alpha = layer.lora_alpha
            for old, new in pairs:
                new.assign(old)
                if new.trainable != old.trainable:
                    new.trainable = old.trainable

    def _make_copy(self, layer: keras.layers.Layer, path: str) -> keras.layers.Layer:
        """A new copy of a layer at a path, without its weights, and with `BatchNormalization` replaced."""
        if _is_plain_model(layer):
            return self._copy_model(layer, path)
        if isinstance(layer, keras.layers.Layer):
            if _is_replaced(layer):
                return _group_normalization(layer, path)
            if any(map(_is_replaced, layer_and_sublayers(layer))):
                raise ValueError(
                    f"{path!r}, of class {type(layer).__name__}, has BatchNormalization inside, and only its own code "
                    "says how it is called. Replace it there: write keras.layers.GroupNormalization(groups) for "
                    "keras.layers.BatchNormalization()."
                )
        return type(layer).from_config(layer.get_config())


def _call(layer: keras.layers.Layer, *arguments: Any, **keywords: Any) -> Structure:
    """Calls a copy as its layer was called; group normalization takes neither `mask` nor `training`."""
    return layer(*arguments) if isinstance(layer, keras.layers.GroupNormalization) else layer(*arguments, **keywords)


def _is_replaced(layer: keras.layers.Layer) -> bool:
    """Whether a layer normalizes by batch statistics in training, and so is replaced."""
    return isinstance(layer, keras.layers.BatchNormalization) and layer.trainable


def _group_normalization(layer: keras.layers.Layer, path: str) -> keras.layers.Layer:
    """A `GroupNormalization` in place of a `BatchNormalization`, with its settings."""
    channels = layer.moving_mean.shape[0]
    rank = layer.input_spec.ndim
    groups = next(count for count in range(min(channels, _MOST_GROUPS), 0, -1) if channels % count == 0)
    if _positions(layer, rank) == 1:
        groups = 1
        if channels == 1:
            raise ValueError(
                f"{path!r} normalizes single numbers: an example has one channel and one position there, and group "
                "normalization would leave the offset alone. Take the layer out of the model."
            )
    config = layer.get_config()
    parts = ("initializer", "regularizer", "constraint")
    names = [f"{weight}_{part}" for weight in ("beta", "gamma") for part in parts]
    names += ["epsilon", "center", "scale", "name", "dtype"]
    axis = layer.axis % rank
    return keras.layers.GroupNormalization.from_config(
        {**{name: config[name] for name in names}, "groups": groups, "axis": -1 if axis == rank - 1 else axis}
    )


def _positions(layer: keras.layers.Layer, rank: int) -> int | None:
    """Number of an example's values per channel; `None` if it is unknown."""
    if rank == 2:
        return 1
    # `input` raises if the layer was never called on symbolic tensors.
    with contextlib.suppress(AttributeError, ValueError):
        sizes = list(layer.input.shape)[1:]
        sizes.pop(layer.axis % rank - 1)
        return None if None in sizes else math.prod(sizes)
    return None


def _is_plain_model(layer: keras.layers.Layer) -> bool:
    """Whether a layer is a Functional or Sequential model and not of a subclass."""
    return type(layer) in (keras.Sequential, _functional())


@functools.cache
def _functional() -> type[keras.Model]:
    """The class of Functional models, which has no public name."""
    inputs = keras.Input((1,))
    return type(keras.Model(inputs, inputs))
