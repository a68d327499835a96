"""Splits a model into units, layers with one rule each; refuses layers and losses without per-example gradients."""

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import children
from keras_paragrad.compat.types import Structure
from keras_paragrad.engine.losses.known_classes import has_value_per_example
from keras_paragrad.engine.losses.terms import LossTerm
from keras_paragrad.engine.tracing.effects import assigned_resources
from keras_paragrad.engine.tracing.untouched import trace_untouched
from keras_paragrad.engine.trials.trial import LOSS, Inconclusive, run_trial, synthetic_rows, take_rows
from keras_paragrad.per_example.calls import LossReads
from keras_paragrad.per_example.mixing_layers import change_rows, check_finite, find_mixing_layer
from keras_paragrad.per_example.rule import Rule, rule_for
from keras_paragrad.per_example.rules.generic import Generic
from keras_paragrad.per_example.rules.normalization import batch_statistics_refusal

_ROWS = 8
# The size of the first of two parts of different sizes.
_FIRST = 3
# Whether targets are labels, and the range of predictions: probabilities, logits and embeddings.
_DRAWS = ((True, 0.1, 0.9), (True, -3.0, 3.0), (False, -3.0, 3.0))
# Changed rows lie before, between and after the compared ones, to find losses of neighbouring pairs.
_CHANGED = [0, 3]


def mixes_examples(term: LossTerm) -> bool:
    """Whether a loss's value for one example depends on the others in the batch, or on how many there are.

    Tries the loss on synthetic rows with the shapes of the term's targets and predictions. Also false if it can't be
    called on these, or returns a scalar. A loss that flattens examples and their elements into one axis mixes them.
    """
    traced = tf.function(lambda y_true, y_pred: LossTerm(term.loss, y_true, y_pred, None).values, autograph=False)

    def compute(y_true: Structure, y_pred: Structure) -> np.ndarray:
        # The scope takes what is assigned to Keras's variables.
        with keras.StatelessScope():
            graph = traced.get_concrete_function(y_true, y_pred).graph
        if assigned_resources(graph):
            raise Inconclusive("the loss assigns to a variable that is unknown to Keras")
        return np.asarray(traced(y_true, y_pred), "float64")

    def find(draws: tuple[tuple[bool, float, float], ...]) -> bool:
        if has_value_per_example(term.loss):
            return False
        answers: list[bool] = []
        failures: list[Exception] = []
        for labels, low, high in draws:
            try:
                first, second = (
                    (
                        synthetic_rows(term.y_true, _ROWS, seed=seed, labels=labels),
                        synthetic_rows(term.y_pred, _ROWS, seed=seed + 1, low=low, high=high),
                    )
                    for seed in (0, 2)
                )
                answers.append(_mixes(compute, *change_rows(first, second, _CHANGED)))
            except Exception as error:
                # A loss for embeddings may reject labels, and a loss for probabilities may reject logits.
                failures.append(error)
        if not answers:
            raise failures[0]
        return any(answers)

    # One choice: all draws.
    return run_trial(find, _DRAWS, otherwise=False, question=f"whether the loss {term.loss.name!r} compares examples")


def _mixes(compute: Callable[..., np.ndarray], whole: Any, changed: Any) -> bool:
    """Whether the losses of unchanged rows change with the others, or when the batch is split."""

    def match(one: np.ndarray, other: np.ndarray) -> bool:
        return np.allclose(one, other, atol=LOSS * np.abs(one[np.isfinite(one)]).max(initial=1.0), equal_nan=True)

    before, after = compute(*whole), compute(*changed)
    if not before.ndim:
        return False
    if before.shape[:1] != (_ROWS,):
        return True
    if not match(before, compute(*whole)):
        raise Inconclusive("the loss is random")
    unchanged = [row for row in range(_ROWS) if row not in _CHANGED]
    check_finite([before[unchanged]], "the losses")
    if not match(before[unchanged], after[unchanged]):
        return True
    try:
        parts = [compute(*take_rows(whole, *rows)) for rows in ((0, _FIRST), (_FIRST, _ROWS))]
    except Exception:
        # For example a loss of pairs, called with an odd number of rows.
        return True
    return not match(before, np.concatenate(parts))


_LOGGER = logging.getLogger("keras_paragrad")
_GENERIC = Generic()


