"""Models cut into segments train as they do whole, and keep less."""

import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from runner.covering import examples
from sample_models.recomputed_models import L, attention, check_equal, trained, without

from keras_paragrad import PerExampleGradients, recompute
from keras_paragrad.distribution.consistency.describe import describe_training
from keras_paragrad.memory.measure import ModelCost, PartCost, _bytes, _used_backward
from keras_paragrad.memory.recomputed_segments import Span, best_segments, equal_segments, peak_bytes


def convolutional():
    layers = [keras.Input((8, 8, 2))]
    for filters in (4, 8):
        layers += [L.Conv2D(filters, 3, padding="same"), L.BatchNormalization(), L.ReLU(), L.Dropout(0.2)]
        layers += [L.Conv2D(filters, 3, padding="same", activity_regularizer="l2"), L.MaxPooling2D()]
    return keras.Sequential([*layers, L.Flatten(), L.Dense(1)])


def residual():
    """Blocks that are no models of their own, an input that goes past all of them, and two outputs."""
    inputs = {"x": keras.Input((6, 8), name="x"), "scale": keras.Input((6, 8), name="scale")}
    hidden = L.Masking()(inputs["x"])
    for _ in range(2):
        mixed = L.MultiHeadAttention(2, 4)(hidden, hidden)
        hidden = L.LayerNormalization()(hidden + L.Dropout(0.1)(mixed))
        hidden = hidden + L.Dense(8)(L.Dense(32, activation="gelu")(hidden)) * inputs["scale"]
    return keras.Model(inputs, {"y": L.Dense(1)(L.GlobalAveragePooling1D()(hidden)), "hidden": hidden})


def transformer(blocks=4):
    inputs = hidden = keras.Input((16, 16))
    for index in range(blocks):
        inside = keras.Input((16, 16))
        mixed = inside + L.MultiHeadAttention(2, 8)(*[L.LayerNormalization()(inside)] * 2)
        outputs = mixed + L.Dense(16)(L.Dense(64, activation="gelu")(L.LayerNormalization()(mixed)))
        hidden = keras.Model(inside, outputs, name=f"block_{index}")(hidden)
    return keras.Model(inputs, L.Dense(1)(L.GlobalAveragePooling1D()(hidden)))


def nested():
    """As a model made of a backbone and a head, in which the backbone is what to cut."""
    backbone = transformer(2)
    inputs = keras.Input((16, 16))
    return keras.Model(inputs, L.Dense(1)(L.Dropout(0.1)(backbone(inputs))))


