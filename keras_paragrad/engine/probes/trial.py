"""Trial runs of a model on synthetic rows, without side effects."""

import contextlib
import functools
import logging
import threading
import warnings
import zlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.model import all_layers, all_variables
from keras_paragrad.compat.types import Array, Batch, Structure
from keras_paragrad.compat.workers import local_replica_values
from keras_paragrad.engine.losses.terms import loss_weights_of
from keras_paragrad.engine.step.operations import assigned_resources
from keras_paragrad.engine.tracing.untouched import untouched
from keras_paragrad.storage.sharded import sharded_value

# The sizes to try for axes of unknown size: a short sequence, then an image that can be halved often.
SIZES = (8, 64)
# The most elements of a synthetic tensor, and of a weight whose gradient is compared.
_MOST = 2**25
# Weights of up to `_SMALL_VARIABLE` elements, all below `_TINY`, are replaced: they would hide the layers before them.
_SMALL_VARIABLE = 2**20
_TINY = 1e-3
# Tolerances of gradients: of a weight's largest entry, of the largest of all, and of the latter in half precision.
_OF_WEIGHT, _OF_ALL, _OF_ALL_IN_HALF_PRECISION = 1e-3, 1e-5, 3e-2

_log = logging.getLogger("keras_paragrad")
_thread = threading.local()

Result = TypeVar("Result")
State = list[tf.Tensor]


class Inconclusive(Exception):  # noqa: N818  (an answer, not a failure)
    """A trial on synthetic rows can't answer the question."""


class UnknownState(Inconclusive):
    """A model reads variables or tables that Keras doesn't know: `resources` are those that it assigns."""

    def __init__(self, resources: list[tf.Tensor]):
        super().__init__("the model has a state that is unknown to Keras")
        self.resources = resources


def run_trial(run: Callable[..., Result], *choices: Any, otherwise: Result, question: str | None) -> Result:
    """Returns the first result of `run` that raises no error; if all raise, logs that and returns `otherwise`.

    `run` is called in a separate thread, where no strategy, graph, tape, device or state of Keras is active, so it
    never waits for other replicas or workers.

    Args:
        run: The trial.
        *choices: Its argument, in the order in which to try them.
        otherwise: The result if it raises for all.
        question: What the trial answers, for the log: a clause that begins with "whether". `None` logs nothing.
    """

    def alone(choice: Any) -> Result:
        _thread.is_trial = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run(choice)

    failures = []
    for choice in choices:
        try:
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(alone, choice).result()
        except Exception as error:
            # A model that fails on synthetic rows may train well.
            _log.debug("A trial on synthetic rows failed.", exc_info=True)
            failures.append(error)
    if question:
        # TensorFlow's errors are pages long.
        reason = next(iter(str(failures[0]).strip().splitlines()), type(failures[0]).__name__)
        _log.warning("It was not checked %s: a trial on synthetic rows failed with %s", question, reason)
    return otherwise


def synthetic_rows(
    nested: Structure,
    rows: int,
    *,
    seed: int,
    size: int = 8,
    low: float = 0.1,
    high: float = 0.9,
    labels: bool = False,
    tokens: int = 2,
) -> Any:
    """Draws eager tensors of `rows` rows, with the shapes and dtypes of a batch.

    Integers are 0 or 1 by default, which are valid classes and tokens of every vocabulary.

    Args:
        nested: Tensors, placeholders or `tf.TensorSpec` of `(batch, ...)`; some may be `None`.
        rows: Number of rows.
        seed: Seed of the draw.
        size: The size of axes of unknown size.
        low, high: Range of real numbers.
        labels: Whether real numbers are 0 or 1 too: Keras casts classes to float.
        tokens: Integers are below this.

    Raises:
        Inconclusive: A tensor holds strings, is sparse or ragged, or is very large.
    """
    generator = np.random.default_rng(seed)

    def draw(tensor: Any) -> tf.Tensor | None:
        if tensor is None:
            return None
        if not isinstance(tensor, (tf.Tensor, tf.TensorSpec)) or not tensor.shape.rank:
            raise Inconclusive(f"{tensor!r} can't be drawn")
        shape = [rows, *(size if length is None else length for length in tensor.shape[1:])]
        real = tensor.dtype.is_floating
        if np.prod(shape) > _MOST or not (real or tensor.dtype.is_integer or tensor.dtype.is_bool):
            raise Inconclusive(f"{tensor!r} can't be drawn")
        values = generator.uniform(low, high, shape) if real and not labels else generator.integers(0, tokens, shape)
        return tf.cast(values, tensor.dtype)

    return keras.tree.map_structure(draw, nested)


