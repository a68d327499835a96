"""From what `fit` takes to a source of global batches, read as Keras reads it."""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad._keras.objects.data import adapter_of, reads_arrays
from keras_paragrad._keras.replicas.local import Place
from keras_paragrad.distribution.data.arguments import Request
from keras_paragrad.distribution.data.batch_sharding import check_batches, check_size
from keras_paragrad.distribution.data.order import ReorderedDataset
from keras_paragrad.distribution.data.sources import ArraySource, Source, StreamSource, static_rows

KERAS_BATCH_SIZE = 32


def open_source(data: tuple[Any, Any, Any], request: Request, policy: str, place: Place, seed: int) -> Source:
    """Opens data for reading.

    Args:
        data: `x`, `y` and `sample_weight`, as `fit` takes them.
        request: The other arguments.
        policy: The shard policy.
        place: Which replicas are here.
        seed: What orders are drawn from.

    Raises:
        ValueError: Keras can't read the data, they are no batches, or these are too small for the replicas.
    """
    x, reordered = data[0], None
    if request.shuffle and isinstance(x, keras.utils.PyDataset) and x.num_batches is not None:
        x = reordered = ReorderedDataset(x, seed)
    adapter = adapter_of(
        x,
        *data[1:],
        batch_size=_rows_of_array_batches(request, place),
        steps_per_epoch=request.steps_per_epoch,
        class_weight=request.class_weight,
    )
    replicas = place.local if policy == "already_sharded" else place.replicas
    if reads_arrays(adapter):
        check_size(adapter.batch_size, place.replicas)
        source = ArraySource(adapter, request.shuffle, seed, _share(adapter.batch_size, policy, place))
    else:
        size = None if request.batch == "global" else _rows_of_stream(adapter.get_tf_dataset(), request) * replicas
        source = StreamSource(adapter, size, reordered)
    check_batches(source.batches(0).element_spec, replicas)
    return source


def _rows_of_array_batches(request: Request, place: Place) -> int | None:
    if request.batch == "global" or (request.steps_per_epoch and not request.batch_size):
        return request.batch_size
    return (request.batch_size or KERAS_BATCH_SIZE) * place.replicas


def _share(batch_size: int, policy: str, place: Place) -> int:
    """How many rows of its own a worker adds to a batch."""
    if policy != "already_sharded":
        return batch_size
    each, rest = divmod(batch_size, place.workers)
    return each + (place.worker < rest)


def _rows_of_stream(batches: tf.data.Dataset, request: Request) -> int:
    rows = request.batch_size or static_rows(batches)
    if rows is None:
        raise ValueError(
            'batch="per_replica" needs to know how many rows a batch has, and the data does not say. Write '
            "batch_size=..., the rows for one replica, or batch with drop_remainder=True."
        )
    return rows
