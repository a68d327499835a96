"""Writes the table in `per_example.md`, from what the rules declare: `python docs/internals/rules_table.py`."""

import re
from pathlib import Path

import keras_paragrad.per_example.rules  # noqa: F401  (registers all)
from keras_paragrad.per_example.rule import registered_by_name

PAGE = Path(__file__).with_name("per_example.md")
BEGIN, END = "<!-- Written by rules_table.py -->\n", "<!-- End -->\n"


def table() -> str:
    """A row for each rule, with all its layers.

    Raises:
        ValueError: A rule doesn't declare its formula.
    """
    layers = {}
    for name, (_, rule) in registered_by_name().items():
        layers.setdefault(rule, []).append(name)
    lines = ["| Layer | An example's gradient | Norms without the gradients |", "|---|---|---|"]
    for rule, names in sorted(layers.items(), key=lambda each: each[1]):
        if not rule.formula:
            raise ValueError(f"{type(rule).__name__} has no row. Set its attribute `formula`.")
        lines.append(f"| {', '.join(names)} | {rule.formula} | {rule.norms_without_gradients} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """The page's text with the table as it should be."""
    return re.sub(f"(?<={BEGIN}).*?(?={END})", lambda _: table(), page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
