"""A pipeline ends where one device ends, with each stage's weights and operations on its device."""

import functools

import keras
import numpy as np
import pytest
from runner import own_process
from sample_models.machines import describe
from trainings import pipelined_training, placed_models
from trainings.pipelined_training import PipelineCase
from trainings.sharded_training import OPTIMIZERS

from keras_paragrad import DistributedFit, microbatch, recompute
from keras_paragrad.compat.state import attached
from keras_paragrad.distribution import Options, Pipeline, make_plan
from keras_paragrad.distribution.pipeline.cutting import cut

# Rounding of the largest number over six updates.
CLOSE = 2e-6
MODELS = ("mlp", "skips", "transformer", "recurrent", "several", "masked")
# Skips across cuts and shared layers are in distribution/test_exactness.py.
FEW = [
    # Slots that were there before are moved.
    PipelineCase("mlp", ("one",), "lamb", ("built", "jit")),
    # With a mask that both stages use.
    PipelineCase("transformer", ("block_0",), "adam", ("recompute", "clipnorm"), 2),
]
# The last batch has one or two rows, for as many of the columns.
HYBRIDS = [
    PipelineCase("mlp", 2, "adamw", ("columns", "global_clipnorm", "excluded", "segments"), 4),
    PipelineCase("mlp", ("two",), "adam", ("uneven", "eager", "ema", "clipvalue")),
]
# Others are drawn by `make fuzz`, and combined in the exactness matrix.
MORE = [
    *(PipelineCase(name, cuts, "sgd", (), 8) for name in MODELS for cuts in (2, 3)),
    *(PipelineCase(name, 2, "sgd", ("columns",), 5) for name in MODELS),
    # Ftrl subtracts roots, whose rounding is 2.1e-6 where the reference is run eagerly.
    *(PipelineCase("mlp", 3, name, ("weight_decay",)) for name in OPTIMIZERS if name not in ("adamw", "ftrl")),
    # Keras squares and clips the gradient of each lookup of an embedding before it sums those of the same row.
    PipelineCase("recurrent", 2, "adam", ("columns", "clipnorm")),
    PipelineCase("skips", 4, "adamw", ("excluded", "global_clipnorm", "segments"), 2),
    PipelineCase("skips", ("norm_2",), "adam", ("ema_overwrite", "clipnorm", "jit", "loss_scale"), 1),
    PipelineCase("recurrent", 2, "sgd", ("columns", "loss_scale", "accumulate"), 2),
    PipelineCase("transformer", 2, "sgd", ("columns", "recompute", "accumulate"), 4),
    PipelineCase("transformer", 2, "sgd", ("uneven", "jit"), 6),
    PipelineCase("masked", ("embedding", "attention"), "sgd", ("jit",), 2),
]


def check(cases):
    (found,) = own_process.call(pipelined_training.compared, [list(case) for case in cases], [{}], 60 + 30 * len(cases))
    for case, each in zip(cases, found, strict=True):
        for what in ("weights", "history", "evaluated", "predicted"):
            assert each[what] <= CLOSE, (case, what, each[what])
        assert each["names"], case
    return found


def test_ends_where_one_device_ends():
    found = dict(zip(FEW, check(FEW), strict=True))
    for case, each in found.items():
        stages = case.cuts if isinstance(case.cuts, int) else len(case.cuts) + 1
        assert len(set(each["homes"].values())) == stages, case
    homes, slots = (found[FEW[0]][what] for what in ("homes", "slots"))
    assert {name.split("/")[-2]: home for name, home in homes.items()} | {"none": ""} == {
        **{"one": "CPU:0", "two": "CPU:1", "three": "CPU:1"},
        "none": "",
    }
    assert {home for name, home in slots.items() if "two" in name or "three" in name} == {"CPU:1"}


def test_columns_of_devices_end_where_one_device_ends():
    for case, each in zip(HYBRIDS, check(HYBRIDS), strict=True):
        # The first device of a stage has its variables.
        second = "CPU:1" if "uneven" in case.settings else "CPU:2"
        assert set(each["homes"].values()) == {"CPU:0", second}, case


