"""Where weights in shards are gathered: at each layer's call, in order, or all before a pass that can't gather."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_paragrad.compat.compiled_call import compiled_call, compiles, may_be_parted
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.state import state_of
from keras_paragrad.storage.creation import may_be_in_shards
from keras_paragrad.storage.exchange import looked_up
from keras_paragrad.storage.reading import known, known_cast, read_as
from keras_paragrad.storage.sharded import ShardedVariable, sharded_value

_CALL = "call"


class _Order(threading.local):
    """The inputs of the layer that was called last on this replica."""

    def __init__(self) -> None:
        self.inputs: list[tf.Tensor] = []


_ORDER = _Order()


def gather_at_calls(model: keras.Model) -> None:
    """Has each of a model's layers gather its weights when it is called, until `gather_on_read`.

    TensorFlow can't run a collective within a loop, as recurrent layers read weights, and gathers that wait for
    nothing would all be done at once.
    """
    if not may_be_in_shards(model):
        return
    for layer in all_layers(model):
        # One that has no weights yet may be built by its first call.
        if not isinstance(layer, keras.Model):
            state_of(layer).gathers = True
            install_gather(layer)


def gather_on_read(model: keras.Model) -> None:
    """Restores the layers' own `call`."""
    for layer in all_layers(model):
        state_of(layer).gathers = False
        install_gather(layer)


def install_gather(layer: keras.layers.Layer) -> None:
    """Has a layer that nothing else calls in a way of its own gather its weights when it is called, if it is to."""
    # Bypass Keras's tracking: a method is not state.
    own, gathers = vars(layer), state_of(layer).gathers
    if gathers and _CALL not in own:
        own[_CALL] = functools.partial(_call, layer)
    elif not gathers and isinstance(own.get(_CALL), functools.partial) and own[_CALL].func is _call:
        del own[_CALL]


def plain_call(layer: Any, *arguments: Any, **keywords: Any) -> Any:
    """What the layer's class does when it is called, with its weights gathered before, if they are to be."""
    if state_of(layer).gathers:
        return _call(layer, *arguments, **keywords)
    return type(layer).call(layer, *arguments, **keywords)


def compiled_in_pieces(model: keras.Model) -> bool:
    """Whether XLA has to compile a model's layers one by one, as each gathers its weights when it is called."""
    return bool(_gathered(model.variables)) and may_be_parted(model)


@contextlib.contextmanager
def gathered_first(model: keras.Model) -> Iterator[None]:
    """Context in which this replica has all of a model's weights whole, for a pass that can't gather."""
    with read_as({id(storage): storage.gathered() for storage in _gathered(model.variables)}):
        yield


def _gathered(variables: Sequence[keras.Variable]) -> list[ShardedVariable]:
    """What has to be gathered to be read."""
    return [value for variable in variables if (value := sharded_value(variable)) and value.copies is None]


@contextlib.contextmanager
def differentiable(tape: tf.GradientTape) -> Iterator[Callable[[Any], Any]]:
    """Context of a pass; gives what turns a Keras variable into that of which its gradient is asked.

    Args:
        tape: The tape that records the pass.
    """
    # A branch, a loop or a function of its own knows no tensor of the graph around it until it is used.
    inside = {key: tf.identity(tensor) for key, tensor in known().items()}
    tape.watch(list(inside.values()))
    with read_as(inside):
        yield lambda variable: inside.get(id(sharded_value(variable)), variable)


def _call(layer: Any, *arguments: Any, **keywords: Any) -> Any:
    call: Callable[..., Any] = functools.partial(type(layer).call, layer)
    inputs = keras.tree.flatten((arguments, keywords))
    inside = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if not inside or in_symbolic_scope() or in_stateless_scope() or not layer.built:
        return call(*arguments, **keywords)
    held = {*known(), *known_cast()}
    missing = [storage for storage in _gathered(layer.variables) if id(storage) not in held]
    if _looks_up(layer, missing, keywords):
        return _rows(call, missing[0], *arguments, **keywords)
    # When the layer before it began: this one's weights arrive while that one computes, and no earlier.
    after = [each for each in _ORDER.inputs if each.graph is _graph()]
    _ORDER.inputs = [each for each in inputs if isinstance(each, tf.Tensor) and hasattr(each, "graph")]
    dtypes = _compute_dtypes(layer)
    whole, cast = {}, {}
    for storage in missing:
        dtype = dtypes.get(id(storage))
        (cast if dtype else whole)[id(storage)] = storage.gathered(dtype, after)
    if missing and compiles(layer):
        began = _ORDER.inputs
        result = compiled_call(layer, call, arguments, keywords, (whole, cast), read_as)
        _ORDER.inputs = began
        return result
    with read_as(whole, cast):
        return call(*arguments, **keywords)


def _compute_dtypes(layer: Any) -> dict[int, str]:
    """What Keras casts weights in shards to where a layer reads them, if that is not what they are stored in."""
    dtypes = {}
    for each in layer._flatten_layers():
        for variable in each._trainable_variables if each.autocast else ():
            storage = sharded_value(variable)
            if storage and variable._autocast and each.compute_dtype != storage.dtype.name:
                dtypes[id(storage)] = each.compute_dtype
    return dtypes


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _looks_up(layer: Any, missing: Sequence[ShardedVariable], keywords: dict[str, Any]) -> bool:
    """Whether a call reads nothing of one missing matrix but the rows that its input names."""
    calls = (keras.layers.Embedding.call, keras.layers.ReversibleEmbedding.call)
    plain = type(layer).call in calls and not layer.lora_enabled and layer.quantization_mode is None
    return plain and len(missing) == 1 and missing[0].partition.rows is not None and not keywords.get("reverse")


def _rows(call: Callable[..., Any], table: ShardedVariable, indices: Any, *arguments: Any, **keywords: Any) -> Any:
    """Calls an embedding with the rows that it looks up as its table."""
    if any(arguments):
        with read_as({id(table): table.gathered()}):
            return call(indices, *arguments, **keywords)
    wanted = tf.reshape(tf.cast(indices, "int32"), [-1])

    @tf.custom_gradient
    def rows(shard: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], Any]]:
        found = looked_up(shard, wanted, table.partition)
        return found, lambda gradient: tf.IndexedSlices(gradient, wanted, tf.constant(table.partition.shape))

    places = tf.reshape(tf.range(tf.size(wanted)), tf.shape(indices))
    places.set_shape(indices.shape)
    found: Any = rows(table.shard.read_value())
    with read_as({id(table): found}):
        return call(places, **keywords)
