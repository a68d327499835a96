"""Miniatures of examples with layers that normalize, mix rows, keep a state or read a graph, LoRA, and data."""

import keras
import numpy as np
import tensorflow as tf
from foreign.keras_io.fitted import FROM_LOGITS, IMAGES, PADDED, SERIES, TOKENS
from foreign.keras_io.miniature import ROWS, compiled, dense, integers, miniature, normal
from foreign.keras_io.stepped import LABELS, Reported
from foreign.keras_io.stepped import ROWS as NUMBERS
from keras import layers, ops
from sample_models import foreign_models

MIXING, STATES, GRAPHS = "layers that normalize or mix rows", "layers with a state", "graphs"
RATED = np.stack([integers(7), integers(9, seed=3)], axis=1)


@miniature(
    MIXING,
    "vision/convmixer",
    "vision/deeplabv3_plus",
    "timeseries/timeseries_classification_from_scratch",
    data=(SERIES, integers(2)),
)
def batch_normalization(optimizer, synchronized=False):
    inputs = keras.Input((10, 3))
    hidden = layers.BatchNormalization(synchronized=synchronized)(layers.Conv1D(4, 3, padding="same")(inputs))
    hidden = layers.GlobalAveragePooling1D()(layers.Activation("tanh")(hidden))
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(hidden))
    return compiled(model, optimizer(), loss="sparse_categorical_crossentropy")


class Recommender(keras.Model):
    """As the example has it: its `tensordot` adds up over rows too."""

    def __init__(self):
        super().__init__()
        self.users, self.user_bias = layers.Embedding(10, 4), layers.Embedding(10, 1)
        self.movies, self.movie_bias = layers.Embedding(10, 4), layers.Embedding(10, 1)

    def call(self, inputs):
        users, movies = inputs[:, 0], inputs[:, 1]
        likes = ops.tensordot(self.users(users), self.movies(movies), 2)
        return ops.sigmoid(likes + self.user_bias(users) + self.movie_bias(movies))


@miniature(
    MIXING,
    "structured_data/collaborative_filtering_movielens",
    data=(RATED, integers(2)),
    blocks=lambda model: [model.users, model.movies],
)
def recommender(optimizer):
    """Its product of users and films adds up all rows of a batch."""
    model = Recommender()
    model(RATED[:1])
    return compiled(model, optimizer(), loss="binary_crossentropy")


class Scaled(layers.Layer):
    """Divides by the largest value so far, without the batch's own."""

    def build(self, shape):
        self.largest = self.add_weight(shape=(), initializer="ones", trainable=False, name="largest")

    def call(self, x, training=False):
        scaled = x / self.largest
        if training:
            self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(x))))
        return scaled


@miniature(STATES, "keras_recipes/bayesian_neural_networks", data=(NUMBERS, LABELS))
def running_maximum(optimizer):
    model = keras.Sequential([keras.Input((5,)), Scaled(), layers.Dense(6, activation="tanh"), layers.Dense(3)])
    return compiled(model, optimizer(), loss=FROM_LOGITS)


@miniature(STATES, "generative/stylegan", "vision/gradient_centralization", data=(NUMBERS, LABELS))
def spectral_normalization(optimizer):
    hidden = layers.SpectralNormalization(layers.Dense(6, activation="tanh"))
    model = keras.Sequential([keras.Input((5,)), hidden, layers.Dense(3)])
    return compiled(model, optimizer(), loss=FROM_LOGITS)


class Cell(layers.Layer):
    """Updates a slow state at every other step."""

    def __init__(self):
        super().__init__()
        self.state_size = [3, 3, 1]
        self.fast, self.slow = layers.Dense(3, activation="tanh"), layers.Dense(3, activation="tanh")

    def build(self, shape):
        self.fast.build((shape[0], shape[-1] + 6))
        self.slow.build((shape[0], 6))

    def call(self, x, states):
        fast, slow, step = states
        fast = self.fast(ops.concatenate([x, fast, slow], -1))
        changed = self.slow(ops.concatenate([fast, slow], -1))
        return fast, [fast, ops.where(step % 2 == 1, changed, slow), step + 1]


@miniature("recurrent layers and masks", "vision/temporal_latent_bottleneck", data=(SERIES, integers(2)))
def two_clocks(optimizer):
    model = keras.Sequential([keras.Input((10, 3)), layers.RNN(Cell()), layers.Dense(2)])
    return compiled(model, optimizer(), loss=FROM_LOGITS)


NODES, EDGES = normal(4, seed=5), np.stack([integers(ROWS, seed=7), integers(ROWS, seed=8)])


class Convolved(layers.Layer):
    """What a graph's nodes send each other, for the nodes that are asked for."""

    def __init__(self):
        super().__init__()
        self.prepare, self.update = layers.Dense(4, activation="gelu"), layers.Dense(4, activation="gelu")

    def call(self, asked):
        sent = ops.segment_sum(ops.take(self.prepare(ops.convert_to_tensor(NODES)), EDGES[0], axis=0), EDGES[1], ROWS)
        return ops.take(self.update(ops.concatenate([NODES, sent], axis=1)), asked, axis=0)


@miniature(GRAPHS, "graph/gnn_citations", data=(np.arange(ROWS), LABELS))
def citations(optimizer):
    inputs = keras.Input((), dtype="int32")
    return compiled(keras.Model(inputs, layers.Dense(3)(Convolved()(inputs))), optimizer(), loss=FROM_LOGITS)


