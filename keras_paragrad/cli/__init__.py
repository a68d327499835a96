"""The command line: `main`, and a module for each command of `keras-paragrad`."""

import sys
from pathlib import PurePath

PROGRAM = "keras-paragrad"


def is_command() -> bool:
    """Whether Python was started for a command: `keras-paragrad`, or `python -m keras_paragrad`."""
    words = getattr(sys, "argv", None) or [""]
    if words[0] == "-m":
        # Python is still locating the module, which may be another one that imports this package.
        module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if "-m" in sys.orig_argv else []
        return module == ["keras_paragrad"]
    return PurePath(words[0]).stem in (PROGRAM, f"{PROGRAM}-script")
