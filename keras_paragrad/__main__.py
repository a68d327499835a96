"""`python -m keras_paragrad`: commands, each of them a module of `keras_paragrad.commands`."""

import argparse
import ast
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from importlib import resources

from keras_paragrad import commands


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command, and imports no other.

    Every module of `keras_paragrad.commands` is a command. Its docstring is its help, its `add_arguments(parser)`
    declares what it takes, and its `run(arguments)` does it.

    Args:
        words: What was typed after `python -m keras_paragrad`.

    Returns:
        The exit status.

    Raises:
        SystemExit: The words are wrong, with status 2, or ask for help.
    """
    words = sys.argv[1:] if words is None else list(words)
    parser = argparse.ArgumentParser(
        "python -m keras_paragrad",
        description="Looks at the hardware, plans for it, and starts training on it.",
        allow_abbrev=False,
    )
    known = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name in [module.name for module in pkgutil.iter_modules(commands.__path__)]:
        summary = ast.get_docstring(ast.parse(resources.files(commands).joinpath(f"{name}.py").read_text("utf-8")))
        command = known.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if words[:1] == [name]:
            importlib.import_module(f"{commands.__name__}.{name}").add_arguments(command)
    arguments = parser.parse_args(words)
    return importlib.import_module(f"{commands.__name__}.{arguments.command}").run(arguments)


if __name__ == "__main__":
    sys.exit(main())
