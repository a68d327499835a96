"""Refusals: of inputs that have no gradient, and of models whose outputs for a row depend on earlier calls."""

from typing import Any

import keras

from keras_paragrad._keras.objects.model import all_layers
from keras_paragrad._keras.probes.rows import mixing_layer
from keras_paragrad._keras.step.stateful_ops import assigned_resources

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
    layer = mixing_layer(model, inputs, training=False)
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


def integer_refusal(model: keras.Model, names: list[str], number: int, dtype: str) -> str:
    """The message for an input that is not real-valued."""
    said = f"Input {names[number]!r} is {dtype}, and only real-valued inputs have a gradient. "
    others = [name for name in names if name != names[number]]
    leave_out = f" To exclude it, write wrt={others}." if others else ""
    hint = embedding_hint(model, number)
    if not hint and dtype not in ("bool", "object") and not dtype.startswith(("<U", "|S")):
        hint = "If its values are numbers and not codes, write x.astype('float32')."
    return f"{said}{hint}{leave_out}"


def embedding_hint(model: keras.Model, number: int) -> str:
    """How to differentiate with respect to the embedding of an input, if there is one."""
    embeddings = [layer for layer in getattr(model, "layers", []) if isinstance(layer, keras.layers.Embedding)]
    tensors = list(getattr(model, "inputs", None) or [])
    if not embeddings:
        return ""
    if not tensors:
        return f"Differentiate with respect to the output of the embedding {embeddings[0].name!r}, as a model's input."
    fed = [layer for layer in embeddings if layer.input is tensors[min(number, len(tensors) - 1)]]
    layer = (fed or embeddings)[0]
    words = f"model.get_layer({layer.name!r}).output"
    inputs = [words if place == number else f"model.inputs[{place}]" for place in range(len(tensors))]
    inputs = inputs[0] if len(inputs) == 1 else f"[{', '.join(inputs)}]"
    outputs = "model.outputs[0]" if len(model.outputs) == 1 else "model.output"
    return (
        f"Differentiate with respect to the output of its embedding {layer.name!r}: build before = keras.Model("
        f"model.inputs[{number}], {words}) and after = keras.Model({inputs}, {outputs}), and call this function on "
        "`after`, with before.predict(...) for this input."
    )
