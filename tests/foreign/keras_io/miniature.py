"""What a miniature of one of Keras's examples is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

# Two whole batches and one of three rows.
ROWS, BATCH = 19, 8

Optimizer = Callable[[], keras.optimizers.Optimizer]


class Miniature(NamedTuple):
    """A model as an example of Keras's trains it, in small.

    Attributes:
        group: The class of the census.
        of: The examples that have its structure.
        build: Makes the compiled model, with optimizers that its argument makes.
        data: The arguments of `fit`: arrays of `ROWS` rows, or a function that makes data of a given batch size.
        blocks: What `recompute` is to run again; the layers between the inputs and the outputs, if it can find them.
    """

    group: str
    of: tuple[str, ...]
    build: Callable[[Optimizer], keras.Model]
    data: Any
    blocks: Callable[[Any], list[Any]] | None = None


MINIATURES: dict[str, Miniature] = {}


def miniature(group: str, *of: str, data: Any, blocks: Callable[[Any], list[Any]] | None = None) -> Callable[..., Any]:
    """Adds the decorated function, which makes a compiled model, to `MINIATURES`."""

    def add(build: Any) -> Any:
        MINIATURES[build.__name__] = Miniature(group, of, build, data, blocks)
        return build

    return add


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal values, for each row."""
    return np.random.default_rng(seed).normal(size=(ROWS, *shape)).astype("float32")


def integers(below: int, *shape: int, seed: int = 1) -> np.ndarray:
    """Whole numbers, for each row."""
    return np.random.default_rng(seed).integers(0, below, (ROWS, *shape)).astype("int32")


def dense(*widths: int, inputs: int | tuple[int | None, int]) -> keras.Sequential:
    """A small network with a linear output."""
    shape = inputs if isinstance(inputs, tuple) else (inputs,)
    *hidden, last = widths
    layers = [keras.layers.Dense(width, activation="tanh") for width in hidden]
    return keras.Sequential([keras.Input(shape), *layers, keras.layers.Dense(last)])


def compiled(model: Any, *arguments: Any, **options: Any) -> Any:
    """The model, compiled without XLA, as its programs take longer to compile than to run."""
    model.compile(*arguments, jit_compile=False, **options)
    return model
