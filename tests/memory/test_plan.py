"""What fits: how ways to train are estimated, chosen and tried, and what is refused."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from trainings.planned_models import ROWS, X, Y, contrastive, convolutional, deep, exactly, recurrent, whole

from keras_paragrad import microbatch, recompute
from keras_paragrad.flops import flops_of_operation
from keras_paragrad.memory import estimate_memory
from keras_paragrad.memory import plan as plans
from keras_paragrad.memory.breakdown import SHARDS, breakdowns_of
from keras_paragrad.memory.cost import Cost, Speed, cost_of
from keras_paragrad.memory.plan import Choice, MemoryPlan, choose, plan_memory
from keras_paragrad.memory.recomputed_segments import cut_for_least_memory
from keras_paragrad.memory.traced_step import traced_steps
from keras_paragrad.memory.trial import CannotTryError, Measured

pytestmark = pytest.mark.usefixtures("same_speed")


@pytest.mark.parametrize("made", [deep, recurrent, convolutional, contrastive])
def test_one_trace_gives_the_memory_of_any_batch(made):
    model = made()
    for rows, step in zip((96, 40, 7), traced_steps(model, [96, 40, 7]), strict=True):
        (alone,) = traced_steps(model, [rows])
        ours, theirs = breakdowns_of(model, step, 1)[0], breakdowns_of(model, alone, 1)[0]
        assert ours.total == pytest.approx(theirs.total, rel=0.02 if made is recurrent else 1e-4)


def test_slices_are_estimated_with_what_they_hold(ways, no_graph):
    model = deep()
    microbatch(model, ROWS // 4)
    sliced = breakdowns_of(model, traced_steps(model, [ROWS])[0], 1)[0]
    (estimated,) = [each.estimated.bytes for each in ways.candidates if each.choice == Choice(slices=4)]
    assert estimated == pytest.approx(sliced.total, rel=0.02)


def test_costs_count_products_and_loops():
    # A product forward, one for its weight and none for its input, of 2 x rows x inputs x outputs FLOPs each.
    dense = keras.Sequential([keras.Input((32,)), keras.layers.Dense(16)])
    dense.compile("sgd", "mse")
    for rows, step in zip((10, 20), traced_steps(dense, [10, 20], None, flops_of_operation), strict=True):
        assert cost_of(step)[0].flops == 2 * (2 * rows * 32 * 16)
    # Of products of all rows with all rows, there are four times as many.
    few, many = (cost_of(step)[0] for step in traced_steps(contrastive(), [10, 20], None, flops_of_operation))
    assert 2 * few.flops < many.flops < 4 * few.flops
    costs = []
    for steps in (5, 50):
        model = keras.Sequential([keras.Input((steps, 8)), keras.layers.LSTM(16)])
        model.compile("sgd", "mse")
        costs.append(cost_of(traced_steps(model, [4], None, flops_of_operation)[0])[0])
    assert costs[1].operations > 5 * costs[0].operations
    assert costs[1].flops > 5 * costs[0].flops


def choosing(ways, device_bytes, trial=None, *, sliced=True):
    """A plan that has chosen, without the trace."""
    plan = MemoryPlan("deep", ROWS, 1, device_bytes)
    plan.recomputed, plan.candidates = (
        ways.recomputed,
        [dataclasses.replace(each, why_not="") for each in ways.candidates],
    )
    if not sliced:
        plan.candidates = [each for each in plan.candidates if each.choice.slices == 1]
    choose(plan, trial and (lambda: trial), lambda line: None)
    return plan


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_plan_and_the_estimate_state_one_number(replicas):
    estimate = estimate_memory(deep(), ROWS, replicas)
    plan = plan_memory(deep(), ROWS, 2**40, None, replicas=replicas, shards=SHARDS)
    stated = {each.choice.shard: each.estimated.bytes for each in plan.candidates if each.choice.slices == 1}
    assert stated == {column.shard: pytest.approx(column.total, rel=1e-3) for column in estimate.columns}
    assert estimate[None].graph > 2**25


def test_a_model_that_fits_is_not_tried():
    def begin(spec):
        raise AssertionError("it fits by far")

    plan = plan_memory(deep(), ROWS, 2**34, begin)
    assert plan.chosen in plan.candidates and plan.chosen.choice == Choice()
    assert plan.in_words() == "as it is" and plan.trials == 0


@pytest.mark.long
def test_on_several_devices_too(monkeypatch):
    # Updates in shards take less time.
    plan = plan_memory(deep(), ROWS, 2**34, None, replicas=2, shards=SHARDS)
    assert plan.chosen.choice == Choice()
    assert min(plan.candidates, key=lambda each: each.estimated.seconds).choice.shard is not None
    monkeypatch.setattr(plans, "_CERTAIN", 0.0)
    plan = plan_memory(deep(), ROWS, 2**34, lambda spec: exactly, replicas=2, shards=SHARDS)
    assert plan.chosen is plan.candidates[0] and plan.chosen.choice == Choice() and plan.trials == 1


def test_the_fastest_that_fits_is_chosen(ways):
    assert {each.choice.recompute for each in ways.candidates} >= {None, "auto"}
    for budget in (0.7, 0.4, 0.3):
        limit = int(budget * whole(ways))
        plan = choosing(ways, limit, exactly)
        fitting = [each for each in plan.candidates if each.estimated.bytes <= limit]
        assert plan.chosen.choice == min(fitting, key=lambda each: each.estimated.seconds).choice
        assert plan.trials == 1 and plan.chosen.measured == plan.chosen.estimated
        shown = str(plan)
        assert "tried, chosen" in shown and "estimated, too much" in shown
        (chosen,) = [each for each in plan.to_dict()["candidates"] if each["chosen"]]
        assert chosen["choice"]["slices"] == plan.chosen.choice.slices and chosen["measured"]["bytes"] <= limit


@pytest.mark.parametrize("ended", [True, False])
def test_what_takes_too_much_is_followed_by_what_takes_less(ways, ended):
    tried = []

    def trial(candidate):
        tried.append(candidate)
        # Takes a tenth more than estimated. If that is too much, it was ended at the limit, or showed it in the end.
        taken = 1.1 * candidate.estimated.bytes
        return None if ended and taken > limit else Measured(int(taken), 1.0)

    # The estimate of the fastest fits by a hair.
    limit = ways.candidates[0].estimated.bytes + 1
    plan = choosing(ways, limit, trial)
    assert plan.trials == len(tried) == 2 and plan.chosen.choice == tried[-1].choice
    assert plan.chosen.measured.bytes <= limit and tried[1].estimated.bytes < 0.9 * tried[0].estimated.bytes
    assert plan.candidates[0].why_not == "too much"


def test_batches_that_are_not_cut_are_recomputed(ways):
    def trial(candidate):
        if candidate.choice.slices > 1:
            raise CannotTryError("its loss can't be divided")
        return candidate.estimated

    plan = choosing(ways, int(0.8 * whole(ways)), trial)
    assert plan.chosen.choice.slices == 1 and plan.chosen.choice.recompute
    assert plan.left_out == ["No slices: its loss can't be divided."]
    assert any(each.why_not == "can't be cut into slices" for each in plan.candidates)


def test_what_cannot_be_tried_is_estimated(ways, caplog):
    def trial(candidate):
        raise CannotTryError("it has no config")

    plan = choosing(ways, int(1.2 * whole(ways)), trial, sliced=False)
    assert plan.chosen.choice.recompute and plan.chosen.measured is None
    assert (
        "relies on the memory estimate for 'deep' alone, and fills at most 80% of the memory: it has no config."
        in caplog.text
    )
    assert choosing(ways, int(1.3 * whole(ways)), trial).chosen.choice == Choice()


def test_what_fails_in_any_trial_says_nothing_of_slices(ways):
    def trial(candidate):
        raise CannotTryError("it has no config")

    plan = choosing(ways, int(0.5 * whole(ways)), trial)
    assert plan.chosen.choice.slices > 1 and plan.left_out == []
    assert not any("slices" in candidate.why_not for candidate in plan.candidates)


def test_what_never_fits_is_refused(ways, no_graph):
    least = min(each.estimated.bytes for each in ways.candidates)
    with pytest.raises(ValueError, match=r"A batch of 512 of 'deep' doesn't fit in .* on each of 1 device\. The least"):
        choosing(ways, least // 2)
    with pytest.raises(ValueError, match="and more in a trial. Use more devices, an optimizer that keeps less, such"):
        choosing(ways, int(1.1 * least), lambda candidate: None)
    # Batches that AccumulatingOptimizer adds up take as much as slices, which were tried.
    smaller = deep()
    smaller.compile("sgd", "mse")
    assert plan_memory(smaller, ROWS, int(0.9 * least), lambda spec: exactly).chosen is not None
    with pytest.raises(ValueError, match=r"Use more devices, or a smaller batch\.$"):
        plan_memory(deep(), ROWS, least // 2, None, no_slices="its rows belong together")


def test_what_takes_less_than_estimated_is_tried_before_it_is_refused(ways):
    least = min(ways.candidates, key=lambda each: each.estimated.bytes)
    limit = int(0.9 * least.estimated.bytes)
    plan = choosing(ways, limit, lambda candidate: Measured(candidate.estimated.bytes // 2, 1.0))
    assert plan.chosen.choice == least.choice and plan.trials == 1


def test_what_one_trial_takes_besides_does_not_refuse_all_others(ways):
    limit, tried = whole(ways) + 1, []

    def off_at_first(candidate):
        tried.append(candidate)
        return Measured(2 * limit if len(tried) == 1 else candidate.estimated.bytes, 1.0)

    plan = choosing(ways, limit, off_at_first)
    assert plan.trials == 2 and plan.chosen.choice == tried[1].choice != tried[0].choice


def test_chosen_by_the_estimate_alone_it_may_run_out(ways, caplog):
    least = min(each.estimated.bytes for each in ways.candidates)
    assert choosing(ways, int(1.1 * least)).chosen is not None
    assert "A step of deep may run out of memory: it is estimated to take" in caplog.text


@pytest.mark.long
def test_all_recomputes_no_less_than_what_pays():
    model = deep()
    pays, every = (
        [part.name for part, again in cut_for_least_memory(model, where_it_pays=pays).segments if again]
        for pays in (True, False)
    )
    assert len(every) >= len(pays) > 0
    with pytest.raises(ValueError, match="`every` and `layers` both say what to recompute"):
        recompute(model, "all", every=2)
    plain = deep()
    with recompute(model, "all"):
        model.fit(X, Y, batch_size=128, shuffle=False, verbose=0)
    plain.fit(X, Y, batch_size=128, shuffle=False, verbose=0)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


class OfBlocks(keras.Model):
    """Its order is not known, so that `recompute(model)` can't cut it."""

    def __init__(self):
        super().__init__()
        self.blocks = [keras.layers.Dense(8, "gelu", name=f"block_{index}") for index in range(3)]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_layers_of_a_subclassed_model_are_named_to_recompute_them():
    model = OfBlocks()
    model(np.ones((2, 8)))
    model.compile("sgd", "mse")
    spec = tuple(tf.TensorSpec((None, 8)) for _ in range(2))
    with pytest.raises(ValueError, match=r"No recomputation: .* as in layers=\[\"block_0\", \"block_1\"\]"):
        plan_memory(model, 4, 2**10, None, batch_spec=spec)
    with recompute(model, ["block_0", "block_1"]):
        pass


def test_the_verdict_says_what_to_write(no_graph):
    model = deep()
    whole = estimate_memory(model, ROWS, 4)
    assert whole.verdict is None and "Fits" not in str(whole)

    def verdict(of, share):
        of.device_bytes = int(share * of[None].total / 0.8)
        return of.verdict

    assert verdict(whole, 1.01).endswith("per device as it is.")
    assert verdict(whole, 0.97).endswith('with DistributedFit(shard="optimizer").')
    alone = estimate_memory(model, ROWS, device_bytes=2**40)
    assert alone.verdict == "Fits in 1 TiB per device as it is." and alone.verdict in str(alone)
    assert verdict(alone, 0.9).endswith(
        "Write DistributedFit(fit_memory=True), which finds the fastest way that fits, such as slices."
    )
    assert alone.to_dict()["verdict"] == alone.verdict
    assert verdict(alone, 0.01).endswith('or more would hold it in shards: DistributedFit(shard="parameters").')


def test_trials_measure_bytes_and_seconds():
    assert Measured(1, 0.5).seconds == 0.5
    assert Cost(1, 2, 3).plus(Cost(1, 1, 1), 2) == Cost(3, 4, 5)
    assert Speed(2, 4, 8).seconds(Cost(2, 4, 1)) == 10
