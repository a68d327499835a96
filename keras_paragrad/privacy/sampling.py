"""Poisson sampling: every update draws each example with the same probability, independently."""

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_paragrad.arguments import check_integer, check_number
from keras_paragrad.compat.data import without_autotuning
from keras_paragrad.compat.types import Batch, Dataset, Structure
from keras_paragrad.extras import require
from keras_paragrad.privacy.random_access import Examples

# Draws per call from TensorFlow into Python, which takes as long as some of them.
_DRAWS_PER_CALL = 16
# The bits of -0.0 in float32.
_MINUS_ZERO = -(2**31)
# Covers the error of scipy's binomial tail: at most 2e-10 of it, for up to 10^8 examples and tails down to 1e-290.
_SLACK = 1 + 1e-6


class Draw(NamedTuple):
    """The rows of an update's padded batch: indices of examples, int64 `(rows,)`, and which are drawn, `(rows,)`.

    The first rows of each replica are drawn; padding repeats an example.
    """

    indices: np.ndarray
    present: np.ndarray


class PoissonSampling:
    """Draws the batch of each update, as a function of a key and the update's number.

    Args:
        key: Two unsigned integers of 64 bits. It may be replaced between epochs.
        examples: Number of examples in the data.
        rate: Probability that an example is drawn.
        rows: Rows of the padded batch. A larger draw is truncated at random.
        replicas: Number of replicas, which divides `rows`. One draw is spread evenly over them.
    """

    def __init__(self, key: tuple[int, int], examples: int, rate: float, rows: int, replicas: int = 1):
        self.key, self.examples, self.rate, self.rows = key, examples, rate, rows
        # The place in the batch for each place in the draw: replicas get equal numbers of examples, but for one.
        self._positions = np.arange(rows).reshape(replicas, -1).T.ravel()

    def draw(self, update: int) -> Draw:
        """Draws the batch of an update."""
        # Philox is a function of key and counter, so the draws of different updates are independent.
        random = np.random.Generator(np.random.Philox(key=self.key, counter=(0, 0, 0, update)))
        count = min(random.binomial(self.examples, self.rate), self.rows)
        chosen = np.sort(random.choice(self.examples, count, replace=False, shuffle=False))
        indices = np.full(self.rows, chosen[0] if count else 0, np.int64)
        present = np.zeros(self.rows, bool)
        positions = self._positions[:count]
        indices[positions], present[positions] = chosen, True
        return Draw(indices, present)

    def draw_all(self, updates: Iterable[int]) -> Draw:
        """Draws the batches of several updates, stacked."""
        return Draw(*map(np.stack, zip(*map(self.draw, updates), strict=True)))


# Nests targets as Keras expects sample weights: as the model's outputs are.
NestTargets = Callable[[Structure], Structure]


