"""Keras's and TensorFlow's private names stay in one package, and a missing one is named."""

import ast
import functools
import importlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from seam.seam_uses import PACKAGE, SEAM, imports_of_ours, private_attributes, private_imports
from tensorflow.python.eager import context

import keras_paragrad
from keras_paragrad import (
    AccumulatingOptimizer,
    DistributedFit,
    ExactAccumulation,
    GradientNoiseScale,
    GradientTelemetry,
    Throughput,
    microbatch,
)
from keras_paragrad.compat import private
from keras_paragrad.compat.check import FOUND, check_backend, check_internals, raise_missing
from keras_paragrad.compat.layers import call_model, dtype_within
from keras_paragrad.compat.names import HOOKS, NAMES, Hook
from keras_paragrad.engine.step.building import has_build

pytestmark = pytest.mark.fast

OUTSIDE = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in SEAM]
BASES = (keras.optimizers.Optimizer, keras.callbacks.Callback, keras.layers.Layer, keras.Model, keras.losses.Loss)
PRIVATE_TO_KERAS = {
    name for base in BASES for name in dir(base) if name.startswith("_") and not name.startswith("__")
} | set(vars(keras.optimizers.SGD())) - {name for name in vars(keras.optimizers.SGD()) if not name.startswith("_")}


def private_uses(source: str) -> list[str]:
    """What a module names of Keras's and TensorFlow's private parts."""
    found = []
    for node in ast.walk(ast.parse(source)):
        modules = []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        found += [name for name in modules if name.startswith(("keras.src", "tensorflow."))]
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if node.attr in ("extended", "__internal__") or (owner, node.attr) == ("keras", "src"):
            found.append(node.attr)
        if node.attr.startswith("_") and not node.attr.startswith("__"):
            ours = owner in ("self", "cls") and node.attr not in PRIVATE_TO_KERAS
            found += [] if ours else [node.attr]
    return found


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_seam_names_private_parts(path):
    assert private_uses(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import keras.src.losses",
        "from keras.src import tree",
        "from tensorflow.python.eager import context",
        "keras.src",
        "strategy.extended.update(v, f)",
        "model._compile_loss",
        "self._trainable_variables",
        "tf.__internal__",
    ],
)
def test_the_search_finds_them(source):
    assert private_uses(source)


# Those of `compat` that name private parts to look for them.
LOOKING = ("names", "check", "private")
MODULES = {
    ".".join((PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for folder in SEAM
    for path in sorted((PACKAGE / folder).rglob("*.py"))
    if path.stem not in (*LOOKING, "__init__")
}
PROBED = {(hook.module, part) for hook in HOOKS for part in ("", *hook.path.split("."))}


@pytest.mark.parametrize("module", MODULES)
def test_every_private_name_in_the_seam_is_probed(module):
    source = MODULES[module].read_text()
    attributes = {name for _, name in PROBED}
    missing = [
        *(f"{found} of {owner}, by another path" for owner, found in private_imports(source)),
        *(f"{found} of compat.private" for found in imports_of_ours(source) - private._HOOKS.keys()),
        *(private_attributes(source, module) - attributes),
    ]
    assert not missing, f"keras_paragrad/compat/names.py has no hook for {sorted(missing)} of {module}"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.module}:{hook.path}")
def test_each_hook_is_used(hook):
    name = hook.path.rpartition(".")[2] or hook.module.rpartition(".")[2]
    assert any(re.search(rf"\b{name}\b", path.read_text()) for path in MODULES.values())


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("model._new_loss", "_new_loss"),
        ("def f(self): self._unknown._new", "_new"),
        ("class A:\n    def f(self): return self.model._new", "_new"),
        ("getattr(model, '_new')", "_new"),
        ("vars(model)['_new'] = 1", "_new"),
        ("override_attributes(model, _new=1)", "_new"),
        ("tf.__internal__", "__internal__"),
        ("strategy.extended._create_variable(f)", "_create_variable"),
    ],
)
def test_the_scan_finds_attributes(source, found):
    assert found in private_attributes(source)


def test_the_scan_tells_attributes_of_a_base_from_our_own(monkeypatch):
    source = (
        "class Ours(keras.layers.Layer):\n"
        "    def _flatten_layers(self): return self._own\n"
        "    def f(self): return self._call_has_training_arg, self._metrics\n"
    )
    module = type(keras)("ours")
    exec(source, vars(module) | {"keras": keras}, vars(module))
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    assert private_attributes(source, "ours") == {"_flatten_layers", "_call_has_training_arg", "_metrics"}


def test_every_name_is_found():
    FOUND.clear()
    check_internals(*NAMES)


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (Hook("keras.src.nowhere", "_first_batches"), "keras.src.nowhere:_first_batches is missing"),
        (Hook("keras", "Model._first_batches"), "keras:Model._first_batches is missing"),
        (
            Hook("keras.src.losses.loss", "apply_mask", ("other",)),
            "apply_mask no longer takes other",
        ),
    ],
)
def test_a_missing_hook_is_named_with_the_versions(hook, says):
    with pytest.raises(ImportError, match=says) as caught:
        raise_missing([hook])
    for part in (keras.__version__, tf.__version__, "Known to work: keras 3.10", "(needed for "):
        assert part in str(caught.value)


