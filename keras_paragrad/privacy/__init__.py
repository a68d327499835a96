"""Training with differential privacy, and its accounting."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.privacy.accounting import epsilon
    from keras_paragrad.privacy.adaptive import AdaptiveClip
    from keras_paragrad.privacy.batch_norm import fix_batch_norm
    from keras_paragrad.privacy.calibration import noise_multiplier, updates_within
    from keras_paragrad.privacy.private_model import make_private
    from keras_paragrad.privacy.sampling import truncation_probability

__all__ = [
    "AdaptiveClip",
    "epsilon",
    "fix_batch_norm",
    "make_private",
    "noise_multiplier",
    "truncation_probability",
    "updates_within",
]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "AdaptiveClip": "adaptive",
        "epsilon": "accounting",
        "fix_batch_norm": "batch_norm",
        "make_private": "private_model",
        "noise_multiplier": "calibration",
        "truncation_probability": "sampling",
        "updates_within": "calibration",
    },
)
