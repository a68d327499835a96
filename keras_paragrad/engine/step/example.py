"""What a batch of a model looks like, from the model and its loss."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_paragrad.engine.probes.untouched import never_run, untouched


def batches(model: Any, rows: int, length: int | None) -> Iterator[Any]:
    """Batches of `tf.TensorSpec` on which a model may be trained, the likeliest first.

    Args:
        model: A built model.
        rows: The batch size.
        length: The size of axes that the inputs leave open.

    Raises:
        ValueError: The inputs are unknown. The message says what to write.
    """
    x = _inputs(model, rows, length)
    with untouched(model, never_run()):
        outputs = model.compute_output_spec(keras.tree.map_structure(_symbolic, x))
    alike = keras.tree.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), outputs)
    # Real targets are not in half precision.
    alike = keras.tree.map_structure(_targets, alike)
    labels = keras.tree.map_structure(lambda each: tf.TensorSpec(each.shape[:-1] or each.shape, "int32"), alike)
    yield x, _by_loss(model.loss, alike, labels)
    yield x, alike
    yield x, labels
    yield (x,)


def sized(spec: Any, rows: int, length: int | None) -> Any:
    """The specs of a batch of data, with a number of rows.

    Raises:
        ValueError: The data leaves other sizes open.
    """

    def known(found: Any) -> tf.TensorSpec:
        shape = found.shape.as_list() if isinstance(found, tf.TensorSpec) and found.shape.rank else [None, None]
        if None in shape[1:] and length is None:
            raise ValueError(
                f"The data leaves sizes open that memory depends on: {found}. Estimate it with dist.estimate(model, "
                "batch_size, length=128), and write shard=None, 'optimizer' or 'parameters'."
            )
        return tf.TensorSpec((rows, *(length if each is None else each for each in shape[1:])), found.dtype)

    return tf.nest.map_structure(known, spec)


def _inputs(model: Any, rows: int, length: int | None) -> Any:
    structure = _structure(model)
    if structure is None:
        raise ValueError(
            f"{model.name!r} doesn't say what its inputs are. Build it first: model.build(shape), or call it on a "
            "batch. Or make it of keras.Input."
        )

    def known(tensor):
        shape = tuple(tensor.shape)[1:]
        if None in shape and length is None:
            raise ValueError(
                f"The input {tensor.name!r} of {model.name!r} leaves sizes open: {tuple(tensor.shape)}. Say what they "
                "are: estimate(model, batch_size, length=128), or --length 128."
            )
        return tf.TensorSpec((rows, *(length if each is None else each for each in shape)), tensor.dtype)

    return keras.tree.map_structure(known, structure)


def _structure(model: Any) -> Any:
    """A model's inputs as `KerasTensor`s, nested as it takes them."""
    functional = model if isinstance(model, keras.Model) and hasattr(model, "_inputs_struct") else None
    functional = getattr(model, "_functional", None) or functional
    if functional is not None:
        return functional._inputs_struct
    config = model.get_build_config() if model.built else None
    if not config or config.get("input_shape") is None:
        return None
    return keras.tree.map_shape_structure(lambda each: keras.KerasTensor((None, *each[1:])), config["input_shape"])


def _symbolic(spec: tf.TensorSpec) -> keras.KerasTensor:
    return keras.KerasTensor(spec.shape, keras.backend.standardize_dtype(spec.dtype))


def _targets(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape, "float32") if spec.dtype in (tf.float16, tf.bfloat16) else spec


def _by_loss(loss: Any, alike: Any, labels: Any) -> Any:
    """Targets in the form that each output's loss takes."""
    outputs, classes = keras.tree.flatten(alike), keras.tree.flatten(labels)
    given = keras.tree.flatten(loss)
    losses = given * len(outputs) if len(given) == 1 else given
    if len(losses) != len(outputs):
        return alike
    chosen = [label if _is_sparse(each) else like for each, like, label in zip(losses, outputs, classes, strict=True)]
    return keras.tree.pack_sequence_as(alike, chosen)


def _is_sparse(loss: Any) -> bool:
    names = (loss, getattr(loss, "name", ""), getattr(loss, "__name__", ""), type(loss).__name__)
    return any("sparse" in name.lower() for name in names if isinstance(name, str))
