"""Measures how long the layers of a model take, forward and backward."""

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.compat.layers import mask_of, with_mask
from keras_paragrad.compat.leaves import dense_parts, has_gradient
from keras_paragrad.distribution.pipeline.calls import Calls, variables_of
from keras_paragrad.engine.probes.untouched import untouched
from keras_paragrad.engine.step.example import batches
from keras_paragrad.engine.step.segments import Part, part_of, run_in_parts

# Examples, and what an axis that the model leaves open has.
_ROWS, _LENGTH = 16, 128
_TIMES = 5


def measured_times(calls: Calls, device: str) -> list[int]:
    """How long each call of a model takes, in nanoseconds: the shortest of some runs on made-up examples.

    Calls between which the model can't be cut are measured together, and their time is that of the last of them.
    Nothing of the model is changed.
    """
    last = len(calls.nodes) - 1
    ends = [place for place in range(last + 1) if place == last or calls.separated(place) is None]
    begins = [0, *(place + 1 for place in ends)]
    parts = [part_of(calls.functional, calls.nodes[begin : end + 1]) for begin, end in zip(begins, ends, strict=False)]
    found: dict[int, int] = {}

    def timing(part: Part, run: Callable[..., Any]) -> Callable[..., dict[int, Any]]:
        def timed(known: dict[int, Any], operation_fn: Callable[..., Any]) -> dict[int, Any]:
            found[id(part)], outputs = _timed(part, run, known, operation_fn)
            return outputs

        return timed

    undo = run_in_parts(calls.functional, [(part, timing) for part in parts])
    try:
        x, *_ = next(iter(batches(calls.model, _ROWS, _LENGTH)))
        with tf.device(device), untouched(calls.model, keras.StatelessScope()):
            calls.model(keras.tree.map_structure(_made_up, x), training=True)
    except Exception as error:
        raise ValueError(
            f"{calls.model.name!r} could not be run on made-up examples to measure its layers: {error} Write "
            'balance="parameters", or name the layers that end a stage, as in Pipeline(cuts=["block_2", "block_5"]).'
        ) from error
    finally:
        undo()
    # What it takes to call a function is in each.
    least = min(found.values())
    times = [0] * len(calls.nodes)
    for end, part in zip(ends, parts, strict=True):
        times[end] = found[id(part)] - least + 1
    return times


def _made_up(spec: tf.TensorSpec) -> tf.Tensor:
    # Not by TensorFlow, whose next numbers would be others.
    sizes: Any = tuple(spec.shape)
    numbers = np.random.default_rng(0).normal(size=sizes)
    return tf.cast(numbers, spec.dtype) if spec.dtype.is_floating else tf.zeros(spec.shape, spec.dtype)


def _timed(
    part: Part, run: Callable[..., Any], known: dict[int, Any], operation_fn: Callable[..., Any]
) -> tuple[int, dict[int, Any]]:
    variables = list({id(each): each for layer in part.layers for each in variables_of(layer)}.values())
    places: list[int] = []

    @tf.function(autograph=False)
    def passes(inputs: list[Any], masks: list[Any], values: list[tf.Tensor]) -> Any:
        held = dict(zip(known, map(with_mask, inputs, masks), strict=True))
        weights = [value for variable, value in zip(variables, values, strict=True) if variable.trainable]
        watched = [each for each in [*inputs, *weights] if has_gradient(each)]
        scope = keras.StatelessScope(list(zip(variables, values, strict=True)), collect_losses=True)
        with tf.GradientTape() as tape, scope:
            tape.watch(watched)
            found = run(held, operation_fn=operation_fn)
            floats = [each for leaf in found.values() for each in dense_parts(leaf) if has_gradient(each)]
        places[:] = found
        gradients: list[Any] = [each for each in tape.gradient(floats, watched) if each is not None]
        gradients = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
        # Reading it waits for all of them.
        last = tf.add_n([tf.cast(tf.reshape(each, [-1])[0], "float32") for each in gradients] or [tf.constant(0.0)])
        return list(found.values()), [mask_of(each) for each in found.values()], gradients, last

    # Weights may be in the memory of the host.
    values = [tf.identity(tf.convert_to_tensor(variable.value)) for variable in variables]
    arguments = list(known.values()), [mask_of(each) for each in known.values()], values
    outputs, masks, *_ = passes(*arguments)
    least = None
    for _ in range(_TIMES):
        begin = time.perf_counter_ns()
        passes(*arguments)[-1].numpy()
        took = time.perf_counter_ns() - begin
        least = took if least is None else min(least, took)
    return least or 0, {place: with_mask(*pair) for place, *pair in zip(places, outputs, masks, strict=True)}
