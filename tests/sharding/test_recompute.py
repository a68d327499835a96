"""A model with layers that run again in the backward pass trains as it does without."""

import contextlib
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from sample_models.recomputed_models import (
    MODELS,
    L,
    check_equal,
    data_for,
    dropped,
    normalized,
    on_numbers,
    sgd,
    trained,
    without,
)

from keras_paragrad import (
    AccumulatingOptimizer,
    DistributedFit,
    ExactAccumulation,
    PerExampleGradients,
    hessian_vector_product,
    input_gradients,
    input_jacobian,
    microbatch,
    per_example_norms,
    recompute,
    wrap,
)


def recomputing(model):
    return recompute(model, ["block"])


# XLA takes long to compile; `test_mixed_precision` has it compile normalization and dropout.
UNDER_XLA = ("the same tensor twice", "in TimeDistributed")
# Other cases have attention, a block that is called again, and an added loss each for itself.
LONG = (
    *("attention, shared, regularized", "integers alone", "frozen", "training from the call around"),
    *("called three times", "the global seed", "complex numbers", "in TimeDistributed"),
)
CASES = [
    pytest.param(name, jit, id=f"{name}-{'xla' if jit else 'plain'}", marks=[pytest.mark.long] * left)
    for name in MODELS
    for jit in (False, True)
    for left in [name in LONG or jit != (name in UNDER_XLA)]
]


