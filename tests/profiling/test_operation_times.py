"""Times by layer, pass and kind, hidden communication and memory: from traces by hand, counted event by event."""

from collections import Counter

import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st
from trainings import profiled

from keras_paragrad import recompute
from keras_paragrad.profiling.analysis import summarize
from keras_paragrad.profiling.analysis.events import Trace, TraceEvent
from keras_paragrad.profiling.analysis.steps import communication
from keras_paragrad.profiling.schedule import ProfileSchedule
from keras_paragrad.profiling.summary import Communication, KindTime, RunInfo
from keras_paragrad.profiling.tracer import Profiler

pytestmark = pytest.mark.fast

# By an operation's name: its kind, and the layer and the pass that its time is of.
NAMES = {
    "StatefulPartitionedCall/m_1/dense_1/MatMul": ("_MklMatMul", "dense", "forward"),
    "m_1/dense_1/Relu": ("Relu", "dense", "forward"),
    "gradient_tape/m_1/dense_1/MatMul/MatMul_1": ("MatMul", "dense", "backward"),
    "StatefulPartitionedCall/second_run_1/dense_1/MatMul": ("_MklMatMul", "dense", "recompute"),
    "gradient_tape/second_run_1/dense_1/MatMul": ("MatMul", "dense", "backward"),
    "m_1/recomputed/block_1/query_1/Einsum": ("Einsum", "query", "forward"),
    "m_1/block_1/Softmax": ("Softmax", "block", "forward"),
    "compile_loss/mse/Mean": ("Mean", "loss", "forward"),
    "gradient_tape/compile_loss/mse/Mul": ("Mul", "loss", "backward"),
    "adam/update_1_2/Sqrt": ("Sqrt", "optimizer", "other"),
    "StatefulPartitionedCall/adam_w_1/Pow_8": ("Pow", "optimizer", "other"),
    "CollectiveReduceV2_1": ("CollectiveReduceV2", "collectives", "other"),
    "Sigmoid_1": ("Sigmoid", "no layer named", "other"),
}
LAYERS = ("dense", "block", "query")
SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted), max_size=8)


def spans(*pairs):
    return [(begin * 1e6, end * 1e6) for begin, end in pairs]


def ticks(pairs):
    """The milliseconds that spans cover."""
    return {tick for begin, end in pairs for tick in range(begin, end)}


def step_until(end):
    return [TraceEvent(0.0, end * 1e6, stats={"step_num": "0", "_r": "1"})]


def test_times_are_those_of_the_innermost_operation_at_each_moment(tmp_path):
    # On each thread, an operation of 8 microseconds around one of 3, over and over; one runs on both threads.
    ran = [name for name in NAMES for _ in range(1 + len(name) % 3)]
    threads = {"python": [("train", 0, 1000, {"step_num": 5, "_r": 1, "batch": 5, "ran": 1})]}
    expected, runs = Counter(), Counter()
    for thread, offset in (("tf_Compute/1", 0), ("tf_Compute/2", 5)):
        events = threads[thread] = []
        for index, name in enumerate(ran):
            begin, inner = 20 * index + offset, ran[(7 * index + 3) % len(ran)]
            events += [
                (f"{name}:{NAMES[name][0]}", begin, begin + 8, {}),
                (f"{inner}:{NAMES[inner][0]}", begin + 2, begin + 5, {}),
            ]
            expected[name] += 5
            expected[inner] += 3
            runs.update((name, inner))
    profiled.write_trace(tmp_path, threads)
    found = summarize(tmp_path, run=RunInfo(optimizer="Accumulating(AdamW)"), layers=LAYERS)

    times = {
        (layer.name, part): getattr(layer, part)
        for layer in found.layers
        for part in ("forward", "backward", "recompute", "other")
    }
    by_pass = Counter()
    for name, (_, layer, part) in NAMES.items():
        by_pass[layer, part] += expected[name] / 1000
    assert {key: time for key, time in times.items() if time} == pytest.approx(dict(by_pass))
    assert {layer.name for layer in found.layers if layer.is_layer} == set(LAYERS)
    assert [layer.total for layer in found.layers] == sorted((layer.total for layer in found.layers), reverse=True)

    kinds, kind_runs = Counter(), Counter()
    for name, (kind, *_) in NAMES.items():
        kinds[kind.removeprefix("_Mkl")] += expected[name] / 1000
        kind_runs[kind.removeprefix("_Mkl")] += runs[name]
    assert {each.kind: each.milliseconds for each in found.kinds} == pytest.approx(dict(kinds))
    assert {each.kind: each.count for each in found.kinds} == kind_runs
    assert sum(each.share for each in found.kinds) == pytest.approx(1)
    assert {each.name: each.count for each in found.operations} == runs
    assert type(found).from_dict(found.to_dict()) == found


