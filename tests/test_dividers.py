"""What divides batches is a value: a component of a test's own trains exactly, and is refused in its own words."""

import dataclasses
import re
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad.engine.batches.replica_batch import rows_at
from keras_paragrad.engine.losses.dividers import Divider
from keras_paragrad.engine.losses.loss_divisor import LossDivisor
from keras_paragrad.engine.step.batch_part import compute_part
from keras_paragrad.engine.step.building import build_losses
from keras_paragrad.engine.training.builder import StepBuilder

ROWS, FIRST, SIZE = 12, 5, 4
X, Y = (np.random.default_rng(seed).normal(size=(ROWS, SIZE)).astype("float32") for seed in (0, 1))
SAMPLE_WEIGHT = np.random.default_rng(2).uniform(0.1, 2, ROWS).astype("float32")

IN_TWO = Divider(
    configured_by="InTwo",
    parts="the two parts of a batch",
    for_equal_parts="write InTwo(first=6)",
    to_train_anyway="write InTwo(..., strict=False)",
    whole_batches="InOne() trains on whole batches.",
    for_any_loss="InOne() takes any loss.",
)


class InTwo(NamedTuple):
    """Fills the *split* stage: a batch is trained on in two parts, of five rows and of the rest."""

    loss_divisor: LossDivisor
    size: int = FIRST
    refusal_prefix: str = "A batch can't be cut in two."
    prove: bool = True

    def part_rows(self, rows):
        return -(-rows // 2)

    def cuts(self, data):
        return True

    @property
    def refusal_of_calls(self):
        return "Two parts must have five rows." if self.size == ROWS else None

    def __call__(self, context, data):
        build_losses(context.model, rows_at(data, 0, 1), metrics=True)
        bounds = (0, FIRST), (FIRST, ROWS - FIRST)
        one, other = (compute_part(context, rows_at(data, *each), ROWS) for each in bounds)
        return (one + other).finish()


class OfItsOwn(keras.Model):
    """Its own `train_step` minimizes the mean of squares."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(y - self(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class ByLabels(keras.Model):
    """Its loss is divided by the sum of some labels."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.sum(keras.ops.square(y - y_pred)) / (1 + keras.ops.sum(keras.ops.abs(y)))


class Centered(keras.layers.Layer):
    """Takes the mean of the batch from each example."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


class Counting(keras.layers.Layer):
    """Counts its calls."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign(self.count + 1)
        return x


def compares(y, y_pred):
    """A contrast between the examples of a batch."""
    return -keras.ops.log_softmax(keras.ops.matmul(y, keras.ops.transpose(y_pred)))[:, 0]


def built(kind=keras.Model, loss="mse", layer=None):
    keras.utils.set_random_seed(0)
    x = keras.Input((SIZE,))
    hidden = keras.layers.Dense(3, "tanh")(x)
    model = kind(x, keras.layers.Dense(SIZE)(layer(hidden) if layer else hidden))
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    return model


def train(model, divider=None, weighting="auto", size=FIRST):
    if divider:
        StepBuilder.of(model).fill(split=InTwo(LossDivisor(weighting, divider), size))
    options = {} if isinstance(model, OfItsOwn) else {"sample_weight": SAMPLE_WEIGHT}
    return model.fit(X, Y, **options, batch_size=ROWS, epochs=2, shuffle=False, verbose=0).history["loss"]


@pytest.mark.few(0, "Model-divider0")
@pytest.mark.parametrize(
    ("kind", "divider"), [(keras.Model, IN_TWO), (OfItsOwn, dataclasses.replace(IN_TWO, divides_steps=True))]
)
def test_it_takes_the_step_of_the_whole_batch(kind, divider):
    whole, ours = built(kind), built(kind)
    np.testing.assert_allclose(train(ours, divider), train(whole), rtol=1e-5)
    for found, wanted in zip(ours.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


# What is refused, and the end of the error.
REFUSED = {
    "a layer that mixes examples": (
        {"layer": Centered(name="centered")},
        "Its rows are mixed in 'centered'. InOne() trains on whole batches. To train anyway, write InTwo(..., "
        "strict=False).",
    ),
    "a loss that compares examples": (
        {"loss": compares},
        "of the whole batch. InOne() takes any loss. To train anyway, write InTwo(..., strict=False).",
    ),
    "a state": ({"layer": Counting(name="counting")}, "InOne() trains on whole batches. To train anyway, write InTwo"),
    "a train_step": ({"kind": OfItsOwn}, "all parts have the same size and weights, write InTwo(first=6); otherwise"),
    "an unknown divisor": (
        {"kind": ByLabels},
        "If it is a mean over the examples, write InTwo(..., weighting='examples'). weighting also takes "
        "'sample_weight', 'mask', 'sum' or a function of (x, y, y_pred, sample_weight) that returns what the loss of a "
        "part is divided by. InOne() takes any loss.",
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_its_own_words(case):
    built_with, says = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        train(built(**built_with), IN_TWO)
    assert str(refusal.value).startswith("A batch can't be cut in two. ")
    for other in ("AccumulatingOptimizer", "microbatch", "DistributedFit", "Pipeline", "make_private", "recompute"):
        assert other not in str(refusal.value)


def test_where_no_weighting_can_be_stated_none_is_asked_for():
    states_none = dataclasses.replace(IN_TWO, takes_weighting=False, to_train_anyway=None)
    with pytest.raises(ValueError, match=r"divisor of its loss is unknown\. InOne\(\) takes any loss\.$"):
        train(built(ByLabels), states_none)
    with pytest.raises(ValueError, match=r"InOne\(\) trains on whole batches\.$"):
        train(built(layer=Centered()), states_none)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [{"loss": compares}, {"kind": ByLabels}, {"kind": OfItsOwn, "layer": Centered()}])
def test_calls_of_layers_are_divided_where_it_says_so(how):
    """And where the loss can't be; by a layer that mixes examples, whole batches are passed on."""
    divides = dataclasses.replace(IN_TWO, divides_calls=True, divides_steps=True)
    whole, ours = built(**how), built(**how)
    np.testing.assert_allclose(train(ours, divides), train(whole), rtol=1e-5)
    for found, wanted in zip(ours.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    with pytest.raises(ValueError, match="Two parts must have five rows"):
        train(built(**how), divides, size=ROWS)
