"""`recompute`: gradient checkpointing in ordinary `fit`; and which layers can be recomputed."""

import difflib
from collections.abc import Sequence
from typing import Any

import keras

from keras_paragrad.arguments import check_each, check_instance, check_integer, quote, refusal
from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.state import Slot
from keras_paragrad.engine.calls.recomputed import recompute_layer
from keras_paragrad.engine.step.segments import recompute_parts
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.memory.recomputed_segments import check_nesting, cut_every, cut_for_least_memory

# The arguments of each `recompute` in effect on a model, for processes in which a batch is tried.
RECOMPUTATIONS = Slot[tuple[dict[str, Any], ...]]("recomputations", ())


class recompute:  # noqa: N801  (used as a function and as a context manager, like contextlib's own)
    """Recomputes layers in the backward pass of `fit`, instead of storing their activations.

    Gradient checkpointing: only the inputs of a chosen layer are stored, in exchange for a second forward pass of it.
    Training is unchanged: dropout masks are the same in both runs, and statistics, seeds, metrics and added losses are
    updated once. It works with `jit_compile`, mixed precision, strategies, `microbatch` and accumulation.

    Args:
        model: The model that is trained, compiled or not yet.
        layers: `"auto"`, or layers at any depth or their names. Each is recomputed as a whole, so name blocks, such as
            a Transformer's, not the layers in them. `"auto"` traces a step, cuts a Functional or Sequential model where
            a single tensor connects its parts, such as between blocks, into the segments that need the least memory,
            and prints the expected savings. It recomputes segments whose bytes freed per FLOP are at least half of the
            model's bytes stored per FLOP, except the last, whose backward pass comes first. `"all"` recomputes every
            segment that frees memory, at any cost.
        every: Instead of `layers`, recomputes segments of this many parts of a Functional or Sequential model. A part
            is a layer, or the layers between two places where a single tensor connects them, such as a residual block.
            The last segment is not recomputed.

    Returns:
        A handle: `undo()`, or leaving a `with` block, ends the recomputation.

    Raises:
        ValueError: An argument is invalid, such as a layer that is not in the model. `fit` raises it for a layer that
            would not compute the same in both runs. The message says what to write.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import recompute
    >>> inputs = hidden = keras.Input((8,))
    >>> for index in range(3):
    ...     block = [keras.layers.Dense(32, activation="gelu"), keras.layers.Dropout(0.1), keras.layers.Dense(8)]
    ...     hidden = keras.layers.Add()([hidden, keras.Sequential(block, name=f"block_{index}")(hidden)])
    >>> model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    >>> model.compile("adam", loss="mse")
    >>> with recompute(model, ["block_0", "block_1"]):
    ...     history = model.fit(np.ones((100, 8)), np.ones((100, 1)), verbose=0)

    References:
        Chen et al., Training deep nets with sublinear memory cost, https://arxiv.org/abs/1604.06174.
    """

    def __init__(
        self,
        model: keras.Model,
        layers: str | Sequence[str | int | keras.layers.Layer] = "auto",
        *,
        every: int | None = None,
    ):
        check_internals("models", "segments")
        check_instance("model", model, keras.Model, "a Keras model")
        every = check_integer("every", every, most=2**31 - 1, example=2, optional=True)
        chosen = layers if isinstance(layers, str) and layers in ("auto", "all") else None
        if every is not None and chosen != "auto":
            raise ValueError(
                f"`every` and `layers` both say what to recompute. Write every={every}, or layers=... alone."
            )
        self.model = model
        if chosen:
            pays = chosen == "auto"
            cut = cut_for_least_memory(model, where_it_pays=pays) if every is None else cut_every(model, every)
            self._undo = [recompute_parts(model, cut.functional, cut.segments)]
            if cut.expects:
                print(cut.expects)
        else:
            self._undo = [recompute_layer(layer) for layer in select_layers(model, layers)]
        names: Any = chosen or [getattr(layer, "name", layer) for layer in layers]
        self._arguments = {"layers": names, "every": every}
        RECOMPUTATIONS.attach(model, (*RECOMPUTATIONS.of(model), self._arguments))
        StepBuilder.of(model).retrace()

    def undo(self) -> None:
        """Ends the recomputation."""
        for undo in self._undo:
            undo()
        self._undo = []
        others = (call for call in RECOMPUTATIONS.of(self.model) if call is not self._arguments)
        RECOMPUTATIONS.attach(self.model, tuple(others))
        StepBuilder.of(self.model).retrace()

    def __enter__(self) -> "recompute":
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


