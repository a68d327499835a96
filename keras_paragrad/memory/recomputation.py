"""`recompute`: gradient checkpointing in ordinary `fit`."""

from typing import Any

import keras

from keras_paragrad.arguments import check_instance, check_integer
from keras_paragrad.engine.step.builder import StepBuilder
from keras_paragrad.engine.step.recompute import recompute_layer
from keras_paragrad.engine.step.segments import recompute_parts
from keras_paragrad.memory.layer_names import select_layers
from keras_paragrad.memory.segments import cut_every, cut_where_it_pays


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
            model's bytes stored per FLOP, except the last, whose backward pass comes first.
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

    def __init__(self, model: keras.Model, layers: Any = "auto", *, every: int | None = None):
        check_instance("model", model, keras.Model, "a Keras model")
        every = check_integer("every", every, most=2**31 - 1, example=2, optional=True)
        automatic = isinstance(layers, str) and layers == "auto"
        if every is not None and not automatic:
            raise ValueError(
                f"`every` and `layers` both say what to recompute. Write every={every}, or layers=... alone."
            )
        self.model = model
        if every is not None or automatic:
            cut = cut_where_it_pays(model) if every is None else cut_every(model, every)
            self._undo = [recompute_parts(model, cut.functional, cut.segments)]
            if cut.expects:
                print(cut.expects)
        else:
            self._undo = [recompute_layer(layer) for layer in select_layers(model, layers)]
        StepBuilder.of(model).retrace()

    def undo(self) -> None:
        """Ends the recomputation."""
        for undo in self._undo:
            undo()
        self._undo = []
        StepBuilder.of(self.model).retrace()

    def __enter__(self) -> "recompute":
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()
