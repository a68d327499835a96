"""Models on a mesh of devices end where one device ends, or are refused."""

import os
import re

import keras
import pytest
from runner import own_process
from sample_models.machines import describe
from trainings import meshed_training, placed_models
from trainings.meshed_training import MeshCase
from trainings.sharded_training import OPTIMIZERS

from keras_paragrad import DistributedFit
from keras_paragrad.distribution import Options
from keras_paragrad.distribution.mesh.layouts import axes_of_variables, check_layout_map
from keras_paragrad.distribution.mesh.mesh import Mesh, planned_mesh
from keras_paragrad.distribution.mesh.parallelism import check_batch
from keras_paragrad.distribution.plan import make_plan
from keras_paragrad.storage.dtensor import COMBINE_PASS, turn_combine_pass_off

# Of float32; of the adaptive optimizers too, whose epsilon is large.
CLOSE = 1e-6
# Masks of dropout are others on a mesh.
MODELS = [name for name in placed_models.MODELS if name != "stateful"]
FEW = [
    MeshCase("images", (2, 2), "adamw", ("excluded", "global_clipnorm")),
    MeshCase("tied", (1, 2), "sgd", ("auto", "recompute", "accumulate")),
]
# Others are drawn by `make fuzz`, and combined in the exactness matrix.
MORE = [
    *(MeshCase(name, mesh) for name in MODELS for mesh in ((4, 1), (2, 2), (1, 4))),
    *(MeshCase("mlp", (2, 2), name) for name in OPTIMIZERS),
    *(MeshCase(name, (2, 2), "adam", ("auto", "clipnorm")) for name in ("mlp", "transformer", "tied", "cnn")),
    *(MeshCase(name, (2, 2), "sgd", ("jit", "recompute layers")) for name in ("mlp", "tied", "cnn", "recurrent")),
    *(MeshCase(name, (4, 1), "sgd", ("data",)) for name in ("mlp", "transformer", "cnn", "several")),
    # Where a layer adds a loss or flips the order of rows, accumulation is refused; batch statistics are of a
    # micro-batch.
    *(MeshCase(name, (2, 2), "sgd", ("accumulate",)) for name in ("skips", "both ways", "recurrent", "subclassed")),
    MeshCase("mlp", (1, 4), "nadam", ("accumulate", "loss_scale", "several steps", "ema_overwrite", "clipvalue")),
    MeshCase("mlp", (2, 2), "adam", ("equal", "jit")),
]


def check(cases):
    (found,) = own_process.call(meshed_training.compared, [list(case) for case in cases], [{}], 60 + 60 * len(cases))
    for case, each in zip(cases, found, strict=True):
        for what in each.keys() & {"weights", "history", "evaluated", "predicted"}:
            # XLA sums in another order, and outputs are small differences: 1.3e-6 where weights are 2e-7 apart.
            close = 3 * CLOSE if what == "predicted" else CLOSE
            assert each[what] <= close, (case, what, each[what])
        assert each["names"], case
    return found


def divided(found, end):
    return next(axes for path, axes in found["divided"].items() if path.endswith(end))


def test_ends_where_one_device_ends():
    by_hand, automatic = check(FEW)
    assert divided(by_hand, "convolved/kernel") == (None, None, None, "model")
    assert {"evaluated", "predicted"} <= by_hand.keys()
    # The embedding that is tied to the outputs, and attention by its heads.
    assert divided(automatic, "embeddings") == (None, "model")
    assert divided(automatic, "query/kernel") == (None, "model", None)
    assert "embeddings" in automatic["explained"]
    # Gradients are accumulated as the weights are divided.
    assert any("accumulator" in path for path in automatic["divided"])


@pytest.mark.long
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_of_them_end_where_one_device_ends(case):
    check([case])


@pytest.mark.long
def test_half_precision_ends_near_one_device():
    case = MeshCase("mlp", (2, 2), "sgd", ("mixed_bfloat16",))
    (found,) = own_process.call(meshed_training.compared, [list(case)], [{}], 120)
    # Eight bits of a bfloat16, and sums in another order.
    assert found[0]["weights"] <= 1e-2


@pytest.mark.long
def test_files_and_backups_hold_what_those_of_one_device_do(tmp_path):
    (found,) = own_process.call(meshed_training.saved, str(tmp_path), [{}], 180)
    assert max(found[what] for what in ("keras", "slots", "weights", "checkpoint", "set")) == 0
    assert max(found.values()) <= CLOSE, found


# What is written in the middle of a window is read on one device: in `make test`, two workers read it on a mesh.
WAYS = ["(4, 1)", "(2, 2)", "(1, 4)", "one device", "replicas", "shards"]
PAIRS = [(before, after) for before in WAYS for after in WAYS if before != after]


