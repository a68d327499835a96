"""`make_private`: a model with the same weights that is trained with differential privacy."""

from typing import Any

import keras

from keras_paragrad.arguments import check_choice, check_flag, check_instance, check_integer, check_number
from keras_paragrad.extras import require
from keras_paragrad.privacy.accounting.accountants import ACCOUNTANTS
from keras_paragrad.privacy.budget import Settings
from keras_paragrad.privacy.clipping import check_clip
from keras_paragrad.privacy.model import PrivateModel
from keras_paragrad.privacy.refusals import check_model


def make_private(
    model: keras.Model,
    *,
    clip_norm: Any,
    expected_batch_size: int,
    delta: float,
    target_epsilon: float | None = None,
    epochs: int | None = None,
    noise_multiplier: float | None = None,
    examples: int | None = None,
    physical_batch_size: int | None = None,
    accountant: str = "rdp",
    secure_noise: bool = False,
    seed: int | None = None,
) -> PrivateModel:
    """A model with the same weights whose `fit` is DP-SGD: Poisson sampling, clipping, noise and their accounting.

    Compile it with any loss and optimizer, and call `fit(x, y, epochs=...)`, or `DistributedFit.fit`. Each update draws
    each example with the same probability, clips its gradient, sums, divides by the expected batch size, and adds
    Gaussian noise once; then come the optimizer's own clipping and step. `epsilon` is in the logs.

    Args:
        model: A Sequential, Functional or subclassed model, in which no example's output depends on another's.
        clip_norm: The largest norm of an example's gradient: a number; a dictionary from regular expressions to the
            norms for layers whose names they match, where the first one counts; `"per_layer"`, the same for each layer,
            and 1 together; or an `AdaptiveClip`.
        expected_batch_size: Examples in a batch on average; each is drawn with this probability over the number of
            examples.
        delta: Smaller than one over the number of examples.
        target_epsilon: What epsilon may be after `epochs`; noise is calibrated to it, and training stops there. What
            loaded weights have released counts, so less is left of it.
        epochs: The number of epochs that noise is calibrated for, of examples / expected_batch_size updates each.
        noise_multiplier: Instead of these, the standard deviation of the noise in units of the clip norm.
        examples: How many examples there are, if that is to be known before `fit`.
        physical_batch_size: The most rows that are computed at a time, of all replicas together, to fit the memory. By
            default as many as most draws have. Physical batches without a drawn row are not computed, so how long an
            update takes depends on the draw.
        accountant: `"rdp"`, or `"pld"` for a tighter epsilon, which takes longer; both are dp-accounting's.
        secure_noise: Whether to draw noise from the operating system's randomness. It is slow, and can't be repeated.
            It does not defend against attacks on floating-point arithmetic.
        seed: Makes sampling and noise repeatable: the same training, with the same weights to begin with, ends the
            same. It has to be kept secret, as `secrets.randbits(64)`; by default it is drawn. It is saved in no file.

    Returns:
        A model to compile and fit, with a `privacy` attribute: `epsilon`, `updates`, `sampling_rate`,
        `noise_multiplier`, `statement()`, and `event` for the accountants of dp-accounting.

    Raises:
        ValueError: An argument is out of its range, or the model mixes examples. The message says what to write.
        MissingExtraError: dp-accounting is not installed.

    Example:

    >>> import keras, numpy as np
    >>> from keras_paragrad.privacy import make_private
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> private = make_private(
    ...     model, clip_norm=1.0, expected_batch_size=64, delta=1e-4, target_epsilon=3.0, epochs=2, seed=0
    ... )
    >>> private.compile("sgd", loss="mse")
    >>> history = private.fit(np.ones((1000, 8)), np.ones((1000, 1)), epochs=2, verbose=0)
    >>> private.privacy.updates, round(private.privacy.epsilon, 2)
    (32, 3.0)

    Reference:
        Abadi et al., Deep learning with differential privacy (2016), https://arxiv.org/abs/1607.00133.
    """
    check_instance("model", model, keras.Model, "a Keras model", example="keras.Sequential([keras.layers.Dense(10)])")
    settings = Settings(
        check_clip(clip_norm),
        check_integer("expected_batch_size", expected_batch_size, example=256),
        float(check_number("delta", delta, above=0, below=1, example=1e-5)),
        check_number("target_epsilon", target_epsilon, above=0, example=3.0, optional=True),
        check_integer("epochs", epochs, example=10, optional=True),
        check_number("noise_multiplier", noise_multiplier, above=0, example=1.0, optional=True),
        check_integer("examples", examples, example=60_000, optional=True),
        check_integer("physical_batch_size", physical_batch_size, example=64, optional=True),
        check_choice("accountant", accountant, tuple(ACCOUNTANTS)),
        check_flag("secure_noise", secure_noise),
    )
    check_integer("seed", seed, least=0, most=2**64 - 1, example=7, optional=True)
    if (target_epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            "Either `target_epsilon` has to be given, and noise is calibrated to it, or `noise_multiplier`. Write "
            "make_private(..., target_epsilon=3.0, epochs=10), or make_private(..., noise_multiplier=1.0)."
        )
    if target_epsilon is not None and epochs is None:
        raise ValueError(
            "`target_epsilon` is given without `epochs`, and how much noise it takes depends on how long training is. "
            "Write make_private(..., target_epsilon=..., epochs=10)."
        )
    if noise_multiplier is not None and epochs is not None:
        raise ValueError(
            "`epochs` calibrates noise to a target_epsilon, and `noise_multiplier` is given instead. Leave epochs out "
            "here, and pass it to fit."
        )
    if settings.examples is not None:
        settings.check_examples(settings.examples)
    check_model(model)
    require("make_private", "dp_accounting")
    return PrivateModel.around(model, settings, seed)
