"""The repeated blocks of a model, such as a Transformer's."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import keras

from keras_paragrad._keras.objects.layers import children
from keras_paragrad._keras.step.recompute import recompute_layer
from keras_paragrad.sharding.layer_names import check_layer


def repeated_blocks(model: keras.Model) -> list[keras.layers.Layer]:
    """Layers made of layers, of which several beside each other have the same weights' shapes; the outermost."""
    return [block for block in _within(model) if _can_be_recomputed(model, block)]


@contextlib.contextmanager
def recomputed(blocks: list[keras.layers.Layer]) -> Iterator[None]:
    """Context in which layers run again in the backward pass; functions traced before stay as they are."""
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.callback(recompute_layer(block))
        yield


def _within(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    groups: dict[Any, list[keras.layers.Layer]] = defaultdict(list)
    for child in children(layer):
        shapes = tuple(tuple(variable.shape) for variable in child.trainable_variables)
        groups[(type(child), shapes) if shapes and children(child) else id(child)].append(child)
    return [block for group in groups.values() for block in (group if len(group) > 1 else _within(group[0]))]


def _can_be_recomputed(model: keras.Model, layer: keras.layers.Layer) -> bool:
    try:
        check_layer(model, layer)
    except ValueError:
        return False
    return True
