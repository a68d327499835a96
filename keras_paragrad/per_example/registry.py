"""A layer's rule: how its per-example gradients follow from what went in and what came back."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_paragrad._keras.objects.layers import mask_of, with_mask
from keras_paragrad.arguments import shown
from keras_paragrad.sums import row_sums


@dataclasses.dataclass
class Call:
    """One call of a layer, and the gradient that came back to it.

    Attributes:
        layer: The layer.
        arguments: The positional arguments its `call` got.
        keywords: The keyword arguments its `call` got.
        training: Whether it was called to train.
        rerun: Does the call again, as it was done; takes other `arguments` and `keywords` in their places.
        recorded: What the rule's `run` kept of it.
        batched: For each of the flattened arguments and keywords, whether it has a row for each example, if known.
        by_xla: Whether the step is compiled by XLA, for rules that have another way then.
        beside_plain: Whether the weights' plain gradient is computed in the same graph.
        outputs: The floating-point tensors to which the cotangents belong.
        cotangents: The loss's gradient with respect to each floating-point tensor that came out (or would have gone
            into the layer's activation, for rules with `before_activation`); filled in by the backward pass.
        gradients: What the rule has computed already, `(batch, ...)`, for rules that take too long to do it again.
        original: The call as it was, if this one holds zeros for examples of weight 0: what was computed of it for the
            norms is not computed again.
    """

    layer: keras.layers.Layer
    arguments: tuple
    keywords: dict[str, Any]
    training: bool
    rerun: Callable[..., Any]
    recorded: Any = None
    batched: Sequence[bool] | None = None
    by_xla: bool = False
    beside_plain: bool = False
    outputs: Sequence[tf.Tensor] = ()
    cotangents: list[tf.Tensor] | None = None
    gradients: list[tf.Tensor] | None = None
    original: "Call | None" = None

    @functools.cached_property
    def input(self) -> tf.Tensor:
        """The first argument, `(batch, ...)`, in float32 unless it is float64 or of integers."""
        return widened(tf.convert_to_tensor((*self.arguments, *self.keywords.values())[0]))

    @property
    def tensors(self) -> dict[tuple[str, int], tf.Tensor]:
        """The floating-point tensors with a row for each example, by what they are and their place in it."""
        assert self.cotangents is not None, "the backward pass has not come to this call"
        size = self.cotangents[0].shape[0]
        flat = keras.tree.flatten((self.arguments, self.keywords))
        batched = self.batched or [tf.is_tensor(value) and value.shape[:1] == [size] for value in flat]
        arguments = {place: value for place, value in enumerate(flat) if batched[place] and value.dtype.is_floating}
        parts = {"arguments": arguments, "outputs": dict(enumerate(self.outputs))}
        parts |= {"cotangents": dict(enumerate(self.cotangents)), "gradients": dict(enumerate(self.gradients or []))}
        return {(part, place): value for part, values in parts.items() for place, value in values.items()}

    def with_tensors(self, tensors: dict[tuple[str, int], tf.Tensor]) -> "Call":
        """The call with others in the places of its `tensors`."""
        flat = keras.tree.flatten((self.arguments, self.keywords))
        parts: dict[str, list] = {"arguments": flat, "outputs": list(self.outputs)}
        parts |= {"cotangents": list(self.cotangents or []), "gradients": list(self.gradients or [])}
        for (part, place), value in tensors.items():
            masked = with_mask(value, mask_of(flat[place])) if part == "arguments" else value
            parts[part][place] = masked
        arguments, keywords = keras.tree.pack_sequence_as((self.arguments, self.keywords), parts["arguments"])
        return dataclasses.replace(
            self,
            arguments=arguments,
            keywords=keywords,
            outputs=parts["outputs"],
            cotangents=parts["cotangents"],
            gradients=parts["gradients"] or None,
            original=self,
        )

    @functools.cached_property
    def cotangent(self) -> tf.Tensor:
        """The first cotangent, `(batch, ...)`, in float32 unless it is float64."""
        assert self.cotangents is not None, "the backward pass has not come to this call"
        return widened(self.cotangents[0])


class Rule:
    """How to get a layer's per-example gradients; subclass it and decorate with `register_rule`.

    `gradients` alone is enough. The others have slow and obvious defaults made of it, to be overridden where there is
    a way that does not write a gradient for each example into memory.

    Attributes:
        before_activation: Whether the cotangent is wanted before the layer's `activation`, rather than at its output.
        serves_overrides: Whether the rule holds for subclasses of its layers that compute something else, too.
    """

    before_activation = False
    serves_overrides = False

    def variables(self, layer: keras.layers.Layer) -> list[keras.Variable]:
        """The weights that the rule knows, in the order in which it returns their gradients.

        A layer that trains any other falls back on the generic rule.
        """
        return list(layer.trainable_variables)

    def suits(self, layer: keras.layers.Layer) -> bool:
        """Whether the rule is right for the layer as it is configured; if not, the generic rule is used."""
        known = {id(variable) for variable in self.variables(layer)}
        return all(id(variable) in known for variable in layer.trainable_variables)

    def run(self, call: Call, function: Callable[..., Any], reads: Any) -> Any:
        """Does the call, and returns its outputs; for rules that have to keep something of it, or to refuse it."""
        return function(*call.arguments, **call.keywords)

    def gradients(self, call: Call) -> list[tf.Tensor]:
        """The gradient of each example for each of `variables(layer)`, `(batch, *shape)`."""
        raise NotImplementedError(f"{type(self).__name__} has to implement gradients(call).")

    def gradients_of_all(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        """The same over all the calls of a layer that a model shares."""
        return [tf.add_n(list(parts)) for parts in zip(*map(self.gradients, calls), strict=True)]

    def gradients_to_keep(self, calls: Sequence[Call]) -> list[Any]:
        """The same, or the `factored_gradients.Factors` that each is made of, where those take less memory."""
        return self.gradients_of_all(calls)

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        """The squared norm of each example's gradient for each of `variables(layer)`, `(batch,)`."""
        return [squared_norm(gradient, calls[0].by_xla) for gradient in self.gradients_of_all(calls)]

    def squares(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        """Any tensors `(batch, ...)` of which a row adds up to the sum of an example's `squared_norms`.

        For rules that have the norm of all weights together for less, or leave small sums to whoever adds up more.
        """
        return self.squared_norms(calls)

    def second_moments(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        """The sum over examples of squared gradients, in the shapes of `variables(layer)`."""
        return [tf.reduce_sum(tf.square(gradient), 0) for gradient in self.gradients_of_all(calls)]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        """The sum over examples of gradients times `weights` `(batch,)`; in the shapes of `variables(layer)`.

        For those who override it, what the calls hold of examples of weight 0 is zero, even where it was not finite.
        """
        return [tf.tensordot(weights, zeroed(gradient, weights), 1) for gradient in self.gradients_of_all(calls)]


R = TypeVar("R", bound=type[Rule])
_RULES: dict[type, Rule] = {}
# What a subclass may override and still compute the same.
_HARMLESS = {
    "_keras_api_export_path",
    "build",
    "build_from_config",
    "compute_mask",
    "compute_output_shape",
    "compute_output_spec",
    "from_config",
    "get_build_config",
    "get_config",
    "load_own_variables",
    "save_own_variables",
}


def register_rule(*layers: type[keras.layers.Layer]) -> Callable[[R], R]:
    """Makes a `Rule` subclass the rule of layer classes, in place of any before.

    It serves their subclasses too, as long as those do not override what is computed.

    Args:
        *layers: Layer classes.

    Returns:
        A class decorator.

    Raises:
        TypeError: What is given are no layer classes, or what is decorated is no `Rule`.

    Example:

    >>> import keras
    >>> from keras_paragrad.per_example import Rule, register_rule
    >>> class Scale(keras.layers.Layer):
    ...     def build(self, input_shape):
    ...         self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones")
    ...     def call(self, inputs):
    ...         return inputs * self.scale
    >>> @register_rule(Scale)
    ... class ScaleRule(Rule):
    ...     def gradients(self, call):
    ...         return [keras.ops.sum(call.input * call.cotangent, axis=range(1, call.input.ndim - 1))]
    """
    for layer in layers:
        if not (isinstance(layer, type) and issubclass(layer, keras.layers.Layer)):
            raise TypeError(f"`layers` are layer classes, as in register_rule(MyLayer), and one is {shown(layer)}.")

    def register(rule: R) -> R:
        if not (isinstance(rule, type) and issubclass(rule, Rule)):
            raise TypeError(f"`rule`, which register_rule decorates, is {shown(rule)}, and must be a subclass of Rule.")
        for layer in layers:
            _RULES[layer] = rule()
        return rule

    return register


def rule_for(layer: keras.layers.Layer) -> Rule | None:
    """The registered rule that suits a layer, or `None`."""
    for kind in type(layer).__mro__:
        rule = _RULES.get(kind)
        if rule is not None:
            computes = rule.serves_overrides or not _computes_otherwise(type(layer), kind)
            return rule if computes and rule.suits(layer) else None
    return None


def _computes_otherwise(kind: type, registered: type) -> bool:
    """Whether a class overrides something of the registered one that its `call` may depend on."""
    between = kind.__mro__[: kind.__mro__.index(registered)]
    overridden = {name for each in between for name in vars(each) if hasattr(registered, name)}
    return any(not name.startswith("__") and name not in _HARMLESS for name in overridden)


def wide(dtype: tf.DType) -> tf.DType:
    """Float32 for half precision, and other dtypes as they are: squares of small gradients need the range."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor in its `wide` dtype."""
    return tf.cast(tensor, wide(tensor.dtype))


def zeroed(rows: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """A `(batch, ...)` tensor with zeros in the rows of examples of weight 0, so that 0 times NaN is no NaN."""
    kept = tf.reshape(tf.not_equal(weights, 0), [-1, *[1] * (rows.shape.rank - 1)])
    return tf.where(kept, rows, tf.zeros([], rows.dtype))


def squared_norm(gradients: tf.Tensor, by_xla: bool = False) -> tf.Tensor:
    """The squared norm of each row of a `(batch, ...)` tensor, `(batch,)`."""
    if by_xla:
        return row_sums(tf.square(gradients), by_xla)
    # XLA does not know it. The root is taken and undone, but squares are never laid out: for rows of 8192, a third of
    # the time.
    return tf.square(tf.math.reduce_euclidean_norm(gradients, list(range(1, gradients.shape.rank))))
