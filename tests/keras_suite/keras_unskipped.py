"""Hooks of pytest by which tests that Keras skips off JAX are run, and none is skipped."""

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "multi_device: of Keras")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        for node in item.listchain():
            node.own_markers = [mark for mark in node.own_markers if mark.name != "skipif"]


def pytest_runtest_logreport(report):
    assert not report.skipped, report.nodeid
