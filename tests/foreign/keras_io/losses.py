"""Miniatures of examples with losses of their own: of one number, added by layers, or computed by the model."""

import keras
import numpy as np
import tensorflow as tf
from foreign.keras_io.fitted import FROM_LOGITS, IMAGES, PADDED
from foreign.keras_io.miniature import compiled, dense, integers, miniature, normal
from foreign.keras_io.stepped import LABELS, ROWS, networks
from keras import layers, ops

NUMBER, ADDED, COMPUTED = "losses of one number", "losses that layers add", "own compute_loss or compute_metrics"
PAIRS = (ROWS, ROWS + normal(5, seed=6))


def _contrastive(y_true, y_pred):
    same, margin = ops.cast(y_true, "float32"), ops.square(ops.maximum(1.0 - y_pred, 0.0))
    return ops.mean(same * margin + (1 - same) * ops.square(y_pred))


@miniature(NUMBER, "vision/siamese_contrastive", data=(PAIRS, integers(2, 1)))
def siamese(optimizer):
    one, other = keras.Input((5,)), keras.Input((5,))
    embedding = dense(6, 4, inputs=5)
    distance = ops.sqrt(ops.sum(ops.square(embedding(one) - embedding(other)), axis=1, keepdims=True) + 1e-6)
    model = keras.Model([one, other], layers.Dense(1, activation="sigmoid")(distance))
    return compiled(model, optimizer(), loss=_contrastive, metrics=["accuracy"])


@miniature(NUMBER, "vision/siamese_contrastive", data=(PAIRS, integers(2, 1)))
def normalized_siamese(optimizer, synchronized=False):
    """As it is in the example, where both images and their distance are normalized by the batch."""
    one, other, inputs = keras.Input((5,)), keras.Input((5,)), keras.Input((5,))
    hidden = layers.BatchNormalization(synchronized=synchronized)(inputs)
    embedding = keras.Model(inputs, layers.Dense(4, activation="tanh")(hidden))
    distance = ops.sqrt(ops.sum(ops.square(embedding(one) - embedding(other)), axis=1, keepdims=True) + 1e-6)
    outputs = layers.Dense(1, activation="sigmoid")(layers.BatchNormalization(synchronized=synchronized)(distance))
    return compiled(keras.Model([one, other], outputs), optimizer(), loss=_contrastive, metrics=["accuracy"])


def _charbonnier(y_true, y_pred):
    return ops.mean(ops.sqrt(ops.square(y_true - y_pred) + 1e-3))


@miniature(NUMBER, "vision/mirnet", "vision/super_resolution_sub_pixel", data=(IMAGES, normal(8, 8, 3, seed=2)))
def restoration(optimizer):
    inputs = keras.Input((8, 8, 3))
    outputs = inputs + layers.Conv2D(3, 3, padding="same")(layers.Conv2D(4, 1, activation="tanh")(inputs))
    return compiled(keras.Model(inputs, outputs), optimizer(), loss=_charbonnier)


class OfTokens(keras.losses.Loss):
    """A mean over the tokens that are not padding, whatever the rows."""

    def call(self, y_true, y_pred):
        losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        mask = ops.cast(y_true > 0, "float32")
        return ops.sum(losses * mask) / ops.sum(mask)


@miniature(NUMBER, "nlp/ner_transformers", data=(PADDED, PADDED % 5 + (PADDED > 0)))
def masked_tokens(optimizer):
    model = keras.Sequential([keras.Input((6,), dtype="int32"), layers.Embedding(20, 4), layers.Dense(6)])
    return compiled(model, optimizer(), loss=OfTokens(reduction=None))


class Detection(keras.losses.Loss):
    """Boxes of the anchors that see something, and what they see, divided by the number of such anchors."""

    def call(self, y_true, y_pred):
        seen = ops.cast(y_true[..., 4] > 0, "float32")
        boxes = ops.sum(ops.abs(y_true[..., :4] - y_pred[..., :4]), axis=-1)
        crossed = keras.losses.binary_crossentropy(seen[..., None], y_pred[..., 4:], from_logits=True)
        return (ops.sum(boxes * seen, -1) + ops.sum(crossed, -1)) / ops.maximum(ops.sum(seen, -1), 1.0)


