"""What the site adds to the pages: navigation, and what is read off the package's source.

A page stays plain Markdown. Where it has a comment such as `<!-- reference: privacy -->`, the site puts the rest.
"""

import inspect
import io
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from types import ModuleType
from typing import Any

from aliases import listed as types
from messages import messages as all_messages
from sphinx.application import Sphinx

import keras_paragrad
from keras_paragrad.cli.main import COMMANDS, main

PACKAGE = "keras_paragrad"
# The pages of each section, besides its first one. Guides are below the guide that comes first.
SECTIONS = {
    "index": r"start|how_to|reference/index|troubleshooting|explanation/.*|benchmarks/index|migration",
    "start": r"tutorials/.*",
    "how_to": r"guides/(memory|distribution|sharding|launch|per_example|transforms|privacy|input_gradients|profiling)",
    "guides/memory": r"guides/(accumulation|custom_train_step|fine_tune_cnn|recompute)",
    "guides/distribution": r"guides/(data|deterministic|integrations)",
    "guides/sharding": r"guides/(mesh|pipeline)",
    "guides/launch": r"guides/(fault_tolerance|parameter_servers)",
    "guides/per_example": r"guides/example_norms",
    "reference/index": r"reference/.*",
    "benchmarks/index": r"benchmarks/.*",
}
# Reached by links and by the search alone.
APART = r"architecture|internals/.*|reference/messages"
_MARK = re.compile(r"^<!-- (\w+)(?:: (.+))? -->$", flags=re.MULTILINE)
FIRST = "DistributedFit"
# What Keras calls: its own documentation says when.
HOOKS = r"on_\w+|get_config|from_config|build|build_from_config|compute_output_\w+|set_model|set_params|finalize_\w+"
# What other parts of the package call.
INTERNAL = (
    r"AccumulatingOptimizer\.(window|gradient_weight|accumulate_only|end_micro_batch|host_schedule|options|in_fit_alone|is_open"
    r"|trains)|ExactAccumulation\.wrap"
)


def public_name(module: ModuleType, name: str) -> str:
    """The shortest name by which something public is imported."""
    return f"{PACKAGE}.{name}" if name in keras_paragrad.__all__ else f"{module.__name__}.{name}"


def _rst(text: str) -> str:
    return f"```{{eval-rst}}\n{text}\n```"


def _documented(module: ModuleType, names: list[str]) -> Iterator[str]:
    """What describes each name; what most scripts begin with comes first."""
    for name in sorted(names, key=lambda name: name != FIRST):
        value, path = getattr(module, name), public_name(module, name)
        if inspect.ismodule(value):
            yield f".. py:module:: {path}\n"
            yield from _documented(value, value.__all__)
        elif inspect.isclass(value):
            kind = "exception" if issubclass(value, BaseException) else "class"
            yield f".. auto{kind}:: {path}\n   :members:\n"
        else:
            yield f".. autofunction:: {path}\n"


def _row(value: object, path: str) -> str:
    first = (inspect.getdoc(value) or "").partition("\n")[0]
    return f"   * - `{path}`\n     - {first}"


def reference(name: str) -> str:
    """What is public of a component, or one function of the package."""
    value = getattr(keras_paragrad, name)
    if not inspect.ismodule(value):
        return _rst(f".. autofunction:: {PACKAGE}.{name}")
    rows = "\n".join(
        _row(getattr(value, each), public_name(value, each)) for each in value.__all__
    )
    table = f".. list-table::\n   :align: left\n   :class: names\n\n{rows}\n"
    return _rst(
        "\n".join(
            [f".. py:module:: {PACKAGE}.{name}\n", table, *_documented(value, value.__all__)]
        )
    )


def commands(_: str) -> str:
    """The help of each command of `keras-paragrad`."""
    parts = (
        f"## {name}\n\n{module.__doc__}\n\n```text\n{_help(name)}\n```"
        for name, module in COMMANDS.items()
    )
    return "\n\n".join(parts)


def _help(command: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        main([command, "--help"])
    return printed.getvalue().rstrip()


def messages(_: str) -> str:
    """The errors and warnings of each folder of the package, each with an anchor."""
    parts = []
    for folder, texts in all_messages().items():
        parts.append(f"## {folder}")
        for number, text in enumerate(dict.fromkeys(texts), start=1):
            # Backticks stay: they are around code there, too.
            shown = re.sub(
                r"([*_\[\]<>#$\\])(?=[^`]*(?:`[^`]*`[^`]*)*$)", r"\\\1", " ".join(text.split())
            )
            parts.append(f"({folder}-{number})=\n{shown}")
    return "\n\n".join(parts)


def index(words: str) -> str:
    """Words that a search finds this page by, before others, and that the index lists."""
    entries = "\n".join(f"   ! single: {word}" for word in words.split(", "))
    return _rst(f".. index::\n{entries}\n")


MARKS: dict[str, Callable[[str], str]] = {
    "reference": reference,
    "commands": commands,
    "messages": messages,
    "types": lambda name: _rst(types(name)),
    "index": index,
}


def _toctree(app: Sphinx, docname: str, text: str) -> str:
    """The pages of a section, in the order in which its first page links to them."""
    folder = docname.rpartition("/")[0]
    pages = [
        each
        for each in app.env.found_docs
        if re.fullmatch(SECTIONS[docname], each)
        and not re.fullmatch(APART, each)
        and each != docname
    ]
    links = [f"{folder}/{link}".lstrip("/") for link in re.findall(r"\]\(([\w/.]+)\.md", text)]
    links = [re.sub(r"[^/]+/\.\./", "", link) for link in links]
    pages.sort(key=lambda page: (links.index(page) if page in links else len(links), page))
    entries = "\n".join(f"/{page}" for page in pages)
    return f"\n\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n" if pages else ""


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname in SECTIONS:
        source[0] += _toctree(app, docname, source[0])
    if re.fullmatch(APART, docname):
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"
    # A page that isn't the site's is a file to open.
    source[0] = re.sub(r"\]\(((?:\.\./)+[A-Z]+\.md)(#[\w-]+)?\)", r"](path:\1)", source[0])
    source[0] = _MARK.sub(
        lambda mark: MARKS[mark[1]](mark[2]) if mark[1] in MARKS else mark[0], source[0]
    )


def _skip(app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out methods that are public, and that nobody calls who reads the reference."""
    # Properties, and cached ones, are objects around a function.
    function = getattr(value, "fget", None) or getattr(value, "func", value)
    internal = re.fullmatch(INTERNAL, getattr(function, "__qualname__", name))
    return True if internal or re.fullmatch(HOOKS, name) else None


def _break_long_names(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Lets long inline code break after dots and underscores on a phone, and not within words."""

    def broken(found: re.Match[str]) -> str:
        return re.sub(r"([._(=/])", r"\1<wbr>", found[0])

    if "body" in context:
        context["body"] = re.sub(
            r'(?<=<span class="pre">)[^<>]{30,}(?=</span>)', broken, context["body"]
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Has pages changed as they are read."""
    app.connect("source-read", _read)
    app.connect("autodoc-skip-member", _skip)
    app.connect("html-page-context", _break_long_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
