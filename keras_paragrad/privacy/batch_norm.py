"""`fix_batch_norm`: a model without batch statistics, which private training can't have."""

import contextlib
import functools
import math
from typing import Any

import keras

from keras_paragrad.arguments import check_instance
from keras_paragrad.per_example.units import all_layers

_MOST_GROUPS = 32


def fix_batch_norm(model: keras.Model) -> keras.Model:
    """A copy of a model, with GroupNormalization in place of BatchNormalization and all other weights kept.

    Batch statistics make an example's output depend on the rest of its batch, so its gradient can't be clipped alone.
    Group normalization takes an example's own statistics, over groups of its channels (Wu and He, 2018,
    https://arxiv.org/abs/1803.08494). The scale and offset of each channel are kept; moving averages have no
    counterpart, so the copy has to be trained, or fine-tuned, before it is as good.

    There are as many groups as the largest divisor of the channels up to 32; one, for inputs without positions, where
    groups would be of few numbers. Layers that are frozen are kept: they take their moving averages, and no batch. As
    group normalization ignores masks, an example's padding counts in its statistics.

    Args:
        model: A built Functional or Sequential model. Nested ones are changed too; a layer that is called several times
            is replaced by one.

    Returns:
        A model of the same kind, not compiled; `model` itself, if it trains no BatchNormalization.

    Raises:
        ValueError: BatchNormalization is in a subclassed model or in a layer that is no model, in whose code it has to
        be
            replaced; or it normalizes single numbers, of which group normalization leaves nothing.

    Example:

    >>> import keras
    >>> from keras_paragrad.privacy import fix_batch_norm
    >>> layers = [keras.layers.Conv2D(48, 3), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    >>> fixed = fix_batch_norm(keras.Sequential([keras.Input((28, 28, 1)), *layers]))
    >>> fixed.layers[1].groups
    24
    """
    check_instance("model", model, keras.Model, "a Keras model", example="keras.Sequential([keras.layers.Dense(10)])")
    if not any(map(_is_replaced, all_layers(model))):
        return model
    copied = _Copies()
    found = copied.of_layer(model, "")
    copied.fill()
    return found


class _Copies:
    """Copies of layers, each made once."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Any, Any]] = {}

    def of_model(self, model: Any, path: str) -> Any:
        """A model's copy.

        Raises:
            ValueError: See `fix_batch_norm`.
        """
        if not model.built:
            raise ValueError(
                f"The model {path!r} is not built, so the channels of its BatchNormalization are unknown. Begin it "
                "with keras.Input, or call it on a batch."
            )
        # The layers of a Sequential model are not called one by one.
        calls = {} if isinstance(model, keras.Sequential) else {"call_function": _call}
        copy = keras.models.clone_model(model, clone_function=lambda layer: self.of_layer(layer, path), **calls)
        if not copy.built:
            copy.build(model.input_shape)
        return copy

    def of_layer(self, layer: Any, path: str) -> Any:
        """The copy of a layer, model or operation of a model."""
        if id(layer) not in self.made:
            self.made[id(layer)] = layer, self._made(layer, f"{path}/{layer.name}".strip("/"))
        return self.made[id(layer)][1]

    def fill(self) -> None:
        """Gives copies of layers the weights of the layers."""
        for layer, copy in self.made.values():
            if not isinstance(layer, keras.layers.Layer) or _is_plain_model(layer):
                continue
            if _is_replaced(layer):
                pairs = [(layer.gamma, copy.gamma), (layer.beta, copy.beta)]
                pairs = [(old, new) for old, new in pairs if old is not None]
            else:
                pairs = list(zip(layer.weights, copy.weights, strict=True))
                if hasattr(layer, "lora_alpha"):
                    # Not all layers of Keras have it in their config.
                    copy.lora_alpha = layer.lora_alpha
            for old, new in pairs:
                new.assign(old)
                if new.trainable != old.trainable:
                    new.trainable = old.trainable

    def _made(self, layer: Any, path: str) -> Any:
        if _is_plain_model(layer):
            return self.of_model(layer, path)
        if isinstance(layer, keras.layers.Layer):
            if _is_replaced(layer):
                return _group_normalization(layer, path)
            if any(map(_is_replaced, all_layers(layer))):
                raise ValueError(
                    f"{path!r}, of class {type(layer).__name__}, has BatchNormalization inside, and only its own code "
                    "says how it is called. Replace it there: write keras.layers.GroupNormalization(groups) for "
                    "keras.layers.BatchNormalization()."
                )
        return type(layer).from_config(layer.get_config())


def _call(layer: Any, *arguments: Any, **keywords: Any) -> Any:
    """Calls a copy as its layer was called, but for the mask and mode that group normalization doesn't take."""
    return layer(*arguments) if isinstance(layer, keras.layers.GroupNormalization) else layer(*arguments, **keywords)


def _is_replaced(layer: Any) -> bool:
    """Whether a layer normalizes by batch statistics when its model is trained."""
    return isinstance(layer, keras.layers.BatchNormalization) and layer.trainable


def _group_normalization(layer: Any, path: str) -> keras.layers.Layer:
    channels = layer.moving_mean.shape[0]
    rank = layer.input_spec.ndim
    groups = next(each for each in range(min(channels, _MOST_GROUPS), 0, -1) if channels % each == 0)
    if _positions(layer, rank) == 1:
        groups = 1
        if channels == 1:
            raise ValueError(
                f"{path!r} normalizes single numbers: an example has one channel and one position there, of which "
                "group normalization leaves the offset alone. Take the layer out of the model."
            )
    config = layer.get_config()
    kept = ("epsilon", "center", "scale", "name", "dtype")
    parts = ("initializer", "regularizer", "constraint")
    names = [*kept, *(f"{weight}_{part}" for weight in ("beta", "gamma") for part in parts)]
    axis = layer.axis % rank
    return keras.layers.GroupNormalization.from_config(
        {**{name: config[name] for name in names}, "groups": groups, "axis": -1 if axis == rank - 1 else axis}
    )


def _positions(layer: Any, rank: int) -> int | None:
    """Positions of an example that a layer normalizes, if they are known."""
    if rank == 2:
        return 1
    with contextlib.suppress(AttributeError, ValueError):
        sizes = list(layer.input.shape)[1:]
        sizes.pop(layer.axis % rank - 1)
        return None if None in sizes else math.prod(sizes)
    return None


def _is_plain_model(layer: Any) -> bool:
    """Whether a layer is a Functional or Sequential model, whose class adds nothing to it."""
    return type(layer) in (keras.Sequential, _functional())


@functools.cache
def _functional() -> type[keras.Model]:
    """The class of Functional models, which has no public name."""
    inputs = keras.Input((1,))
    return type(keras.Model(inputs, inputs))
