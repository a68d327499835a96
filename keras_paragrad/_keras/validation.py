"""Keras's way to set rows aside for validation."""

from typing import Any

from keras.src.trainers.data_adapters.array_slicing import train_validation_split


def split_for_validation(x: Any, y: Any, sample_weight: Any, share: float) -> tuple[Any, Any]:
    """Arrays `(x, y, sample_weight)` to train on, and those of the last rows, `share` of all, to validate with."""
    return train_validation_split((x, y, sample_weight), validation_split=share)
