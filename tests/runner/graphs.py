"""What of a graph's making tests do without."""

import contextlib
import functools
import os
import sys
import threading

# At a time, in a thread.
_STACKS = 20_000


def leave_unoptimized(optimized: bool = False) -> None:
    """Has graphs run as they were traced: Grappler takes longer than the few steps of a test.

    Nor does each operation note the Python stack that it was made in, a tenth of the time of tests. `GRAPPLER`
    in the environment leaves both as users have them.

    Args:
        optimized: Whether this test wants graphs as users have them.
    """
    import tensorflow as tf

    _leave_untuned()
    if "GRAPPLER" not in os.environ:
        _note_short_stacks()
    left_out = not optimized and "GRAPPLER" not in os.environ
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": left_out})


def leave_determinism() -> None:
    """Has operations run as TensorFlow has them by default, after a test of deterministic training."""
    if "tensorflow" in sys.modules:
        from tensorflow.python.framework import config

        if config.is_op_determinism_enabled():
            config.disable_op_determinism()


@functools.cache
def _leave_untuned() -> None:
    """Has no thread tune how tf.data runs: on a busy machine, tests waited for half a minute until it had ended."""
    from tensorflow.python.data.ops import dataset_ops

    from keras_paragrad.compat.data import without_autotuning

    dataset_ops.DatasetV2._apply_debug_options = without_autotuning


@functools.cache
def _note_short_stacks() -> None:
    from tensorflow.python.util import tf_stack

    extract, stacks = tf_stack.extract_stack, []

    def make() -> None:
        stacks.extend(extract() for _ in range(_STACKS))

    def short(stacklevel: int = 1) -> object:
        # TensorFlow keeps each for one operation. In another thread they are short.
        while True:
            with contextlib.suppress(IndexError):
                return stacks.pop()
            thread = threading.Thread(target=make)
            thread.start()
            thread.join()

    tf_stack.extract_stack = short
