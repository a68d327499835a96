"""Sets the mean and variance of `keras.layers.Normalization` from the whole training data, equal on every worker."""

from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from keras_paragrad.arguments import check_function, check_instance
from keras_paragrad.compat.types import FitData, Structure
from keras_paragrad.distribution.data.adapting import Select, adapt_all, only_input
from keras_paragrad.distribution.data.arguments import check_strategy
from keras_paragrad.distribution.data.batch_sharding import check_policy

BY_HAND = (
    "Call adapt_normalization(layer, data, select=...) for it, where select computes the layer's input from an x of "
    "the data."
)


def adapt_normalization(
    layer: keras.layers.Normalization,
    data: FitData,
    strategy: tf.distribute.Strategy | None = None,
    *,
    select: Select | None = None,
    shard_policy: str = "auto",
) -> None:
    """Sets a layer's mean and variance to the data's, computed in one pass in float64.

    Each worker reads its shard, and one all-reduce merges them: the result is bitwise the same on all workers. It is
    saved with the model. A model's compiled functions keep the old values, so call this before `fit`, or use
    `normalize_inputs`, which resets them.

    Args:
        layer: The layer, which is built if necessary.
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
    adapt_all([(layer, select or only_input)], data, check_strategy(strategy), shard_policy)


def normalize_inputs(
    model: keras.Model, data: FitData, strategy: tf.distribute.Strategy | None = None, *, shard_policy: str = "auto"
) -> None:
    """Sets mean and variance of all `keras.layers.Normalization` layers of a model, in one pass over its training data.

    Args:
        model: A model whose `Normalization` layers each take one of its inputs.
        data: Its training data, as for `adapt_normalization`.
        strategy: The strategy, if there are several workers, which all call this.
        shard_policy: As in `distributed_dataset`.

    Raises:
        ValueError: There is no such layer, or one does not normalize an input; or see
            `adapt_normalization`.

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Normalization()])
    >>> normalize_inputs(model, np.array([[1.0], [3.0]]))
    >>> model.predict(np.array([[3.0]]), verbose=0).tolist()
    [[1.0]]
    """
    check_instance("model", model, keras.Model, "a Keras model")
    strategy = check_strategy(strategy)
    check_policy(shard_policy)
    layers = normalization_layers(model)
    if not layers:
        raise ValueError(
            f"The model {model.name!r} has no keras.layers.Normalization to adapt. Add one after the input: "
            "keras.layers.Normalization()(inputs)."
        )
    pairs = [(layer, selector(model, layer)) for layer in layers]
    adapt_all(pairs, data, strategy, shard_policy)
    # Compiled functions contain the old values.
    model.train_function = model.test_function = model.predict_function = None


def normalization_layers(model: keras.Model) -> list[keras.layers.Normalization]:
    """The layers to adapt in a model and in the models nested in it.

    Args:
        model: The model.

    Returns:
        Its `Normalization` layers, except layers created with their own `mean` and `variance`.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Normalization(name="scaled"), keras.layers.Dense(1)])
    >>> [layer.name for layer in normalization_layers(model)]
    ['scaled']
    """
    layers = {id(layer): layer for layer in _sublayers(model) if isinstance(layer, keras.layers.Normalization)}
    return [layer for layer in layers.values() if layer.input_mean is None]


def selector(model: keras.Model, layer: keras.layers.Normalization) -> Callable[[Structure], Structure]:
    """A function that selects the input that a layer normalizes from an `x` of a model."""
    if model.layers[:1] == [layer] and isinstance(model, keras.Sequential):
        return lambda x: x
    inputs = list(getattr(model, "inputs", None) or [])
    layer_input = _input_of(layer)
    index = next((index for index, tensor in enumerate(inputs) if tensor is layer_input), None)
    if index is None:
        raise ValueError(f"The layer {layer.name!r} does not normalize an input of the model. {BY_HAND}")
    name = inputs[index].name

    def select(x: Structure) -> Structure:
        if isinstance(x, dict):
            if name not in x:
                raise ValueError(f"The layer {layer.name!r} normalizes the input {name!r}; the data has {sorted(x)}.")
            return x[name]
        leaves = keras.tree.flatten(x)
        if len(leaves) != len(inputs):
            raise ValueError(f"The model takes {len(inputs)} inputs, but the data has {len(leaves)}. {BY_HAND}")
        return leaves[index]

    return select


def _sublayers(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    for sublayer in getattr(layer, "layers", []):
        yield sublayer
        yield from _sublayers(sublayer)


def _input_of(layer: keras.layers.Layer) -> keras.KerasTensor | None:
    """The input tensor of a layer; `None` if there are several, or it was never called."""
    try:
        return layer.input
    except (AttributeError, ValueError):
        return None
