"""`Rule`: how to compute a layer's per-example gradients from its inputs and output cotangents; and `register_rule`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import keras
import tensorflow as tf

from keras_paragrad.arguments import quote
from keras_paragrad.compat.types import Structure
from keras_paragrad.per_example.calls import Call, WeightReads
from keras_paragrad.sums import row_sums

# Makes gradients, `(batch, *shape)`, from their factors.
FactorLayout = Callable[..., Any]


class Factors(NamedTuple):
    """Factored per-example gradients of one weight: rows of an embedding table, or the factors of a matrix product.

    Attributes:
        tensors: The factors, each `(batch, ...)`. The gradients are linear in the last one.
        layout: Computes the gradients, `(batch, *shape)`, from the factors. Layouts that compare equal are
            interchangeable.
    """

    tensors: Sequence[Any]
    layout: FactorLayout

    def materialized(self) -> Any:
        """The gradients, `(batch, *shape)`."""
        return self.layout(*self.tensors)

    @classmethod
    def of(cls, gradients: "tf.Tensor | Factors") -> "Factors":
        """Returns `Factors` unchanged; wraps plain gradients as their only factor."""
        return gradients if isinstance(gradients, Factors) else cls([gradients], _identity)


def _identity(gradients: Any) -> Any:
    return gradients


# A weight's per-example gradients: a tensor `(batch, *shape)`, or its factors.
ExampleRows = tf.Tensor | Factors
# A sum of gradients over examples, in the shape of the weight; sparse for the rows of an embedding table.
GradientSum = tf.Tensor | tf.IndexedSlices
T = TypeVar("T")


class Pick(Protocol):
    def __call__(self, values: Sequence[T], /) -> T: ...


class RuleCase(NamedTuple):
    """A layer and its inputs, on which the tests compare a rule with a loop over the examples.

    Attributes:
        make: Creates the layer.
        shape: The shape of an example.
        vocabulary: How many distinct integers the inputs have; 0 for inputs of floats.
    """

    make: Callable[[], keras.layers.Layer]
    shape: tuple[int, ...]
    vocabulary: int = 0


class Rule:
    """Computes a layer's per-example gradients; subclass it and decorate the subclass with `register_rule`.

    Only `gradients` is required. The other methods have slow, obvious defaults built on it; override them where the
    result can be computed without materializing a gradient per example. `calls` are all calls of one layer in a step,
    and every returned list has one entry for each of `variables(layer)`, unless stated otherwise. `batch` is the number
    of examples, `shape` the shape of the variable.

    ===============================  =============================================
    method                           returns, for each variable
    ===============================  =============================================
    `gradients(call)`                `tf.Tensor` `(batch, *shape)`
    `gradients_of_all(calls)`        `tf.Tensor` `(batch, *shape)`
    `gradients_to_keep(calls)`       the same, or `Factors`
    `squared_norms(calls)`           any number of `tf.Tensor` `(batch, ...)`
    `second_moments(calls)`          `tf.Tensor` of `shape`
    `weighted_sums(calls, weights)`  `tf.Tensor` of `shape`, or `tf.IndexedSlices`
    ===============================  =============================================

    Attributes:
        before_activation: Whether cotangents are taken before the layer's `activation`, rather than at its output.
        serves_overrides: Whether the rule also holds for subclasses of its layers that override the computation.
        formula: An example's gradient, in Markdown. This and `norms_without_gradients` are for the documentation's
            table of the rules in this package.
        norms_without_gradients: When norms are computed without materializing the gradients, in Markdown.
        variants: Rules for the same layers in other configurations; the first that suits a layer takes precedence.
        configuration: What a variant is for, such as "with LoRA".
    """

    before_activation: bool = False
    serves_overrides: bool = False
    formula: str = ""
    norms_without_gradients: str = "no"
    variants: Sequence["Rule"] = ()
    configuration: str = ""

    def case(self, layer: type[keras.layers.Layer], pick: Pick) -> RuleCase:
        """A layer to test the rule with; needed for the rules in this package only.

        Args:
            layer: One of the layer classes that the rule is registered for.
            pick: Draws one of the given values, such as `pick([True, False])`. Tests begin with the first of each, so
                that should be the value with which most can go wrong.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no test case for {layer.__name__}. Implement case(layer, pick), as in "
            "keras_paragrad/per_example/rules/prelu.py."
        )

    def variables(self, layer: keras.layers.Layer) -> list[keras.Variable]:
        """The trainable variables that the rule handles, in the order in which it returns their gradients.

        A layer with any other trainable variable falls back to the generic rule.
        """
        return list(layer.trainable_variables)

    def suits(self, layer: keras.layers.Layer) -> bool:
        """Whether the rule supports the layer's configuration; if not, the generic rule is used."""
        known = {id(variable) for variable in self.variables(layer)}
        return all(id(variable) in known for variable in layer.trainable_variables)

    def run(self, call: Call, function: Callable[..., Structure], reads: WeightReads) -> Structure:
        """Calls the layer and returns its outputs; override it to record something of the call, or to refuse it.

        Args:
            call: The call; its `outputs` and `cotangents` are not set yet.
            function: The layer's own `call`.
            reads: The scope in which the call runs; it tracks which weights are read and assigned.
        """
        return function(*call.arguments, **call.keywords)

    def gradients(self, call: Call) -> list[tf.Tensor]:
        """The per-example gradients of one call, each a `tf.Tensor` of shape `(batch, *shape)`."""
        raise NotImplementedError(f"{type(self).__name__} must implement gradients(call).")

    def gradients_of_all(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        """The per-example gradients `(batch, *shape)`, summed over the calls of a shared layer."""
        return [tf.add_n(list(parts)) for parts in zip(*map(self.gradients, calls), strict=True)]

    def gradients_to_keep(self, calls: Sequence[Call]) -> list[ExampleRows]:
        """Like `gradients_of_all`, but as `Factors` where these take less memory."""
        return list(self.gradients_of_all(calls))

    def squared_norms(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        """Any number of tensors `(batch, ...)` whose rows sum to the squared norm of each example's gradients.

        Small reductions can be left to the caller, who fuses them.
        """
        return [squared_norm(gradient, calls[0].by_xla) for gradient in self.gradients_of_all(calls)]

    def second_moments(self, calls: Sequence[Call]) -> list[tf.Tensor]:
        """The sum over examples of the elementwise squared gradients, each of its variable's shape."""
        return [tf.reduce_sum(tf.square(gradient), 0) for gradient in self.gradients_of_all(calls)]

    def weighted_sums(self, calls: Sequence[Call], weights: tf.Tensor) -> list[GradientSum]:
        """The sum over examples of the gradients times `weights` `(batch,)`, each of its variable's shape.

        In overrides, the calls' tensors are zero for examples of weight 0, even where they were not finite.
        """
        by_xla = calls[0].by_xla
        return [weighted_sum(weights, zeroed(gradients, weights), by_xla) for gradients in self.gradients_of_all(calls)]


def weighted_sum(weights: tf.Tensor, rows: tf.Tensor, by_xla: bool = False) -> tf.Tensor:
    """The sum over examples of `rows`, `(batch, ...)`, times `weights`, `(batch,)`."""
    if by_xla:
        # XLA fuses this with `zeroed` into one loop. On two cores, XLA's product of a vector and a matrix took 27 ms
        # for 1024 rows of 8192, and this 4.4.
        return tf.reduce_sum(rows * tf.reshape(weights, [-1, *[1] * (rows.shape.rank - 1)]), 0)
    size = rows.shape[1:].num_elements()
    if size is None:
        return tf.tensordot(weights, rows, 1)
    # A third of the operations, where the number of examples is not known while tracing.
    matrix = tf.reshape(rows, [-1 if size else tf.shape(weights)[0], size])
    return tf.reshape(tf.matmul(tf.expand_dims(weights, 0), matrix), rows.shape[1:])


def sums_of_biases(
    biases: Callable[[Sequence[Call]], list[tf.Tensor]], calls: Sequence[Call], weights: tf.Tensor
) -> list[tf.Tensor]:
    """The sums over examples of biases' gradients times `weights` `(batch,)`.

    Args:
        biases: Returns the per-example gradients of a layer's biases, each `(batch, size)`.
        calls: The calls, with zeros for examples of weight 0.
        weights: The examples' weights.
    """
    by_xla = calls[0].by_xla
    if calls[0].cotangent.shape.rank == 2:
        return [weighted_sum(weights, bias, by_xla) for bias in biases(calls)]
    # The norms have computed the sums over positions of the original calls, which are reused.
    originals = [call.original or call for call in calls]
    return [weighted_sum(weights, zeroed(bias, weights), by_xla) for bias in biases(originals)]


def zeroed(rows: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """A `(batch, ...)` tensor with zeros in the rows of examples of weight 0, since 0 times NaN is NaN."""
    counts = tf.reshape(tf.not_equal(weights, 0), [-1, *[1] * (rows.shape.rank - 1)])
    return tf.where(counts, rows, tf.zeros([], rows.dtype))


def squared_norm(gradients: tf.Tensor, by_xla: bool = False) -> tf.Tensor:
    """The squared norm of each row of a `(batch, ...)` tensor, `(batch,)`."""
    if by_xla:
        return row_sums(tf.square(gradients), by_xla)
    # XLA lacks this op. It takes a root that is then squared, but never materializes the squares: for rows of 8192 it
    # takes a third of the time.
    return tf.square(tf.math.reduce_euclidean_norm(gradients, list(range(1, gradients.shape.rank))))


R = TypeVar("R", bound=type[Rule])
_RULES: dict[type[keras.layers.Layer], Rule] = {}
# Attributes that a subclass may override without changing the computation.
_NOT_COMPUTED_FROM = {
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
            raise TypeError(f"`layers` must be layer classes, as in register_rule(MyLayer), and one is {quote(layer)}.")

    def register(rule: R) -> R:
        if not (isinstance(rule, type) and issubclass(rule, Rule)):
            raise TypeError(f"register_rule must decorate a subclass of Rule, and decorates {quote(rule)}.")
        _RULES.update(dict.fromkeys(layers, rule()))
        return rule

    return register


def rule_for(layer: keras.layers.Layer) -> Rule | None:
    """The registered rule that supports a layer, or `None`."""
    for kind in type(layer).__mro__:
        rule = _RULES.get(kind)
        if rule is not None:
            if not rule.serves_overrides and _overrides_computation(type(layer), kind):
                return None
            return next((variant for variant in (*rule.variants, rule) if variant.suits(layer)), None)
    return None


def registered_by_name() -> dict[str, tuple[type[keras.layers.Layer], Rule]]:
    """Each registered rule and variant, by layer and configuration: "Dense", "Dense with LoRA"."""
    return {
        f"{layer.__name__} {candidate.configuration}".strip(): (layer, candidate)
        for layer, rule in _RULES.items()
        for candidate in (rule, *rule.variants)
    }


def _overrides_computation(kind: type, registered: type) -> bool:
    """Whether a class overrides an attribute of the registered class that its `call` may depend on."""
    between = kind.__mro__[: kind.__mro__.index(registered)]
    overridden = {name for ancestor in between for name in vars(ancestor) if hasattr(registered, name)}
    return any(not name.startswith("__") and name not in _NOT_COMPUTED_FROM for name in overridden)