def test_without_names_of_layers_there_are_no_times_of_them(tmp_path):
    profiled.write_trace(tmp_path, {"tf_Compute": [("m_1/dense_1/MatMul:MatMul", 0, 8, {})]})
    found = summarize(tmp_path)
    assert found.layers == () and found.communication is None and found.memory == ()
    assert found.kinds == (KindTime("MatMul", 1, 0.008, 1.0),)


@given(SPANS, SPANS)
def test_collectives_are_hidden_while_the_host_computes(collectives, operations):
    trace = Trace(markers=step_until(50), collective=spans(*collectives), operations=spans(*operations))
    trace.host[0] = spans((0, 50))
    found = communication(trace)
    expected = len(ticks(collectives)), len(ticks(collectives) & ticks(operations))
    assert (found is None) == (not expected[0])
    assert found is None or (found.milliseconds, found.hidden) == pytest.approx(expected)


@example([([[0, 4]], []), ([[9, 10]], [[0, 4]])])
@given(st.lists(st.tuples(SPANS, SPANS), min_size=1, max_size=3))
def test_a_device_hides_its_own_collectives(devices):
    trace = Trace(markers=step_until(30), has_device=True)
    inside, total, hidden = set(range(30)), 0, 0
    for index, (collectives, computing) in enumerate(devices):
        trace.device_collectives[str(index)] += spans(*collectives)
        trace.device_compute[str(index)] += spans(*computing)
        # What other devices compute hides nothing.
        total += len(ticks(collectives) & inside)
        hidden += len(ticks(collectives) & ticks(computing) & inside)
    found = communication(trace)
    assert found == (Communication(pytest.approx(total), pytest.approx(hidden)) if total else None)


def test_memory_is_what_the_allocator_held_in_each_batch(tmp_path):
    held = {150: 4096, 350: 1024, 1100: 8192, 1900: 2048, 2500: 512}
    allocator = {
        "allocator_name": "GPU_0_bfc",
        "bytes_reserved": 0,
        "bytes_available": 2**30,
        "peak_bytes_in_use": 8192,
    }
    memory = [
        (
            "MemoryAllocation",
            at,
            at,
            {**allocator, "bytes_allocated": size, "requested_bytes": 64, "allocation_bytes": 64, "addr": at, "id": 1},
        )
        for at, size in held.items()
    ]
    steps = [
        ("train", 100 + 1000 * n, 1100 + 1000 * n, {"step_num": 4 + n, "_r": 1, "batch": 4 + n, "ran": 1})
        for n in range(2)
    ]
    profiled.write_trace(tmp_path, {"python": steps, "tf_Compute": memory})
    (use,) = summarize(tmp_path).memory
    assert use.name == "GPU_0_bfc"
    # The last is after the steps.
    assert use.batches == pytest.approx((4.05, 4.25, 5.0, 5.8))
    assert use.values == (4096, 1024, 8192, 2048)


@pytest.mark.not_fast
def test_runs_that_the_thread_pool_shares_count_once(tmp_path):
    double = tf.function(lambda x: tf.exp(x) * 2)
    x = tf.zeros([2**22])
    double(x)
    tf.profiler.experimental.start(str(tmp_path))
    for _ in range(3):
        double(x)
    tf.profiler.experimental.stop()
    (file,) = tmp_path.rglob("*.xplane.pb")
    assert {each.kind: each.count for each in summarize(file.parent).kinds}.items() >= {("Exp", 3), ("Mul", 3)}


@pytest.mark.not_fast
def test_layers_that_run_again_are_told_apart(tmp_path):
    model = profiled.model()
    recompute(model, ["first", "first_1"])
    callback = Profiler(tmp_path, ProfileSchedule(skip_first=2, active=4), summary=False, report=None)
    model.fit(profiled.dataset(8), shuffle=False, verbose=0, callbacks=[callback])
    (summary,) = callback.summaries
    # Its tensors are too small for the allocator to record them.
    (memory,) = summary.memory
    assert memory.name == "host" and memory.batches == tuple(step.step for step in summary.steps)
    assert min(memory.values) > 2**20
    passes = {layer.name: (layer.forward > 0, layer.backward > 0, layer.recompute > 0) for layer in summary.layers}
    assert passes["first"] == passes["first_1"] == (True, True, True)
    assert passes["last"] == (True, True, False)
    # One forward, backward and second run for each batch.
    counts = Counter(
        each.name.replace("StatefulPartitionedCall/", "") for each in summary.operations for _ in range(each.count)
    )
    assert {count for name, count in counts.items() if "MatMul" in name} == {4}, counts
