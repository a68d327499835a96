"""Cuts a model into segments to recompute: segments of equal length, or the ones that save memory.

*Parts* are the smallest pieces of a Functional model between which a single tensor goes on. A *segment* is one or more
consecutive parts, which run again together in the backward pass, or not at all. Bytes and work are of one example.
"""

from collections.abc import Sequence
from typing import NamedTuple

import keras

from keras_paragrad.compat.model import all_layers, words_of
from keras_paragrad.engine.calls.recomputed import is_recomputed
from keras_paragrad.engine.step.segments import (
    FunctionalModel,
    Part,
    functional_of,
    join_parts,
    parts_of,
    recomputes_parts,
    runs_in_segments,
    single_nested_model,
)
from keras_paragrad.memory.measure import ModelCost, PartCost, measure_parts
from keras_paragrad.per_example.wrapper import PerExampleGradients
from keras_paragrad.plain_text import bytes_in_words

# Number of sizes tried for the largest segment.
_TRIED = 40
# Bytes freed per FLOP of a segment that is worth recomputing, as a share of the model's bytes stored per FLOP.
_WORTH = 0.5
# Peaks within this factor are considered equal.
_SAME = 1.02


class Span(NamedTuple):
    """Consecutive parts, from the first up to the last without it.

    Attributes:
        first: Index of the first part.
        last: Index after the last part.
        recomputed: Whether it is recomputed in the backward pass.
    """

    first: int
    last: int
    recomputed: bool


def equal_segments(count: int, parts: int) -> list[Span]:
    """Segments of `count` parts; all but the last are recomputed, as its backward pass comes first."""
    starts = range(0, parts, count)
    return [Span(first, min(first + count, parts), first + count < parts) for first in starts]


def best_segments(model_cost: ModelCost, worth: float = _WORTH) -> list[Span]:
    """Chooses the segments that need the least memory; recomputes the ones that free enough bytes per FLOP.

    Args:
        model_cost: The costs of the model's parts.
        worth: The least bytes freed per FLOP, as a share of the model's bytes stored per FLOP.
    """
    costs = model_cost.parts
    cuts = _best_cuts(model_cost)
    total_bytes = sum(cost.stored_bytes + cost.output_bytes for cost in costs)
    total_work = sum(cost.work for cost in costs)
    segments = []
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        # A recomputed segment stores all of its inputs, another one only those that the backward pass uses.
        freed = _stored_bytes(costs[first:last]) - model_cost.input_bytes[first]
        freed += costs[first - 1].output_bytes if first else 0.0
        work = sum(cost.work for cost in costs[first:last])
        recomputed = freed * total_work > worth * work * total_bytes
        repeatable = all(cost.repeatable for cost in costs[first:last])
        segments.append(Span(first, last, recomputed and repeatable))
    # The last segments are freed before others run again: they stay, if that doesn't raise the peak.
    peak = peak_bytes(model_cost, segments)
    for index in reversed(range(len(segments))):
        first, last, _ = segments[index]
        fewer = [*segments[:index], Span(first, last, False), *segments[index + 1 :]]
        if peak_bytes(model_cost, fewer) > _SAME * peak:
            break
        segments = fewer
    return segments


def peak_bytes(model_cost: ModelCost, segments: Sequence[Span]) -> float:
    """The peak in bytes: after the forward pass, or while a segment is recomputed."""
    held, peak = 0.0, 0.0
    for first, last, recomputed in segments:
        inside = _stored_bytes(model_cost.parts[first:last])
        if recomputed:
            held += model_cost.input_bytes[first]
            peak = max(peak, held + inside)
        else:
            held += (model_cost.parts[first - 1].output_bytes if first else 0.0) + inside
    return max(held, peak)


def _stored_bytes(costs: Sequence[PartCost]) -> float:
    """Bytes that a segment stores, without its inputs and outputs."""
    return sum(cost.stored_bytes for cost in costs) + sum(cost.output_bytes for cost in costs[:-1])


def _best_cuts(model_cost: ModelCost) -> list[int]:
    """Chooses the cuts that minimize the largest segment's bytes plus all segments' input bytes.

    Returns:
        The index of each segment's first part, and the number of parts.
    """
    total, least = _stored_bytes(model_cost.parts), max(cost.stored_bytes for cost in model_cost.parts)
    sizes = [least + (total - least) * (step / _TRIED) ** 2 for step in range(_TRIED + 1)]
    cuts = {size: _cuts_of_size(size, model_cost) for size in sizes}
    return cuts[min(cuts, key=lambda size: size + sum(model_cost.input_bytes[first] for first in cuts[size][:-1]))]