@pytest.mark.parametrize("settings", [["jit"], pytest.param([], marks=pytest.mark.long)])
def test_micro_batches_of_all_columns_find_the_state_that_those_before_left(settings):
    (found,) = own_process.call(pipelined_training.stateful_in_columns, settings, [{}], 120)
    assert found["moved"] > 0.01
    assert found["state"] <= CLOSE
    # Normalizing by the batch magnifies the rounding of gradients that are summed in another order.
    assert found["weights"] <= 1e-5


@pytest.mark.long
def test_more_of_them_end_where_one_device_ends():
    check(MORE)


@pytest.mark.long
def test_a_device_holds_its_part():
    (found,) = own_process.call(pipelined_training.held, 4, [{}], 120)
    assert len(found) == 4
    assert max(found.values()) <= 0.27 * sum(found.values())


def test_stages_run_on_their_devices_and_wait_for_nothing_else():
    (found,) = own_process.call(pipelined_training.placed, ["dense_0", "dense_1"], [{}], 120)
    # Of two micro-batches: forward, and backward for inputs and weights.
    assert found["devices"] == {"CPU:0": 6, "CPU:1": 6, "CPU:2": 6}
    assert found["free"] == 2
    assert found["unplaced"] == []
    assert found["moved"] == []
    assert all(found["updates"][f"CPU:{index}"] >= 2 for index in range(3))


def test_small_slices_overflow_no_earlier_than_the_batch():
    # The gradient of an output is about 0.2 times the scale, of the mean over all rows, and 0.75 times, over two.
    x, y = np.full((8, 4), 0.05, "float32"), np.full((8, 4), 3.0, "float32")
    ended = []
    for way in (lambda model: None, lambda model: microbatch(model, 2), prepared):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(4, name=name, dtype="mixed_float16", use_bias=False) for name in ("a", "b")]
        model = keras.Sequential([keras.Input((4,)), *layers])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**17)
        model.compile(optimizer, "mse")
        way(model)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        ended.append((model.get_weights(), int(optimizer.iterations)))
    (whole, updates), *others = ended
    assert updates == 2
    for weights, taken in others:
        assert taken == updates
        assert max(np.abs(a - b).max() for a, b in zip(weights, whole, strict=True)) <= 1e-3


def test_segments_run_again_on_the_device_of_their_stage():
    (found,) = own_process.call(pipelined_training.recomputed, None, [{}], 120)
    # Of each of two micro-batches, forward, and backward for inputs and weights.
    assert found["False"] == {"CPU:0": 2 * 9, "CPU:1": 2 * 9}
    # Of the segments of two layers the last is kept; the cut goes through the one before.
    assert found["True"] == {"CPU:0": 2 * (9 + 3), "CPU:1": 2 * (9 + 1)}


@pytest.mark.long
@pytest.mark.parametrize(("policy", "most"), [("mixed_float16", 4e-3), ("mixed_bfloat16", 3e-2)])
def test_a_pipeline_in_mixed_precision_is_watched(tmp_path, policy, most):
    (found,) = own_process.call(pipelined_training.watched, [policy, str(tmp_path)], [{}], 240)
    # In half precision, sums of parts are rounded otherwise than those of the whole.
    assert max(found["weights"], found["loss"], found["norms"]) <= most, found
    assert (found["updates"], found["paces"]) == (6, 1)
    seen = found["pipeline"]
    assert (seen["stages"], seen["microbatches"]) == (2, 4)
    assert seen["ideal"] == pytest.approx(1 / 3)
    assert 0 < seen["bubble"] < 1


def model_of(*names, shared=False):
    inputs = keras.Input((4,))
    dense = {name: keras.layers.Dense(4, name=name) for name in names}
    hidden = inputs
    for layer in dense.values():
        hidden = layer(hidden)
    model = keras.Model(inputs, dense[names[0]](hidden) if shared else hidden, name="model")
    model.compile("sgd", "mse")
    return model


