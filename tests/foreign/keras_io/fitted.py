"""Miniatures of examples that `compile` and `fit`: images, text, tables, series, several inputs and outputs."""

import keras
import numpy as np
from foreign.keras_io.miniature import ROWS, compiled, integers, miniature, normal
from keras import layers, ops

IMAGES, SERIES, TOKENS = normal(8, 8, 3), normal(10, 3), integers(20, 6)
# Rows of two to six tokens, and padding.
PADDED = np.where(np.arange(6) < (2 + np.arange(ROWS) % 5)[:, None], 1 + TOKENS % 19, 0)
FROM_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@miniature("compile and fit", "vision/mnist_convnet", "vision/cct", data=(IMAGES, integers(3)))
def convnet(optimizer):
    hidden = [layers.Conv2D(4, 3, activation="tanh"), layers.AveragePooling2D(2), layers.Flatten()]
    model = keras.Sequential([keras.Input((8, 8, 3)), *hidden, layers.Dense(3, activation="softmax")])
    return compiled(model, optimizer(), loss="sparse_categorical_crossentropy", metrics=["accuracy"])


@miniature("compile and fit", "nlp/text_classification_with_transformer", data=(TOKENS, integers(2)))
def text_transformer(optimizer):
    inputs = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(20, 4)(inputs) + layers.Embedding(6, 4)(ops.arange(6))
    hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 4)(hidden, hidden))
    hidden = layers.GlobalAveragePooling1D()(hidden + layers.Dense(4, activation="gelu")(hidden))
    model = keras.Model(inputs, layers.Dense(2)(hidden))
    return compiled(model, optimizer(), loss=FROM_LOGITS, metrics=["accuracy"])


@miniature(
    "several inputs or outputs",
    "structured_data/wide_deep_cross_networks",
    "structured_data/classification_with_grn_and_vsn",
    data=({"kind": integers(5), "numbers": normal(3)}, integers(2), 0.5 + np.abs(normal())),
)
def tabular(optimizer):
    kind, numbers = keras.Input((), dtype="int32", name="kind"), keras.Input((3,), name="numbers")
    hidden = layers.Concatenate()([layers.Embedding(5, 3)(kind), numbers])
    crossed = hidden * layers.Dense(6)(hidden) + hidden
    gated = layers.Dense(6, activation="sigmoid")(hidden) * layers.Dense(6, activation="elu")(hidden)
    outputs = layers.Dense(1, activation="sigmoid")(layers.Concatenate()([crossed, gated]))
    model = keras.Model({"kind": kind, "numbers": numbers}, outputs)
    return compiled(model, optimizer(), loss="binary_crossentropy", weighted_metrics=["accuracy"])


@miniature(
    "several inputs or outputs",
    "keras_rs/multi_task",
    "vision/object_detection_using_vision_transformer",
    data=(normal(5), {"box": normal(4, seed=2), "label": integers(3)}),
)
def multi_task(optimizer):
    inputs = keras.Input((5,))
    hidden = layers.Dense(6, activation="tanh")(inputs)
    model = keras.Model(inputs, {"box": layers.Dense(4, name="box")(hidden), "label": layers.Dense(3)(hidden)})
    losses = {"box": keras.losses.Huber(), "label": FROM_LOGITS}
    return compiled(model, optimizer(), loss=losses, loss_weights={"box": 0.3, "label": 2.0}, metrics={"box": ["mae"]})


@miniature("recurrent layers and masks", "nlp/bidirectional_lstm_imdb", data=(PADDED, integers(2)))
def masked_lstm(optimizer):
    hidden = [layers.Embedding(20, 4, mask_zero=True), layers.Bidirectional(layers.LSTM(3))]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *hidden, layers.Dense(1, activation="sigmoid")])
    return compiled(model, optimizer(), loss="binary_crossentropy", metrics=["accuracy"])


@miniature(
    "recurrent layers and masks",
    "nlp/lstm_seq2seq",
    "nlp/neural_machine_translation_with_transformer",
    data=((PADDED, TOKENS), integers(7, 6, seed=4)),
)
def sequence_to_sequence(optimizer):
    source, target = keras.Input((6,), dtype="int32"), keras.Input((6,), dtype="int32")
    _, *states = layers.LSTM(4, return_state=True)(layers.Embedding(20, 4, mask_zero=True)(source))
    hidden = layers.LSTM(4, return_sequences=True)(layers.Embedding(20, 4)(target), initial_state=states)
    model = keras.Model([source, target], layers.Dense(7, activation="softmax")(hidden))
    return compiled(model, optimizer(), loss="sparse_categorical_crossentropy", metrics=["accuracy"])


@miniature("time series", "timeseries/timeseries_classification_transformer", data=(SERIES, integers(2)))
def series_transformer(optimizer):
    inputs = keras.Input((10, 3))
    hidden = layers.LayerNormalization()(layers.MultiHeadAttention(2, 4)(inputs, inputs) + inputs)
    hidden = hidden + layers.Conv1D(3, 1)(layers.Conv1D(4, 1, activation="tanh")(hidden))
    outputs = layers.Dense(2, activation="softmax")(layers.GlobalAveragePooling1D(data_format="channels_first")(hidden))
    model = keras.Model(inputs, outputs)
    return compiled(model, optimizer(), loss="sparse_categorical_crossentropy", metrics=["sparse_categorical_accuracy"])


@miniature(
    "time series",
    "timeseries/timeseries_weather_forecasting",
    "timeseries/timeseries_traffic_forecasting",
    data=lambda size: keras.utils.timeseries_dataset_from_array(
        np.sin(np.arange(ROWS + 4, dtype="float32"))[:, None] * [1.0, 0.5], normal(1), 5, batch_size=size
    ),
)
def forecast(optimizer):
    model = keras.Sequential([keras.Input((5, 2)), layers.LSTM(4), layers.Dense(1)])
    return compiled(model, optimizer(), loss="mse")
