"""What DTensor can't do, named by layer and operation."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from keras_paragrad.compat.model import all_layers

# It has no rule for them, whatever they are given; some of them end the process.
UNSUPPORTED = re.compile(
    r"While|StatelessWhile|TensorList\w*|TensorArray\w*|AvgPool3?D?Grad|DepthwiseConv2dNativeBackprop\w+|Reverse(V2)?|"
    r"ReverseSequence|Roll|EagerPyFunc|PyFunc\w*"
)
_OPERATION = re.compile(r"\btf\.([A-Z]\w+)")


def check_operations(model: Any, operations: Iterable[Any]) -> None:
    """Refuses a traced step with operations that a mesh can't run.

    Raises:
        ValueError: There is one. The message names its layer.
    """
    for operation in operations:
        if UNSUPPORTED.fullmatch(operation.type):
            raise ValueError(_refusal(model, operation.type, _layer_of(model, operation.name)) + ".")


@contextlib.contextmanager
def explained(model: Any) -> Iterator[None]:
    """Context in which what DTensor refuses is named.

    Raises:
        ValueError: DTensor has no rule for an operation, or not for how its inputs are divided, or makes a graph that
            can't be run.
    """
    try:
        yield
    except tf.errors.OpError as error:
        said = error.message.lower()
        if "nodes in a cycle" in said:
            raise ValueError(
                f"TensorFlow makes a graph of the step of {model.name!r} that it can't run on a mesh: {error.message}. "
                "It does so where a segment that is recomputed ends with a strided convolution. Recompute single "
                "layers, as in recompute(model, layers=['conv2d_1', 'dense']), or train with "
                'DistributedFit("mirrored", shard="parameters").'
            ) from error
        if "dtensor" not in said or "collective ops is aborted" in said:
            # Of something else, such as a worker that is lost.
            raise
        found = _OPERATION.findall(error.message)
        layer = _layer_of(model, error.message)
        refusal = _refusal(model, found[-1] if found else "an operation", layer)
        raise ValueError(
            f"{refusal}. If the layer has divided variables, it may be enough to give them no layout, so that each "
            "device has them whole."
        ) from error


def _refusal(model: Any, operation: str, layer: str | None) -> str:
    where = f"The layer {layer!r}" if layer else f"The model {model.name!r}, outside of its layers,"
    return (
        f"{where} needs the operation {operation}, for which TensorFlow has no rule on a mesh, or none for how its "
        'inputs are divided. Train with DistributedFit("mirrored", shard="parameters"), which divides weights and runs '
        "any operation"
    )


def _layer_of(model: Any, text: str) -> str | None:
    words = set(re.split(r"[^\w.-]+", text))
    # Scopes of the same name are numbered, in the order in which they are entered.
    words |= {re.sub(r"_\d+$", "", word) for word in words}
    # The innermost comes last.
    return next((layer.name for layer in reversed(all_layers(model)) if layer.name in words), None)
