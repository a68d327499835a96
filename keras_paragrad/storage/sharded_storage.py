"""`Sharded`: the storage of a variable of which each replica holds a flat shard."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_index
from keras_paragrad.compat.local import Place
from keras_paragrad.storage.exchange import all_gather, reduce_scatter
from keras_paragrad.storage.reading import updated_whole
from keras_paragrad.storage.storage import Parts, Whole
from keras_paragrad.storage.updating import is_elementwise


class Sharded(Whole):
    """The storage of a variable whose value is a `ShardedVariable`."""

    divided = True

    def read(self) -> tf.Tensor:
        return self.variable.value()

    @property
    def local(self) -> Any:
        return self.variable.shard

    def is_replicated(self) -> bool:
        return False

    def recompute(self) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        if not self.variable.is_gathered:
            return tf.identity(self.read()), lambda kept: kept
        return tf.identity(self.local.read_value()), self.variable.whole

    @staticmethod
    def reduce(gradients: Sequence[Any], storages: Sequence[Any]) -> list[Any]:
        return reduce_scatter(gradients, [each.variable.partition for each in storages])

    def gather(self, gradient: Any) -> Any:
        # The identity waits for what this replica waits for.
        return self.variable.partition.whole(all_gather(tf.identity(gradient)))

    def scatter(self, gradient: Any) -> Any:
        return self.variable.partition.shard(gradient, replica_index())

    def accumulate(self, gradient: Any, scale: Any, first: Any) -> None:
        # It was scaled on each replica, when it was reduced. A slice of the sum would keep all of that in memory.
        super().accumulate(tf.raw_ops.DeepCopy(x=gradient), None, first)

    def takes_steps_of(self, optimizer: Any) -> bool:
        return is_elementwise(optimizer)

    def update(self, optimizer: Any, gradient: Any, learning_rate: Any, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gathers the value, has the optimizer update it, and keeps this replica's shard."""
        check_being_updated([self.variable])
        with tf.control_dependencies(after), updated_whole():
            whole = self.gather(gradient)
            optimizer.update_step(whole, self.variable, learning_rate)
            return [tf.identity(whole)]

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        self.variable.being_updated = True
        # Until they are refreshed: what is read on the way is gathered.
        self.variable.copies_hold = False
        try:
            yield
        finally:
            self.variable.being_updated = False
            self.variable.copies_hold = self.variable.copies is not None

    def refresh(self) -> None:
        self.variable.refresh()

    def parts(self, place: Place) -> Parts:
        return Parts(self.variable.partition.size, self._shards)

    def _shards(self) -> Iterator[np.ndarray]:
        return (shard.numpy() for shard in self.variable.values)


def check_being_updated(storages: Iterable[Any]) -> None:
    """Refuses to give an optimizer shards, whose gradients would have to be those of shards.

    Raises:
        ValueError: This is not in a step of ours.
    """
    for storage in storages:
        if not storage.being_updated:
            raise ValueError(
                f"{storage.name!r} is in shards, and is to be updated in a step that hands out whole gradients, as a "
                "loop of your own or a model that isn't prepared does. Train it with dist.fit(model, ...), or with "
                "model.fit(...) after dist.prepare(model). For a loop of your own, write DistributedFit(..., "
                "shard=None)."
            )
