"""Which examples an update sees."""

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from oracles.private_updates import cross_entropy, draws_of, perceptron, some_data

from keras_paragrad.privacy import make_private
from keras_paragrad.privacy.random_access import examples_of
from keras_paragrad.privacy.sampling import PoissonSampling, present_rows, private_batches

EXAMPLES, RATE, UPDATES = 40, 0.2, 500


def included(sampling):
    """Whether each example is in each update."""
    found = np.zeros((UPDATES, EXAMPLES))
    for update, draw in enumerate(map(sampling.draw, range(UPDATES))):
        assert len(set(draw.indices[draw.present])) == draw.present.sum()
        found[update, draw.indices[draw.present]] = 1
    return found


def test_examples_are_drawn_independently():
    """As shuffled batches are not: their sizes are all the same, and each example is in one batch of an epoch."""
    found = included(PoissonSampling((1, 2), EXAMPLES, RATE, EXAMPLES))
    expected = scipy.stats.binom.pmf(np.arange(EXAMPLES + 1), EXAMPLES, RATE) * UPDATES
    sizes = np.bincount(found.sum(1).astype(int), minlength=EXAMPLES + 1)
    likely = expected > 5
    assert (
        scipy.stats.chisquare(
            [*sizes[likely], sizes[~likely].sum()], [*expected[likely], expected[~likely].sum()]
        ).pvalue
        > 1e-6
    )
    counts = found.sum(0)
    low, high = scipy.stats.binom.ppf([1e-8, 1 - 1e-8], UPDATES, RATE)
    assert np.all((low <= counts) & (counts <= high))
    for pairs in (found.T, found):
        correlations = np.corrcoef(pairs)[np.triu_indices(len(pairs), 1)]
        assert np.abs(correlations[~np.isnan(correlations)]).max() < 6.5 / np.sqrt(pairs.shape[1])


class Included(keras.callbacks.Callback):
    """Which examples an update saw: each, a one-hot row, moves the weight that is its own."""

    def __init__(self):
        super().__init__()
        self.found, self.before = [], np.zeros(EXAMPLES)

    def on_train_batch_end(self, batch, logs=None):
        weights = self.model.per_example.layer.get_weights()[0].ravel()
        self.found.append(np.abs(weights - self.before) > 1e-4)
        self.before = weights


def test_updates_see_poisson_samples():
    """In training itself, and not the batches of shuffled data, which have one size."""
    zeros = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((EXAMPLES,)), zeros])
    private = make_private(
        *(model,),
        clip_norm=1.0,
        noise_multiplier=1e-6,
        expected_batch_size=int(RATE * EXAMPLES),
        delta=1e-3,
        physical_batch_size=4,
        seed=3,
    )
    # Far from the targets, so that all gradients are clipped.
    private.compile("sgd", "mse", jit_compile=False)
    included = Included()
    data = np.eye(EXAMPLES, dtype="float32"), np.full((EXAMPLES, 1), 1e3, "float32")
    private.fit(*data, epochs=16, callbacks=[included], verbose=0)
    found = np.array(included.found)
    assert len(found) == private.privacy.updates == 80
    for seen, drawn in zip(found, draws_of(private, 80), strict=True):
        np.testing.assert_array_equal(np.flatnonzero(seen), np.sort(drawn))
    sizes = found.sum(1)
    variance = EXAMPLES * RATE * (1 - RATE)
    low, high = scipy.stats.chi2.ppf([1e-6, 1 - 1e-6], 79)
    assert low < np.sum((sizes - sizes.mean()) ** 2) / variance < high
    # In each epoch some examples are seen twice, and some not at all.
    times = found.reshape(16, 5, EXAMPLES).sum(1)
    assert (times == 0).any(1).all()
    assert (times > 1).any(1).all()


def test_draws_follow_from_key_and_update():
    sampling = PoissonSampling((1, 2), EXAMPLES, RATE, EXAMPLES)
    whole = [sampling.draw(update).indices for update in range(8)]
    np.testing.assert_array_equal(sampling.draw(5).indices, whole[5])
    np.testing.assert_array_equal(sampling.draw_all(range(5, 8)).indices, whole[5:])
    other = PoissonSampling((1, 3), EXAMPLES, RATE, EXAMPLES).draw(0)
    assert not np.array_equal(other.indices, whole[0])


