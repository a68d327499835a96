"""`DistributedFit` on two replicas in one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import AccumulatingOptimizer, DistributedFit, GradientNoiseScale, PerExampleGradients, wrap

pytestmark = pytest.mark.own_process(seconds=240)
ROWS = 90


def data(rows=ROWS):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 6)).astype("float32")
    return x, generator.integers(0, 3, rows)


def layers_of(middle=tuple):
    keras.utils.set_random_seed(1)
    return [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), *middle(), keras.layers.Dense(3)]


def model(optimizer="adam", middle=tuple, jit=False, **options):
    made = keras.Sequential(layers_of(middle))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit, **options)
    return made


def both(build, x, y, fit_options=None, **options):
    """The model and the history of one device, and of two replicas."""
    trained = []
    for strategy in ("none", "mirrored"):
        dist = DistributedFit(strategy=strategy, **options)
        with dist.scope():
            made = build()
        if strategy == "none":
            # Tracing takes longer than a few small steps.
            made.run_eagerly, made.jit_compile = True, False
        history = dist.fit(made, x, y, batch_size=32, epochs=2, verbose=0, **(fit_options or {}))
        trained.append((made, history.history))
    return trained


def assert_same(one, other, tolerance=1e-6):
    for first, second in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(first, second, rtol=0, atol=tolerance)


@pytest.mark.grappler
def test_shuffled_rows_and_the_history_are_those_of_one_device():
    x, y = data()
    (one, expected), (two, found) = both(model, x, y, {"validation_split": 0.2})
    assert_same(one, two)
    assert expected.keys() == found.keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, err_msg=name)


def test_evaluate_and_predict_take_every_row_once_and_in_order():
    x, y = data(17)
    dist = DistributedFit(strategy="mirrored")
    with dist.scope():
        two = model(steps_per_execution=2)
    dist.prepare(two)
    one = model(run_eagerly=True)
    for size in (1, 16):
        np.testing.assert_allclose(two.evaluate(x, y, size, verbose=0), one.evaluate(x, y, size, verbose=0), rtol=1e-5)
        np.testing.assert_allclose(two.predict(x, size, verbose=0), one.predict(x, size, verbose=0), atol=1e-5)


def test_metrics_of_uneven_parts_are_those_of_all_rows():
    """Within an epoch as well, where Keras shows the mean of the replicas' own."""

    class Shown(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.found = []

        def on_train_batch_end(self, batch, logs=None):
            self.found.append((logs["loss"], logs["accuracy"]))

    x, y = data(7)
    shown = [Shown(), Shown()]
    for strategy, callback in zip(("none", "mirrored"), shown, strict=True):
        dist = DistributedFit(strategy=strategy)
        with dist.scope():
            made = model("sgd", run_eagerly=strategy == "none")
        dist.fit(made, x, y, batch_size=3, verbose=0, callbacks=[callback])
    np.testing.assert_allclose(shown[0].found, shown[1].found, rtol=1e-5)


def test_synchronized_batch_normalization_is_exact_and_leaves_xla_out(caplog):
    x, y = data()
    (one, _), (two, _) = both(
        lambda: model("sgd", lambda: [keras.layers.BatchNormalization(synchronized=True)], True), x, y
    )
    assert_same(one, two, 2e-6)  # The variance is a difference of large numbers.
    assert "trained without" in caplog.text


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
def test_a_replica_without_rows_adds_nothing(jit):
    """Not even where a gradient at zero is infinite."""

    @keras.saving.register_keras_serializable()
    class Norm(keras.layers.Layer):
        def call(self, inputs):
            return keras.ops.sqrt(keras.ops.sum(keras.ops.square(inputs), -1, keepdims=True))

    def build():
        keras.utils.set_random_seed(1)
        # Without a bias before it, the norm of a made-up row of zeros is zero.
        made = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4, use_bias=False), Norm(), keras.layers.Dense(3)]
        )
        made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=jit)
        return made

    x, y = data(33)
    (one, expected), (two, found) = both(build, x, y, {"shuffle": False})
    assert_same(one, two)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    "accumulates", [pytest.param(False, marks=pytest.mark.long), True], ids=["every batch", "windows"]
)
def test_the_loss_scale_falls_for_what_only_the_last_replica_sees(accumulates):
    dist = DistributedFit(strategy="mirrored")
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with dist.scope():
            optimizer = keras.optimizers.SGD(0.1)
            made = model(AccumulatingOptimizer(optimizer, 2) if accumulates else optimizer)
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = data(32)
    x[-1] = 1e30
    before = made.get_weights()
    dist.fit(made, x, y, batch_size=32, shuffle=False, verbose=0)
    assert float(made.optimizer.dynamic_scale.numpy()) == made.optimizer.initial_scale / 2
    for weight, same in zip(made.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, same)


def test_a_skipped_update_overwrites_nothing():
    """Before the first update, averages of weights are zeros."""
    dist = DistributedFit(strategy="mirrored")
    with dist.scope():
        inner = keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)
        made = model(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**8))
    x, y = data(32)
    x[-1] = np.inf
    before = made.get_weights()
    after = []
    # At the end of training Keras overwrites them in any case.
    seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: after.extend(made.get_weights()))
    dist.fit(made, x, y, batch_size=32, shuffle=False, verbose=0, callbacks=[seen])
    assert float(made.optimizer.dynamic_scale.numpy()) == 2.0**7
    for weight, same in zip(after, before, strict=True):
        np.testing.assert_array_equal(weight, same)


