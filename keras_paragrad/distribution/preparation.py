"""`Preparation`: a model that is trained in another way, until `undo`."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Self

import keras

from keras_paragrad.compat.method_patch import replace_methods, restore_methods
from keras_paragrad.compat.state import state_of


class Preparation(abc.ABC):
    """A model whose `fit`, `evaluate` and `predict` train and run it in another way, until `undo`.

    A class writes `renew`, which installs all that a step needs, and `stop`, which takes it off; `start` if there is
    anything that is needed only once; and `table` if there is anything to show.

    Args:
        model: A compiled model.
        *settings: What the model is prepared with.

    Attributes:
        model: The model.
        settings: What it is prepared with.
        changes_in_place: Whether other settings can be taken by `renew`, without `stop` and `start`.
    """

    changes_in_place: ClassVar[bool] = False

    def __init__(self, model: keras.Model, *settings: Any):
        self.model: Any = model
        self.settings = settings
        self._methods: set[str] = set()
        # What `jit_compile` was, and what it was set to.
        self._jit_compile: tuple[Any, Any] | None = None
        self.start()
        self.renew()
        state = state_of(model)
        state.preparations = {**state.preparations, type(self): self}

    @classmethod
    def of(cls, model: Any, *settings: Any) -> Self:
        """A model's preparation with these settings, which it may have already and is renewed then."""
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
        """Does what is needed once, whatever is compiled later."""

    @abc.abstractmethod
    def renew(self) -> None:
        """Installs what a step needs; also what `compile` may have replaced.

        Raises:
            ValueError: The model can't be trained in this way. The message says what to write.
        """

    @abc.abstractmethod
    def stop(self) -> None:
        """Takes off what `start` and `renew` have installed, but methods and `jit_compile`."""

    def undo(self) -> None:
        """Restores the methods of the model's class, and its settings."""
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
        """What each device holds, for `explain`; `None` if there is nothing to say."""
        return None

    def replace(self, **methods: Callable[..., Any]) -> None:
        """Gives the model other methods, until `undo`."""
        replace_methods(self.model, **methods)
        self._methods.update(methods)

    def set_jit_compile(self, jit: bool) -> None:
        """Sets the model's `jit_compile`, until `undo`."""
        before = self.model.jit_compile
        if self._jit_compile is not None and before == self._jit_compile[1]:
            # It was not compiled since.
            before = self._jit_compile[0]
        self.model.jit_compile = jit
        self._jit_compile = before, self.model.jit_compile