def test_a_method_that_was_renamed_is_found(monkeypatch):
    monkeypatch.delattr(keras.layers.Layer, "_get_own_losses")
    with pytest.raises(ImportError, match=r"_get_own_losses is missing \(needed for models\)"):
        FOUND.clear()
        check_internals(*NAMES)


@pytest.mark.parametrize(
    ("owner", "method", "attribute", "part"),
    [
        (TFEpochIterator, "__init__", "_distributed_dataset", "replicas"),
        (keras.metrics.MeanMetricWrapper, "__init__", "_fn", "models"),
        (ArrayDataAdapter, "__init__", "_inputs", "data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_attribute_that_code_no_longer_assigns_is_found(monkeypatch, owner, method, attribute, part):
    def other(self, *args, **kwargs):
        self._renamed = None

    monkeypatch.setattr(owner, method, other)
    with pytest.raises(ImportError, match=rf"{attribute} is missing \(needed for {part}\)"):
        FOUND.clear()
        check_internals(*NAMES)


def test_looking_runs_nothing(monkeypatch):
    def start(self):
        raise AssertionError("TensorFlow's devices can no longer be configured")

    FOUND.clear()
    monkeypatch.setattr(context.Context, "ensure_initialized", start)
    check_internals(*NAMES)


def _model(optimizer="sgd"):
    return _compiled(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), optimizer)


def _compiled(model, optimizer="sgd"):
    model.compile(optimizer, "mse")
    return model


def _accumulating():
    return _model(AccumulatingOptimizer("sgd", steps=2))


def _fit(model, *callbacks, fit=keras.Model.fit):
    fit(model, np.zeros((4, 3)), np.zeros((4, 1)), verbose=0, callbacks=[*callbacks])


# What is made before, and its first use.
FIRST_USES = {
    "AccumulatingOptimizer": (lambda: "sgd", lambda inner: AccumulatingOptimizer(inner, steps=2)),
    "ExactAccumulation": (_accumulating, lambda model: _fit(model, ExactAccumulation())),
    "microbatch": (_model, lambda model: microbatch(model, 2)),
    "PerExampleGradients": (lambda: _compiled(keras_paragrad.wrap(_model())), _fit),
    "GradientNoiseScale": (_accumulating, lambda model: _fit(model, GradientNoiseScale())),
    "GradientTelemetry": (_model, lambda model: _fit(model, GradientTelemetry())),
    "Throughput": (_model, lambda model: _fit(model, Throughput())),
    "DistributedFit": (_model, lambda model: _fit(model, fit=DistributedFit().fit)),
}


@pytest.mark.not_fast
@pytest.mark.parametrize("component", FIRST_USES)
def test_the_first_use_of_a_component_looks(monkeypatch, component):
    make, use = FIRST_USES[component]
    made = make()
    FOUND.clear()
    monkeypatch.delattr(keras.layers.Layer, "_get_own_losses")
    with pytest.raises(ImportError, match="_get_own_losses is missing"):
        use(made)


class _WithTraining(keras.layers.Layer):
    def call(self, x, training="default"):
        return training


class _WithoutTraining(keras.layers.Layer):
    def call(self, x):
        return "none"


class _WithKeywords(keras.layers.Layer):
    def call(self, x, **keywords):
        return keywords.get("training", "none")


class _Traced(_WithTraining):
    call = tf.function(_WithTraining.call)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (_WithTraining, True),
        (_WithoutTraining, "none"),
        (_WithKeywords, "none"),
        pytest.param(_Traced, True, marks=pytest.mark.not_fast),
    ],
)
@pytest.mark.parametrize("is_patched", [False, True])
def test_a_layer_gets_training_where_keras_passes_it(kind, expected, is_patched):
    layer = kind(dtype="float32")
    if is_patched:
        vars(layer)["call"] = functools.partial(lambda call, *inputs, **keywords: call(*inputs, **keywords), layer.call)
    assert layer._call_has_training_arg == (expected is True)
    assert call_model(layer, np.zeros((1, 1)), training=True) == expected


def test_layers_have_a_build_where_keras_does_not_call_it_the_default():
    kinds = [kind for kind in vars(keras.layers).values() if isinstance(kind, type) and hasattr(kind, "build")]
    layers = [kind.__new__(kind) for kind in kinds if kind in (keras.layers.Dense, keras.layers.ReLU)]
    assert sorted(map(has_build, layers)) == [False, True]
    for kind in kinds:
        assert (kind.build is keras.layers.Layer.build) == hasattr(kind.build, "_is_default")


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_the_dtype_of_a_variable_within_a_layer(dtype, autocast):
    variable = keras.Variable(np.zeros(2), dtype=dtype, autocast=autocast)
    casts = autocast and dtype == "float32"
    for around in (None, "bfloat16"):
        with private.AutocastScope(around):
            assert dtype_within(variable, None) == variable._dtype == dtype
            assert dtype_within(variable, "float16") == ("float16" if casts else dtype)
            assert variable.dtype == (around if around and casts else dtype)


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ImportError, match="KERAS_BACKEND=tensorflow"):
        check_backend()
