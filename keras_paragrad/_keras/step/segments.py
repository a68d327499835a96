"""A Functional model run in parts: stretches of its operations between places where one tensor alone goes on."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from keras.src.models.functional import Functional

from keras_paragrad._keras.objects.model import all_layers
from keras_paragrad._keras.step.recompute import Recomputed, is_recomputed

_RUN = "_run_through_graph"


class Part(NamedTuple):
    """Consecutive operations of a Functional model.

    Attributes:
        nodes: The calls of operations, in the order in which Keras makes them.
        inputs: The symbolic tensors that they take from others.
        outputs: Those of theirs that others, or the model's outputs, take.
    """

    nodes: tuple[Any, ...]
    inputs: tuple[keras.KerasTensor, ...]
    outputs: tuple[keras.KerasTensor, ...]

    @property
    def layers(self) -> list[keras.layers.Layer]:
        """The layers among the operations."""
        called = [node.operation for node in self.nodes]
        return list({id(each): each for each in called if isinstance(each, keras.layers.Layer)}.values())

    @property
    def name(self) -> str:
        """The first and last layers' names."""
        names = [layer.name for layer in self.layers] or [self.nodes[0].operation.name]
        return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"

    @property
    def floats(self) -> list[keras.KerasTensor]:
        """The tensors among the inputs that are kept for a second run."""
        return [tensor for tensor in self.inputs if _is_float(tensor)]


def functional_of(model: keras.Model) -> Any:
    """The Functional model that runs when a model is called, or `None` if something else does."""
    if isinstance(model, keras.Sequential):
        return model._functional if type(model).call is keras.Sequential.call else None
    return model if isinstance(model, Functional) and type(model).call is Functional.call else None


def calls_of(functional: Any) -> list[Any]:
    """The calls of a Functional model's operations, in the order in which Keras makes them."""
    depths = functional._nodes_by_depth
    return [node for depth in sorted(depths, reverse=True) for node in depths[depth] if not node.is_input]


def parts_of(functional: Any) -> list[Part]:
    """A Functional model in its smallest parts: between two of them, one tensor of floats goes on.

    Inputs and outputs of the whole model may go past, as they are kept anyway.
    """
    nodes = calls_of(functional)
    last_use = {id(tensor): index for index, node in enumerate(nodes) for tensor in node.input_tensors}
    lasting = {id(tensor) for tensor in functional.outputs}
    alive: set[int] = set()
    found: list[list[Any]] = [[]]
    for index, node in enumerate(nodes):
        found[-1].append(node)
        alive |= {id(tensor) for tensor in node.outputs if _is_float(tensor)} - lasting
        alive = {each for each in alive if last_use.get(each, -1) > index}
        if len(alive) <= 1 and index + 1 < len(nodes):
            found.append([])
    return [part_of(functional, part) for part in found]


def joined(functional: Any, parts: Sequence[Part]) -> Part:
    """Consecutive parts as one."""
    return part_of(functional, [node for part in parts for node in part.nodes])


def nested_in(part: Part) -> Any:
    """The model that a part consists of a single call of, or `None`."""
    operation = part.nodes[0].operation
    return operation if len(part.nodes) == 1 and isinstance(operation, keras.Model) else None


def recompute_parts(owner: keras.Model, functional: Any, parts: Sequence[tuple[Part, bool]]) -> Callable[[], None]:
    """Has parts of a model run again in the backward pass.

    Args:
        owner: The model that is called, to which added losses are added.
        functional: The Functional model that runs then.
        parts: All its parts, in order, and whether each is recomputed.

    Returns:
        Undoes it.
    """

    def recomputed(part: Part, run: Callable[..., Any], again: bool) -> Callable[..., Any]:
        return Recomputed(run, part.name, part.layers, owner) if again else run

    return run_in_parts(functional, [(part, functools.partial(recomputed, part, again=again)) for part, again in parts])


