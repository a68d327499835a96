"""Show a page of the documentation, or list the pages."""

import argparse

from keras_paragrad.arguments import quote
from keras_paragrad.cli.parser import add_examples, print_error, suggest_word
from keras_paragrad.pages import command_of, names_of, pages, read_page, title_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `docs`."""
    add_examples(parser, "docs\ndocs guides/launch\ndocs troubleshooting | less", "index")
    parser.add_argument("page", nargs="?", metavar="PAGE", help="the name of a page (default: list all)")


def run(arguments: argparse.Namespace) -> int:
    """Prints a page, or the names and titles of all; returns 0, or 2 if there is no such page."""
    known = pages()
    if not known:
        return print_error("docs", "the pages are not installed with the package. Install it again from its wheel.", 1)
    if arguments.page is None:
        width = max(map(len, known))
        print(*(f"{name.ljust(width)}  {title_of(file)}" for name, file in known.items()), sep="\n")
        return 0
    names = names_of(arguments.page, known)
    if not names:
        last_parts = dict.fromkeys(name.rpartition("/")[2] for name in known)
        near = suggest_word(arguments.page.removesuffix(".md"), [*known, *last_parts])
        return print_error(
            "docs", f"there is no page {quote(arguments.page)}{near or '. `keras-paragrad docs` lists all.'}"
        )
    if len(names) > 1:
        return print_error("docs", f"{quote(arguments.page)} is several pages: {', '.join(map(command_of, names))}")
    _show(read_page(names[0], known))
    return 0


def _show(text: str) -> None:
    """Prints Markdown: formatted on a terminal, as it is otherwise."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(text))
    else:
        print(text.rstrip())
