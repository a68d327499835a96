"""Queries about optimizers, and a wrapper that delegates state and settings to `inner_optimizer`.

An optimizer that wraps another, as `LossScaleOptimizer` does, has it as `inner_optimizer`; wrappers nest. One with
`accumulates = True` accumulates gradients, and all-reduces their sum once per update, before clipping; its
`gradient_weight` is a dummy variable, whose "gradient", passed to `apply`, is the micro-batch's `Contribution`.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.check import check_internals
from keras_paragrad.compat.collectives import strategy_name
from keras_paragrad.compat.private import DotNotTrackScope
from keras_paragrad.compat.state import attached, warn_once
from keras_paragrad.compat.types import Config

# Keras's sum of gradients over the replicas, a method of optimizers.
REDUCTION = "_all_reduce_sum_gradients"
_CLIPPING = ("clipnorm", "global_clipnorm", "clipvalue")


def nested_optimizers(optimizer: keras.optimizers.Optimizer | None) -> Iterator[keras.optimizers.Optimizer]:
    """An optimizer and its inner optimizers, from the outermost to the one that updates the weights."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def innermost_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer whose `apply` updates the weights."""
    *_, innermost = nested_optimizers(optimizer)
    return innermost


# Types of attributes that hold no optimizer.
_OF_OTHERS = (keras.layers.Layer, keras.Variable, tf.Variable, tf.Tensor, tf.distribute.Strategy, type)
_LIBRARIES = {"builtins", "keras", "keras_paragrad", "numpy", "tensorflow"}


def held_optimizers(optimizer: keras.optimizers.Optimizer | None) -> list[keras.optimizers.Optimizer]:
    """An optimizer and all optimizers that it holds, in attributes, containers or objects of the user's classes."""
    optimizers: dict[int, keras.optimizers.Optimizer] = {}
    seen: dict[int, object] = {}

    def visit(value: object) -> None:
        if id(value) in seen or isinstance(value, _OF_OTHERS):
            return
        seen[id(value)] = value
        if isinstance(value, keras.optimizers.Optimizer):
            optimizers[id(value)] = value
            # Without what this package attaches, such as an optimizer that wraps this one while `fit` runs.
            own = [attribute for attribute in vars(value).values() if attribute is not attached(value)]
            for attribute in (*own, *getattr(value, "optimizers", ())):
                visit(attribute)
        elif isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif isinstance(value, (list, tuple, set)):
            for item in value:
                visit(item)
        elif type(value).__module__.partition(".")[0] not in _LIBRARIES:
            visit(getattr(value, "__dict__", None))

    visit(optimizer)
    return list(optimizers.values())


def updating_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers that update variables: the innermost one, and the optimizers it holds."""
    return held_optimizers(innermost_optimizer(optimizer))


def unwrap_loss_scale(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The inner optimizer of a `LossScaleOptimizer`; any other optimizer itself."""
    is_wrapper = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_wrapper else optimizer


def find_accumulator(optimizer: keras.optimizers.Optimizer | None) -> Any:
    """The nested optimizer that accumulates gradients, or `None`."""
    return next((inner for inner in nested_optimizers(optimizer) if getattr(inner, "accumulates", False)), None)


def accumulation_steps(optimizer: keras.optimizers.Optimizer) -> int:
    """The number of gradients per update in Keras's own accumulation; 1 without it."""
    return max(inner.gradient_accumulation_steps or 1 for inner in updating_optimizers(optimizer))


def clips_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer clips gradients."""
    return any(getattr(inner, name, None) for inner in updating_optimizers(optimizer) for name in _CLIPPING)


def is_linear(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether a step is the same if the gradients of a row's lookups are added before."""
    only_sgd = all(isinstance(inner, keras.optimizers.SGD) for inner in updating_optimizers(optimizer))
    return only_sgd and not clips_gradients(optimizer)


