"""Which model's `fit` is running, found among the calls that led here."""

from types import FrameType
from typing import Any

import keras


def fit_frame(frame: FrameType | None, model: Any = None) -> FrameType | None:
    """The innermost call of a model's `fit` from a frame outward, of the given model or of any."""
    while frame is not None:
        if frame.f_code.co_name == "fit":
            found = frame.f_locals.get("self")
            if found is model if model is not None else isinstance(found, keras.Model):
                return frame
        frame = frame.f_back
    return None
