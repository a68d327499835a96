"""Rules: how to compute a layer's per-example gradients from its inputs and output cotangents."""

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
    """One recorded call of a layer, with the cotangents of its outputs.

    Attributes:
        layer: The layer.
        arguments: The positional arguments of its `call`.
        keywords: The keyword arguments of its `call`.
        training: Whether it was called in training mode.
        rerun: `rerun(arguments, keywords)` repeats the call with other arguments and returns its outputs.
        recorded: What the rule's `run` stored for its other methods.
        batched: For each of the flattened arguments and keywords, whether it has a row for each example; `None` if
            unknown.
        by_xla: Whether XLA compiles the step, for rules with a faster algorithm in that case.
        beside_plain: Whether the weights' plain gradient is computed in the same graph.
        outputs: The call's floating-point output tensors, in flattened order.
        cotangents: The loss's gradient with respect to each of `outputs` (to the input of the layer's activation, for
            rules with `before_activation`); set by the backward pass, `None` before it.
        gradients: Per-example gradients `(batch, *shape)` that the rule has cached, if recomputing them is expensive.
        original: The unmodified call, if this is a copy with zeros for examples of weight 0; lets a rule reuse what it
            computed for the norms.
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
        """The first argument, `(batch, ...)`; half precision is cast to float32."""
        return widened(tf.convert_to_tensor((*self.arguments, *self.keywords.values())[0]))

    @property
    def tensors(self) -> dict[tuple[str, int], tf.Tensor]:
        """The floating-point tensors with a row for each example, by field and index in the field."""
        assert self.cotangents is not None, "the backward pass has not come to this call"
        size = self.cotangents[0].shape[0]
        flat = keras.tree.flatten((self.arguments, self.keywords))
        batched = self.batched or [tf.is_tensor(value) and value.shape[:1] == [size] for value in flat]
        arguments = {place: value for place, value in enumerate(flat) if batched[place] and value.dtype.is_floating}
        parts = {"arguments": arguments, "outputs": dict(enumerate(self.outputs))}
        parts |= {"cotangents": dict(enumerate(self.cotangents)), "gradients": dict(enumerate(self.gradients or []))}
        return {(part, place): value for part, values in parts.items() for place, value in values.items()}

    def with_tensors(self, tensors: dict[tuple[str, int], tf.Tensor]) -> "Call":
        """A copy of the call with some of its `tensors` replaced."""
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
        """The first cotangent, `(batch, ...)`; half precision is cast to float32."""
        assert self.cotangents is not None, "the backward pass has not come to this call"
        return widened(self.cotangents[0])


class Rule:
    """Computes a layer's per-example gradients; subclass it and decorate the subclass with `register_rule`.

    Only `gradients` is required. The other methods have slow, obvious defaults built on it; override them where the
    result can be computed without materializing a gradient per example. `calls` are all calls of one layer in a step,
    and every returned list has one entry for each of `variables(layer)`, unless stated otherwise. `batch` is the number
    of examples, `shape` the shape of the variable.

    Attributes:
        before_activation: Whether cotangents are taken before the layer's `activation`, rather than at its output.
        serves_overrides: Whether the rule also holds for subclasses of its layers that override the computation.
    """

    before_activation = False
    serves_overrides = False

    def variables(self, layer: keras.layers.Layer) -> list[keras.Variable]:
        """The trainable variables that the rule handles, in the order in which it returns their gradients.

        A layer with any other trainable variable falls back to the generic rule.
        """
        return list(layer.trainable_variables)

    def suits(self, layer: keras.layers.Layer) -> bool:
        """Whether the rule supports the layer's configuration; if not, the generic rule is used."""
        known = {id(variable) for variable in self.variables(layer)}
        return all(id(variable) in known for variable in layer.trainable_variables)

    def run(self, call: Call, function: Callable[..., Any], reads: Any) -> Any:
        """Calls the layer and returns its outputs; override it to record something of the call, or to refuse it.

        Args:
            call: The call; its `outputs` and `cotangents` are not set yet.
            function: The layer's own `call`.
            reads: The `reads.WeightReads` scope in which the call runs.
        """
        return function(*call.arguments, **call.keywords)

    def gradients(self, call: Call) -> list[tf.Tensor]:
        """The per-example gradients of one call, each a `tf.Tensor` of shape `(batch, *shape)`."""
        raise NotImplementedError(f"{type(self).__name__} has to implement gradients(call).")

    def gradients_of_all(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        """The per-example gradients `(batch, *shape)`, summed over the calls of a shared layer."""
        return [tf.add_n(list(parts)) for parts in zip(*map(self.gradients, calls), strict=True)]

    def gradients_to_keep(self, calls: Sequence[Call]) -> list[Any]:
        """As `gradients_of_all`, or each as factored `factored_gradients.Factors` where these take less memory."""
        return self.gradients_of_all(calls)

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        """The squared norms of the per-example gradients, `(batch,)`, one tensor per variable."""
        return [squared_norm(gradient, calls[0].by_xla) for gradient in self.gradients_of_all(calls)]

    def squares(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        """Any number of tensors `(batch, ...)` whose rows sum to each example's total of `squared_norms`.

        Override it if the joint norm of all variables is cheaper, or to leave small reductions to be fused by the
        caller.
        """
        return self.squared_norms(calls)

    def second_moments(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        """The sum over examples of the elementwise squared gradients, each of its variable's shape."""
        return [tf.reduce_sum(tf.square(gradient), 0) for gradient in self.gradients_of_all(calls)]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[Any]:
        """The sum over examples of the gradients times `weights` `(batch,)`, each of its variable's shape.

        In overrides, the calls' tensors are zero for examples of weight 0, even where they were not finite.
        """
        return [tf.tensordot(weights, zeroed(gradient, weights), 1) for gradient in self.gradients_of_all(calls)]


R = TypeVar("R", bound=type[Rule])
_RULES: dict[type, Rule] = {}
# Attributes that a subclass may override without changing the computation.
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
    """Registers a `Rule` subclass for layer classes, replacing any earlier rule.

    It also serves their subclasses, as long as these don't override the computation.

    Args:
        *layers: Layer classes.

    Returns:
        A class decorator.

    Raises:
        TypeError: An argument is not a layer class, or the decorated class is not a `Rule`.

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
    """The registered rule that supports a layer, or `None`."""
    for kind in type(layer).__mro__:
        rule = _RULES.get(kind)
        if rule is not None:
            computes = rule.serves_overrides or not _computes_otherwise(type(layer), kind)
            return rule if computes and rule.suits(layer) else None
    return None


def _computes_otherwise(kind: type, registered: type) -> bool:
    """Whether a class overrides something of the registered class that its `call` may depend on."""
    between = kind.__mro__[: kind.__mro__.index(registered)]
    overridden = {name for each in between for name in vars(each) if hasattr(registered, name)}
    return any(not name.startswith("__") and name not in _HARMLESS for name in overridden)


def wide(dtype: tf.DType) -> tf.DType:
    """Float32 for half precision, otherwise the dtype itself: squares of small gradients need the range."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor in its `wide` dtype."""
    return tf.cast(tensor, wide(tensor.dtype))


def zeroed(rows: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """A `(batch, ...)` tensor with zeros in the rows of examples of weight 0, since 0 times NaN is NaN."""
    kept = tf.reshape(tf.not_equal(weights, 0), [-1, *[1] * (rows.shape.rank - 1)])
    return tf.where(kept, rows, tf.zeros([], rows.dtype))


def squared_norm(gradients: tf.Tensor, by_xla: bool = False) -> tf.Tensor:
    """The squared norm of each row of a `(batch, ...)` tensor, `(batch,)`."""
    if by_xla:
        return row_sums(tf.square(gradients), by_xla)
    # XLA lacks this op. It takes a root that is then squared, but never materializes the squares: for rows of 8192 it
    # takes a third of the time.
    return tf.square(tf.math.reduce_euclidean_norm(gradients, list(range(1, gradients.shape.rank))))
