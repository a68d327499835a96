"""`PureFunction`: a model's computation as a pure function, (data, state) -> (results, new state)."""

import contextlib
import functools
import logging
import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import all_layers, all_variables, is_seed
from keras_paragrad.compat.operations import gen_random_ops, gen_stateless_random_ops_v2
from keras_paragrad.compat.process_patch import ProcessPatch, Replacement
from keras_paragrad.compat.types import Batch, Structure
from keras_paragrad.compat.workers import local_replica_values
from keras_paragrad.engine.batches.replica_batch import static_row_count
from keras_paragrad.engine.losses.terms import loss_weights_of
from keras_paragrad.engine.tracing.effects import assigned_resources, random_generators
from keras_paragrad.engine.tracing.untouched import untouched
from keras_paragrad.engine.trials.trial import MOST_ELEMENTS, Inconclusive, row_count
from keras_paragrad.storage.sharded import sharded_value

# Weights of up to `_SMALL_VARIABLE` elements, all below `_TINY`, are replaced, as they hide what the layers below do.
_SMALL_VARIABLE = 2**20
_TINY = 1e-3

_log = logging.getLogger("keras_paragrad")

State = list[tf.Tensor]


class PureFunction:
    """Maps data and a state to a model's results and the new state, as a pure function.

    Batch normalization, which is known to mix examples, uses its moving statistics. Weights near zero, such as the last
    ones of a residual branch, are replaced: a product with them would hide differences between parts.

    Args:
        model: A built layer or model.
        compute: Maps data to nested tensors. Traced, as in `fit`.
        any_rows: Whether to trace `compute` once for any number of rows, if it can be traced so.
        total: The number of rows of the whole batch. If given, each row gets the same random numbers in any part.
        variables: The variables whose values are the state; by default, all of the model, which must be built.
    """

    def __init__(
        self,
        model: keras.layers.Layer,
        compute: Callable[[Any], Any],
        *,
        any_rows: bool = False,
        total: int | None = None,
        variables: Sequence[keras.Variable] | None = None,
    ):
        if variables is None and not model.built:
            raise Inconclusive("the model is not built")
        self.model, self.compute, self._any_rows = model, compute, any_rows
        self.total, self.half_precision = total, uses_half_precision(model)
        self.variables = list(all_variables(model) if variables is None else variables)
        # Whether the computation draws random numbers by row; `None` before it is traced.
        self.draws: bool | None = None
        # The paths of variables outside of the state that the computation assigns, except those of metrics.
        self.assigned: list[str] = []
        # The function that was checked last, and the `tf.random.Generator`s from which it draws.
        self._checked: Any = None
        self._generators: list[tf.Tensor] = []
        self.renew()
        # In a separate graph, so that the model's `tf.function`s are traced for the trial only.
        self._function = tf.function(self._compute, autograph=False)

    def renew(self) -> None:
        """Reads the variables' values, and the weights of losses, which training has changed."""
        self.start = [value_of(variable) for variable in self.variables]
        self._loss_weights = _values_of_loss_weights(self.model)

    def __call__(self, data: Batch, state: State | None = None, first: int = 0) -> tuple[Any, State]:
        """Returns the results for `data` and the new state. By default, `state` is what `renew` has read.

        `first` is the index of the first row of `data` in the whole batch, on which random numbers depend.
        """
        state = self.start if state is None else state
        if self._any_rows:
            self._trace_for_any_rows(data, state)
            self._any_rows = False
        # Without random numbers, one trace serves all parts.
        first = 0 if self.draws is False else first
        traced = self._function.get_concrete_function(data, state, first, self._loss_weights)
        if traced is not self._checked:
            self._generators = random_generators(traced.graph)
            self.check(traced)
            self._checked = traced
        before = [tf.raw_ops.ReadVariableOp(resource=each, dtype=tf.int64) for each in self._generators]
        try:
            return self._function(data, state, first, self._loss_weights)
        finally:
            for generator, value in zip(self._generators, before, strict=True):
                tf.raw_ops.AssignVariableOp(resource=generator, value=value)

    def check(self, traced: Any) -> None:
        """Refuses a function that assigns variables unknown to Keras, or draws from a generator."""
        if assigned_resources(traced.graph):
            raise Inconclusive("the model assigns to a variable that Keras doesn't know")
        if self._generators:
            raise Inconclusive("the model draws from a tf.random.Generator, whose numbers are no row's own")

    def _trace_for_any_rows(self, data: Batch, state: State) -> None:
        """Traces the function for data with an unknown number of rows, if that works."""
        rows = row_count(data)
        if not all(isinstance(leaf, (tf.Tensor, type(None))) for leaf in keras.tree.flatten(data)):
            return

        def spec(tensor: tf.Tensor | None) -> tf.TensorSpec | None:
            if tensor is None:
                return None
            shape = tensor.shape.as_list()
            return tf.TensorSpec([None, *shape[1:]] if shape[:1] == [rows] else shape, tensor.dtype)

        try:
            self._function.get_concrete_function(keras.tree.map_structure(spec, data), state, 0, self._loss_weights)
        except Exception:
            # Without this trace, the function is traced for each number of rows.
            _log.debug("A trial was not traced for any number of rows.", exc_info=True)
            self._function = tf.function(self._compute, autograph=False)

    def graph(self, data: Batch) -> tf.Graph:
        """The graph traced for data of these specs."""
        return self._function.get_concrete_function(data, self.start, 0, self._loss_weights).graph

    def reseed(self) -> State:
        """The start with different seeds. What changes with the seeds is random."""
        pairs = zip(self.variables, self.start, strict=True)
        return [value + 1 if is_seed(variable) else value for variable, value in pairs]

    def has_drawn(self, state: State) -> bool:
        """Whether the call that returned this state drew random numbers with Keras's seeds."""
        states = zip(self.variables, self.start, state, strict=True)
        return any(is_seed(variable) and not np.array_equal(before, after) for variable, before, after in states)

    def scope(self, state: State) -> keras.StatelessScope:
        """A scope in which variables have the values of a state."""
        return _KnownVariablesScope(list(zip(self.variables, state, strict=True)), collect_losses=True)

    def _compute(self, data: Batch, state: State, first: int, loss_weights: list[tf.Tensor]) -> tuple[Any, State]:
        """Runs the computation with given values of the variables; returns its results and their new values."""
        random_numbers = contextlib.nullcontext()
        if self.total is not None:
            random_numbers = random_numbers_by_row(first, static_row_count(data), self.total)
        with untouched(self.model, self.scope(state)) as scope, random_numbers as drawn:
            normalize_by_moving_statistics(self.model)
            if loss_weights:
                # Weights of losses are replaced by values, as the variables may be mirrored.
                compiled = self.model._compile_loss
                pairs = zip(compiled._flat_losses, loss_weights, strict=True)
                compiled._flat_losses = [loss._replace(loss_weights=weight) for loss, weight in pairs]
            results = self.compute(data)
            after = [scope.get_current_value(variable) for variable in self.variables]
            self.draws = drawn is not None and drawn.draws > 0
            self.assigned = getattr(scope, "assigned", [])
            # Variables among the results have their values only in this scope.
            return keras.tree.map_structure(
                lambda value: value.value if isinstance(value, keras.Variable) else value, (results, after)
            )