TARGETS = np.concatenate([normal(3, 4, seed=2), integers(2, 3, 1)], axis=-1)


@miniature("detection and segmentation", "vision/retinanet", "vision/yolov8", data=(IMAGES, TARGETS))
def detector(optimizer):
    hidden = [layers.Conv2D(4, 3, activation="tanh"), layers.Flatten(), layers.Dense(15), layers.Reshape((3, 5))]
    return compiled(keras.Sequential([keras.Input((8, 8, 3)), *hidden]), optimizer(), loss=Detection())


class Overlap(keras.losses.Loss):
    """Cross-entropies of pixels, and how much of each image's area is missed."""

    def call(self, y_true, y_pred):
        crossed = ops.mean(keras.losses.binary_crossentropy(y_true, y_pred), axis=(1, 2))
        both = ops.sum(y_true * y_pred, axis=(1, 2, 3))
        either = ops.sum(y_true + y_pred, axis=(1, 2, 3)) - both
        return crossed + 1 - both / either


AREAS = integers(2, 8, 8, 1).astype("float32")


@miniature("detection and segmentation", "vision/basnet_segmentation", data=(IMAGES, [AREAS, AREAS]))
def segmentation(optimizer):
    inputs = keras.Input((8, 8, 3))
    down = layers.Conv2D(4, 3, strides=2, padding="same", activation="silu")(inputs)
    up = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="silu")(down)
    # What is shown is named by the outputs.
    outputs = {"padding": "same", "activation": "sigmoid"}
    coarse = layers.Conv2D(1, 3, name="coarse", **outputs)(layers.UpSampling2D(2)(down))
    fine = layers.Conv2D(1, 3, name="fine", **outputs)(layers.Concatenate()([up, inputs]))
    model = keras.Model(inputs, [fine, coarse])
    return compiled(model, optimizer(), loss=[Overlap(), Overlap()], metrics=[["mae"], ["mae"]])


class Connectionist(layers.Layer):
    """Adds the mean loss of texts that are read from sounds, and returns what it gets."""

    def call(self, labels, predicted):
        steps = ops.full((ops.shape(predicted)[0],), predicted.shape[1], dtype="int32")
        self.add_loss(ops.mean(ops.ctc_loss(labels, predicted, ops.full_like(steps, 3), steps, mask_index=0)))
        return predicted


@miniature(ADDED, "vision/captcha_ocr", "vision/handwriting_recognition", data=((normal(8, 4), 1 + integers(4, 3)),))
def captcha(optimizer):
    sounds, labels = keras.Input((8, 4)), keras.Input((3,), dtype="int32")
    predicted = layers.Dense(6)(layers.Conv1D(4, 3, padding="same", activation="tanh")(sounds))
    return compiled(keras.Model([sounds, labels], Connectionist()(labels, predicted)), optimizer())


class Endpoint(layers.Layer):
    """Turns logits into probabilities, and adds their loss if there are targets."""

    def call(self, logits, targets=None):
        if targets is not None:
            self.add_loss(keras.losses.BinaryCrossentropy(from_logits=True)(targets, logits))
        return ops.softmax(logits)


@miniature(ADDED, "keras_recipes/endpoint_layer_pattern", data=((ROWS, integers(2, 3)),))
def endpoint(optimizer):
    inputs, targets = keras.Input((5,)), keras.Input((3,))
    return compiled(keras.Model([inputs, targets], Endpoint()(dense(6, 3, inputs=5)(inputs), targets)), optimizer())


class Orthogonal(keras.regularizers.Regularizer):
    def __call__(self, x):
        x = ops.reshape(x, (-1, 2, 2))
        return ops.sum(0.1 * ops.square(ops.einsum("bij,bkj->bik", x, x) - ops.eye(2)))


