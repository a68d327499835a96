"""Training with differential privacy: what it promises, and what it takes."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.privacy.accounting.calibration import noise_multiplier, updates_within
    from keras_paragrad.privacy.accounting.composition import epsilon
    from keras_paragrad.privacy.accounting.truncation import truncation_probability
    from keras_paragrad.privacy.adaptive import AdaptiveClip
    from keras_paragrad.privacy.batch_norm import fix_batch_norm
    from keras_paragrad.privacy.private import make_private

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
        "epsilon": "accounting.composition",
        "fix_batch_norm": "batch_norm",
        "make_private": "private",
        "noise_multiplier": "accounting.calibration",
        "truncation_probability": "accounting.truncation",
        "updates_within": "accounting.calibration",
    },
)