def change_rows(batch: Batch, other: Batch, changed: list[int]) -> tuple[Any, Any]:
    """Makes two batches that differ in the rows `changed` alone: in real numbers, and in integers, 0 and 1."""

    def put(tensor: tf.Tensor, value: Array) -> tf.Tensor:
        chosen = np.isin(np.arange(len(tensor)), changed).reshape([-1, *[1] * (tensor.shape.rank - 1)])
        return tf.where(chosen, tf.cast(value, tensor.dtype), tensor)

    def before(tensor: tf.Tensor | None) -> tf.Tensor | None:
        return tensor if tensor is None or tensor.dtype.is_floating else put(tensor, 0)

    def after(tensor: tf.Tensor | None, value: tf.Tensor) -> tf.Tensor | None:
        return None if tensor is None else put(tensor, value if tensor.dtype.is_floating else 1)

    return keras.tree.map_structure(before, batch), keras.tree.map_structure(after, batch, other)


def take_rows(nested: Structure, start: int, stop: int) -> Any:
    """Rows `start` to `stop` of nested tensors."""
    return keras.tree.map_structure(lambda tensor: None if tensor is None else tensor[start:stop], nested)


def row_count(batch: Structure) -> int:
    """The number of rows of a batch."""
    return int(next(tensor for tensor in keras.tree.flatten(batch) if tensor is not None).shape[0])


def static_row_count(batch: Structure) -> int | None:
    """The number of rows of a batch, if it is known while a graph is traced."""
    return next(tensor for tensor in keras.tree.flatten(batch) if tensor is not None).shape[0]


def is_trial() -> bool:
    """Whether this thread runs a trial, in which there are no other replicas."""
    return getattr(_thread, "is_trial", False)


class PureFunction:
    """A model's computation as a pure function: maps data and a state to the results and the new state.

    Batch normalization uses its moving statistics: that it mixes examples is known. Weights near zero, such as the last
    ones of a residual branch, are replaced, as they would hide the layers before them.

    Args:
        model: A built layer or model.
        compute: Maps data to nested tensors. Traced, as in `fit`.
        any_rows: Whether to trace it once for any number of rows, unless it needs to know the number.
        as_trained: Whether batch normalization uses the statistics of its batch, and weights stay as they are.

    Attributes:
        variables: All variables of the model.
        start: Their current values.
    """

    def __init__(
        self,
        model: keras.layers.Layer,
        compute: Callable[[Any], Any],
        *,
        any_rows: bool = False,
        as_trained: bool = False,
    ):
        if not model.built:
            raise Inconclusive("the model is not built")
        self.model, self.compute, self._any_rows, self.as_trained = model, compute, any_rows, as_trained
        self.variables = all_variables(model)
        self.start = [value_of(variable, replace_tiny=not as_trained) for variable in self.variables]
        self.loss_weights = _values_of_loss_weights(model, replace_tiny=not as_trained)
        # In a graph of its own, so that the `tf.function`s of the model are traced for the trial alone.
        self._function = tf.function(self._compute, autograph=False)

    def __call__(self, data: Batch, state: State | None = None) -> tuple[Any, State]:
        """Returns the results and the new state; the state before is `start`, if `None`.

        Raises:
            UnknownState: The model uses a table, or a variable unknown to Keras, and might change it.
        """
        state = self.start if state is None else state
        if self._any_rows:
            self._trace_for_any_rows(data, state)
            self._any_rows = False
        concrete = self._function.get_concrete_function(data, state)
        if any(tensor.dtype == tf.resource for tensor in concrete.captured_inputs):
            raise UnknownState(assigned_resources(concrete.graph))
        return self._function(data, state)

    def _trace_for_any_rows(self, data: Batch, state: State) -> None:
        rows = row_count(data)

        def spec(tensor: tf.Tensor | None) -> tf.TensorSpec | None:
            if tensor is None:
                return None
            shape = tensor.shape.as_list()
            return tf.TensorSpec([None, *shape[1:]] if shape[:1] == [rows] else shape, tensor.dtype)

        try:
            self._function.get_concrete_function(keras.tree.map_structure(spec, data), state)
        except Exception:
            # It is traced for each number of rows.
            _log.debug("A trial was not traced for any number of rows.", exc_info=True)
            self._function = tf.function(self._compute, autograph=False)

    def graph(self, data: Batch) -> tf.Graph:
        """The graph that is traced for such data."""
        return self._function.get_concrete_function(data, self.start).graph

    def reseed(self, state: State | None = None, by: int = 1) -> State:
        """A state with other seeds: results that change with it are random."""
        pairs = zip(self.variables, self.start if state is None else state, strict=True)
        return [value + by if is_seed(variable) else value for variable, value in pairs]

    def has_drawn(self, state: State) -> bool:
        """Whether a call that returned this state has drawn random numbers with Keras's seeds."""
        states = zip(self.variables, self.start, state, strict=True)
        return any(is_seed(variable) and not np.array_equal(before, after) for variable, before, after in states)

    def _compute(self, data: Batch, state: State) -> tuple[Any, State]:
        """Runs the computation with given values of the variables; returns its results and their new values."""
        mapping = list(zip(self.variables, state, strict=True))
        with untouched(self.model, _KnownVariablesScope(mapping, collect_losses=True)) as scope:
            if not self.as_trained:
                normalize_by_moving_statistics(self.model)
            if self.loss_weights:
                compiled = self.model._compile_loss
                pairs = zip(compiled._flat_losses, self.loss_weights, strict=True)
                compiled._flat_losses = [each._replace(loss_weights=weight) for each, weight in pairs]
            results = self.compute(data)
            after = [scope.get_current_value(variable) for variable in self.variables]
            # Variables among the results have their values only in this scope.
            return keras.tree.map_structure(
                lambda each: each.value if isinstance(each, keras.Variable) else each, (results, after)
            )


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    # The name that `keras.random.SeedGenerator` gives its state.
    return variable.name == "seed_generator_state"