_EXPECTED = "names of the model's layers, or the layers"
_EXAMPLE = '["block_0", "block_1"]'


def select_layers(
    model: keras.Model, layers: str | Sequence[str | int | keras.layers.Layer]
) -> list[keras.layers.Layer]:
    """The layers to recompute; refuses one that is not in the model, contains another, or can't be recomputed."""

    def check(name: str, value: object) -> keras.layers.Layer:
        if isinstance(value, keras.layers.Layer):
            return value
        if not isinstance(value, str):
            raise refusal(name, value, "a layer or its name")
        return _find_layer(model, value)

    chosen = list(check_each("layers", layers, check, _EXPECTED, example=_EXAMPLE))
    if not chosen:
        raise refusal("layers", layers, f"at least one of the {_EXPECTED}", _EXAMPLE)
    for index, layer in enumerate(chosen):
        _check_layer(model, layer)
        others = {id(other): other.name for other in chosen[:index] + chosen[index + 1 :]}
        nested = next((others[id(inner)] for inner in (layer, *all_layers(layer)) if id(inner) in others), None)
        if nested is not None:
            raise ValueError(
                f"`layers` has {layer.name!r}, and {nested!r} too, which is recomputed with it. Leave one of them out."
            )
    return chosen


def _check_layer(model: keras.Model, layer: keras.layers.Layer) -> None:
    """Refuses a layer that can't be recomputed."""
    if not any(layer is known for known in all_layers(model)):
        raise ValueError(f"{layer.name!r} is not a layer of {model.name!r}, nor of a layer in it.")
    if isinstance(layer, keras.layers.InputLayer):
        raise ValueError(f"{layer.name!r} is an input of the model, and computes nothing. Leave it out of `layers`.")
    parents = [
        candidate for candidate in (model, *all_layers(model)) if any(layer is inner for inner in all_layers(candidate))
    ]
    for owner in (layer, *all_layers(layer), *parents):
        check_nesting(layer, owner)
    loop = next((parent for parent in parents if isinstance(parent, keras.layers.RNN)), None)
    if loop is not None:
        raise ValueError(
            f"{layer.name!r} is a cell of {loop.name!r}, which calls it in a loop. Name {loop.name!r} instead."
        )
    if layer.quantization_mode is not None:
        raise ValueError(
            f"{layer.name!r} is quantized, and a quantized layer can't be recomputed alone. Name a block that "
            "contains it."
        )


def _find_layer(model: keras.Model, name: str) -> keras.layers.Layer:
    """The layer with a name; one that is directly in the model has precedence over layers within layers."""
    layers = all_layers(model)
    matches = [layer for layer in layers if layer.name == name]
    top = [layer for layer in model.layers if layer.name == name]
    if len(top) == 1 or len(matches) == 1:
        return (top or matches)[0]
    if matches:
        raise ValueError(
            f"{model.name!r} has {len(matches)} layers named {name!r}. Pass the layers themselves, as in "
            'layers=[model.get_layer("block_0")].'
        )
    names = [layer.name for layer in layers if not isinstance(layer, keras.layers.InputLayer)]
    close = difflib.get_close_matches(name, names, n=3) or names[:10]
    raise ValueError(f"`layers` has {quote(name)}, and no layer of {model.name!r} has that name. Layers: {close}.")
