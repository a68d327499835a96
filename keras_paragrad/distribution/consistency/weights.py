"""Checks that all workers hold the same weights: two numbers per weight, compared within rounding."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.collectives import local_values
from keras_paragrad.compat.workers import replica_placement
from keras_paragrad.distribution.workers import gather
from keras_paragrad.storage.storage import storage_of

# On different processors rounding differs, and weights diverge slowly: by some 1e-5 over 10^5 steps.
TOLERANCE = 1e-4
_SIGNS = np.where(np.random.default_rng(20240229).integers(0, 2, 1 << 16), 1.0, -1.0).astype(np.float32)


def sketches(strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable]) -> np.ndarray:
    """Two numbers per variable: its norm, and its dot product with fixed random signs.

    A change of relative size `d` in any direction changes the product by about as much, so the product shows what the
    norm doesn't: values in another order, or a step in another direction.

    Args:
        strategy: The strategy that they were created under.
        variables: Keras variables; only this worker's values are read.

    Returns:
        Shape `(len(variables), 2)`, float64.
    """
    return np.array([_sketch(value) for value in local_values(strategy, variables)], np.float64).reshape(-1, 2)


def _sketch(value: np.ndarray) -> tuple[float, float]:
    """A value's norm, and its dot product with the signs."""
    flat = np.asarray(value).reshape(-1).astype(np.float32, copy=False)
    size = len(_SIGNS)
    whole = len(flat) // size * size
    rows = flat[:whole].reshape(-1, size) @ _SIGNS
    product = float(np.dot(rows, _SIGNS[: len(rows)])) if len(rows) <= size else float(rows.sum())
    product += float(np.dot(flat[whole:], _SIGNS[: len(flat) - whole]))
    return float(np.sqrt(np.dot(flat, flat))), product


def differing(of_workers: np.ndarray) -> tuple[int, int] | None:
    """The first variable that differs between workers.

    Args:
        of_workers: Every worker's sketches: shape `(workers, variables, 2)`.

    Returns:
        The indices of the variable and of the worker, or `None` if all are the same.
    """
    norms, products = of_workers[..., 0], of_workers[..., 1]
    scale = np.where(np.isfinite(norms[:1]), norms[:1], 1.0)
    close = np.isclose(norms, norms[:1], rtol=TOLERANCE, atol=1e-12, equal_nan=True)
    close &= (np.abs(products - products[:1]) <= TOLERANCE * scale + 1e-12) | ~np.isfinite(products[:1])
    places = np.argwhere(~close.T)
    return (int(places[0][0]), int(places[0][1])) if len(places) else None


def check_same_weights(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Raises the same error on every worker if a weight or a variable of the optimizer differs between them.

    Weights created within `scope()` are the same; loading and assigning weights is up to each worker.

    Args:
        strategy: The strategy whose workers all call this, with models of the same structure.
        model: This worker's model.

    Raises:
        ValueError: A weight differs. The message gives its path, the worker, and both norms.
    """
    if replica_placement(strategy).workers == 1:
        return
    variables = variables_to_compare(model)
    of_workers = gather(strategy, sketches(strategy, variables).reshape(-1)).reshape(
        replica_placement(strategy).workers, -1, 2
    )
    refuse_if_differing(of_workers, variables)


def refuse_if_differing(
    of_workers: np.ndarray, variables: Sequence[keras.Variable], when: str = "before the first step"
) -> None:
    """Raises if a worker's sketches differ from those of the first."""
    where = differing(of_workers)
    if where is None:
        return
    variable, worker = where
    (norm, product), (other_norm, other_product) = of_workers[0, variable], of_workers[worker, variable]
    said = f"norm {norm:.7g}, checksum {product:.7g}", f"norm {other_norm:.7g}, checksum {other_product:.7g}"
    path = variables[variable].path
    raise ValueError(
        f"The workers hold different weights {when}: {path} has {said[0]} on worker 0, and {said[1]} on worker "
        f"{worker}. Load or assign the same weights on every worker, and don't change the training on one of them only."
    )


def variables_to_compare(model: keras.Model) -> list[keras.Variable]:
    """The weights and the optimizer's variables that have to be the same on all workers.

    Weights that are not trained are compared before the first update only: some, such as the moving means of an
    unsynchronized `BatchNormalization`, differ afterwards. Of those in shards, every worker has others.
    """
    optimizer = model.optimizer
    fresh = optimizer is None or not optimizer.built or int(optimizer.iterations.numpy()) == 0
    variables = [*(model.variables if fresh else model.trainable_variables)]
    if optimizer is not None:
        variables += list(optimizer.variables)
    return [variable for variable in variables if _has_to_be_the_same(variable)]


def _has_to_be_the_same(variable: keras.Variable) -> bool:
    return storage_of(variable).is_replicated() and tf.as_dtype(variable.dtype).is_floating