MODELS = {"convolutional": convolutional, "residual": residual, "nested": nested}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("choice", [{}, {"every": 1}, {"every": 3}], ids=["auto", "every", "every third"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.grappler
def test_trains_as_without(name, choice):
    def run(context):
        loss = {"y": "mse"} if name == "residual" else "mse"
        return trained(MODELS[name], context, loss=loss, jit_compile=False)

    check_equal(run(lambda model: recompute(model, **choice)), run(without))


def kept_by(model, *inputs):
    """The bytes of forward tensors that the backward pass of a traced step uses."""
    marks = []

    @tf.function
    def step(*inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(*inputs, training=True))
        marks.append(len(tf.compat.v1.get_default_graph().get_operations()))
        return [gradient for gradient in tape.gradient(loss, model.trainable_weights) if gradient is not None]

    operations = step.get_concrete_function(*inputs).graph.get_operations()
    reads = ("ReadVariableOp", "IdentityN")
    tensors = [tensor for _, tensor in _used_backward(operations, marks[-1]) if tensor.op.type not in reads]
    weights = {variable.shape for variable in model.trainable_weights}
    return sum(_bytes(tensor) for tensor in tensors if tensor.shape not in weights)


@pytest.mark.grappler
def test_keeps_what_is_expected(capsys):
    model, batch = transformer(), np.ones((8, 16, 16), "float32")
    whole = kept_by(model, batch)
    with recompute(model):
        printed = capsys.readouterr().out
        kept = kept_by(model, batch)
    assert "3 of 5 segments of" in printed
    assert "block_0, block_1, block_2." in printed
    # The last block, and what goes into the others.
    assert kept < 0.35 * whole
    with recompute(model, every=1):
        every = kept_by(model, batch)
    with recompute(model, every=2):
        assert kept_by(model, batch) < every
    assert kept_by(model, batch) == whole


def test_what_is_not_worth_it_is_left(capsys):
    model = keras.Sequential([keras.Input((4,)), L.Dense(4), L.Dense(1)])
    with recompute(model):
        assert "nothing in" in capsys.readouterr().out


costs = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=9
)


@examples(50, of=200)
@given(costs, st.integers(1, 4))
def test_segments_are_a_partition(rows, count):
    parts = [PartCost(kept, output_bytes, work, True) for kept, output_bytes, work, _ in rows]
    found = ModelCost(parts, [input_bytes for *_, input_bytes in rows], 3 * sum(part.work for part in parts))
    for segments in (best_segments(found), equal_segments(count, len(parts))):
        assert [segment.first for segment in segments] == [0, *(segment.last for segment in segments[:-1])]
        assert segments[-1].last == len(parts)
    whole = [Span(0, len(parts), False)]
    assert (
        peak_bytes(found, whole)
        == sum(part.stored_bytes + part.output_bytes for part in parts) - parts[-1].output_bytes
    )


@examples(20, of=50)
@given(st.integers(3, 12), st.integers(4, 60))
def test_equal_blocks_are_segments(blocks, kept):
    found = ModelCost([PartCost(kept, 1, 10, True)] * blocks, [1.0] * blocks, 30.0 * blocks)
    segments = best_segments(found)
    if kept > blocks:
        assert segments == [Span(index, index + 1, index < blocks - 1) for index in range(blocks)]
    assert peak_bytes(found, segments) <= (kept + 1) * blocks


def test_what_would_differ_is_not_chosen():
    found = ModelCost([PartCost(20, 1, 10, index != 1) for index in range(5)], [1.0] * 5, 150.0)
    assert [segment.recomputed for segment in best_segments(found)] == [True, False, True, True, False]


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = L.Dense(1)

    def call(self, x):
        return self.dense(x)


def per_example():
    return keras.Sequential([keras.Input((4,)), L.Dense(4), PerExampleGradients(L.Dense(4)), L.Dense(1)])


def dense(count):
    return keras.Sequential([keras.Input((4,)), *(L.Dense(4) for _ in range(count))])


@pytest.mark.parametrize(
    ("make", "arguments", "says"),
    [
        (Subclassed, {}, "not a Functional or Sequential model.*layers="),
        (Subclassed, {"every": 2}, "not a Functional or Sequential model.*layers="),
        (lambda: keras.Sequential([L.Dense(1)]), {}, "is not built.*keras.Input"),
        (lambda: dense(4), {"every": 4}, "`every` is 4, .* 4 parts.*Write every=1"),
        (lambda: dense(4), {"every": 0}, "`every` is 0"),
        (lambda: dense(4), {"every": 2, "layers": ["dense"]}, "`every` and `layers` both"),
        (lambda: dense(1), {}, "can't be cut"),
        (per_example, {"every": 1}, "PerExampleGradients layer"),
        (attention, {"every": 1, "layers": "all"}, "`every` and `layers` both"),
        (attention, {"layers": "most"}, "`layers` is 'most'"),
    ],
)
def test_what_cannot_be_cut_is_refused(make, arguments, says):
    with pytest.raises(ValueError, match=says):
        recompute(make(), **arguments)


def test_a_model_in_segments_is_not_recomputed_again():
    model = dense(4)
    handle = recompute(model, every=1)
    for arguments in ({"every": 2}, {}, {"layers": [model.layers[0]]}):
        with pytest.raises(ValueError, match="is recomputed already. Call undo"):
            recompute(model, **arguments)
    handle.undo()
    with recompute(model, [model.layers[0]]), pytest.raises(ValueError, match="is recomputed already. Call undo"):
        recompute(model, every=2)
    recompute(model, every=2).undo()


def test_open_lengths_are_closed(capsys):
    inputs = keras.Input((None,), dtype="int32")
    # Of at most 64 steps.
    hidden = L.Embedding(10, 16)(inputs)
    table = L.Embedding(64, 16)
    hidden = hidden + table(keras.ops.arange(64))[: keras.ops.shape(hidden)[1]]
    for _ in range(3):
        hidden = hidden + L.Dense(16)(L.Dense(256, activation="gelu")(hidden))
    recompute(keras.Model(inputs, L.Dense(1)(hidden)))
    assert "run again" in capsys.readouterr().out


def test_workers_compare_what_is_recomputed():
    def entries(choose):
        model = keras.Sequential([keras.Input((4,)), Scaled(), *(L.Dense(4) for _ in range(3))])
        model.compile("sgd", "mse")
        if choose:
            choose(model)
        return describe_training(model)["recompute"]

    none = entries(None)
    several = [
        lambda model: recompute(model, every=1),
        lambda model: recompute(model, every=2),
        lambda model: recompute(model, [model.layers[0]]),
        lambda model: recompute(model, [model.layers[1]]),
    ]
    found = [entries(choose) for choose in several]
    assert found == [entries(choose) for choose in several]
    assert all(each != other for index, each in enumerate(found) for other in (none, *found[:index]))
    assert none == {}
    assert found[0] == {"model": "operations: 1 again, 1 again, 1 again, 1"}
    assert found[2].keys() == {"layer 1"}


class Scaled(L.Layer):
    def call(self, x):
        return 2 * x
