"""The errors and warnings of the package, read off its source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import keras_paragrad

ROOT = Path(keras_paragrad.__file__).parent
# A message has a sentence at least; shorter strings are parts of one.
_FEWEST_WORDS = 5


def text_of(node: ast.AST) -> str | None:
    """A string of the source, with `…` for what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            each.value if isinstance(each, ast.Constant) else "…" for each in node.values
        )
    return None


def strings(module: Path) -> Iterator[str]:
    """All strings of a module."""
    for node in ast.walk(ast.parse(module.read_text())):
        if text := text_of(node):
            yield text


def messages() -> dict[str, list[str]]:
    """What is raised or warned of, by the folder of the package, in the order of the source."""
    found: dict[str, list[str]] = {}
    for module in sorted(ROOT.rglob("*.py")):
        path = module.relative_to(ROOT).parts
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                call = node.exc
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn"):
                call = node
            else:
                continue
            text = text_of(call.args[0]) if call.args else None
            if text and len(text.split()) >= _FEWEST_WORDS:
                found.setdefault(path[0].removesuffix(".py"), []).append(text)
    return found
