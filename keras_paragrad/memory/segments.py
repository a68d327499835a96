"""A model cut into segments: of equal length, or where it pays."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from keras_paragrad.compat.model import all_layers
from keras_paragrad.engine.step.segments import (
    Part,
    functional_of,
    joined,
    nested_in,
    parts_of,
    runs_in_segments,
)
from keras_paragrad.memory.choice import Span, best_segments, every_few, kept_bytes
from keras_paragrad.memory.layer_names import check_within
from keras_paragrad.memory.measure import measure

_INSTEAD = 'Name the layers to recompute, as in layers=["block_0", "block_1"].'


# The most that may be left of what is kept.
_MUCH = 0.9


class Cut(NamedTuple):
    """A model and the segments it is cut into.

    Attributes:
        functional: The Functional model that is cut: the model itself, or one in it.
        segments: The segments, in order, and whether each is recomputed.
        expects: What is expected of it, or `None` if nothing was measured.
    """

    functional: Any
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
    return _cut(functional, parts, every_few(every, len(parts)), None)


def cut_where_it_pays(model: keras.Model) -> Cut:
    """The segments that `"auto"` recomputes; see `recompute`."""
    functional, parts = _parts(model)
    try:
        found = measure(model, functional, parts)
    except Exception as error:
        raise ValueError(f"A step of {model.name!r} could not be traced to measure it: {error} {_INSTEAD}") from error
    segments = best_segments(found)
    before = kept_bytes(found, [Span(0, len(parts), False)])
    after = kept_bytes(found, segments)
    chosen = [segment for segment in segments if segment.recomputed]
    if not chosen or after > _MUCH * before:
        segments = [segment.kept() for segment in segments]
        expects = (
            f"recompute: nothing in {model.name!r} runs again. Its parts keep about {_mega(before)} MB for an example, "
            "and recomputing them would not free much of that."
        )
        return _cut(functional, parts, segments, expects)
    again = sum(sum(cost.work for cost in found.parts[first:last]) for first, last, _ in chosen) / found.work
    names = [joined(functional, parts[first:last]).name for first, last, _ in chosen]
    listed = ", ".join(names if len(names) <= 4 else [*names[:2], "...", names[-1]])
    expects = (
        f"recompute: {len(chosen)} of {len(segments)} segments of {model.name!r} run again: {listed}. Kept for the "
        f"backward pass, for an example: about {_mega(after)} MB instead of {_mega(before)} MB. Time of a step: about "
        f"{again:+.0%}."
    )
    return _cut(functional, parts, segments, expects)


def _cut(functional: Any, parts: Sequence[Part], segments: Sequence[Span], expects: str | None) -> Cut:
    made = [(joined(functional, parts[first:last]), recomputed) for first, last, recomputed in segments]
    return Cut(functional, made, expects)


def _parts(model: keras.Model) -> tuple[Any, list[Part]]:
    """The Functional model to cut, which is the innermost that has most of the layers, and its smallest parts."""
    functional = functional_of(model)
    if functional is None or not model.built:
        what = "is not built" if isinstance(model, keras.Sequential) else "is not a Functional or Sequential model"
        advice = "Begin it with keras.Input(shape)" if isinstance(model, keras.Sequential) else _INSTEAD.rstrip(".")
        raise ValueError(f"{model.name!r} {what}, and the order of its layers is not known. {advice}.")
    if runs_in_segments(functional):
        raise ValueError(f"{model.name!r} is recomputed already. Call undo() of the handle that recompute returned.")
    for layer in all_layers(model):
        check_within(model, layer)
    parts = parts_of(functional)
    for part in parts:
        inside = nested_in(part)
        if (
            inside is not None
            and functional_of(inside) is not None
            and 2 * len(all_layers(inside)) > len(all_layers(model))
        ):
            return _parts(inside)
    if len(parts) < 2:
        raise ValueError(f"{model.name!r} can't be cut: nowhere does a single tensor go on. {_INSTEAD}")
    return functional, parts


def _mega(count: float) -> str:
    return f"{count / 1e6:.3g}"
