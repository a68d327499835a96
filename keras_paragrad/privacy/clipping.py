"""Clipping: bounds what one example adds to an update, over the whole gradient or layer by layer."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.arguments import check_number, refusal
from keras_paragrad.compat.layers import may_be_differentiated
from keras_paragrad.engine.probes.trial import is_trial
from keras_paragrad.engine.step.symbolic import build_by_calling
from keras_paragrad.per_example.quantities import Quantities
from keras_paragrad.per_example.step import Step
from keras_paragrad.per_example.units import units_of
from keras_paragrad.per_example.wrapper import PerExampleGradients
from keras_paragrad.privacy.adaptive import AdaptiveClip, ClipState
from keras_paragrad.privacy.refusals import check_added_losses, check_states

PER_LAYER = "per_layer"
# A number for all weights, one for the layers that match a regular expression, equal ones that make up 1, or one that
# follows a quantile.
ClipNorm = float | Mapping[str, float] | str | AdaptiveClip


@keras.saving.register_keras_serializable(package="keras_paragrad")
class PrivateGradients(PerExampleGradients):
    """Replaces the gradient of a batch by the sum of its examples' clipped gradients over the expected batch size.

    Args:
        layer: The model that is trained.
        clip: What each example's gradient is clipped to; see `make_private`.
        expected_batch_size: What the sum is divided by.
        **kwargs: Arguments of `PerExampleGradients`.

    Attributes:
        rows: What Keras's mean divides by: the rows that an update computes, a number or a float32 scalar.
        state: The clip norm that follows a quantile, or `None` if it is fixed.
    """

    def __init__(self, layer: Any, clip: ClipNorm, expected_batch_size: int, **kwargs: Any):
        super().__init__(layer, **{**kwargs, "transform": tf.ones_like})
        self.clip = clip
        self.expected_batch_size = expected_batch_size
        self.rows: Any = None
        # Bypasses Keras's tracking: the model owns its variables.
        self.__dict__["state"] = None

    def call(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if may_be_differentiated() and not is_trial():
            # Before an example has left anything behind.
            build_by_calling(self.layer, inputs)
            check_states(self.layer, inputs)
        return super().call(inputs, *args, **kwargs)

    def bounds(self) -> list[tuple[keras.layers.Layer, float]]:
        """The layers with trainable weights and the bound on each; empty if one number bounds all weights together.

        Raises:
            ValueError: A regular expression matches no layer, or a layer no regular expression.
        """
        return _bounds(self.layer, self.clip) if isinstance(self.clip, str | Mapping) else []

    @contextlib.contextmanager
    def averaging(self, rows: tf.Tensor) -> Iterator[None]:
        """Within, steps are traced of which Keras's mean divides by so many rows of all replicas together."""
        before = self.rows
        # Bypasses Keras's tracking.
        self.__dict__["rows"] = tf.cast(rows, "float32")
        try:
            yield
        finally:
            self.__dict__["rows"] = before

    @property
    def sensitivity(self) -> Any:
        """The largest norm that one example adds to the sum: a number, or a float32 scalar that follows a quantile."""
        state: ClipState | None = self.__dict__["state"]
        if state is not None:
            return state.norm
        if isinstance(self.clip, float):
            return self.clip
        # Of the groups, each of which is clipped by itself.
        return sum(bound**2 for _, bound in self.bounds()) ** 0.5

    def _reweighed(self, quantities: Quantities, norms: Any, factor: tf.Tensor, step: Step) -> list[Any]:
        _check_losses(step)
        # A NaN or an overflow in one group drops the example from all of them.
        counted = tf.cast(tf.math.is_finite(norms), "float32") * self._scale(step)
        state: ClipState | None = self.__dict__["state"]
        if state is not None:
            state.count(norms, step.divisor.terms[0].sample_weight)
        if not (bounds := self.bounds()):
            return quantities.weighted_sums(_within(norms, self.sensitivity, counted), norms)
        sums: list[Any] = [None] * len(quantities.variables)
        for part, bound in _groups(quantities, bounds):
            weights = _within(tf.sqrt(part.squared_norms()) * factor, bound, counted)
            for place, total in enumerate(part.weighted_sums(weights, norms)):
                sums[place] = sums[place] if total is None else total
        return sums

    def _scale(self, step: Step) -> Any:
        """The factor with which the step's sum over examples is divided by the expected batch size."""
        terms = step.divisor.terms
        if self.rows is None or not terms:
            raise ValueError(
                f"{self.name!r} belongs to a private model, whose steps have to be those of its fit: each is an update "
                "with a draw of its own. Call private.fit(x, y, epochs=...) instead of train_on_batch or a loop."
            )
        return (1.0 if all(term.is_sum for term in terms) else self.rows) / self.expected_batch_size

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        clip = dict(self.clip) if isinstance(self.clip, Mapping) else self.clip
        given = {"clip": keras.saving.serialize_keras_object(clip), "expected_batch_size": self.expected_batch_size}
        return {**{name: value for name, value in config.items() if name not in ("transform", "clip_norm")}, **given}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "PrivateGradients":
        config = {**config, "transform": None}
        config["clip"] = keras.saving.deserialize_keras_object(config["clip"], custom_objects)
        return super().from_config(config, custom_objects)  # pyright: ignore[reportReturnType]


