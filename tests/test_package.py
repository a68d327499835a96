"""What is tested is the installed wheel."""

import ast
import importlib
import importlib.metadata
import inspect
import re
from pathlib import Path

import keras
import pytest
from runner import own_process

import keras_paragrad

pytestmark = pytest.mark.fast

DISTRIBUTION = importlib.metadata.distribution("keras_paragrad")


@pytest.mark.not_fast
def test_the_package_is_the_installed_one():
    module = Path(keras_paragrad.__file__).resolve()
    installed = {Path(str(file.locate())).resolve() for file in DISTRIBUTION.files or ()}
    assert module in installed
    assert module.with_name("py.typed") in installed
    assert DISTRIBUTION.version == keras_paragrad.__version__


def test_the_wheel_brings_nothing_but_the_package():
    files = [file for file in DISTRIBUTION.files or () if file.name != "keras-paragrad"]  # the console script
    assert {file.parts[0] for file in files if not file.parts[0].endswith(".dist-info")} == {"keras_paragrad"}


@pytest.mark.not_fast
def test_the_pages_come_with_the_package():
    pages = {file.relative_to("keras_paragrad") for file in DISTRIBUTION.files or () if file.parts[1:2] == ("docs",)}
    assert {str(page) for page in pages} == {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}


ROOT = Path(__file__).parents[1]
# The map is for those who extend the step from inside.
DOCS = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "architecture.md"]
EXAMPLES = [*(ROOT / "examples").rglob("*.py"), ROOT / "README.md"]
COMPONENTS = ("accumulation", "distribution", "inputs", "memory", "per_example", "privacy", "profiling")
PACKAGES = (keras_paragrad, *(getattr(keras_paragrad, name) for name in COMPONENTS))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_what_is_public_is_there_and_documented(package):
    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name).__doc__
        assert getattr(package, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="has no attribute 'nowhere'"):
        _ = package.nowhere


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_type_checkers_see_what_is_public_where_it_is(package):
    """They take `import name as name` for public; `__all__`, which is derived from it, can't be read by them."""
    nodes = [
        node for node in ast.walk(ast.parse(Path(package.__file__).read_text())) if isinstance(node, ast.ImportFrom)
    ]
    seen = {alias.name: node.module for node in nodes for alias in node.names if alias.asname == alias.name}
    assert seen and sorted(seen) == package.__all__
    for name, module in seen.items():
        assert getattr(importlib.import_module(module), name) is getattr(package, name)


def test_what_the_readme_names_is_imported_from_the_package():
    listed = (ROOT / "README.md").read_text().partition("## What is in it")[2].partition("## From a clone")[0]
    named = {*re.findall(r"(?<=[`(])\w+(?=\()", listed), *re.findall(r"`(\w+)`", listed)}
    public = {name for each in PACKAGES for name in each.__all__}
    assert {"make_private", "Pipeline", "wrap", "microbatch"} <= named & public
    assert named & public <= set(keras_paragrad.__all__)
    # Not named there as such: backups, and the function behind dist.estimate.
    assert {"Backup", "estimate_memory"} <= set(keras_paragrad.__all__)


def functions_of(package):
    """The public functions of a package, and those of its public classes, with their names."""
    for name in package.__all__:
        each = getattr(package, name)
        # Keras's layers take the arguments of its own by **kwargs; exceptions have no signature.
        if inspect.isclass(each) and not issubclass(each, BaseException):
            if not issubclass(each, keras.layers.Layer):
                yield name, each
            for method, function in inspect.getmembers(each, callable):
                module = getattr(function, "__module__", None)  # `int`'s methods have none
                if not method.startswith("_") and f"{module}.".startswith("keras_paragrad."):
                    yield f"{name}.{method}", function
        elif inspect.isfunction(each):
            yield name, each


# What takes any arguments: of the layer that is wrapped, or any number of layers.
TAKE_ANY = {"PerExampleGradients.call", "register_rule"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_help_shows_the_parameters_of_what_is_public(package):
    for name, function in functions_of(package):
        kinds = {each.kind for each in inspect.signature(function).parameters.values()}
        assert name in TAKE_ANY or not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, name
    taken = inspect.signature(keras_paragrad.wrap).parameters
    assert list(taken) == ["model", "quantity", "clip_norm", "transform", "capacity", "loss_reduction"]
    assert taken["quantity"].default == "norms"
    dist = keras_paragrad.DistributedFit
    assert {"batch_size", "seed"} <= set(inspect.signature(dist.dataset).parameters)
    assert list(inspect.signature(dist.fit).parameters)[-2:] == ["prefetch", "seed"]


def test_docs_and_examples_import_what_is_public():
    for path in (*DOCS, *EXAMPLES):
        imports = r"^(?:>>> )?from (keras_paragrad[\w.]*) import (?:\(([^)]+)\)|(.+))$"
        for package, several, names in re.findall(imports, path.read_text(), re.M):
            module = importlib.import_module(package)
            for name in filter(None, map(str.strip, (several or names).split(","))):
                assert name in module.__all__, f"{path.name}: from {package} import {name}"


def test_classes_that_saved_models_name_are_imported_at_once_and_no_others():
    # Processes of their own have imported Keras and the package, and nothing else of ours.
    registered = "sorted(__import__('keras').saving.get_custom_objects())"
    (found,) = own_process.call(eval, registered, [{}], seconds=120)
    names = ["AccumulatingOptimizer", "PerExampleGradients", "PerExampleModel"]
    assert found == [f"keras_paragrad>{name}" for name in names]
    imported = own_process.imported_with("keras_paragrad")
    assert not [name for name in imported if name.startswith("keras_paragrad.distribution")]
    assert "dp_accounting" not in own_process.imported_with("keras_paragrad.privacy.private_model")


def test_the_page_on_a_package_index_has_no_links_that_lead_nowhere():
    page = DISTRIBUTION.metadata.get_payload()
    assert "`docs/index.md`" in page
    assert not [link for link in re.findall(r"\]\(([^)]+)\)", page) if not link.startswith("https://")]


def test_the_console_script():
    (script,) = (entry for entry in DISTRIBUTION.entry_points if entry.group == "console_scripts")
    assert script.name == "keras-paragrad"
    assert callable(script.load())
