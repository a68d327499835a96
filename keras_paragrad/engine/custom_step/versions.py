"""The versions of weights that the phases of a custom `train_step` read, and a phase's scope.

A phase runs the step on all slices of a batch, and makes some of its updates in the last one. Version n of a weight is
its value after n changes in the step.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import keras
import tensorflow as tf

from keras_paragrad.compat.global_state import get_global_attribute, set_global_attribute
from keras_paragrad.compat.layers import WeightScope
from keras_paragrad.compat.model import all_variables
from keras_paragrad.engine.custom_step.analysis import StepAnalysis
from keras_paragrad.storage.sharded import sharded_value

Made = TypeVar("Made")


class WeightVersions:
    """Copies of weights made before updates, for later phases that read the old values."""

    def __init__(self, analysis: StepAnalysis):
        self.analysis = analysis
        versions = sorted(set().union(*analysis.versions))
        self._copies = make_variables(lambda: {version: self._make_copy(version[0]) for version in versions})

    def _make_copy(self, key: int) -> tf.Variable:
        # A variable, not a tensor: the tape of a step watches reads of variables.
        weight = self.analysis.weights[key]
        return tf.Variable(tf.zeros(weight.shape, weight.dtype))

    def save(self, variable: keras.Variable, version: int) -> None:
        """Copies a weight before it changes, if a later phase reads the current version."""
        copy = self._copies.get((id(variable), version))
        if copy is not None:
            copy.assign(variable.value)

    def read_in(self, phase: int) -> list[tf.Variable]:
        """The copies that a phase reads."""
        return [self._copies[version] for version in sorted(self.analysis.versions[phase])]

    def of_phase(self, key: int, version: int, phase: int) -> tf.Variable | None:
        """The copy that a phase reads in place of a weight; `None` if it reads the weight."""
        return self._copies[key, version] if (key, version) in self.analysis.versions[phase] else None


class PhaseScope(WeightScope):
    """The scope of one slice in a phase: holds the step's assignments, except to weights, which the last slice updates.

    A weight reads as the version that the step would read on the whole batch. `states` are the variables carried from
    slice to slice, with their values.
    """

    def __init__(
        self, states: list[tuple[keras.Variable, tf.Tensor]], versions: WeightVersions, phase: int, *, last: bool
    ):
        # Without this, losses that layers add would be dropped.
        super().__init__(states, collect_losses=True)
        self._versions, self._phase, self._last = versions, phase, last
        self._changes = versions.analysis.changes
        # The number of changes to each weight so far in the step.
        self._version = dict.fromkeys(self._changes, 0)
        for key in self._changes:
            self._map_to_version(key)

    def change(
        self,
        variables: Sequence[keras.Variable],
        update: Callable[[], object],
        not_capturing: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Handles an optimizer call: calls `update` if it belongs to this phase, and advances the weights' versions.

        `update` collects the gradients, and updates the weights in the last slice. Within `not_capturing`, `apply`
        isn't intercepted.
        """
        phases = {self._changes[id(variable)][self._version[id(variable)]].phase for variable in variables}
        if phases == {self._phase} and self._last:
            for variable in variables:
                self._versions.save(variable, self._version[id(variable)])
            with not_capturing(), suspended_scope():
                update()
        elif self._phase in phases:
            update()
        self.advance(variables)

    def advance(self, variables: Sequence[keras.Variable]) -> None:
        """Advances weights to their next version."""
        for variable in variables:
            self._version[id(variable)] += 1
            self._map_to_version(id(variable))

    def add_update(self, update: tuple[keras.Variable, object]) -> None:
        """Assigns a variable."""
        variable, value = update
        key = id(variable)
        if key not in self._changes:
            super().add_update(update)
            return
        if self._changes[key][self._version[key]].phase == self._phase and self._last:
            self._versions.save(variable, self._version[key])
            with suspended_scope():
                variable.assign(value)
        self.advance([variable])

    def _map_to_version(self, key: int) -> None:
        """Makes reads of a weight, by its id, return the version that the phase has to read."""
        copy = self._versions.of_phase(key, self._version[key], self._phase)
        if copy is None:
            self.state_mapping.pop(key, None)
        else:
            self.state_mapping[key] = copy

    def value_of(self, variable: keras.Variable) -> tf.Tensor:
        """A variable's value in the scope, with its static shape."""
        return tf.ensure_shape(tf.convert_to_tensor(self.get_current_value(variable)), variable.shape)


@contextmanager
def suspended_scope() -> Generator[None]:
    """Context within a stateless scope in which variables are read and assigned for real."""
    scope = get_global_attribute("stateless_scope")
    set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        set_global_attribute("stateless_scope", scope)


def gather_remote_values(model: keras.Model) -> dict[int, tf.Tensor]:
    """The values of variables with shards on other workers, by the variables' ids; called on every worker."""
    remote = [
        variable for variable in all_variables(model) if (value := sharded_value(variable)) and value.has_remote_shards
    ]
    return (
        make_variables(lambda: {id(variable): tf.constant(variable.numpy()) for variable in remote}) if remote else {}
    )


def make_variables(make: Callable[[], Made]) -> Made:
    """Makes variables in another thread: TensorFlow refuses to make any while it retraces a function."""
    strategy = tf.distribute.get_strategy()

    def make_in_scope() -> Made:
        with strategy.scope():
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make_in_scope).result()
