"""One pass for each of many seeds, over a tape that was recorded once."""

from collections.abc import Callable, Sequence

import tensorflow as tf

# Parallel passes keep the cores busy: one at a time took 1.1 (dense, convolution) to 1.5 (attention under XLA) times as
# long. More than four at a time were no faster, and take more memory.
PARALLEL_PASSES = 4


def width(tensor: tf.Tensor) -> int:
    """The number of entries in a row."""
    count = tensor.shape[1:].num_elements()
    assert count is not None, "the number of rows and their shape are known while tracing"
    return count


def one_hot(like: tf.Tensor, index) -> tf.Tensor:
    """A seed of a tensor's shape: in each row, one at entry `index` and zero elsewhere."""
    row = tf.one_hot(index, width(like), dtype=like.dtype)
    return tf.broadcast_to(tf.reshape(row, [1, *like.shape[1:]]), like.shape)


def over_seeds(passed: Callable, count: int, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Stacks a function's results over all seeds.

    Args:
        passed: Maps a seed's index to tensors.
        count: Number of seeds.
        like: Tensors of the shapes and dtypes that `passed` returns.

    Returns:
        For each tensor one of shape `(count, ...)`.
    """
    rounds = -(-count // PARALLEL_PASSES)
    # Spread evenly over the rounds. An index past the last seed gives a zero seed, whose result is dropped.
    each = -(-count // rounds)

    def passes(first) -> list[tf.Tensor]:
        results = [passed(first + offset) for offset in range(each)]
        return [tf.stack(tensors) for tensors in zip(*results, strict=True)]

    if rounds == 1:
        return passes(0)

    def write(index, arrays):
        results = passes(index * each)
        return index + 1, [array.write(index, result) for array, result in zip(arrays, results, strict=True)]

    arrays = [tf.TensorArray(tensor.dtype, rounds, element_shape=[each, *tensor.shape]) for tensor in like]
    _, arrays = tf.while_loop(
        lambda index, _: index < rounds, write, (0, arrays), maximum_iterations=rounds, parallel_iterations=1
    )
    return [
        tf.reshape(array.stack(), [rounds * each, *tensor.shape])[:count]
        for array, tensor in zip(arrays, like, strict=True)
    ]
