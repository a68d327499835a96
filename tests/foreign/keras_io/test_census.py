"""The documentation's tables of Keras's examples are those of the data, which name miniatures that there are."""

import collections

import pytest
from foreign.keras_io import census
from foreign.keras_io.expectations import CLASSES, EXCEPTIONS
from foreign.keras_io.miniatures import MINIATURES

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("path", census.PAGES)
def test_pages_show_what_the_data_says(path):
    """If not: PYTHONPATH=tests python tests/foreign/keras_io/census.py --write."""
    assert (census.ROOT / path).read_text() == census.page(path)


def test_every_example_has_a_miniature():
    assert set(census.examples().values()) <= set(CLASSES)
    assert set(EXCEPTIONS) <= set(CLASSES)


def test_every_class_has_two_miniatures():
    count = collections.Counter(case.group for case in MINIATURES.values())
    assert len(MINIATURES) >= 30
    assert min(count.values()) >= 2, count
