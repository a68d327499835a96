"""Clipping: bounds what one example adds to an update, over the whole gradient or layer by layer.

A unit is a layer with weights, whose per-example gradients one rule computes.
"""

import contextlib
import re
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import check_number, did_you_mean, refusal
from keras_paragrad.compat.layers import call_model, may_be_differentiated
from keras_paragrad.compat.model import added_losses
from keras_paragrad.compat.types import Config, GradientTensor, Structure
from keras_paragrad.engine.losses.known_classes import computes_rows_independently
from keras_paragrad.engine.proof.model_proof import state_owners
from keras_paragrad.engine.proof.pure_function import PureFunction
from keras_paragrad.engine.step.building import build_by_calling
from keras_paragrad.engine.trials.trial import SIZES, STATE, TINY, is_trial, run_trial, synthetic_rows
from keras_paragrad.per_example.mixing_layers import change_rows
from keras_paragrad.per_example.quantities import Quantities
from keras_paragrad.per_example.step import CapturedCall
from keras_paragrad.per_example.units import units_of
from keras_paragrad.per_example.wrapper import PerExampleGradients
from keras_paragrad.privacy.adaptive import AdaptiveClip, ClipState

PER_LAYER = "per_layer"
# One norm for all weights, norms by regular expression of layer names, "per_layer", or an adaptive norm.
ClipNorm = float | Mapping[str, float] | str | AdaptiveClip
# For each layer that was probed, the names of its sublayers whose states depend on the examples.
_STATEFUL: "weakref.WeakKeyDictionary[keras.layers.Layer, list[str]]" = weakref.WeakKeyDictionary()


@keras.saving.register_keras_serializable(package="keras_paragrad")
class PrivateGradients(PerExampleGradients):
    """Replaces the gradient of a batch by the sum of its examples' clipped gradients over the expected batch size.

    Attributes:
        rows: The rows that an update computes, by which Keras's mean divides: a number or a float32 scalar.
        state: The adaptive clip norm, or `None` if it is fixed.
    """

    def __init__(self, layer: keras.Model, clip: ClipNorm, expected_batch_size: int, **kwargs: Any):
        options: dict[str, Any] = {**kwargs, "transform": tf.ones_like}
        super().__init__(layer, **options)
        self.clip = clip
        self.expected_batch_size = expected_batch_size
        self.rows: tf.Tensor | int | None = None
        # Bypasses Keras's tracking: the model owns its variables.
        self.__dict__["state"] = None

    def call(self, inputs: Structure, *args: Any, **kwargs: Any) -> Structure:
        if may_be_differentiated() and not is_trial():
            # Before any example could change a state.
            build_by_calling(self.layer, inputs)
            self._check_states(inputs)
        return super().call(inputs, *args, **kwargs)

    def _check_states(self, inputs: Structure) -> None:
        """Refuses layers whose states depend on the examples: states get no noise."""
        if self.layer not in _STATEFUL:
            _STATEFUL[self.layer] = layers_storing_examples(self.layer, inputs)
        if names := _STATEFUL[self.layer]:
            raise ValueError(
                f"Training changes a state of {', '.join(names)} as a function of the examples, and a state gets no "
                "noise: it would be saved with the weights. Leave out what assigns to it in training, or compute it "
                "beforehand from public rows."
            )

    def bounds(self) -> list[tuple[keras.layers.Layer, float]]:
        """The layers with trainable weights and their clip norms; empty if one norm bounds all weights together."""
        return _bounds(self.layer, self.clip) if isinstance(self.clip, str | Mapping) else []

    @contextlib.contextmanager
    def averaging(self, rows: tf.Tensor) -> Generator[None]:
        """Context in which traced steps divide means by `rows`, counted over all replicas."""
        previous = self.rows
        # Bypasses Keras's tracking.
        self.__dict__["rows"] = tf.cast(rows, "float32")
        try:
            yield
        finally:
            self.__dict__["rows"] = previous

    @property
    def sensitivity(self) -> tf.Tensor | float:
        """The largest norm that one example adds to the sum: a number, or a float32 scalar if the clip adapts."""
        state: ClipState | None = self.__dict__["state"]
        if state is not None:
            return state.norm
        if isinstance(self.clip, float):
            return self.clip
        # Each layer's gradient is clipped separately.
        return sum(bound**2 for _, bound in self.bounds()) ** 0.5

    def _reweighted_gradients(
        self, quantities: Quantities, norms: tf.Tensor, factor: tf.Tensor, call: CapturedCall
    ) -> list[GradientTensor | None]:
        """Each weight's sum of clipped gradients, or `None`.

        `factor` scales norms in `quantities` to norms for each example's own loss, as `norms` are.
        """
        _check_losses(call)
        # A NaN or an overflow in one group drops the example from all of them.
        unclipped_weights = tf.cast(tf.math.is_finite(norms), "float32") * self._scale(call)
        state: ClipState | None = self.__dict__["state"]
        if state is not None:
            state.count(norms, call.loss.terms[0].sample_weight)
        if not (bounds := self.bounds()):
            return quantities.weighted_sums(_clipped_weights(norms, self.sensitivity, unclipped_weights), norms)
        sums: list[GradientTensor | None] = [None] * len(quantities.variables)
        for part, bound in _groups(quantities, bounds):
            weights = _clipped_weights(tf.sqrt(part.squared_norms()) * factor, bound, unclipped_weights)
            # A weight is in one group, and its sum is `None` in all others.
            for index, total in enumerate(part.weighted_sums(weights, norms)):
                sums[index] = sums[index] if total is None else total
        return sums

    def _scale(self, call: CapturedCall) -> tf.Tensor | float:
        """The factor from the step's mean or sum over examples to a sum over the expected batch size."""
        terms = call.loss.terms
        if self.rows is None or not terms:
            raise ValueError(
                f"{self.name!r} belongs to a private model, whose steps have to run in its own fit: each update draws "
                "its batch. Call private.fit(x, y, epochs=...) instead of train_on_batch or a loop."
            )
        return (1.0 if all(term.is_sum for term in terms) else self.rows) / self.expected_batch_size

    def get_config(self) -> Config:
        config = super().get_config()
        clip = dict(self.clip) if isinstance(self.clip, Mapping) else self.clip
        added = {"clip": keras.saving.serialize_keras_object(clip), "expected_batch_size": self.expected_batch_size}
        return {**{name: value for name, value in config.items() if name not in ("transform", "clip_norm")}, **added}

    @classmethod
    def from_config(cls, config: Config, custom_objects: dict[str, type] | None = None) -> "PrivateGradients":
        config = {**config, "transform": None}
        config["clip"] = keras.saving.deserialize_keras_object(config["clip"], custom_objects)
        return super().from_config(config, custom_objects)  # pyright: ignore[reportReturnType]


