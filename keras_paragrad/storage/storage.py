"""`Storage`: where a variable's value lives, and the operations that steps, optimizers, windows and backups use.

A gradient is *reduced* when it is summed over the replicas; each replica has a part of it if the variable is
divided. A window is the micro-batches of one update.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.collectives import replica_count, run_if
from keras_paragrad.compat.layers import compiled_by_xla
from keras_paragrad.compat.types import Gradients, GradientTensor, Scalar, TensorVariable, Variable
from keras_paragrad.compat.workers import ReplicaPlacement
from keras_paragrad.storage.dtensor import Mesh, on_mesh
from keras_paragrad.storage.row_gradients import is_overwritten, scale_gradient, sum_gradients
from keras_paragrad.storage.sharding import largest_over_replicas


class Parts(NamedTuple):
    """How a worker writes its parts of a variable's value to files.

    Attributes:
        size: The number of elements of a part. All workers' parts, concatenated, are the whole, flat and padded.
        read: Reads this worker's parts one by one.
    """

    size: int
    read: Callable[[], Iterator[np.ndarray]]


def host_value(variable: Variable | tf.Variable) -> np.ndarray:
    """A variable's value in host memory. Later writes don't change it: TensorFlow copies a buffer that is in use."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return np.asarray(value.read_value()) if hasattr(value, "read_value") else np.asarray(value)


