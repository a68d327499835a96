"""`DistributedFit(fit_memory=True)`: when `fit` and `prepare` plan, what they apply, and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from trainings.planned_models import ROWS, WIDE, X, Y, deep, exactly, whole

from keras_paragrad import DistributedFit, microbatch, recompute
from keras_paragrad.engine.training.builder import StepBuilder
from keras_paragrad.memory import plan as plans
from keras_paragrad.memory.plan import Candidate, Choice, MemoryPlan, plan_memory
from keras_paragrad.memory.recomputation import RECOMPUTATIONS
from keras_paragrad.memory.trial import Measured
from keras_paragrad.storage.sharded import sharded_value

pytestmark = pytest.mark.usefixtures("same_speed")

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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.own_process
@pytest.mark.parametrize("shard", [None, "optimizer", "parameters"])
def test_variables_are_held_as_chosen(shard, monkeypatch):
    monkeypatch.setattr("keras_paragrad.distribution.replicas.memory._shards", lambda *_: ([shard], ""))
    alone = deep()
    alone.fit(X, Y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    options = {"jit": False, "fit_memory": True, "device_bytes": 2**40, "min_shard_bytes": 64}
    dist = DistributedFit("mirrored", ["CPU:0", "CPU:1"], **options)
    with dist.scope():
        model = deep()
        # Slots that were made in shards are held as chosen, too.
        model.optimizer.build(model.trainable_variables)
    dist.fit(model, X, Y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    assert dist.plan.shard.value == (shard or "none")
    held = [storage for each in model.trainable_variables if (storage := sharded_value(each))]
    assert bool(held) is bool(shard) and all((each.copies is not None) == (shard == "optimizer") for each in held)
    for ours, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def test_the_chosen_slices_are_applied(ways, no_graph, monkeypatch):
    monkeypatch.setattr("keras_paragrad.distribution.replicas.memory._make_trial", lambda *_: exactly)
    dist = DistributedFit(fit_memory=True, device_bytes=int(0.4 * whole(ways)))
    model = deep()
    handle = dist.prepare(model, batch_size=ROWS)
    chosen = dist.explain().estimate.chosen
    assert chosen.choice.slices > 1 and StepBuilder.of(model).stages.split.size == chosen.rows
    assert bool(RECOMPUTATIONS.of(model)) is bool(chosen.choice.recompute)
    handle.undo()
    assert StepBuilder.of(model).stages.split is None and not RECOMPUTATIONS.of(model)


@pytest.fixture
def halved(ways, no_graph, monkeypatch):
    """Plans in 40% of the memory of a step of `deep`, with trials that take what was estimated."""
    monkeypatch.setattr("keras_paragrad.distribution.replicas.memory._make_trial", lambda *_: exactly)
    return lambda share=0.4, **options: DistributedFit(
        fit_memory=True, device_bytes=int(share * whole(ways)), **options
    )


def as_it_is(model):
    return StepBuilder.of(model).stages.split is None and not RECOMPUTATIONS.of(model)


@pytest.mark.long
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


@pytest.mark.long
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
    with pytest.raises(ValueError, match="only used by fit_memory=True. Write fit_memory=True"):
        DistributedFit("none", device_bytes=1)
    with pytest.raises(ValueError, match="on a mesh, in a pipeline or with parameter servers. Leave it out"):
        DistributedFit(mesh={"batch": 2}, fit_memory=True)
    with pytest.raises(ValueError, match="but deterministic=8 fixes that number"):
        DistributedFit(fit_memory=True, deterministic=8)
    dist = DistributedFit(fit_memory=True)
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    with pytest.raises(ValueError, match="fit_memory=True estimates the memory of a step, and .* has no weights yet"):
        dist.fit(unbuilt, X, Y, verbose=0)
    ragged = tf.data.Dataset.from_generator(
        lambda: iter(()), output_signature=(tf.TensorSpec((None, None)), tf.TensorSpec((None, 1)))
    )
    model = deep()
    with pytest.raises(ValueError, match="Memory depends on sizes that TensorSpec.* leaves open.*: leave it out"):
        dist.fit(model, ragged.apply(tf.data.experimental.assert_cardinality(4)), verbose=0)


@pytest.mark.long
def test_each_model_keeps_its_plan(halved):
    dist, models, plans_of = halved(), [deep(), deep()], []
    for _ in range(2):
        for model in models:
            dist.prepare(model, batch_size=ROWS)
            plans_of.append(dist.explain().estimate)
    assert plans_of[:2] == plans_of[2:] and plans_of[0] is not plans_of[1]
    assert not any(as_it_is(model) for model in models)


@pytest.mark.long
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
