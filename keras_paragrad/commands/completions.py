"""Print the code that makes a shell complete keras-paragrad's commands and options."""

import argparse

from keras_paragrad.completion import SCRIPTS

_HELP = """to use it, add to the shell's startup file:
  bash   eval "$(keras-paragrad completions bash)"
  zsh    eval "$(keras-paragrad completions zsh)"      after compinit
  fish   keras-paragrad completions fish | source"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `completions`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _HELP
    parser.add_argument("shell", choices=SCRIPTS, help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Prints the code.

    Args:
        arguments: What `add_arguments` declares.

    Returns:
        0.
    """
    print(SCRIPTS[arguments.shell])
    return 0