def private_batches(
    examples: Examples,
    sampling: PoissonSampling,
    updates: Callable[[], np.ndarray],
    nest: NestTargets = lambda targets: targets,
) -> Dataset:
    """The padded batches `(x, y, sample_weight)` of updates, whose numbers are asked for when an epoch begins."""

    def update_numbers(_: tf.Tensor) -> tf.Tensor:
        numbers = tf.numpy_function(lambda: np.asarray(updates(), np.int64), [], tf.int64)
        return tf.ensure_shape(numbers, [None])

    def draw(updates: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        indices, present = tf.numpy_function(sampling.draw_all, [updates], [tf.int64, tf.bool])
        shape = [None, sampling.rows]
        return tf.ensure_shape(indices, shape), tf.ensure_shape(present, shape)

    update_numbers, draw = map(tf.autograph.experimental.do_not_convert, (update_numbers, draw))
    # No from_generator: in a process that reads one, TensorFlow fixes glibc's threshold for mapped memory at 128 KB
    # (seen with Python 3.11), and every larger buffer is then mapped and cleared each time it is allocated.
    epoch = tf.data.Dataset.from_tensors(0).map(update_numbers).unbatch()
    dataset = examples.gather(epoch.batch(_DRAWS_PER_CALL).map(draw).unbatch())
    weigh_rows = tf.autograph.experimental.do_not_convert(functools.partial(_weigh_rows, nest))
    return without_autotuning(dataset.map(weigh_rows).prefetch(2))


def _weigh_rows(nest: NestTargets, batch: Batch, present: tf.Tensor) -> tuple[Structure, Structure, Structure]:
    """Gives padding the sample weight -0.0, which counts for nothing and differs from a user's own 0.0."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    if y is None:
        raise ValueError("There are no targets. Call fit(x, y), or pass data of (inputs, targets).")

    def weigh(targets: tf.Tensor | None, weights: tf.Tensor | None = None) -> tf.Tensor:
        weights = tf.ones_like(present, "float32") if weights is None else tf.convert_to_tensor(weights)
        weights = weights if weights.dtype.is_floating else tf.cast(weights, "float32")
        # Expanded to the targets' rank, as Keras would broadcast weights of a lower one along other axes.
        missing = 0 if targets is None else len(targets.shape) - len(weights.shape)
        weights = tf.reshape(weights, tf.concat([tf.shape(weights), [1] * max(0, missing)], 0))
        mask = tf.reshape(present, [-1, *[1] * (len(weights.shape) - 1)])
        return tf.where(mask, weights, tf.constant(-0.0, weights.dtype))

    targets = nest(y)
    weights = nest(sample_weight) if keras.tree.is_nested(sample_weight) else None
    if weights is not None:
        return x, y, keras.tree.map_structure(weigh, targets, weights)
    return x, y, keras.tree.map_structure(lambda leaf: weigh(leaf, sample_weight), targets)


def present_rows(batch: Batch) -> tf.Tensor:
    """Fills the *present* stage: a sample weight of -0.0 marks the padding of a batch; all other rows are drawn."""
    *_, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    weights = tf.convert_to_tensor(keras.tree.flatten(sample_weight)[0])
    weights = tf.cast(tf.reshape(weights, [tf.shape(weights)[0], -1])[:, 0], "float32")
    return tf.bitcast(weights, tf.int32) != _MINUS_ZERO


def truncation_probability(examples: int, sampling_rate: float, limit: int) -> float:
    """The probability that an update draws a given example, and so many others that one has to be dropped.

    An update has room for `limit` rows. Poisson sampling may draw more, and the excess is dropped, by any rule that
    looks at the drawn rows alone. This turns a guarantee of (epsilon, delta) into one of (epsilon, delta + exp(epsilon)
    * updates * p), with the probability p that is returned, which `epsilon` and `noise_multiplier` take as
    `truncation`.

    Proof: let data be D' or, with one example x more, D. Draw from D' first, then toss whether x is drawn too. Unless x
    and at least `limit` others are drawn, nothing is dropped because of x, and the update of D is D''s with or
    without x: Poisson sampling of x, for which epsilon and delta hold. The exception has probability p in an update,
    and at most updates * p in all. So outputs of D are within updates * p in total variation of a mechanism
    that is (epsilon, delta)-close to D', and passing from D' to D multiplies that by exp(epsilon).

    Args:
        examples: Number of examples in the data.
        sampling_rate: Probability that an example is drawn.
        limit: Rows that an update has room for.

    Returns:
        `sampling_rate` times the probability that `limit` or more of `examples` others are drawn, at most a millionth
        too large and never too small. Neighbouring data may have one example more, so there are `examples` others.

    Raises:
        MissingExtraError: scipy is not installed, as the extra `privacy` does.

    Example:

    >>> from keras_paragrad.privacy import truncation_probability
    >>> truncation_probability(3, 0.5, 2)  # 0.5 * (3 + 1) / 8
    0.25000025
    """
    examples = check_integer("examples", examples, example=60_000)
    rate = float(check_number("sampling_rate", sampling_rate, least=0, most=1, example=0.01))
    limit = check_integer("limit", limit, example=512)
    require("truncation_probability", "scipy")
    if limit > examples or not rate:
        return 0.0
    if rate == 1:
        return 1.0
    from scipy.stats import binom  # pyright: ignore[reportMissingImports]

    return min(1.0, float(binom.sf(limit - 1, examples, rate)) * _SLACK) * rate


@functools.lru_cache(maxsize=64)
def least_rows(examples: int, expected: int, probability: float) -> int:
    """The smallest limit of rows for which `truncation_probability` is at most `probability`."""
    # Neighbouring data has one example more, and is never truncated with room for all of it.
    low, high = expected, examples + 1
    while low < high:
        middle = (low + high) // 2
        enough = truncation_probability(examples, expected / examples, middle) <= probability
        low, high = (low, middle) if enough else (middle + 1, high)
    return low
