"""`transform_gradients`: a function of the gradient of each whole update, however its batch is divided."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import check_instance, refusal
from keras_paragrad.compat.model import words_of
from keras_paragrad.compat.types import Structure
from keras_paragrad.compat.variables import SavedVariables
from keras_paragrad.engine.tracing.untouched import trace_untouched
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.storage.storage import any_divided, mesh_of

_EXAMPLE = "lambda gradients, variables: gradients"


# Maps gradients and their variables to other gradients.
TransformFunction = Callable[[list[tf.Tensor], list[keras.Variable]], Sequence[tf.Tensor]]


class StatefulTransform(Protocol):
    """A transform with a state, as optax's `GradientTransformation`: two pure functions."""

    def init(self, variables: list[keras.Variable]) -> Structure:
        """The state before the first update: a tensor, or a nested structure of tensors."""
        ...

    def update(
        self, gradients: list[tf.Tensor], state: Structure, variables: list[keras.Variable]
    ) -> tuple[Sequence[tf.Tensor], Structure]:
        """The transformed gradients, and the state after the update, in the structure of `init`'s."""
        ...


class transform_gradients:  # noqa: N801  (used as a function and as a context manager, as microbatch is)
    """Makes `fit` transform the gradient of each update before the optimizer clips and applies it.

    `f` is called once for an update, with the gradient of the whole batch: of all replicas, and of all slices and
    micro-batches that `microbatch` and `AccumulatingOptimizer` divide it into, without loss scale. Several transforms
    run in the order in which they were installed; on a model of `make_private` after the noise.

    `f` is traced. On several replicas each calls it with the same gradient, and it must return the same: derive random
    numbers from the state or from `optimizer.iterations`, by `tf.random.stateless_normal`.

    Args:
        model: A built and compiled model. Compiling it anew keeps transform and state.
        f: A function `f(gradients, variables) -> gradients`, or an object with `init(variables) -> state` and
            `update(gradients, state, variables) -> (gradients, state)`, like optax's but for TensorFlow's
            tensors. Both lists have an item for each of the model's `trainable_variables`; where there is no gradient,
            it is zeros and stays without effect. The returned gradients have the same shapes and dtypes.

    Returns:
        A handle: `undo()`, or leaving a `with` block, removes the transform. `state` has the state's variables.

    Raises:
        ValueError: The model isn't built or compiled, its weights are in shards or on a mesh, its optimizer has
            `gradient_accumulation_steps`, or `f` fails on symbolic gradients, returns other shapes, or on several
            replicas draws random numbers or assigns variables. The message says what to write.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import transform_gradients
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", loss="mse")
    >>> with transform_gradients(model, lambda gradients, variables: [keras.ops.sign(each) for each in gradients]):
    ...     history = model.fit(np.ones((32, 8)), np.ones((32, 1)), verbose=0)
    """

    def __init__(self, model: keras.Model, f: TransformFunction | StatefulTransform):
        check_instance("model", model, keras.Model, "a Keras model")
        if not model.built:
            raise ValueError(f"{model.name} has no weights yet. Give it a keras.Input, or call it on a batch first.")
        if not model.compiled or model.optimizer is None:
            raise ValueError(f"{model.name} was not compiled. Write model.compile(...) before transform_gradients.")
        self.model = model
        self._transform = _Transform(model, f)
        builder = StepBuilder.of(model)
        previous = builder.stages.transforms
        try:
            builder.fill(transforms=(*(previous or ()), self._transform))
        except ValueError:
            builder.fill(transforms=previous)
            raise

    @property
    def state(self) -> Structure:
        """The variables of the state, in its structure, or `None` for a function."""
        return self._transform.state_variables

    def undo(self) -> None:
        """Removes the transform; others stay."""
        builder = StepBuilder.of(self.model)
        remaining = tuple(
            transform for transform in builder.stages.transforms or () if transform is not self._transform
        )
        builder.fill(transforms=remaining or None)

    def __enter__(self) -> "transform_gradients":
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