class Unit(NamedTuple):
    """A layer whose gradients are computed by one rule.

    Attributes:
        layer: The layer.
        rule: Its rule.
        batched: For each of its calls, which of the flattened arguments have a row for each example, if known.
    """

    layer: keras.layers.Layer
    rule: Rule
    batched: Sequence[Sequence[bool]] = ()


def units_of(layer: keras.layers.Layer, indivisible: Collection[int] = ()) -> list[Unit]:
    """The units that hold a layer's trainable weights, each once; layers with `id`s in `indivisible` are not split."""
    units: dict[int, Unit] = {}
    for unit in _walk(layer, indivisible):
        units.setdefault(id(unit.layer), unit)
    return list(units.values())


def layers_with_variable(layer: keras.layers.Layer, variable: keras.Variable) -> list[keras.layers.Layer]:
    """The layer and its sublayers that train a variable; the fewest weights first, and inner layers before outer."""
    layers_by_id = {
        id(inner): inner
        for inner in layer_and_sublayers(layer)
        if any(variable is weight for weight in inner.trainable_variables)
    }
    innermost_first = list(layers_by_id.values())[::-1]
    return sorted(innermost_first, key=lambda inner: len(inner.trainable_variables))


def check_training(layer: keras.layers.Layer) -> None:
    """Refuses layers that normalize by batch statistics, and dropout masks that all examples share."""
    for inner in layer_and_sublayers(layer):
        if isinstance(inner, keras.layers.BatchNormalization) and inner.trainable and not inner.trainable_variables:
            raise batch_statistics_refusal(inner)
        shape = getattr(inner, "noise_shape", None)
        if isinstance(inner, keras.layers.Dropout) and inner.rate and shape is not None and shape[0] == 1:
            raise ValueError(
                f"The dropout {inner.name!r} uses one mask for all examples of a batch (noise_shape={shape}), so an "
                "example's gradient depends on its batch. Write "
                f"noise_shape=({', '.join(map(str, (None, *shape[1:])))}) for it."
            )


def layer_and_sublayers(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """A layer and its sublayers, at every depth."""
    yield layer
    for child in children(layer):
        yield from layer_and_sublayers(child)


def _walk(layer: keras.layers.Layer, indivisible: Collection[int]) -> Iterator[Unit]:
    """The units of a layer, which may occur repeatedly."""
    if not layer.trainable_variables:
        return
    rule = rule_for(layer)
    of_children = {id(variable) for child in children(layer) for variable in child.trainable_variables}
    owns_weights = any(id(variable) not in of_children for variable in layer.trainable_variables)
    if rule is None and (id(layer) in indivisible or owns_weights):
        rule = _GENERIC
        _LOGGER.info(
            "%s has no per-example rule, so its gradients are computed one example at a time. To make that faster, "
            "register a rule with keras_paragrad.per_example.register_rule.",
            type(layer).__name__,
        )
    if rule is not None:
        yield Unit(layer, rule)
        return
    for child in children(layer):
        yield from _walk(child, indivisible)


# For each layer, by the arguments' signature: the name of the first sublayer that mixes examples, or `None`.
_MIXING_LAYERS: "weakref.WeakKeyDictionary[keras.layers.Layer, dict[Any, Any]]" = weakref.WeakKeyDictionary()
_SEPARABLE_LOSSES: "weakref.WeakSet[keras.losses.Loss]" = weakref.WeakSet()


def check_separable_layer(layer: keras.layers.Layer, *arguments: Any, training: bool = True) -> None:
    """Raises a `ValueError` if a built layer mixes examples; cached by its sublayers and the arguments."""
    cache = _MIXING_LAYERS.setdefault(layer, {})
    key = (training, *call_signature(layer, arguments))
    if key not in cache:
        cache[key] = find_mixing_layer(layer, *arguments, training=training)
    if cache[key]:
        raise ValueError(
            f"The output of {cache[key]!r} for one example depends on the others in the batch, so an example has no "
            "gradient of its own. Don't reduce over the batch axis 0."
        )


def check_separable_model(model: Any) -> None:
    """Refuses a model that mixes examples, if its input shapes are known."""
    if getattr(model, "inputs", None):
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        check_separable_layer(
            model, keras.tree.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), inputs)
        )


