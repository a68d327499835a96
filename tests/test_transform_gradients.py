"""`transform_gradients`: its own state, saved and resumed, in any order and number, on whole updates only."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracles.transforms import BATCH, EPOCHS, MICRO_BATCH, columns, gradients_of_whole_batches, inner, made, scaled

from keras_paragrad import AccumulatingOptimizer, DistributedFit, ExactAccumulation, microbatch, transform_gradients
from keras_paragrad.privacy import make_private
from keras_paragrad.storage.model_variables import training_variables

# Keras says so of the weight without a gradient, and transforms get the sum of an embedding's lookups.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*the gradients of all lookups of a row are summed:UserWarning"),
]


class Remembering:
    """Adds the sum of all earlier gradients, and a number that grows: what is called twice or in parts shows."""

    def init(self, variables):
        return {"sums": [tf.zeros(each.shape, each.dtype) for each in variables], "updates": tf.constant(1)}

    def update(self, gradients, state, variables):
        sums = [gradient + before for gradient, before in zip(gradients, state["sums"], strict=True)]
        grown = [each + 0.01 * tf.cast(state["updates"], each.dtype) for each in sums]
        return grown, {"sums": sums, "updates": state["updates"] + 1}


def doubled(gradients, variables):
    return [2 * gradient for gradient in gradients]


def by_hand(*functions, epochs=EPOCHS):
    """The loop on one device, whose functions take gradients and variables, or have a state."""
    model = made(inner)
    states: list[Any] = [f.init(model.trainable_variables) if hasattr(f, "init") else None for f in functions]
    variables = model.trainable_variables
    model.optimizer.build(variables)
    for before in gradients_of_whole_batches(model, epochs):
        gradients = [tf.zeros(v.shape) if g is None else g for g, v in zip(before, variables, strict=True)]
        for place, f in enumerate(functions):
            if states[place] is None:
                gradients = f(gradients, variables)
            else:
                gradients, states[place] = f.update(gradients, states[place], variables)
        used = [(new, v) for new, g, v in zip(gradients, before, variables, strict=True) if g is not None]
        model.optimizer.apply(*map(list, zip(*used, strict=True)))
    return model.get_weights(), states


def check(model, expected):
    for ours, theirs in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def fit(model, dist=None, **options):
    x, y, sample_weight = columns()
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0, **options}
    (dist.fit if dist else type(model).fit)(model, x, y, sample_weight=sample_weight, **options)


def accumulating():
    return AccumulatingOptimizer(inner(), BATCH // MICRO_BATCH)


@pytest.mark.few(3)
@pytest.mark.parametrize("way", ["plain", "sliced", "accumulated", "scaled", "XLA", "eager"])
def test_the_state_advances_once_for_each_update(way):
    optimizer = {"accumulated": accumulating, "scaled": scaled(inner)}.get(way, inner)
    model = made(optimizer, run_eagerly=way == "eager", jit_compile=way == "XLA")
    handle = transform_gradients(model, Remembering())
    if way == "sliced":
        microbatch(model, MICRO_BATCH)
    accumulated = {"batch_size": MICRO_BATCH, "callbacks": [ExactAccumulation()]} if way == "accumulated" else {}
    fit(model, **accumulated)
    expected, (state,) = by_hand(Remembering())
    check(model, expected)
    assert int(handle.state["updates"]) == int(state["updates"])
    # Backups hold it.
    assert any(each is handle.state["updates"] for each in training_variables(model)["optimizer"])
    handle.undo()
    assert not [name for name in vars(model.optimizer) if name.startswith("gradient_transform")]


@pytest.mark.own_process(seconds=240)
def test_on_replicas():
    dist = DistributedFit(devices=["CPU:0", "CPU:1"], jit=False)
    expected, _ = by_hand(Remembering())
    model = made(inner, dist)
    transform_gradients(model, Remembering())
    fit(model, dist)
    check(model, expected)
    model = made(accumulating, dist)
    transform_gradients(model, Remembering())
    fit(model, dist, batch_size=MICRO_BATCH, callbacks=[ExactAccumulation()])
    check(model, expected)


@pytest.mark.long
def test_several_run_in_their_order():
    model = made(inner, run_eagerly=True)
    first, second = transform_gradients(model, Remembering()), transform_gradients(model, doubled)
    fit(model)
    check(model, by_hand(Remembering(), doubled)[0])
    first.undo()
    start = made(inner)
    model.set_weights(start.get_weights())
    model.compile(inner(), "mse", run_eagerly=True)
    fit(model)
    check(model, by_hand(doubled)[0])
    second.undo()
    assert "make_train_function" not in vars(model) and "apply" not in vars(model.optimizer)


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["weights.h5", "checkpoint"])
def test_the_state_is_saved_in_the_middle_of_a_window(form, tmp_path):
    def prepared():
        model = made(accumulating, run_eagerly=True)
        return model, transform_gradients(model, Remembering())

    def trained(model, rows):
        # Without the callback, windows go on in the next fit.
        x, y, _ = columns()
        for start in rows:
            model.train_on_batch(x[start : start + MICRO_BATCH], y[start : start + MICRO_BATCH])

    undisturbed, _ = prepared()
    trained(undisturbed, range(0, 18, MICRO_BATCH))
    model, _ = prepared()
    trained(model, range(0, 12, MICRO_BATCH))
    other, handle = prepared()
    other.optimizer.build(other.trainable_variables)
    if form == "weights.h5":
        model.save_weights(tmp_path / "a.weights.h5")
        other.load_weights(tmp_path / "a.weights.h5")
    else:
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "a"))
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    assert int(handle.state["updates"]) == 2
    trained(other, range(12, 18, MICRO_BATCH))
    check(other, undisturbed.get_weights())


def test_a_file_without_state_leaves_it_as_it_begins(tmp_path):
    made(inner).save_weights(tmp_path / "a.weights.h5")
    model = made(inner)
    handle = transform_gradients(model, Remembering())
    model.load_weights(tmp_path / "a.weights.h5")
    assert int(handle.state["updates"]) == 1


@pytest.mark.long
def test_after_the_noise_of_a_private_model():
    built = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    private = make_private(built, clip_norm=1.0, expected_batch_size=4, delta=1e-3, noise_multiplier=1.0)
    private.compile("sgd", "mse", run_eagerly=True)
    before = built.get_weights()
    handle = transform_gradients(private, lambda gradients, variables: [tf.zeros_like(each) for each in gradients])
    private.fit(x, y, verbose=0)
    for ours, theirs in zip(built.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert private.privacy.updates == 2

    # The same noise, with and without a transform, would show what it hides.
    private.set_seed(1)
    with pytest.raises(ValueError, match=r"Leave out seed=\.\.\., or call undo\(\)"):
        private.fit(x, y, verbose=0)
    handle.undo()
    private.fit(x, y, verbose=0)
    assert private.privacy.updates == 4
    assert np.abs(built.get_weights()[0] - before[0]).max() > 1e-3


class Bad:
    def init(self, variables):
        return {"a": tf.zeros(2)}

    def update(self, gradients, state, variables):
        return gradients, {"a": tf.zeros(3)}


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda gradients, variables: gradients[1:], r"Return a list of 6 gradients, .*5 items"),
        (lambda gradients, variables: [tf.reshape(each, [-1]) for each in gradients], "tf.reshape"),
        (lambda gradients, variables: [tf.cast(each, "float64") for each in gradients], "tf.cast"),
        (lambda gradients: gradients, "`f` fails on symbolic gradients"),
        (Bad(), "Return state of the shapes"),
        (3, "init"),
    ],
)
def test_what_f_returns_is_checked_before_training(f, message):
    model = made(inner)
    # Also of the weight without a gradient.
    f = f if not callable(f) else f
    with pytest.raises(ValueError, match=message):
        transform_gradients(model, f)
    assert "make_train_function" not in vars(model)


def test_refusals_name_what_to_write():
    with pytest.raises(ValueError, match="keras.Input"):
        transform_gradients(keras.Sequential([keras.layers.Dense(1)]), doubled)
    with pytest.raises(ValueError, match=r"model.compile\(...\)"):
        transform_gradients(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), doubled)
    model = made(lambda: inner(gradient_accumulation_steps=2))
    with pytest.raises(ValueError, match=r"AccumulatingOptimizer\(optimizer, steps=2\)"):
        transform_gradients(model, doubled)
    assert "make_train_function" not in vars(model)
    model = made(inner, run_eagerly=True)
    model.layers[-1].trainable = False
    model.compile(inner(), "mse", run_eagerly=True)
    transform_gradients(model, Remembering())
    model.layers[-1].trainable = True
    model.compile(inner(), "mse", run_eagerly=True)
    with pytest.raises(ValueError, match=r"undo\(\) it, and call it again"):
        fit(model)


@pytest.mark.own_process(seconds=240)
def test_shards_are_refused():
    devices = ["CPU:0", "CPU:1"]
    sharded = DistributedFit("mirrored", devices=devices, jit=False, shard="parameters", min_shard_bytes=1)
    with pytest.raises(ValueError, match="shard=None"):
        transform_gradients(made(inner, sharded), doubled)


def random_signs(gradients, variables):
    return [gradient * tf.sign(tf.random.normal(gradient.shape)) for gradient in gradients]


class Counting:
    """Assigns a variable of its own."""

    def __init__(self):
        self.count, self.calls = tf.Variable(0), 0

    def __call__(self, gradients, variables):
        self.calls += 1
        self.count.assign_add(1)
        return gradients


@pytest.mark.own_process
@pytest.mark.parametrize(("make", "kind"), [(lambda: random_signs, "RandomStandardNormal"), (Counting, "AssignAdd")])
def test_what_differs_between_replicas_is_refused(make, kind):
    model = made(inner, DistributedFit(devices=["CPU:0", "CPU:1"], jit=False))
    with pytest.raises(ValueError, match=rf"{kind}.*each replica.*stateless_normal"):
        transform_gradients(model, make())


def test_the_trial_leaves_no_trace():
    counting = Counting()
    transform_gradients(made(inner), counting)
    assert (counting.calls, int(counting.count)) == (0, 0)


@pytest.mark.own_process(seconds=240)
def test_meshes_are_refused():
    meshed = DistributedFit(mesh={"batch": 1, "model": 1}, layout="auto")
    model = made(inner, meshed)
    transform_gradients(model, doubled)
    with pytest.raises(ValueError, match="without mesh="):
        fit(model, meshed)
