"""Names for the types that Keras and TensorFlow pass around and don't declare."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, Union

import keras
import numpy as np
import tensorflow as tf

# Nested tensors, as models take and return them. Keras traces models with its own symbolic tensors.
Structure: TypeAlias = tf.Tensor | keras.KerasTensor | Sequence["Structure"] | Mapping[str, "Structure"] | None
# The argument of `train_step`: inputs, or a tuple of inputs, targets and sample weights.
Batch: TypeAlias = Structure
# The specs of a batch's tensors, nested like them.
Specs: TypeAlias = Union["tf.TypeSpec[Any]", Sequence["Specs"], Mapping[str, "Specs"], None]  # noqa: UP007
# The arguments of `Model.compute_loss`: `x`, `y`, `y_pred` and `sample_weight`.
LossArguments: TypeAlias = dict[str, Structure]
# The result of `train_step` and `test_step`.
StepLogs: TypeAlias = dict[str, Structure]
Step: TypeAlias = Callable[[Batch], StepLogs]
# `Model.train_function` and `Model.test_function`.
TrainFunction: TypeAlias = Callable[["BatchIterator"], StepLogs]
Dataset: TypeAlias = tf.data.Dataset[Any]
# TensorFlow's iterators have `get_next` as well; `train_on_batch` passes a Python iterator.
BatchIterator: TypeAlias = tf.data.Iterator[Batch] | tf.distribute.DistributedIterator | Iterator[Batch]
# A number, or a tensor with one.
Scalar: TypeAlias = tf.Tensor | float
# A TensorFlow variable, or outside of a replica the variables of all replicas.
TensorVariable: TypeAlias = tf.Variable | tf.distribute.DistributedValues
Variable: TypeAlias = keras.Variable | TensorVariable
# The argument of `build`: one shape, or nested shapes.
Shape: TypeAlias = Sequence["int | Shape | None"] | Mapping[str, "Shape"]
DType: TypeAlias = tf.DType | str
# A gradient with respect to a variable. Layers that look up rows have only these rows' gradients.
GradientTensor: TypeAlias = tf.Tensor | tf.IndexedSlices
# A gradient for each of several variables, or `None` where there is none.
Gradients: TypeAlias = Sequence[GradientTensor | None]
# Anything that converts to a tensor.
Array: TypeAlias = tf.Tensor | np.ndarray | np.number[Any] | float | Sequence["Array"]
# The `logs` of callbacks.
Logs: TypeAlias = dict[str, Any]
# The result of `get_config`.
Config: TypeAlias = dict[str, Any]
# The arguments `x`, `y` and `sample_weight` of `fit`: arrays, nested or not, or an iterable of batches.
FitData: TypeAlias = np.ndarray | tf.Tensor | Dataset | keras.utils.PyDataset | Iterable["FitData"] | None
