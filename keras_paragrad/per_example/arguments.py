"""What may be said to `PerExampleGradients`."""

from typing import Any

import keras

QUANTITIES = ("norms", "gradients", "second_moment")
REDUCTIONS = ("sum_over_batch_size", "sum")


def check_arguments(
    layer: Any, quantity: Any, clip_norm: Any, transform: Any, capacity: Any, loss_reduction: Any
) -> None:
    """Raises a `ValueError` for arguments that make no sense, with what to write instead."""
    if not isinstance(layer, keras.layers.Layer):
        raise ValueError(
            f"PerExampleGradients wraps a Keras layer or model, and got {layer!r}. Write "
            "PerExampleGradients(keras.layers.Dense(10))."
        )
    if quantity not in QUANTITIES:
        raise ValueError(f"`quantity` is {quantity!r}, and must be one of {', '.join(map(repr, QUANTITIES))}.")
    if clip_norm is not None and (isinstance(clip_norm, bool) or not _is_positive(clip_norm)):
        raise ValueError(f"`clip_norm` is {clip_norm!r}, and must be a number above 0. Write clip_norm=1.0.")
    if transform is not None and not callable(transform):
        raise ValueError(
            f"`transform` is {transform!r}, and must be a function from norms to weights. Write "
            "transform=lambda norms: tf.cast(norms < 10.0, 'float32')."
        )
    if clip_norm is not None and transform is not None:
        raise ValueError(
            "`clip_norm` and `transform` both say what an example counts for. Write one: clipping is "
            f"transform=lambda norms: tf.minimum(1.0, {clip_norm} / norms)."
        )
    if capacity is not None and (not hasattr(capacity, "__index__") or isinstance(capacity, bool) or capacity < 1):
        raise ValueError(f"`capacity` is {capacity!r}, and must be a whole number of examples. Write capacity=256.")
    if loss_reduction not in (None, *REDUCTIONS):
        raise ValueError(f"`loss_reduction` is {loss_reduction!r}, and must be 'sum_over_batch_size' or 'sum'.")


def _is_positive(number: Any) -> bool:
    try:
        return float(number) > 0
    except (TypeError, ValueError):
        return False
