"""What is made of a trace, on traces that are made up: each figure can be counted by hand."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from sample_models.machines import describe
from trainings import profiled

from keras_paragrad.distribution.options import Options
from keras_paragrad.distribution.plan import make_plan
from keras_paragrad.profiling.analysis import advice, summarize
from keras_paragrad.profiling.analysis.advice import Evidence, Finding, advise, recommendation
from keras_paragrad.profiling.analysis.events import Coverage, Trace, TraceEvent
from keras_paragrad.profiling.analysis.operations import (
    LayerNames,
    Operation,
    compiled_operations,
    input_stages,
    longest_operations,
    slowest_input_stage,
)
from keras_paragrad.profiling.analysis.steps import step_times
from keras_paragrad.profiling.summary import (
    Advice,
    Communication,
    LayerTime,
    OperationTime,
    PipelineTime,
    RunInfo,
    StepTime,
)

pytestmark = pytest.mark.fast

MILLISECOND = 1e6
SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted), max_size=8)


def ticks(spans):
    """The unit intervals that spans cover."""
    return {tick for begin, end in spans for tick in range(begin, end)}


@given(SPANS, SPANS, st.integers(0, 40), st.integers(0, 40))
def test_coverage_is_that_of_counted_ticks(one, other, begin, end):
    begin, end = sorted((begin, end))
    inside = set(range(begin, end))
    assert Coverage(one).within(begin, end) == len(ticks(one) & inside)
    assert (Coverage(one) | Coverage(other)).within(begin, end) == len((ticks(one) | ticks(other)) & inside)
    assert (Coverage(one) & Coverage(other)).within(begin, end) == len(ticks(one) & ticks(other) & inside)


def spans(*pairs):
    return [(begin * MILLISECOND, end * MILLISECOND) for begin, end in pairs]


def event(begin, end, line=0, **more):
    return TraceEvent(begin * MILLISECOND, end * MILLISECOND, line, **more)


def marker(begin, end, **stats):
    return event(begin, end, stats={key: str(value) for key, value in stats.items()})


def pull(begin, filled=True):
    return event(begin, begin, stats={"element_size": 1} if filled else {})


def test_each_moment_counts_once_for_the_first_that_it_can_be():
    trace = Trace(markers=[marker(0, 20, step_num=3, _r=1)])
    trace.host[0] = spans((1, 15))
    trace.input = spans((1, 6))
    trace.operations = spans((4, 9), (17, 19))
    trace.collective = spans((8, 12))
    (step,) = step_times(trace)
    # Operations while nothing is called are the input pipeline's.
    assert step == StepTime(3, None, 0.0, 20.0, input=5, host=3, compute=3, collective=3, idle=6)


def test_a_collective_counts_to_the_end_of_its_own_step():
    trace = Trace(markers=[marker(0, 10, step_num=0, _r=1), marker(10, 20, step_num=1, _r=1)])
    trace.collective = spans((4, 13))
    assert [(step.collective, step.idle) for step in step_times(trace)] == [(6, 4), (0, 10)]


def test_what_a_device_computes_is_not_waited_for():
    trace = Trace(markers=[marker(0, 10, step_num=0, _r=1)], has_device=True)
    trace.host[0] = spans((0, 10))
    trace.input = spans((0, 6))
    trace.device = spans((2, 9))
    assert step_times(trace) == (StepTime(0, None, 0.0, 10.0, input=2, host=1, compute=7),)


def test_other_threads_work_counts_to_the_end_of_its_own_step():
    trace = Trace(markers=[marker(0, 10, step_num=0, _r=1), marker(10, 20, step_num=1, _r=1)])
    trace.host[0] = spans((0, 2))
    trace.calls = [event(1, 1, 0, flow="a"), event(4, 4, 7, flow="b"), event(5, 5, 9, flow="c")]
    # The second is called in the first; the third on a thread that does nothing for this training.
    trace.work = [event(3, 5, 7, flow="a"), event(6, 14, 8, flow="b"), event(5, 9, 9, flow="c")]
    first, second = step_times(trace)
    assert (first.host, first.idle) == (2 + 2 + 4, 2)
    assert (second.host, second.idle) == (0, 10)


@pytest.mark.parametrize(
    ("thread", "hands_on", "takes_up"),
    [
        ("tf_data_iterator_get_next", "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"),
        ("collective_ops", "CollectiveExecutor::CompleteParams", "CollectiveExecutor::CompleteParamsAsync::Done"),
    ],
)
def test_a_thread_that_is_held_up_is_busy_as_in_xprof(tmp_path, thread, hands_on, takes_up):
    held_up = {2: 560}
    threads = {"python": [], "tf_Compute": [], thread: []}
    for step in range(4):
        begin = 1000 * step
        done = begin + 160 + held_up.get(step, 0)
        threads["python"] += [
            ("train", begin, begin + 1000, {"step_num": step, "_r": 1, "batch": step, "ran": 1}),
            ("FunctionRun", begin + 100, begin + 200, {"_r": 1, "_pt": 2, "_p": 10 + step}),
        ]
        threads["tf_Compute"] += [
            ("ExecutorState::Process", begin + 110, begin + 150, {"_ct": 2, "_c": 10 + step}),
            (hands_on, begin + 120, begin + 130, {"_pt": 2, "_p": 100 + step}),
        ]
        threads[thread] += [(takes_up, begin + 140, done, {"_ct": 2, "_c": 100 + step})]
    profiled.write_trace(tmp_path, threads)
    found = [step.host for step in summarize(tmp_path).steps]
    assert found == pytest.approx([0.05, 0.05, 0.61, 0.05])
    assert found == pytest.approx(
        [row["hostComputeTimeMs"] for row in profiled.table(tmp_path, "overview_page", "stepTimeMs")]
    )


def test_waiting_for_the_lock_is_input_while_python_makes_batches(tmp_path):
    batch = {"batch": 0, "step_num": 0, "_r": 1, "ran": 1}
    threads = {
        "python": [
            ("train", 0, 1000, batch),
            ("TFE_Py_ExecuteCancelable", 100, 900, {}),
            ("EagerExecute", 110, 300, {}),
        ],
        "tf_data_private_threadpool": [("PyFunc:PyFunc", 250, 700, {})],
    }
    profiled.write_trace(tmp_path, threads)
    (step,) = summarize(tmp_path).steps
    # From 300 on only the lock is missing; until 700 the pipeline has it, and afterwards somebody else.
    assert (step.input, step.host, step.idle) == pytest.approx((0.4, 0.4, 0.2))


def test_python_that_a_step_calls_is_named_and_the_pipeline_s_is_not(tmp_path):
    threads = {
        "python": [
            ("train", 0, 1000, {"batch": 0, "step_num": 0, "_r": 1, "ran": 1}),
            ("FunctionRun", 100, 900, {"_r": 1, "_pt": 2, "_p": 10}),
        ],
        "tf_Compute": [
            ("ExecutorState::Process", 110, 890, {"_ct": 2, "_c": 10}),
            ("StatefulPartitionedCall/m_1/odd_1/PyFunc:PyFunc", 150, 750, {}),
            ("StatefulPartitionedCall/m_1/dense_1/MatMul:MatMul", 750, 850, {}),
        ],
        "tf_data_private_threadpool": [("PyFunc:PyFunc", 200, 900, {})],
    }
    profiled.write_trace(tmp_path, threads)
    summary = summarize(tmp_path, layers=["odd", "dense"])
    assert [(operation.kind, operation.layer) for operation in summary.operations] == [
        ("PyFunc", "odd"),
        ("MatMul", "dense"),
    ]
    assert summary.steps[0].compute == pytest.approx(0.7)
    assert summary.advice.kind == "python" and summary.advice.text.startswith("Write what odd calls in Python")
    assert summary.advice.evidence.startswith("60% of the step waits for Python code")
    # It is named before the part of the step that it is in.
    threads["tf_Compute"][1] = ("StatefulPartitionedCall/compile_loss/own/PyFunc:PyFunc", 150, 750, {})
    profiled.write_trace(tmp_path, threads)
    assert summarize(tmp_path, layers=["dense"]).advice.text.startswith("Write what compile_loss/own calls in Python")


@pytest.mark.parametrize(("calls", "functions", "kind"), [(30, 0, "python"), (30, 1, "host"), (5, 0, "host")])
def test_a_step_that_runs_eagerly_is_named(calls, functions, kind):
    trace = Trace(markers=[marker(10 * number, 10 * number + 10, batch=number) for number in range(4)])
    trace.python_calls[0] = spans(
        *((10 * number + 0.2 * n, 10 * number + 0.2 * n) for number in range(4) for n in range(calls))
    )
    trace.functions = [event(1, 2, stats={"tracing_count": 1})] * functions
    advice = advise(Evidence(steps(host=50, idle=50), trace=trace))
    assert advice.kind == kind
    assert ("run_eagerly" in advice.text) == (kind == "python")
    assert kind == "host" or f"in {calls} calls of TensorFlow" in advice.evidence


def call(begin, end, batch, **stats):
    return marker(begin, end, **{"batch": batch, "update": batch, "pulls": 1, "count": 3, "ran": 1, **stats})


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_call_of_several_batches_is_cut_where_they_are_taken(replicas):
    trace = Trace(markers=[call(0, 9, 6, pulls=replicas, left=2, each=2)])
    trace.pulls = [pull(begin + replica / 10) for begin in (1, 5, 7) for replica in range(replicas)]
    assert [(step.step, step.update, step.begins, step.duration) for step in step_times(trace)] == [
        *((6, 6, 0.0, 5.0), (7, 6, 5.0, 2.0), (8, 7, 7.0, 2.0))
    ]


@pytest.mark.parametrize("replicas", [1, 2])
def test_data_that_ends_within_a_call(replicas):
    trace = Trace(markers=[call(0, 9, 6, pulls=replicas), call(9, 12, 8, pulls=replicas)])
    trace.pulls = [pull(begin, begin < 7) for begin in (1, 5, 7, 10) for _ in range(replicas)]
    assert [(step.step, step.duration) for step in step_times(trace)] == [(6, 5.0), (7, 4.0)]


def test_a_call_that_never_ran_is_no_step():
    trace = Trace(markers=[marker(0, 2, batch=4, ran=1), marker(2, 3, batch=5)])
    assert [step.step for step in step_times(trace)] == [4]


def test_batches_count_where_updates_are_marked_around_them():
    update = marker(0, 8, step_num=1, _r=1)
    trace = Trace(markers=[update, *(marker(2 * i, 2 * i + 2, batch=4 + i, update=1, ran=1) for i in range(4))])
    assert [(step.step, step.update) for step in step_times(trace)] == [(4, 1), (5, 1), (6, 1), (7, 1)]


@given(SPANS, SPANS, SPANS, SPANS, st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_the_parts_add_up_to_the_duration(host, waiting, operations, collective, lengths):
    ends = np.cumsum(lengths).tolist()
    trace = Trace(
        markers=[marker(end - length, end, step_num=0, _r=1) for end, length in zip(ends, lengths, strict=True)]
    )
    trace.host[0] = spans(*host)
    trace.input, trace.operations, trace.collective = spans(*waiting), spans(*operations), spans(*collective)
    for step in step_times(trace):
        parts = (step.input, step.host, step.compute, step.collective, step.idle)
        assert min(parts) >= -1e-9
        assert sum(parts) == pytest.approx(step.duration)


def test_operations_that_xla_made_count_their_own_time():
    ran = [
        event(0, 10, name="while.1"),
        event(1, 3, name="add.2"),
        event(5, 6, name="add.2"),
        event(2, 4, 1, name="multiply_fusion"),
    ]
    assert compiled_operations(ran) == [
        Operation("while.1", "while", 1, 7.0, False),
        Operation("add.2", "add", 2, 3.0, False),
        Operation("multiply_fusion", "fusion", 1, 2.0, False),
    ]


def test_only_the_devices_operations_count_where_there_are_any():
    found = [
        Operation("a/MatMul", "MatMul", 2, 9.0, False),
        Operation("kernel", "MatMul", 2, 3.0, True),
        Operation("other", "Sum", 2, 1.0, True),
        Operation("Iterator::Root::Map", "Dataset", 2, 40.0, False),
    ]
    assert [(each.name, each.share) for each in longest_operations(found, ())] == [("kernel", 0.75), ("other", 0.25)]
    assert [each.name for each in longest_operations(found[:1] + found[3:], ())] == ["a/MatMul"]
    assert slowest_input_stage(found) == "Map"
    assert "Map" in input_stages(found)


@pytest.mark.parametrize(
    ("layers", "names", "expected"),
    [
        (["dense"], ["model/dense/MatMul", "model/dense_1/MatMul"], ["dense", "dense"]),
        (["dense", "dense_1"], ["m/dense/MatMul", "m/dense_1/MatMul"], ["dense", "dense_1"]),
        (["dense", "dense_1"], ["m_1/dense_1/MatMul", "m_1/dense_1_1/MatMul"], ["dense", "dense_1"]),
        (["block", "query"], ["m/block/query/einsum/Einsum", "m/block/Softmax"], ["query", "block"]),
        (["dense"], ["adam/dense_kernel/Mul", "Sum"], ["", ""]),
        ([], ["m/dense/MatMul"], [""]),
    ],
    ids=["counted", "numbered", "both", "nested", "optimizer", "unknown"],
)
def test_layers_by_their_scopes(layers, names, expected):
    found = LayerNames(layers, names)
    assert [found.of(name) for name in names] == expected


def steps(**parts):
    parts = {"input": 0.0, "host": 0.0, "compute": 0.0, "collective": 0.0, "idle": 0.0, **parts}
    return [StepTime(number, number, 0.0, sum(parts.values()), **parts) for number in range(4)]


LONGEST = [OperationTime("m/first/MatMul", "MatMul", "first", 4, 2.0, 0.5)]


@pytest.mark.parametrize(
    ("parts", "kind", "evidence"),
    [
        ({"input": 57, "compute": 43}, "input", "57% of the step waits for input (57.00 of 100.00 ms)"),
        ({"collective": 40, "compute": 60}, "collective", "40% of the step waits for other replicas"),
        (
            {"host": 40, "idle": 30, "compute": 30},
            "host",
            "70% of the step runs no operation: 40.0% on the host between operations, 30.0% idle (70.00 of 100.00 ms)",
        ),
        (
            {"compute": 90, "host": 10},
            "compute",
            "90% of the step computes (median 100.00 ms), 50% of operations' time",
        ),
        ({"compute": 35, "host": 45, "input": 19}, "none", "35% of the step computes"),
    ],
    ids=["input", "collective", "host", "compute", "none"],
)
def test_one_advice_with_its_evidence(parts, kind, evidence):
    found = advise(Evidence(steps(**parts), LONGEST))
    assert found.kind == kind
    assert evidence in found.evidence


def test_advice_fits_what_the_run_does():
    waiting = steps(collective=40, compute=60)
    hidden = Evidence(waiting, (), communication=Communication(100.0, 25.0))
    assert "25% of collectives being hidden" in advise(hidden).evidence
    assert "AccumulatingOptimizer(optimizer, steps=4)" in advise(hidden).text
    accumulating = advise(Evidence(waiting, (), RunInfo(optimizer="AccumulatingOptimizer(Adam)")))
    assert accumulating.text == "Use larger batches per replica, or take more batches for an update."
    layers = [LayerTime("first", 2.0, 3.0, 2.0), LayerTime("last", 1.0, 2.0)]
    found = advise(Evidence(steps(compute=90, host=10), LONGEST, layers=layers))
    assert found.kind == "recompute" and "recompute fewer layers; first costs most" in found.text
    assert "18% of the step computes forward passes a second time" in found.evidence
    found = advise(Evidence(steps(compute=90, host=10), LONGEST, layers=layers[1:]))
    assert found.kind == "compute" and "the layer that takes longest is last, 100%" in found.evidence
    for ideal, text in ((0.4, "Pipeline(microbatches=8)"), (0.2, "Pipeline(cuts=[...])")):
        found = advise(Evidence(steps(compute=100), LONGEST, pipeline=PipelineTime(2, 4, 0.5, ideal)))
        assert found.kind == "pipeline" and text in found.text
        assert found.evidence.startswith("50% of the step has stages wait for each other (50.00 of 100.00 ms); ")


def test_advice_names_what_is_not_yet_done():
    host, on_gpu = steps(host=90, compute=10), {"devices": ("/device:CPU:0", "/device:GPU:0")}
    assert "jit_compile=True" in advise(Evidence(host, (), RunInfo(**on_gpu))).text
    assert "jit_compile" not in advise(Evidence(host, (), RunInfo(jit=True, **on_gpu))).text
    several = RunInfo(jit=True, steps_per_execution=8, **on_gpu)
    assert "steps_per_execution" not in advise(Evidence(host, (), several)).text
    assert "DistributedFit(jit=True)" in advise(Evidence(host, (), RunInfo(replicas=2, **on_gpu))).text
    assert "larger batches" in advise(Evidence(host, (), RunInfo(replicas=2))).text
    assert advise(Evidence((), ())) is None


@pytest.mark.parametrize(
    ("run", "policy"),
    [
        ({"device_kind": "GPU", "compute_capability": (9, 0)}, "mixed_bfloat16"),
        ({"device_kind": "GPU", "compute_capability": (8, 0)}, "mixed_bfloat16"),
        ({"device_kind": "GPU", "compute_capability": (7, 5)}, "mixed_float16"),
        ({"device_kind": "GPU", "compute_capability": (6, 1)}, None),
        ({"device_kind": "GPU"}, None),
        ({"devices": ("/device:GPU:0",), "compute_capability": (8, 0)}, "mixed_bfloat16"),
        # There is a GPU, and the model lies on the processor.
        ({"devices": ("/device:CPU:0", "/device:GPU:0"), "device_kind": "CPU"}, None),
        ({"device_kind": "CPU"}, None),
    ],
    ids=str,
)
def test_16_bits_are_advised_as_the_plan_does(run, policy):
    computing = steps(compute=9)
    text = advise(Evidence(computing, LONGEST, RunInfo(**run))).text
    assert (f'set_global_policy("{policy}")' in text) if policy else ("float16" not in text)
    assert ("jit_compile=True" in text) == (run.get("device_kind", "GPU") != "CPU")
    assert "float16" not in advise(Evidence(computing, LONGEST, RunInfo(precision="mixed_bfloat16", **run))).text
    kind, capability = run.get("device_kind", "GPU"), run.get("compute_capability")
    plan = make_plan(describe(compute_capability=capability, gpus=int(kind == "GPU")), Options())
    advised = [each for each in ("mixed_bfloat16", "mixed_float16") if f"{each} would be faster" in str(plan.precision)]
    assert advised == [policy] * bool(policy)


@pytest.mark.parametrize("devices", [("/device:CPU:0", "/device:CPU:1"), ()], ids=["CPUs", "unknown"])
@pytest.mark.parametrize("parts", [{"host": 90, "compute": 10}, {"compute": 90}], ids=str)
def test_xla_and_16_bits_are_advised_only_where_they_are_known_to_help(parts, devices):
    found = advise(Evidence(steps(**parts), LONGEST, RunInfo(devices=devices)))
    assert "jit_compile" not in found.text
    assert "float16" not in found.text


@pytest.mark.parametrize(
    ("stages", "advised", "done"),
    [
        ((), ("num_parallel_calls", "prefetch(", "cache()"), ("workers",)),
        (("Map", "TensorSlice"), ("num_parallel_calls", "prefetch("), ("workers",)),
        (("ParallelMapV2", "TensorSlice"), ("prefetch(",), ("num_parallel_calls",)),
        (("Prefetch", "Map", "MemoryCacheImpl"), ("num_parallel_calls",), ("prefetch(", "cache()")),
        (("Prefetch", "ParallelMapV2"), ("cache()", "slowest stage"), ("num_parallel_calls", "prefetch(", "dataset.")),
        (("MapAndBatch", "TensorSlice"), ("num_parallel_calls=n", "cache()"), ("prefetch(", "AUTOTUNE")),
        (("Prefetch", "MapAndBatch", "MemoryCacheImpl"), ("num_parallel_calls=n",), ("prefetch(", "cache()")),
        (("Prefetch", "FlatMap", "Generator"), ("workers=", "use_multiprocessing"), ("prefetch(", "dataset.")),
    ],
    ids=["unknown", "neither", "parallel", "prefetched and cached", "both", "joined", "joined and cached", "generator"],
)
def test_input_advice_names_what_the_pipeline_does_not_do_yet(stages, advised, done):
    pipeline = [Operation("Iterator::Root::" + "::".join(stages), "Dataset", 1, 1.0, False)] if stages else []
    text = advise(Evidence(steps(input=90, compute=10), recorded=pipeline)).text
    assert all(part in text for part in advised), text
    assert not any(part in text for part in done), text


@pytest.mark.parametrize(("count", "advised"), [(1, "ProfileSchedule(skip_first=5)"), (2, "drop_remainder=True")])
def test_functions_that_are_compiled(count, advised):
    trace = Trace(markers=[marker(0, 30, step_num=4, _r=1), marker(30, 32, step_num=5, _r=1)])
    trace.host[0] = spans((0, 28))
    trace.operations = spans((22, 24))
    # What another thread traces holds no step up; the outermost of functions is what was called.
    calls = ((2, 25, 0, count), (3, 20, 0, 3), (26, 28, 0, 5), (0, 30, 1, 3))
    trace.functions = [event(*call[:3], stats={"tracing_count": call[3]}) for call in calls]
    trace.graphs = [event(begin, begin, line) for begin, line in ((4, 0), (5, 0), (1, 1))]
    found = step_times(trace)
    assert found[0] == StepTime(4, None, 0.0, 30.0, host=5, compile=21, compute=2, idle=2)
    advice = advise(Evidence(found, trace=trace))
    assert advice.kind == "compile"
    assert advice.evidence == "66% of the step is spent compiling functions (10.50 of 16.00 ms)"
    assert advised in advice.text


LAYER_TIMES = {
    "conv_1": LayerTime("conv_1", 2.0, 6.0, kind="Conv2D"),
    "conv_2": LayerTime("conv_2", 1.0, 3.0, kind="Conv2D"),
    "scale": LayerTime("scale", 1.0, 1.0, kind="BatchNormalization"),
    "head": LayerTime("head", 1.0, 1.0, kind="Dense"),
}


def spent(kind="CPU", operations=LONGEST, run=None, **parts):
    """The advice for a step that computes, with milliseconds of layers, and of what belongs to none."""
    layers = []
    for name, times in parts.items():
        made = LAYER_TIMES.get(name, LayerTime(name, other=times, is_layer=False))
        layers.append(replace(made, forward=times * made.forward))
    evidence = Evidence(steps(compute=90, host=10), operations, RunInfo(device_kind=kind, **(run or {})), layers=layers)
    return advise(evidence)


@pytest.mark.parametrize("kind", ["CPU", "GPU"])
@pytest.mark.parametrize(
    ("parts", "found", "advised"),
    [
        ({"conv_1": 1, "optimizer": 8.0}, "optimizer", "AccumulatingOptimizer(optimizer, steps=4)"),
        ({"head": 1, "loss": 2.0}, "loss", "Predict fewer classes"),
        ({"conv_1": 1, "scale": 6}, "normalization", "BatchNormalization reads and writes"),
    ],
    ids=["optimizer", "loss", "normalization"],
)
def test_advice_is_about_what_takes_the_time(kind, parts, found, advised):
    advice = spent(kind, **parts)
    assert advice.kind == found and advised in advice.text
    assert ("jit_compile=True" in advice.text) == (kind == "GPU")
    assert "jit_compile" not in spent(kind, run={"jit": True}, **parts).text
    assert ("DistributedFit(jit=True)" in spent(kind, run={"replicas": 2}, **parts).text) == (kind == "GPU")


def test_advice_names_the_layers_that_compute():
    advice = spent(conv_1=1, conv_2=1, head=1)
    assert advice.kind == "compute"
    assert "Conv2D layers take 86% of it; conv_1 (Conv2D) is the longest, with 0.5 ms forward, 1.5 ms" in advice.text
    assert "SeparableConv2D, or train on a GPU" in advice.text
    assert "fewer units" in spent(head=1).text
    capable = {"compute_capability": (9, 0)}
    on_gpu = spent("GPU", run=capable, conv_1=1).text
    assert "jit_compile=True" in on_gpu and "mixed_bfloat16" in on_gpu and "train on" not in on_gpu
    fast = spent("GPU", run={**capable, "jit": True, "precision": "mixed_bfloat16"}, conv_1=1).text
    assert "train on more GPUs, with DistributedFit" in fast


@pytest.mark.parametrize(
    ("name", "runs", "kind"),
    [
        ("while/body/_1/m_1/lstm_1/while/cell_1/MatMul", 80, "recurrent"),
        ("gradients/m_1/lstm_1/while/cell_1/MatMul_grad/MatMul", 80, "recurrent"),
        ("m_1/lstm_1/while/cell_1/MatMul", 2, "compute"),
        # Around the layers, as over micro-batches.
        ("while/body/_1/m_1/lstm_1/MatMul", 80, "compute"),
    ],
)
def test_loops_of_layers_are_told_from_loops_around_them(name, runs, kind):
    layers = [LayerTime("lstm", 2.0, 3.0, kind="LSTM"), LayerTime("cell", 2.0, 3.0, kind="LSTMCell")]
    operations = [OperationTime(name, "MatMul", "cell", 4 * runs, 9.0, 0.9)]
    found = advise(Evidence(steps(compute=9), operations, RunInfo(device_kind="CPU"), layers=layers))
    assert found.kind == kind
    if kind == "recurrent":
        assert found.text.startswith("Use larger batches, or shorter sequences: lstm computes")
        assert "80 in all" in found.text and "cuDNN" not in found.text
        found = advise(Evidence(steps(compute=9), operations, RunInfo(device_kind="GPU"), layers=layers))
        assert "cuDNN" in found.text


def test_one_function_is_all_that_a_recommendation_takes(monkeypatch):
    monkeypatch.setattr(advice, "_RECOMMENDATIONS", dict(advice._RECOMMENDATIONS))

    @recommendation("memory", worth=0.01)
    def swapping(evidence):
        return Finding(0.2 * bool(evidence.run.devices), "waits for the disk", "Buy memory.", ", all of it")

    assert advise(Evidence(steps(compute=25))).kind == "none"
    found = advise(Evidence(steps(input=10, compute=15), run=RunInfo(devices=("/device:CPU:0",))))
    assert found == Advice("memory", "Buy memory.", "20% of the step waits for the disk (5.00 of 25.00 ms), all of it")


def test_a_folder_without_a_trace(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \*.xplane.pb.*Pass the folder of one trace"):
        summarize(tmp_path)


@pytest.mark.not_fast
def test_another_programs_trace_with_and_without_steps(tmp_path):
    def traced(folder, mark):
        model = profiled.model()
        batch = profiled.arrays(1)
        model.train_on_batch(*batch)
        tf.profiler.experimental.start(str(folder))
        for number in range(5):
            if mark:
                with tf.profiler.experimental.Trace("theirs", step_num=number, _r=1):
                    model.train_on_batch(*batch)
            else:
                model.train_on_batch(*batch)
        tf.profiler.experimental.stop()
        (file,) = folder.rglob("*.xplane.pb")
        before = sorted(file.parent.iterdir())
        found = summarize(file.parent)
        # Reading leaves nothing behind.
        assert sorted(file.parent.iterdir()) == before
        return found

    marked, unmarked = traced(tmp_path / "marked", True), traced(tmp_path / "unmarked", False)
    assert [step.step for step in marked.steps] == [0, 1, 2, 3, 4]
    assert marked.trace.startswith("plugins/profile/")
    assert marked.operations and marked.advice
    assert unmarked.steps == () and unmarked.advice is None
    assert "no step markers" in unmarked.notes[0]
