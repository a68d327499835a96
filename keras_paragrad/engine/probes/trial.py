"""Trial runs on made-up rows, without side effects."""

import logging
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.local import local_parts
from keras_paragrad.compat.model import all_layers, all_variables
from keras_paragrad.engine.probes.untouched import untouched

# For axes of unknown size: a short sequence; else an image that can be halved often.
SIZES = (8, 64)
# The most elements of a made-up tensor.
_MOST = 2**25
# Variables up to this size are replaced if their values are so small that they would hide what lies before them.
_SMALL_VARIABLE = 2**20
_HIDES = 1e-3

_log = logging.getLogger("keras_paragrad")
_thread = threading.local()

Result = TypeVar("Result")
State = list[tf.Tensor]


class Unknown(Exception):  # noqa: N818  (an answer, not a failure)
    """What was asked for can't be found out with made-up rows."""


def attempt(run: Callable[..., Result], *choices: Any, otherwise: Result, question: str) -> Result:
    """What `run` returns for the first of the choices for which it raises nothing, or `otherwise`, which is logged.

    It is called in a separate thread. No strategy, graph, tape or device is in effect there, nor anything that Keras
    keeps for a thread: nothing in it waits for other replicas or workers.

    Args:
        run: Called with each choice.
        *choices: What to call it with.
        otherwise: What to return if it raises for each of them.
        question: What it answers, a clause that begins with "whether", for the log.
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
            # A model need not like made-up rows, and trains all the same.
            _log.debug("A trial on made-up rows was given up.", exc_info=True)
            failures.append(error)
    # Only the first line of the first: TensorFlow's errors go on for pages.
    reason = next(iter(str(failures[0]).strip().splitlines()), type(failures[0]).__name__)
    _log.warning("It was not checked %s, as a trial on made-up rows failed: %s", question, reason)
    return otherwise


def made_up(
    nested: Any, rows: int, *, seed: int, size: int = 8, low: float = 0.1, high: float = 0.9, labels: bool = False
) -> Any:
    """Eager tensors of so many rows, in the shapes and dtypes of the tensors of a batch.

    Integers are 0 and 1, so that they are classes and tokens of every vocabulary.

    Args:
        nested: Tensors, placeholders or `tf.TensorSpec` of `(batch, ...)`, or `None` among them.
        rows: How many rows.
        seed: Another seed gives other rows.
        size: What to take for axes of unknown size.
        low, high: Between which real numbers are drawn.
        labels: Whether real numbers are 0 and 1 as well, as Keras makes real numbers of classes.

    Raises:
        Unknown: There are strings, sparse or ragged tensors, or very large ones.
    """
    generator = np.random.default_rng(seed)

    def drawn(tensor):
        if tensor is None:
            return None
        if not isinstance(tensor, (tf.Tensor, tf.TensorSpec)) or not tensor.shape.rank:
            raise Unknown(f"{tensor!r} can't be made up")
        shape = [rows, *(size if length is None else length for length in tensor.shape[1:])]
        real = tensor.dtype.is_floating
        if np.prod(shape) > _MOST or not (real or tensor.dtype.is_integer or tensor.dtype.is_bool):
            raise Unknown(f"{tensor!r} can't be made up")
        values = generator.uniform(low, high, shape) if real and not labels else generator.integers(0, 2, shape)
        return tf.cast(values, tensor.dtype)

    return keras.tree.map_structure(drawn, nested)


def with_changed_rows(rows: Any, others: Any, places: list[int]) -> tuple[Any, Any]:
    """Two batches that differ in the given rows and in no others.

    Real numbers there are those of `rows` and those of `others`; integers are 0 and 1, so that not even their sum over
    the batch is the same.
    """

    def put(tensor, value):
        chosen = np.isin(np.arange(len(tensor)), places).reshape([-1, *[1] * (tensor.shape.rank - 1)])
        return tf.where(chosen, tf.cast(value, tensor.dtype), tensor)

    def before(tensor):
        return tensor if tensor is None or tensor.dtype.is_floating else put(tensor, 0)

    def after(tensor, other):
        return None if tensor is None else put(tensor, other if tensor.dtype.is_floating else 1)

    return keras.tree.map_structure(before, rows), keras.tree.map_structure(after, rows, others)


def some_rows(nested: Any, start: int, stop: int) -> Any:
    """The rows of nested tensors from `start` to `stop`."""
    return keras.tree.map_structure(lambda tensor: None if tensor is None else tensor[start:stop], nested)


def is_trial() -> bool:
    """Whether this code runs in a trial, in which there are no other replicas."""
    return getattr(_thread, "is_trial", False)


class Pure:
    """A computation of a model as a function of data and of its state, which it returns and does not change.

    Batch normalization goes by its moving statistics: that it mixes examples is known. Weights that are all but zero,
    as the last ones of a residual branch often are, are replaced, as they would hide what comes before them.

    Args:
        model: A built layer or model.
        compute: From data to nested tensors; traced, as `fit` does it.

    Attributes:
        variables: All that the model may assign to.
        start: Their values.
    """

    def __init__(self, model: Any, compute: Callable[[Any], Any]):
        if not model.built:
            raise Unknown("made-up rows are not to build a model")
        self.model, self.compute = model, compute
        self.variables = all_variables(model)
        self.start = [_value_of(variable) for variable in self.variables]
        # In a graph, so that functions which the model calls are traced for it alone.
        self._function = tf.function(self._computed, autograph=False)

    def __call__(self, data: Any, state: State | None = None) -> tuple[Any, State]:
        """The results for data, and the state afterwards.

        Raises:
            Unknown: A variable of which Keras does not know, or a table, takes part, which might be changed.
        """
        state = self.start if state is None else state
        concrete = self._function.get_concrete_function(data, state)
        if any(tensor.dtype == tf.resource for tensor in concrete.captured_inputs):
            raise Unknown("the model has a state of which Keras does not know")
        return self._function(data, state)

    def graph(self, data: Any) -> tf.Graph:
        """What is computed of such data."""
        return self._function.get_concrete_function(data, self.start).graph

    def with_other_seeds(self, state: State | None = None, by: int = 1) -> State:
        """A state, but for the seeds: what comes of it otherwise is random."""
        pairs = zip(self.variables, self.start if state is None else state, strict=True)
        return [value + by if _is_seed(variable) else value for variable, value in pairs]

    def draws_numbers(self, after: State) -> bool:
        """Whether a computation that left this state has drawn random numbers of Keras's."""
        states = zip(self.variables, self.start, after, strict=True)
        return any(_is_seed(variable) and not np.array_equal(one, other) for variable, one, other in states)

    def _computed(self, data: Any, state: State) -> tuple[Any, State]:
        mapping = list(zip(self.variables, state, strict=True))
        with untouched(self.model, _OfKnownVariables(mapping, collect_losses=True)) as scope:
            for layer in (self.model, *all_layers(self.model)):
                if isinstance(layer, keras.layers.BatchNormalization):
                    vars(layer)["call"] = _to_predict(layer.call)
            results = self.compute(data)
            after = [scope.get_current_value(variable) for variable in self.variables]
            # A variable among them has its value only here.
            return keras.tree.map_structure(
                lambda each: each.value if isinstance(each, keras.Variable) else each, (results, after)
            )


