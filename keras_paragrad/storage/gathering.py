"""Gathers sharded weights: at each layer's call, in order, or all before a pass in which collectives can't run."""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.compat.compiled_call import compiled_call, is_compiled_by_layer, needs_whole_pass
from keras_paragrad.compat.layers import REVERSIBLE_EMBEDDINGS, dtype_within
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.private import get_stateless_scope, in_symbolic_scope
from keras_paragrad.compat.state import Slot
from keras_paragrad.compat.types import Structure
from keras_paragrad.storage.creation import may_be_in_shards
from keras_paragrad.storage.reading import READING, read_as
from keras_paragrad.storage.sharded import ShardedVariable, sharded_value
from keras_paragrad.storage.sharding import look_up_rows

_CALL = "call"
# Whether a call of a layer gathers the weights.
_GATHERS = Slot[bool]("gathers", False)


class _Order(threading.local):
    """The inputs of the layer that was called last on this replica."""

    inputs: Sequence[tf.Tensor] = ()


_ORDER = _Order()


def gather_at_calls(model: keras.Model) -> None:
    """Makes each layer of a model gather its weights when it is called, until `gather_on_read`.

    TensorFlow can't run a collective within a loop, where recurrent layers read weights, and gathers that depend on
    nothing would all run at once.
    """
    if not may_be_in_shards(model):
        return
    for layer in all_layers(model):
        # Layers without weights too: the first call may build them.
        if not isinstance(layer, keras.Model):
            _GATHERS.attach(layer, True)
            install_gather(layer)


def gather_on_read(model: keras.Model) -> None:
    """Restores the `call` of each layer."""
    for layer in all_layers(model):
        _GATHERS.attach(layer, False)
        install_gather(layer)


def install_gather(layer: keras.layers.Layer) -> None:
    """Installs the gather on a layer's `call`, or removes it; leaves a `call` that `recompute` or a user replaced."""
    # Bypass Keras's tracking: a method is not state.
    attributes, gathers = vars(layer), _GATHERS.of(layer)
    if gathers and _CALL not in attributes:
        attributes[_CALL] = functools.partial(_call, layer)
    elif not gathers and is_gather(attributes.get(_CALL)):
        del attributes[_CALL]


def is_gather(value: object) -> bool:
    """Whether an attribute of a layer is the gather that is installed on its `call`."""
    return isinstance(value, functools.partial) and value.func is _call


def call_with_gather(layer: keras.layers.Layer, *arguments: Any, **keywords: Any) -> Structure:
    """Runs the `call` of a layer's class; gathers the weights first if the layer gathers at calls."""
    if _GATHERS.of(layer):
        return _call(layer, *arguments, **keywords)
    return type(layer).call(layer, *arguments, **keywords)


def compiles_each_layer(model: keras.Model) -> bool:
    """Whether XLA has to compile a model's layers one by one, because each layer gathers its weights when called."""
    return bool(_not_copied(model.variables)) and not any(map(needs_whole_pass, all_layers(model)))


@contextlib.contextmanager
def gather_before_pass(model: keras.Model) -> Generator[None]:
    """Context in which this replica has all of a model's weights whole, for a pass in which collectives can't run."""
    with read_as({id(value): value.gathered() for value in _not_copied(model.variables)}):
        yield


def _not_copied(variables: Sequence[keras.Variable]) -> list[ShardedVariable]:
    """The sharded variables that have to be gathered to be read, as replicas have no whole copies."""
    return [value for variable in variables if (value := sharded_value(variable)) and value.copies is None]


@contextlib.contextmanager
def watch_gathered(tape: tf.GradientTape) -> Generator[Callable[[keras.Variable], Any]]:
    """Context of a pass, recorded by `tape`, that reads weights gathered before it.

    Yields a function from a Keras variable to what `tape.gradient` takes as its source.
    """
    # A branch, loop or function captures a tensor of the outer graph only once it is used in there.
    inner = {key: tf.identity(tensor) for key, tensor in READING.values.items()}
    tape.watch(list(inner.values()))
    with read_as(inner):
        yield lambda variable: inner.get(id(sharded_value(variable)), variable)


