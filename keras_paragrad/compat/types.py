"""Names for the types that Keras and TensorFlow pass around and don't declare."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, Union

import keras
import numpy as np
import tensorflow as tf

# Nested tensors: what models take and return. Keras traces models with its own symbolic tensors.
Structure: TypeAlias = tf.Tensor | keras.KerasTensor | Sequence["Structure"] | Mapping[str, "Structure"] | None
# What `train_step` gets: inputs, or a tuple of inputs, targets and sample weights.
Batch: TypeAlias = Structure
# The specs of a batch's tensors, nested as these.
Specs: TypeAlias = Union["tf.TypeSpec[Any]", Sequence["Specs"], Mapping[str, "Specs"], None]  # noqa: UP007
# The arguments of `Model.compute_loss`: `x`, `y`, `y_pred` and `sample_weight`.
LossArguments: TypeAlias = dict[str, Structure]
# What `train_step` and `test_step` return.
StepLogs: TypeAlias = dict[str, Structure]
Step: TypeAlias = Callable[[Batch], StepLogs]
# `Model.train_function` and `Model.test_function`.
TrainFunction: TypeAlias = Callable[["BatchIterator"], StepLogs]
Dataset: TypeAlias = tf.data.Dataset[Any]
# TensorFlow's iterators have `get_next` as well; that of `train_on_batch` is Python's.
BatchIterator: TypeAlias = tf.data.Iterator[Batch] | tf.distribute.DistributedIterator | Iterator[Batch]
# A number, or a tensor with one.
Scalar: TypeAlias = tf.Tensor | float
# A variable of TensorFlow, or outside of a replica those of all.
TensorVariable: TypeAlias = tf.Variable | tf.distribute.DistributedValues
Variable: TypeAlias = keras.Variable | TensorVariable
# As `build` gets it: one shape, or nested ones.
Shape: TypeAlias = Sequence["int | Shape | None"] | Mapping[str, "Shape"]
DType: TypeAlias = tf.DType | str
# A gradient with respect to a variable. Layers that look rows up have the gradients of these rows alone.
GradientTensor: TypeAlias = tf.Tensor | tf.IndexedSlices
# A gradient for each of several variables, or `None` where there is none.
Gradients: TypeAlias = Sequence[GradientTensor | None]
# What becomes a tensor.
Array: TypeAlias = tf.Tensor | np.ndarray | np.number[Any] | float | Sequence["Array"]
# What callbacks get as `logs`.
Logs: TypeAlias = dict[str, Any]
# What `get_config` returns.
Config: TypeAlias = dict[str, Any]
# What `fit` takes as `x`, `y` and `sample_weight`: arrays, nested or not, or something that yields batches of them.
FitData: TypeAlias = np.ndarray | tf.Tensor | Dataset | keras.utils.PyDataset | Iterable["FitData"] | None
