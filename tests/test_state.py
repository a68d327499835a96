"""What the package attaches to a user's objects."""

import copy
import re
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import keras_paragrad
from keras_paragrad import microbatch
from keras_paragrad.compat.state import LOGGED, MethodPatch, Slot, attached, patch_of, patched
from keras_paragrad.engine.tracing.untouched import never_run, untouched
from keras_paragrad.storage.model_variables import STEP_BUILDER

FLAG, PAIR, BY_KIND = Slot[bool]("flag", False), Slot[tuple | None]("pair", None), Slot[dict]("by_kind", {})
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
    assert not attached(owner) and vars(owner) == before
    slots = (FLAG, PAIR, BY_KIND, LOGGED)
    filled, empty = (True, (), {int: 1}, frozenset("a")), (False, None, {}, frozenset())
    for slot, value in zip(slots, filled, strict=True):
        slot.attach(owner, value)
    assert set(vars(owner)) - set(before) == {"_keras_paragrad"}
    assert tuple(slot.of(owner) for slot in slots) == filled == tuple(attached(owner).values())
    for slot, value in zip(slots, empty, strict=True):
        slot.attach(owner, value)
        assert slot.of(owner) == value
    assert vars(owner) == before


def test_what_has_no_attributes_has_none_of_ours():
    assert not FLAG.of(len)


def test_a_copy_has_slots_of_its_own():
    layer = keras.layers.Dense(1)
    BY_KIND.attach(layer, {int: 1})
    other = copy.copy(layer)
    BY_KIND.attach(other, {})
    FLAG.attach(other, True)
    assert attached(layer) == {"by_kind": {int: 1}}


@pytest.mark.parametrize("before", [False, True])
def test_untouched_puts_it_back_but_for_what_was_said(before):
    model = model_of()
    FLAG.attach(model, before)
    values = dict(attached(model))
    with untouched(model, never_run()):
        LOGGED.attach(model, frozenset("a"))
        FLAG.attach(model, not before)
    assert attached(model) == {**values, "logged": frozenset("a")}


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
    assert STEP_BUILDER.of(model)
    model.save(tmp_path / "m.keras")
    others = [keras.models.clone_model(model), copy.deepcopy(model), keras.models.load_model(tmp_path / "m.keras")]
    assert not any(attached(other) for other in others)


def test_each_slot_has_a_name_of_its_own():
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(keras_paragrad.__file__).parent.rglob("*.py"))
    names = re.findall(r'Slot\[.*\]\("(\w+)"', sources)
    assert names and len(names) == len(set(names)) == sources.count("= Slot[")
