"""Cuts a model into the stages of a pipeline."""

import difflib
import itertools
from typing import NoReturn

import keras

from keras_paragrad._keras.objects.model import all_layers
from keras_paragrad._keras.step.segments import Part, part_of
from keras_paragrad.arguments import shown
from keras_paragrad.distribution.pipeline.balance import balanced
from keras_paragrad.distribution.pipeline.calls import Calls
from keras_paragrad.distribution.pipeline.pipeline import Pipeline
from keras_paragrad.distribution.pipeline.timing import measured_times


def cut(model: keras.Model, pipeline: Pipeline, device: str) -> list[Part]:
    """The stages of a built model, in order."""
    calls = Calls(model)
    if pipeline.cuts is not None:
        after = _named(calls, list(pipeline.cuts))
    else:
        sizes = calls.sizes() if pipeline.balance == "parameters" else measured_times(calls, device)
        after = balanced(calls, pipeline.count, sizes)
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
