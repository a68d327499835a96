"""Training with differential privacy, and its accounting."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.privacy.accounting import epsilon as epsilon
    from keras_paragrad.privacy.adaptive import AdaptiveClip as AdaptiveClip
    from keras_paragrad.privacy.batch_norm import fix_batch_norm as fix_batch_norm
    from keras_paragrad.privacy.calibration import noise_multiplier as noise_multiplier
    from keras_paragrad.privacy.calibration import updates_within as updates_within
    from keras_paragrad.privacy.private_model import make_private as make_private
    from keras_paragrad.privacy.sampling import truncation_probability as truncation_probability

__getattr__, __dir__, __all__ = lazily(__name__)
