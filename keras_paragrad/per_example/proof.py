"""The proof of a model's units: on a few rows, the sum of the examples' gradients is the plain gradient."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import called_for_training
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.losses.known_classes import computes_rows_independently
from keras_paragrad.engine.proof.pure_function import uses_half_precision, value_of
from keras_paragrad.engine.tracing.effects import assigned_resources
from keras_paragrad.engine.tracing.untouched import untouched
from keras_paragrad.engine.trials.trial import SIZES, Inconclusive, run_trial, synthetic_rows
from keras_paragrad.per_example.calls import WeightReads
from keras_paragrad.per_example.capture import Capture, has_axes
from keras_paragrad.per_example.quantities import Quantities
from keras_paragrad.per_example.units import Unit
from keras_paragrad.storage.model_variables import handles_of, held_by_copies

_ROWS = 3
# Differences up to these are rounding, in single and half precision: relative to the weight's gradient, and to all.
# Faults are off by most of a weight's gradient.
_OF_WEIGHT, _OF_ALL = (1e-2, 0.1), (1e-5, 0.03)


def find_wrong_sum(
    layer: keras.layers.Layer,
    units: Sequence[Unit],
    arguments: tuple[Structure, ...],
    keywords: dict[str, Any],
    graph: tf.Graph,
    otherwise: keras.Variable | None,
) -> keras.Variable | None:
    """The weight whose examples' gradients differ most from its plain gradient, if one does; `otherwise` if all fails.

    `graph` is one of the call, which shows what it assigns to.
    Keras's own layers with this package's rules are not tried: tests prove them.
    """
    if not units or (all(map(is_own, units)) and computes_rows_independently(layer)):
        return None
    training = keywords.get("training")
    call = _Call(
        graph, layer, units, (arguments, keywords), called_for_training() if training is None else bool(training)
    )
    size = next((value.shape[0] for value in call.tensors if has_axes(value)), None)
    choices = [(_ROWS, length) for length in SIZES] + [(size, SIZES[0])] * (size is not None)
    question = f"whether the gradients of the examples sum to the gradient of {layer.name!r}"
    return run_trial(call.try_rows, *choices, otherwise=otherwise, question=None if otherwise is not None else question)


def is_own(unit: Unit) -> bool:
    """Whether a unit's rule is one of this package's."""
    return type(unit.rule).__module__.startswith("keras_paragrad.")


class _Call(NamedTuple):
    """A call of a layer that has these units: its arguments and keywords, and a graph of it."""

    graph: tf.Graph
    layer: keras.layers.Layer
    units: Sequence[Unit]
    arguments: Structure
    training: bool

    @property
    def tensors(self) -> list[Any]:
        """The arguments that are tensors."""
        return [value for value in keras.tree.flatten(self.arguments) if tf.is_tensor(value)]

    def try_rows(self, choice: tuple[int, int]) -> keras.Variable | None:
        """The weight that differs on some rows, whose axes of unknown size get a size; a `choice` of both."""
        if any(id(resource) not in handles_of(self.layer.variables) for resource in assigned_resources(self.graph)):
            raise Inconclusive("the layer assigns to a variable that is unknown to Keras")
        tensors, weights = self._few_rows(*choice), self.layer.trainable_variables
        variables = self.layer.variables
        values = [(variable, value_of(variable)) for variable in variables]
        with held_by_copies(values) as copies:
            held = [copies[next(i for i, each in enumerate(variables) if each is weight)] for weight in weights]

            def compute() -> list[Sequence[Any]]:
                gradients = []
                for differentiate in (self._gradients, self._sums_of_examples):
                    # From the same state, with the same random numbers.
                    for copy, (_, value) in zip(copies, values, strict=True):
                        copy.assign(value)
                    gradients.append(differentiate(tensors, held))
                return gradients

            # Eagerly: a trace of both passes would double the time to the first step.
            plain, sums = compute()
            different = self._largest_difference(plain, sums)
            if different is not None and self._largest_difference(plain, compute()[0]) is not None:
                raise Inconclusive("the layer draws random numbers without a Keras seed")
        return None if different is None else weights[different]

    def _few_rows(self, rows: int, size: int) -> list[tf.Tensor]:
        """The tensors with few rows: real ones if the arguments have values, else made-up ones."""
        batch = next((value.shape[0] for value in self.tensors if has_axes(value)), None)

        def take(value: Any) -> tf.Tensor:
            has_rows = has_axes(value) and value.shape[0] == batch
            if hasattr(value, "numpy"):
                return value[:rows] if has_rows else value
            shape = value.shape[1:] if has_rows else value.shape
            drawn = synthetic_rows(tf.TensorSpec([None, *shape], value.dtype), rows, seed=0, size=size)
            return drawn if has_rows else drawn[0]

        return [take(value) for value in self.tensors]

    def _target(self, call: Any, reads: WeightReads, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """A scalar that depends on every output and added loss of a call, on each in another way."""
        given = iter(tensors)
        arguments, keywords = keras.tree.map_structure(
            lambda value: next(given) if tf.is_tensor(value) else value, self.arguments
        )
        with untouched(self.layer, contextlib.nullcontext()):
            outputs = keras.tree.flatten(call(*arguments, **{**keywords, "training": self.training}))
        tensors = [output for output in (*outputs, *reads.losses) if tf.is_tensor(output)]
        return tf.add_n([_contract(tensor) for tensor in tensors if tensor.dtype.is_floating])

    def _gradients(self, tensors: Sequence[tf.Tensor], held: Sequence[tf.Variable]) -> Sequence[Any]:
        with tf.GradientTape() as tape, WeightReads((), skip_plain_gradients=False) as reads:
            target = self._target(self.layer, reads, tensors)
        return tape.gradient(target, held)

    def _sums_of_examples(self, tensors: Sequence[tf.Tensor], _: Any) -> Sequence[Any]:
        anchor = tf.zeros([])
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(anchor)
            capture = Capture(self.layer, self.units, anchor, skip_plain_gradients=True)
            target = self._target(capture, capture.reads, tensors)
        tape.gradient(target, anchor)
        quantities = Quantities(capture.recorded, self.layer.trainable_variables)
        if not quantities.recorded:
            return [None] * len(quantities.variables)
        return quantities.weighted_sums(tf.ones(tf.reshape(quantities.batch, [1])))

    def _largest_difference(self, first: Sequence[Any], second: Sequence[Any]) -> int | None:
        """The index of the weight whose two gradients differ most; `None` if all differ by rounding."""
        half = uses_half_precision(self.layer)
        pairs = [[_float(gradient) for gradient in pair] for pair in zip(first, second, strict=True)]
        norms = np.array([[tf.norm(one - other), tf.norm(one), tf.norm(other)] for one, other in pairs], "float64")
        if not np.isfinite(norms).all():
            raise Inconclusive("the gradients are not finite")
        largest = norms[:, 1:].max(1)
        excess = norms[:, 0] - _OF_WEIGHT[half] * largest - _OF_ALL[half] * np.sqrt(np.sum(largest**2))
        index = int(np.argmax(excess))
        return index if excess[index] > 0 else None


def _contract(output: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(_float(output), [-1])
    return tf.reduce_sum(flat * tf.cos(tf.range(tf.size(flat), dtype="float32")))


def _float(tensor: Any) -> tf.Tensor:
    """A gradient or an output in float32; zero for none."""
    return tf.zeros([]) if tensor is None else tf.cast(tf.convert_to_tensor(tensor), "float32")
