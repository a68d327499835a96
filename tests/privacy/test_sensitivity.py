"""An example changes the sum of an update by the clip norm at most, whatever is in it."""

import keras
import numpy as np
import pytest
from sample_models.drawn_layers import randomize, some_inputs
from sample_models.one_of_each import RULES

from keras_paragrad.privacy import make_private

ROWS, CLIP = 6, 0.05
VALUES = {"ordinary": None, "huge": 1e30, "infinite": np.inf, "NaN": np.nan}
# As many in every run as there are values; the others take as long as all of these.
OFTEN = [("dense", "NaN"), ("convolution", "infinite"), ("layer normalization", "huge"), ("no rule", "ordinary")]
CASES = [
    pytest.param(kind, value, marks=[pytest.mark.long] * ((kind, value) not in OFTEN))
    for kind in RULES
    if kind != "batch normalization"
    for value in VALUES
]


def after_an_update(kind, value, counts, policy="float32"):
    """The weights before an update of all rows, and after it, with the last row or without."""
    shape, layer = RULES[kind]
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    try:
        model = keras.Sequential([keras.Input(shape), layer(), keras.layers.Flatten()])
    finally:
        keras.config.set_dtype_policy("float32")
    randomize(model)
    x = some_inputs((ROWS, *shape))
    x[-1] = x[-1] if value is None else value
    weights = np.array([1.0] * (ROWS - 1) + [float(counts)], "float32")
    # All rows are drawn, and the noise is below rounding.
    private = make_private(model, clip_norm=CLIP, noise_multiplier=1e-9, expected_batch_size=ROWS, delta=1e-3, seed=0)
    private.compile(keras.optimizers.SGD(1.0), "mse", run_eagerly=True)
    before = model.get_weights()
    private.fit(x, np.full(model(x[:ROWS]).shape, 3.0, "float32"), sample_weight=weights, verbose=0)
    return before, model.get_weights()


@pytest.mark.parametrize(("kind", "value"), CASES)
def test_one_example_counts_for_the_clip_norm_at_most(kind, value):
    value = VALUES[value]
    before, without = after_an_update(kind, value, counts=False)
    _, beside = after_an_update(kind, value, counts=True)
    moved = np.sqrt(sum(np.sum((one - other) ** 2) for one, other in zip(before, without, strict=True)))
    changed = np.sqrt(sum(np.sum((one - other) ** 2) for one, other in zip(beside, without, strict=True)))
    assert 0 < moved * ROWS <= (ROWS - 1) * CLIP * (1 + 1e-5)
    # Each weight is rounded once it is changed, to parts of its own size.
    assert changed * ROWS <= CLIP * (1 + 1e-5) + ROWS * 1e-6
    if value is not None and not np.isfinite(value):
        assert changed == 0
    elif value is None:
        assert changed > 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dense", "convolution", "attention"])
def test_half_precision_keeps_the_bound(kind):
    before, without = after_an_update(kind, None, counts=False, policy="mixed_bfloat16")
    _, beside = after_an_update(kind, None, counts=True, policy="mixed_bfloat16")
    changed = np.sqrt(sum(np.sum((one - other) ** 2) for one, other in zip(beside, without, strict=True)))
    assert 0 < changed * ROWS <= CLIP * (1 + 1e-5) + ROWS * 1e-6
