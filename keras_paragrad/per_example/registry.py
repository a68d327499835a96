"""Registers the rules that compute the per-example gradients of layers."""

from collections.abc import Callable
from typing import TypeVar

import keras

from keras_paragrad.arguments import quote
from keras_paragrad.per_example.rule import Rule

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
            return next((each for each in (*rule.variants, rule) if each.suits(layer)), None)
    return None


def registered_by_name() -> dict[str, tuple[type[keras.layers.Layer], Rule]]:
    """Each registered rule and variant, by layer and configuration: "Dense", "Dense with LoRA"."""
    return {
        f"{layer.__name__} {each.configuration}".strip(): (layer, each)
        for layer, rule in _RULES.items()
        for each in (rule, *rule.variants)
    }


def _overrides_computation(kind: type, registered: type) -> bool:
    """Whether a class overrides an attribute of the registered class that its `call` may depend on."""
    between = kind.__mro__[: kind.__mro__.index(registered)]
    overridden = {name for each in between for name in vars(each) if hasattr(registered, name)}
    return any(not name.startswith("__") and name not in _NOT_COMPUTED_FROM for name in overridden)
