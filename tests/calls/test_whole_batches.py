"""Steps that need the whole batch take the step of one device, in slices and on replicas."""

import itertools

import numpy as np
import pytest
from sample_models.whole_batches import STEPS, fitted, made

from keras_paragrad import DistributedFit, microbatch


def compare(found, expected):
    """Weights, relative to the largest of all, and logs."""
    scale = max(np.abs(each).max(initial=1) for each in expected[0] if each.dtype.kind == "f")
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * scale)
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        # A value near zero is as far off as the weights that it is computed from.
        largest = np.abs(values).max()
        np.testing.assert_allclose(found[1][name], values, rtol=1e-5, atol=1e-6 * largest, err_msg=name)


@pytest.mark.few(0, "Clipped", "AddsLosses", "HasCounter", "Ragged")
@pytest.mark.parametrize("name", STEPS)
def test_in_slices(name):
    model = made(STEPS[name], jit_compile=False)
    with microbatch(model, 4):
        found = fitted(model)
    compare(found, fitted(made(STEPS[name], jit_compile=False)))


# With a last batch of two rows, of which each replica has one.
@pytest.mark.few(0, "Sam-None")
@pytest.mark.own_process
@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("name", STEPS)
def test_on_replicas(name, size):
    dist = DistributedFit("mirrored", devices=["CPU:0", "CPU:1"])
    with dist.scope():
        model = made(STEPS[name], jit_compile=False)
    if size:
        microbatch(model, size)
    found = fitted(model, lambda *data, **options: dist.fit(model, *data, **options))
    compare(found, fitted(made(STEPS[name], jit_compile=False)))


MODES = {"xla": {"jit_compile": True}, "eager": {"run_eagerly": True}, "several": {"steps_per_execution": 2}}


@pytest.mark.long
# XLA doesn't compile sums of ragged rows.
@pytest.mark.parametrize(("name", "mode"), sorted({*itertools.product(STEPS, MODES)} - {("Ragged", "xla")}))
def test_in_other_modes(name, mode):
    model = made(STEPS[name], **MODES[mode])
    microbatch(model, 4)
    compare(fitted(model), fitted(made(STEPS[name], **MODES[mode])))
