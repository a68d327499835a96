"""Private training, update by update: the slow and obvious reference, and small models and data for it."""

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.privacy.sampling import PoissonSampling

EXAMPLES, FEATURES, CLASSES = 60, 5, 3


def some_data(examples=EXAMPLES, seed=0):
    """Inputs and labels."""
    random = np.random.default_rng(seed)
    return random.normal(size=(examples, FEATURES)).astype("float32"), random.integers(CLASSES, size=examples)


def perceptron(regularizer=None, seed=0):
    """A classifier of `some_data`."""
    keras.utils.set_random_seed(seed)
    hidden = keras.layers.Dense(6, activation="tanh", kernel_regularizer=regularizer, name="hidden")
    return keras.Sequential([keras.Input((FEATURES,)), hidden, keras.layers.Dense(CLASSES, name="out")])


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def draws_of(private, updates):
    """The numbers of the examples in each update's batch."""
    padded, _ = private.privacy.rows()
    sampling = PoissonSampling(private._sampling_key(), private.privacy.examples, private.privacy.sampling_rate, padded)
    drawn = [sampling.draw(update) for update in range(updates)]
    return [draw.indices[draw.present] for draw in drawn]


def noise_of(private, update, shapes):
    """The draws of the standard normal distribution that an update adds, one for each variable."""
    seed = tf.random.fold_in(private._noise_key(), tf.constant(update, tf.int64), alg="philox")
    keys = [tf.random.fold_in(seed, place, alg="philox") for place in range(len(shapes))]
    return [_normals(key, shape) for shape, key in zip(shapes, keys, strict=True)]


def _normals(key, shape):
    """Box and Muller's transform, in float64."""
    count = int(np.prod(shape))
    words = {"minval": None, "maxval": None, "dtype": tf.uint32, "alg": "philox"}
    bits = tf.random.stateless_uniform([2, (count + 1) // 2], key, **words).numpy()
    radius, angle = (bits + 0.5) / 2.0**32
    found = np.sqrt(-2 * np.log(radius)) * np.stack([np.cos(2 * np.pi * angle), np.sin(2 * np.pi * angle)])
    return found.ravel()[:count].reshape(shape).astype("float32")


def by_hand(model, private, optimizer, updates, x, y, weights=None, *, clip, loss):
    """Takes the updates one example at a time.

    Args:
        model: A model like the private one, with the weights to begin with.
        private: The private model, for its draws and noise.
        optimizer: An optimizer like its own.
        updates: How many.
        x, y, weights: All examples.
        clip: A function from the gradients of an example to the clipped ones, and the norm that noise goes by.
        loss: A loss without a mean: the example's own.

    Returns:
        The mean loss of the drawn examples, with regularizers, before each update; and their numbers.
    """
    variables = model.trainable_variables
    size = private.privacy.settings.expected_batch_size
    optimizer.build(variables)
    losses, sizes = [], []
    for update, numbers in enumerate(draws_of(private, updates)):
        total, shown = [tf.zeros(each.shape) for each in variables], []
        bound = None
        for number in numbers:
            with tf.GradientTape() as tape:
                value = loss(y[number : number + 1], model(x[number : number + 1], training=True))
                value = value if weights is None else value * weights[number]
            shown.append(float(value))
            found = tape.gradient(value, [each.value for each in variables])
            clipped, bound = clip([tf.convert_to_tensor(each) for each in found])
            total = [one + other for one, other in zip(total, clipped, strict=True)]
        if bound is None:
            _, bound = clip(total)
        deviation = private.privacy.gradient_noise_multiplier * bound / size
        noise = noise_of(private, update, [each.shape for each in variables])
        with tf.GradientTape() as tape:
            penalty = tf.add_n([tf.zeros([]), *model.losses])
        beside = tape.gradient(penalty, [each.value for each in variables], unconnected_gradients="zero")
        losses.append((np.mean(shown) if shown else 0.0) + float(penalty))
        sizes.append(len(numbers))
        optimizer.apply(
            [sum_ / size + other + deviation * draw for sum_, other, draw in zip(total, beside, noise, strict=True)],
            variables,
        )
    return np.array(losses), np.array(sizes)


def norm_of(gradients):
    return float(tf.linalg.global_norm(gradients))


def flat(bound):
    """Clips the whole gradient."""

    def clip(gradients):
        factor = min(1.0, bound / max(norm_of(gradients), 1e-12))
        return [each * factor for each in gradients], bound

    return clip
