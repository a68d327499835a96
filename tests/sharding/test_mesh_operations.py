"""What a mesh computes in place of operations that DTensor has no rule for is what these give."""

import numpy as np
import tensorflow as tf

from keras_paragrad.engine.mesh.mesh_tracing import reverse, strided_slice


def drawn(*shape):
    return tf.constant(np.random.default_rng(len(shape)).normal(size=shape).astype("float32"))


def test_other_orders_of_places():
    inputs, weights = drawn(4, 5, 6), drawn(4, 5, 6)

    def with_gradient(change):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            changed = change(inputs)
            loss = tf.reduce_sum(changed * weights)
        return changed, tape.gradient(loss, inputs)

    for axes in ([0], [1, -1], [0, 1, 2]):
        for found, expected in zip(
            with_gradient(lambda each, axes=axes: reverse(each, axes)),
            with_gradient(lambda each, axes=axes: tf.reverse(each, axes)),
            strict=True,
        ):
            np.testing.assert_array_equal(found, expected)


def test_places_of_axes():
    inputs = drawn(4, 5, 6)
    for begin, end, mask in (([1, 0, 0], [2, 5, 6], 1), ([0, -1, 1], [4, 0, 5], 2), ([-1, 2, -1], [0, 3, 0], 7)):
        given = {"begin": begin, "end": end, "strides": [1, 1, 1], "shrink_axis_mask": mask}
        np.testing.assert_array_equal(strided_slice(inputs, **given), tf.raw_ops.StridedSlice(input=inputs, **given))
    assert strided_slice(inputs, [0], [2], [1]) is None
    array = inputs.numpy()
    np.testing.assert_array_equal(strided_slice(array, [1], [2], [1], shrink_axis_mask=1), array[1])
