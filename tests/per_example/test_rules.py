"""Every rule gives what a forward and backward pass for each example gives."""

import hypothesis
import pytest
from drawn_layers import DRAWN, LayerCase
from every_example import check


@pytest.mark.parametrize("kind", DRAWN)
@hypothesis.settings(max_examples=8)
@hypothesis.given(data=hypothesis.strategies.data())
def test_a_rule_is_the_loop(kind, data):
    case: LayerCase = data.draw(DRAWN[kind])
    check(case.model(), case.inputs(), case.jit_compile)
