"""Every rule gives what a forward and backward pass for each example gives."""

import os
import subprocess
import sys

import hypothesis
import keras
import pytest
from covering import examples
from drawn_layers import DRAWN, LayerCase, randomize, some_inputs
from every_example import check
from keras import layers

from keras_paragrad.per_example.rules import convolution, folded


@pytest.mark.parametrize("kind", DRAWN)
@hypothesis.given(data=hypothesis.strategies.data())
def test_a_rule_is_the_loop(kind, data):
    case: LayerCase = data.draw(DRAWN[kind])
    check(case.model(), case.inputs(), case.jit_compile, beside_plain=data.draw(hypothesis.strategies.booleans()))


# What half precision rounds, of a sum over a few positions: 10 bits of a float16, 7 of a bfloat16.
TOLERANCES = {"float64": 1e-6, "mixed_float16": 6e-3, "mixed_bfloat16": 5e-2, "bfloat16": 5e-2}
# Keras can't initialize recurrent weights in bfloat16.
RECURRENT = ("simple_rnn", "lstm", "gru")
CASES = [(kind, dtype) for dtype in TOLERANCES for kind in DRAWN if dtype != "bfloat16" or kind not in RECURRENT]


@pytest.mark.covering
@pytest.mark.parametrize(("kind", "dtype"), CASES)
@examples(2)
@hypothesis.given(data=hypothesis.strategies.data())
def test_a_rule_in_another_dtype(kind, dtype, data):
    case: LayerCase = data.draw(DRAWN[kind])
    # On CPUs, TensorFlow convolves with the channels first in float32 alone.
    hypothesis.assume("data_format" not in case.make.keywords)
    beside_plain = data.draw(hypothesis.strategies.booleans())
    check(case.model(dtype), case.inputs(dtype), case.jit_compile, TOLERANCES[dtype], beside_plain)


@examples(4)
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


@pytest.mark.parametrize("kind", ["conv1d", "conv2d", "depthwise1d", "depthwise2d", "separable2d"])
@hypothesis.given(data=hypothesis.strategies.data())
def test_a_convolution_folded_into_channels(kind, data):
    case: LayerCase = data.draw(DRAWN[kind])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folded, "CHUNK", data.draw(hypothesis.strategies.sampled_from([1, 300, folded.CHUNK])))
        patch.setattr(folded, "FEW_TAPS", data.draw(hypothesis.strategies.sampled_from([0, folded.FEW_TAPS])))
        patch.setattr(convolution.ConvolutionRule, "costs_less_folded", lambda rule, call: True)
        check(case.model(), case.inputs(), False, beside_plain=data.draw(hypothesis.strategies.booleans()))


@pytest.mark.parametrize("kind", ["conv2d", "depthwise2d"])
@hypothesis.given(data=hypothesis.strategies.data())
def test_a_convolution_with_taps_on_both_sides(kind, data):
    case: LayerCase = data.draw(DRAWN[kind])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "MANY_TAPS", 2)
        check(case.model(), case.inputs(), True, beside_plain=data.draw(hypothesis.strategies.booleans()))


def test_grouped_gradients_are_asked_for_where_they_exist():
    program = "from keras_paragrad.per_example.rules import folded; print(folded.has_grouped_gradients())"
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    printed = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True, timeout=120)
    assert printed.split()[-1] == "False"
