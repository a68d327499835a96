"""Models that were not written for this package: `keras.applications` and tasks of keras_hub.

Each is small, has random weights and comes with a few rows of data. Dropout and other noise is left out, as every part
of a batch would draw its own: with that of EfficientNetV2B0, which leaves out whole blocks, slices are 0.35 off in
float64, and without it 4e-8. Batch normalization does not train: a part of a batch has other statistics than the whole
of it, whoever cuts, and the package warns of it. Frozen, as for fine-tuning, it is a function of each row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

ROWS = 7


class Foreign(NamedTuple):
    """A model and what it is trained on.

    Attributes:
        build: Makes the model, not compiled.
        x: Inputs of `ROWS` rows, nested as the model takes them.
        y: Targets.
        loss: A loss.
        sample_weight: Weights of rows or of tokens, or `None`.
        rate: The learning rate; steps are taken with momentum.
        metrics: For `compile`, weighted.
        damping: What `settled` adds to the variances that batch normalization divides by.
    """

    build: Callable[[], keras.Model]
    x: Any
    y: Any
    loss: Any
    sample_weight: Any = None
    rate: float = 1e-3
    metrics: tuple[str, ...] = ()
    damping: float = 0.0


def settled(model: keras.Model, case: Foreign) -> keras.Model:
    """The model with its normalization set to its data, and with all of its blocks at work.

    With the statistics that batch normalization begins with, signals and gradients of random weights die out within a
    few blocks, and with the scale that ConvNeXt's blocks begin with they count for nothing: errors would not be seen.
    With those of a few rows they explode, as frozen statistics don't hold them back: rounding would be all one sees.
    The damping of each model lies between, where all layers have gradients of a size.
    """
    normalizations = [layer for layer in model._flatten_layers() if isinstance(layer, layers.BatchNormalization)]
    for layer in normalizations:
        layer.trainable, layer.momentum = True, 0.0
    if normalizations:
        model(case.x, training=True)
    for layer in normalizations:
        layer.trainable = False
        layer.moving_variance.assign_add(keras.ops.full(layer.moving_variance.shape, case.damping))
    for weight in model.trainable_weights:
        if "layer_scale" in weight.path:
            weight.assign(keras.ops.full(weight.shape, 0.1))
    return model


def frozen(model: keras.Model) -> keras.Model:
    """The model with its batch normalization as it is for inference, and without dropout."""
    for layer in model._flatten_layers():
        if isinstance(layer, layers.BatchNormalization):
            layer.trainable = False
        if isinstance(layer, layers.Dropout):
            layer.rate = 0.0
    return model


def _images(side: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(0, 255, (ROWS, side, side, 3)).astype("float32")


def _labels(classes: int = 5, shape: tuple[int, ...] = ()) -> np.ndarray:
    return np.random.default_rng(1).integers(0, classes, (ROWS, *shape))


def _from_logits() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _application(name: str, damping: float = 0.0, side: int = 32) -> Foreign:
    def build() -> keras.Model:
        maker = getattr(keras.applications, name)
        return frozen(maker(input_shape=(side, side, 3), weights=None, classes=5, classifier_activation=None))

    return Foreign(build, _images(side), _labels(), _from_logits(), metrics=("accuracy",), damping=damping)


APPLICATIONS = {
    "MobileNetV3Small": _application("MobileNetV3Small", 0.01),
    "EfficientNetV2B0": _application("EfficientNetV2B0", 0.3),
    "ResNet50V2": _application("ResNet50V2", 1.0),
    "ConvNeXtTiny": _application("ConvNeXtTiny"),
    "DenseNet121": _application("DenseNet121", 0.3),
}

TOKENS, WORDS = 12, 50


def _tokens() -> tuple[np.ndarray, np.ndarray]:
    """Token ids and a padding mask, in rows of 3 to 12 tokens."""
    draw = np.random.default_rng(2)
    lengths = draw.integers(3, TOKENS + 1, ROWS)
    mask = np.arange(TOKENS) < lengths[:, None]
    return np.where(mask, draw.integers(1, WORDS, (ROWS, TOKENS)), 0).astype("int32"), mask


def _bert() -> keras.Model:
    import keras_hub

    backbone = keras_hub.models.BertBackbone(WORDS, 2, 2, 16, 32, dropout=0.0, max_sequence_length=TOKENS)
    return keras_hub.models.BertTextClassifier(backbone, num_classes=3, dropout=0.0, preprocessor=None)


def _gpt2() -> keras.Model:
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(WORDS, 2, 2, 16, 32, dropout=0.0, max_sequence_length=TOKENS)
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def _llama() -> keras.Model:
    import keras_hub

    backbone = keras_hub.models.LlamaBackbone(WORDS, 2, 4, 16, 32, num_key_value_heads=2)
    return keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)


def _vit() -> keras.Model:
    import keras_hub

    backbone = keras_hub.models.ViTBackbone((16, 16, 3), (4, 4), 2, 2, 16, 32)
    return keras_hub.models.ViTImageClassifier(backbone, num_classes=5, preprocessor=None)


def _language(build: Callable[[], keras.Model]) -> Foreign:
    ids, mask = _tokens()
    y = np.roll(ids, -1, axis=1)
    x, weight = {"token_ids": ids, "padding_mask": mask}, mask.astype("float32")
    return Foreign(build, x, y, _from_logits(), weight, metrics=("sparse_categorical_accuracy",))


def _tasks() -> dict[str, Foreign]:
    ids, mask = _tokens()
    classified = {"token_ids": ids, "segment_ids": ids % 2, "padding_mask": mask}
    return {
        "BertTextClassifier": Foreign(_bert, classified, _labels(3), _from_logits(), metrics=("accuracy",)),
        "GPT2CausalLM": _language(_gpt2),
        "LlamaCausalLM": _language(_llama),
        "ViTImageClassifier": Foreign(_vit, _images(16) / 255, _labels(), _from_logits()),
    }


TASKS = _tasks()


FOREIGN = {**APPLICATIONS, **TASKS}
