"""`wrap` of models as others make them: compiled, trained, of KerasHub, with methods of their own."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from oracles.whole_batches import example_gradients, norms_of
from sample_models.drawn_layers import some_inputs

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation, PerExampleGradients, microbatch, wrap
from keras_paragrad import per_example_norms as norms_of_data

TOKENS = np.random.default_rng(0).integers(1, 20, (10, 6))
LABELS = np.random.default_rng(1).integers(0, 3, 10)


def network():
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(3)])


@keras.saving.register_keras_serializable(package="tests")
class CompilesItself(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.out = layers.Dense(4, activation="tanh"), layers.Dense(3)
        self.compile("adam", crossentropy(), metrics=["accuracy"])

    def build(self, input_shape):
        self.hidden.build(input_shape)
        self.out.build((None, 4))
        self.built = True

    def call(self, inputs):
        return self.out(self.hidden(inputs))


def compiles_itself():
    model = CompilesItself()
    model.build((None, 3))
    return model, some_inputs((10, 3)), LABELS


def compiled():
    model = network()
    model.compile("adam", crossentropy(), metrics=["accuracy"])
    return model, some_inputs((10, 3)), LABELS


def fitted():
    model, x, y = compiled()
    model.compile(keras.optimizers.SGD(0.0), crossentropy(), weighted_metrics=["accuracy"])
    model.fit(x, y, verbose=0)
    return model, x, y


def bert_classifier():
    # Takes seconds, which processes of their own do without.
    import keras_hub

    sizes = {"vocabulary_size": 20, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "max_sequence_length": 6}
    backbone = keras_hub.models.BertBackbone(intermediate_dim=8, dropout=0.0, **sizes)
    inputs = {"token_ids": TOKENS, "segment_ids": np.zeros_like(TOKENS), "padding_mask": np.ones_like(TOKENS)}
    return keras_hub.models.BertTextClassifier(backbone, num_classes=3, dropout=0.0), inputs, LABELS


def gpt2():
    import keras_hub

    sizes = {"vocabulary_size": 20, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "max_sequence_length": 6}
    backbone = keras_hub.models.GPT2Backbone(intermediate_dim=8, dropout=0.0, **sizes)
    inputs = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}
    return keras_hub.models.GPT2CausalLM(backbone), inputs, np.roll(TOKENS, -1, 1)


def vit():
    import keras_hub

    sizes = {"image_shape": (8, 8, 3), "patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 8}
    backbone = keras_hub.models.ViTBackbone(dropout_rate=0.0, attention_dropout=0.0, **sizes)
    return keras_hub.models.ViTImageClassifier(backbone, num_classes=3), some_inputs((10, 8, 8, 3)), LABELS


COMPILED = [compiled, fitted, compiles_itself, bert_classifier, gpt2, vit]


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def made(make):
    keras.utils.set_random_seed(0)
    return make()


def trained(model, x, y, fit=keras.Model.fit, callbacks=None, batch_size=4, **compile_arguments):
    """The history and the weights after training with `compile` as Keras has it."""
    arguments = {"optimizer": keras.optimizers.SGD(0.1), "loss": crossentropy(), **compile_arguments}
    keras.Model.compile(model, **arguments)
    more = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    history = fit(model, x, y, validation_data=(x, y), **more).history
    return history, [variable.numpy() for variable in model.trainable_variables]


@functools.cache
def fitted_by_keras():
    return trained(*made(fitted), metrics=["accuracy"], run_eagerly=True)


def check_alike(ours, theirs, tolerance=1e-6):
    assert ours[0].keys() == theirs[0].keys()
    for name, values in theirs[0].items():
        np.testing.assert_allclose(ours[0][name], values, rtol=1e-6, atol=1e-7, err_msg=name)
    for weight, expected in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=tolerance)


def mean_loss(y_pred, y):
    return ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("metrics", [[], ["accuracy"]], ids=["no metrics", "metrics"])
# The second is the first, trained before.
@pytest.mark.parametrize("make", [pytest.param(compiled, marks=pytest.mark.long), fitted, compiles_itself])
def test_a_compiled_model_trains_as_if_it_never_had_been(make, metrics):
    # Without metrics, Keras would keep those that the model was compiled with before.
    theirs = trained(*made(make), metrics=metrics, run_eagerly=True)
    model, x, y = made(make)
    check_alike(trained(wrap(model), x, y, metrics=metrics), theirs)


# In `make test`, foreign/test_models.py wraps one of them.
@pytest.mark.long
@pytest.mark.parametrize("make", [gpt2, bert_classifier, vit])
def test_tasks_of_keras_hub(make):
    model, x, y = made(make)
    norms = norms_of(example_gradients(model, x, mean_loss, y))
    np.testing.assert_allclose(norms_of_data(model, x, y, crossentropy()), norms, rtol=0, atol=1e-6 * norms.max())
    theirs = trained(*made(make), metrics=["accuracy"], run_eagerly=True)
    wrapped = wrap(model)
    check_alike(trained(wrapped, x, y, metrics=["accuracy"]), theirs)
    assert wrapped.per_example.count == 2
    expected = norms_of(example_gradients(model, x, mean_loss, y))
    np.testing.assert_allclose(norms_of_data(model, x, y, crossentropy()), expected, rtol=0, atol=1e-6 * norms.max())


# With methods of its own, a model is run in the other ways below, and others are in test_training.py.
@pytest.mark.parametrize(
    "execution",
    [
        *(pytest.param(way, marks=pytest.mark.long) for way in ({"jit_compile": True}, {"run_eagerly": True})),
        {"steps_per_execution": 2},
    ],
    ids=str,
)
def test_executions(execution):
    theirs = fitted_by_keras()
    model, x, y = made(fitted)
    check_alike(trained(wrap(model), x, y, metrics=["accuracy"], **execution), theirs)


def in_microbatches(model, x, y, **arguments):
    with microbatch(model, 3):
        return model.fit(x, y, **arguments)


def in_windows(model, x, y, batch_size, callbacks=None, **arguments):
    return model.fit(x, y, batch_size=2, callbacks=[ExactAccumulation()], **arguments)


@pytest.mark.long
@pytest.mark.parametrize("fit", [in_microbatches, in_windows])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_compiled_model_in_parts(fit, clip_norm):
    theirs = trained(wrap(network_of(compiled), clip_norm=clip_norm), *data_of(compiled), run_eagerly=True)
    steps = 2 if fit is in_windows else 1
    optimizer = AccumulatingOptimizer(keras.optimizers.SGD(0.1), steps=steps)
    ours = trained(
        wrap(network_of(compiled), clip_norm=clip_norm),
        *data_of(compiled),
        fit=fit,
        # One of them is traced.
        run_eagerly=fit is in_windows,
        **({"optimizer": optimizer} if steps > 1 else {}),
    )
    check_alike(ours, theirs)


def network_of(make):
    return made(make)[0]


def data_of(make):
    return made(make)[1:]


# The second is the first, trained before.
@pytest.mark.few(1)
@pytest.mark.parametrize("make", [pytest.param(compiled, marks=pytest.mark.long), fitted, compiles_itself])
def test_a_compiled_model_saved_and_loaded(make, tmp_path):
    model, x, y = made(make)
    wrapped = wrap(model, clip_norm=0.5)
    wrapped.compile(keras.optimizers.Adam(0.1), crossentropy(), metrics=["accuracy"], run_eagerly=True)
    wrapped.fit(x, y, verbose=0)
    wrapped.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    histories = [each.fit(x, y, verbose=0, shuffle=False).history for each in (wrapped, loaded)]
    assert histories[0] == histories[1]
    for ours, theirs in zip(loaded.get_weights(), wrapped.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# In `make test`, test_replicas.py trains one that clips.
@pytest.mark.long
@pytest.mark.own_process
def test_a_compiled_model_on_replicas(mirrored):
    theirs = fitted_by_keras()
    with mirrored.scope():
        model, x, y = made(fitted)
        wrapped = wrap(model)
        optimizer = AccumulatingOptimizer(keras.optimizers.SGD(0.1), steps=1)
        # Tracing takes longer than a few small steps.
        options = {"metrics": ["accuracy"], "optimizer": optimizer, "run_eagerly": True}
        ours = trained(wrapped, x, y, callbacks=[ExactAccumulation()], **options)
    check_alike(ours, theirs)


def test_a_compiled_model_in_a_layer_of_another():
    model, x, y = made(fitted)
    layer = PerExampleGradients(model)
    outer = keras.Sequential([keras.Input((3,)), layer, layers.Dense(3)])
    outer.compile("sgd", crossentropy(), metrics=["accuracy"], run_eagerly=True)
    history = outer.fit(x, y, verbose=0).history
    assert history["loss"][0] > 0
    assert len(outer.metrics) == 2
    assert layer.norms.shape == (10,)


def test_half_precision_of_the_model_s_own():
    theirs, ours = [], []
    for losses in (theirs, ours):
        keras.utils.set_random_seed(0)
        half = CompilesItself(dtype="mixed_float16")
        half.build((None, 3))
        model = wrap(half) if losses is ours else half
        model.compile("sgd", crossentropy())
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        losses += model.fit(some_inputs((10, 3)), LABELS, verbose=0, shuffle=False).history["loss"]
    assert theirs == ours


def two_outputs():
    keras.utils.set_random_seed(0)
    x = keras.Input((3,))
    return keras.Model(x, [layers.Dense(2, name="a")(x), layers.Dense(2, name="b")(x)])


def test_outputs_keep_their_names():
    x, y = some_inputs((10, 3)), np.ones((10, 2), "float32")
    found = []
    for model in (two_outputs(), wrap(two_outputs())):
        model.compile("sgd", {"a": "mse", "b": "mae"}, metrics={"b": ["mse"]}, run_eagerly=True)
        found.append(model.fit(x, {"a": y, "b": y}, verbose=0, shuffle=False).history)
    assert found[0] == found[1]


# Methods of the model's own.


class OwnMethods(keras.Model):
    """Has a loss, metrics and an evaluation of its own, beside what it is compiled with."""

    def __init__(self, mean=True, super_too=True, **kwargs):
        super().__init__(**kwargs)
        self.mean, self.super_too = mean, super_too
        self.dense = layers.Dense(3, kernel_regularizer="l2", activity_regularizer="l2" if mean else None)
        self.size = keras.metrics.Mean(name="size")
        self.largest = keras.metrics.Mean(name="largest")
        self.build((None, 3))

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.built = True

    def call(self, inputs):
        return self.dense(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        size = ops.sum(ops.square(y_pred), axis=-1)
        self.size.update_state(size)
        penalty = ops.mean(size) if self.mean else ops.sum(size)
        if self.super_too:
            return 2 * super().compute_loss(x, y, y_pred, sample_weight) + penalty
        return penalty + ops.sum(self.losses)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.largest.update_state(ops.max(y_pred, axis=-1))
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "doubled": 2 * self.largest.result()}

    def predict_step(self, data):
        return 2 * super().predict_step(data)


class OwnTest(OwnMethods):
    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self._loss_tracker.update_state(self.compute_loss(x, y, y_pred))
        return {**self.compute_metrics(x, y, y_pred), "tested": ops.sum(y_pred)}


def own_methods(mean=True, super_too=True, kind=OwnMethods):
    return kind(mean, super_too), some_inputs((10, 3)), LABELS


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [OwnMethods, OwnTest])
@pytest.mark.parametrize("execution", [{}, {"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_methods_of_the_model_s_own_run(kind, execution):
    # XLA compiles a step for each size of a batch.
    options = {"batch_size": 5 if execution.get("jit_compile") else 4, "metrics": ["accuracy"]}
    theirs = trained(*made(lambda: own_methods(kind=kind)), run_eagerly=True, **options)
    model, x, y = made(lambda: own_methods(kind=kind))
    wrapped = wrap(model, loss_reduction="sum_over_batch_size")
    check_alike(trained(wrapped, x, y, **options, **execution), theirs)
    assert {"size", "largest", "doubled", "val_doubled"} <= theirs[0].keys()
    # XLA rounds in its own way.
    np.testing.assert_allclose(wrapped.predict(x, verbose=0), 2 * np.asarray(model(x)), rtol=0, atol=1e-6)
    assert not model.compiled


# Keras's own compute_loss, which super_too calls, is a mean.
@pytest.mark.few(1)
@pytest.mark.parametrize(("mean", "super_too"), [(True, True), (True, False), (False, False)])
def test_norms_with_a_compute_loss_of_the_model_s_own(mean, super_too):
    model, x, y = made(lambda: own_methods(mean, super_too))

    def loss(y_pred, y):
        value = ops.sum(ops.square(y_pred))
        value = value + 0.01 * value * (2 if super_too else 1) if mean else value
        return value + 2 * mean_loss(y_pred, y) if super_too else value

    theirs = norms_of(example_gradients(model, x, loss, y))
    wrapped = wrap(model, loss_reduction="sum_over_batch_size" if mean else "sum")
    trained(wrapped, x, y, optimizer=keras.optimizers.SGD(0.0), run_eagerly=True)
    np.testing.assert_allclose(wrapped.per_example.norms, theirs[8:], rtol=0, atol=1e-6 * theirs.max())


# Above, they run on one device, and a model of Keras's methods on replicas.
@pytest.mark.long
@pytest.mark.own_process
def test_methods_of_the_model_s_own_on_replicas(mirrored):
    with mirrored.scope():
        theirs = trained(*made(own_methods), metrics=["accuracy"])
        model, x, y = made(own_methods)
        wrapped = wrap(model, loss_reduction="sum_over_batch_size")
        check_alike(trained(wrapped, x, y, metrics=["accuracy"]), theirs)
    assert wrapped.per_example.count == 2


def test_a_compute_loss_without_a_declared_reduction():
    model, x, y = made(own_methods)
    with pytest.raises(ValueError, match="loss_reduction='sum_over_batch_size'"):
        trained(wrap(model), x, y)


class ReadsWeights(OwnMethods):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight) + ops.mean(self.dense(2 * x))


def test_a_compute_loss_that_reads_weights():
    model, x, y = ReadsWeights(), some_inputs((10, 3)), LABELS
    with pytest.raises(ValueError, match="Compute what needs the weight in call"):
        trained(wrap(model, loss_reduction="sum_over_batch_size"), x, y)


def with_method(name, method=lambda self, *arguments, **keywords: None):
    return type("Own", (OwnMethods,), {name: method})()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("train_step", "Move the computation of the loss into compute_loss"),
        ("fit", r"keras.Sequential\(\[PerExampleGradients\(model\)\]\)"),
        ("train_on_batch", r"keras.Sequential\(\[PerExampleGradients\(model\)\]\)"),
        ("make_train_function", r"keras.Sequential\(\[PerExampleGradients\(model\)\]\)"),
    ],
)
def test_methods_that_would_not_run(name, says):
    with pytest.raises(ValueError, match=f"Own has its own {name}, .*{says}"):
        wrap(with_method(name))


def test_a_train_step_on_the_model_itself():
    model = network()
    vars(model)["train_step"] = lambda data: {}
    with pytest.raises(ValueError, match="Sequential has its own train_step"):
        wrap(model)


def test_a_model_in_microbatches_is_wrapped_before():
    model = network()
    with microbatch(model, 4), pytest.raises(ValueError, match="apply them to the model that wrap returns"):
        wrap(model)
    wrap(model)


def test_a_task_that_preprocesses():
    model, x, y = made(vit)
    model.preprocessor = layers.Rescaling(2.0)
    with pytest.raises(ValueError, match="preprocessor=None"):
        wrap(model)


def test_methods_of_the_model_s_own_saved_and_loaded(tmp_path):
    x, y = some_inputs((10, 3)), LABELS
    wrapped = wrap(Registered(), loss_reduction="sum_over_batch_size")
    wrapped.compile("adam", crossentropy(), run_eagerly=True)
    wrapped.fit(x, y, verbose=0)
    wrapped.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    histories = [each.fit(x, y, verbose=0, shuffle=False).history for each in (wrapped, loaded)]
    assert histories[0] == histories[1]
    assert "size" in histories[0]


@keras.saving.register_keras_serializable(package="tests")
class Registered(OwnMethods):
    def get_config(self):
        return {}


class Unbuilt(keras.Model):
    """Its layers are built when it calls them."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(4, activation="tanh"), layers.Dense(3)

    def call(self, inputs):
        return self.out(self.hidden(inputs))


