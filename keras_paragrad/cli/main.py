"""The parser of `keras-paragrad`, which runs one command."""

from collections.abc import Sequence

import keras_paragrad
from keras_paragrad.cli import PROGRAM, digest, docs, doctor, estimate, launch, report
from keras_paragrad.cli.parser import Parser

# None imports Keras or TensorFlow before it runs, so that help and version are quick.
COMMANDS = {
    "digest": digest,
    "docs": docs,
    "doctor": doctor,
    "estimate": estimate,
    "launch": launch,
    "report": report,
}


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command.

    A command is a module whose docstring is its help, whose `add_arguments(parser)` declares its arguments, and whose
    `run(arguments)` runs it and returns the exit status.

    Args:
        words: The command line after `keras-paragrad`; the process's own if `None`.

    Returns:
        The exit status.

    Raises:
        SystemExit: With status 2 for wrong arguments, with status 0 for help or the version.
    """
    parser = Parser(PROGRAM, description="Inspects the hardware, plans training on it, and starts it.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {keras_paragrad.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", parser_class=Parser)
    for name, module in COMMANDS.items():
        module.add_arguments(subparsers.add_parser(name, help=module.__doc__, description=module.__doc__))
    arguments, unknown = parser.parse_known_args(words)
    if arguments.command is None:
        parser.refuse_unknown(unknown)
        parser.print_help()
        return 0
    subparsers.choices[arguments.command].refuse_unknown(unknown)
    return COMMANDS[arguments.command].run(arguments)
