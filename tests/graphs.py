"""Whether graphs are optimized before they run."""

import os


def leave_unoptimized(optimized: bool = False) -> None:
    """Has graphs run as they were traced: Grappler takes longer than the few steps of a test.

    Args:
        optimized: Whether this test wants them as users have them; with `GRAPPLER` in the environment all do.
    """
    import tensorflow as tf

    left_out = not optimized and "GRAPPLER" not in os.environ
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": left_out})
