"""Gives `keras.layers.Normalization` the mean and variance of the whole training data, the same on every worker."""

from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.arguments import check_function, check_instance
from keras_paragrad.distribution.data.adapting import Select, adapt_all, only_input
from keras_paragrad.distribution.data.arguments import checked_strategy
from keras_paragrad.distribution.data.normalization_layers import normalization_layers, selector
from keras_paragrad.distribution.data.policies import check_policy


def adapt_normalization(
    layer: keras.layers.Normalization,
    data: Any,
    strategy: tf.distribute.Strategy | None = None,
    *,
    select: Select | None = None,
    shard_policy: str = "auto",
) -> None:
    """Sets a layer's mean and variance to those of the data, computed in one pass in float64.

    Each worker reads its shard, and one all-reduce merges them: the result is bitwise the same on all workers. It is
    saved with the model. A model's compiled functions keep the old values, so call this before `fit`, or use
    `normalize_inputs`, which resets them.

    Args:
        layer: The layer. It is built if it is not.
        data: The training data: arrays, nested or not; or batches of `x`, `(x, y)` or `(x, y, sample_weight)` from a
            `tf.data.Dataset` or a `keras.utils.PyDataset`.
        strategy: The strategy, if there are several workers, which all call this.
        select: Selects the values that the layer normalizes from an `x`; needed if there are several inputs.
        shard_policy: As in `distributed_dataset`.

    Raises:
        ValueError: The layer was created with a mean, or the data does not fit it, has no rows, is infinite, can be
            read only once, or has values that are not finite numbers.

    Example:

    >>> import keras, numpy as np
    >>> layer = keras.layers.Normalization()
    >>> adapt_normalization(layer, np.array([[1.0, 10.0], [3.0, 30.0]]))
    >>> np.asarray(layer(np.array([[3.0, 10.0]]))).tolist()
    [[1.0, -1.0]]
    """
    check_instance("layer", layer, keras.layers.Normalization, "a keras.layers.Normalization")
    select = check_function("select", select, example="lambda x: x['age']", optional=True)
    check_policy(shard_policy)
    adapt_all([(layer, select or only_input)], data, checked_strategy(strategy), shard_policy)


def normalize_inputs(
    model: keras.Model, data: Any, strategy: tf.distribute.Strategy | None = None, *, shard_policy: str = "auto"
) -> None:
    """Sets mean and variance of all `keras.layers.Normalization` layers of a model, in one pass over its training data.

    Args:
        model: A model whose `Normalization` layers each take one of its inputs.
        data: Its training data, as for `adapt_normalization`.
        strategy: The strategy, if there are several workers, which all call this.
        shard_policy: As in `distributed_dataset`.

    Raises:
        ValueError: There is no such layer, or one normalizes something else than an input; or see
            `adapt_normalization`.

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Normalization()])
    >>> normalize_inputs(model, np.array([[1.0], [3.0]]))
    >>> model.predict(np.array([[3.0]]), verbose=0).tolist()
    [[1.0]]
    """
    check_instance("model", model, keras.Model, "a Keras model")
    strategy = checked_strategy(strategy)
    check_policy(shard_policy)
    layers = normalization_layers(model)
    if not layers:
        raise ValueError(
            f"The model {model.name!r} has no keras.layers.Normalization whose mean is to be found. Put one behind the "
            "input: keras.layers.Normalization()(inputs)."
        )
    pairs = [(layer, selector(model, layer)) for layer in layers]
    adapt_all(pairs, data, strategy, shard_policy)
    # These were compiled with the old values.
    model.train_function = model.test_function = model.predict_function = None
