"""A pytest plugin that runs the end-to-end tests of Keras's JAX backend with `DistributedFit`, on TensorFlow.

They ask JAX for devices and shardings. What answers here, in a module of that name, are TensorFlow's devices, the
layouts of variables on the mesh, and those that the traced step lays tensors out by.
"""

import sys
import types
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras.src import models
from keras.src.backend import distribution_lib
from keras_suite.keras_unskipped import pytest_collection_modifyitems, pytest_configure, pytest_runtest_logreport  # noqa: F401

from keras_paragrad import DistributedFit
from keras_paragrad.storage.dtensor import computing_on_mesh
from keras_paragrad.storage.mesh_variable import MeshVariable

COUNT = 8
DEVICES = [f"cpu:{index}" for index in range(COUNT)]
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * COUNT
)


class Sharding:
    """What each dimension is divided along."""

    def __init__(self, _: Any, spec: tuple):
        self.spec = spec

    @property
    def is_fully_replicated(self) -> bool:
        return not any(self.spec)

    def is_equivalent_to(self, other: "Sharding", ndim: int) -> bool:
        return len(self.spec) == ndim and self.spec == other.spec


def inspect_array_sharding(tensor: Any, callback: Any) -> None:
    if not computing_on_mesh():
        # JAX, too, knows it only while the model is trained.
        return
    operation = tensor.op
    while operation.type in ("Identity", "IdentityN"):
        operation = operation.inputs[tensor.value_index if operation.type == "IdentityN" else 0].op
    layout = tf.experimental.dtensor.Layout.from_string(operation.get_attr("layout").decode())
    specs = [None if each == tf.experimental.dtensor.UNSHARDED else each for each in layout.sharding_specs]
    callback(Sharding(None, tuple(specs)))


def module(name: str, **members: Any) -> types.ModuleType:
    made = sys.modules[name] = types.ModuleType(name)
    vars(made).update(members)
    return made


sharding = module("jax.sharding", PartitionSpec=lambda *axes: axes, NamedSharding=Sharding)
layout = module("jax.experimental.layout")
module(
    "jax",
    device_count=lambda: COUNT,
    default_backend=lambda: "cpu",
    sharding=sharding,
    distributed=types.SimpleNamespace(initialize=None),
    debug=types.SimpleNamespace(inspect_array_sharding=inspect_array_sharding),
    experimental=module("jax.experimental", layout=layout),
)
# The package of the tests, without what it imports of JAX.
module("keras.src.backend.jax", __path__=[str(Path(distribution_lib.__file__).parents[1] / "jax")])
distribution_lib.num_processes = lambda: 1
distribution_lib.process_id = lambda: 0
distribution_lib._to_backend_mesh = lambda mesh: mesh
vars(distribution_lib)["list_devices"] = lambda device_type=None: DEVICES
MeshVariable.sharding = property(lambda self: Sharding(self.mesh, self.axes))


def model_on_mesh(inputs: Any, outputs: Any) -> keras.Model:
    """A model that is on the mesh when it is made, as JAX makes variables in shards, and that its own `fit` trains."""
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    DistributedFit(keras.distribution.distribution()).prepare(model)
    return model


models.Model = model_on_mesh