class _KnownVariablesScope(keras.StatelessScope):
    """A scope with the values of a model's variables. Other variables, such as a loss's, are read on one replica.

    A metric's variables are refused, as reading them would start a collective.
    """

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self._known, self._reads = set(self.state_mapping), False
        # The paths of assigned variables that aren't the model's, such as a loss's.
        self.assigned: list[str] = []

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        if id(update[0]) not in self._known and update[0].aggregation != "sum":
            self.assigned.append(update[0].path)
        super().add_update(update)

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        if value is not None or self._reads:
            return value
        if variable.aggregation == "sum":
            raise Inconclusive(f"{variable.path} is not among the model's variables")
        # `value` asks this scope again.
        self._reads = True
        try:
            return tf.convert_to_tensor(local_replica_values(variable.value)[0])
        finally:
            self._reads = False


def uses_half_precision(model: keras.layers.Layer) -> bool:
    """Whether a model computes in half precision."""
    return any(layer.compute_dtype not in ("float32", "float64") for layer in (model, *all_layers(model)))


def normalize_by_moving_statistics(model: keras.layers.Layer) -> None:
    """Makes each `BatchNormalization` compute as in inference. Call it within `untouched`, which restores the model."""
    for layer in (model, *all_layers(model)):
        if isinstance(layer, keras.layers.BatchNormalization):
            vars(layer)["call"] = functools.partial(_call_for_inference, layer.call)