def check_clip(clip: Any) -> ClipNorm:
    """The clip norm of `make_private`, checked.

    Raises:
        ValueError: It is no positive number, `"per_layer"`, mapping from regular expressions to numbers, or
            `AdaptiveClip`.
    """
    if isinstance(clip, AdaptiveClip):
        return clip
    # A subclass of str may override comparison.
    if isinstance(clip, str) and str.__eq__(clip, PER_LAYER):
        return PER_LAYER
    if isinstance(clip, Mapping) and clip:
        return {
            _compiling(pattern): float(check_number("clip_norm", each, above=0, example=1.0))
            for pattern, each in clip.items()
        }
    if isinstance(clip, str | Mapping):
        expected = (
            'a positive number, "per_layer", a dictionary from regular expressions of layer names, or AdaptiveClip'
        )
        raise refusal("clip_norm", clip, expected, "1.0")
    return float(check_number("clip_norm", clip, above=0, example=1.0))


def _compiling(pattern: Any) -> str:
    try:
        return re.compile(pattern).pattern
    except (re.error, TypeError) as error:
        raise refusal(
            "clip_norm", {pattern: "..."}, f"regular expressions ({error})", '{"embedding": 0.1, ".*": 1.0}'
        ) from error


def _check_losses(step: Step) -> None:
    """Refuses losses in which an example's share depends on others.

    Raises:
        ValueError: A layer adds a loss, or a mask of the whole batch divides one.
    """
    if step.divisor.model is not None:
        check_added_losses(step.divisor.model)
    masked = [term.loss.name for term in step.divisor.terms if term.mask is not None and not term.is_sum]
    if masked:
        raise ValueError(
            f"{', '.join(masked)} averages over what the masks of the whole batch keep, so the masks of one example "
            "change the gradients of others. Give the loss reduction='sum', so that an example's loss is the sum over "
            "what its own mask keeps."
        )


def _within(norms: tf.Tensor, bound: Any, counted: tf.Tensor) -> tf.Tensor:
    """Each example's weight in the sum: what brings it within the bound, or 0 if it doesn't count."""
    return tf.where(counted > 0, counted * tf.where(norms > bound, bound / norms, 1.0), 0.0)


def _bounds(model: keras.Model, clip: Mapping[str, float] | str) -> list[tuple[keras.layers.Layer, float]]:
    layers = [unit.layer for unit in units_of(model)]
    if clip == PER_LAYER:
        return [(layer, len(layers) ** -0.5) for layer in layers]
    assert isinstance(clip, Mapping)
    names = [_name(layer, model) for layer in layers]
    matching = [next((each for each in clip if re.search(each, name)), None) for name in names]
    for name, pattern in zip(names, matching, strict=True):
        if pattern is None:
            raise ValueError(
                f"clip_norm has no bound for the layer {name!r}, and each layer with weights needs one. Add "
                "'.*': 1.0 to it, last, for the layers that nothing else matches."
            )
    if unused := [pattern for pattern in clip if pattern not in matching]:
        raise ValueError(
            f"The regular expressions {unused} in clip_norm match no layer that those before them don't. The layers "
            f"with trainable weights are {', '.join(names)}."
        )
    return [(layer, clip[pattern]) for layer, pattern in zip(layers, matching, strict=True) if pattern is not None]


def _name(layer: keras.layers.Layer, model: keras.Model) -> str:
    """A layer's path below the model, whose own name is no layer's: a pattern for layers may occur in it."""
    return (layer.path or layer.name).removeprefix(f"{model.name}/")


def _groups(
    quantities: Quantities, bounds: Sequence[tuple[keras.layers.Layer, float]]
) -> list[tuple[Quantities, float]]:
    """The recorded calls of each layer, with its bound; layers that share weights are one group, under the least."""
    by_layer = {id(layer): bound for layer, bound in bounds}
    groups: list[tuple[set[int], list[Any], float]] = []
    for unit, calls in quantities.recorded:
        keys = {id(variable) for variable in unit.rule.variables(unit.layer)} & set(quantities.places)
        shared = [group for group in groups if group[0] & keys]
        groups = [group for group in groups if not group[0] & keys]
        recorded = [each for group in shared for each in group[1]] + [(unit, calls)]
        bound = min([by_layer[id(unit.layer)], *(group[2] for group in shared)])
        groups.append((keys.union(*(group[0] for group in shared)), recorded, bound))
    return [(Quantities(recorded, quantities.variables), bound) for _, recorded, bound in groups]