@miniature(ADDED, "vision/pointnet", "vision/pointnet_segmentation", data=(normal(6, 2), integers(3)))
def points(optimizer, synchronized=False):
    """A regularizer of activities, which Keras divides by the rows, and whose transformation multiplies the points."""
    inputs = keras.Input((6, 2))
    hidden = layers.BatchNormalization(synchronized=synchronized)(layers.Conv1D(4, 1)(inputs))
    hidden = layers.GlobalMaxPooling1D()(layers.Activation("tanh")(hidden))
    bend = layers.Dense(4, activity_regularizer=Orthogonal(), bias_initializer="ones")(hidden)
    moved = layers.Dot(axes=(2, 1))([inputs, layers.Reshape((2, 2))(bend)])
    outputs = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(layers.Conv1D(4, 1)(moved)))
    return compiled(keras.Model(inputs, outputs), optimizer(), loss="sparse_categorical_crossentropy")


class Switch(layers.Layer):
    """Sends each token to an expert, and adds how unevenly a batch is spread over them."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = layers.Dense(2), [layers.Dense(4, activation="gelu") for _ in range(2)]

    def call(self, x):
        chances = ops.softmax(self.router(x))
        chosen = ops.one_hot(ops.argmax(chances, axis=-1), 2)
        density, proxy = ops.mean(chosen, axis=(0, 1)), ops.mean(chances, axis=(0, 1))
        self.add_loss(0.1 * ops.mean(density * proxy) * 4)
        outputs = ops.stack([expert(x) for expert in self.experts], axis=-1)
        return ops.sum(outputs * (chosen * chances)[..., None, :], axis=-1)


@miniature(ADDED, "nlp/text_classification_with_switch_transformer", data=(PADDED, integers(2)))
def switch_transformer(optimizer):
    hidden = [layers.Embedding(20, 4), Switch(), layers.GlobalAveragePooling1D()]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *hidden, layers.Dense(2)])
    return compiled(model, optimizer(), loss=FROM_LOGITS, metrics=["accuracy"])


class Distiller(keras.Model):
    """Keras's loss, and one of what a frozen teacher says."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = dense(6, 3, inputs=5), dense(12, 3, inputs=5)
        self.teacher.trainable = False
        self.build((None, 5))

    def call(self, x, training=False):
        return self.student(x, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        hard = super().compute_loss(x, y, y_pred, sample_weight, training=training)
        soft, taught = ops.softmax(y_pred / 2), ops.softmax(self.teacher(x, training=False) / 2)
        return 0.3 * hard + 0.7 * keras.losses.KLDivergence()(taught, soft) * 4


@miniature(COMPUTED, "vision/knowledge_distillation", data=(ROWS, LABELS), blocks=networks("student"))
def distillation(optimizer):
    return compiled(Distiller(), optimizer(), loss=FROM_LOGITS, metrics=["accuracy"])


class Rated(keras.Model):
    """Its `compute_loss` embeds what was rated, and divides by the sum of the sample weights where it is told to."""

    def __init__(self, divided):
        super().__init__()
        self.users, self.items, self.divided = layers.Embedding(7, 4), layers.Embedding(9, 4), divided
        self.error = keras.losses.MeanSquaredError(reduction=None if divided else "sum_over_batch_size")
        self.users.build()
        self.items.build()
        self.built = True

    def call(self, users, training=False):
        return {"users": self.users(users)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        rated = ops.sum(y_pred["users"] * self.items(y["item"]), axis=1, keepdims=True)
        loss = self.error(y["rating"][:, None], rated, sample_weight)
        return ops.divide_no_nan(ops.sum(loss), ops.sum(sample_weight)) if self.divided else loss


RATINGS = {"item": integers(9, seed=3), "rating": normal(seed=4)}


@miniature(COMPUTED, "keras_rs/basic_retrieval", data=(integers(7), RATINGS), blocks=networks("users"))
def rated(optimizer):
    return compiled(Rated(divided=False), optimizer())


def _weighted(size):
    return tf.data.Dataset.from_tensor_slices((integers(7), RATINGS, 0.5 + np.abs(normal(seed=5)))).batch(size)


@miniature(COMPUTED, "keras_rs/sas_rec", data=_weighted, blocks=networks("users"))
def weighted_mean(optimizer):
    return compiled(Rated(divided=True), optimizer())