def names_of(model, pipeline):
    return [[layer.name for layer in part.layers] for part in cut(model, pipeline)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "Neither is given"),
        ({"stages": 2, "cuts": ["a"]}, "Both are given"),
        ({"stages": 1}, "an integer from 2"),
        ({"cuts": []}, "names of one or more layers"),
        ({"cuts": "a"}, "names of layers"),
        ({"stages": 2, "microbatches": 0}, "microbatches"),
    ],
)
def test_arguments(arguments, says):
    with pytest.raises(ValueError, match=says):
        Pipeline(**arguments)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"devices": ["CPU:0"]}, "has 1 devices, and the pipeline has 2 stages"),
        ({"devices": [["CPU:0", "CPU:1"]] * 3}, "'CPU:0'.* more than once"),
        ({"devices": [["CPU:0", "CPU:1"], []]}, "a stage without a device"),
        ({"devices": [["CPU:0", "CPU:1"], ["CPU:2", 3]]}, "the name of a device"),
        ({"devices": [["GPU:0", "GPU:1"], ["GPU:2", "GPU:3"], ["GPU:4", "GPU:5"]]}, "has 3 lists.*one replica: dev"),
        ({"devices": [[f"GPU:{index}" for index in range(9)], ["GPU:9"]]}, "9 devices.*microbatches=36"),
        ({"shard": "parameters"}, "Leave shard out"),
        ({"exact": False}, "microbatches=1"),
    ],
)
def test_options_that_contradict_a_pipeline(options, says):
    with pytest.raises(ValueError, match=says):
        Options(strategy=Pipeline(stages=2), **options)


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ({"cpus": 8}, "split the CPU into logical devices, run this first"),
        ({"gpus": 2}, r"only GPU:0, GPU:1. Write Pipeline\(stages=2"),
        ({"gpus": 4, "workers": 2}, "within one process"),
    ],
)
def test_places_without_room_for_a_pipeline(machine, says):
    with pytest.raises(ValueError, match=says):
        make_plan(describe(**machine), Options(strategy=Pipeline(stages=3)))


def test_the_plan():
    plan = make_plan(describe(gpus=4), Options(strategy=Pipeline(stages=3)))
    assert (plan.strategy.value, plan.devices.value) == ("pipeline", ("GPU:0", "GPU:1", "GPU:2"))
    assert (plan.replicas.value, plan.jit.value, plan.communication.value) == (1, "none", "none")
    assert make_plan(describe(gpus=4), Options(strategy=Pipeline(stages=3), jit=True)).jit.value == "per_stage"


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        (Pipeline(cuts=["bb"]), "no layer of 'model' has that name. Did you mean 'b'?"),
        (Pipeline(cuts=["b", "a"]), r"Write cuts=\['a', 'b'\]"),
        (Pipeline(cuts=["a", "a"]), r"Write cuts=\['a'\]"),
        (Pipeline(cuts=["c"]), "the last layer of 'model'"),
        (Pipeline(stages=5), "can be cut into 3 at most"),
    ],
)
def test_cuts_that_a_model_does_not_allow(pipeline, says):
    with pytest.raises(ValueError, match=says):
        cut(model_of("a", "b", "c"), pipeline)


def test_layers_within_others_and_shared_ones():
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="deep")], name="inner")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1, name="head")(inner(inputs)))
    with pytest.raises(ValueError, match="'deep', which is a part of 'inner'.*Cut after 'inner'"):
        cut(model, Pipeline(cuts=["deep"]))
    assert names_of(model, Pipeline(cuts=["inner"])) == [["inner"], ["head"]]
    shared = model_of("a", "b", "c", shared=True)
    with pytest.raises(ValueError, match="cuts the shared layer 'a'"):
        cut(shared, Pipeline(cuts=["b"]))
    with pytest.raises(ValueError, match="can be cut into 1 at most"):
        cut(shared, Pipeline(stages=2))


def test_stages_are_balanced_by_bytes_and_few_tensors_cross():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(40, name="wide")(inputs)
    other = keras.layers.Dense(41, name="narrow")(hidden)
    both = keras.layers.Concatenate(name="both")([hidden, other])
    model = keras.Model(inputs, keras.layers.Dense(20, name="head")(both))
    # 200, 1681 and 1640 weights: behind `narrow` two tensors would cross, behind `both` one does.
    assert names_of(model, Pipeline(stages=2)) == [["wide", "narrow", "both"], ["head"]]
    assert names_of(model, Pipeline(stages=3)) == [["wide"], ["narrow", "both"], ["head"]]