def _call(layer: keras.layers.Layer, *arguments: Any, **keywords: Any) -> Structure:
    """Replaces a layer's `call`: gathers its weights first, where a collective may run."""
    call: Callable[..., Structure] = functools.partial(type(layer).call, layer)
    inputs = keras.tree.flatten((arguments, keywords))
    on_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if not on_replica or in_symbolic_scope() or not layer.built:
        return call(*arguments, **keywords)
    read = _not_copied(_read_by(layer))
    # A loop within the layer would add up gradients of shards.
    zeros = {id(value): value.value() for value in read if READING.zeros}
    # What an outer layer or a pass has gathered.
    gathered = {*READING.values, *READING.cast, *zeros}
    missing = [value for value in read if id(value) not in gathered]
    if _looks_up_rows(layer, missing, keywords):
        return _call_embedding(call, missing[0], *arguments, **keywords)
    # Wait for the inputs of the previous layer: these weights arrive while that layer computes, and no earlier.
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    after = [input_ for input_ in _ORDER.inputs if input_.graph is graph]
    _ORDER.inputs = [input_ for input_ in inputs if isinstance(input_, tf.Tensor) and hasattr(input_, "graph")]
    dtypes = _compute_dtypes(layer)
    whole, cast = zeros, {}
    for value in missing:
        dtype = dtypes.get(id(value))
        (cast if dtype else whole)[id(value)] = value.gathered(dtype, after)
    if missing and is_compiled_by_layer(layer):
        # Layers within this one would leave theirs, which are tensors of the compiled function.
        own_inputs = _ORDER.inputs
        result = compiled_call(layer, call, arguments, keywords, (whole, cast), read_as)
        _ORDER.inputs = own_inputs
        return result
    with read_as(whole, cast):
        return call(*arguments, **keywords)


def _read_by(layer: keras.layers.Layer) -> list[Any]:
    """The variables that a layer reads, or the values that a stateless scope has for them."""
    scope = get_stateless_scope()
    if scope is None:
        return layer.variables
    values = [scope.get_current_value(variable) for variable in layer.variables]
    return [variable if value is None else value for variable, value in zip(layer.variables, values, strict=True)]


def _compute_dtypes(layer: keras.layers.Layer) -> dict[int, str]:
    """The dtype to which Keras casts each sharded weight of a layer, by `id`, if it differs from the weight's."""
    dtypes = {}
    for inner in layer._flatten_layers():
        for variable in inner._trainable_variables if inner.autocast else ():
            value = sharded_value(variable)
            dtype = value and dtype_within(variable, inner.compute_dtype)
            if value and dtype != value.dtype.name:
                dtypes[id(value)] = dtype
    return dtypes


def _looks_up_rows(layer: keras.layers.Layer, missing: Sequence[ShardedVariable], keywords: dict[str, Any]) -> bool:
    """Whether a call reads only the rows of one matrix that its input names."""
    calls = [layer.call for layer in (keras.layers.Embedding, *REVERSIBLE_EMBEDDINGS)]
    plain = type(layer).call in calls and not layer.lora_enabled and layer.quantization_mode is None
    return plain and len(missing) == 1 and missing[0].partition.rows is not None and not keywords.get("reverse")


def _call_embedding(
    call: Callable[..., Structure], table: ShardedVariable, indices: tf.Tensor, *arguments: Any, **keywords: Any
) -> Structure:
    """Calls an embedding with a table of only the rows that it looks up, and with indices into this table."""
    # `reverse`, given by position, reads the whole table.
    if any(arguments):
        with read_as({id(table): table.gathered()}):
            return call(indices, *arguments, **keywords)
    flat = tf.reshape(tf.cast(indices, "int32"), [-1])

    @tf.custom_gradient
    def look_up(shard: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.IndexedSlices]]:
        rows = look_up_rows(shard, flat, table.partition)
        return rows, lambda gradient: tf.IndexedSlices(gradient, flat, tf.constant(table.partition.shape))

    positions = tf.reshape(tf.range(tf.size(flat)), tf.shape(indices))
    positions.set_shape(indices.shape)
    rows: Any = look_up(table.shard.read_value())
    with read_as({id(table): rows}):
        return call(positions, **keywords)
