"""`Preparation`: a model whose training is changed until `undo`."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Self

import keras

from keras_paragrad.compat.state import replace_methods, restore_methods, state_of


class Preparation(abc.ABC):
    """A model whose `fit`, `evaluate` and `predict` are changed until `undo`.

    A subclass defines `renew`, which installs what a step needs, and `stop`, which uninstalls it; optionally `start`,
    for what is needed once, and `table`, for `explain`.

    Args:
        model: A compiled model.
        *settings: The arguments of the preparation.

    Attributes:
        model: The model.
        settings: The arguments of the preparation.
        changes_in_place: Whether `renew` can apply other settings, without `stop` and `start`.
    """

    changes_in_place: ClassVar[bool] = False

    def __init__(self, model: keras.Model, *settings: Any):
        self.model: Any = model
        self.settings = settings
        self._methods: set[str] = set()
        # The original `jit_compile`, and the value that it was set to.
        self._jit_compile: tuple[Any, Any] | None = None
        self.start()
        self.renew()
        state = state_of(model)
        state.preparations = {**state.preparations, type(self): self}

    @classmethod
    def of(cls, model: Any, *settings: Any) -> Self:
        """The model's preparation with these settings; one that it already has is renewed."""
        before = state_of(model).preparations.get(cls)
        if before is not None and before.settings != settings and not cls.changes_in_place:
            before.undo()
            before = None
        if before is None:
            return cls(model, *settings)
        settings, before.settings = before.settings, settings
        try:
            before.renew()
        except BaseException:
            before.settings = settings
            raise
        return before

    def start(self) -> None:  # noqa: B027  (most prepare nothing that outlasts `compile`)
        """Does what is needed once, and need not be repeated after `compile`."""

    @abc.abstractmethod
    def renew(self) -> None:
        """Installs what a step needs; called again after `compile`, which may have replaced it.

        Raises:
            ValueError: The model can't be trained in this way. The message says what to write.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Uninstalls what `start` and `renew` have installed, except methods and `jit_compile`."""

    def undo(self) -> None:
        """Restores the methods of the model's class, and its `jit_compile`."""
        state = state_of(self.model)
        if state.preparations.get(type(self)) is not self:
            return
        self.stop()
        restore_methods(self.model, *self._methods)
        if self._jit_compile is not None and self.model.jit_compile == self._jit_compile[1]:
            self.model.jit_compile = self._jit_compile[0]
        state.preparations = {kind: each for kind, each in state.preparations.items() if each is not self}

    @property
    def table(self) -> Any:
        """What each device holds, as `explain` shows it, or `None`."""
        return None

    def replace(self, **methods: Callable[..., Any]) -> None:
        """Replaces methods of the model, until `undo`."""
        replace_methods(self.model, **methods)
        self._methods.update(methods)

    def set_jit_compile(self, jit: bool) -> None:
        """Sets the model's `jit_compile`, until `undo`."""
        original = self.model.jit_compile
        if self._jit_compile is not None and original == self._jit_compile[1]:
            # The model has not been compiled since.
            original = self._jit_compile[0]
        self.model.jit_compile = jit
        self._jit_compile = original, self.model.jit_compile
