"""`divided` gives the derivatives of all rows at once, in each way to compute parts, and so do shares of replicas."""

import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad.engine.calls.divided import Result, RowSlices, divided
from keras_paragrad.engine.calls.replicas import Share
from keras_paragrad.engine.calls.sources import differentiating

SIZE = 4
generator = np.random.default_rng(0)
X = generator.normal(size=(10, 3)).astype("float32")
NUMBERS = generator.integers(0, 6, 10)
W, TABLE = (generator.normal(size=(size, 2)).astype("float32") for size in (3, 6))
# The row numbers of lookups that are the same in all parts.
POSITIONS = [4, 1]


def function(rows, whole, state):
    """Rows, among them integers; a sum; and a state that the next part reads."""
    x, numbers = rows
    w, table, _ = whole
    moved = tf.gather(table, numbers) + tf.reduce_mean(tf.gather(table, POSITIONS), 0)
    y = tf.tanh(tf.matmul(x, w) + moved) * (1 + 0.1 * state[0])
    return Result([y, numbers + 1, x**2], [tf.reduce_sum(y * moved, 0)], [state[0] + tf.reduce_sum(x)])


def in_slices(function, rows, whole, state):
    """What a loop in Python gives, for static rows."""
    results = []
    for start in range(0, rows[0].shape[0], SIZE):
        results.append(function([row[start : start + SIZE] for row in rows], whole, [*map(tf.stop_gradient, state)]))
        state = results[-1].state
    joined = [tf.concat(pieces, 0) for pieces in zip(*(result.rows for result in results), strict=True)]
    return Result(joined, [tf.add_n(each) for each in zip(*(result.sums for result in results), strict=True)], state)


def divided_in(parts):
    return lambda function, rows, whole, state: divided(function, rows, whole, parts, state)


def derivatives(compute, x, numbers, w, table):
    """The results and the first and second derivatives; the table's first one is as the tape gives it."""
    sources, spare = [x, w, table], tf.ones([3])
    with tf.GradientTape() as outer:
        outer.watch(sources)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([*sources, spare])
            result = compute(function, [x, numbers], [w, table, spare], [tf.constant(1.0)])
            loss = tf.reduce_sum(result.rows[0] ** 2 * tf.gather(W, numbers % 3)) + tf.reduce_sum(result.sums[0] ** 2)
        first = tape.gradient(loss, sources)
        penalty = sum(tf.reduce_sum(tf.square(tf.convert_to_tensor(gradient))) for gradient in first)
    assert tape.gradient(loss, spare) is None
    # Of the third output alone.
    assert tape.gradient(result.rows[2], w) is None
    second = [tf.convert_to_tensor(gradient) for gradient in outer.gradient(penalty, sources)]
    return [*result.rows, *result.sums, *result.state], first, second


def compare(found, expected):
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        one, other = (np.asarray(tf.convert_to_tensor(each)) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


# The parts, the number of rows, whether the graph knows it, and whether XLA compiles it.
WAYS = {
    "slices": (RowSlices(SIZE), 8, True, False),
    "a smaller last slice": (RowSlices(SIZE), 10, True, False),
    "any number of rows": (RowSlices(SIZE), 10, False, False),
    "each slice by XLA": (RowSlices(SIZE, by_xla=True), 10, True, False),
    "any number of rows in XLA": (RowSlices(SIZE, in_xla=True), 10, False, True),
}


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_are_those_of_a_loop(way):
    parts, rows, static, by_xla = WAYS[way]
    data = [tf.constant(each) for each in (X[:rows], NUMBERS[:rows], W, TABLE)]
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in data]
    if not static:
        specs[:2] = tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.int64)
    ours = tf.function(
        lambda *data: derivatives(divided_in(parts), *data), specs, autograph=False, jit_compile=by_xla or None
    )
    found = ours(*data)
    expected = tf.function(lambda *data: derivatives(in_slices, *data), autograph=False)(*data)
    compare(found, expected)
    # Optimizers may treat a row that is looked up twice otherwise than one that is looked up once.
    lookups = found[1][2]
    np.testing.assert_array_equal(np.sort(lookups.indices), np.sort([*NUMBERS[:rows], *POSITIONS]))


def test_what_a_tape_asks_for_is_found_through_other_calls():
    """The gradient of a call's input leads to the weights of the call before."""

    def scaled(rows, whole, state):
        return Result([tf.tanh(rows[0] * whole[0])], [], [])

    def of_two(compute, w, scale):
        rows, whole = [tf.constant(X), tf.constant(NUMBERS)], [w, tf.constant(TABLE), tf.constant(0.0)]
        first = compute(function, rows, whole, [tf.constant(0.0)]).rows[0]
        return compute(scaled, [tf.identity(first)], [scale], []).rows[0]

    @tf.function(autograph=False)
    def gradient(w, scale):
        with tf.GradientTape() as tape:
            tape.watch([w, scale])
            outputs = of_two(divided_in(RowSlices(SIZE)), w, scale)
        with differentiating([w]):
            return tape.gradient(outputs, w)

    @tf.function(autograph=False)
    def expected(w, scale):
        return tf.gradients(of_two(in_slices, w, scale), w)

    arguments = tf.constant(W), tf.constant(2.0)
    compare([gradient(*arguments)], expected(*arguments))


@pytest.mark.own_process
@pytest.mark.parametrize("rows", [5, 1])
def test_shares_of_replicas_give_the_derivatives_of_all_rows(rows):
    """Of one row, a replica has none."""

    def of_share(function, rows, whole, state):
        share = Share(rows)
        own = share.own(rows)
        result = divided(function, own, share.copy(whole, own), RowSlices(SIZE), state)
        return Result(share.whole(result.rows), [tf.zeros([2])], [])

    def at_once(function, rows, whole, state):
        return Result(function(rows, whole, state).rows, [tf.zeros([2])], [])

    data = [tf.constant(each) for each in (X[:rows], NUMBERS[:rows], W, TABLE)]
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    run = tf.function(lambda: strategy.run(derivatives, (of_share, *data)), autograph=False)
    expected = tf.function(lambda: derivatives(at_once, *data), autograph=False)()
    for replica in zip(*(strategy.experimental_local_results(each) for each in tf.nest.flatten(run())), strict=True):
        compare(replica, expected)
