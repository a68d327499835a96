"""Losses that compare the examples of a batch, as people write them."""

import keras
from keras import ops


def normalized(z):
    return z / ops.norm(z, axis=-1, keepdims=True)


def softmax_of_pairs(a, b, temperature=0.5):
    """For each example, the cross-entropy of its own pair among all of the batch."""
    similarity = ops.matmul(normalized(a), ops.transpose(normalized(b))) / temperature
    return keras.losses.sparse_categorical_crossentropy(
        ops.arange(ops.shape(similarity)[0]), similarity, from_logits=True
    )


class NtXent(keras.losses.Loss):
    """Two views of each example, side by side."""

    def call(self, y, z):
        return softmax_of_pairs(*ops.split(z, 2, axis=-1))


class SupCon(keras.losses.Loss):
    """Examples of a class attract each other."""

    def call(self, y, z):
        similarity = ops.matmul(normalized(z), ops.transpose(normalized(z))) / 0.5
        y = ops.reshape(y, (-1,))
        same = ops.cast(y[:, None] == y[None, :], "float32")
        return -ops.sum(same * ops.log_softmax(similarity, axis=1), axis=1) / ops.sum(same, axis=1)


def distances(z):
    return ops.sum(ops.square(z[:, None] - z[None, :]), axis=-1)


def same_class(y):
    y = ops.reshape(y, (-1,))
    return ops.cast(y[:, None] == y[None, :], "float32")


def hardest_triplets(y, z):
    """The mean over the batch, with each example's farthest of its class and nearest of another."""
    same, apart = same_class(y), distances(z)
    farthest = ops.max(apart * same, axis=1)
    nearest = ops.min(apart + 1e3 * same, axis=1)
    return ops.mean(ops.softplus(farthest - nearest))


class SummedTriplets(keras.losses.Loss):
    """The sum over all triplets of a batch, as one number."""

    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y, z):
        same, apart = same_class(y), distances(z)
        violations = ops.softplus(apart[:, :, None] - apart[:, None, :])
        return ops.sum(violations * same[:, :, None] * (1 - same[:, None, :])) / 100


LOSSES = {
    "pairs": NtXent,
    "classes": SupCon,
    "hardest triplets": lambda: hardest_triplets,
    "summed triplets": SummedTriplets,
}
