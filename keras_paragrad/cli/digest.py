"""Print digests of weights, optimizer and data order, to compare two trainings bit for bit."""

import argparse

from keras_paragrad.arguments import quote
from keras_paragrad.cli.parser import add_examples, announcer, print_error

_PAGE = "guides/deterministic"
# The exit status if digests differ.
_DIFFER = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `digest`."""
    add_examples(parser, "digest backups\ndigest model.keras other.keras", _PAGE)
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a directory of backups (the newest counts), a backup, or a .keras or .weights.h5 file",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the digest of each path, and in which parts they differ.

    Returns:
        0, 3 if the digests of several paths differ, or 2 if there is nothing to digest.
    """
    say = announcer("digest")
    from keras_paragrad.distribution.checkpoint.files import DamagedBackupError
    from keras_paragrad.distribution.digest import digest_of

    digests = []
    for path in arguments.paths:
        say(f"reading {quote(path)}")
        try:
            digests.append(digest_of(path))
        except (DamagedBackupError, OSError, ValueError) as error:
            return print_error("digest", error)
        print(digests[-1].source)
        print("\n".join(f"  {line}" for line in digests[-1].lines()))
    fields = ("weights", "optimizer", "data order")
    parts = zip(*(digest[:3] for digest in digests), strict=True)
    differing = [field for field, values in zip(fields, parts, strict=True) if len({*values}) > 1]
    if differing:
        print(f"They differ in {', '.join(differing)}.")
    elif len(digests) > 1:
        print("They are the same.")
    return _DIFFER if differing else 0
