"""Layers of every kind that has a per-example rule, as Hypothesis draws them from what the rules declare."""

from collections.abc import Callable
from typing import NamedTuple

import hypothesis.strategies as st
import keras
import numpy as np

import keras_paragrad.per_example.rules  # noqa: F401  (registers all)
from keras_paragrad.per_example.rule import registered_by_name


class LayerCase(NamedTuple):
    """A layer, what it is fed, and how many examples.

    Attributes:
        make: Makes the layer.
        shape: An example's shape.
        vocabulary: How many numbers there are, for inputs of integers; 0 for floats.
        rows: How many examples.
        jit_compile: Whether to compile with XLA.
    """

    make: Callable[[], keras.layers.Layer]
    shape: tuple[int, ...]
    vocabulary: int = 0
    rows: int = 3
    jit_compile: bool = False

    def model(self, dtype: str = "float32") -> keras.Model:
        """The layer as a model, with weights that are neither zero nor one.

        Args:
            dtype: The layer's dtype policy.
        """
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(dtype)
        try:
            layer = self.make()
        finally:
            keras.config.set_dtype_policy(before)
        model = keras.Sequential([keras.Input(self.shape, dtype=self._input_dtype(dtype)), layer])
        randomize(model)
        return model

    def inputs(self, dtype: str = "float32") -> np.ndarray:
        inputs = some_inputs((self.rows, *self.shape), self.vocabulary)
        return inputs if self.vocabulary else inputs.astype(self._input_dtype(dtype))

    def _input_dtype(self, dtype: str) -> str:
        return "int64" if self.vocabulary else "float64" if dtype == "float64" else "float32"


def randomize(model: keras.Model) -> None:
    """Gives a model weights that are neither zero nor one."""
    generator = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(generator.normal(size=variable.shape) * 0.5)


def some_inputs(shape: tuple[int, ...], vocabulary: int = 0) -> np.ndarray:
    """Random inputs; with repetitions, if they are numbers."""
    generator = np.random.default_rng(0)
    return generator.integers(0, vocabulary, shape) if vocabulary else generator.normal(size=shape).astype("float32")


@st.composite
def _drawn(draw, layer, rule):
    case = rule.case(layer, lambda values: draw(st.sampled_from(values)))
    return LayerCase(*case, draw(st.sampled_from([3, 1, 2, 4, 5])), draw(st.booleans()))


def drawn() -> dict[str, st.SearchStrategy[LayerCase]]:
    """Cases of each layer that has a rule now, by its name and what a variant is for."""
    return {name: _drawn(layer, rule) for name, (layer, rule) in registered_by_name().items()}


# Tests register rules of their own while they run, and not when they are imported.
RULES = {name: rule for name, (_, rule) in registered_by_name().items()}
DRAWN = drawn()
