"""`keras-paragrad` and `python -m keras_paragrad`: each command is a module of `keras_paragrad.commands`."""

import ast
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import resources

import keras_paragrad
from keras_paragrad import commands
from keras_paragrad.command_line import PROGRAM, Parser
from keras_paragrad.completion import ASKED_BY, candidates


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command without importing the others; help, version and completion import neither Keras nor TensorFlow.

    Every module of `keras_paragrad.commands` is a command. Its docstring is its help text, `add_arguments(parser)`
    declares its arguments, and `run(arguments)` runs it and returns the exit status. No command imports TensorFlow at
    module level.

    Args:
        words: The command line after `keras-paragrad`; that of the process if `None`.

    Returns:
        The exit status.

    Raises:
        SystemExit: With status 2 for wrong arguments, with status 0 for help or the version.
    """
    words = sys.argv[1:] if words is None else list(words)
    parser = Parser(PROGRAM, description="Inspects the hardware, plans training on it, and starts it.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {keras_paragrad.__version__}")
    known = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=Parser)
    parsers = {}
    for name in [module.name for module in pkgutil.iter_modules(commands.__path__)]:
        summary = ast.get_docstring(ast.parse(resources.files(commands).joinpath(f"{name}.py").read_text("utf-8")))
        parsers[name] = known.add_parser(name, help=summary, description=summary)
        if words[:1] == [name]:
            importlib.import_module(f"{commands.__name__}.{name}").add_arguments(parsers[name])
    if ASKED_BY in os.environ:
        print("\n".join(candidates(parser, parsers, words)))
        return 0
    arguments, unknown = parser.parse_known_args(words)
    parsers[arguments.command].refuse_unknown(unknown)
    return importlib.import_module(f"{commands.__name__}.{arguments.command}").run(arguments)


if __name__ == "__main__":
    sys.exit(main())