@pytest.mark.long
@pytest.mark.parametrize(
    "pairs",
    [
        [("(2, 2)", "one device")],
        pytest.param([pair for pair in PAIRS if "(" in "".join(pair)], marks=pytest.mark.long),
    ],
    ids=["sample", "all"],
)
def test_training_goes_on_elsewhere_in_the_middle_of_a_window(tmp_path, pairs):
    (found,) = own_process.call(meshed_training.reloaded, (str(tmp_path), pairs), [{}], 60 + 15 * len(pairs))
    assert max(found) <= CLOSE, dict(zip(pairs, found, strict=True))


@pytest.mark.parametrize(
    "cases",
    [
        [((2, 2), "mlp", (2, 2), "adam", ("accumulate",))],
        pytest.param([((2, 2), name, (2, 2), "sgd") for name in MODELS], marks=pytest.mark.long),
        *(pytest.param([(shape, "mlp", (2, 2), "sgd")], marks=pytest.mark.long) for shape in ((4, 1), (1, 4), None)),
    ],
    ids=["sample", "models", "(4, 1)", "(1, 4)", "data"],
)
def test_two_workers_end_where_one_device_ends(tmp_path, cases):
    seconds = 60 + 60 * len(cases)
    for found in own_process.on_workers(meshed_training.on_a_worker, (str(tmp_path), cases), seconds):
        assert max(max(each.values()) for each in found) <= CLOSE, found


@pytest.mark.long
def test_a_device_holds_its_part():
    (found,) = own_process.call(meshed_training.held, (1, 4), [{}], 120)
    whole = found.pop("whole")
    assert len(found) == 4
    assert max(found.values()) <= 0.27 * whole


@pytest.mark.long
def test_adapted_means_are_constants():
    (found,) = own_process.call(meshed_training.normalized, None, [{}], 120)
    assert found <= CLOSE


@pytest.mark.parametrize(
    ("which", "says"),
    [
        pytest.param("loop", "'looped' needs the operation TensorList", marks=pytest.mark.long),
        ("pooled", "'pooled' needs the operation AvgPoolGrad"),
        pytest.param("depthwise", "'depthwise' needs the operation Depthwise", marks=pytest.mark.long),
        pytest.param("dilated", "needs the operation SpaceToBatchND", marks=pytest.mark.long),
        pytest.param("rolled", "'rolled' needs the operation Roll", marks=pytest.mark.long),
        ("wrong", "on this mesh differs from the one on one device"),
        ("not a number", "on this mesh differs from the one on one device, by"),
        ("eager", "run_eagerly=True"),
        ("pattern", "No key of the layout map matches a variable of .*: '.*second/kernel'"),
        pytest.param("strided", "segment that is recomputed ends with a strided convolution", marks=pytest.mark.long),
        pytest.param("batch", "Batches of 7 rows can't be divided .* batch_size=8", marks=pytest.mark.long),
    ],
)
def test_what_is_refused_before_training(which, says):
    (found,) = own_process.call(meshed_training.refused, which, [{}], 120)
    assert re.search(says, found), found


def mesh(*shape, names=("batch", "model")):
    count = 1
    for size in shape:
        count *= size
    return keras.distribution.DeviceMesh(shape, list(names), [f"cpu:{index}" for index in range(count)])


def parallel(*shape, **layouts):
    layout = keras.distribution.LayoutMap(mesh(*shape))
    for key, axes in layouts.items():
        layout[".*" + key.replace("__", "/")] = axes
    return Mesh.of(keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))


@pytest.mark.parametrize(
    ("layouts", "says"),
    [
        ({"dense__kernel": (None, "model")}, "Make it a multiple of 2"),
        ({"dense__kernel": ("model",)}, r"has 1 dimensions, and '.*/kernel' has the shape \(4, 3\)"),
        ({"dense__kernel": ("model", "model")}, "names an axis twice"),
    ],
)
def test_layouts_that_do_not_fit(layouts, says):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="dense")])
    with pytest.raises(ValueError, match=says):
        axes_of_variables(model, parallel(2, 2, **layouts))


def test_an_axis_that_is_not_there():
    with pytest.raises(ValueError, match="Invalid axis names for Layout"):
        parallel(2, 2, dense__kernel=("heads", None))


def test_a_pattern_has_to_match():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")])
    divided = {"dense__kernel": ("model", None)}
    check_layout_map(model, parallel(2, 2, **divided))
    with pytest.raises(ValueError, match=r"No key .* '.*kernels'\. The variables are .* match a whole path"):
        check_layout_map(model, parallel(2, 2, kernels=("model", None)))
    # As in the map of a family of models.
    check_layout_map(model, parallel(2, 2, **divided, head__kernel=("model", None)))