def warn_of_summed_rows(
    optimizer: keras.optimizers.Optimizer, gradients: Iterable[Any], variables: Iterable[keras.Variable]
) -> None:
    """Warns once that row gradients, as of embeddings, are summed, where Keras squares or clips each lookup by itself.

    Call it for gradients that are made dense. With SGD that doesn't clip, there is no difference.
    """
    names = [v.path for g, v in zip(gradients, variables, strict=True) if isinstance(g, tf.IndexedSlices)]
    if names and not is_linear(optimizer):
        updating = updating_optimizers(optimizer)[0]
        warn_once(
            updating,
            f"{', '.join(names)}: the gradients of all lookups of a row are summed before {updating.name} squares or "
            "clips them. Keras on one device squares and clips the gradient of each lookup by itself, so where a batch "
            "looks a row up more than once, weights differ from Keras's. Slices (microbatch), replicas and shards take "
            "Keras's step; with SGD and no clips, the steps are the same.",
        )


def replace_optimizer(
    model: keras.Model, before: keras.optimizers.Optimizer, after: keras.optimizers.Optimizer
) -> None:
    """Puts an optimizer in the place of another, which the model or its `LossScaleOptimizer` calls."""
    # Bypass tracking, as `compile` does.
    if model.optimizer is before:
        vars(model)["optimizer"] = after
    else:
        vars(model.optimizer)["inner_optimizer"] = after
        # It scales the loss, and the others don't.
        after.loss_scale_factor = None


class UnreducedOptimizers:
    """Optimizers that don't sum gradients over replicas, until `restore`: the gradients are summed already."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[keras.optimizers.Optimizer, dict[str, Any]]] = {}

    def add(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Keeps an optimizer from summing gradients over replicas."""
        attributes = vars(optimizer)
        before = {REDUCTION: attributes[REDUCTION]} if REDUCTION in attributes else {}
        self._before.setdefault(id(optimizer), (optimizer, before))
        # Called with pairs of gradients and variables, `list` returns them unchanged.
        attributes[REDUCTION] = list

    def restore(self) -> None:
        """Restores all the optimizers."""
        for optimizer, before in self._before.values():
            del vars(optimizer)[REDUCTION]
            vars(optimizer).update(before)


