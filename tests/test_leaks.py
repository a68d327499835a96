"""Models that are let go of leave nothing behind: no graph that was traced for them, no gradient function."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry

import keras_paragrad as ours
from keras_paragrad.engine.tracing import gradient_functions
from keras_paragrad.engine.tracing.gradient_functions import keep_with_graphs, releasing

X = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
Y = X[:, :1].copy()


def small():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)])


def fitted(model, callbacks=(), fit=None, optimizer="adam", **more):
    model.compile(optimizer, "mse", jit_compile=False, **more)
    (fit or model.fit)(X, Y, batch_size=8, verbose=0, callbacks=list(callbacks))
    return model


def accumulating():
    return ours.AccumulatingOptimizer("adam", 2)


def in_slices():
    model = small()
    ours.microbatch(model, 4)
    return fitted(model)


def recomputed_in_slices():
    model = small()
    # Alone it leaves the training step to Keras, whose graphs stay.
    ours.recompute(model, [model.layers[0]])
    ours.microbatch(model, 4)
    return fitted(model)


def distributed():
    model = small()
    return fitted(model, fit=lambda *data, **more: ours.DistributedFit().fit(model, *data, **more))


def norms():
    model = small()
    ours.per_example_norms(model, X, Y, "mse")
    return model


def estimated():
    model = small()
    model.compile("adam", "mse")
    ours.estimate_memory(model, 8)
    return model


CASES = {
    "noise scale": lambda: fitted(
        small(), [ours.GradientNoiseScale(source="accumulation"), ours.ExactAccumulation()], optimizer=accumulating()
    ),
    "wrap, clipped": lambda: fitted(ours.wrap(small(), clip_norm=1.0)),
    "wrap, in Keras's accumulation": lambda: fitted(
        ours.wrap(small()), optimizer=keras.optimizers.Adam(gradient_accumulation_steps=2)
    ),
    "telemetry": lambda: fitted(small(), [ours.GradientTelemetry(every=1)]),
    "microbatch": in_slices,
    "recompute, in slices": recomputed_in_slices,
    "DistributedFit": distributed,
    "per_example_norms": norms,
    "estimate_memory": estimated,
}


def left_behind(make):
    """How many graphs and gradient functions there are, after a model was made and let go of."""
    model = weakref.ref(make())
    keras.backend.clear_session(free_memory=False)
    found = left()
    assert model() is None
    return found


def left():
    """How many graphs and gradient functions there are that somebody holds on to."""
    gc.collect()
    # What a graph was the last to hold on to goes in a second round.
    gc.collect()
    graphs = sum(isinstance(each, tf.Graph) and hasattr(each, "outer_graph") for each in gc.get_objects())
    # One that holds no tensor, as some from TensorFlow 2.22 on, is left as it is.
    entries = [entry["type"] for entry in gradient_registry._registry.values()]
    return graphs, sum(gradient_functions._graph_of(function) is not None for function in entries)


# In `make test`, the step of Keras with something to watch, and one on replicas.
LONG = set(CASES) - {"telemetry", "DistributedFit"}


@pytest.mark.parametrize("case", [pytest.param(each, marks=[pytest.mark.long] * (each in LONG)) for each in CASES])
def test_nothing_is_left_of_a_model(case):
    before, after = left(), left_behind(CASES[case])
    # What is made once in a process is there the second time, too.
    assert after == before or left_behind(CASES[case]) == after


@tf.custom_gradient
def doubled(x):
    y = tf.identity(x)
    return y, lambda gradient: 2.0 * gradient + 0.0 * y


def test_a_gradient_function_is_there_as_long_as_its_graph():
    @tf.function(autograph=False)
    @releasing
    def chosen(x):
        # A branch has a graph of its own.
        return tf.cond(x > 0, lambda: doubled(x), lambda: x)

    for _ in range(2):
        with tf.GradientTape() as tape:
            x = tf.constant(3.0)
            tape.watch(x)
            y = chosen(x)
        assert float(tape.gradient(y, x)) == 2.0
        gc.collect()
    before = len(gradient_registry.list())
    del chosen, tape, y
    # What a graph was the last to hold on to goes in a second round.
    gc.collect()
    gc.collect()
    assert len(gradient_registry.list()) < before


def test_graphs_of_others_are_left_alone():
    theirs = tf.function(doubled, autograph=False).get_concrete_function(tf.TensorSpec([]))
    (name,) = [op.get_attr("_gradient_op_type") for op in theirs.graph.get_operations() if op.type == "IdentityN"]
    function = gradient_registry.lookup(name.decode())
    keep_with_graphs([tf.function(doubled, autograph=False).get_concrete_function(tf.TensorSpec([])).graph])
    assert gradient_registry.lookup(name.decode()) is function