def _cuts_of_size(size: float, model_cost: ModelCost) -> list[int]:
    """Chooses the cuts that minimize the segments' input bytes, if no segment may store more than `size`."""
    # For the first n parts: the least input bytes of their segments, and where the last of these begins.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for last in range(1, len(model_cost.parts) + 1):
        held, options = 0.0, []
        for first in range(last - 1, -1, -1):
            part = model_cost.parts[first]
            held += part.stored_bytes + (part.output_bytes if first < last - 1 else 0)
            if held > size * (1 + 1e-9) and options:
                break
            options.append((best[first][0] + model_cost.input_bytes[first], first))
        best.append(min(options))
    cuts = [len(model_cost.parts)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return cuts[::-1]


_ADVICE = 'Name the layers to recompute, as in layers=["block_0", "block_1"].'
# The largest share of stored bytes that may remain for recomputation to be worthwhile.
_WORTHWHILE = 0.9


class Cut(NamedTuple):
    """A model and the segments it is cut into.

    Attributes:
        functional: The Functional model that is cut: the model itself, or one in it.
        segments: The segments, in order, and whether each is recomputed.
        expects: The expected savings, as a message; `None` if nothing was measured.
    """

    functional: FunctionalModel
    segments: list[tuple[Part, bool]]
    expects: str | None


def cut_every(model: keras.Model, every: int) -> Cut:
    """Segments of `every` parts, all recomputed but the last."""
    functional, parts = _parts(model)
    if every >= len(parts):
        raise ValueError(
            f"`every` is {every}, and {model.name!r} can be cut into {len(parts)} parts between which a single tensor "
            f"goes on: it must be less. Write every={max(1, len(parts) // 4)}."
        )
    segments = equal_segments(every, len(parts))
    return Cut(functional, [(join_parts(functional, parts[a:b]), again) for a, b, again in segments], None)


def cut_for_least_memory(model: keras.Model, *, where_it_pays: bool = True) -> Cut:
    """The segments that `"auto"` recomputes, or `"all"` if `where_it_pays` is false; see `recompute`."""
    functional, parts = _parts(model)
    try:
        costs = measure_parts(model, functional, parts)
    except Exception as error:
        raise ValueError(
            f"A step of {model.name!r} could not be traced to measure it: {words_of(error)} {_ADVICE}"
        ) from error
    segments = best_segments(costs, _WORTH if where_it_pays else 0.0)
    before = peak_bytes(costs, [Span(0, len(parts), False)])
    after = peak_bytes(costs, segments)
    joined = [(join_parts(functional, parts[first:last]), recomputed) for first, last, recomputed in segments]
    names = [part.name for part, recomputed in joined if recomputed]
    if not names or after > _WORTHWHILE * before:
        expects = (
            f"recompute: nothing in {model.name!r} runs again. Its parts keep about {bytes_in_words(before)} for an "
            "example, and recomputing them would free little of it."
        )
        return Cut(functional, [(part, False) for part, _ in joined], expects)
    again = [cost.work for first, last, recomputed in segments if recomputed for cost in costs.parts[first:last]]
    listed = ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])
    expects = (
        f"recompute: {len(names)} of {len(segments)} segments of {model.name!r} run again: {listed}. Kept for the "
        f"backward pass, for an example: about {bytes_in_words(after)} instead of {bytes_in_words(before)}. Time of a "
        f"step: about {sum(again) / costs.work:+.0%}."
    )
    return Cut(functional, joined, expects)


def _parts(model: keras.Model) -> tuple[FunctionalModel | None, list[Part]]:
    """The innermost Functional model with most of the layers, and its smallest parts."""
    functional = functional_of(model)
    if functional is None or not model.built:
        problem = "is not built" if isinstance(model, keras.Sequential) else "is not a Functional or Sequential model"
        advice = "Begin it with keras.Input(shape)" if isinstance(model, keras.Sequential) else _ADVICE.rstrip(".")
        raise ValueError(f"{model.name!r} {problem}, and the order of its layers is not known. {advice}.")
    if runs_in_segments(functional):
        raise ValueError(f"{model.name!r} is recomputed already. Call undo() of the handle that recompute returned.")
    for layer in all_layers(model):
        check_nesting(model, layer)
    parts = parts_of(functional)
    for part in parts:
        nested = single_nested_model(part)
        if (
            nested is not None
            and functional_of(nested) is not None
            and 2 * len(all_layers(nested)) > len(all_layers(model))
        ):
            return _parts(nested)
    if len(parts) < 2:
        raise ValueError(f"{model.name!r} can't be cut: nowhere does a single tensor go on. {_ADVICE}")
    return functional, parts


def check_nesting(layer: keras.layers.Layer, other: keras.layers.Layer) -> None:
    """Refuses a layer that contains another, or is contained in it, if the other can't be recomputed with it.

    Raises:
        ValueError: The other is recomputed already, or computes per-example gradients.
    """
    if is_recomputed(other) or (isinstance(other, keras.Model) and recomputes_parts(functional_of(other))):
        raise ValueError(
            f"{other.name!r} is recomputed already. Call undo() of the handle that recompute returned, or, with "
            "fit_memory=True, dist.prepare(model, batch_size=...)."
        )
    if isinstance(other, PerExampleGradients):
        raise ValueError(
            f"{layer.name!r} and the PerExampleGradients layer {other.name!r} are within each other. Per-example "
            "gradients are computed from the inputs that each layer keeps. To save memory there, train in smaller "
            "batches with AccumulatingOptimizer, or name layers before the PerExampleGradients layer."
        )
