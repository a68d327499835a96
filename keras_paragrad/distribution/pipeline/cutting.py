"""Cuts a model into the stages of a pipeline, between calls of its layers."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras

from keras_paragrad.arguments import did_you_mean, quote
from keras_paragrad.compat.model import all_layers
from keras_paragrad.compat.variables import variable_bytes
from keras_paragrad.distribution.pipeline.pipeline import Pipeline
from keras_paragrad.engine.step.segments import FunctionalModel, Part, calls_of, functional_of, part_of

# The largest stage may be larger than necessary by this factor, if fewer tensors cross the cuts then.
_SLACK = 1.1


class Calls:
    """The calls of a model's operations, in the order in which Keras makes them.

    Args:
        model: A Functional or Sequential model, built.

    Attributes:
        functional: What runs when the model is called.
        nodes: The calls.

    Raises:
        ValueError: The order of the calls is unknown. The message says what to write.
    """

    def __init__(self, model: keras.Model):
        functional = functional_of(model)
        if isinstance(model, keras.Sequential) and not model.built:
            raise ValueError(
                f"{model.name!r} is not built, and the order of its layers is not known. Begin it with "
                "keras.Input(shape)."
            )
        if functional is None:
            raise ValueError(
                f"{model.name!r} is a {type(model).__name__} that overrides call, so it isn't known what one layer "
                "passes to the next. Write it as a Functional model, keras.Model(inputs, outputs), or train it with "
                'DistributedFit("mirrored", shard="parameters"), which cuts weights and not layers.'
            )
        self.model = model
        self.functional: FunctionalModel = functional
        self.nodes = calls_of(functional)
        # The first and last call of each layer that has variables, and the first and last that use each variable.
        self._users: dict[str, tuple[int, int]] = {}
        for index, node in enumerate(self.nodes):
            variables = operation_variables(node.operation)
            keys = [f"weight {variable.path!r}" for variable in variables]
            for key in [f"layer {node.operation.name!r}", *keys] if variables else []:
                self._users[key] = self._users.get(key, (index, index))[0], index
        # For each tensor that calls use, the call that computes it and the last one that uses it.
        producers = {id(tensor): index for index, node in enumerate(self.nodes) for tensor in node.outputs}
        last_users = {id(tensor): index for index, node in enumerate(self.nodes) for tensor in node.input_tensors}
        self._tensors = [(index, last_users[tensor]) for tensor, index in producers.items() if tensor in last_users]

    def shared_across(self, index: int) -> str | None:
        """The name of a layer or weight that is used both up to a call and after it, if any."""
        return next((key for key, (first, last) in self._users.items() if first <= index < last), None)

    def tensors_across(self, index: int) -> int:
        """The number of tensors that are computed up to a call and used after it."""
        return sum(first <= index < last for first, last in self._tensors)

    def sizes(self) -> list[int]:
        """The bytes of variables that each call is the first to use."""
        seen: set[int] = set()
        sizes = []
        for node in self.nodes:
            new = [variable for variable in operation_variables(node.operation) if id(variable) not in seen]
            seen.update(map(id, new))
            sizes.append(sum(map(variable_bytes, new)))
        return sizes


def operation_variables(operation: keras.Operation) -> list[keras.Variable]:
    """The variables of an operation, if it is a layer."""
    return list(operation.variables) if isinstance(operation, keras.layers.Layer) else []


def variables_of_part(part: Part) -> list[keras.Variable]:
    """The variables of a part's layers, each once."""
    return list({id(variable): variable for layer in part.layers for variable in operation_variables(layer)}.values())


def cut(model: keras.Model, pipeline: Pipeline) -> list[Part]:
    """The stages of a built model, in order."""
    calls = Calls(model)
    if pipeline.cuts is not None:
        indices = _named_cuts(calls, list(pipeline.cuts))
    else:
        indices = _balanced_cuts(calls, pipeline.count, calls.sizes())
    ends = [0, *(index + 1 for index in indices), len(calls.nodes)]
    return [part_of(calls.functional, calls.nodes[first:last]) for first, last in itertools.pairwise(ends)]


