"""`estimate_memory`: the bytes that a training step takes on each device, before anything is trained."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras

from keras_paragrad.arguments import check_flag, check_instance, check_integer
from keras_paragrad.compat.layers import children
from keras_paragrad.engine.step.recompute import recompute_layer
from keras_paragrad.engine.step.segments import recompute_parts
from keras_paragrad.engine.step.tracing import traced_step
from keras_paragrad.memory.breakdown import breakdowns_of
from keras_paragrad.memory.estimated import Estimate
from keras_paragrad.memory.layer_names import check_layer
from keras_paragrad.memory.segments import cut_where_it_pays
from keras_paragrad.storage.partition import MIN_SHARD_BYTES


class Recomputation(NamedTuple):
    """Parts of a model that may be recomputed.

    Attributes:
        names: What they are called; none if nothing is to be recomputed.
        begin: Has them run again in the backward pass, and returns what ends it.
    """

    names: list[str]
    begin: Callable[[], Callable[[], None]]

    @contextlib.contextmanager
    def in_effect(self) -> Iterator[None]:
        """Context in which they are recomputed; functions that were traced before stay as they are."""
        end = self.begin()
        try:
            yield
        finally:
            end()


def recomputation_of(model: Any) -> Recomputation:
    """What `recompute(model)` recomputes; of a model that it can't cut, blocks that are alike."""
    try:
        cut = cut_where_it_pays(model)
    except ValueError:
        blocks = repeated_blocks(model)
        return Recomputation([block.name for block in blocks], lambda: _all_again(blocks))
    names = [part.name for part, again in cut.segments if again]
    return Recomputation(names, lambda: recompute_parts(model, cut.functional, cut.segments))


def repeated_blocks(model: keras.Model) -> list[keras.layers.Layer]:
    """Layers made of layers, of which several beside each other have the same weights' shapes; the outermost."""
    return [block for block in _within(model) if _can_be_recomputed(model, block)]


def _all_again(blocks: list[keras.layers.Layer]) -> Callable[[], None]:
    undo = [recompute_layer(block) for block in blocks]

    def end() -> None:
        for each in undo:
            each()

    return end


def _within(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    groups: dict[Any, list[keras.layers.Layer]] = defaultdict(list)
    for child in children(layer):
        shapes = tuple(tuple(variable.shape) for variable in child.trainable_variables)
        groups[(type(child), shapes) if shapes and children(child) else id(child)].append(child)
    return [block for group in groups.values() for block in (group if len(group) > 1 else _within(group[0]))]


def _can_be_recomputed(model: keras.Model, layer: keras.layers.Layer) -> bool:
    try:
        check_layer(model, layer)
    except ValueError:
        return False
    return True


def estimate_memory(
    model: keras.Model,
    batch_size: int,
    replicas: int = 1,
    *,
    per_replica: bool = False,
    length: int | None = None,
    optimizer: Any = None,
    min_shard_bytes: int = MIN_SHARD_BYTES,
    batch_spec: Any = None,
) -> Estimate:
    """Estimates the memory of each device in `fit`, for every way to shard the model.

    The training step is traced and followed, but not run; the model is left as it is, and no weights are made.

    Args:
        model: A compiled and built model.
        batch_size: Examples in a batch.
        replicas: Number of devices.
        per_replica: Whether each replica takes a batch, rather than a part of one.
        length: The size of axes that the model's inputs leave open, such as the number of tokens.
        optimizer: The optimizer, if not the model's.
        min_shard_bytes: The size of a trainable variable, in bytes, from which it is cut into shards.
        batch_spec: The nested `tf.TypeSpec` of batches of data; by default it is derived from the model and its loss.

    Returns:
        An `Estimate`, for `print`.

    Raises:
        ValueError: An argument is invalid, or the step can't be traced. The message says what to write.

    Example:

    >>> import keras
    >>> from keras_paragrad.memory import estimate_memory
    >>> model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(1024), keras.layers.Dense(1)])
    >>> model.compile("adam", loss="mse")
    >>> column = estimate_memory(model, batch_size=64, replicas=4)["optimizer"]
    >>> column.parameters, column.slots < 2 * column.parameters / 3
    (1056772, True)
    """
    check_instance("model", model, keras.Model, "a compiled keras.Model")
    batch_size = check_integer("batch_size", batch_size, example=64)
    replicas = check_integer("replicas", replicas, example=8)
    min_shard_bytes = check_integer("min_shard_bytes", min_shard_bytes)
    per_replica = check_flag("per_replica", per_replica)
    length = check_integer("length", length, example=128, optional=True)
    if optimizer is None and (not model.compiled or model.optimizer is None):
        raise ValueError(f"{model.name!r} has no optimizer. Call model.compile(optimizer, loss) first.")
    rows = batch_size if per_replica else -(-batch_size // replicas)
    columns = breakdowns_of(
        model, traced_step(model, rows, length, optimizer, batch_spec), replicas, least=min_shard_bytes
    )
    recomputation = recomputation_of(model)
    if recomputation.names:
        with recomputation.in_effect():
            step = traced_step(model, rows, length, optimizer, batch_spec)
        columns += breakdowns_of(model, step, replicas, recompute=True, least=min_shard_bytes)
    return Estimate(model.name, batch_size, replicas, rows, columns, recomputation.names)