def check_clip(clip: object) -> ClipNorm:
    """Checks the argument `clip_norm` of `make_private`; returns it, with numbers as floats."""
    if isinstance(clip, AdaptiveClip) or (isinstance(clip, str) and clip == PER_LAYER):
        return clip
    if isinstance(clip, Mapping) and clip:
        return {
            _check_pattern(pattern): float(check_number("clip_norm", bound, above=0, example=1.0))
            for pattern, bound in clip.items()
        }
    if isinstance(clip, str | Mapping):
        expected = (
            'a positive number, "per_layer", a dictionary from regular expressions of layer names, or AdaptiveClip'
        )
        misspelt = isinstance(clip, str) and did_you_mean(clip, [PER_LAYER])
        raise refusal("clip_norm", clip, expected, repr(PER_LAYER) if misspelt else "1.0")
    return float(check_number("clip_norm", clip, above=0, example=1.0))


def _check_pattern(pattern: Any) -> str:
    """Refuses a pattern that is not a regular expression; returns it."""
    try:
        return re.compile(pattern).pattern
    except (re.error, TypeError) as error:
        raise refusal(
            "clip_norm", {pattern: "..."}, f"regular expressions ({error})", '{"embedding": 0.1, ".*": 1.0}'
        ) from error


def _check_losses(call: CapturedCall) -> None:
    """Refuses losses in which one example's share depends on the other examples."""
    if call.loss.model is not None and added_losses(call.loss.model):
        raise ValueError(
            "A layer adds a loss with add_loss() or an activity regularizer. It is not clipped per example. Make it a "
            "part of the loss that is passed to compile, or remove it; regularizers of weights are allowed."
        )
    masked = [term.loss.name for term in call.loss.terms if term.mask is not None and not term.is_sum]
    if masked:
        raise ValueError(
            f"{', '.join(masked)} averages over what the masks of the whole batch keep, so one example's mask changes "
            "the gradients of others. Give the loss reduction='sum', so that an example's loss is the sum over what "
            "its own mask keeps."
        )