@pytest.mark.long
def test_windows_are_exact_without_the_callback_too():
    x, y = data(70)
    dist = DistributedFit(strategy="mirrored")
    with dist.scope():
        made = model(AccumulatingOptimizer("adam", 2))
    dist.prepare(made)
    made.fit(dist.dataset(x, y, batch_size=20), shuffle=False, verbose=0)
    one = model(run_eagerly=True)
    one.fit(x, y, batch_size=40, shuffle=False, verbose=0)
    assert_same(one, made)


@pytest.mark.long
def test_a_step_of_its_own_is_refused_or_taken_as_it_is():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, batch):
            return super().train_step(batch)

    x, y = data(64)
    dist = DistributedFit(strategy="mirrored")
    with dist.scope():
        made = Own()
        made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    history = dist.fit(made, x, y, verbose=0)
    assert history.history["loss"]
    history = DistributedFit(strategy=dist.strategy, exact=False).fit(made, x, y, batch_size=32, epochs=3, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]


# In `make test`, per_example/test_replicas.py has them.
@pytest.mark.long
def test_gradients_of_single_examples_come_out_of_uneven_parts():
    x, y = data(27)
    found = []
    for strategy in ("none", "mirrored"):
        dist = DistributedFit(strategy=strategy)
        with dist.scope():
            wrapped = wrap(keras.Sequential(layers_of()), quantity="norms")
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            wrapped.compile("sgd", loss, jit_compile=False, run_eagerly=strategy == "none")
        dist.fit(wrapped, x, y, batch_size=9, shuffle=False, verbose=0)
        found.append(np.asarray(wrapped.per_example.norms))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


@pytest.mark.long
def test_the_noise_scale_sees_replicas_that_are_clipped_after_the_sum():
    x, y = data(64)
    dist = DistributedFit(strategy="mirrored")
    with dist.scope():
        made = model(keras.optimizers.SGD(0.1, global_clipnorm=0.1))
    noise = GradientNoiseScale(source="replicas")
    dist.fit(made, x, y, batch_size=32, epochs=4, verbose=0, callbacks=[noise])
    assert np.isfinite(noise.noise.variance)


@pytest.mark.long
def test_a_layer_that_shows_gradients_may_be_in_the_middle():
    """What a `PerExampleGradients` layer divides by is the loss it was given, weighed or not."""
    x, y = data(33)
    norms = []
    for strategy in ("none", "mirrored"):
        dist = DistributedFit(strategy=strategy)
        with dist.scope():
            eagerly = strategy == "none"
            made = model("sgd", lambda: [PerExampleGradients(keras.layers.Dense(5))], run_eagerly=eagerly)
        dist.fit(made, x, y, batch_size=11, shuffle=False, verbose=0)
        norms.append(np.asarray(made.layers[1].norms))
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-4)


def other_batch_normalization_is_warned_of():
    dist = DistributedFit(strategy="mirrored")
    with dist.scope():
        made = model(middle=lambda: [keras.layers.BatchNormalization()])
    with pytest.warns(UserWarning, match="synchronized=True"):
        dist.prepare(made)
    assert "exact, but for 1 BatchNormalization layer" in repr(dist)
    with dist.scope():
        dist.prepare(model())
    assert repr(dist).splitlines()[-2].endswith("exact")


def undo_leaves_nothing_behind():
    dist = DistributedFit(strategy="mirrored", jit=True)
    with dist.scope():
        made = model()
    before = dict(made.__dict__)
    prepared = dist.prepare(made)
    assert made.jit_compile
    prepared.undo()
    changed = {name for name in made.__dict__ if made.__dict__[name] is not before.get(name)}
    assert {name for name in changed if not name.startswith("_keras_paragrad")} == set()
    assert not any(name in made.__dict__ for name in ("make_train_function", "make_test_function", "fit"))


def a_model_from_outside_the_scope_is_refused():
    dist = DistributedFit(strategy="mirrored")
    with pytest.raises(ValueError, match=r"within `with dist.scope\(\):`"):
        dist.prepare(model())


def a_model_that_is_not_compiled_is_refused():
    dist = DistributedFit(strategy="mirrored")
    with dist.scope():
        made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="has not been compiled"):
        dist.prepare(made)


def replicas_know_their_place_in_a_graph():
    from keras_paragrad.compat.collectives import replica_index

    seen = []
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    tf.function(lambda: strategy.run(lambda: seen.append(replica_index())), autograph=False)()
    assert sorted(seen) == [0, 1]


def test_what_needs_no_training():
    for check in (
        other_batch_normalization_is_warned_of,
        undo_leaves_nothing_behind,
        a_model_from_outside_the_scope_is_refused,
        a_model_that_is_not_compiled_is_refused,
        replicas_know_their_place_in_a_graph,
    ):
        check()


@pytest.mark.long
def test_the_division_of_a_batch_is_explained_after_fit():
    """What a part weighs, and how that was found; nothing before, as there was no batch."""
    x = np.ones((8, 4), "float32")

    def explained(loss, **options):
        dist = DistributedFit("mirrored", **options)
        with dist.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", loss)
        assert dist.explain().division is None
        dist.fit(model, x, x[:, :1], batch_size=8, verbose=0)
        return dist.explain().division

    def spread(y, y_pred):
        return keras.ops.mean(keras.ops.square(y - y_pred - 1)) * keras.ops.std(y_pred + x[0, 0])

    assert explained("mse") == "A part weighs the number of elements, as the compiled losses and their reductions say."
    assert "losses are sums" in explained(keras.losses.MeanSquaredError(reduction="sum"))
    assert "weighting='examples' says, as stated" in explained("mse", weighting="examples")
    for loss in (lambda y, y_pred: keras.ops.mean(keras.ops.square(y - y_pred)), spread):
        assert "runs on whole batches, and calls of layers are divided" in explained(loss)
