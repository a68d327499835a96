"""The peak of a graph, against an obvious reference and against graphs whose peak is plain to see."""

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from runner.covering import examples

from keras_paragrad.memory.blocks import Block, Resized, TracedOperation, block_of
from keras_paragrad.memory.liveness import Peaks, step_peaks


def peak_of(block):
    return max(step_peaks(block, (), len(block.operations)).activations)


def by_last_use(block):
    """Each tensor is there from the operation that makes it to the last that reads it; at the end if it is returned."""
    count = len(block.operations)
    last = {number: index for index, each in enumerate(block.operations) for number in each.inputs}
    last.update(dict.fromkeys(block.outputs, count))
    spans = [
        (index, max(index, last.get(number, 0)), size)
        for index, each in enumerate(block.operations)
        for number, size in zip(each.outputs, each.sizes, strict=True)
    ]
    return max((sum(s for begin, end, s in spans if begin <= at <= end) for at in range(count)), default=0)


@st.composite
def blocks(draw):
    operations, numbers = [], []
    for _ in range(draw(st.integers(0, 12))):
        inputs = draw(st.lists(st.sampled_from(numbers), max_size=3)) if numbers else []
        made = list(range(len(numbers), len(numbers) + draw(st.integers(1, 2))))
        sizes = draw(st.lists(st.integers(0, 50), min_size=len(made), max_size=len(made)))
        operations.append(TracedOperation("MatMul", tuple(inputs), tuple(made), tuple(sizes)))
        numbers += made
    outputs = draw(st.lists(st.sampled_from(numbers), max_size=3)) if numbers else []
    return Block(operations, [], outputs, [])


@examples(100)
@given(blocks())
def test_the_peak_is_that_of_the_reference(block):
    assert peak_of(block) == by_last_use(block)


def traced(function, *shapes):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    return block_of(tf.function(function, autograph=False).get_concrete_function(*specs).graph, Resized(1)).block


def chain(x):
    for _ in range(5):
        x = tf.linalg.matmul(x, x)
    return x


def kept(x):
    made = [tf.linalg.matmul(x, x) for _ in range(5)]
    return tf.concat(made, 0)


def in_place(x):
    return tf.tanh(tf.reshape(tf.linalg.matmul(x, x), [-1]) * 2.0 + 1.0)


def twice(x):
    made = tf.linalg.matmul(x, x)
    return tf.tanh(made) + made


def looped(x):
    return tf.while_loop(lambda i, _: i < 7, lambda i, x: (i + 1, tf.linalg.matmul(x, x)), [tf.constant(0), x])[1]


def chosen(x):
    return tf.cond(tf.constant(False), lambda: kept(x)[:10], lambda: tf.linalg.matmul(x, x))


def stacked(x):
    def step(i, array):
        return i + 1, array.write(i, tf.linalg.matmul(x, x))

    array = tf.TensorArray("float32", 7, element_shape=x.shape)
    return tf.while_loop(lambda i, _: i < 7, step, [tf.constant(0), array])[1].stack()


def called(x):
    return tf.function(chain, autograph=False)(x)


@pytest.mark.parametrize(
    ("function", "tensors"),
    # The argument, which goes when it has been read for the last time, and what is made of it.
    [(chain, 2), (kept, 5 + 5), (in_place, 2), (twice, 2), (looped, 2), (chosen, 2), (stacked, 7 + 7), (called, 2)],
)
def test_a_graph_whose_peak_is_plain(function, tensors):
    one = 100 * 100 * 4
    # Counters and shapes take a few bytes.
    assert peak_of(traced(function, (100, 100))) == pytest.approx(tensors * one, abs=200)


def unused(x):
    tf.fill([300, 100], 1.0)
    return tf.linalg.matmul(x, x)


def test_what_tensorflow_prunes_is_not_counted():
    assert peak_of(traced(unused, (100, 100))) == 2 * 100 * 100 * 4


def used(x, weight):
    return tf.linalg.matmul(x, weight)


def used_before(x, weight):
    return kept(tf.linalg.matmul(x, weight))


def used_in_a_loop(x, weight):
    return tf.while_loop(lambda i, _: i < 7, lambda i, x: (i + 1, used(x, weight)), [tf.constant(0), x])[1]


def used_in_a_function(x, weight):
    return tf.function(lambda x: used(x, weight), autograph=False)(x)


def used_as_half(x, weight):
    return used(tf.cast(x, "float16"), tf.cast(weight, "float16"))


@pytest.mark.parametrize(
    ("function", "tensors"),
    # An argument, the weight, and what is made of them; a half has half the bytes.
    [(used, 3), (used_before, 5 + 5), (used_in_a_loop, 3), (used_in_a_function, 3), (used_as_half, 1.5)],
)
def test_a_gathered_weight_counts_while_it_is_used(function, tensors):
    weight, one = tf.Variable(tf.zeros((100, 100))), 100 * 100 * 4
    block = traced(lambda x: function(x, weight), (100, 100))
    (most,) = step_peaks(block, (), len(block.operations), {block.inputs[-1]: one}).activations
    assert most == pytest.approx(tensors * one, abs=200)


def test_what_a_loop_keeps_for_its_gradient_grows_with_its_length():
    def gradient(length):
        def compute(x):
            step = lambda i, y: (i + 1, tf.tanh(tf.linalg.matmul(y, y)))  # noqa: E731
            with tf.GradientTape() as tape:
                tape.watch(x)
                _, y = tf.while_loop(lambda i, _: i < length, step, [tf.constant(0), x])
            return tape.gradient(y, x)

        return peak_of(traced(compute, (100, 100)))

    one = 100 * 100 * 4
    # The argument and the result of each iteration's product and tanh; the last result is the next argument.
    assert gradient(40) - gradient(20) == pytest.approx(20 * one, rel=0.05)


def test_gradients_are_counted_by_themselves_and_stay_until_the_update():
    block = Block(
        [
            TracedOperation("MatMul", (0,), (1,), (10,)),
            TracedOperation("MatMul", (1,), (2,), (100,)),
            TracedOperation("MatMul", (1,), (3,), (200,)),
            TracedOperation("MatMul", (2,), (4,), (7,)),
            TracedOperation("AssignSub", (4,), (), ()),
            TracedOperation("AssignSub", (3,), (), ()),
        ],
        inputs=[0],
        outputs=[],
        input_sizes=[5],
    )
    assert step_peaks(block, [3, 2], updates_from=3) == Peaks([15, 10, 10], [2, 3], 7)
