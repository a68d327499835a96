"""Finds inputs, outputs and layers by name or path. Errors for ambiguous names list names that are unique.

A *leaf* is one input or output in a nested structure of them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import keras

from keras_paragrad.compat.layers import children

Path = tuple[str | int, ...]


class Spelling(NamedTuple):
    """The name and path of an input or an output.

    Attributes:
        path: Its position in the nested structure.
        name: Its key, or the name of its tensor or operation; `None` without one.
    """

    path: Path
    name: str | None

    @property
    def joined(self) -> str | None:
        """The path as text; `None` for an index in a list, which would be mistaken for the number of an input."""
        return "/".join(map(str, self.path)) if any(isinstance(key, str) for key in self.path) else None

    def code(self, variable: str) -> str:
        """Code that picks this leaf from a variable."""
        return variable + "".join(f"[{key!r}]" for key in self.path)


def spellings(paths: Sequence[Path], names: Sequence[str | None]) -> list[Spelling]:
    """The name and path of each leaf: its name is its key in a dict, or else the given one."""
    return [
        Spelling(path, path[-1] if path and isinstance(path[-1], str) else name)
        for path, name in zip(paths, names, strict=True)
    ]


def indices_of(name: str, known: Sequence[Spelling]) -> list[int]:
    """The indices of the leaves whose path is `name`, or if there are none, of the leaves with that name."""
    by_path = [index for index, leaf in enumerate(known) if leaf.joined == name]
    return by_path or [index for index, leaf in enumerate(known) if leaf.name == name]


def distinct_names(known: Sequence[Spelling]) -> list[str | None]:
    """Each leaf's name, or its path if other leaves have the same name; `None` if neither is unique."""

    def label(index: int, spelling: Spelling) -> str | None:
        options = (spelling.name, spelling.joined)
        return next((option for option in options if option and indices_of(option, known) == [index]), None)

    return [label(index, spelling) for index, spelling in enumerate(known)]


def layers_by_path(model: keras.Model) -> list[tuple[str, keras.layers.Layer]]:
    """The layers at every depth, each once, with its path of names: the shortest, if a layer is in several others."""

    def walk(layer: keras.layers.Layer, above: str) -> Iterator[tuple[str, keras.layers.Layer]]:
        for child in children(layer):
            if not isinstance(child, keras.layers.InputLayer):
                yield above + child.name, child
                yield from walk(child, f"{above}{child.name}/")

    found: dict[int, tuple[str, keras.layers.Layer]] = {}
    for path, layer in walk(model, ""):
        if id(layer) not in found or path.count("/") < found[id(layer)][0].count("/"):
            found[id(layer)] = path, layer
    return list(found.values())


def layers_named(name: str, known: Sequence[tuple[str, keras.layers.Layer]]) -> list[tuple[str, keras.layers.Layer]]:
    """The pairs of `layers_by_path` whose path is `name`, or if there are none, the ones whose path ends with it."""
    exact = [pair for pair in known if pair[0] == name]
    return exact or [pair for pair in known if f"/{pair[0]}".endswith(f"/{name}")]
