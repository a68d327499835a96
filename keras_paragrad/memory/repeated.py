"""What to recompute of a model, for an estimate: what `recompute(model)` would, or repeated blocks."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from keras_paragrad.compat.layers import children
from keras_paragrad.engine.step.recompute import recompute_layer
from keras_paragrad.engine.step.segments import recompute_parts
from keras_paragrad.memory.layer_names import check_layer
from keras_paragrad.memory.segments import cut_where_it_pays


class Recomputation(NamedTuple):
    """Parts of a model that may be recomputed.

    Attributes:
        names: What they are called; none if nothing is to be recomputed.
        begin: Has them run again in the backward pass, and returns what ends it.
    """

    names: list[str]
    begin: Callable[[], Callable[[], None]]

    @contextlib.contextmanager
    def in_effect(self) -> Iterator[None]:
        """Context in which they are recomputed; functions that were traced before stay as they are."""
        end = self.begin()
        try:
            yield
        finally:
            end()


def recomputation_of(model: Any) -> Recomputation:
    """What `recompute(model)` recomputes; of a model that it can't cut, blocks that are alike."""
    try:
        cut = cut_where_it_pays(model)
    except ValueError:
        blocks = repeated_blocks(model)
        return Recomputation([block.name for block in blocks], lambda: _all_again(blocks))
    names = [part.name for part, again in cut.segments if again]
    return Recomputation(names, lambda: recompute_parts(model, cut.functional, cut.segments))


def repeated_blocks(model: keras.Model) -> list[keras.layers.Layer]:
    """Layers made of layers, of which several beside each other have the same weights' shapes; the outermost."""
    return [block for block in _within(model) if _can_be_recomputed(model, block)]


def _all_again(blocks: list[keras.layers.Layer]) -> Callable[[], None]:
    undo = [recompute_layer(block) for block in blocks]

    def end() -> None:
        for each in undo:
            each()

    return end


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