def reduces_gradients(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer sums gradients over the replicas, and is not among `UnreducedOptimizers`."""
    return vars(optimizer).get(REDUCTION) is not list


def build_optimizer(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Creates an optimizer's state under the names that Keras gives it, unless it is built already."""
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(list(variables))


_SETTINGS = (
    "weight_decay",
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
    "loss_scale_factor",
)
_METHODS = (
    "add_optimizer_variables",
    "add_variable",
    "add_variable_from_reference",
    "assign",
    "assign_add",
    "assign_sub",
    "exclude_from_weight_decay",
    "scale_loss",
    "set_weights",
    "update_step",
)
# In configs, which Keras prints in its error where a file needs what isn't imported.
_NOTE = "to load this"
_HOW_TO_LOAD = "import keras_paragrad before keras.models.load_model(path), or load_model(path, compile=False)"
# The attributes through which `tf.train.Checkpoint` finds an optimizer's state.
_STATE = ("_variables", "_iterations", "_learning_rate", "_inner_optimizers")


class WrappingOptimizer(keras.optimizers.Optimizer):
    """An optimizer that shares the settings, counters, methods and saved state of `inner_optimizer`.

    A setting that only the inner optimizer has, such as `momentum`, is read and set there as well.

    Checkpoints and weights files of the wrapper and of the inner optimizer alone are interchangeable: a subclass saves
    its state in attributes of its own.

    Args:
        inner_optimizer: The `keras.optimizers.Optimizer` that updates the weights.
        name: The wrapper's name.
    """

    def __init__(self, inner_optimizer: keras.optimizers.Optimizer, name: str | None = None):
        check_internals("models", "steps", "accumulation")
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.loss_is_scaled_outside = False
        # Outside the scope Keras would copy the lists, and miss variables that the inner optimizer adds later.
        with DotNotTrackScope():
            for attribute in _STATE:
                if hasattr(inner_optimizer, attribute):
                    setattr(self, attribute, getattr(inner_optimizer, attribute))

    def __dir__(self):
        # Keras's saver walks these names; the inner optimizer's state is saved as the wrapper's.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the inner optimizer's state for `variables`, unless it is built already."""
        if self.built:
            return
        creation_strategy, strategy = self.inner_optimizer._distribution_strategy, tf.distribute.get_strategy()
        if creation_strategy is not strategy:
            raise ValueError(
                f"{self.inner_optimizer.name} was created under {strategy_name(creation_strategy)}, and the model is "
                f"trained under {strategy_name(strategy)}. Create the optimizer within "
                "`with strategy.scope():`, as the model."
            )
        if self.inner_optimizer.built:
            self.inner_optimizer._check_variables_are_known(variables)
        else:
            # With tracking on: Keras saves only tracked variables, and Nadam assigns one to an attribute.
            self.inner_optimizer.build(variables)
        with DotNotTrackScope():
            for index, variable in enumerate(variables):
                self._trainable_variables_indices[self._var_key(variable)] = index
            self._trainable_variables = list(variables)
            self.built = True

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        """The model's variables that the optimizer was built with, in order."""
        return self._trainable_variables

    def index_of(self, variable: keras.Variable) -> int:
        """The index of one of the model's variables in `trainable_variables`."""
        self._check_variables_are_known([variable])
        return self._trainable_variables_indices[self._var_key(variable)]

    @property
    def variables(self) -> list[keras.Variable]:
        """The inner optimizer's variables, in its order."""
        return self.inner_optimizer.variables

    @property
    def iterations(self):
        """The number of updates."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self):
        """The inner optimizer's learning rate, also when set."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any):
        self.inner_optimizer.learning_rate = value

    def get_config(self) -> Config:
        """The constructor's arguments, serialized."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {_NOTE: _HOW_TO_LOAD, "inner_optimizer": inner, "name": self.name}

    @classmethod
    def from_config(cls, config: Config, custom_objects: dict[str, Any] | None = None):
        """Makes the optimizer that `get_config` described."""
        arguments = {
            name: keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)
            if isinstance(value, dict)
            else value
            for name, value in config.items()
            if name != _NOTE
        }
        return cls(**arguments)

    def __setattr__(self, name: str, value: object):
        # A LossScaleOptimizer clears the factor of the optimizer that it wraps. Properties would miss that if it is
        # clear already: Keras doesn't assign an equal value.
        if name == "loss_scale_factor" and "inner_optimizer" in self.__dict__:
            self.__dict__["loss_is_scaled_outside"] = value is None
        if name not in self.__dict__ and not hasattr(type(self), name) and self._is_inner_setting(name):
            setattr(self.inner_optimizer, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str):
        if self._is_inner_setting(name):
            return getattr(self.inner_optimizer, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _is_inner_setting(self, name: str) -> bool:
        inner = self.__dict__.get("inner_optimizer")
        return inner is not None and not name.startswith("_") and hasattr(inner, name) and name in inner.get_config()


def _delegated_setting(name: str) -> property:
    def read(self: WrappingOptimizer) -> Any:
        return getattr(self.inner_optimizer, name) if "inner_optimizer" in self.__dict__ else None

    def write(self: WrappingOptimizer, value: object) -> None:
        # Keras's constructor assigns its defaults before `inner_optimizer` is set.
        if "inner_optimizer" in self.__dict__:
            setattr(self.inner_optimizer, name, value)

    return property(read, write, doc=f"The inner optimizer's `{name}`.")


def _delegated_method(name: str):
    def method(self: WrappingOptimizer, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner_optimizer, name)(*args, **kwargs)

    # Keras's signature, for `help()`.
    vars(method)["__signature__"] = inspect.signature(getattr(keras.optimizers.Optimizer, name))
    method.__name__ = name
    method.__doc__ = f"Calls the inner optimizer's `{name}`."
    return method


for _name in _SETTINGS:
    setattr(WrappingOptimizer, _name, _delegated_setting(_name))
for _name in _METHODS:
    setattr(WrappingOptimizer, _name, _delegated_method(_name))
