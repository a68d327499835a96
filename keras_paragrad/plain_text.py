"""What rich prints, as plain text."""

import io
from typing import Any

from rich.console import Console

WIDTH = 118


def plain_text(renderable: Any, width: int = WIDTH) -> str:
    """What rich prints of an object, without colours, whatever rich reads from the environment."""
    page = io.StringIO()
    Console(file=page, width=width, color_system=None, force_terminal=False, _environ={}).print(renderable)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def show(renderable: Any) -> None:
    """Prints an object in the terminal's width and colours, or as `str` to a file."""
    console = Console()
    if console.is_terminal:
        console.print(renderable)
    else:
        print(renderable)
