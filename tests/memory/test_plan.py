"""What fits: how ways to train are estimated, chosen, tried and applied, and what is refused."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_paragrad import DistributedFit, microbatch, recompute
from keras_paragrad.engine.step.builder import StepBuilder
from keras_paragrad.engine.step.tracing import traced_step, traced_steps
from keras_paragrad.flops import flops_of_operation
from keras_paragrad.memory import estimate_memory
from keras_paragrad.memory import plan as plans
from keras_paragrad.memory.breakdown import SHARDS, breakdowns_of
from keras_paragrad.memory.cost import Cost, Speed, cost_of
from keras_paragrad.memory.estimate import recomputation_of
from keras_paragrad.memory.plan import plan_memory
from keras_paragrad.memory.plan_search import PlanSearch
from keras_paragrad.memory.plan_table import Candidate, Choice, MemoryPlan
from keras_paragrad.memory.recomputation import RECOMPUTATIONS
from keras_paragrad.memory.trial import CannotTryError, Measured

ROWS, WIDE = 512, 64
SPEED = Speed(1e11, 1e10, 1e-6)
X = np.random.default_rng(0).normal(size=(ROWS, WIDE)).astype("float32")
Y = X[:, :1]


def deep(**options):
    """A model whose activations take the most memory, and free some when they are recomputed."""
    keras.utils.set_random_seed(0)
    hidden = inputs = keras.Input((WIDE,))
    for index in range(4):
        layers = [keras.layers.Dense(512, "gelu"), keras.layers.Dense(WIDE)]
        hidden = keras.layers.Add()([hidden, keras.Sequential(layers, name=f"block_{index}")(hidden)])
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden), name="deep")
    model.compile("adam", "mse", **options)
    return model


def recurrent():
    model = keras.Sequential([keras.Input((20, 8)), keras.layers.LSTM(16), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def convolutional():
    layers = [keras.layers.Conv2D(8, 3, strides=2), keras.layers.Flatten(), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((16, 16, 3)), *layers])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def contrastive():
    """Its loss compares all rows with each other."""

    def loss(y_true, y_pred):
        return keras.ops.mean(keras.ops.matmul(y_pred, keras.ops.transpose(y_pred)) ** 2)

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", loss)
    return model


@pytest.mark.parametrize("made", [deep, recurrent, convolutional, contrastive])
def test_one_trace_gives_the_memory_of_any_batch(made):
    model = made()
    for rows, step in zip((96, 40, 7), traced_steps(model, [96, 40, 7]), strict=True):
        alone = traced_step(model, rows)
        ours, theirs = breakdowns_of(model, step, 1)[0], breakdowns_of(model, alone, 1)[0]
        assert ours.total == pytest.approx(theirs.total, rel=0.02 if made is recurrent else 1e-4)


def test_slices_are_estimated_with_what_they_hold(ways):
    model = deep()
    microbatch(model, ROWS // 4)
    sliced = breakdowns_of(model, traced_step(model, ROWS), 1)[0]
    (estimated,) = [each.estimated.bytes for each in ways.candidates if each.choice == Choice(slices=4)]
    assert estimated == pytest.approx(sliced.total, rel=0.02)


def test_costs_count_products_and_loops():
    # A product forward, one for its weight and none for its input, of 2 x rows x inputs x outputs FLOPs each.
    dense = keras.Sequential([keras.Input((32,)), keras.layers.Dense(16)])
    dense.compile("sgd", "mse")
    for rows, step in zip((10, 20), traced_steps(dense, [10, 20], None, flops_of_operation), strict=True):
        assert cost_of(step).gradient.flops == 2 * (2 * rows * 32 * 16)
    # Of products of all rows with all rows, there are four times as many.
    few, many = (cost_of(step).gradient for step in traced_steps(contrastive(), [10, 20], None, flops_of_operation))
    assert 2 * few.flops < many.flops < 4 * few.flops
    costs = []
    for steps in (5, 50):
        model = keras.Sequential([keras.Input((steps, 8)), keras.layers.LSTM(16)])
        model.compile("sgd", "mse")
        costs.append(cost_of(traced_steps(model, [4], None, flops_of_operation)[0]).gradient)
    assert costs[1].operations > 5 * costs[0].operations
    assert costs[1].flops > 5 * costs[0].flops


@pytest.fixture(autouse=True)
def same_speed(monkeypatch):
    """Estimates don't depend on what else the machine does."""
    monkeypatch.setattr(plans, "measure_speed", lambda: SPEED)


