"""Cuts a model into the stages of a pipeline."""

import difflib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import shown
from keras_paragrad.compat.layers import mask_of, with_mask
from keras_paragrad.compat.leaves import dense_parts, has_gradient
from keras_paragrad.compat.model import all_layers
from keras_paragrad.distribution.pipeline.calls import Calls, variables_of
from keras_paragrad.distribution.pipeline.pipeline import Pipeline
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


# By how much the largest stage may be larger than it has to, if fewer tensors cross the cuts then.
_SLACK = 1.1


def cut(model: keras.Model, pipeline: Pipeline, device: str) -> list[Part]:
    """The stages of a built model, in order."""
    calls = Calls(model)
    if pipeline.cuts is not None:
        after = _named(calls, list(pipeline.cuts))
    else:
        sizes = calls.sizes() if pipeline.balance == "parameters" else measured_times(calls, device)
        after = _balanced(calls, pipeline.count, sizes)
    return [part_of(calls.functional, nodes) for nodes in calls.between(after)]


def _named(calls: Calls, cuts: list[str]) -> list[int]:
    """The places of the calls after which named layers end a stage."""
    name = calls.model.name
    last = {node.operation.name: place for place, node in enumerate(calls.nodes)}
    unknown = next((each for each in cuts if each not in last), None)
    if unknown is not None:
        _refuse(calls, unknown)
    after = [last[each] for each in cuts]
    if any(first >= second for first, second in itertools.pairwise(after)):
        ordered = sorted(dict.fromkeys(cuts), key=lambda each: last[each])
        raise ValueError(f"`cuts` is {cuts}, and {name!r} calls these layers in another order. Write cuts={ordered}.")
    if after[-1] == len(calls.nodes) - 1:
        raise ValueError(
            f"`cuts` ends with {cuts[-1]!r}, which is the last layer of {name!r}, so nothing is left for the last "
            "stage. A layer in `cuts` ends its stage. Leave that one out."
        )
    for each, place in zip(cuts, after, strict=True):
        separated = calls.separated(place)
        if separated:
            raise ValueError(
                f"A cut after {each!r} cuts the shared {separated}, which would have to be on two devices. Cut before "
                "its first use or after its last, as Pipeline(stages=...) does."
            )
    return after


def _refuse(calls: Calls, name: str) -> NoReturn:
    for node in calls.nodes:
        inside = all_layers(node.operation) if isinstance(node.operation, keras.layers.Layer) else []
        if name in [layer.name for layer in inside]:
            raise ValueError(
                f"`cuts` has {name!r}, which is a part of {node.operation.name!r}. A layer is on one device with all "
                f"that it calls. Cut after {node.operation.name!r}, or another layer of {calls.model.name!r} itself."
            )
    close = difflib.get_close_matches(name, calls.names, n=3) or calls.names[:10]
    raise ValueError(f"`cuts` has {shown(name)}, and no layer of {calls.model.name!r} has that name. Layers: {close}.")


def _balanced(calls: Calls, stages: int, sizes: Sequence[int]) -> list[int]:
    """The places of the calls after which a model is cut.

    The largest stage is at most a tenth larger than it has to be; of these cuts, those are taken that the fewest
    tensors cross.
    """
    weighted = [place for place, size in enumerate(sizes) if size]
    candidates = []
    for first, second in itertools.pairwise(weighted):
        allowed = [place for place in range(first, second) if calls.separated(place) is None]
        if allowed:
            candidates.append(min(allowed, key=calls.tensors_across))
    if len(candidates) + 1 < stages:
        raise ValueError(
            f"stages={stages}, but {calls.model.name!r} can be cut into {len(candidates) + 1} at most that have "
            "something to do and share no weights. Write fewer stages, and name as many devices."
        )
    totals = list(itertools.accumulate(sizes))
    ends = [*(totals[place] for place in candidates), totals[-1]]
    across = [*map(calls.tensors_across, candidates), 0]
    smallest = best_cuts(ends, across, stages, lambda largest, crossing: (largest, crossing))
    limit = _SLACK * _largest(smallest, ends)
    fewest = best_cuts(ends, across, stages, lambda largest, crossing: (largest > limit, crossing, largest))
    return [candidates[index] for index in fewest]


def best_cuts(
    ends: Sequence[int], across: Sequence[int], stages: int, rank: Callable[[int, int], tuple]
) -> tuple[int, ...]:
    """The best places to cut at, by dynamic programming.

    Args:
        ends: The sizes summed up to each place that may be cut at, and of all.
        across: How many tensors cross a cut there; 0 for the end.
        stages: How many stages there are to be.
        rank: From the size of the largest stage and the number of tensors across to what is to be small.

    Returns:
        Indices into `ends`.

    Example:

    >>> from keras_paragrad.distribution.pipeline.cutting import best_cuts
    >>> best_cuts([4, 5, 6, 12], [1, 1, 1, 0], 2, lambda largest, crossing: (largest, crossing))
    (2,)
    """
    # From where a stage ends to the largest stage up to there, the tensors across, and the cuts.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {-1: (0, 0, ())}
    for stage in range(1, stages + 1):
        reached: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for end in [len(ends) - 1] if stage == stages else range(stage - 1, len(ends) - 1):
            ways = [
                (max(largest, ends[end] - (ends[start] if start >= 0 else 0)), crossing + across[end], (*chosen, end))
                for start, (largest, crossing, chosen) in best.items()
                if start < end
            ]
            if ways:
                reached[end] = min(ways, key=lambda way: rank(*way[:2]))
        best = reached
    return best[len(ends) - 1][2][:-1]


def _largest(chosen: Sequence[int], ends: Sequence[int]) -> int:
    places = [0, *(ends[index] for index in chosen), ends[-1]]
    return max(second - first for first, second in itertools.pairwise(places))