class _Transform:
    """Adapts `f` to the step's stage `transforms`, which calls it with the gradients of an update.

    Attributes:
        known: The trainable variables that the state belongs to, or `None` without a state.
        state: Saves the variables of the state with the optimizer, or `None`.
        state_variables: The variables of the state, nested as `f` nests it, or `None`.
    """

    def __init__(self, model: keras.Model, f: TransformFunction | StatefulTransform):
        self.model, self.state, self.state_variables = model, None, None
        self.known: list[keras.Variable] | None = None
        init, update = getattr(f, "init", None), getattr(f, "update", None)
        self.stateful = callable(init) and callable(update) and not isinstance(f, type)
        if not self.stateful and (not callable(f) or isinstance(f, type)):
            raise refusal("f", f, "a function, or an object with init(variables) and update(...)", _EXAMPLE)
        self.update: Any = update if self.stateful else f
        self._check_storage(model.trainable_variables)
        if callable(init) and self.stateful:
            self._add_state(init)
        self._try(model, f)

    def _try(self, model: keras.Model, f: TransformFunction | StatefulTransform) -> None:
        """Traces `f` in a graph that is never run, and refuses what fails there, or differs between replicas."""
        specs = [tf.TensorSpec(transform.shape, transform.dtype) for transform in self._transformable()]
        try:
            graph = trace_untouched((model, f), lambda *gradients: self._apply(list(gradients)), *specs).graph
        except Exception as error:
            raise ValueError(f"`f` fails on symbolic gradients of {model.name}: {words_of(error)[:500]}") from error
        impure = _impure_operations(graph)
        if impure and model.distribute_strategy.num_replicas_in_sync > 1:
            raise ValueError(
                f"`f` draws random numbers or assigns variables ({', '.join(impure)}), and each replica calls it, so "
                "their weights would become different. Draw with tf.random.stateless_normal(shape, seed=[..., count]), "
                "and keep the count in the state."
            )

    def _add_state(self, init: Callable[[list[keras.Variable]], Structure]) -> None:
        """Creates a variable for each tensor of the state that `init` returns."""
        self.known = list(self.model.trainable_variables)
        with self.model.distribute_strategy.scope():
            start = tf.nest.map_structure(tf.convert_to_tensor, init(list(self.known)))
            self.state = _State()
            variables = []
            for index, value in enumerate(tf.nest.flatten(start)):
                variables.append(self.state.add(str(index), value.shape, value.dtype.name))
                variables[-1].assign(value)
        self.state_variables = tf.nest.pack_sequence_as(start, variables)

    def __call__(self, gradients: list[tf.Tensor], variables: list[keras.Variable]) -> list[tf.Tensor]:
        """Transforms the gradients of an update, one for each of these variables, and assigns the new state."""
        self._check_storage(variables)
        by_variable = {id(variable): gradient for gradient, variable in zip(gradients, variables, strict=True)}
        transformable = self._transformable()
        unknown = [variable.path for variable in variables if all(variable is not other for other in transformable)]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)} can't be transformed: not among the trainable variables that "
                f"{self.model.name} had when transform_gradients was called. undo() it, and call it again."
            )
        filled = [
            tf.zeros(variable.shape, variable.dtype)
            if (gradient := by_variable.get(id(variable))) is None
            else tf.ensure_shape(gradient, variable.shape)
            for variable in transformable
        ]
        transformed, state = self._apply(filled)
        if self.state_variables is not None:
            for variable, value in zip(tf.nest.flatten(self.state_variables), state, strict=True):
                variable.assign(value)
        by_variable = {id(variable): value for variable, value in zip(transformable, transformed, strict=True)}
        return [by_variable[id(variable)] for variable in variables]

    def _transformable(self) -> list[keras.Variable]:
        """The variables whose gradients `f` gets, in order."""
        return list(self.model.trainable_variables) if self.known is None else self.known

    def _apply(self, gradients: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the transformed gradients, and the new state, flat."""
        variables = self._transformable()
        if not self.stateful:
            return _check("gradients", self.update(list(gradients), list(variables)), gradients), []
        before = tf.nest.map_structure(tf.convert_to_tensor, self.state_variables)
        returned = self.update(list(gradients), before, list(variables))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ValueError("update returns no pair. Write return gradients, state.")
        transformed, after = returned
        tf.nest.assert_same_structure(before, after)
        checked = _check("gradients", transformed, gradients)
        return checked, _check("state", tf.nest.flatten(after), tf.nest.flatten(before))

    def _check_storage(self, variables: Sequence[keras.Variable]) -> None:
        """Refuses variables whose gradients a transform would see in parts."""
        if any_divided(variables):
            raise ValueError(
                f"The weights of {self.model.name} are in shards, and f takes whole ones. Train with "
                "DistributedFit(..., shard=None), or without transform_gradients."
            )
        if mesh_of(variables) is not None:
            raise ValueError(
                f"{self.model.name} is on a mesh, where f can't be given whole gradients. Train with "
                "DistributedFit() without mesh=, or without transform_gradients."
            )


class _State(SavedVariables):
    """The state of a transform, saved with the optimizer's."""

    def load_own_variables(self, store: Mapping[str, np.ndarray]) -> None:
        """Loads the state, unless the file has none of this transform."""
        if all(name in store for name in self.variables):
            super().load_own_variables(store)


def _impure_operations(graph: tf.Graph) -> list[str]:
    """The kinds of operations in a graph that draw random numbers or assign variables, and so differ by replica."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    # Function calls are called stateful too.
    kinds = {node.op for node in nodes if node.op not in ("StatefulPartitionedCall", "StatefulCase", "StatefulIf")}
    return sorted(kind for kind in kinds if kind.startswith(("Random", "Stateful", "Multinomial", "Assign")))


def _check(name: str, returned: object, expected: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Checks that `f` returned tensors like the `expected`, which it got, and returns them; `name` is for messages."""
    if not isinstance(returned, (list, tuple)) or len(returned) != len(expected):
        description = f"{len(returned)} items" if isinstance(returned, (list, tuple)) else type(returned).__name__
        raise ValueError(f"Return a list of {len(expected)} {name}, one for each given; this is {description}.")
    values = [tf.convert_to_tensor(value) for value in returned]
    for index, (value, like) in enumerate(zip(values, expected, strict=True)):
        if value.dtype != like.dtype or not value.shape.is_compatible_with(like.shape):
            raise ValueError(
                f"Return {name} of the shapes and dtypes given: number {index} is {value.dtype.name}{value.shape}, and "
                f"{like.dtype.name}{like.shape} was given. Write tf.cast or tf.reshape."
            )
    return values
