"""Losses, targets and sample weights are matched with outputs as Keras matches them, or refused."""

import keras
import numpy as np
import pytest
from keras import layers
from oracles.whole_batches import example_gradients, gradient_error, norms_of
from sample_models.drawn_layers import randomize

from keras_paragrad import per_example_gradients, per_example_norms

ROWS = 5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 4)).astype("float32")
D, C = (RNG.normal(size=(ROWS, 1)).astype("float32") + shift for shift in (0, 10))
W, V = (RNG.uniform(0.5, 2, ROWS).astype("float32") for _ in "WV")
NAMES = {"d": "mse", "c": "mae"}


def two_heads(kind="list"):
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, "tanh")(inputs)
    d, c = layers.Dense(1, name="d")(hidden), layers.Dense(1, name="c")(hidden)
    model = keras.Model(inputs, [d, c] if kind == "list" else {"d": d, "c": c})
    randomize(model)
    return model


def by_keras(model, loss, y, sample_weight=None):
    """Each example's gradient of the loss of a model that is compiled with it."""
    model.compile("sgd", loss=loss)
    data = (y,) if sample_weight is None else (y, sample_weight)

    def own_loss(y_pred, *leaves):
        own_y, own_weight = (*keras.tree.pack_sequence_as(data, leaves), None)[:2]
        return model.compute_loss(y=own_y, y_pred=y_pred, sample_weight=own_weight)

    return example_gradients(model, X, own_loss, *keras.tree.flatten(data))


# How the outputs are nested, the losses, the targets, the weights, and what Keras gets where it takes other weights.
NESTINGS = {
    "names of a list": ("list", NAMES, {"d": D, "c": C}, None),
    "names of a list, in another order": ("list", {"c": "mae", "d": "mse"}, {"c": C, "d": D}, W),
    "targets by position": ("list", NAMES, [D, C], [W, V]),
    "losses by position": ("list", ["mse", "mae"], {"d": D, "c": C}, [W, V]),
    "tuples": ("list", ("mse", "mae"), (D, C), None),
    "one loss for all": ("list", "mse", [D, C], W),
    "a name picked by shapes": ("list", ["ce", "mae"], [(D > 0).astype("float32"), C], None),
    "no loss of an output": ("list", [None, "mae"], [D, C], None),
    "no target of an output without a loss": ("list", [None, "mae"], [C], None),
    "no loss of a named output": ("list", {"d": None, "c": "mae"}, {"d": D, "c": C}, W),
    "names": ("dict", NAMES, {"c": C, "d": D}, {"d": W, "c": V}),
    "losses of some names": ("dict", {"c": "mae"}, {"d": D, "c": C}, W),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("nesting", NESTINGS)
def test_each_loss_gets_the_arguments_that_keras_gives_it(nesting):
    kind, loss, y, weight = NESTINGS[nesting]
    model = two_heads(kind)
    theirs = by_keras(model, loss, y, weight)
    assert gradient_error(per_example_gradients(model, X, y, loss, weight), theirs) < 1e-6
    norms = per_example_norms(model, X, y, loss, weight, batch_size=2)
    assert np.abs(norms - norms_of(theirs)).max() < 1e-6 * norms.max()


def test_weights_by_name_and_targets_of_some_names_of_a_list():
    """Keras refuses the first, and takes the second by the alphabet."""
    model = two_heads()
    theirs = by_keras(model, ["mse", "mae"], [D, C], [W, V])
    named = per_example_gradients(model, X, {"d": D, "c": C}, NAMES, {"d": W, "c": V})
    assert gradient_error(named, theirs) < 1e-6
    inputs = keras.Input((4,))
    three = keras.Model(inputs, [layers.Dense(1, name=name)(inputs) for name in "zya"])
    losses = {"z": "mse", "y": None, "a": "mae"}
    theirs = by_keras(three, ["mse", None, "mae"], [D, D, C])
    assert gradient_error(per_example_gradients(three, X, {"a": C, "z": D}, losses), theirs) < 1e-6


def test_the_same_losses_by_position_and_by_name_are_two():
    """Both are compiled once, and neither is taken for the other."""
    model = two_heads()
    for loss in ({"c": "mse", "d": "mae"}, ["mse", "mae"], {"c": "mse", "d": "mae"}):
        assert gradient_error(per_example_gradients(model, X, [D, C], loss), by_keras(model, loss, [D, C])) < 1e-6


@pytest.mark.parametrize(
    ("loss", "y", "weight", "says"),
    [
        (NAMES, {"d": D, "x": C}, None, r"\['x'\] are not among the outputs \['d', 'c'\]"),
        ({"d": "mse"}, {"d": D, "c": C}, None, r"nested as \[\*, \*\], with the names \['d', 'c'\].*`loss` {'d': \*}"),
        (["mse", "mae", "mae"], [D, C], None, r"`loss` \[\*, \*, \*\]"),
        (["mse", "mae"], D, None, r"`y` \*"),
        (["mse", "mae"], [D, None], None, "The output 1 has a loss and no target"),
        (NAMES, [D, C], {"d": W, "y": V}, r"`sample_weight` {'d': \*, 'y': \*}"),
        ([None, None], [D, C], None, "No output has a loss"),
    ],
)
def test_what_does_not_fit_is_refused(loss, y, weight, says):
    with pytest.raises(ValueError, match=says):
        per_example_norms(two_heads(), X, y, loss, weight)


def test_one_hot_targets_of_a_sparse_loss_are_refused():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, "softmax")])
    says = r"targets of shape \(5, 3\) and .*\(5, 3\). For one-hot targets write loss='categorical_crossentropy'"
    with pytest.raises(ValueError, match=says):
        per_example_norms(model, X, np.eye(3)[[0, 1, 2, 0, 1]], "sparse_categorical_crossentropy")


@pytest.mark.parametrize("kind", [str, bytes, object])
def test_text_is_refused(kind):
    texts = np.array(["a", "b", "a", "b", "b"]).astype(kind)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    with pytest.raises(ValueError, match=r"`y` is .*must be arrays of numbers .*encode text, as in np.unique"):
        per_example_norms(model, X, texts, "mse")
    with pytest.raises(ValueError, match=r"`x` is .*must be arrays of numbers .*encode text, as in np.unique"):
        per_example_gradients(model, texts, D, "mse")
