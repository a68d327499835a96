"""Micro-batches count for what their loss was divided by, and where that can't be known it is said."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.whole_batches import largest_difference

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation

TOLERANCE = 1e-6
generator = np.random.default_rng(0)
ROWS, SPLIT = 12, [2, 3, 8]


def compare(build, x, y, sample_weight=None, weighting="auto", **mode):
    """One update on unevenly split rows, against one on all of them; `build` makes a compiled model."""

    def cut(tree):
        parts = [np.split(leaf, SPLIT) for leaf in keras.tree.flatten(tree)]
        return [keras.tree.pack_sequence_as(tree, list(leaves)) for leaves in zip(*parts, strict=True)]

    columns = [x, y] if sample_weight is None else [x, y, sample_weight]
    batches = list(zip(*(cut(column) for column in columns), strict=True))

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, index):
            return batches[index]

    def inner():
        # Without a clip, which Keras gets wrong for an embedding's gradient of the whole batch.
        return keras.optimizers.SGD(0.1)

    keras.utils.set_random_seed(3)
    whole = build(inner(), **mode)
    # Tracing takes longer than one small step.
    whole.run_eagerly = True
    whole.train_on_batch(x, y, sample_weight=sample_weight)
    keras.utils.set_random_seed(3)
    parts = build(AccumulatingOptimizer(inner(), len(batches), weighting=weighting), **mode)
    # Masks alone are weighed in graphs, too.
    parts.run_eagerly = not mode
    parts.fit(Batches(), shuffle=False, verbose=0, callbacks=[ExactAccumulation()])
    assert parts.optimizer.iterations.numpy() == 1
    assert largest_difference(parts, whole) < TOLERANCE


def sequences():
    x = generator.integers(1, 9, (ROWS, 7))
    for row in x:
        row[generator.integers(2, 8) :] = 0
    return x, generator.normal(size=(ROWS, 7, 3)).astype("float32")


def masked_model(reduction):
    def build(optimizer, **mode):
        model = keras.Sequential(
            [keras.Input((7,), dtype="int32"), keras.layers.Embedding(9, 4, mask_zero=True), keras.layers.Dense(3)]
        )
        model.compile(optimizer, keras.losses.MeanSquaredError(reduction=reduction), **mode)
        return model

    return build


def two_outputs(**compile_arguments):
    def build(optimizer):
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2")(inputs)
        outputs = {"a": keras.layers.Dense(2, name="a")(hidden), "b": keras.layers.Dense(3, name="b")(hidden)}
        model = keras.Model(inputs, outputs)
        model.compile(optimizer, **compile_arguments)
        return model

    return build


def two_targets():
    x = generator.normal(size=(ROWS, 5)).astype("float32")
    y = {name: generator.normal(size=(ROWS, width)).astype("float32") for name, width in (("a", 2), ("b", 3))}
    return x, y


def test_outputs_that_divide_by_different_things_are_refused():
    weighted = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    build = two_outputs(loss={"a": weighted, "b": "mse"})
    with pytest.raises(ValueError, match="have different divisors"):
        compare(build, *two_targets(), generator.uniform(0.1, 2, ROWS).astype("float32"))


def dense_model(loss, model_class=keras.Sequential, **layer):
    def build(optimizer):
        model = model_class([keras.Input((5,)), keras.layers.Dense(2, **layer)])
        model.compile(optimizer, loss)
        return model

    return build


def regression():
    return tuple(generator.normal(size=(ROWS, width)).astype("float32") for width in (5, 2))


def scalar_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


class SelfReducing(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return scalar_loss(y_true, y_pred)


class MeanOfItsOwn(keras.losses.Loss):
    """Of which Keras sums one number, whatever `reduction` says."""

    def call(self, y_true, y_pred):
        return scalar_loss(y_true, y_pred)


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return scalar_loss(y, y_pred) + sum(self.losses)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def test_a_sum_with_a_weight_regularizer_is_refused():
    build = dense_model(keras.losses.MeanSquaredError(reduction="sum"), kernel_regularizer="l2")
    with pytest.raises(ValueError, match="reduction='sum_over"):
        compare(build, *regression())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "build",
    [
        dense_model(MeanOfItsOwn(reduction=None)),
        dense_model(scalar_loss),
        dense_model(SelfReducing()),
        dense_model("mse", OwnLoss),
    ],
)
def test_losses_whose_divisor_can_not_be_seen(build):
    compare(build, *regression(), weighting="examples")
    with pytest.raises(ValueError, match=r"write AccumulatingOptimizer\(\.\.\., weighting='examples'\)"):
        compare(build, *regression())


def test_a_train_step_of_its_own_runs_uniform():
    x, y = regression()

    def trained(optimizer, callbacks, batch_size):
        keras.utils.set_random_seed(3)
        model = dense_model("mse", OwnStep)(optimizer)
        model.fit(x, y, batch_size, shuffle=False, verbose=0, callbacks=callbacks)
        return model

    parts = trained(AccumulatingOptimizer("adam", 3, weighting="uniform"), [ExactAccumulation()], 4)
    assert largest_difference(parts, trained("adam", [], 12)) < TOLERANCE


def test_a_subclassed_model_that_is_not_built():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)

        def call(self, inputs):
            return self.out(self.hidden(inputs))

    def build(optimizer):
        model = Subclassed()
        model.compile(optimizer, "mse", metrics=["mae"])
        return model

    compare(build, *regression())


def test_the_weight_is_what_the_loss_divides_by():
    from keras_paragrad.accumulation.exact_accumulation import DIVIDER
    from keras_paragrad.engine.losses.loss_divisor import LossDivisor
    from keras_paragrad.engine.losses.terms import recorded_terms

    x, y = sequences()
    weights = generator.uniform(0.1, 2, (ROWS, 7)).astype("float32")
    for reduction in ("sum_over_batch_size", "mean_with_sample_weight"):
        model = masked_model(reduction)("sgd")
        y_pred = model(x)
        with recorded_terms(model) as terms:
            arguments = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": weights}
            loss = model.compute_loss(**arguments)
        weight = LossDivisor("auto", DIVIDER)(model, arguments, terms)
        by_hand = np.square(y - y_pred.numpy()).mean(-1) * weights * (x != 0)
        assert not weight.summed
        np.testing.assert_allclose(float(loss) * float(weight.value), by_hand.sum(), rtol=1e-5)
        assert tf.is_tensor(model.compute_loss(x=x, y=y, y_pred=y_pred))
