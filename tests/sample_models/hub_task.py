"""A task of keras_hub, small and with random weights, that reads texts or what its preprocessor makes of them."""

import contextlib
from typing import Any

import keras
import numpy as np

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "day"]
TEXTS = ["good film", "bad film", "good day", "bad bad day", "film", "day good", "bad"] * 3


def _classifier(preprocessor: Any, eagerly: bool) -> keras.Model:
    import keras_hub

    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=9,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=8,
        max_sequence_length=6,
        dropout=0.0,
    )
    made = keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=preprocessor, dropout=0.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Tracing takes longer than the reference's steps.
    made.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False, run_eagerly=eagerly)
    return made


def _preprocessor() -> Any:
    import keras_hub

    tokenizer = keras_hub.models.BertTokenizer(vocabulary=WORDS)
    return keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=6)


def trained(dist: Any, preprocessed: bool) -> tuple[dict[str, list[float]], list[np.ndarray], np.ndarray]:
    """Trains it by `dist.fit`, or on one device if that is `None`.

    Args:
        dist: A `DistributedFit`.
        preprocessed: Whether the data are, and the task has no preprocessor.

    Returns:
        The history, the weights and predictions.
    """
    labels = np.arange(len(TEXTS)) % 2
    x = {name: np.asarray(each) for name, each in _preprocessor()(TEXTS).items()} if preprocessed else TEXTS
    with dist.scope() if dist else contextlib.nullcontext():
        made = _classifier(None if preprocessed else _preprocessor(), eagerly=dist is None)
    options = {"batch_size": 4, "epochs": 2, "verbose": 0, "validation_data": (x, labels)}
    history = dist.fit(made, x, labels, **options) if dist else made.fit(x, labels, **options)
    return history.history, made.get_weights(), made.predict(x, batch_size=4, verbose=0)


def assert_same(found: tuple, expected: tuple) -> None:
    (history, weights, predictions), (expected_history, others, predicted) = found, expected
    assert history.keys() == expected_history.keys()
    for name, values in expected_history.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    scale = np.sqrt(sum(np.square(each).sum() for each in others))
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * scale)
    np.testing.assert_allclose(predictions, predicted, atol=1e-5)
