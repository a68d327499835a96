"""Print the code that makes a shell complete keras-paragrad's commands and options."""

import argparse

from keras_paragrad.cli.parser import print_error
from keras_paragrad.extras import MissingExtraError, require

_HELP = """to use it, add to the shell's startup file:
  bash   eval "$(keras-paragrad completions bash)"
  zsh    eval "$(keras-paragrad completions zsh)"      after compinit
  fish   keras-paragrad completions fish | source"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `completions`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _HELP
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Prints the code; returns 0, or 1 if shtab is not installed."""
    try:
        require("`completions`", "shtab")
    except MissingExtraError as error:
        return print_error("completions", error, 1)
    import shtab

    print(shtab.complete(arguments.parser, arguments.shell))
    return 0