def _call_for_inference(call: Callable[..., Structure], *arguments: Any, **keywords: Any) -> Structure:
    return call(*arguments, **{**keywords, "training": False})


def value_of(variable: keras.Variable) -> tf.Tensor:
    """A variable's value on the first local replica. Weights near zero are replaced by random ones.

    A sharded variable's value is whole, and random where workers would have to gather it.
    """
    # `variable.value` of a metric's state is an all-reduce, which would block this thread forever.
    sharded = sharded_value(variable)
    whole = sharded.read_locally() if sharded is not None else None
    local = local_replica_values(variable.value)[0] if whole is None else whole
    if tf.DeviceSpec.from_string(getattr(local, "device", None) or "").job == "ps":
        raise Inconclusive("weights are not fetched from parameter servers")
    if isinstance(local, tf.Variable) and not tf.raw_ops.VarIsInitializedOp(resource=local.handle):
        # Created in the step being traced and not initialized yet, such as the tracker of an output's loss.
        value = tf.zeros(variable.shape, local.dtype)
    else:
        value = tf.convert_to_tensor(local)
    if tuple(value.shape) != tuple(variable.shape):
        # A shard. Gathering other workers' shards would be a collective.
        if np.prod(variable.shape) > MOST_ELEMENTS:
            raise Inconclusive(f"{variable.path} is in shards, and large")
        return _draw_weight(variable, value.dtype)
    if not variable.trainable or value.shape.num_elements() > _SMALL_VARIABLE or not value.dtype.is_floating:
        return value
    tiny = tf.reduce_max(tf.abs(value)) < _TINY if value.shape.num_elements() else False
    return _draw_weight(variable, value.dtype) if tiny else value


def _values_of_loss_weights(model: keras.layers.Layer) -> list[tf.Tensor]:
    """The weights of the compiled losses if some are variables, or else `[]`. Weights near 0 become 1."""
    if not getattr(model, "_compile_loss", None) or not model._compile_loss._flat_losses:
        return []
    weights: list[Any] = list(loss_weights_of(model))
    if not any(isinstance(weight, (keras.Variable, tf.Variable)) for weight in weights):
        return []
    raw = [weight.value if isinstance(weight, keras.Variable) else weight for weight in weights]
    local = [local_replica_values(value)[0] for value in raw]
    values = [float(tf.convert_to_tensor(value)) for value in local]
    return [tf.constant(1.0 if abs(value) < _TINY else value) for value in values]


def _draw_weight(variable: keras.Variable, dtype: tf.DType) -> tf.Tensor:
    """Draws values that are not near zero. Matrices get both signs: otherwise all rows would have similar outputs."""
    draw = np.random.default_rng(zlib.crc32(variable.path.encode()))
    values = draw.uniform(0.05, 0.15, tuple(variable.shape))
    return tf.cast(values if values.ndim < 2 else values * draw.choice([-1.0, 1.0], values.shape), dtype)


@contextlib.contextmanager
def watch_weights(model: keras.layers.Layer) -> Generator[Callable[[tf.Tensor], list[tf.Tensor]]]:
    """Context, in a stateless scope, that yields a function from a scalar to its gradients.

    They are for the trainable weights, except for very large ones, and for weights that don't affect the scalar.
    """
    weights = [weight.value for weight in model.trainable_variables if np.prod(weight.shape) <= MOST_ELEMENTS]
    tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)

    def gradients_of(target: tf.Tensor) -> list[tf.Tensor]:
        gradients = tape.gradient(target, weights)
        return [tf.cast(tf.convert_to_tensor(gradient), "float32") for gradient in gradients if gradient is not None]

    with tape:
        tape.watch(weights)
        yield gradients_of


