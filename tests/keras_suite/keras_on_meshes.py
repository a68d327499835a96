"""A pytest plugin that runs Keras's own tests of distributions, which Keras skips off JAX, on TensorFlow.

What Keras's TensorFlow backend lacks, the numbers of processes and devices, is what one process has.
"""

import pytest
import tensorflow as tf
from keras.src.backend import distribution_lib

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)
distribution_lib.num_processes = lambda: 1
distribution_lib.process_id = lambda: 0
distribution_lib.get_device_count = lambda device_type=None: len(distribution_lib.list_devices(device_type))


def pytest_configure(config):
    config.addinivalue_line("markers", "multi_device: of Keras")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        for node in item.listchain():
            node.own_markers = [mark for mark in node.own_markers if mark.name != "skipif"]


def pytest_runtest_logreport(report):
    assert not report.skipped, report.nodeid
