"""The calls of a Functional model's operations, and what a cut between two of them separates."""

import itertools
from typing import Any

import keras

from keras_paragrad.compat.stand_ins import bytes_of
from keras_paragrad.engine.step.segments import calls_of, functional_of


class Calls:
    """A model as the calls of its operations, in the order in which Keras makes them.

    Args:
        model: A Functional or Sequential model, built.

    Attributes:
        functional: What runs when the model is called.
        nodes: The calls.

    Raises:
        ValueError: The order of the calls is not known. The message says what to write.
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
                f"{model.name!r} is a {type(model).__name__} with a call of its own, so it isn't known what one layer "
                "passes to the next. Write it as a Functional model, keras.Model(inputs, outputs), or train it with "
                'DistributedFit("mirrored", shard="parameters"), which cuts weights and not layers.'
            )
        self.model = model
        self.functional: Any = functional
        self.nodes = calls_of(functional)
        # The first and last call of each layer that has variables, and those that use each variable.
        self._shared: dict[str, tuple[int, int]] = {}
        for place, node in enumerate(self.nodes):
            held = variables_of(node.operation)
            for key in [f"layer {node.operation.name!r}"] * bool(held) + [f"weight {each.path!r}" for each in held]:
                self._shared[key] = self._shared.get(key, (place, place))[0], place
        made = {id(tensor): place for place, node in enumerate(self.nodes) for tensor in node.outputs}
        used = {id(tensor): place for place, node in enumerate(self.nodes) for tensor in node.input_tensors}
        self._passed = [(first, used[tensor]) for tensor, first in made.items() if tensor in used]

    @property
    def names(self) -> list[str]:
        """The names of what is called, each once."""
        return list(dict.fromkeys(node.operation.name for node in self.nodes))

    def separated(self, place: int) -> str | None:
        """What has variables and is used both up to a call and after it, by name."""
        return next((key for key, (first, last) in self._shared.items() if first <= place < last), None)

    def tensors_across(self, place: int) -> int:
        """How many tensors are made up to a call and used after it."""
        return sum(first <= place < last for first, last in self._passed)

    def sizes(self) -> list[int]:
        """The bytes of variables that each call is the first to use."""
        seen: set[int] = set()
        sizes = []
        for node in self.nodes:
            new = [each for each in variables_of(node.operation) if id(each) not in seen]
            seen.update(map(id, new))
            sizes.append(sum(map(bytes_of, new)))
        return sizes

    def between(self, after: list[int]) -> list[list[Any]]:
        """The calls of each stage, if stages end after these."""
        ends = [0, *(place + 1 for place in after), len(self.nodes)]
        return [self.nodes[first:last] for first, last in itertools.pairwise(ends)]


def variables_of(operation: Any) -> list[keras.Variable]:
    """The variables of an operation, if it is a layer."""
    return list(operation.variables) if isinstance(operation, keras.layers.Layer) else []