def _is_seed(variable: keras.Variable) -> bool:
    # Of the name that `keras.random.SeedGenerator` gives its state.
    return variable.name == "seed_generator_state"


class _OfKnownVariables(keras.StatelessScope):
    """A scope in which only mapped variables can be read: of others, the state of a metric starts a collective."""

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor:
        value = super().get_current_value(variable)
        if value is None:
            raise Unknown(f"{variable.path} is not among the model's variables")
        return value


def called(model: Any, arguments: tuple, training: bool) -> Any:
    """What a model or layer returns, called as `fit` calls it."""
    return model(*arguments, training=training) if model._call_has_training_arg else model(*arguments)


def is_coarse(model: Any) -> bool:
    """Whether a model computes in half precision."""
    return any(layer.compute_dtype not in ("float32", "float64") for layer in (model, *all_layers(model)))


def _to_predict(call: Any) -> Any:
    return lambda *arguments, **keywords: call(*arguments, **{**keywords, "training": False})


def _value_of(variable: keras.Variable) -> tf.Tensor:
    """A variable's value, on several replicas that of the first of this process; one that hides nothing."""
    held = variable.value
    # To read the state of a metric as such is an all-reduce, for which this thread would wait forever.
    local = local_parts(held)[0]
    if tf.DeviceSpec.from_string(getattr(local, "device", None) or "").job == "ps":
        raise Unknown("weights are not fetched from parameter servers")
    if isinstance(local, tf.Variable) and not tf.raw_ops.VarIsInitializedOp(resource=local.handle):
        # Created in the step that is being traced, as the trackers of outputs' losses are, and without a value yet.
        value = tf.zeros(variable.shape, local.dtype)
    else:
        value = tf.convert_to_tensor(local)
    if tuple(value.shape) != tuple(variable.shape):
        # A shard. To gather the others is a collective as well.
        if np.prod(variable.shape) > _MOST:
            raise Unknown(f"{variable.path} is in shards, and large")
        return _drawn(variable, value.dtype)
    if not variable.trainable or value.shape.num_elements() > _SMALL_VARIABLE or not value.dtype.is_floating:
        return value
    hides = tf.reduce_max(tf.abs(value)) < _HIDES if value.shape.num_elements() else False
    return _drawn(variable, value.dtype) if hides else value


def _drawn(variable: keras.Variable, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(np.random.default_rng(0).uniform(0.05, 0.15, tuple(variable.shape)), dtype)
