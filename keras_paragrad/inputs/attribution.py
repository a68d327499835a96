"""`integrated_gradients`: attributes a difference in output to the input entries."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import check_integer, refusal
from keras_paragrad.compat.types import FitData
from keras_paragrad.inputs.function import Derivative, OutputChoice, RowFunction
from keras_paragrad.inputs.run import DerivativeOptions, differentiate
from keras_paragrad.inputs.selection import Wrt


def integrated_gradients(
    model: keras.Model,
    x: FitData,
    baseline: FitData = None,
    *,
    steps: int = 50,
    output: OutputChoice = None,
    batch_size: int | None = None,
    wrt: Wrt = None,
    jit_compile: bool | str = "auto",
    stream: bool = False,
    verbose: int = 0,
) -> Any:
    """Attributes an output to the inputs by integrating gradients along the straight line from a baseline.

    Each row's attributions sum to the difference between its output and the baseline's. The integral uses
    Gauss-Legendre quadrature, one step at a time.

    Args:
        model: A Keras model in which no row affects another row's output.
        x: The inputs; see `input_gradients`.
        baseline: The row where the line starts: for each input or layer an array without the rows axis, nested as the
            inputs or as `wrt`; or one number for all; zero if `None`.
        steps: Number of quadrature points.
        output: What to attribute, a scalar per row; see `input_gradients`.
        batch_size: Rows per chunk; see `input_gradients`, also for the arguments that follow.
        wrt: The inputs or the layer to attribute to. Other inputs are fixed to their values in `x`.
        jit_compile: Whether to compile with XLA.
        stream: Whether to return an iterator over the results of the chunks.
        verbose: 1 for a progress bar.

    Returns:
        An array for each input, or of the layer, of its shape, nested as the inputs or as `wrt`. See `input_gradients`.

    Raises:
        ValueError: As for `input_gradients`; or `steps` is less than 1, or `baseline` does not fit a row.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad import integrated_gradients
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, activation="tanh")])
    >>> x = np.ones((10, 8), "float32")
    >>> attributions = integrated_gradients(model, x, output=0)
    >>> difference = model(x)[:, 0] - model(np.zeros_like(x))[:, 0]
    >>> bool(np.allclose(attributions.sum(axis=1), difference, atol=1e-5))
    True

    Reference:
        Sundararajan, Taly and Yan, *Axiomatic Attribution for Deep Networks*, 2017, https://arxiv.org/abs/1703.01365.
    """
    # The quadrature points are eigenvalues of a matrix with `steps` rows.
    steps = check_integer("steps", steps, most=10_000, example=50)
    options = DerivativeOptions(output, wrt, batch_size, jit_compile, stream, verbose)
    rows = [_check_baseline(row) for row in keras.tree.flatten(0.0 if baseline is None else baseline)]
    return differentiate(model, x, [functools.partial(_integrated, rows, steps)], options)


def _check_baseline(row: object) -> np.ndarray:
    """Validates one leaf of the baseline; returns it as an array of finite numbers."""
    try:
        array = np.asarray(row)
    except Exception:  # whatever a tensor raises
        array = np.empty(0, object)
    # Entries that are not finite in float32 would make every attribution NaN.
    with np.errstate(over="ignore"):
        # bfloat16 is of kind "V".
        if array.dtype.kind in "fiuV" and np.isfinite(array.astype("float32")).all():
            return array
    raise refusal("baseline", row, "an array of the shape of one row for each input, or one finite number", "0.0")


def _integrated(
    baseline: list[np.ndarray], steps: int, function: RowFunction, free: list[tf.Tensor], extra: Sequence[Any]
) -> Derivative:
    """Integrates the gradient along the line from the baseline to each row, times the difference of the two.

    `baseline` has a row for each input, or one number for all.
    """
    if len(baseline) == 1 and baseline[0].ndim == 0:
        baseline = baseline * len(free)
    elif [row.shape for row in baseline] != [tuple(x.shape[1:]) for x in free]:
        raise ValueError(
            f"`baseline` has shapes {[row.shape for row in baseline]}, and a row of the inputs has "
            f"{[tuple(x.shape[1:]) for x in free]}. Pass an array of that shape for each input, or one number."
        )
    starts = [tf.broadcast_to(tf.cast(row, x.dtype), x.shape) for row, x in zip(baseline, free, strict=True)]
    differences = [x - start for x, start in zip(free, starts, strict=True)]
    points, weights = np.polynomial.legendre.leggauss(steps)
    # Map the interval (-1, 1) to (0, 1).
    positions, weights = tf.constant((points + 1) / 2), tf.constant(weights / 2)

    def add(step: tf.Tensor, sums: list[tf.Tensor]):
        pairs = zip(starts, differences, strict=True)
        inputs = [start + tf.cast(positions[step], start.dtype) * difference for start, difference in pairs]
        pairs = zip(sums, function.gradients(inputs), strict=True)
        return step + 1, [total + tf.cast(weights[step], total.dtype) * gradient for total, gradient in pairs]

    zeros = [tf.zeros_like(difference) for difference in differences]
    _, means = tf.while_loop(lambda step, _: step < steps, add, (0, zeros), parallel_iterations=1)
    return Derivative([mean * difference for mean, difference in zip(means, differences, strict=True)])