def test_larger_draws_are_cut_at_random():
    sampling = PoissonSampling((1, 2), EXAMPLES, 0.9, 10)
    found = included(sampling)
    assert np.all(found.sum(1) == 10)
    low, high = scipy.stats.binom.ppf([1e-8, 1 - 1e-8], UPDATES, 10 / EXAMPLES)
    assert np.all((low <= found.sum(0)) & (found.sum(0) <= high))


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, size, wrong=None):
        super().__init__()
        self.x, self.y, self.size, self.wrong = x, y, size, wrong

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __getitem__(self, index):
        stop = (index + 1) * self.size - (index == self.wrong)
        return self.x[index * self.size : stop], self.y[index * self.size : stop]


def sources(x, y):
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(7)
    return {"arrays": (x, y), "PyDataset": (Batches(x, y, 7),), "tf.data": (dataset,)}


@pytest.mark.parametrize("source", ["arrays", "PyDataset", "tf.data"])
def test_rows_are_those_of_the_draw(source, monkeypatch):
    # It would make all training in the process slower, for good.
    monkeypatch.setattr(tf.data.Dataset, "from_generator", None)
    x, y = some_data(EXAMPLES)
    rows = examples_of(*sources(x, y)[source])
    assert rows.count == EXAMPLES
    sampling = PoissonSampling((1, 2), EXAMPLES, 0.05, 9)
    batches = private_batches(rows, sampling, lambda: range(30))
    # It would hold up the end of an epoch.
    assert not batches.options().autotune.enabled
    sizes = set()
    for draw, (inputs, targets, weights) in zip(map(sampling.draw, range(30)), batches, strict=True):
        np.testing.assert_array_equal(inputs, x[draw.indices])
        np.testing.assert_array_equal(targets, y[draw.indices])
        np.testing.assert_array_equal(weights, draw.present.astype("float32"))
        np.testing.assert_array_equal(present_rows((inputs, targets, weights)), draw.present)
        sizes.add(int(draw.present.sum()))
    assert 0 in sizes


def test_weights_of_zero_are_still_examples():
    x, y = some_data(EXAMPLES)
    rows = examples_of(x, y, np.zeros(EXAMPLES))
    sampling = PoissonSampling((1, 2), EXAMPLES, 0.05, 9)
    batches = private_batches(rows, sampling, lambda: range(5))
    for draw, batch in zip(map(sampling.draw, range(5)), batches, strict=True):
        np.testing.assert_array_equal(present_rows(batch), draw.present)


def test_class_weights():
    x, y = some_data(EXAMPLES)
    weights = {0: 0.5, 2: 3.0}
    rows = examples_of(x, y, class_weight=weights)
    sampling = PoissonSampling((1, 2), EXAMPLES, 0.5, EXAMPLES)
    draw = sampling.draw(0)
    *_, found = next(iter(private_batches(rows, sampling, lambda: range(1))))
    expected = [weights.get(label, 1.0) for label in y[draw.indices]] * draw.present
    np.testing.assert_array_equal(found, expected)
    for source in ("PyDataset", "tf.data"):
        with pytest.raises(
            ValueError, match=r"class_weight is passed as well. .* let batches be \(x, y, sample_weight\)"
        ):
            examples_of(*sources(x, y)[source], class_weight=weights)


def test_training_is_the_same_from_any_source():
    x, y = some_data()
    results = []
    for arguments in sources(x, y).values():
        model = perceptron()
        private = make_private(model, clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=15, delta=1e-3, seed=1)
        private.compile("sgd", cross_entropy(), run_eagerly=True)
        private.fit(*arguments, verbose=0)
        results.append(model.get_weights())
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_data_without_random_access_are_refused():
    x, y = some_data(EXAMPLES)
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    with pytest.raises(ValueError, match="A generator yields examples in its own order"):
        examples_of(iter([(x, y)]))
    with pytest.raises(ValueError, match="unknown or infinite size"):
        examples_of(dataset.repeat().batch(4))
    with pytest.raises(ValueError, match="can't be read in random order"):
        examples_of(dataset.filter(lambda x, y: True).apply(tf.data.experimental.assert_cardinality(EXAMPLES)).batch(4))
    with pytest.raises(ValueError, match="Batch 2 of Batches has 6 examples"):
        examples_of(Batches(x, y, 7, wrong=2)).take(np.arange(20))
