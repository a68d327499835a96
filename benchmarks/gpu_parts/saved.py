"""What `gpu.py` keeps: the JSON, the page that is written from it, and the sentence that README and docs repeat."""

import json
import os
import re
from pathlib import Path
from typing import Any

from gpu_parts.case import NOT_RUN, PASSED, Line

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
SAYING = (ROOT / "README.md", ROOT / "docs" / "how_to.md")
MARKED = re.compile(r"<!-- GPUs -->\n.*?<!-- /GPUs -->", flags=re.DOTALL)
Saved = dict[str, Any]


def read(path: Path) -> Saved:
    """By card, what was found on it; empty if nothing was run yet."""
    return json.loads(path.read_text()) if path.exists() else {}


class Results:
    """The JSON file, which is written anew for each line, so that a run which is cut off keeps what it has.

    Args:
        path: The file, or `None` to write nothing.
        date: The day.
    """

    def __init__(self, path: Path | None, date: str):
        self._path, self._date = path, date
        self._saved = read(path) if path else {}
        self._card: dict[str, Any] | None = None
        self._begun: set[str] = set()

    def meet(self, machine: dict[str, Any]) -> None:
        """Keeps what is known of the machine."""
        self._card = self._saved.setdefault(machine["card"], {"parts": {}})
        self._card["machine"] = {**machine, "date": self._date}

    def add(self, part: str, name: str, line: Line) -> None:
        """Adds a line; the first of a part takes the place of those of an earlier run."""
        if self._card is None:
            self.meet({"card": "unknown"})
            return self.add(part, name, line)
        if part not in self._begun:
            self._begun.add(part)
            self._card["parts"][part] = {"date": self._date, "lines": {}}
        self._card["parts"][part]["lines"][name] = line.to_dict()
        return self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._saved, indent=1, default=float) + "\n")
        partial.replace(self._path)


def counted(lines: list[dict[str, Any]]) -> str:
    """How many of the lines that were run passed, how many did not, and how many weren't run."""
    ran = [each for each in lines if each["outcome"] != NOT_RUN]
    failed = [each for each in ran if each["outcome"] not in PASSED]
    text = f"{len(ran) - len(failed)} of {len(ran)} checks and measurements passed"
    if mended := sum(bool(each.get("since")) for each in failed):
        text += f"; {mended} found faults that are fixed now, and haven't run again"
    return f"{text}; {len(lines) - len(ran)} did not run" if len(ran) < len(lines) else text


def lines_of(card: dict[str, Any]) -> list[dict[str, Any]]:
    """All lines of a card."""
    return [line for part in card["parts"].values() for line in part["lines"].values()]


def sentence(saved: Saved, link: str) -> str:
    """What README and the how-to say of GPUs; the page has the rest.

    Args:
        saved: The content of the JSON file.
        link: Where the page is, seen from the file that says it.
    """
    if not saved:
        return (
            "All measurements are on CPUs; GPUs and TPUs haven't been tried. "
            f"`make gpu` settles [what holds on a GPU]({link})."
        )
    cards = " and ".join(f"one {name}" for name in saved)
    return f"Measured on two CPU cores, and checked on {cards}: [what holds on a GPU]({link})."


def page(saved: Saved, shows: dict[str, str]) -> str:
    """The documentation's page.

    Args:
        saved: The content of the JSON file.
        shows: What each part shows, by name.
    """
    text = [
        "# What holds on a GPU\n",
        "<!-- index: GPU, CUDA, H200 -->\n",
        "`make gpu` shows what holds on a machine with an NVIDIA GPU, in twenty minutes. `python benchmarks/gpu.py`\n"
        "does the same, and needs only the package, TensorFlow's GPU build and NumPy. Lines without their extra don't\n"
        "run. Each line is saved in `benchmarks/results/gpu.json`, from which this page is written.\n",
        "| part | what it shows |\n|---|---|",
        *(f"| {name} | {what} |" for name, what in shows.items()),
        "",
    ]
    if not saved:
        text.append("**Not run yet.** All other measurements of this documentation are on CPUs.\n")
    for name, card in saved.items():
        text.append(f"## {name}\n")
        known = [f"{key} {value}" for key, value in card["machine"].items() if key != "card" and value != ""]
        text.append(f"{counted(lines_of(card))}. {', '.join(known)}.\n")
        for part, found in card["parts"].items():
            text.append(f"### {name}: {part}\n")
            if found["date"] != card["machine"]["date"]:
                text.append(f"Run on {found['date']}.\n")
            text += _lines(found["lines"])
    return "\n".join(text)


def _lines(lines: dict[str, dict[str, Any]]) -> list[str]:
    """A table of the lines that ran, and a list of the others by reason."""
    text = []
    if ran := {name: line for name, line in lines.items() if line["outcome"] != NOT_RUN}:
        rows = [f"| {name} | {_outcome(line)} | {_cell(line)} |" for name, line in ran.items()]
        text += ["| | | |\n|---|---|---|", *rows, ""]
    reasons: dict[str, list[str]] = {}
    for name, line in lines.items():
        if line["outcome"] == NOT_RUN:
            reasons.setdefault(_cell(line), []).append(name)
    return text + [f"**{NOT_RUN.capitalize()}**: {'; '.join(names)}. {reason}\n" for reason, names in reasons.items()]


def _outcome(line: dict[str, Any]) -> str:
    outcome = line["outcome"]
    return outcome if outcome in PASSED else f"**{outcome}**"


def _cell(line: dict[str, Any]) -> str:
    text = " ".join(filter(None, (line["text"], line.get("since"))))
    return text.replace("|", "\\|").replace("<", "&lt;")


def write_docs(saved: Saved, shows: dict[str, str]) -> None:
    """Writes the page, and the sentence between the marks of README and the index."""
    PAGE.write_text(page(saved, shows))
    for path in SAYING:
        link = os.path.relpath(PAGE, path.parent)
        said = f"<!-- GPUs -->\n{sentence(saved, link)}\n<!-- /GPUs -->"
        path.write_text(MARKED.sub(lambda _, said=said: said, path.read_text()))
