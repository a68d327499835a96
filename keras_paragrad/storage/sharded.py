"""`ShardedVariable`: the storage of a Keras variable of which each replica holds a shard."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.common.variables import get_autocast_scope
from tensorflow.python.distribute.distribute_lib import get_update_replica_id
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.distribute.values_util import get_current_replica_id_as_int

from keras_paragrad.compat.collectives import replica_index
from keras_paragrad.compat.local import place_of
from keras_paragrad.compat.workers import barrier
from keras_paragrad.storage.exchange import all_gather
from keras_paragrad.storage.partition import Partition
from keras_paragrad.storage.reading import READING, Noted
from keras_paragrad.storage.regathering import note
from keras_paragrad.storage.sharded_storage import Sharded


class ShardedVariable(DistributedVariable):
    """A distributed variable of which each replica holds one flat shard.

    Seen from a replica or from outside it is whole: it is gathered where it is read, and its gradient is that of the
    whole. Within `tf.distribute.StrategyExtended.update`, where optimizers compute, it is the shard.

    Args:
        strategy: The strategy.
        values: This process's shards.
        partition: How the variable is cut.
        aggregation: As in `tf.Variable`.
        policy: As in TensorFlow's own.
        copies: A distributed variable that every replica holds whole, to read in place of gathering, or `None`.
    """

    def __init__(
        self,
        strategy: Any,
        values: Sequence[Any],
        partition: Partition,
        aggregation: Any,
        policy: Any,
        copies: Any = None,
    ):
        super().__init__(strategy, values, aggregation, var_policy=policy)
        self._packed_var = None
        self.partition = partition
        self.copies = copies
        self.copies_hold = copies is not None
        # Whether an optimizer is given the shards.
        self.being_updated = False

    @property
    def storage(self) -> Sharded:
        """What is asked where a variable's value lives."""
        return Sharded(self)

    @property
    def shape(self) -> tf.TensorShape:
        """That of the whole, or within an update that of the shard."""
        return self._primary.shape if get_update_replica_id() is not None else tf.TensorShape(self.partition.shape)

    def get_shape(self) -> tf.TensorShape:
        """`shape`."""
        return self.shape

    @property
    def handle(self) -> Any:
        """On a replica, that of what its gradient is asked of: the copy if there is one, or the shard."""
        if self.copies_hold and _on_replica():
            return self._copy.handle
        return super().handle

    @property
    def shard(self) -> Any:
        """This replica's shard, a `tf.Variable`."""
        return self._values[_local_index()]

    @property
    def _copy(self) -> Any:
        return self.copies.values[_local_index()]

    def read_value(self) -> tf.Tensor:
        """The whole, or within an update the shard."""
        return tf.identity(self._read())

    def value(self) -> tf.Tensor:
        """The whole, or within an update the shard."""
        return tf.convert_to_tensor(self._read())

    def numpy(self) -> Any:
        """The whole, gathered; every worker has to call it."""
        return self.value().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def _dense_var_to_tensor(self, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
        return tf.convert_to_tensor(self._read(), dtype=dtype, name=name)

    def _get(self) -> Any:
        # What operators such as `+` compute with.
        return self._read()

    def __getattr__(self, name: str) -> Any:
        # TensorFlow asks `_get`, which gathers.
        if name.startswith("__") or "_values" not in vars(self):
            raise AttributeError(name)
        return getattr(self._primary, name)

    def _read(self) -> Any:
        update = get_update_replica_id()
        if update is not None:
            return self._values[update]
        if in_symbolic_scope():
            return tf.zeros(self.partition.shape, self.dtype)
        if not _on_replica_of(self._distribute_strategy):
            return self._assembled()
        if READING.assigned is not None and id(self) in READING.assigned:
            return READING.assigned[id(self)][1]
        cast, scope = READING.cast.get(id(self)), get_autocast_scope()
        if cast is not None and scope is not None and cast.dtype == scope.dtype:
            return cast
        known = READING.values.get(id(self))
        if known is None and self.copies_hold:
            return self._copy
        return self.gathered() if known is None else known

    def gathered(self, dtype: Any = None, after: Sequence[tf.Tensor] = ()) -> tf.Tensor:
        """The whole on this replica, from all replicas' shards. The gradient of the shard is that of the whole.

        Args:
            dtype: What to gather it in; its own, if `None`.
            after: Tensors to wait for.
        """
        with tf.control_dependencies(after):
            whole = self.whole(self.shard.read_value(), dtype)
        note(self, dtype, whole)
        return whole

    def whole(self, shard: tf.Tensor, dtype: Any = None) -> tf.Tensor:
        """The whole from what each replica has read of its shard."""

        @tf.custom_gradient
        def whole(shard: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], Any]]:
            everything = all_gather(tf.cast(shard, dtype or shard.dtype))
            # *Combine* scatters the gradient, weighted as it then is among those of other replicas and micro-batches.
            return self.partition.whole(everything), lambda gradient: tf.cast(gradient, self.dtype)

        found: Any = whole(shard)
        return found

    def _assembled(self) -> tf.Tensor:
        """The whole, outside of replicas."""
        if place_of(self._distribute_strategy).workers > 1:
            with self._distribute_strategy.scope():
                gathered = self._distribute_strategy.run(lambda: all_gather(self.shard.read_value()))
            everything = self._distribute_strategy.experimental_local_results(gathered)[0]
            if tf.executing_eagerly():
                barrier()
            return self._joined(everything)
        with tf.device("CPU:0"):
            return self._joined(tf.concat([shard.read_value() for shard in self._values], 0))

    def _joined(self, shards: tf.Tensor) -> tf.Tensor:
        """The whole of all shards, with the gradient of the first one, which a tape outside of replicas asks for."""

        @tf.custom_gradient
        def joined(_: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], Any]]:
            return self.partition.whole(tf.stop_gradient(shards)), lambda gradient: gradient

        found: Any = joined(self._primary.read_value())
        return found

    def _update_cross_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            # Rows of the whole, which shards don't have.
            written = tf.Variable(self._assembled(), trainable=False)
            update_fn(written, value, **kwargs)
            return self._update_cross_replica(lambda variable, whole: variable.assign(whole), written)
        first = place_of(self._distribute_strategy).first
        whole = tf.convert_to_tensor(value, dtype=self.dtype)
        updates = []
        for place, shard in enumerate(self._values):
            with tf.device(shard.device):
                updates.append(update_fn(shard, self.partition.kept_shard(whole, first + place), **kwargs))
                if self.copies is not None:
                    update_fn(self.copies.values[place], whole, **kwargs)
        return updates[0]

    def _update_replica(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        whole = tf.convert_to_tensor(value, dtype=self.dtype)
        if READING.assigned is not None:
            update_fn(Noted(self, READING.assigned), whole)
            return None
        if self.copies_hold:
            update_fn(self._copy, whole, **kwargs)
        return update_fn(self.shard, self.partition.kept_shard(whole, replica_index()), **kwargs)

    def _export_to_saved_model_graph(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "A SavedModel can't hold variables in shards. Save the weights with model.save_weights(path), load them "
            "into the same model built outside of dist.scope(), and export that."
        )

    def refresh(self) -> None:
        """Writes what the shards hold into the copies; called on every replica."""
        if self.copies is not None:
            self._copy.assign(self.partition.whole(all_gather(self.shard.read_value())))

    @property
    def is_gathered(self) -> bool:
        """Whether this replica gathers the value where it is read now."""
        known = self.copies_hold or id(self) in READING.values
        return not known and _on_replica_of(self._distribute_strategy)


def sharded_value(variable: Any) -> ShardedVariable | None:
    """The value of a variable in shards, of Keras's or TensorFlow's, or `None` for any other variable."""
    value = getattr(variable, "_value", variable)
    return value if isinstance(value, ShardedVariable) else None


def _on_replica() -> bool:
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def _on_replica_of(strategy: Any) -> bool:
    return _on_replica() and tf.distribute.get_strategy() is strategy


def _local_index() -> int:
    index = get_current_replica_id_as_int()
    return 0 if index is None else index
