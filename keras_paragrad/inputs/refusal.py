"""Refusals: of inputs that have no gradient, and of models whose outputs for a row depend on earlier calls."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_paragrad.compat.model import all_layers
from keras_paragrad.engine.probes.row_independence import find_mixing_layer
from keras_paragrad.engine.step.operations import assigned_resources
from keras_paragrad.engine.step.segments import calls_of, functional_of

_KEEPS_STATE = (
    "so a row's derivatives would depend on the rows before it, and later predictions would be others than before."
)


def check_stateless(model: keras.Model) -> None:
    """Refuses a model with a layer of `stateful=True`.

    Raises:
        ValueError: There is one. The message says what to write instead.
    """
    names = [layer.name for layer in all_layers(model) if getattr(layer, "stateful", False)]
    if names:
        raise ValueError(
            f"{', '.join(map(repr, dict.fromkeys(names)))}: a stateful layer keeps its state from one call to the "
            f"next, {_KEEPS_STATE} Build the same model with stateful=False, and copy the weights: for old, new in "
            "zip(model.trainable_variables, stateless.trainable_variables): new.assign(old)."
        )


def check_rows(model: keras.Model, inputs: Any) -> None:
    """Refuses a model that mixes rows.

    Args:
        model: A built model.
        inputs: A `tf.TensorSpec` of `(None, ...)` for each input, nested as the model takes them.

    Raises:
        ValueError: It does. The message names the layer.
    """
    layer = find_mixing_layer(model, inputs, training=False)
    if layer:
        raise ValueError(
            f"The output of {layer!r} for one row depends on the other rows, so a row has no derivative of its own. "
            "Don't reduce over the batch axis 0, or differentiate with a tf.GradientTape."
        )


def check_assigns_nothing(model: keras.Model, graph: Any) -> None:
    """Refuses a model that assigns to a variable when it is called with `training=False`; seeds may move on.

    Args:
        model: The model.
        graph: That of a traced derivative.

    Raises:
        ValueError: It does. The message names the layer and the variable.
    """
    names = {id(variable.handle): variable.name.split(":")[0] for variable in graph.variables}
    paths = [names.get(id(resource), "a table") for resource in assigned_resources(graph)]
    found = sorted({path for path in paths if not path.endswith("seed_generator_state")})
    if found:
        raise ValueError(
            f"{model.name!r} assigns to {', '.join(found)} when it is called with training=False, {_KEEPS_STATE} "
            "In the layer's call(), assign only `if training:`."
        )


@contextlib.contextmanager
def refusing_what_has_no_derivative(says: str) -> Iterator[None]:
    """Context in which gradients are differentiated, which some operations of TensorFlow don't provide for."""
    try:
        yield
    except LookupError as error:
        raise ValueError(says.format(str(error).split(". ")[0])) from error


def integer_refusal(model: keras.Model, name: str, dtype: str, real: list[str]) -> str:
    """The message for an input that is not real-valued; `real` names the inputs that are."""
    hint = embedding_hint(model)
    if not hint and dtype not in ("bool", "object") and not dtype.startswith(("<U", "|S")):
        hint = "If its values are numbers and not codes, write x.astype('float32')."
    leave_out = f" To exclude it, write wrt={real}." if real else ""
    return f"Input {name!r} is {dtype}, and only real-valued inputs have a gradient. {hint}{leave_out}"


def embedding_hint(model: keras.Model) -> str:
    """How to differentiate with respect to the outputs of a model's embeddings, if it has any."""
    embeddings = [layer for layer in all_layers(model) if isinstance(layer, keras.layers.Embedding)]
    if not embeddings:
        return ""
    functional = functional_of(model)
    calls = [call for call in calls_of(functional) if _embeds(call.operation)] if functional else []
    found = [_expression(model, call.outputs[0]) for call in calls if _adds_an_axis(call)]
    vectors = [expression for expression in found if expression]
    if not vectors or len(vectors) < len(found):
        return (
            f"Differentiate with respect to the output of the embedding {embeddings[0].name!r}: build a keras.Model "
            "of the layers after it, and call this function on that."
        )
    # The inputs go on too: masks are made of them.
    inner = f"[{', '.join(vectors)}, *model.inputs]"
    names = ", ".join(dict.fromkeys(repr(call.operation.name) for call in calls))
    ends = ("inputs", "outputs") if isinstance(model, keras.Sequential) else ("input", "output")
    wrt = 0 if len(vectors) == 1 else list(range(len(vectors)))
    return (
        f"Differentiate with respect to the output of the embedding {names}: build before = "
        f"keras.Model(model.{ends[0]}, {inner}) and after = keras.Model({inner}, model.{ends[1]}), and call this "
        "function on `after`, with "
        f"before.predict(x) as its inputs and wrt={wrt}."
    )


def _embeds(operation: Any) -> bool:
    """Whether an operation is an embedding, or a layer around one, such as one that adds positions."""
    return isinstance(operation, keras.layers.Embedding) or (
        isinstance(operation, keras.layers.Layer)
        and not isinstance(operation, keras.Model)
        and any(isinstance(layer, keras.layers.Embedding) for layer in all_layers(operation))
    )


def _adds_an_axis(call: Any) -> bool:
    # One that is shared with the output layer also maps vectors to tokens.
    return len(call.outputs) == 1 and len(call.outputs[0].shape) == len(call.input_tensors[0].shape) + 1


def _expression(model: keras.Model, tensor: Any) -> str | None:
    """What to write for a tensor in a Functional model, by the operation that gives it or takes it; or `None`."""
    operations = getattr(model, "operations", model.layers)
    for side in ("output", "input"):
        for number, operation in enumerate(operations):
            place = f"get_layer({operation.name!r})" if operation in model.layers else f"operations[{number}]"
            held = getattr(operation, side, None)
            if held is tensor:
                return f"model.{place}.{side}"
            if isinstance(held, (list, tuple)):
                for index, each in enumerate(held):
                    if each is tensor:
                        return f"model.{place}.{side}[{index}]"
    return None
