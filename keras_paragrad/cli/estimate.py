"""Print the memory that training a model takes on each device, without making its weights."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from keras_paragrad.arguments import LARGEST, quote
from keras_paragrad.cli.parser import add_examples, announcer, finite_number, integer, print_error, suggest_word


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `estimate`."""
    examples = (
        "estimate train.py:build_model --batch-size 64\nestimate train.py:build_model --batch-size 64 --devices 8"
    )
    add_examples(parser, examples, "guides/memory")
    parser.add_argument(
        "model", metavar="train.py:build_model", type=_function, help="a file, and its function that returns the model"
    )
    positive = integer(1, LARGEST)
    parser.add_argument(
        "--batch-size", type=positive, default=32, metavar="N", help="examples in a batch (default: 32)"
    )
    devices = integer(1, 10_000)
    parser.add_argument("--devices", type=devices, default=1, metavar="N", help="number of devices (default: 1)")
    parser.add_argument("--length", type=positive, metavar="N", help="the size of the inputs' axes of unknown size")
    gigabytes = finite_number(above=0, most=10_000)
    parser.add_argument("--memory-gb", type=gigabytes, metavar="GIB", help="memory of a device, in GiB (default: here)")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the estimate; returns 0, or 2 if there is no such function, or its model can't be traced."""
    say = announcer("estimate")
    path, name = arguments.model
    namespace = vars(_imported(path))
    if not callable(namespace.get(name)):
        functions = [name for name, value in namespace.items() if callable(value) and not name.startswith("_")]
        return print_error("estimate", f"{path} has no function {name!r}{suggest_word(name, functions)}")
    from keras_paragrad.compat.variables import without_memory
    from keras_paragrad.distribution.hardware import detect
    from keras_paragrad.memory.estimate import estimate_memory
    from keras_paragrad.plain_text import show

    say(f"calling {name} of {path}, and tracing its model")
    with without_memory():
        model = namespace[name]()
    is_this_machine = arguments.memory_gb is None
    device_bytes = detect().device_bytes() if is_this_machine else max(1, round(arguments.memory_gb * 2**30))
    try:
        estimate = estimate_memory(
            model, arguments.batch_size, arguments.devices, length=arguments.length, device_bytes=device_bytes
        )
    except ValueError as error:
        return print_error("estimate", error)
    if arguments.json:
        print(json.dumps(estimate.to_dict(), indent=2))
    else:
        show(estimate)
    return 0


def _function(word: str) -> tuple[Path, str]:
    """For `add_argument(type=...)`: reads a file and the name of a function in it."""
    path, _, name = word.rpartition(":")
    if not (path.endswith(".py") and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"{quote(word)} is not a file and a function, such as train.py:build_model")
    if not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {quote(path)}")
    return Path(path), name


def _imported(path: Path) -> Any:
    """The file as a module, which imports what lies beside it as a script does."""
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
