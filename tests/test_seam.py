"""Keras's and TensorFlow's private names stay in one package, and a missing one is named."""

import ast
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import keras_paragrad
from keras_paragrad._keras.versions import HOOKS, Hook, check_hooks

PACKAGE = Path(keras_paragrad.__file__).parent
OUTSIDE = [path for path in PACKAGE.rglob("*.py") if "_keras" not in path.relative_to(PACKAGE).parts]
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


def test_every_private_import_of_the_seam_is_probed():
    probed = {hook.module for hook in HOOKS}
    for path in (PACKAGE / "_keras").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("keras.src", "tensorflow.python")):
                assert node.module in probed, f"{path.name} imports {node.module}"


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (Hook("keras.src.nowhere", "Thing"), "keras.src.nowhere:Thing is missing"),
        (Hook("keras.src.trainers.trainer", "Trainer._gone"), "Trainer._gone is missing"),
        (Hook("keras.src.losses.loss", "apply_mask", ("other",)), "apply_mask no longer takes other"),
    ],
)
def test_a_missing_hook_is_named_with_the_versions(hook, says):
    with pytest.raises(ImportError, match=says) as caught:
        check_hooks([hook])
    for part in (keras.__version__, tf.__version__, "Known to work: keras 3.15"):
        assert part in str(caught.value)


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ImportError, match="KERAS_BACKEND=tensorflow"):
        check_hooks()