@pytest.mark.few(
    0,
    "structures, keywords, mask, metric, added loss-plain",
    "masked attention-plain",
    "a weight that is not used-plain",
    "batch normalization and dropout-plain",
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(("name", "jit_compile"), CASES)
def test_trains_as_without(name, jit_compile):
    make = MODELS[name]
    found, expected = (trained(make, context, jit_compile=jit_compile) for context in (recomputing, without))
    # Weights, and statistics, seeds and metrics.
    check_equal(found, expected)


class Counted(L.Layer):
    """Counts how often it is traced to be trained, and how often its operations run."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.traced = 0

    def call(self, x, training=None):
        self.traced += bool(training) and not tf.executing_eagerly() and not isinstance(x, keras.KerasTensor)
        return keras.ops.tanh(x)


@pytest.mark.grappler
def test_runs_twice_until_undone():
    model = on_numbers(Counted(name="block"))
    model.compile("sgd", "mse", jit_compile=False)
    layer, data = model.get_layer("block"), data_for(model)

    def traces():
        before = layer.traced
        model.fit(*data, verbose=0)
        return layer.traced - before

    once = traces()
    handle = recompute(model, [layer])
    assert traces() == 2 * once
    handle.undo()
    assert "call" not in vars(layer)
    assert traces() == once
    handle.undo()
    with recompute(model, ["block"]):
        assert traces() == 2 * once
    assert traces() == once


@pytest.fixture
def policy():
    before = keras.config.dtype_policy()
    yield keras.config.set_dtype_policy
    keras.config.set_dtype_policy(before)


# In `make test`, float16 trains once its overflows are over.
@pytest.mark.long
@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(dtype, policy):
    policy(dtype)
    # XLA rounds both alike; what TensorFlow fuses without it depends on the graph around.
    found, expected = (trained(normalized, context, jit_compile=True) for context in (recomputing, without))
    check_equal(found, expected)
    if dtype == "mixed_float16":
        assert isinstance(found[0].optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.long
def test_an_overflow_is_seen_by_the_loss_scale(policy):
    policy("mixed_float16")

    def overflowing():
        return keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**18)

    found, expected = (
        trained(normalized, context, overflowing, jit_compile=True) for context in (recomputing, without)
    )
    check_equal(found, expected)
    # Of six batches, the first overflow, and the last are trained on.
    assert float(found[0].optimizer.dynamic_scale) < 2.0**18
    assert 0 < int(found[0].optimizer.iterations) < 6


def in_slices(context):
    def both(model):
        stack = contextlib.ExitStack()
        stack.enter_context(context(model))
        stack.enter_context(microbatch(model, 3))
        return stack

    return both


def test_with_slices_and_accumulation():
    def run(context):
        # Eager steps take less than tracing them.
        way = {"run_eagerly": True} if context is without else {"steps_per_execution": 3}
        options = {"callbacks": [ExactAccumulation()], "jit_compile": False, **way}
        return trained(dropped, in_slices(context), lambda: AccumulatingOptimizer(sgd(), 2), **options)

    check_equal(run(recomputing), run(without))


@pytest.mark.long
@pytest.mark.own_process(seconds=200)
def test_on_replicas_with_collectives_inside(mirrored):
    def run(context):
        keras.utils.set_random_seed(1)
        with mirrored.scope():
            model = normalized(synchronized=True)
            model.compile(sgd(), "mse", metrics=["mae"], steps_per_execution=2)
        x, y = data_for(model)
        with context(model):
            fit = DistributedFit(mirrored, jit=False).fit
            return model, fit(model, x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history

    check_equal(run(recomputing), run(without))


def test_gradients_with_respect_to_inputs():
    keras.utils.set_random_seed(1)
    model = on_numbers(L.Dense(8, name="block", activation="tanh"))
    x, y = data_for(model, 6)
    model.compile("sgd", "mse")
    direction = np.ones_like(x)

    def all_of_them():
        return [
            input_gradients(model, x),
            *(input_jacobian(model, x, mode=mode) for mode in ("reverse", "forward")),
            hessian_vector_product(model, x, direction),
        ]

    expected = all_of_them()
    with recompute(model, ["block"]):
        found = all_of_them()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_second_derivatives_of_weights():
    keras.utils.set_random_seed(1)
    model = on_numbers(L.Dense(8, name="block", activation="tanh"))
    x, _ = data_for(model, 6)

    @tf.function
    def penalty_gradients(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                total = tf.reduce_sum(model(x, training=True))
            penalty = tf.reduce_sum(inner.gradient(total, x) ** 2)
        return outer.gradient(penalty, model.trainable_weights)

    expected = penalty_gradients(tf.constant(x))
    with recompute(model, ["block"]):
        found = tf.function(penalty_gradients.python_function)(tf.constant(x))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_per_example_gradients_of_a_recomputed_model():
    def run(context):
        keras.utils.set_random_seed(1)
        model = on_numbers(L.Dense(8, name="block", activation="tanh"))
        x, y = data_for(model)
        with context(model):
            norms = per_example_norms(model, x, y, "mse")
            wrapped = wrap(model, clip_norm=0.5)
            wrapped.compile(sgd(), "mse", jit_compile=False)
            history = wrapped.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        return norms, wrapped.per_example.norms, (wrapped, history.history)

    (norms, kept, found), (expected_norms, expected_kept, expected) = run(recomputing), run(without)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    np.testing.assert_allclose(kept, expected_kept, rtol=1e-5)
    check_equal(found, expected)


def test_a_custom_loop():
    def run(context):
        keras.utils.set_random_seed(1)
        model = normalized()
        optimizer = sgd()
        optimizer.build(model.trainable_variables)
        x, y = data_for(model)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)

        with context(model):
            step()
            step()
        return model, {}

    check_equal(run(recomputing), run(without))


def test_saved_and_copied_as_without(tmp_path):
    model = normalized()
    plain = model.to_json()
    with recompute(model, ["block"]):
        assert model.to_json() == plain
        model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "model.weights.h5")
        model.export(tmp_path / "exported", verbose=False)
        made = [
            keras.models.load_model(tmp_path / "model.keras"),
            keras.models.clone_model(model),
            pickle.loads(pickle.dumps(model)),
        ]
        made[1].load_weights(tmp_path / "model.weights.h5")
        x, _ = data_for(model)
        for other in made:
            assert "call" not in vars(other.get_layer("block"))
            np.testing.assert_array_equal(other(x), model(x))


class Raw(L.Layer):
    """Draws, or counts, past Keras."""

    def __init__(self, does, **kwargs):
        super().__init__(**kwargs)
        self.does, self.count = does, tf.Variable(0.0, trainable=False)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(8,))

    def call(self, x):
        return {
            "draws": lambda: x * tf.random.uniform(tf.shape(x)),
            "draws in a loop": lambda: tf.while_loop(
                lambda i, x: i < 2, lambda i, x: (i + 1, x * tf.random.normal([8])), (0, x)
            )[1],
            "counts": lambda: x + self.count.assign_add(1.0),
            "reads": lambda: x + self.count,
            "asks Python": lambda: tf.ensure_shape(tf.py_function(lambda x: x, [x], tf.float32), x.shape),
            "changes a weight": lambda: x + self.kernel.assign_add(keras.ops.ones((8,))),
        }[self.does]()


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("draws", "draws random numbers.*keras.random.SeedGenerator"),
        ("draws in a loop", "draws random numbers.*keras.random.SeedGenerator"),
        ("counts", "a tf.Variable that Keras does not know.*self.add_weight"),
        ("reads", "a tf.Variable that Keras does not know.*self.add_weight"),
        ("asks Python", "may not do the same when it runs again"),
        ("changes a weight", "assigns to its weight 'block/variable.*Leave it out of `layers`"),
    ],
)
def test_what_would_not_do_the_same_is_refused(does, says):
    model = on_numbers(Raw(does, name="block"))
    model.compile("sgd", "mse", jit_compile=False)
    with recompute(model, ["block"]), pytest.raises(ValueError, match=f"(?s)'block'.*{says}"):
        model.fit(*data_for(model), verbose=0)


def test_a_layer_that_makes_variables_when_it_runs_is_refused():
    class Late(L.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = L.Dense(8)

        def build(self, shape):
            self.built = True

        def call(self, x, training=None):
            return self.dense(x) if training else x

    model = on_numbers(Late(name="block"))
    model.compile("sgd", "mse", jit_compile=False)
    with recompute(model, ["block"]), pytest.raises(ValueError, match="'block'.*Build the model"):
        model.fit(*data_for(model), verbose=0)


def two_blocks():
    inputs = keras.Input((8,))
    hidden = inputs
    for index in range(2):
        inside = keras.Input((8,))
        outputs = L.Dense(8, name="inner")(L.Dense(16, name=f"own_{index}")(inside))
        hidden = keras.Model(inside, outputs, name=f"block_{index}")(hidden)
    return keras.Model(inputs, L.RNN(L.LSTMCell(4, name="cell"), name="rnn")(L.Reshape((1, 8), name="shape")(hidden)))


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (["blok_1"], "'blok_1', and no layer of .* Layers: .'block_1', 'block_0'"),
        (["inner"], "2 layers named 'inner'. Pass the layers themselves"),
        (["block_0", "own_0"], "'own_0' too, which is recomputed with it. Leave one"),
        (["block_0", "block_0"], "'block_0', and 'block_0' too"),
        (["cell"], "a cell of 'rnn'.*Name 'rnn' instead"),
        ([L.Dense(1, name="other")], "'other' is not a layer of"),
        ([], "at least one of"),
        ("block_0", r"`layers` is 'block_0'"),
        ([3], r"`layers.0.` is 3, and must be a layer or its name"),
    ],
)
def test_layers_that_cannot_be_named_are_refused(layers, says):
    with pytest.raises(ValueError, match=says):
        recompute(two_blocks(), layers)


def test_inputs_and_repeated_layers_are_refused():
    model = two_blocks()
    with pytest.raises(ValueError, match="is an input of the model"):
        recompute(model, [model.layers[0]])
    recompute(model, [model.get_layer("block_0")])
    for layers in (["block_0"], ["own_0"], [model.get_layer("block_0")]):
        with pytest.raises(ValueError, match=r"'block_0' is recomputed already. Call undo"):
            recompute(model, layers)


def test_per_example_layers_are_refused():
    inside = keras.Sequential([L.Dense(8, name="deep")], name="inside")
    model = on_numbers(PerExampleGradients(inside, name="block"))
    for name in ("block", "deep", "inside"):
        with pytest.raises(ValueError, match="PerExampleGradients layer 'block' are within each other"):
            recompute(model, [name])
