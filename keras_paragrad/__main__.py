"""`keras-paragrad` and `python -m keras_paragrad`: commands, each of them a module of `keras_paragrad.commands`."""

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
    """Runs a command, and imports no other; help, the version and completions take neither Keras nor TensorFlow.

    Every module of `keras_paragrad.commands` is a command. Its docstring is its help, its `add_arguments(parser)`
    declares what it takes, and its `run(arguments)` does it. At their top they import nothing that imports TensorFlow.

    Args:
        words: What was typed after `keras-paragrad`.

    Returns:
        The exit status.

    Raises:
        SystemExit: The words are wrong, with status 2, or ask for help.
    """
    words = sys.argv[1:] if words is None else list(words)
    parser = Parser(PROGRAM, description="Looks at the hardware, plans for it, and starts training on it.")
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
