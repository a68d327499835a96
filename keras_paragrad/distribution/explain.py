"""`Explanation`: a plan in readable form."""

import io
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from keras_paragrad.distribution.decisions.decision import Decision
from keras_paragrad.distribution.hardware import Hardware
from keras_paragrad.distribution.plan import Plan
from keras_paragrad.distribution.plan_summary import summary_lines

WIDTH = 118


class Explanation:
    """A plan's summary, the command that starts it, and a table of its decisions; for `print` or a rich console.

    Args:
        plan: The plan.
        hardware: The hardware it was made for.

    Example:

    >>> from keras_paragrad.distribution import describe
    >>> from keras_paragrad.distribution import Explanation
    >>> from keras_paragrad.distribution import Options
    >>> from keras_paragrad.distribution import make_plan
    >>> machine = describe(cpus=8)
    >>> print(str(Explanation(make_plan(machine, Options()), machine)).splitlines()[0])
    Found: 1 CPU in this process; no cluster
    """

    def __init__(self, plan: Plan, hardware: Hardware):
        self.plan = plan
        self.hardware = hardware

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in summary_lines(self.plan, self.hardware):
            yield Text(line, overflow="fold")
        table = Table(show_lines=True)
        for header, share in (("Decision", None), ("Value", None), ("Why", 3), ("To change it", 2)):
            table.add_column(header, ratio=share, overflow="fold")
        for decision in self.plan:
            value = Text(value_in_words(decision.value), "bold")
            table.add_row(Text(decision.name), value, _why(decision), Text(decision.override))
        yield table

    def __str__(self) -> str:
        page = io.StringIO()
        # Plain text without colours, whatever rich reads from the environment.
        console = Console(file=page, width=WIDTH, color_system=None, force_terminal=False, _environ={})
        console.print(self)
        return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def show(explanation: Explanation) -> None:
    """Prints an explanation, in the terminal's width and colours, or as plain text to a file."""
    console = Console()
    if console.is_terminal:
        console.print(explanation)
    else:
        print(explanation)


def value_in_words(value: Any) -> str:
    """A decision's value on one line."""
    if isinstance(value, tuple):
        shown = value if len(value) <= 2 else (value[0], "...", value[-1])
        return " ".join(shown) or "-"
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _why(decision: Decision) -> Text:
    text = Text(decision.reason)
    return text.append(f"\n{decision.evidence}", "dim") if decision.evidence else text