def test_a_mesh_needs_all_of_its_workers(monkeypatch):
    monkeypatch.setenv("KERAS_PARAGRAD_WORLD", "2:4")
    with pytest.raises(ValueError, match="it was started with 2:4. Write one number there, of workers or nodes: 4"):
        DistributedFit(mesh={"batch": 2}, layout="auto")


def test_a_batch_has_to_divide():
    check_batch(8, parallel(4, 2))
    with pytest.raises(ValueError, match="batch_size=12"):
        check_batch(10, parallel(4, 2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mesh": {"batch": 2, "model": 2}}, 'Write layout="auto"'),
        ({"layout": "auto"}, "needs a mesh"),
        ({"mesh": {"batch": 0}, "layout": "auto"}, "the sizes of the axes"),
        ({"mesh": [2, 2], "layout": "auto"}, "the sizes of the axes"),
        ({"mesh": {"rows": 2}, "layout": "auto"}, "ModelParallel"),
        ({"mesh": {"batch": 2}, "layout": "auto", "strategy": "mirrored"}, "Pass one of them"),
        ({"mesh": {"batch": 2}, "layout": "auto", "shard": "parameters"}, "Remove shard"),
        ({"mesh": {"batch": 2}, "layout": "auto", "exact": False}, "Leave exact out"),
        ({"mesh": {"batch": 2}, "layout": "auto", "weighting": "examples"}, "weighting has no effect on a mesh"),
    ],
)
def test_options_that_contradict_a_mesh(options, says):
    with pytest.raises(ValueError, match=says):
        Options(**options)


def test_devices_are_those_of_the_distribution():
    distribution = keras.distribution.DataParallel(mesh(2, names=("batch",)))
    with pytest.raises(ValueError, match="names its own devices"):
        Options(strategy=distribution, devices=["CPU:0", "CPU:1"])


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ({"gpus": 2}, "has 4 places for 2 devices: GPU:0, GPU:1"),
        ({"workers": 2}, "has 4 places for 1 device on each of 2 workers: CPU:0"),
        ({"logical_cpus": 2, "workers": 3}, "has 4 places for 2 devices on each of 3 workers"),
        ({"gpus": 4, "workers": 2}, "A mesh over several workers can only have CPU devices"),
    ],
)
def test_places_without_room_for_a_mesh(machine, says):
    with pytest.raises(ValueError, match=says):
        make_plan(describe(**machine), Options(mesh={"batch": 2, "model": 2}, layout="auto"))


def test_workers_count_their_devices_together():
    def options(*devices):
        layout = keras.distribution.DeviceMesh((len(devices),), ["batch"], list(devices))
        return Options(strategy=keras.distribution.DataParallel(layout))

    found = planned_mesh(options("cpu:0", "cpu:1", "cpu:2", "cpu:3"), describe(logical_cpus=2, workers=2))
    assert (found.devices, found.workers, found.worker) == (("CPU:0", "CPU:1"), 2, 0)
    with pytest.raises(ValueError, match="they are counted over all of them: CPU:0 to CPU:3"):
        planned_mesh(options("cpu:0", "cpu:1", "cpu:2", "cpu:4"), describe(logical_cpus=2, workers=2))


def test_devices_that_are_not_here():
    options = Options(strategy=keras.distribution.DataParallel(mesh(8, names=("batch",))))
    with pytest.raises(ValueError, match="but TensorFlow has CPU:0"):
        planned_mesh(options, describe(cpus=1))


def test_a_mesh_of_gpus_is_planned():
    plan = make_plan(describe(gpus=4), Options(mesh={"batch": 2, "model": 2}, layout="auto"))
    assert (plan.strategy.value, plan.replicas.value) == ("mesh", 1)
    assert plan.devices.value == ("GPU:0", "GPU:1", "GPU:2", "GPU:3")


def test_the_combine_pass_stays_off(monkeypatch):
    singleton = "tensorflow.dtensor.python.api._dtensor_singleton"
    monkeypatch.setattr(singleton, None)
    monkeypatch.delenv(COMBINE_PASS, raising=False)
    turn_combine_pass_off()
    assert os.environ[COMBINE_PASS] == "0"
    monkeypatch.setattr(singleton, "made")
    turn_combine_pass_off()
    monkeypatch.setenv(COMBINE_PASS, "1")
    with pytest.raises(ValueError, match=f"Start Python with {COMBINE_PASS}=0"):
        turn_combine_pass_off()
    monkeypatch.delenv(COMBINE_PASS)
    with pytest.raises(ValueError, match="This process has computed on a mesh before"):
        turn_combine_pass_off()