def check_separable_loss(term: LossTerm, variables: Sequence[keras.Variable]) -> None:
    """Refuses a loss that is not a sum over the examples of a batch, or reads one of the variables."""
    loss = term.loss
    if not has_value_per_example(loss) and not term.reduces_itself:
        _check_reads(term, variables)
    if loss in _SEPARABLE_LOSSES:
        return
    if term.reduces_itself:
        raise ValueError(
            f"The loss {loss.name!r} overrides __call__, so how it reduces the losses of the examples is unknown. "
            "Override call(y_true, y_pred) instead, and return one value per example."
        )
    try:
        values = term.values
    except Exception as error:  # whatever Keras, TensorFlow or a loss of the user's raises
        raise _incomputable_loss(term, error) from error
    if values.shape.rank == 0:
        raise ValueError(
            f"The loss {loss.name!r} returns one number for the whole batch, so an example has no loss of its own. "
            "Return one value per example; for Dice and Tversky, pass axis= without the batch axis 0."
        )
    if mixes_examples(term):
        raise ValueError(
            f"The value of the loss {loss.name!r} for one example depends on the others in the batch, so an example "
            "has no gradient of its own. Use a loss that is a sum over the examples."
        )
    _SEPARABLE_LOSSES.add(loss)


def _check_reads(term: LossTerm, variables: Sequence[keras.Variable]) -> None:
    """Refuses a loss that reads one of the variables."""

    def compute(y_true: Any, y_pred: Any):
        with LossReads(variables, f"The loss {term.loss.name!r}"):
            return LossTerm(term.loss, y_true, y_pred, None).values

    trace_untouched(term.loss, compute, term.y_true, term.y_pred)


def _incomputable_loss(term: LossTerm, error: Exception) -> ValueError:
    """The error for a loss that fails on its targets and predictions."""
    shapes = [[tuple(leaf.shape) for leaf in keras.tree.flatten(structure)] for structure in (term.y_true, term.y_pred)]
    true, pred = (" and ".join(map(str, shapes_of)) for shapes_of in shapes)
    name = term.loss.name
    advice = ""
    if name.startswith("sparse_") and true == pred:
        advice = f" For one-hot targets write loss={name.removeprefix('sparse_')!r}."
    reason = " ".join(str(error).split()).rstrip(".")
    return ValueError(
        f"The loss {name!r} can't be computed of targets of shape {true} and predictions of shape {pred}.{advice} It "
        f"says: {reason[:300]}."
    )


def example_losses(term: LossTerm) -> tf.Tensor:
    """Each example's own loss, `(batch,)`: the masked and weighted loss that it has in a batch of one."""
    values = tf.cast(term.values, "float32")
    mask = tf.ones_like(values) if term.mask is None else tf.cast(term.mask, "float32")
    weight = tf.constant(1.0) if term.sample_weight is None else tf.cast(term.sample_weight, "float32")
    if weight.shape.rank == values.shape.rank + 1 and weight.shape[-1] == 1:
        # Such as (n, 1), as in Keras.
        weight = tf.squeeze(weight, -1)
    if weight.shape.rank > values.shape.rank:
        raise ValueError(
            f"sample_weight has shape {weight.shape}, and the loss {term.loss.name!r} has values of shape "
            f"{values.shape}. Pass one weight for each example, of shape (rows,), or one for each value."
        )
    weight = tf.reshape(
        weight, tf.concat([tf.shape(weight), tf.ones([values.shape.rank - weight.shape.rank], tf.int32)], 0)
    )
    # All axes but the batch.
    inner = list(range(1, values.shape.rank))
    total = tf.reduce_sum(values * weight * mask, inner)
    return total if term.is_sum else total * tf.math.reciprocal_no_nan(tf.reduce_sum(mask, inner))


def call_signature(layer: keras.layers.Layer, arguments: object) -> tuple[object, ...]:
    """A cache key: a layer's sublayers, which `pop` and `add` change; dtypes and shapes without the batch axis."""
    specs = [
        (value.dtype, *value.shape[1:]) if tf.is_tensor(value) or isinstance(value, tf.TensorSpec) else repr(value)
        for value in keras.tree.flatten(arguments)
    ]
    return (*map(weakref.ref, layer_and_sublayers(layer)), *specs)