class _KnownVariablesScope(keras.StatelessScope):
    """Refuses to read other variables: reading a metric's state starts a collective."""

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor:
        value = super().get_current_value(variable)
        if value is None:
            raise Inconclusive(f"{variable.path} is not among the model's variables")
        return value


def uses_half_precision(model: keras.layers.Layer) -> bool:
    """Whether a model computes in half precision."""
    return any(layer.compute_dtype not in ("float32", "float64") for layer in (model, *all_layers(model)))


def normalize_by_moving_statistics(model: keras.layers.Layer) -> None:
    """Makes each `BatchNormalization` of a model compute as in inference; within `untouched`, which restores it."""
    for layer in (model, *all_layers(model)):
        if isinstance(layer, keras.layers.BatchNormalization):
            vars(layer)["call"] = functools.partial(_call_for_inference, layer.call)


def _call_for_inference(call: Callable[..., Structure], *arguments: Any, **keywords: Any) -> Structure:
    return call(*arguments, **{**keywords, "training": False})


def value_of(variable: keras.Variable, *, replace_tiny: bool = True) -> tf.Tensor:
    """A variable's value on the first local replica; if `replace_tiny`, random in place of weights near zero.

    Of a variable in shards it is the whole, and random where workers would have to gather it.
    """
    # Reading a metric's state directly is an all-reduce, for which this thread would wait forever.
    sharded = sharded_value(variable)
    whole = sharded.read_locally() if sharded is not None else None
    local = local_replica_values(variable.value)[0] if whole is None else whole
    if tf.DeviceSpec.from_string(getattr(local, "device", None) or "").job == "ps":
        raise Inconclusive("weights are not fetched from parameter servers")
    if isinstance(local, tf.Variable) and not tf.raw_ops.VarIsInitializedOp(resource=local.handle):
        # Created in the step that is being traced, such as a tracker of an output's loss, and not initialized yet.
        value = tf.zeros(variable.shape, local.dtype)
    else:
        value = tf.convert_to_tensor(local)
    if tuple(value.shape) != tuple(variable.shape):
        # A shard. Gathering those of other workers is a collective as well.
        if np.prod(variable.shape) > _MOST:
            raise Inconclusive(f"{variable.path} is in shards, and large")
        return _draw_weight(variable, value.dtype)
    if (
        not (replace_tiny and variable.trainable)
        or value.shape.num_elements() > _SMALL_VARIABLE
        or not value.dtype.is_floating
    ):
        return value
    tiny = tf.reduce_max(tf.abs(value)) < _TINY if value.shape.num_elements() else False
    return _draw_weight(variable, value.dtype) if tiny else value


