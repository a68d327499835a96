"""A model, its optimizer and its compile arguments, as text that two workers can compare."""

import re
from typing import Any

import keras

from keras_paragrad.compat.model import all_layers, compile_arguments
from keras_paragrad.distribution.alike.code import is_of_a_library
from keras_paragrad.distribution.alike.values import Entries, attributes_of, config_of, entries_of, kind_of
from keras_paragrad.engine.step.segments import recomputed_in

# These depend on the first batch that a model was called with; the shapes of weights are compared instead.
_LEFT_OUT = ("build_config", "build_input_shape", "registered_name", "module", "compile_config")


def model_entries(model: Any) -> Entries:
    """A compiled model: its layers and how they are connected, its weights' shapes, optimizer, loss and metrics."""
    weights = model.trainable_variables
    yield "trainable weights", str(len(weights))
    yield "values in trainable weights", str(sum(weight.shape.num_elements() or 0 for weight in weights))
    yield from entries_of("optimizer", model.optimizer)
    yield "optimizer's updates so far", str(int(model.optimizer.iterations.numpy()) if model.optimizer else 0)
    yield "optimizer's variables", str(len(model.optimizer.variables) if model.optimizer else 0)
    arguments = {key: each for key, each in compile_arguments(model).items() if key != "optimizer"}
    yield from entries_of("compile", {**arguments, "jit_compile": bool(model.jit_compile)})
    yield from _layers(model)
    for place, what in recomputed_in(model).items():
        yield f"recomputed in {'the model' if place < 0 else f'layer {place}'}", what
    for number, variable in enumerate(model.variables):
        shape = tuple(variable.shape)
        yield f"weight {number}", f"{variable.dtype} {shape}{'' if variable.trainable else ', not trained'}"


def _layers(model: Any) -> Entries:
    config = config_of(model)
    # The config of a Functional or Sequential model contains those of its layers.
    has_all = config is not None and "layers" in config
    yield from _layer("model", model, config)
    for number, layer in enumerate(all_layers(model)):
        if not (has_all and is_of_a_library(type(layer))):
            yield from _layer(f"layer {number}", layer, config_of(layer))


def _layer(path: str, layer: Any, config: dict[str, Any] | None) -> Entries:
    yield path, kind_of(layer)
    own = config is None or not is_of_a_library(type(layer))
    attributes = attributes_of(layer) if own else {}
    whole = {"class_name": type(layer).__name__, "config": config or {}}
    yield from entries_of(path, {**attributes, **_Names().replaced_in(whole)})


class _Names:
    """Replaces Keras's automatic names, which count the layers of a process, by names that count those of a model.

    A worker that has built another model before has `dense_3` where the others have `dense`.
    """

    def __init__(self):
        self._meaning: dict[str, str] = {}

    def replaced_in(self, config: Any) -> Any:
        """A config in which automatic names are numbered from 0."""
        self._collect(config)
        return self._replace(config)

    def _collect(self, config: Any) -> None:
        if isinstance(config, dict):
            inner = config.get("config")
            if isinstance(inner, dict) and isinstance(inner.get("name"), str):
                self._note(str(config.get("class_name")), inner["name"])
            for each in config.values():
                self._collect(each)
        elif isinstance(config, (list, tuple)):
            for each in config:
                self._collect(each)

    def _note(self, kind: str, name: str) -> None:
        automatic = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind).lower()
        if re.fullmatch(rf"{re.escape(automatic)}(_\d+)?", name):
            self._meaning.setdefault(name, f"{automatic}#{len(self._meaning)}")

    def _replace(self, config: Any) -> Any:
        if isinstance(config, (list, tuple)):
            return [self._replace(each) for each in config]
        if not isinstance(config, dict):
            return config
        if isinstance(config.get("config"), dict) and "class_name" in config:
            config = {"class": config["class_name"], **config["config"], **_without(config, "config", "class_name")}
        found = {}
        for key, each in config.items():
            if key == "name":
                found[key] = self._meaning.get(each, each)
            elif key in ("keras_history", "input_layers", "output_layers"):
                found[key] = self._references(each)
            elif key not in _LEFT_OUT:
                found[key] = self._replace(each)
        return found

    def _references(self, config: Any) -> Any:
        if isinstance(config, (list, tuple)):
            return [self._references(each) for each in config]
        return self._meaning.get(config, config) if isinstance(config, str) else config


def _without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: each for key, each in config.items() if key not in names}


def settings_entries() -> Entries:
    """Keras's settings, which affect how models are built and trained."""
    yield "keras.config.floatx", keras.config.floatx()
    yield "keras.config.epsilon", repr(keras.config.epsilon())
    yield "keras.config.image_data_format", keras.config.image_data_format()
    yield "keras.config.dtype_policy", keras.config.dtype_policy().name
    yield "keras.config.max_epochs", repr(keras.config.max_epochs())
    yield "keras.config.max_steps_per_epoch", repr(keras.config.max_steps_per_epoch())
