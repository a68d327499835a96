"""What the pack attaches to a user's objects."""

import copy

import keras
import pytest
import tensorflow as tf

from keras_paragrad import microbatch
from keras_paragrad.compat.state import MethodPatch, patch_of, patched, state_of
from keras_paragrad.engine.tracing.untouched import never_run, untouched

X, Y = keras.ops.zeros((4, 2)), keras.ops.zeros((4, 1))


def model_of():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class _Doubled(MethodPatch):
    def __init__(self, owner):
        super().__init__()
        self.owner = owner

    def patch_all(self):
        self.replace(self.owner, "call", lambda inputs: 2 * inputs)


OWNERS = {
    "model": model_of,
    "layer": lambda: model_of().layers[0],
    "optimizer": lambda: model_of().optimizer,
    "strategy": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    "function": lambda: lambda: None,
}


@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_it_is_one_attribute_and_gone_when_it_is_empty(owner):
    owner = owner()
    before = dict(vars(owner))
    state = state_of(owner)
    assert not state.attached and vars(owner) == before
    filled = {"gathers": True, "norms": (), "preparations": {int: 1}, "logged": frozenset("a"), "transform": keras}
    empty = {"gathers": False, "norms": None, "preparations": {}, "logged": frozenset(), "transform": None}
    for name, value in filled.items():
        setattr(state, name, value)
    assert set(vars(owner)) - set(before) == {"_keras_paragrad"}
    assert {name: getattr(state_of(owner), name) for name in filled} == filled == state.attached
    for name, value in empty.items():
        setattr(state_of(owner), name, value)
        assert getattr(state, name) == value
    assert vars(owner) == before


def test_what_has_no_attributes_has_none_of_ours():
    assert not state_of(len).warns


def test_a_copy_has_slots_of_its_own():
    layer = keras.layers.Dense(1)
    state_of(layer).preparations = {int: 1}
    other = copy.copy(layer)
    state_of(other).preparations = {}
    state_of(other).gathers = True
    assert state_of(layer).attached == {"preparations": {int: 1}}


@pytest.mark.parametrize("before", [False, True])
def test_untouched_puts_it_back_but_for_what_was_said(before):
    model = model_of()
    state = state_of(model)
    state.gathers = before
    attached = dict(state.attached)
    with untouched(model, never_run()):
        state.logged = frozenset("a")
        state.gathers = not before
    assert state.attached == {**attached, "logged": frozenset("a")}


def test_methods_are_replaced_until_the_last_has_left():
    layer = keras.layers.Dense(1)
    with patched(layer, lambda: _Doubled(layer)) as outer:
        with patched(layer, lambda: _Doubled(layer)) as inner:
            assert inner is outer is patch_of(layer, _Doubled)
        assert layer.call(1) == 2
    assert not {"call", "_keras_paragrad"} & set(vars(layer))


def test_neither_clones_nor_copies_nor_files_have_it(tmp_path):
    model = model_of()
    microbatch(model, 2)
    model.fit(X, Y, batch_size=4, verbose=0)
    assert state_of(model).step_builder
    model.save(tmp_path / "m.keras")
    others = [keras.models.clone_model(model), copy.deepcopy(model), keras.models.load_model(tmp_path / "m.keras")]
    assert not any(state_of(other).attached for other in others)