def _named_cuts(calls: Calls, cuts: list[str]) -> list[int]:
    """The indices of the calls after which the named layers end a stage."""
    name = calls.model.name
    last = {node.operation.name: index for index, node in enumerate(calls.nodes)}
    unknown = next((cut for cut in cuts if cut not in last), None)
    if unknown is not None:
        _refuse_unknown(calls, unknown)
    indices = [last[cut] for cut in cuts]
    if any(first >= second for first, second in itertools.pairwise(indices)):
        ordered = sorted(dict.fromkeys(cuts), key=lambda cut: last[cut])
        raise ValueError(f"`cuts` is {cuts}, and {name!r} calls these layers in another order. Write cuts={ordered}.")
    if indices[-1] == len(calls.nodes) - 1:
        raise ValueError(
            f"`cuts` ends with {cuts[-1]!r}, which is the last layer of {name!r}, so nothing is left for the last "
            "stage. A layer in `cuts` ends its stage. Leave that one out."
        )
    for cut, index in zip(cuts, indices, strict=True):
        shared = calls.shared_across(index)
        if shared:
            raise ValueError(
                f"A cut after {cut!r} cuts the shared {shared}, which would have to be on two devices. Cut before "
                "its first use or after its last, as Pipeline(stages=...) does."
            )
    return indices


def _refuse_unknown(calls: Calls, name: str) -> NoReturn:
    """Raises for a cut after a layer that the model does not call itself."""
    for node in calls.nodes:
        inner = all_layers(node.operation) if isinstance(node.operation, keras.layers.Layer) else []
        if name in [layer.name for layer in inner]:
            raise ValueError(
                f"`cuts` has {name!r}, which is a part of {node.operation.name!r}. A layer is on one device with all "
                f"that it calls. Cut after {node.operation.name!r}, or another layer of {calls.model.name!r} itself."
            )
    names = list(dict.fromkeys(node.operation.name for node in calls.nodes))
    question = did_you_mean(name, names) or f" Layers: {names[:10]}."
    raise ValueError(f"`cuts` has {quote(name)}, and no layer of {calls.model.name!r} has that name.{question}")


def _balanced_cuts(calls: Calls, stages: int, sizes: Sequence[int]) -> list[int]:
    """The indices of the calls after which the model is cut.

    The largest stage is larger than necessary by a tenth at most; among such cuts, the fewest tensors cross these.
    """
    weighted = [index for index, size in enumerate(sizes) if size]
    candidates = []
    for first, second in itertools.pairwise(weighted):
        allowed = [index for index in range(first, second) if calls.shared_across(index) is None]
        if allowed:
            candidates.append(min(allowed, key=calls.tensors_across))
    if len(candidates) + 1 < stages:
        raise ValueError(
            f"stages={stages}, but {calls.model.name!r} can be cut into {len(candidates) + 1} at most that have "
            "something to do and share no weights. Write fewer stages, and name the same number of devices."
        )
    totals = list(itertools.accumulate(sizes))
    ends = [*(totals[index] for index in candidates), totals[-1]]
    across = [*map(calls.tensors_across, candidates), 0]
    smallest = best_cuts(ends, across, stages, lambda largest, crossing: (largest, crossing))
    bounds = [0, *(ends[index] for index in smallest), ends[-1]]
    limit = _SLACK * max(second - first for first, second in itertools.pairwise(bounds))
    fewest = best_cuts(ends, across, stages, lambda largest, crossing: (largest > limit, crossing, largest))
    return [candidates[index] for index in fewest]


def best_cuts(
    ends: Sequence[int], across: Sequence[int], stages: int, rank: Callable[[int, int], tuple[Any, ...]]
) -> tuple[int, ...]:
    """The best places to cut at, by dynamic programming.

    Args:
        ends: The sums of the sizes up to each place where a cut is possible, and of all sizes.
        across: The number of tensors that cross a cut at each place; 0 for the end.
        stages: The number of stages.
        rank: The key to minimize, from the size of the largest stage and the number of tensors that cross.

    Returns:
        Indices into `ends`.

    Example:

    >>> from keras_paragrad.distribution.pipeline.cutting import best_cuts
    >>> best_cuts([4, 5, 6, 12], [1, 1, 1, 0], 2, lambda largest, crossing: (largest, crossing))
    (2,)
    """
    # By the end of a stage: the largest stage so far, the tensors that cross, and the cuts.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {-1: (0, 0, ())}
    for stage in range(1, stages + 1):
        extended: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for end in [len(ends) - 1] if stage == stages else range(stage - 1, len(ends) - 1):
            ways = [
                (max(largest, ends[end] - (ends[start] if start >= 0 else 0)), crossing + across[end], (*cuts, end))
                for start, (largest, crossing, cuts) in best.items()
                if start < end
            ]
            if ways:
                extended[end] = min(ways, key=lambda way: rank(*way[:2]))
        best = extended
    return best[len(ends) - 1][2][:-1]