def run_in_parts(
    functional: Any, parts: Sequence[tuple[Part, Callable[[Callable[..., Any]], Callable[..., Any]]]]
) -> Callable[[], None]:
    """Has a Functional model call a function for each of its parts.

    Args:
        functional: The model.
        parts: All its parts, in order, and what makes the function from that which just runs the part.

    Returns:
        Undoes it.
    """
    plain = functional._run_through_graph
    functions = [(part, wrap(functools.partial(_run_part, part))) for part, wrap in parts]

    def run(inputs: Any, operation_fn: Callable[..., Any] = lambda op: op, call_fn: Any = None) -> Any:
        flat = keras.tree.flatten(inputs)
        if call_fn is not None or any(isinstance(each, keras.KerasTensor) for each in flat):
            return plain(inputs, operation_fn=operation_fn, call_fn=call_fn)
        tensors = dict(zip(map(id, functional.inputs), flat, strict=True))
        for part, function in functions:
            known = {place: tensors[id(each)] for place, each in enumerate(part.inputs) if id(each) in tensors}
            for place, tensor in function(known, operation_fn=operation_fn).items():
                tensors[id(part.outputs[place])] = tensor
        outputs = [tensors[id(each)] for each in functional.outputs]
        return keras.tree.pack_sequence_as(functional._outputs_struct, outputs)

    again = [(len(part.nodes), isinstance(function, Recomputed)) for part, function in functions]
    run.recomputes = any(twice for _, twice in again)  # pyright: ignore
    run.described = ", ".join(f"{count}{' again' if twice else ''}" for count, twice in again)  # pyright: ignore
    # Bypass Keras's tracking: a method is not state of the model.
    own = vars(functional)
    own[_RUN] = run

    def undo() -> None:
        if own.get(_RUN) is run:
            del own[_RUN]

    return undo


def recomputed_in(model: keras.Model) -> dict[int, str]:
    """What of a model runs again in the backward pass: the places of layers among `all_layers`, -1 for the model.

    Models that run in parts are given with how many operations each part has.
    """
    found = {}
    for place, layer in enumerate((model, *all_layers(model)), -1):
        functional = functional_of(layer) if isinstance(layer, keras.Model) else None
        if is_recomputed(layer):
            found[place] = "as a whole"
        elif functional is not None and runs_in_parts(functional):
            found[place] = f"operations: {vars(functional)[_RUN].described}"
    return found


def runs_in_parts(functional: Any) -> bool:
    """Whether a Functional model is run in parts already."""
    return functional is not None and _RUN in vars(functional)


def recomputes_parts(functional: Any) -> bool:
    """Whether a Functional model is run in parts, some of them again in the backward pass."""
    return runs_in_parts(functional) and vars(functional)[_RUN].recomputes


def part_of(functional: Any, nodes: Sequence[Any]) -> Part:
    """Consecutive calls of a Functional model as a part of it."""
    inside = {id(tensor) for node in nodes for tensor in node.outputs}
    among = set(map(id, nodes))
    others = [node for each in functional._nodes_by_depth.values() for node in each if id(node) not in among]
    wanted = {id(tensor) for node in others for tensor in node.input_tensors} | set(map(id, functional.outputs))
    taken = {id(tensor): tensor for node in nodes for tensor in node.input_tensors if id(tensor) not in inside}
    given = {id(tensor): tensor for node in nodes for tensor in node.outputs if id(tensor) in wanted}
    return Part(tuple(nodes), tuple(taken.values()), tuple(given.values()))


def _run_part(part: Part, tensors: dict[int, Any], operation_fn: Callable[..., Any]) -> dict[int, Any]:
    """Makes a part's calls, as Keras does.

    Args:
        part: The part.
        tensors: The values of its inputs, by their places among them.
        operation_fn: What Keras would call in place of an operation.

    Returns:
        The values of its outputs, by their places.
    """
    known = {id(part.inputs[place]): tensor for place, tensor in tensors.items()}
    for node in part.nodes:
        if any(id(each) not in known for each in node.input_tensors):
            continue
        arguments, keywords = node.arguments.fill_in(known)
        outputs = operation_fn(node.operation)(*arguments, **keywords)
        known.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=False))
    return {place: known[id(each)] for place, each in enumerate(part.outputs) if id(each) in known}


def _is_float(tensor: keras.KerasTensor) -> bool:
    return keras.backend.is_float_dtype(tensor.dtype) or "complex" in tensor.dtype
