"""The state of callbacks comes back as it was, or is refused."""

import collections
import enum
import io
import json
import random

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis.extra import numpy as stn
from runner.covering import examples

from keras_paragrad.distribution.checkpoint.content import Content, UnstorableError, encode

pytestmark = pytest.mark.fast

DTYPES = st.one_of(
    stn.scalar_dtypes(), stn.unicode_string_dtypes(), stn.byte_string_dtypes(), st.just(np.dtype("i2, >f4, S3"))
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary())
ARRAYS = DTYPES.flatmap(lambda dtype: stn.arrays(dtype, stn.array_shapes(min_dims=0, max_side=3)))
NUMBERS = ARRAYS.map(lambda array: array.flat[0] if array.size else None)
KEYS = st.one_of(SCALARS, st.tuples(SCALARS, st.tuples(SCALARS)))
STATES = st.recursive(
    st.one_of(SCALARS, ARRAYS, NUMBERS),
    lambda inner: st.one_of(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner)),
    max_leaves=8,
)


def brought_back(state):
    values = {"model": [np.arange(3.0, dtype="float32"), np.zeros(2, ml_dtypes.bfloat16)]}
    with io.BytesIO() as packed:
        np.savez(packed, **dict(Content(values, {"model": ["kernel", "bias"]}, {"Own 0": state}, 12).arrays()))
        read = Content.from_archive(packed.getvalue())
    assert read.steps == 12
    assert [array.dtype for array in read.values["model"]] == [array.dtype for array in values["model"]]
    return read.callbacks["Own 0"]


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for each, its in zip(one, other, strict=True):
            assert_same(each, its)
    elif isinstance(one, dict):
        assert_same(list(one.keys()), list(other.keys()))
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, (np.ndarray, np.generic)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    else:
        assert one == other or (one != one and other != other)


@pytest.mark.not_fast
@examples(60, of=200)
@given(STATES)
@example({"array": 0})
@example([{"array": 1}, {"tuple": [1]}, {"dict": []}, {"bytes": 0}, {}])
@example({1: "integer", "1": "text", None: True, (1, b"2"): (3, [4])})
@example(random.Random(3).getstate())
@example(np.random.default_rng(3).bit_generator.state)
@example([2**20000, -(2**63), 0.0, -0.0, float("inf"), "\ud800"])
@example([np.array(3), np.int64(3), np.float64(3.0), np.float32("nan"), np.zeros((0, 2)), np.arange(3, dtype=">f4")])
@example([ml_dtypes.bfloat16(1.5), np.ones(2, ml_dtypes.float8_e4m3fn), np.asfortranarray(np.eye(2)), np.eye(4)[::2]])
def test_a_state_comes_back_as_it_was(state):
    assert_same(brought_back(state), state)


Point = collections.namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


def circular():
    state = []
    state.append(state)
    return state


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        Point(1, 2),
        Colour.RED,
        collections.OrderedDict(a=1),
        collections.defaultdict(int),
        bytearray(b"1"),
        object(),
        tf.constant(1.0),
        np.array([None]),
        np.array([(None,)], dtype=[("a", object)]),
        np.ma.masked_array([1, 2], [True, False]),
        np.rec.array([(1, 2.0)]),
        circular(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_refused(value):
    with pytest.raises(UnstorableError, match="state of Own"):
        encode({"seen": [0, value]}, [], "The state of Own")
    with pytest.raises(UnstorableError, match=r"state of Own\['seen'\]\[1\] is .*, of type|nested deeper than 64"):
        json.dumps(encode({"seen": [0, value]}, [], "The state of Own"))
