"""The pages of the documentation, which come with the package: `keras-paragrad docs PAGE` shows one."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

_PACKAGE = Path(__file__).parent
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_COMMENT = re.compile(r"^<!-- (.*?) -->\n?", re.MULTILINE)
_INDEX = re.compile(r"^<!-- index: (.+) -->$", re.MULTILINE)
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


def command_of(page: str) -> str:
    """What to type to read a page, for messages."""
    return f"keras-paragrad docs {page}"


def pages() -> dict[str, Path]:
    """The file of each page, by name: `guides/launch`. In a clone, the pages beside the package."""
    folder = next(
        (candidate for candidate in (_PACKAGE / "docs", _PACKAGE.parent / "docs") if candidate.is_dir()), None
    )
    if folder is None:
        return {}
    files = sorted(folder.rglob("*.md"), key=lambda file: (len(file.relative_to(folder).parts), file))
    return {str(PurePosixPath(file.relative_to(folder).with_suffix(""))): file for file in files}


def title_of(file: Path) -> str:
    """The first heading of a page."""
    title = _TITLE.search(file.read_text(encoding="utf-8"))
    return title[1].replace("`", "") if title else file.stem


def names_of(word: str, known: Mapping[str, Path]) -> list[str]:
    """The pages that a word stands for: a name, a path in a clone, the last part of names, or a word of a page's index.

    Example:

    >>> from pathlib import Path
    >>> from keras_paragrad.pages import names_of
    >>> known = dict.fromkeys(["guides/privacy", "guides/mesh", "tutorials/privacy"], Path())
    >>> names_of("docs/guides/privacy.md", known), names_of("mesh", known), names_of("privacy", known)
    (['guides/privacy'], ['guides/mesh'], ['guides/privacy', 'tutorials/privacy'])
    """
    name = word.strip("/").removeprefix("./").removeprefix("docs/").removesuffix(".md")
    if name in known:
        return [name]
    return [page for page in known if page.rpartition("/")[2] == name] or [
        page for page, file in known.items() if name.lower() in _index_of(file)
    ]


def _index_of(file: Path) -> list[str]:
    """The words, in lower case, that the site's search finds a page by before others."""
    stated = _INDEX.search(file.read_text(encoding="utf-8"))
    return stated[1].lower().split(", ") if stated else []


def read_page(name: str, known: Mapping[str, Path]) -> str:
    """The Markdown of a page."""
    text = _FRONT_MATTER.sub("", known[name].read_text(encoding="utf-8")).lstrip()
    # The parts with an odd index are code, in which comments stay.
    parts = _FENCE.split(text)
    return "".join(part if index % 2 else _COMMENT.sub(_instead, part) for index, part in enumerate(parts))


def _instead(comment: re.Match[str]) -> str:
    """What to show for a comment that the site replaces by generated text: where to find that text."""
    kind, _, name = comment[1].partition(": ")
    if kind == "reference":
        return f"In Python: `import keras_paragrad; help(keras_paragrad.{name})`.\n"
    return {
        "commands": "`keras-paragrad COMMAND --help` has the options.\n",
        "messages": "The site has them all; an error says what to type instead.\n",
    }.get(kind, "")