class Attending(Reported):
    """Attends along a graph's edges; a step is compared at the nodes of a batch."""

    def __init__(self):
        super().__init__("loss")
        self.project, self.score, self.head = layers.Dense(4), layers.Dense(1), layers.Dense(3)

    def call(self, inputs):
        nodes, edges = inputs
        hidden = self.project(nodes)
        pairs = ops.concatenate([ops.take(hidden, each, axis=0) for each in (edges[0], edges[1])], axis=-1)
        scores = ops.exp(ops.tanh(self.score(pairs)))
        total = ops.segment_sum(scores, edges[1], ROWS)
        attended = ops.segment_sum(scores * ops.take(hidden, edges[0], axis=0), edges[1], ROWS)
        return self.head(hidden + attended / (total + 1e-3))

    def train_step(self, data):
        asked, labels = data
        with tf.GradientTape() as tape:
            outputs = self([ops.convert_to_tensor(NODES), ops.convert_to_tensor(EDGES)])
            loss = self.compute_loss(y=labels, y_pred=ops.take(outputs, asked, axis=0))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return self.report(loss)


@miniature(
    GRAPHS,
    "graph/gat_node_classification",
    data=(np.arange(ROWS), LABELS),
    blocks=lambda model: [model.project, model.head],
)
def graph_attention(optimizer):
    return compiled(Attending(), optimizer(), loss=FROM_LOGITS)


ATOMS = 2 + integers(3)


def _molecules(size):
    """Batches of molecules, whose atoms are the rows of one array."""

    def batches():
        for start in range(0, ROWS, size):
            counts = ATOMS[start : start + size]
            atoms = np.concatenate([normal(4, 3, seed=11)[start + row, :count] for row, count in enumerate(counts)])
            yield (atoms, np.repeat(np.arange(len(counts)), counts).astype("int32")), LABELS[start : start + size]

    atoms, of, labels = tf.TensorSpec((None, 3)), tf.TensorSpec((None,), "int32"), tf.TensorSpec((None,), "int32")
    return tf.data.Dataset.from_generator(batches, output_signature=((atoms, of), labels))


@miniature(GRAPHS, "graph/mpnn-molecular-graphs", data=_molecules)
def molecules(optimizer):
    atoms, of = keras.Input((3,)), keras.Input((), dtype="int32")
    hidden = layers.Dense(4, activation="tanh")(atoms)
    summed = layers.Lambda(lambda each: tf.math.segment_sum(*each), output_shape=(4,))([hidden, of])
    return compiled(keras.Model([atoms, of], layers.Dense(3)(summed)), optimizer(), loss=FROM_LOGITS)


class LowRank(layers.Layer):
    """A frozen layer, and what a product of two small matrices adds to it."""

    def __init__(self, layer, rank):
        super().__init__()
        layer.trainable = False
        self.layer, self.down = layer, layers.Dense(rank, use_bias=False)
        self.up = layers.Dense(layer.units, use_bias=False, kernel_initializer="zeros")

    def call(self, x):
        return self.layer(x) + 0.5 * self.up(self.down(x))


@miniature("fine-tuning", "nlp/parameter_efficient_finetuning_of_gpt2_with_lora", data=(NUMBERS, LABELS))
def low_rank(optimizer):
    first, last = LowRank(layers.Dense(6, activation="tanh"), 2), layers.Dense(3)
    model = keras.Sequential([keras.Input((5,)), first, last])
    last.enable_lora(2)
    return compiled(model, optimizer(), loss=FROM_LOGITS, metrics=["accuracy"])


@miniature(
    "fine-tuning",
    "keras_recipes/parameter_efficient_finetuning_of_gemma_with_lora_and_qlora",
    data=({"token_ids": PADDED, "padding_mask": PADDED > 0}, TOKENS, (PADDED > 0).astype("float32")),
    blocks=lambda model: model.backbone.transformer_layers,
)
def language_model(optimizer):
    model = foreign_models._gpt2()
    model.backbone.enable_lora(2)
    return compiled(model, optimizer(), loss=FROM_LOGITS, weighted_metrics=["sparse_categorical_accuracy"])


@miniature("fine-tuning", "vision/image_classification_efficientnet_fine_tuning", data=(IMAGES, integers(3)))
def frozen_base(optimizer):
    inputs = keras.Input((8, 8, 3))
    hidden = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Activation("tanh"), layers.Flatten()]
    base = keras.Sequential([inputs, *hidden])
    base.trainable = False
    model = keras.Sequential([inputs, base, layers.Dense(4, activation="tanh"), layers.Dense(3)])
    return compiled(model, optimizer(), loss=FROM_LOGITS, metrics=["accuracy"])


class Keypoints(keras.utils.PyDataset):
    """Batches by number."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def __len__(self):
        return -(-ROWS // self.size)

    def __getitem__(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return IMAGES[rows], normal(4, seed=2)[rows]


@miniature("data of other kinds", "vision/keypoint_detection", "nlp/semantic_similarity_with_bert", data=Keypoints)
def keypoints(optimizer):
    hidden = [layers.SeparableConv2D(4, 3, activation="tanh"), layers.Flatten(), layers.Dense(4)]
    return compiled(keras.Sequential([keras.Input((8, 8, 3)), *hidden]), optimizer(), loss="mse")


def _generator(size):
    def rows():
        yield from zip(NUMBERS, LABELS, strict=True)

    kinds = tf.TensorSpec((5,), "float32"), tf.TensorSpec((), "int32")
    return tf.data.Dataset.from_generator(rows, output_signature=kinds).batch(size).prefetch(1)


@miniature("data of other kinds", "keras_recipes/tfrecord", "vision/randaugment", data=_generator)
def of_unknown_length(optimizer):
    return compiled(dense(6, 3, inputs=5), optimizer(), loss=FROM_LOGITS, metrics=["accuracy"])