def _clipped_weights(norms: tf.Tensor, bound: tf.Tensor | float, unclipped: tf.Tensor) -> tf.Tensor:
    """Each example's weight in the sum: its unclipped weight, times the factor that brings its norm within the bound.

    It is 0 where the unclipped weight is 0, even if the norm isn't finite.
    """
    return tf.where(unclipped > 0, unclipped * tf.where(norms > bound, bound / norms, 1.0), 0.0)


def _bounds(model: keras.Model, clip: Mapping[str, float] | str) -> list[tuple[keras.layers.Layer, float]]:
    """Each layer with its bound: `1 / sqrt(layers)` for all, or the first matching pattern's."""
    layers = [unit.layer for unit in units_of(model)]
    if clip == PER_LAYER:
        return [(layer, len(layers) ** -0.5) for layer in layers]
    assert isinstance(clip, Mapping)
    # Paths below the model: a pattern for layers may occur in the model's name.
    names = [(layer.path or layer.name).removeprefix(f"{model.name}/") for layer in layers]
    matching = [next((pattern for pattern in clip if re.search(pattern, name)), None) for name in names]
    for name, pattern in zip(names, matching, strict=True):
        if pattern is None:
            raise ValueError(
                f"clip_norm has no bound for the layer {name!r}, and each layer with weights needs one. Add '.*': "
                "1.0 to it, last, for the layers that nothing else matches."
            )
    if unused := [pattern for pattern in clip if pattern not in matching]:
        raise ValueError(
            f"The regular expressions {unused} in clip_norm match no layer that earlier ones don't. The "
            f"layers with trainable weights are {', '.join(names)}."
        )
    return [(layer, clip[pattern]) for layer, pattern in zip(layers, matching, strict=True) if pattern is not None]


def _groups(
    quantities: Quantities, bounds: Sequence[tuple[keras.layers.Layer, float]]
) -> list[tuple[Quantities, float]]:
    """Groups recorded calls by layer, each with its bound; layers that share weights form one, with the least bound."""
    by_layer = {id(layer): bound for layer, bound in bounds}
    groups: list[tuple[set[int], list[Any], float]] = []
    for unit, calls in quantities.recorded:
        keys = {id(variable) for variable in unit.rule.variables(unit.layer)} & set(quantities.indices)
        shared = [group for group in groups if group[0] & keys]
        groups = [group for group in groups if not group[0] & keys]
        recorded = [call for group in shared for call in group[1]] + [(unit, calls)]
        bound = min([by_layer[id(unit.layer)], *(group[2] for group in shared)])
        groups.append((keys.union(*(group[0] for group in shared)), recorded, bound))
    return [(Quantities(recorded, quantities.variables), bound) for _, recorded, bound in groups]


_ROWS = 8
# The ranges of rows. The second, larger one also moves minima and maxima.
_RANGES = ((0.1, 0.9), (-1e3, 1e3))


def layers_storing_examples(model: keras.layers.Layer, *arguments: Any) -> list[str]:
    """Finds layers whose training changes a non-trainable state depending on the examples.

    Ignores batch normalization, and states that don't depend on data, such as seeds and counters.
    """

    def find(size: int):
        owners = state_owners(model)
        if not owners or computes_rows_independently(model):
            return []
        compute = PureFunction(model, lambda inputs: _train(model, inputs))
        # The second draw also has other tokens.
        first, second = (
            synthetic_rows(arguments, _ROWS, seed=seed, size=size, low=low, high=high)
            for seed, (low, high) in enumerate(_RANGES)
        )
        (_, one), (_, other) = map(compute, change_rows(first, second, list(range(_ROWS))))
        names = [
            owners[id(variable)]
            for variable, *values in zip(compute.variables, one, other, strict=True)
            if id(variable) in owners and not np.allclose(*values, rtol=STATE, atol=TINY, equal_nan=True)
        ]
        return list(dict.fromkeys(names))

    return run_trial(find, *SIZES, otherwise=[], question="whether states of layers depend on the examples")


def _train(model: keras.layers.Layer, inputs: tuple[Structure, ...]) -> list[tf.Tensor]:
    """The outputs and added losses of a call in training, for its changes of state."""
    outputs = call_model(model, *inputs, training=True)
    return [tensor for tensor in (*keras.tree.flatten(outputs), *added_losses(model)) if tf.is_tensor(tensor)]