class Storage:
    """Where a variable's value lives: here whole, on every replica.

    Attributes:
        variable: The Keras or TensorFlow variable.
        divided: Whether each replica holds a part. Then gradients are reduced before they are accumulated.
        replaces: Whether the first gradient of a window replaces an accumulator's value; else `reset` zeroes it.
        mesh: The mesh on which functions that use the variable have to run, or `None`.
    """

    divided: bool = False
    replaces: bool = True
    mesh: Mesh | None = None

    def __init__(self, variable: Any):
        self.variable = variable

    @property
    def local(self) -> TensorVariable:
        """The `tf.Variable` with this replica's part of the value."""
        return self.variable.value

    def read(self) -> tf.Tensor:
        """The whole value."""
        return tf.convert_to_tensor(self.local)

    def recompute(self) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        """A tensor for this replica to keep, as small as possible, and a function from it to the value."""
        return tf.identity(self.read()), lambda value: value

    def is_replicated(self) -> bool:
        """Whether all replicas hold the same whole value."""
        return getattr(self.local, "synchronization", None) != tf.VariableSynchronization.ON_READ

    @staticmethod
    def reduce(gradients: Sequence[GradientTensor], storages: Sequence[Any]) -> Sequence[GradientTensor]:
        """Sums whole gradients over the replicas, in one exchange for several storages of this class."""
        return sum_gradients(gradients)

    def gather(self, gradient: GradientTensor) -> Any:
        """The whole gradient from a reduced one."""
        return gradient

    def scatter(self, gradient: GradientTensor) -> Any:
        """This replica's part of a whole gradient, or of one that has all lookups, to update with."""
        return gradient

    def square(self, gradient: GradientTensor) -> tf.Tensor:
        """The squared norm of this replica's part of a reduced gradient; as in Keras, of each lookup by itself."""
        return tf.reduce_sum(tf.square(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient))

    def accumulate(self, gradient: GradientTensor, scale: Scalar | None, first: tf.Tensor | bool) -> None:
        """Adds a gradient, times a scale, to an accumulator; a dense one replaces its value if `first`, a scalar."""
        target = self.local

        def scaled() -> tf.Tensor:
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            return values if scale is None else values * tf.cast(scale, values.dtype)

        def add() -> None:
            # Scales and adds in one pass over memory.
            alpha = -tf.cast(1.0 if scale is None else scale, gradient.dtype)
            tf.raw_ops.ResourceApplyGradientDescent(var=target.handle, alpha=alpha, delta=gradient)

        if isinstance(gradient, tf.IndexedSlices):
            # Under a strategy the variable has no `scatter_add`.
            tf.raw_ops.ResourceScatterAdd(resource=target.handle, indices=gradient.indices, updates=scaled())
        elif compiled_by_xla():
            # XLA fuses this, and would copy the accumulator in a branch.
            target.assign(tf.where(first, scaled(), target + scaled()))
        else:
            run_if(first, lambda: target.assign(scaled()), add)

    def reset(self, first: tf.Tensor | bool) -> None:
        """Zeroes an accumulator if `first`, a boolean scalar or a Python bool, is true."""
        zeros = functools.partial(tf.zeros, self.local.shape, self.local.dtype)
        if first is not True and compiled_by_xla():
            self.local.assign(tf.where(first, zeros(), self.local))
        else:
            run_if(first, lambda: self.local.assign(zeros()))

    def takes_steps_of(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Whether a Keras optimizer can update the variable by its usual `_backend_update_step`."""
        return True

    def update(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradient: GradientTensor,
        learning_rate: Scalar,
        after: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Runs an optimizer's step after some tensors, and returns the tensors that the next step waits for."""
        type(optimizer)._backend_update_step(optimizer, [gradient], [self.variable], learning_rate)
        return list(after)

    def updating(self) -> contextlib.AbstractContextManager[object]:
        """The context in which optimizers update the value, entered in cross-replica context."""
        return contextlib.nullcontext()

    def refresh(self) -> None:
        """Ends an update; called on every replica."""

    def parts(self, placement: ReplicaPlacement) -> Parts | None:
        """How a worker writes its parts to files, or `None` if the chief writes the whole."""
        return None


def storage_of(variable: keras.Variable) -> Storage:
    """The storage of a Keras variable: the attribute `storage` of its value, or a `Storage` if it has none."""
    try:
        # Bypass `__getattr__` of distributed variables: it asks a replica's variable, and reads it for some names.
        return object.__getattribute__(variable._value, "storage")
    except AttributeError:
        return Storage(variable)


def any_divided(variables: Sequence[keras.Variable]) -> bool:
    """Whether each replica holds a part of any of the variables."""
    return any(storage_of(variable).divided for variable in variables)


def mesh_of(variables: Sequence[keras.Variable]) -> Mesh | None:
    """The mesh on which functions that use the variables have to run, or `None`."""
    return next((mesh for variable in variables if (mesh := storage_of(variable).mesh) is not None), None)


def on_mesh_of(variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager[object]:
    """The context in which functions that use the variables run."""
    mesh = mesh_of(variables)
    return contextlib.nullcontext() if mesh is None else on_mesh(mesh)


def reduce_gradients(
    gradients: Gradients, variables: Sequence[keras.Variable], others: Sequence[tf.Tensor] = ()
) -> tuple[list[GradientTensor | None], list[tf.Tensor]]:
    """Sums gradients, and other tensors in the same collective, over the replicas; called on every replica.

    Returns the gradients with which this replica updates, and the sums of the other tensors.
    """
    return reduce_replicated_gradients(reduce_divided_gradients(gradients, variables), variables, others)


def reduce_overwritten(gradients: Gradients, variables: Sequence[keras.Variable]) -> list[GradientTensor | None]:
    """Replaces the gradients of `is_overwritten` variables by their maximum over the replicas, as Keras does."""
    results = list(gradients)
    pairs = enumerate(zip(gradients, variables, strict=True))
    overwritten = {index: pair for index, (pair, variable) in pairs if pair is not None and is_overwritten(variable)}
    if overwritten and replica_count() > 1:
        largest = largest_over_replicas([tf.convert_to_tensor(value) for value in overwritten.values()])
        for index, value in zip(overwritten, largest, strict=True):
            results[index] = storage_of(variables[index]).scatter(value)
    return results


def reduce_divided_gradients(
    gradients: Gradients, variables: Sequence[keras.Variable], scale: Scalar | None = None
) -> list[GradientTensor | None]:
    """Scales and sums the gradients of divided variables, and leaves the others as they are."""
    storages = [storage_of(variable) for variable in variables]
    scaled = {
        index: gradient if scale is None else scale_gradient(gradient, scale)
        for index, gradient in enumerate(gradients)
        if storages[index].divided and gradient is not None and not is_overwritten(variables[index])
    }
    return _replace_by_sums(gradients, scaled, storages)


def reduce_replicated_gradients(
    gradients: Gradients, variables: Sequence[keras.Variable], others: Sequence[tf.Tensor] = ()
) -> tuple[list[GradientTensor | None], list[tf.Tensor]]:
    """Sums the gradients of replicated variables, and other tensors, and leaves other gradients as they are."""
    owners, tensors = [*variables, *(None for _ in others)], [*gradients, *others]
    storages = [Storage(None) if owner is None else storage_of(owner) for owner in owners]
    replicated = {
        index: tensor
        for index, tensor in enumerate(tensors)
        if not (storages[index].divided or is_overwritten(owners[index]))
    }
    sums = _replace_by_sums(tensors, replicated, storages)
    return sums[: len(gradients)], sums[len(gradients) :]


def _replace_by_sums(gradients: Gradients, scaled: Mapping[int, Any], storages: Sequence[Storage]) -> list[Any]:
    """Replaces the gradients at some indices by sums over replicas of `scaled`, in one exchange for each class."""
    results, by_reduction = list(gradients), {}
    for index in scaled:
        by_reduction.setdefault(storages[index].reduce, []).append(index)
    for reduce, indices in by_reduction.items():
        sums = reduce([scaled[index] for index in indices], [storages[index] for index in indices])
        for index, total in zip(indices, sums, strict=True):
            results[index] = total
    return results


def gather_gradients(gradients: Gradients, variables: Sequence[keras.Variable]) -> list[Any]:
    """The whole gradients from reduced ones; called on every replica."""
    return [
        None if gradient is None else storage_of(variable).gather(gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def scatter_gradients(gradients: Gradients, variables: Sequence[keras.Variable]) -> list[Any]:
    """Whole gradients, which every replica has, as if they were reduced: this replica's parts, and all lookups."""
    return [
        storage_of(variable).scatter(gradient) if isinstance(gradient, tf.Tensor) else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
