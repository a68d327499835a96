"""Plain text: parses untrusted JSON, and shows rich's renderables in interactive sessions, notebooks and files."""

import html
import io
import json
from typing import Any

WIDTH = 118


def read_json(text: str | bytes) -> Any:
    """Parses JSON; any malformed text raises a `ValueError` with a short reason."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except ValueError:  # Python refuses to convert integers of thousands of digits
        raise ValueError("it has a number with too many digits") from None


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the singular or the plural: 1 replica, 2 batches."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{ending}"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_in_words(size: float) -> str:
    """A number of bytes with a unit: 512 B, 1.5 MiB."""
    power = next((power for power in range(len(_UNITS) - 1) if size < 999.5 * 1024**power), len(_UNITS) - 1)
    return f"{round(size):,} B" if power == 0 else f"{size / 1024**power:.3g} {_UNITS[power]}"


class InNotebooks:
    """Base of printable objects: a notebook shows the text of `print`, in columns."""

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre; line-height: 1.2">{html.escape(str(self))}</pre>'


class Printable(InNotebooks):
    """Base of objects with a `__rich_console__`: a session, a notebook and a file show it as plain text."""

    width = WIDTH

    def __str__(self) -> str:
        return plain_text(self, self.width)

    def __repr__(self) -> str:
        return str(self)


def plain_text(renderable: object, width: int = WIDTH) -> str:
    """Renders an object with rich, without colours and in any environment: a terminal, a notebook or a pipe."""
    from rich.console import Console

    page = io.StringIO()
    # In a notebook, a console would show what it prints there, and leave the page empty.
    console = Console(file=page, width=width, color_system=None, force_terminal=False, force_jupyter=False, _environ={})
    console.print(renderable)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def show(renderable: object) -> None:
    """Prints an object in the terminal's width and colours, or as `str` to a file."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(renderable)
    else:
        print(renderable)