def _values_of_loss_weights(model: keras.layers.Layer, *, replace_tiny: bool) -> list[float]:
    """The weights of the compiled losses, if some are variables; if `replace_tiny`, 1 in place of those near 0."""
    if not getattr(model, "_compile_loss", None) or not model._compile_loss._flat_losses:
        return []
    weights: list[Any] = list(loss_weights_of(model))
    if not any(isinstance(each, (keras.Variable, tf.Variable)) for each in weights):
        return []
    raw = [each.value if isinstance(each, keras.Variable) else each for each in weights]
    local = [local_replica_values(each)[0] for each in raw]
    values = [float(tf.convert_to_tensor(each)) for each in local]
    return [1.0 if replace_tiny and abs(each) < _TINY else each for each in values]


def _draw_weight(variable: keras.Variable, dtype: tf.DType) -> tf.Tensor:
    """Draws values that are not near zero; those of matrices have both signs, or all rows would be much alike."""
    draw = np.random.default_rng(zlib.crc32(variable.path.encode()))
    values = draw.uniform(0.05, 0.15, tuple(variable.shape))
    return tf.cast(values if values.ndim < 2 else values * draw.choice([-1.0, 1.0], values.shape), dtype)


def draw_kernel(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """Random values of the usual scale in place of a trainable kernel's or table's; other values as they are."""
    shape = np.shape(value)
    if not variable.trainable or len(shape) < 2 or not value.dtype.is_floating:
        return value
    # A table of tokens has no fan-in.
    scale = (3 / min(int(np.prod(shape[:-1])), 1024)) ** 0.5
    draw = np.random.default_rng(zlib.crc32(variable.path.encode()))
    return tf.cast(draw.uniform(-scale, scale, shape), value.dtype)


@contextlib.contextmanager
def watch_weights(model: keras.layers.Layer) -> Generator[Callable[[tf.Tensor], list[tf.Tensor]]]:
    """Watches the trainable weights in a stateless scope; yields a function that maps a scalar to its gradients.

    Left out are very large weights, and those that the scalar doesn't depend on.
    """
    weights = [weight.value for weight in model.trainable_variables if np.prod(weight.shape) <= _MOST]
    tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)

    def gradients_of(target: tf.Tensor) -> list[tf.Tensor]:
        gradients = tape.gradient(target, weights)
        return [tf.cast(tf.convert_to_tensor(each), "float32") for each in gradients if each is not None]

    with tape:
        tape.watch(weights)
        yield gradients_of


def check_finite(results: Sequence[Array], what: str) -> None:
    """Refuses to compare numbers of which none is finite: they would match whatever they are.

    Raises:
        Inconclusive: There are numbers, and none is finite.
    """
    numbers = [tf.cast(each, "float64") for each in map(tf.convert_to_tensor, results) if each.dtype.is_floating]
    if numbers and not any(np.isfinite(each).any() for each in numbers):
        raise Inconclusive(f"{what} are not finite on synthetic rows")


def gradients_match(first: Sequence[Array], second: Sequence[Array], *, half_precision: bool) -> bool:
    """Whether two gradients, a tensor for each weight, differ by rounding alone."""
    pairs = [(np.asarray(a, "float64"), np.asarray(b, "float64")) for a, b in zip(first, second, strict=True)]
    largest = [np.abs(np.concatenate([a.ravel(), b.ravel()])).max(initial=0) for a, b in pairs]
    of_all = max(largest, default=0)
    if half_precision:
        return all(np.allclose(a, b, rtol=0, atol=_OF_ALL_IN_HALF_PRECISION * of_all, equal_nan=True) for a, b in pairs)
    # A gradient of rounding errors alone, such as an attention's key bias has, differs from run to run.
    return all(
        np.allclose(a, b, rtol=0, atol=_OF_WEIGHT * size + _OF_ALL * of_all, equal_nan=True)
        for (a, b), size in zip(pairs, largest, strict=True)
    )
