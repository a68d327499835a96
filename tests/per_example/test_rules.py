"""Every rule gives what a forward and backward pass for each example gives."""

import functools
import runpy
import sys
from pathlib import Path

import hypothesis
import keras
import pytest
from keras import layers
from oracles.every_example import check
from runner.covering import examples
from sample_models import drawn_layers
from sample_models.drawn_layers import DRAWN, RULES, LayerCase, randomize, some_inputs

from keras_paragrad.exports import modules_of
from keras_paragrad.per_example import Generic, Rule, rules
from keras_paragrad.per_example import rule as rule_module
from keras_paragrad.per_example.rules import folded

LOOPS = [kind for kind, rule in RULES.items() if isinstance(rule, Generic)]


@pytest.mark.parametrize("kind", [kind for kind in DRAWN if kind not in LOOPS])
@examples(2)
@hypothesis.given(data=hypothesis.strategies.data())
def test_a_rule_is_the_loop(kind, data):
    case: LayerCase = data.draw(DRAWN[kind])
    check(case.model(), case.inputs(), case.jit_compile, beside_plain=data.draw(hypothesis.strategies.booleans()))


# One rule for all, so that a few cases of each do.
@pytest.mark.few(3)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind in ("ConvLSTM1D", "ConvLSTM3D"))) for kind in LOOPS]
)
@examples(2)
@hypothesis.given(data=hypothesis.strategies.data())
def test_the_generic_rule_is_the_loop(kind, data):
    case: LayerCase = data.draw(DRAWN[kind])
    check(case.model(), case.inputs(), case.jit_compile, beside_plain=data.draw(hypothesis.strategies.booleans()))


# What half precision rounds, of a sum over a few positions: 10 bits of a float16, 7 of a bfloat16.
TOLERANCES = {"float64": 1e-6, "mixed_float16": 6e-3, "mixed_bfloat16": 5e-2, "bfloat16": 5e-2}
# Keras can't initialize recurrent weights in bfloat16.
RECURRENT = [kind for kind in LOOPS if kind != "TimeDistributed"]
CASES = [
    # As a step of each, and the loop, are in the other three.
    pytest.param(kind, dtype, marks=[pytest.mark.long] * (kind in LOOPS and kind not in ("SimpleRNN", "LSTM", "GRU")))
    for dtype in TOLERANCES
    for kind in DRAWN
    if dtype != "bfloat16" or kind not in RECURRENT
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("kind", "dtype"), CASES)
@examples(1)
@hypothesis.given(data=hypothesis.strategies.data())
def test_a_rule_in_another_dtype(kind, dtype, data):
    case: LayerCase = data.draw(DRAWN[kind])
    # On CPUs, TensorFlow convolves with the channels first in float32 alone.
    hypothesis.assume(getattr(case.make(), "data_format", None) != "channels_first")
    beside_plain = data.draw(hypothesis.strategies.booleans())
    check(case.model(dtype), case.inputs(dtype), case.jit_compile, TOLERANCES[dtype], beside_plain)


@examples(2)
@hypothesis.given(
    layer=hypothesis.strategies.sampled_from([layers.LSTM, layers.GRU, layers.SimpleRNN, layers.LayerNormalization]),
    length=hypothesis.strategies.integers(1, 6),
    jit_compile=hypothesis.strategies.booleans(),
)
def test_a_mask(layer, length, jit_compile):
    words = keras.Input((length,), dtype="int32")
    embedded = layers.Embedding(4, 3, mask_zero=True)(words)
    model = keras.Model(words, layer()(embedded) if layer is layers.LayerNormalization else layer(3)(embedded))
    randomize(model)
    check(model, some_inputs((5, length), 3), jit_compile)


def with_channels_last(case):
    """The same case as one that can be folded."""
    if case.make().data_format == "channels_last":
        return case
    channels, *sizes = case.shape
    return case._replace(make=functools.partial(case.make, data_format="channels_last"), shape=(*sizes, channels))


@pytest.mark.parametrize("kind", ["DepthwiseConv1D", "DepthwiseConv2D", "SeparableConv2D"])
@examples(2)
@hypothesis.given(data=hypothesis.strategies.data())
def test_a_convolution_folded_into_channels(kind, data):
    case: LayerCase = with_channels_last(data.draw(DRAWN[kind]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folded, "CHUNK", data.draw(hypothesis.strategies.sampled_from([1, 300, folded.CHUNK])))
        check(case.model(), case.inputs(), False, beside_plain=data.draw(hypothesis.strategies.booleans()))


TABLE = "docs/internals/rules_table.py"


def rules_table():
    return runpy.run_path(str(Path(__file__).parents[2] / TABLE))


def test_the_documentation_has_each_rule():
    made = rules_table()
    page = made["PAGE"].read_text()
    assert made["with_table"](page) == page, f"Run: PYTHONPATH=$PWD .venv/bin/python {TABLE}"


NEW_RULE = """
import keras

from keras_paragrad.per_example.rule import register_rule
from keras_paragrad.per_example.rule import Rule, RuleCase


class Scale(keras.layers.Layer):
    def build(self, input_shape):
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * self.scale


@register_rule(Scale)
class ScaleRule(Rule):
    formula = "a product"
    calls = 0

    def case(self, layer, pick):
        return RuleCase(layer, pick([(3,), (2,)]))

    def gradients(self, call):
        ScaleRule.calls += 1
        return [call.input * call.cotangent]
"""


def test_a_file_is_all_that_a_rule_takes(tmp_path, monkeypatch):
    (tmp_path / "scale.py").write_text(NEW_RULE)
    before = set(modules_of(rules))
    monkeypatch.setattr(rules, "__path__", [*rules.__path__, str(tmp_path)])
    monkeypatch.setattr(rule_module, "_RULES", dict(rule_module._RULES))
    try:
        (added,) = set(modules_of(rules)) - before
        layer = added.Scale
    finally:
        sys.modules.pop(f"{rules.__name__}.scale", None)
    assert "Scale" in drawn_layers.drawn()
    rule = rule_module._RULES[layer]
    case = LayerCase(*rule.case(layer, lambda values: values[0]))
    check(case.model(), case.inputs())
    assert type(rule).calls
    assert "| Scale | a product | no |" in rules_table()["table"]()


def test_a_rule_without_a_case_or_a_formula_says_so(monkeypatch):
    with pytest.raises(NotImplementedError, match=r"Rule has no test case for Dense\. Implement case\(layer, pick\)"):
        Rule().case(layers.Dense, lambda values: values[0])
    monkeypatch.setattr(rule_module, "_RULES", {layers.Dense: Rule()})
    with pytest.raises(ValueError, match=r"Rule has no row\. Set its attribute `formula`"):
        rules_table()["table"]()


def test_every_module_of_rules_is_imported():
    files = {path.stem for path in Path(rules.__file__).parent.glob("*.py")} - {"__init__"}
    assert files <= {name.rpartition(".")[2] for name in sys.modules if name.startswith(f"{rules.__name__}.")}