def unbuilt():
    return Unbuilt(), some_inputs((10, 3)), LABELS


@pytest.mark.few(1)
@pytest.mark.parametrize("execution", [{}, {"run_eagerly": True}], ids=str)
def test_a_model_that_is_not_built(execution):
    theirs = trained(*made(unbuilt), run_eagerly=True)
    model, x, y = made(unbuilt)
    wrapped = wrap(model)
    check_alike(trained(wrapped, x, y, **execution), theirs)
    assert wrapped.per_example.norms.shape == (2,)


def test_norms_of_a_model_that_is_not_built():
    model, x, y = made(unbuilt)
    ours = norms_of_data(model, x, y, crossentropy())
    theirs = norms_of(example_gradients(model, x, mean_loss, y))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * theirs.max())


def test_a_model_that_is_not_built_in_a_loop_of_one_s_own():
    model, x, y = made(unbuilt)
    layer = PerExampleGradients(model)
    with tf.GradientTape() as tape:
        loss = mean_loss(layer(tf.constant(x)), y)
    tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    theirs = norms_of(example_gradients(model, x, mean_loss, y))
    np.testing.assert_allclose(layer.norms, theirs, rtol=0, atol=1e-6 * theirs.max())


def test_the_models_own_fit_says_once_that_it_does_not_clip():
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    wrap(model)
    model.fit(x, y, verbose=0)
    wrapped = wrap(wrap(model, clip_norm=1.0).per_example.layer, transform=lambda norms: norms)
    with pytest.warns(UserWarning, match=r"is wrapped with clip_norm=.*, then wrapped.compile\(...\) and wrapped.fit"):
        model.fit(x, y, verbose=0)
    model.fit(x, y, verbose=0)
    for method in (wrapped.fit, wrapped.evaluate):
        with pytest.raises(
            ValueError, match=r"not been compiled. What 'sequential.*' .* no effect. Write wrapped = wrap"
        ):
            method(x, y, verbose=0)
    wrapped.compile("sgd", "mse")
    wrapped.fit(x, y, verbose=0)


@pytest.mark.parametrize("name", ["clipnorm", "batch"])
def test_an_unknown_argument_is_named(name):
    with pytest.raises(ValueError, match=f"Unrecognized keyword arguments passed to PerExampleGradients: .*{name}"):
        wrap(network(), **{name: 1.0})
