"""The arguments that all derivatives with respect to inputs share, checked at the call."""

import operator
from typing import Any, NamedTuple

from keras_paragrad.inputs.outputs import checked_output


class Options(NamedTuple):
    """How a derivative is taken; see `input_gradients` for each of them."""

    output: Any
    wrt: Any
    batch_size: Any
    jit_compile: Any
    out: Any
    stream: Any
    verbose: Any

    def checked(self) -> "Options":
        """The same, if each is what it may be.

        Raises:
            ValueError: One is not. The message says what to write.
        """
        size = self.batch_size
        if not hasattr(size, "__index__") or isinstance(size, bool) or size < 1:
            raise ValueError(f"`batch_size` is {size!r}, and must be a number of rows. Write batch_size=2048.")
        if self.jit_compile not in ("auto", True, False):
            raise ValueError(f"`jit_compile` is {self.jit_compile!r}. Write jit_compile= one of 'auto', True or False.")
        if self.verbose not in (0, 1, 2):
            raise ValueError(f"`verbose` is {self.verbose!r}. Write verbose=1 for a progress bar, or 0 for none.")
        if self.stream not in (True, False):
            raise ValueError(f"`stream` is {self.stream!r}. Write stream=True for an iterator, or False.")
        if self.stream and self.out is not None:
            raise ValueError("`stream` and `out` are both given, and the result goes one way. Leave one of them out.")
        return self._replace(batch_size=operator.index(size), output=checked_output(self.output))
