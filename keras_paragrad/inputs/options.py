"""The arguments that all derivatives with respect to inputs share, checked at the call."""

from typing import Any, NamedTuple

from keras_paragrad.arguments import check_choice, check_flag, check_integer
from keras_paragrad.inputs.outputs import checked_output


class DerivativeOptions(NamedTuple):
    """How a derivative is taken; see `input_gradients` for each of them."""

    output: Any
    wrt: Any
    batch_size: Any
    jit_compile: Any
    out: Any
    stream: Any
    verbose: Any

    def checked(self) -> "DerivativeOptions":
        """Returns the options, validated.

        Raises:
            ValueError: An option is invalid. The message says what to write.
        """
        checked = self._replace(
            batch_size=check_integer("batch_size", self.batch_size, most=2**31 - 1, example=2048, optional=True),
            jit_compile=check_choice("jit_compile", self.jit_compile, ("auto", True, False)),
            verbose=int(check_integer("verbose", self.verbose, least=0, most=2, also=(True, False), example=1)),
            stream=check_flag("stream", self.stream),
            output=checked_output(self.output),
        )
        if checked.stream and self.out is not None:
            raise ValueError(
                "`stream` and `out` can't be combined: results are yielded or written. Remove one of them."
            )
        return checked
