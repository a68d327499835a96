"""Error messages for inputs that have no gradient."""

import keras


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