def _numbers(kind: str, generator: np.random.Generator, shape: list[int], arguments: dict[str, Any]) -> Any:
    """Draws numbers of a shape, for an operation with these arguments."""
    if kind in ("normal", "truncated"):
        drawn = generator.normal(size=shape)
        return drawn if kind == "normal" else np.clip(drawn, -2, 2)
    drawn = generator.uniform(size=shape)
    if kind == "uniform":
        return drawn
    low, high = (tf.cast(arguments[name], "float64") for name in ("minval", "maxval"))
    return tf.floor(low + (high - low) * drawn)


# The operations that draw: their modules, their names, and the `kind` of `_numbers`.
_DRAWS: list[tuple[Any, str, str]] = [
    (gen_random_ops, "random_standard_normal", "normal"),
    (gen_random_ops, "truncated_normal", "truncated"),
    (gen_random_ops, "random_uniform", "uniform"),
    (gen_random_ops, "random_uniform_int", "integers"),
    (gen_stateless_random_ops_v2, "stateless_random_normal_v2", "normal"),
    (gen_stateless_random_ops_v2, "stateless_truncated_normal_v2", "truncated"),
    (gen_stateless_random_ops_v2, "stateless_random_uniform_v2", "uniform"),
    (gen_stateless_random_ops_v2, "stateless_random_uniform_int_v2", "integers"),
]


class Rows:
    """The `count` rows from `first` on, of a batch of `total` rows. `draws` counts random operations.

    `count` is `None` if the number of rows isn't static.
    """

    def __init__(self, first: int, count: int | None, total: int):
        self.first, self.count, self.total, self.draws = first, count, total, 0

    def draw(self, kind: str, shape: Any, arguments: dict[str, Any]) -> Any:
        """Draws the random numbers of these rows, or returns `None` if the shape isn't static.

        A tensor with another number of rows gets other numbers in each part. Scalars and single rows get the same ones.
        """
        if self.count is None:
            raise ValueError("random numbers are drawn for rows whose number isn't known while the graph is traced")
        sizes = tf.get_static_value(tf.convert_to_tensor(shape))
        if sizes is None:
            return None
        sizes = [int(size) for size in sizes]
        self.draws += 1
        if sizes and sizes[0] == self.count:
            generator = np.random.default_rng(self.draws)
            return _numbers(kind, generator, [self.total, *sizes[1:]], arguments)[self.first : self.first + self.count]
        fixed = bool(sizes) and sizes[0] > 1
        return _numbers(kind, np.random.default_rng([self.draws, self.first if fixed else 0]), sizes, arguments)


def _draw(kind: str, rows: Rows, original: Callable[..., tf.Tensor], shape: Any, *args: Any, **kwargs: Any):
    """Replaces a random operation of TensorFlow: returns the numbers of `rows`, if there are any."""
    # The original's result gives the dtype.
    drawn = original(shape, *args, **kwargs)
    values = rows.draw(kind, shape, {**dict(zip(("minval", "maxval"), args, strict=False)), **kwargs})
    return drawn if values is None else tf.cast(values, drawn.dtype)


_PATCH = ProcessPatch[Rows](
    lambda: [Replacement(module, name, functools.partial(_draw, kind)) for module, name, kind in _DRAWS]
)


def random_numbers_by_row(first: int, count: int | None, total: int) -> contextlib.AbstractContextManager[Rows]:
    """Context in which this thread's tensors of `count` rows get the random numbers of rows from `first` on."""
    return _PATCH.open(Rows(first, count, total))


@contextlib.contextmanager
def random_numbers_of_part(first: int, count: int, total: int) -> Generator[None]:
    """Context of a part, within `random_numbers_by_row`. After the last part, draws are counted on."""
    whole, part = cast(Rows, _PATCH.value), Rows(first, count, total)
    part.draws = whole.draws
    with _PATCH.open(part):
        yield
    if first + count == total:
        whole.draws = part.draws