@pytest.fixture(scope="module")
def ways():
    """Ways to train a model, by estimated seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "measure_speed", lambda: SPEED)
        patch.setattr(plans, "_CERTAIN", 0.0)
        patch.setattr(plans, "_RUNTIME", 0)
        patch.setattr(plans, "_OF_OPERATION", 0)
        return plan_memory(deep(), ROWS, 2**40, None)


def choosing(ways, device_bytes, trial=None, *, sliced=True):
    """A plan that has chosen, without the trace."""
    plan = MemoryPlan("deep", ROWS, 1, device_bytes)
    plan.recomputed, plan.candidates = (
        ways.recomputed,
        [dataclasses.replace(each, why_not="") for each in ways.candidates],
    )
    if not sliced:
        plan.candidates = [each for each in plan.candidates if each.choice.slices == 1]
    PlanSearch(plan, trial and (lambda: trial), lambda line: None).run()
    return plan


def exactly(candidate):
    """A trial that takes what was estimated."""
    return candidate.estimated


def whole(ways):
    """The bytes of a step as it is."""
    return next(each.estimated.bytes for each in ways.candidates if each.choice == Choice())


def test_a_model_that_fits_is_not_tried():
    def begin(spec):
        raise AssertionError("it fits by far")

    plan = plan_memory(deep(), ROWS, 2**34, begin)
    assert plan.chosen in plan.candidates and plan.chosen.choice == Choice()
    assert plan.in_words() == "as it is" and plan.trials == 0


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


def test_what_never_fits_is_refused(ways, monkeypatch):
    monkeypatch.setattr(plans, "_RUNTIME", 0)
    monkeypatch.setattr(plans, "_OF_OPERATION", 0)
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


def test_all_recomputes_no_less_than_what_pays():
    model = deep()
    pays, every = recomputation_of(model), recomputation_of(model, "all")
    assert len(every.names) >= len(pays.names) > 0
    with pytest.raises(ValueError, match="`every` and `layers` both say what to recompute"):
        recompute(model, "all", every=2)
    plain = deep()
    with recompute(model, "all"):
        model.fit(X, Y, batch_size=128, shuffle=False, verbose=0)
    plain.fit(X, Y, batch_size=128, shuffle=False, verbose=0)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_the_verdict_says_what_to_write():
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
    assert verdict(alone, 0.9).endswith("with recompute(model).")
    assert alone.to_dict()["verdict"] == alone.verdict
    assert verdict(alone, 0.4).endswith("Write DistributedFit(fit_memory=True), which cuts batches into slices too.")
    assert verdict(alone, 0.01).endswith('or more would hold it in shards: DistributedFit(shard="parameters").')


# Of a batch whose activations take more than the graph.
MANY = 8192


def budget(share, replicas=1):
    """A share of what a step of `deep` is estimated to take on each device."""
    return int(share * plan_memory(deep(), MANY, 2**40, None, replicas=replicas).candidates[0].estimated.bytes)


def trained(dist):
    with dist.scope():
        model = deep()
    x = np.resize(X, (MANY, WIDE))
    history = dist.fit(model, x, x[:, :1], batch_size=MANY, epochs=2, shuffle=False, verbose=0).history
    return model, history["loss"]


@pytest.mark.slow(40)
def test_fit_plans_tries_and_trains_the_same_step(capsys):
    alone, losses = trained(DistributedFit())
    dist = DistributedFit(fit_memory=True, device_bytes=budget(0.9))
    model, shown = trained(dist)
    plan = dist.explain().estimate
    assert isinstance(plan, MemoryPlan) and plan.trials >= 1 and plan.chosen.choice != Choice()
    assert plan.chosen.measured.bytes <= plan.device_bytes and plan.chosen.measured.seconds > 0
    assert shown == pytest.approx(losses, rel=1e-6)
    for ours, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    # The same batch is planned once; another one again, from the model as it was.
    assert "fit_memory" not in capsys.readouterr().out
    dist.prepare(model, batch_size=MANY)
    assert dist.explain().estimate is plan
    handle = dist.prepare(model, batch_size=2)
    assert dist.explain().estimate.chosen.choice == Choice()
    assert StepBuilder.of(model).stages.split is None and not RECOMPUTATIONS.of(model)
    handle.undo()


@pytest.mark.slow(60)
@pytest.mark.own_process
def test_replicas_plan_shards_too():
    alone, losses = trained(DistributedFit("none"))
    devices = ["CPU:0", "CPU:1"]
    dist = DistributedFit("mirrored", devices, jit=False, fit_memory=True, device_bytes=budget(0.8, 2))
    assert dist.plan.shard.value == "auto"
    model, shown = trained(dist)
    plan = dist.explain().estimate
    assert {each.choice.shard for each in plan.candidates} == {None, "optimizer", "parameters"}
    assert plan.trials >= 1 and plan.chosen.measured is not None
    assert dist.plan.shard.value == (plan.chosen.choice.shard or "none")
    assert shown == pytest.approx(losses, rel=1e-6)
    for ours, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_the_chosen_slices_are_applied(ways, monkeypatch):
    monkeypatch.setattr("keras_paragrad.distribution.replicas.memory._make_trial", lambda *_: exactly)
    monkeypatch.setattr(plans, "_RUNTIME", 0)
    monkeypatch.setattr(plans, "_OF_OPERATION", 0)
    dist = DistributedFit(fit_memory=True, device_bytes=int(0.4 * whole(ways)))
    model = deep()
    handle = dist.prepare(model, batch_size=ROWS)
    chosen = dist.explain().estimate.chosen
    assert chosen.choice.slices > 1 and StepBuilder.of(model).stages.split.size == chosen.rows
    assert bool(RECOMPUTATIONS.of(model)) is bool(chosen.choice.recompute)
    handle.undo()
    assert StepBuilder.of(model).stages.split is None and not RECOMPUTATIONS.of(model)


@pytest.fixture
def halved(ways, monkeypatch):
    """Plans in 40% of the memory of a step of `deep`, with trials that take what was estimated."""
    monkeypatch.setattr("keras_paragrad.distribution.replicas.memory._make_trial", lambda *_: exactly)
    monkeypatch.setattr(plans, "_RUNTIME", 0)
    monkeypatch.setattr(plans, "_OF_OPERATION", 0)
    return lambda share=0.4, **options: DistributedFit(
        fit_memory=True, device_bytes=int(share * whole(ways)), **options
    )


def as_it_is(model):
    return StepBuilder.of(model).stages.split is None and not RECOMPUTATIONS.of(model)


@pytest.mark.slow(30)
def test_what_was_undone_is_applied_again(halved):
    dist, model = halved(), deep()
    dist.prepare(model, batch_size=ROWS).undo()
    assert as_it_is(model)
    handle = dist.prepare(model, batch_size=ROWS)
    assert not as_it_is(model)
    # What isn't planned has no effect on what was.
    with pytest.raises(ValueError, match="doesn't fit"):
        dist.prepare(model, batch_size=2**14)
    dist.prepare(model, batch_size=ROWS)
    assert not as_it_is(model)
    with dist.scope():
        model.compile("sgd", "mse")
    dist.prepare(model, batch_size=ROWS)
    assert not as_it_is(model) and not any("was called" in line for line in dist.explain().estimate.left_out)
    handle.undo()
    assert as_it_is(model)


@pytest.mark.slow(30)
def test_the_plan_of_one_takes_the_place_of_the_others(halved):
    model = deep()
    halved().prepare(model, batch_size=ROWS)
    less = halved(0.3, exact=False)
    less.prepare(model, batch_size=ROWS)
    assert not as_it_is(model) and less.explain().estimate.left_out == []
    handle = DistributedFit().prepare(model, batch_size=ROWS)
    assert as_it_is(model)
    handle.undo()
    dist, other = halved(), deep()
    dist.prepare(model, batch_size=ROWS)
    dist.prepare(other, batch_size=ROWS)
    assert not as_it_is(model) and not as_it_is(other)


def test_a_plan_that_cannot_be_applied_leaves_nothing_behind(halved, monkeypatch):
    def refuses(*_):
        raise ValueError("can't be trained")

    model = deep()
    monkeypatch.setattr("keras_paragrad.distribution.replicas.parallelism.ReplicaPreparation.of", refuses)
    with pytest.raises(ValueError, match="can't be trained"):
        halved().prepare(model, batch_size=ROWS)
    assert as_it_is(model)


def test_what_is_no_choice_is_left_out(monkeypatch):
    dist = DistributedFit(fit_memory=True, device_bytes=2**40)
    normalized = keras.Sequential(
        [keras.Input((WIDE,)), keras.layers.BatchNormalization(name="bn"), keras.layers.Dense(1)]
    )
    normalized.compile("sgd", "mse")
    monkeypatch.setattr(plans, "_CERTAIN", 0.0)
    monkeypatch.setattr("keras_paragrad.distribution.replicas.memory._make_trial", lambda *_: exactly)
    dist.prepare(normalized, batch_size=ROWS)
    assert "No slices: bn would normalize slices with the statistics of a slice." in str(dist.explain())
    sliced = deep()
    handles = [microbatch(sliced, 64), recompute(sliced)]
    dist.prepare(sliced, batch_size=ROWS)
    left_out = dist.explain().estimate.left_out
    assert left_out[0].startswith("No slices: microbatch(model, ...) was called")
    assert left_out[1].startswith("No other recomputation: recompute(model, ...) was called")
    for handle in handles:
        handle.undo()


class _PlannedError(Exception):
    """Has the batch size that was planned for."""


@pytest.fixture
def planned(monkeypatch):
    """The batch size that `fit` plans for, without a plan."""

    def plan_only(model, total, *_, **options):
        raise _PlannedError(total)

    monkeypatch.setattr("keras_paragrad.distribution.replicas.memory.plan_memory", plan_only)

    def rows(*data, dist=None, **options):
        dist = dist or DistributedFit(fit_memory=True, device_bytes=2**40)
        with dist.scope():
            model = deep()
        with pytest.raises(_PlannedError) as planned:
            dist.fit(model, *data, verbose=0, **options)
        return planned.value.args[0]

    return rows


def test_plans_for_the_batches_of_any_data(planned):
    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    signature = (tf.TensorSpec((None, WIDE)), tf.TensorSpec((None, 1)))
    drawn = tf.data.Dataset.from_generator(lambda: iter([(X[:200], Y[:200])]), output_signature=signature)
    assert planned(rows.batch(200)) == planned(rows.batch(8).rebatch(200)) == planned(drawn) == 200
    assert planned(rows.batch(100).map(lambda x, y: (x, y)).filter(lambda x, y: True).prefetch(1)) == 100
    zipped = tf.data.Dataset.zip(rows.map(lambda x, y: x).batch(50), rows.map(lambda x, y: y).batch(50))
    assert planned(zipped) == 50
    assert planned(((X[:90], Y[:90]) for _ in range(3)), steps_per_epoch=2) == 90
    assert planned(X, Y) == 32 and planned(X, Y, batch_size=2 * ROWS) == ROWS


def test_plans_for_the_batches_of_all_replicas(planned):
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"], batch="per_replica", fit_memory=True, device_bytes=2**40)
    assert planned(X, Y, dist=dist, batch_size=50) == 100
    assert planned(tf.data.Dataset.from_tensor_slices((X, Y)).batch(50, drop_remainder=True), dist=dist) == 100


def test_batches_of_one_size_are_not_cut(monkeypatch):
    monkeypatch.setattr(plans, "_CERTAIN", 0.0)
    monkeypatch.setattr("keras_paragrad.distribution.replicas.memory._make_trial", lambda *_: exactly)
    inputs = keras.Input(batch_shape=(32, 5, 3))
    stateful = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.LSTM(4, stateful=True)(inputs)))
    stateful.compile("sgd", "mse")
    dist = DistributedFit(fit_memory=True, device_bytes=2**40)
    dist.prepare(stateful, batch_size=32)
    assert dist.explain().estimate.left_out[0] == "No slices: it trains on batches of 32 rows alone."
    parts = deep()
    microbatch(parts, 64, deterministic=8)
    dist.prepare(parts, batch_size=ROWS)
    assert dist.explain().estimate.chosen.choice == Choice()


def test_says_where_slices_take_another_step(halved):
    tokens = keras.Input((100,), dtype="int32")
    hidden = keras.layers.Embedding(10, 64, name="words")(tokens)
    model = keras.Model(tokens, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(hidden)))
    model.compile("adam", "mse")
    dist = halved()
    dist.prepare(model, batch_size=ROWS)
    assert dist.explain().estimate.chosen.choice.slices > 1
    assert "Another step than Keras's of words" in dist.explain().estimate.left_out[-1]
    model.compile("sgd", "mse")
    dist.prepare(model, batch_size=ROWS)
    assert not any("Another step" in line for line in dist.explain().estimate.left_out)


def test_refuses_where_there_is_no_choice():
    with pytest.raises(ValueError, match="on a mesh, in a pipeline or with parameter servers. Leave it out"):
        DistributedFit(mesh={"batch": 2}, fit_memory=True)
    with pytest.raises(ValueError, match="fit_memory=True chooses how batches are cut, and deterministic=8 cuts them"):
        DistributedFit(fit_memory=True, deterministic=8)
    unchosen = deep()
    microbatch(unchosen, "auto")
    with pytest.raises(ValueError, match="and microbatch\\(model, 'auto'\\) both choose slices"):
        DistributedFit(fit_memory=True).prepare(unchosen)
    dist = DistributedFit(fit_memory=True)
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    with pytest.raises(ValueError, match="fit_memory=True estimates the memory of a step, and .* has no weights yet"):
        dist.fit(unbuilt, X, Y, verbose=0)
    ragged = tf.data.Dataset.from_generator(
        lambda: iter(()), output_signature=(tf.TensorSpec((None, None)), tf.TensorSpec((None, 1)))
    )
    model = deep()
    with pytest.raises(
        ValueError, match="Memory depends on dimensions whose size the data doesn't specify.*: leave it out"
    ):
        dist.fit(model, ragged.apply(tf.data.experimental.assert_cardinality(4)), verbose=0)


def test_trials_measure_bytes_and_seconds():
    assert Measured(1, 0.5).seconds == 0.5
    assert Cost(1, 2, 3).plus(Cost(1, 1, 1), 2) == Cost(3, 4, 5)
    assert Speed(2, 4, 8).seconds(Cost(2, 4, 1)) == 10


@pytest.mark.slow(30)
def test_each_model_keeps_its_plan(halved):
    dist, models, plans_of = halved(), [deep(), deep()], []
    for _ in range(2):
        for model in models:
            dist.prepare(model, batch_size=ROWS)
            plans_of.append(dist.explain().estimate)
    assert plans_of[:2] == plans_of[2:] and plans_of[0] is not plans_of[1]
    assert not any(as_it_is(model) for model in models)


@pytest.mark.slow(30)
def test_what_the_user_cuts_is_planned_for(halved):
    dist, model = halved(0.6), deep()
    dist.prepare(model, batch_size=ROWS)
    first = dist.explain().estimate
    own = microbatch(model, 16)
    dist.prepare(model, batch_size=ROWS)
    assert StepBuilder.of(model).stages.split.size == 16
    assert dist.explain().estimate.chosen.choice == Choice()
    own.undo()
    dist.prepare(model, batch_size=ROWS)
    assert dist.explain().estimate.chosen == first.chosen and not as_it_is(model)


def test_other_lengths_and_losses_are_planned_for(monkeypatch):
    model = keras.Sequential([keras.Input((None, 8)), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    dist = DistributedFit(fit_memory=True, device_bytes=2**40)
    plan = MemoryPlan("model", 32, 1, 2**40)
    plan.chosen, plan.recomputed = Candidate(Choice(), 32, Measured(1, 1.0)), {None: []}
    asked = []
    monkeypatch.setattr(
        "keras_paragrad.distribution.replicas.memory.plan_memory", lambda *_, **options: asked.append(options) or plan
    )
    for length, times in ((4, 1), (4, 1), (9, 2), (4, 3)):
        dist.fit(model, np.ones((32, length, 8), "float32"), np.ones((32, 1)), verbose=0)
        assert len(asked) == times
    model.compile(model.optimizer, "mae")
    dist.prepare(model)
    dist.prepare(model)
    assert len(asked) == 4
