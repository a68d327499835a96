"""Gradients of single examples, against a loop over them on the same device."""

import keras
import numpy as np
import tensorflow as tf

from gpu_parts.case import Cases, Line, Machine, check
from gpu_parts.models import data_for, loss, made
from gpu_parts.right import LIMIT, OF_ALL
from keras_paragrad import per_example_gradients, per_example_norms

ROWS = 8
cases = Cases()


def of_each(model: keras.Model) -> list[np.ndarray]:
    """By variable, the gradient of each example's weighted loss, from a pass of its own."""
    variables = [variable.value for variable in model.trainable_variables]

    @tf.function(autograph=False)
    def gradients(x: tf.Tensor, y: tf.Tensor, weight: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            value = loss()(y, model(x)) * weight[0]
        return [tf.convert_to_tensor(each) for each in tape.gradient(value, variables)]

    data = data_for(model, ROWS)
    found = [gradients(*(tf.constant(each[row : row + 1]) for each in data)) for row in range(ROWS)]
    return [np.stack(parts) for parts in zip(*found, strict=True)]


def norms_of(gradients: list[np.ndarray]) -> np.ndarray:
    """The norm of each example's gradient."""
    return np.sqrt(sum(np.square(each.reshape(ROWS, -1)).sum(1) for each in gradients))


@cases("norms and gradients: {}", variants=OF_ALL)
def norms_and_gradients(machine: Machine, name: str, jit: bool) -> Line:
    model = made(name)
    expected = of_each(model)
    norms = norms_of(expected)
    x, y, weights = data_for(model, ROWS)
    ours = per_example_norms(model, x, y, loss(), weights, jit_compile=jit)
    gradients = per_example_gradients(model, x, y, loss(), weights, jit_compile=jit)
    errors = [np.abs(ours - norms).max(), *(np.abs(a - b).max() for a, b in zip(gradients, expected, strict=True))]
    return check(float(np.max(errors) / norms.max()), LIMIT, "of the largest norm")
