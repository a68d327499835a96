"""Each model of others, trained by each component that claims it, ends where plain Keras ends on whole batches."""

import numpy as np
import pytest
from sample_models.foreign_models import APPLICATIONS, EXAMPLES, FOREIGN, TASKS
from trainings.foreign_ways import (
    accumulating,
    error,
    in_slices,
    norms,
    norms_one_by_one,
    on_replicas,
    recomputed,
    reference,
    watched,
    wrapped,
)

# What `make test` takes of all pairs: what compiles in seconds.
SHORT = {
    "MobileNetV3Small": (),
    "EfficientNetV2B0": (),
    "ResNet50V2": (),
    "ConvNeXtTiny": (),
    "DenseNet121": (),
    "BertTextClassifier": ("wrapped", "norms"),
    "GPT2CausalLM": (),
    "LlamaCausalLM": (),
    "ViTImageClassifier": (),
    "mnist_convnet": ("accumulating", "replicas", "shards", "in_slices", "recomputed"),
    "text_transformer": (),
    "bidirectional_lstm": (),
    "vision_transformer": (),
    "segmentation": (),
    "sequence_to_sequence": ("watched",),
}
# Rounding in float32, which plain Keras has too between a batch and its parts.
TOLERANCE = 1e-6
# Of norms after a step. Plain Keras's own move by 1.6e-6 where weights differ by 7.5e-9, as between two ways to sum.
NORMS_TOLERANCE = {"ConvNeXtTiny": 3e-6}


def models(way):
    """All of them; those that `make test` leaves out are marked."""
    return [pytest.param(name, marks=() if way in SHORT[name] else pytest.mark.long) for name in FOREIGN]


@pytest.mark.parametrize("name", models("accumulating"))
def test_accumulation(name):
    assert error(accumulating(name), reference(name).trained) < TOLERANCE


@pytest.mark.parametrize("name", models("in_slices"))
def test_slices(name):
    assert error(in_slices(name), reference(name).trained) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("name", models("recomputed"))
def test_recomputation(name):
    assert error(recomputed(name), reference(name).trained) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("name", APPLICATIONS)
def test_slices_without_a_graph(name):
    """Of those that take long to compile."""
    # In two, as each takes as long as the whole batch.
    assert error(in_slices(name, 4, run_eagerly=True), reference(name).trained) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("name", models("norms"))
def test_norms(name):
    start = reference(name).start
    wanted = norms_one_by_one(name, start)
    assert np.abs(norms(name, start) - wanted).max() < TOLERANCE * wanted.max()


@pytest.mark.long
@pytest.mark.parametrize("name", models("wrapped"))
def test_wrapped(name):
    trained, shown = wrapped(name)
    assert error(trained, reference(name).trained) < TOLERANCE
    wanted = norms_one_by_one(name, reference(name).middle)
    assert np.abs(shown - wanted).max() < NORMS_TOLERANCE.get(name, TOLERANCE) * wanted.max()


@pytest.mark.long
@pytest.mark.parametrize("name", models("watched"))
def test_watched(name, tmp_path):
    # Reading the trace of a large model takes xprof many seconds.
    profiles = name not in APPLICATIONS
    trained, telemetry = watched(name, tmp_path, profiles)
    wanted = reference(name).trained
    assert error(trained, wanted) < TOLERANCE
    np.testing.assert_allclose(telemetry.last.model.gradient_norm, wanted.gradients, rtol=TOLERANCE)
    written = {path.name for path in tmp_path.rglob("*")}
    assert {"telemetry.csv", "throughput.csv"} <= written
    assert ("keras_paragrad.json" in written) == profiles


@pytest.mark.own_process(seconds=900)
@pytest.mark.parametrize("name", models("replicas"))
def test_replicas(mirrored, name):
    assert error(on_replicas(name, mirrored), reference(name).trained) < TOLERANCE


@pytest.mark.long
@pytest.mark.own_process(seconds=900)
@pytest.mark.parametrize("name", models("shards"))
def test_shards(mirrored, name):
    assert error(on_replicas(name, mirrored, shard="parameters"), reference(name).trained) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("name", [*TASKS, *EXAMPLES])
def test_compiled_by_xla(name):
    wanted = reference(name).trained
    for way in (accumulating, in_slices, lambda name, **options: wrapped(name, **options)[0]):
        # XLA orders its sums in another way than the operations of the reference.
        assert error(way(name, jit_compile=True), wanted) < 3 * TOLERANCE