class OwnCall(keras.Model):
    """Subclassed."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


class OwnStep(keras.Model):
    """Functional, with a step of its own."""

    def train_step(self, data):
        return super().train_step(data)


def prepared(model, **arguments):
    return DistributedFit(Pipeline(**{"cuts": ["a"], **arguments}), devices=["CPU:0", "CPU:1"]).prepare(model)


def test_models_that_are_refused():
    subclassed = OwnCall()
    subclassed.compile("sgd", "mse")
    with pytest.raises(ValueError, match='Functional model.*shard="parameters"'):
        prepared(subclassed)
    unbuilt = keras.Sequential([keras.layers.Dense(2, name="a"), keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    with pytest.raises(ValueError, match="is not built"):
        prepared(unbuilt)
    plain = model_of("a", "b", "c")
    own = OwnStep(plain.inputs, plain.outputs)
    own.compile("sgd", "mse")
    with pytest.raises(ValueError, match="defines its own train_step"):
        prepared(own)
    sliced = microbatch(plain, 2)
    with pytest.raises(ValueError, match="already uses microbatch"):
        prepared(plain)
    sliced.undo()
    prepared(plain)
    with pytest.raises(ValueError, match="by the pipeline"):
        microbatch(plain, 2)


def test_a_summed_loss_with_an_added_mean_is_refused():
    model = model_of("a", "b")
    model.get_layer("a").activity_regularizer = keras.regularizers.L2(0.1)
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
    prepared(model)
    with pytest.raises(ValueError, match="activity regularizer.*weighting='examples'"):
        model.fit(keras.ops.ones((8, 4)), keras.ops.zeros((8, 4)), batch_size=8, verbose=0)


def test_a_loss_that_the_first_batch_shows_to_count_labels_is_refused():

    def of_labels(y, p):
        present = keras.ops.cast(keras.ops.not_equal(y, -999.0), "float32")
        squares = keras.ops.mean(present * keras.ops.square(y - p), -1)
        return squares / keras.ops.maximum(keras.ops.mean(present), 0.01)

    model = model_of("a", "b")
    model.compile("sgd", of_labels)
    handle = prepared(model)
    x, weights = np.random.default_rng(0).normal(size=(8, 4)).astype("float32"), model.get_weights()
    y = np.where(np.arange(32).reshape(8, 4) % 11 < 7, -999.0, x).astype("float32")
    with pytest.raises(ValueError, match="gradient of the loss of .* in parts is .* off the gradient of the loss"):
        model.fit(x, y, batch_size=8, verbose=0)
    np.testing.assert_equal(model.get_weights(), weights)
    model.fit(x, x, batch_size=8, verbose=0)
    handle.undo()


def test_a_model_is_restored():
    model = model_of("a", "b", "c")
    before = dict(vars(model))
    handle = prepared(model)
    assert [each[-5:] for each in (model.weights[0].value.device, model.weights[-1].value.device)] == ["CPU:0", "CPU:1"]
    assert prepared(model) is handle
    with recompute(model, every=1), pytest.raises(ValueError, match="recomputed already"):
        recompute(model, every=1)
    recompute(model, ["b"]).undo()
    handle.undo()
    assert all(variable.value.device.endswith("CPU:0") for variable in model.variables)
    assert {name for name in vars(model) if name not in before} <= {"_keras_paragrad"}
    assert set(attached(model)) <= {"step_builder"}
    model.fit(keras.ops.zeros((4, 4)), keras.ops.zeros((4, 4)), verbose=0)


def test_batch_normalization_is_warned_of():
    inputs = keras.Input((4,))
    normalized = keras.layers.BatchNormalization(name="statistics")(keras.layers.Dense(4, name="a")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(normalized))
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="1 BatchNormalization layer normalizes with the statistics of each"):
        prepared(model)


@pytest.mark.long
def test_files_are_those_of_one_device(tmp_path):
    (found,) = own_process.call(pipelined_training.saved, str(tmp_path), [{}], 180)
    assert max(found.values()) <= CLOSE, found


@pytest.mark.parametrize(("name", "says"), [("recurrent", "computes in a loop"), ("several", "adds a loss")])
def test_what_xla_can_not_compile_apart(name, says):
    case = PipelineCase(name, 2, "sgd", ("jit",), 2)
    model, dist = placed_models.made(case, alone=False), pipelined_training.distribution(case)
    with pytest.raises(ValueError, match=f"{says}.*jit=False"):
        pipelined_training.fitted(functools.partial(dist.fit, model), case)
