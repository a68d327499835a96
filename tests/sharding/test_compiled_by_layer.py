"""Under XLA, layers whose weights are in shards are compiled one by one, and train as they do without it."""

import contextlib

import keras
import numpy as np
import pytest
from sample_models.recomputed_models import MODELS, check_equal, data_for, sgd

from keras_paragrad import DistributedFit, recompute
from keras_paragrad.engine.replicas import evaluation
from keras_paragrad.engine.step import gradient
from keras_paragrad.engine.training import train_step

L = keras.layers
CASES = [
    pytest.param(name, again, id=f"{name}{'-again' * again}")
    for name in MODELS
    for again in (False, True)
    # Keras makes the global seed's variable within the step, where no replica can.
    if name != "the global seed"
]
STATISTICS = "ignore:.*BatchNormalization (layers? normalizes? each replica's|normalizes each) part"
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def trained(make, *, jit, again=False, drawing=False):
    """A model in shards after training by XLA or without it, and what it showed."""
    options = {"shard": "parameters", "min_shard_bytes": 16, "weighting": "examples"}
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"], jit=jit, **options)
    keras.utils.set_random_seed(1)
    with dist.scope():
        model = make()
        model.compile(sgd(), "mse", metrics=["mae"])
    for layer in () if drawing else model._flatten_layers():
        # XLA draws other numbers.
        for name in ("rate", "dropout", "recurrent_dropout"):
            if isinstance(vars(layer).get(name), float):
                setattr(layer, name, 0.0)
    x, y = data_for(model)
    with recompute(model, ["block"]) if again else contextlib.nullcontext():
        history = dist.fit(model, x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        history["evaluated"] = model.evaluate(x, y, batch_size=8, verbose=0)
    return model, history


@pytest.fixture
def losses(monkeypatch):
    """The losses of the replicas' passes, which are where the forward pass ends."""
    found, regather = [], gradient.regather_in_backward
    monkeypatch.setattr(gradient, "regather_in_backward", lambda loss: (found.append(loss), regather(loss))[1])
    return found


def compiled_in(graph):
    """The calls of functions that XLA compiles."""
    calls = [each for each in graph.get_operations() if each.type in _CALLS]
    definitions = [graph._get_function(each.get_attr("f").name).cached_definition for each in calls]
    return [call for call, function in zip(calls, definitions, strict=True) if function.attr["_XlaMustCompile"].b]


# In `make test`, `test_losses_leave_what_is_compiled` has a layer of each kind.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Gradients do not exist", STATISTICS)
@pytest.mark.own_process(seconds=300)
@pytest.mark.parametrize(("name", "again"), CASES)
def test_trains_as_without(name, again, losses):
    found = trained(MODELS[name], jit=True, again=again)
    assert compiled_in(losses[0].graph)
    check_equal(found, trained(MODELS[name], jit=False))


@pytest.mark.own_process(seconds=300)
def test_gathered_weights_are_not_kept(losses):
    def make():
        inputs = keras.Input((8, 16))
        tied = L.Dense(16, "tanh", kernel_regularizer="l2")
        hidden = L.Conv1D(17, 3, padding="same")(tied(tied(inputs)))
        return keras.Model(inputs, L.EinsumDense("abc,cd->abd", (8, 1))(hidden))

    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"], jit=True, shard="parameters", min_shard_bytes=64)
    with dist.scope():
        model = make()
        model.compile("sgd", "mse")
    dist.fit(model, np.ones((8, 8, 16)), np.ones((8, 8, 1)), batch_size=8, verbose=0)
    graph = losses[0].graph
    places = {operation.name: place for place, operation in enumerate(graph.get_operations())}
    ends = min(places[loss.op.name] for loss in losses)
    sizes = {int(variable.shape.num_elements()) for variable in model.trainable_variables if len(variable.shape) > 1}
    # Tensors of activations have an open number of rows.
    weights = [
        output
        for operation in graph.get_operations()[:ends]
        for output in operation.outputs
        if output.dtype.is_floating and output.shape.num_elements() in sizes
    ]
    returned = [each for each in weights if each.op.type in _CALLS]
    # By each of four calls on two replicas; the backward pass reads none of them.
    assert len(returned) >= 4 * 2
    for each in weights:
        assert all(places[use.name] < ends or use.type.startswith("Shape") for use in each.consumers()), each


class Penalized(L.Dense):
    """Adds its loss in its call, which is compiled."""

    def call(self, inputs, training=None):
        outputs = super().call(inputs)
        self.add_loss(keras.ops.mean(keras.ops.square(outputs)))
        return outputs


@pytest.mark.own_process(seconds=300)
def test_losses_leave_what_is_compiled():
    def make():
        return keras.Sequential([keras.Input((8,)), Penalized(8, name="block"), Penalized(8), L.Dense(1)])

    # One runs again, the other doesn't.
    check_equal(trained(make, jit=True, again=True), trained(make, jit=False))


# What is drawn twice has to be drawn alike; XLA draws the same numbers in one function as in several.
@pytest.mark.long
@pytest.mark.filterwarnings(STATISTICS)
@pytest.mark.own_process(seconds=300)
@pytest.mark.parametrize("name", ["batch normalization and dropout", "training from the call around"])
def test_draws_the_same_masks_again(name, monkeypatch):
    found = trained(MODELS[name], jit=True, again=True, drawing=True)
    for module in (train_step, evaluation):
        monkeypatch.setattr(module, "compiles_each_layer", lambda model: False)
    check_equal(found, trained(MODELS[name], jit=True, drawing=True))
