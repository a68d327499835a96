"""A model with all of `keras.metrics`."""

import keras
import numpy as np

ROWS, CLASSES = 15, 3
# Metrics that other metrics are made of, or of functions.
_NOT_COMPILED = {"Metric", "Mean", "Sum", "MeanMetricWrapper"}
# Those whose targets are the classes' numbers.
_OF_LABELS = {
    "SparseCategoricalAccuracy": {},
    "SparseCategoricalCrossentropy": {},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "IoU": {"num_classes": CLASSES, "target_class_ids": [0, 2], "sparse_y_pred": False},
    "MeanIoU": {"num_classes": CLASSES, "sparse_y_pred": False},
}
_ARGUMENTS = {
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.4},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "TopKCategoricalAccuracy": {"k": 2},
}


def all_metrics(every=1):
    """All of Keras's, or every so many of those of rows."""
    found = {name for name, each in vars(keras.metrics).items() if isinstance(each, type)} - _NOT_COMPILED
    of_rows = {name: _ARGUMENTS.get(name, {}) for name in sorted(found - set(_OF_LABELS))[::every]}
    arguments = {"rows": of_rows, "labels": _OF_LABELS}
    return {
        output: [getattr(keras.metrics, name)(name=name, **more) for name, more in metrics.items()]
        for output, metrics in arguments.items()
    }


def model_with(metrics, **compiled):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(CLASSES, activation="softmax")(inputs)
    named = {name: keras.layers.Identity(name=name)(outputs) for name in ("rows", "labels")}
    model = keras.Model(inputs, named)
    loss = {"rows": "categorical_crossentropy", "labels": "sparse_categorical_crossentropy"}
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics, weighted_metrics=[], **compiled)
    return model


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 4)).astype("float32")
    labels = generator.integers(0, CLASSES, ROWS)
    return x, {"rows": np.eye(CLASSES, dtype="float32")[labels], "labels": labels}


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-6, atol=1e-6, err_msg=name)
