"""A pytest plugin that runs Keras's own tests of distributions, which Keras skips off JAX, on TensorFlow.

What Keras's TensorFlow backend lacks, the numbers of processes and devices, is what one process has.
"""

import tensorflow as tf
from keras.src.backend import distribution_lib
from keras_suite.keras_unskipped import pytest_collection_modifyitems, pytest_configure, pytest_runtest_logreport  # noqa: F401

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)
distribution_lib.num_processes = lambda: 1
distribution_lib.process_id = lambda: 0
distribution_lib.get_device_count = lambda device_type=None: len(distribution_lib.list_devices(device_type))
