"""`ShardedVariable`: a variable with one shard on each replica, and `Sharded`, its storage."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, replica_index
from keras_paragrad.compat.private import (
    DistributedVariable,
    get_autocast_scope,
    get_current_replica_id_as_int,
    get_update_replica_id,
    in_symbolic_scope,
)
from keras_paragrad.compat.types import DType, GradientTensor, Scalar, TensorVariable
from keras_paragrad.compat.workers import ReplicaPlacement, barrier, replica_placement
from keras_paragrad.storage.reading import READING, AssignmentRecorder, assigning_whole
from keras_paragrad.storage.regathering import record_gather
from keras_paragrad.storage.row_gradients import sum_gradients
from keras_paragrad.storage.sharding import Partition, all_gather, reduce_scatter
from keras_paragrad.storage.storage import Parts, Storage, host_value
from keras_paragrad.storage.updating import is_elementwise


class ShardedVariable(DistributedVariable):
    """A distributed variable with one flat shard on each replica.

    On a replica and in cross-replica context it is whole: reading gathers the value, and its gradient is whole too.
    Within `tf.distribute.StrategyExtended.update`, where optimizers compute, it is the shard.

    Args:
        strategy, aggregation, policy: As in `DistributedVariable`.
        values: This process's shards.
        partition: How the variable is divided.
        copies: A distributed variable that is whole on each replica, to read instead of gathering, or `None`.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        values: Sequence[tf.Variable],
        partition: Partition,
        aggregation: tf.VariableAggregation,
        policy: Any,
        copies: TensorVariable | None = None,
    ):
        super().__init__(strategy, values, aggregation, var_policy=policy)
        self.partition = partition
        self.copies = copies
        # Whether optimizers receive the shards.
        self.being_updated = False

    @property
    def storage(self) -> "Sharded":
        """The variable's `Storage`."""
        return Sharded(self)

    @property
    def copies_are_current(self) -> bool:
        """Whether there are whole copies to read: not while optimizers update the shards."""
        return self.copies is not None and not self.being_updated

    @property
    def shape(self) -> tf.TensorShape:
        """The whole shape, or within an update the shard's shape."""
        return self.values[0].shape if get_update_replica_id() is not None else tf.TensorShape(self.partition.shape)

    def get_shape(self) -> tf.TensorShape:
        """`shape`."""
        return self.shape

    @property
    def handle(self) -> tf.Tensor:
        """On a replica, the handle that tapes watch: the copy's if there is one, else the shard's."""
        if self.copies_are_current and _on_replica():
            return self.local_copy.handle
        return super().handle

    @property
    def shard(self) -> TensorVariable:
        """This replica's shard, a `tf.Variable`."""
        return self.values[_local_index()]

    @property
    def local_copy(self) -> TensorVariable:
        """This replica's whole copy, a `tf.Variable`."""
        copies: Any = self.copies
        return copies.values[_local_index()]

    def read_value(self) -> tf.Tensor:
        """The whole, or within an update the shard."""
        return tf.identity(self._read())

    def value(self) -> tf.Tensor:
        """The whole, or within an update the shard."""
        return tf.convert_to_tensor(self._read())

    def numpy(self) -> np.ndarray:
        """The whole, gathered; called on every worker."""
        return self.value().numpy()

    def __array__(self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def _dense_var_to_tensor(
        self, dtype: DType | None = None, name: str | None = None, as_ref: bool = False
    ) -> tf.Tensor:
        return tf.convert_to_tensor(self._read(), dtype=dtype, name=name)

    def _get(self) -> Any:
        # The operand of operators such as `+`.
        return self._read()

    def __getattr__(self, name: str) -> Any:
        # TensorFlow's looks in `_get()`, which gathers.
        if name.startswith("__") or "partition" not in vars(self):
            raise AttributeError(name)
        return getattr(self.values[0], name)

    def _read(self) -> tf.Tensor:
        """The whole, or within an update the shard; on a replica, a tensor of `READING` in its place, if any."""
        update = get_update_replica_id()
        if update is not None:
            return self.values[update]
        if in_symbolic_scope():
            return tf.zeros(self.partition.shape, self.dtype)
        if not _on_replica_of(self.distribute_strategy):
            return self._gather_outside()
        if READING.assigned is not None and id(self) in READING.assigned:
            return READING.assigned[id(self)][1]
        cast, scope = READING.cast.get(id(self)), get_autocast_scope()
        if cast is not None and scope is not None and cast.dtype == scope.dtype:
            return cast
        if id(self) in READING.values:
            return READING.values[id(self)]
        if self.copies_are_current:
            return self.local_copy
        if READING.zeros:
            return _linked(tf.zeros(self.partition.shape, self.dtype), self.shard.read_value())
        return self.gathered()

    def gathered(self, dtype: DType | None = None, after: Sequence[tf.Tensor] = ()) -> tf.Tensor:
        """Gathers all replicas' shards, in a dtype, after some tensors. The shard's gradient is that of the whole."""
        with tf.control_dependencies(after):
            whole = self.whole(self.shard.read_value(), dtype)
        record_gather(self, dtype, whole)
        return whole

    def whole(self, shard: tf.Tensor, dtype: DType | None = None) -> tf.Tensor:
        """Gathers the whole value from each replica's `shard`, which it has read already."""

        @tf.custom_gradient
        def gather(shard: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            shards = all_gather(tf.cast(shard, dtype or shard.dtype))
            # *Combine* scatters the gradient, weighted against the gradients of other replicas and micro-batches.
            return self.partition.whole(shards), lambda gradient: tf.cast(gradient, self.dtype)

        whole: Any = gather(shard)
        return whole

    def read_locally(self) -> tf.Tensor | None:
        """The whole, without a collective; `None` if it can't be read without other workers."""
        if self.copies is not None:
            copies: Any = self.copies
            return tf.convert_to_tensor(copies.values[0])
        if replica_placement(self.distribute_strategy).workers > 1:
            return None
        with tf.device("CPU:0"):
            return self.partition.whole(tf.concat([shard.read_value() for shard in self.values], 0))

    def _gather_outside(self) -> tf.Tensor:
        if replica_placement(self.distribute_strategy).workers > 1:
            with self.distribute_strategy.scope():
                gathered = self.distribute_strategy.run(lambda: all_gather(self.shard.read_value()))
            shards = self.distribute_strategy.experimental_local_results(gathered)[0]
            if tf.executing_eagerly():
                # Other workers may still read from this process, and fail if it exits.
                barrier()
            return self._join(shards)
        with tf.device("CPU:0"):
            return self._join(tf.concat([shard.read_value() for shard in self.values], 0))

    def _join(self, shards: tf.Tensor) -> tf.Tensor:
        """Joins all shards. The whole gradient flows to the first shard, which tapes outside of replicas watch."""
        return _linked(self.partition.whole(tf.stop_gradient(shards)), self.values[0].read_value())

    def _update_cross_replica(self, update_fn: Callable[..., object], value: Any, **kwargs: Any) -> object:
        if isinstance(value, tf.IndexedSlices):
            # `tf.IndexedSlices` index rows of the whole variable.
            written = tf.Variable(self._gather_outside(), trainable=False)
            update_fn(written, value, **kwargs)
            return self._update_cross_replica(lambda variable, whole: variable.assign(whole), written)
        first = replica_placement(self.distribute_strategy).first
        whole = tf.convert_to_tensor(value, dtype=self.dtype)
        updates = []
        for index, shard in enumerate(self.values):
            with tf.device(shard.device):
                updates.append(update_fn(shard, self.partition.copy_shard(whole, first + index), **kwargs))
                if self.copies is not None:
                    update_fn(self.copies.values[index], whole, **kwargs)
        return updates[0]

    def _update_replica(self, update_fn: Callable[..., object], value: Any, **kwargs: Any) -> object:
        whole = tf.convert_to_tensor(value, dtype=self.dtype)
        if READING.assigned is not None:
            update_fn(AssignmentRecorder(self, READING.assigned), whole)
            return None
        if id(self) in READING.values or id(self) in READING.cast:
            raise ValueError(
                f"A layer assigns to its weight {self.name!r} when it is called, as SpectralNormalization does. The "
                "weight's shards were gathered before, and the layer would go on with their old values. Write "
                "DistributedFit(..., shard='optimizer')."
            )
        if self.copies_are_current:
            update_fn(self.local_copy, whole, **kwargs)
        return update_fn(self.shard, self.partition.copy_shard(whole, replica_index()), **kwargs)

    def _export_to_saved_model_graph(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "A SavedModel can't hold variables in shards. Save the weights with model.save_weights(path), load them "
            "into the same model built outside of dist.scope(), and export that."
        )

    @property
    def is_gathered(self) -> bool:
        """Whether reading on this replica gathers."""
        replaced = self.copies_are_current or READING.zeros or id(self) in READING.values
        return not replaced and _on_replica_of(self.distribute_strategy)


class Sharded(Storage):
    """The storage of a variable whose value is a `ShardedVariable`; see `Storage`."""

    variable: ShardedVariable
    divided = True

    def read(self) -> tf.Tensor:
        return self.variable.value()

    @property
    def local(self) -> TensorVariable:
        return self.variable.shard

    def is_replicated(self) -> bool:
        return False

    def recompute(self) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        if not self.variable.is_gathered:
            return super().recompute()
        return tf.identity(self.local.read_value()), self.variable.whole

    @staticmethod
    def reduce(gradients: Sequence[GradientTensor], storages: Sequence[Any]) -> list[Any]:
        """This replica's shards of sums; of lookups, those of all replicas, for optimizers square each by itself."""
        sums: list[Any] = list(gradients)
        looked_up = [index for index, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
        dense = [index for index in range(len(sums)) if index not in looked_up]
        partitions = [storages[index].variable.partition for index in dense]
        totals = [
            *reduce_scatter([sums[index] for index in dense], partitions),
            *sum_gradients([sums[index] for index in looked_up]),
        ]
        for index, total in zip([*dense, *looked_up], totals, strict=True):
            sums[index] = total
        return sums

    def gather(self, gradient: GradientTensor) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            return gradient
        # The identity takes on control dependencies.
        return self.variable.partition.whole(all_gather(tf.identity(gradient)))

    def scatter(self, gradient: GradientTensor) -> Any:
        partition, index = self.variable.partition, replica_index()
        if isinstance(gradient, tf.IndexedSlices):
            return partition.shard_of_lookups(gradient, index)
        return partition.shard(gradient, index)

    def square(self, gradient: GradientTensor) -> tf.Tensor:
        # Every replica has all lookups, and the replicas' squares are summed.
        replicas = replica_count() if isinstance(gradient, tf.IndexedSlices) else 1
        return super().square(gradient) / replicas

    def accumulate(self, gradient: GradientTensor, scale: Scalar | None, first: tf.Tensor | bool) -> None:
        # The gradient was scaled when it was reduced.
        if isinstance(gradient, tf.IndexedSlices):
            super().accumulate(self.scatter(gradient), None, first)
            return
        # It is copied, as a slice of the sum would keep the sum in memory.
        super().accumulate(tf.raw_ops.DeepCopy(x=gradient), None, first)

    def takes_steps_of(self, optimizer: keras.optimizers.Optimizer) -> bool:
        return is_elementwise(optimizer)

    def update(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradient: GradientTensor,
        learning_rate: Scalar,
        after: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Gathers value and gradient, runs the optimizer's step, and stores this replica's shard."""
        check_being_updated([self.variable])
        with tf.control_dependencies(after), assigning_whole():
            whole = self.gather(gradient)
            optimizer.update_step(whole, self.variable, learning_rate)
            return [tf.identity(whole)]

    @contextlib.contextmanager
    def updating(self) -> Generator[None]:
        # Until `refresh`, reads gather.
        self.variable.being_updated = True
        try:
            yield
        finally:
            self.variable.being_updated = False

    def refresh(self) -> None:
        """Copies the shards of all replicas to the whole copies."""
        variable = self.variable
        if variable.copies is not None:
            variable.local_copy.assign(variable.partition.whole(all_gather(variable.shard.read_value())))

    def parts(self, placement: ReplicaPlacement) -> Parts:
        return Parts(self.variable.partition.size, lambda: map(host_value, self.variable.values))


def check_being_updated(variables: Iterable[ShardedVariable]) -> None:
    """Refuses to pass shards to an optimizer outside of a step, where gradients are not reduced to shards."""
    for variable in variables:
        if not variable.being_updated:
            raise ValueError(
                f"{variable.name!r} is in shards, and is to be updated with a whole gradient, as a custom training "
                "loop or a model that isn't prepared does. Train with dist.fit(model, ...), or with model.fit(...) "
                "after dist.prepare(model). For a custom training loop, write DistributedFit(..., shard=None)."
            )


def sharded_value(variable: object) -> ShardedVariable | None:
    """The `ShardedVariable` of a Keras or TensorFlow variable, or `None` for any other variable."""
    value = getattr(variable, "_value", variable)
    return value if isinstance(value, ShardedVariable) else None


def _linked(whole: tf.Tensor, shard: tf.Tensor) -> tf.Tensor:
    """A whole value whose gradient flows to a shard, which tapes watch."""

    @tf.custom_gradient
    def link(_: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(whole), lambda gradient: gradient

    linked: Any = link(shard)
    return linked


def _on_replica() -> bool:
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def _on_replica_of(strategy: tf.distribute.Strategy) -> bool:
    return _on_replica() and tf.distribute.get_strategy() is strategy


def _local_index() -> int:
    index = get_current_replica_id_as_int()
    return 0 if index is None else index
