"""What `tf.distribute.experimental.auto_strategy()` of TensorFlow 2.22 returns, on releases without it too."""

import json
import os

import tensorflow as tf


def auto_strategy() -> tf.distribute.Strategy:
    """TensorFlow's own, if this release has it; else of the same class, made with the same arguments."""
    make = getattr(tf.distribute.experimental, "auto_strategy", None)
    if make is not None:
        return make()
    if len(json.loads(os.environ.get("TF_CONFIG", "{}")).get("cluster", {}).get("worker", [])) > 1:
        return tf.distribute.MultiWorkerMirroredStrategy()
    gpus = tf.config.list_logical_devices("GPU")
    if len(gpus) > 1:
        return tf.distribute.MirroredStrategy()
    return tf.distribute.OneDeviceStrategy((gpus or tf.config.list_logical_devices("CPU"))[0].name)
