"""k micro-batches make the step of one large batch, whatever the optimizer, the sizes and the weights."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from oracles.whole_batches import largest_difference, train_on_whole_windows, windows
from runner.covering import examples
from sample_models.cases import REDUCTIONS, build_model, data_cases, optimizer_cases

from keras_paragrad import AccumulatingOptimizer, ExactAccumulation

TOLERANCE = 1e-6
MODES = {
    "plain": {},
    "xla": {"jit_compile": True},
    "several steps an execution": {"steps_per_execution": 3},
    "xla, several steps an execution": {"jit_compile": True, "steps_per_execution": 4},
    "eager": {"run_eagerly": True},
}
schedules = st.sampled_from([1, 2, 3, 4, [(0, 2), (1, 3)], [(0, 1), (2, 4), (3, 2)]])


def check(inner, data, steps, reduction, tail, epochs=2, strategy=None, **mode):
    accumulating = build_model(lambda: AccumulatingOptimizer(inner(), steps, tail=tail), reduction, strategy, **mode)
    accumulating.fit(data.dataset(), epochs=epochs, shuffle=False, verbose=0, callbacks=[ExactAccumulation()])
    whole = build_model(inner, reduction)
    schedule = accumulating.optimizer.schedule
    train_on_whole_windows(whole, windows(data.batches(), schedule.at, epochs, tail))
    assert accumulating.optimizer.iterations.numpy() == whole.optimizer.iterations.numpy()
    assert largest_difference(accumulating, whole) < TOLERANCE


@pytest.mark.parametrize(
    "mode",
    [
        # Those of several steps an execution have both.
        *(pytest.param(mode, marks=pytest.mark.long) for mode in ("plain", "xla")),
        "xla, several steps an execution",
        pytest.param("several steps an execution", marks=pytest.mark.grappler),
        pytest.param("eager", marks=pytest.mark.long),
    ],
)
def test_equals_whole_batches(mode):
    # XLA compiles a step for each size of a batch.
    @examples(1 if "xla" in mode else 2)
    @given(optimizer_cases, data_cases, schedules, st.sampled_from(REDUCTIONS), st.sampled_from(["flush", "drop"]))
    def equal(inner, data, steps, reduction, tail):
        check(inner, data, steps, reduction, tail, **MODES[mode])

    equal()
