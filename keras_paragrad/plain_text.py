"""What rich prints, as plain text, and the same for who looks at an object in a session or a notebook."""

import html
import io
from typing import Any

from rich.console import Console

WIDTH = 118


class InNotebooks:
    """Base of objects that are read by people: a notebook shows the text that `print` does, in columns."""

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre; line-height: 1.2">{html.escape(str(self))}</pre>'


class Printable(InNotebooks):
    """Base of objects with a `__rich_console__`: a session, a notebook and a file show it as plain text."""

    width = WIDTH

    def __str__(self) -> str:
        return plain_text(self, self.width)

    def __repr__(self) -> str:
        return str(self)


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
