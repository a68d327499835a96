"""Shared by the commands: a parser that suggests corrections, bounded numbers, and what is said meanwhile."""

import argparse
import contextlib
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, TypeVar

from keras_paragrad.arguments import check_integer, check_number, quote
from keras_paragrad.cli import PROGRAM
from keras_paragrad.pages import command_of

Result = TypeVar("Result")

_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)", re.DOTALL)
# No sensible number has more digits, and Python is slow to parse one that has.
_LONGEST_NUMBER = 40


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that accepts no abbreviations and suggests the closest known word."""

    def __init__(self, *words: Any, **options: Any):
        super().__init__(*words, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message to stderr, and exits with status 2."""
        choice = _CHOICE.search(message)
        if choice:
            message += suggest_word(choice[1], re.split(r"[\s,']+", choice[2]))
        super().error(message if len(message) < 2000 else f"{message[:2000]}...")

    def refuse_unknown(self, words: list[str]) -> None:
        """Exits with an error if the parser left any unknown words."""
        if words:
            options = [option for action in self._actions for option in action.option_strings]
            unknown = words[0].partition("=")[0]
            self.error(f"unrecognized arguments: {quote(' '.join(words))[1:-1]}{suggest_word(unknown, options)}")


def add_examples(parser: argparse.ArgumentParser, examples: str, page: str | None = None) -> None:
    """Adds examples to a command's help, and the page of the documentation that explains it."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    lines = [f"  {PROGRAM} {line}" for line in examples.splitlines()]
    parser.epilog = "\n".join(["examples:", *lines, *([f"\nexplained by: {command_of(page)}"] if page else [])])


def print_error(command: str, error: object, status: int = 2) -> int:
    """Prints an error as argparse prints its own, and returns the exit status."""
    print(f"{PROGRAM} {command}: error: {error}", file=sys.stderr)
    return status


# Announces the next stage of a command on standard error.
Say = Callable[[str], None]


def announcer(command: str, *, needs_tensorflow: bool = True) -> Say:
    """For a command that takes seconds: what announces its slow stages; the first one is loading TensorFlow."""

    def say(stage: str) -> None:
        print(f"{PROGRAM} {command}: {stage}...", file=sys.stderr, flush=True)

    if needs_tensorflow and "tensorflow" not in sys.modules:
        say("loading TensorFlow")
        _load_tensorflow()
    return say


def _load_tensorflow() -> None:
    """Imports TensorFlow without the lines that it logs from C++, unless `TF_CPP_MIN_LOG_LEVEL` is set."""
    with contextlib.ExitStack() as stack:
        if "TF_CPP_MIN_LOG_LEVEL" not in os.environ:
            # It holds for what is logged later, but not for all lines of the import.
            os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
            before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            for close in (lambda: os.close(nowhere), lambda: os.close(before), lambda: os.dup2(before, 2)):
                stack.callback(close)
        import keras_paragrad.compat  # noqa: F401  (checks the installed Keras and TensorFlow)


def suggest_word(word: str, known: Iterable[str]) -> str:
    """A question that suggests the closest known word, or an empty string.

    Example:

    >>> from keras_paragrad.cli.parser import suggest_word
    >>> suggest_word("--worker", ["--workers", "--ps"])
    '. Did you mean `--workers`?'
    """
    close = difflib.get_close_matches(word[:100], [candidate for candidate in known if candidate], 1)
    return f". Did you mean `{close[0]}`?" if close else ""


def integer(least: int, most: int) -> Callable[[str], int]:
    """For `add_argument(type=...)`: reads an integer within bounds."""

    def read(word: str) -> int:
        value = int(word) if re.fullmatch(rf"[+-]?[0-9]{{1,{_LONGEST_NUMBER}}}", word) else None
        return _checked(word, lambda: check_integer("it", value, least=least, most=most))

    return read


class Range(NamedTuple):
    """A number of workers or machines that may change between two bounds."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


def integer_range(least: int, most: int) -> Callable[[str], Range]:
    """For `add_argument(type=...)`: reads an integer within bounds, or two of them, as in 2:4."""
    read_one = integer(least, most)

    def read(word: str) -> Range:
        first, colon, last = word.partition(":")
        limits = Range(read_one(first), read_one(last if colon else first))
        if limits.least > limits.most:
            raise argparse.ArgumentTypeError(
                f"the least comes first, as in {limits.most}:{limits.least}, got {quote(word)}"
            )
        return limits

    return read


def finite_number(**bounds: Any) -> Callable[[str], float]:
    """For `add_argument(type=...)`: reads a finite number within the bounds of `check_number`."""

    def read(word: str) -> float:
        try:
            value = float(word) if len(word) <= _LONGEST_NUMBER else None
        except ValueError:
            value = None
        return _checked(word, lambda: check_number("it", value, **bounds))

    return read


def _checked(word: str, check: Callable[[], Result]) -> Result:
    """Calls a check, whose error becomes argparse's."""
    try:
        return check()
    except ValueError as error:
        expected = str(error).partition("must be ")[2].rstrip(".")
        raise argparse.ArgumentTypeError(f"expected {expected}, got {quote(word)}") from None
