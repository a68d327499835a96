"""Two devices for every test, processes of their own for those that need one, and the wheel under test."""

import ctypes
import gc
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# TensorFlow's convolutions take channels first on CPUs by oneDNN alone, which it uses unasked on some processors only.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# XLA's own passes run as ever; LLVM's, where most of the time of compiling went, don't. `make test-all` runs them.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import hypothesis
import pytest
from runner import covering, graphs, left_out, own_process, tiers

# A case compiles training steps, which takes seconds: the same few are drawn in every run, and a failure is not shrunk.
# To draw more: CASES=50 make test.
hypothesis.settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("CASES", "3")),
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("default")

_libc = ctypes.CDLL(None)
# What a process keeps after a module, of the 2.5 GB that it may take.
_KEPT_BYTES = 1.5e9


def _configure_tensorflow():
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )


def pytest_configure(config):
    # The process that hands the tests out to others runs none, and they start after its imports.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        _configure_tensorflow()
    tiers.register(config)
    config.addinivalue_line(
        "markers",
        "own_process(seconds=120): run the test in a process of its own, ended after that time. For what starts a "
        "strategy's collectives: after one has failed, or in a second strategy, TensorFlow fails in the same process.",
    )
    config.addinivalue_line(
        "markers",
        "covering(strength=1): of all combinations of the test's parameters, `make test` runs a few in which each "
        "value occurs, or each pair of values with a strength of 2. The others are marked `long`.",
    )
    config.addinivalue_line(
        "markers",
        "few(count, *also): of the test's cases, `make test` runs the first so many, and those with these ids. The "
        "others are marked `long`.",
    )
    config.addinivalue_line(
        "markers",
        "grappler: have graphs optimized as users have them. Elsewhere they run as they were traced, since optimizing "
        "takes longer than running; `make test-all` optimizes all.",
    )
    # Keras says so at the end of every epoch of a dataset that does not know its own length.
    config.addinivalue_line("filterwarnings", "ignore:Your input ran out of data:UserWarning")
    # The development version of Keras says so of its own recurrent layers, alone as well, which do use their mask.
    recurrent = (
        r"Layer '\w+' \(of type (LSTM|GRU|SimpleRNN|RNN|Bidirectional|TimeDistributed)\) was passed an input with"
    )
    config.addinivalue_line("filterwarnings", f"ignore:{recurrent}:UserWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    covering.mark_long(items)
    if part := os.environ.get("PART"):
        tiers.keep_part(items, part)
    tiers.slowest_first(items)


def pytest_terminal_summary(terminalreporter):
    left_out.report(terminalreporter)


def pytest_collection_finish():
    # What is imported by now stays, and tracing makes many objects that do: collections took 7 % of the tests' time.
    own_process.collect_rarely()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    marker = pyfuncitem.get_closest_marker("own_process")
    if marker is None or own_process.is_this_one():
        return None
    path, _, name = pyfuncitem.nodeid.partition("::")
    node = f"{Path(pyfuncitem.config.rootpath, path)}::{name}"
    config = pyfuncitem.config
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(config.inipath),
        "--rootdir",
        str(config.rootpath),
        "-m",
        "",
    ]
    own_process.run_pytest([*options, node], seconds=marker.kwargs.get("seconds", 240))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    traced = tiers.Traced()
    result = yield
    if refusal := traced.refusal(item):
        pytest.fail(f"{item.name} {refusal}", pytrace=False)
    return result


@pytest.fixture(autouse=True)
def _fresh_keras(request):
    import keras

    graphs.leave_unoptimized(optimized=request.node.get_closest_marker("grappler") is not None)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def _kernels_chosen_as_before():
    yield
    # Of a process, and Keras turns XLA off then.
    graphs.leave_determinism()


@pytest.fixture(autouse=True, scope="module")
def _memory_given_back():
    yield
    from keras_paragrad.engine.tracing import gradient_functions
    from keras_paragrad.memory.available import resident_bytes

    # Collecting takes half a second, and most modules leave little.
    if (resident_bytes() or 0) < _KEPT_BYTES:
        return
    # TensorFlow registers a graph's gradient functions for ever, and each of them holds the graph.
    registered = gradient_functions.gradient_registry._registry.values()
    graphs = [gradient_functions._graph_of(entry["type"]) for entry in registered]
    gradient_functions.keep_with_graphs([graph for graph in graphs if graph is not None])
    del graphs
    gc.collect()
    # glibc keeps what was freed.
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


@pytest.fixture
def mirrored(request):
    """Two replicas on the two devices; for tests marked `own_process`."""
    import tensorflow as tf

    assert request.node.get_closest_marker("own_process"), "mark the test with pytest.mark.own_process"
    # Outside, the test is not run.
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if own_process.is_this_one() else None
