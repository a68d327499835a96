"""The documentation holds: code and commands run as written, and links lead somewhere."""

import ast
import importlib.util
import json
import os
import re
import runpy
import shlex
import string
import subprocess
import sys
from pathlib import Path

import pytest
from runner import left_out

from keras_paragrad.cli.main import main
from keras_paragrad.per_example import rule as rule_module

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
TASKS = DOCS / "how_to.md"
FENCE = re.compile(r"^```([\w{}-]+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
# A script is shown below a line that ends with its name, as in: As `train.py`:
SCRIPT = re.compile(r"\bAs `([\w.]+\.py)`:\n\n```python\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    """The code blocks of a language on a page, without scripts that commands run, with the number of lines before."""
    text = page.read_text()
    run = " ".join(each[2].partition("\n")[0] for each in FENCE.finditer(text) if each[1] == "console")
    scripts = [script.start(2) for script in SCRIPT.finditer(text) if script[1] in run]
    found = [each for each in FENCE.finditer(text) if each[1] == language and each.start(2) not in scripts]
    return [(each[2], text.count("\n", 0, each.start(2))) for each in found]


def shown_after(page, code):
    """What a page says a block prints: the `text` that follows it at once."""
    found = re.search(re.escape(f"{code}```\n\n```text\n") + r"(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return found[1].splitlines() if found else []


def commands(code):
    """The commands of a block, each as a list of words; a line may go on in the next."""
    lines = re.findall(r"^(?:\$ )?(.+)$", code.replace("\\\n", " "), flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines if not line.startswith("#")]


PAGES = sorted(DOCS.rglob("*.md"))
# The code of a page takes seconds. `make test` runs that of README and of the first page, and `make test-all` all.
LONG = {page for page in PAGES if page != DOCS / "start.md" and blocks(page, "python")}


def marks_of(page):
    # Servers within a process stay there until it ends.
    own_process = [pytest.mark.own_process] if "in_process_cluster" in page.read_text() else []
    return [*own_process, *([pytest.mark.long] if page in LONG else [])]


WITH_PYTHON = [
    pytest.param(page, marks=marks_of(page)) for page in (ROOT / "README.md", *PAGES) if blocks(page, "python")
]


# What recipes use beside this package; perhaps it isn't installed.
OTHER_PACKAGES = ("keras_hub", "keras_tuner", "mlflow", "wandb")
MARKS = {
    # It starts three processes that train, as distribution/test_workers.py does.
    DOCS / "start.md": [pytest.mark.long],
    DOCS / "guides" / "integrations.md": [pytest.mark.long],
}
WITH_OUTPUT = [pytest.param(page, marks=MARKS.get(page, [])) for page in PAGES if blocks(page, "console")]


@pytest.mark.not_fast
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_code_runs(page, tmp_path, monkeypatch, capsys):
    """The blocks of a page run in order, as the cells of a notebook, and print what is shown."""
    monkeypatch.chdir(tmp_path)
    # A page registers rules, of which other tests know nothing.
    monkeypatch.setattr(rule_module, "_RULES", dict(rule_module._RULES))
    namespace = {"__name__": "documentation"}
    for code, above in blocks(page, "python"):
        # Tracebacks show the line of the page, and functions that are traced are read from there.
        exec(compile("\n" * above + code, page, "exec"), namespace)
        assert_printed(shown_after(page, code), capsys.readouterr().out)


# Which `make docs` runs, and a test of the site.
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))


@pytest.mark.parametrize("page", [*sorted(LONG), *TUTORIALS], ids=name_of)
def test_what_code_imports_is_there(page):
    """Of pages whose code takes long to run; and it can be compiled."""
    cells = blocks(page, "{code-cell}" if page in TUTORIALS else "python")
    assert cells
    for code, above in cells:
        parsed = ast.parse("\n" * above + code, page)
        parsed.body = [each for each in parsed.body if isinstance(each, (ast.Import, ast.ImportFrom))]
        exec(compile(parsed, page, "exec"), {"__name__": "documentation"})


@pytest.mark.not_fast
@pytest.mark.parametrize("page", WITH_OUTPUT, ids=name_of)
def test_commands_print_what_is_shown(page, tmp_path, capsys, monkeypatch):
    """Each line shown is printed, in any order; times differ, and `...` stands for lines left out."""
    missing = {}
    for name, code in SCRIPT.findall(page.read_text()):
        (tmp_path / name).write_text(code)
        imported = [each for each in OTHER_PACKAGES if f"import {each}\n" in code]
        missing[name] = [each for each in imported if importlib.util.find_spec(each) is None]
    monkeypatch.chdir(tmp_path)
    # Where `estimate` finds what a script imports.
    monkeypatch.setattr(sys, "path", [*sys.path])
    for code, _ in blocks(page, "console"):
        line, *lines = code.splitlines()
        program, *words = shlex.split(line.removeprefix("$ "))
        if any(missing.get(word) for word in words):
            continue
        if program == "python" or words[0] == "launch":
            printed = started(words if program == "python" else ["-m", "keras_paragrad", *words], tmp_path)
        else:
            assert program == "keras-paragrad"
            main(words)
            printed = capsys.readouterr().out
        assert_printed(lines, printed)
    if wanted := sorted({each for packages in missing.values() for each in packages}):
        pytest.skip(f"{left_out.NO_PACKAGE}pip install {' '.join(wanted)}")


def assert_printed(shown, printed):
    """Each line shown is printed, in any order; times and last digits differ, and `...` stands for lines left out.

    A paragraph may be shown in shorter lines.
    """
    if alike(*(without_times(" ".join(text)) for text in (shown, printed.splitlines()))):
        return
    there = [without_times(line) for line in printed.splitlines()]
    for line in map(without_times, shown):
        assert line == "..." or any(alike(line, other) for other in there), (line, printed)


def without_times(line):
    line = re.sub(r"\S+/keras_paragrad_launch_\w+/", "LOGS/", line)
    line = re.sub(r"is process \d+", "is process N", line)
    line = re.sub(r"[\d.]+ ?(s|ms|us|%)(?![\w%])", r"N\1", line.replace("\u2588", ""))
    # A slow machine takes seconds where the page shows milliseconds.
    return " ".join(re.sub("N(s|us)/step", "Nms/step", line).split())


def alike(shown, printed):
    """Whether lines are the same but for rounding: of what is rounding itself, as `6e-08`, the order of magnitude."""
    number = r"-?\d+(?:\.\d+)?e-\d+|-?\d+\.\d+|\d+(?= [KMG]iB)"
    if re.sub(number, "N", shown) != re.sub(number, "N", printed):
        return False
    pairs = zip(re.findall(number, shown), re.findall(number, printed), strict=True)
    near = [(float(one), pytest.approx(float(other), rel=9 if "e" in one else 0.02)) for one, other in pairs]
    return all(one == other for one, other in near)


def started(words, folder):
    """What Python prints in a process of its own, which `launch` needs as it handles signals."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=name_of)
def test_files_in_commands_exist(page):
    given = {name for name, _ in SCRIPT.findall(page.read_text())}
    shown = [commands(code.splitlines()[0]) for code, _ in blocks(page, "console")]
    for block in [*shown, *(commands(code) for code, _ in blocks(page, "sh"))]:
        folder = ROOT
        for command in block:
            if command[0] == "cd":
                folder = ROOT / command[1]
            for word in command:
                if re.search(r"\.(py|sbatch|yaml)$", word):
                    assert word in given or (folder / word).exists(), word


@pytest.mark.not_fast
def test_a_page_builds(tmp_path):
    some = "include_patterns=index.md,guides/accumulation.md"
    command = [sys.executable, "-P", "-m", "sphinx", "-Q", "-b", "html", "-D", some, str(DOCS), str(tmp_path)]
    subprocess.run(command, env={**os.environ, "TUTORIALS": "off"}, check=True, timeout=300)
    assert "ExactAccumulation" in (tmp_path / "guides" / "accumulation.html").read_text()


def test_a_task_fits_on_one_screen():
    tasks = re.split(r"^###? ", TASKS.read_text(), flags=re.MULTILINE)[1:]
    for task in tasks:
        assert len(task.splitlines()) <= 40, task.splitlines()[0]


def test_tasks_are_in_groups_that_are_taken_in_at_a_glance():
    _, *groups = re.split(r"^## ", TASKS.read_text(), flags=re.MULTILINE)
    counts = {group.splitlines()[0]: len(re.findall(r"^### ", group, flags=re.MULTILINE)) for group in groups}
    assert counts.pop("All pages") == 0
    assert all(1 <= count <= 8 for count in counts.values()), counts


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), flags=re.MULTILINE)
    kept = string.ascii_lowercase + string.digits + "-_ "
    return {"".join(each for each in heading.lower() if each in kept).replace(" ", "-") for heading in headings}


def links(page):
    """The pages and files that a page links to, with anchors."""
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        name, _, anchor = link.partition("#")
        yield (page.parent / name).resolve() if name else page, anchor


# A source distribution has no .github.
OTHERS = sorted([*ROOT.glob("*.md"), *(ROOT / ".github").glob("*.md")])
LINKING = [*PAGES, *(page for page in OTHERS if page.name != "CHANGELOG.md")]


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_links_lead_somewhere(page):
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), (target, anchor)


def test_every_page_is_reached_from_the_index():
    reached, found = set(), [INDEX]
    while found:
        page = found.pop()
        reached.add(page)
        found += [target for target, _ in links(page) if target.suffix == ".md" and target not in reached]
    assert set(PAGES) <= reached
    assert INDEX in [target for target, _ in links(ROOT / "README.md")]


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_paths_that_are_named_exist(page):
    folders = "keras_paragrad|tests|docs|benchmarks|examples|compat|engine|storage"
    for path in re.findall(rf"`((?:{folders})/[\w./]*)`", FENCE.sub("", page.read_text())):
        assert (ROOT / path).exists() or (ROOT / "keras_paragrad" / path).exists(), path


def test_the_first_example_is_short():
    first, _ = blocks(ROOT / "README.md", "python")[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 15


# Pages that say where something is in the source, by a path or by a module's name alone.
@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_modules_that_a_page_names_are_there(page):
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / page).read_text())
    there = [
        path for folder in ("keras_paragrad", "tests", "benchmarks", "docs") for path in (ROOT / folder).rglob("*.py")
    ]
    paths = [f"/{path.relative_to(ROOT)}" for path in there]
    assert named
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in paths)] == []


def test_what_troubleshooting_quotes_is_a_message_of_the_package():
    read = runpy.run_path(str(DOCS / "site" / "messages.py"))
    said = [text for module in read["ROOT"].rglob("*.py") for text in read["strings"](module)]
    page = (DOCS / "troubleshooting.md").read_text()
    quoted = re.findall(r"^> (?:… )?(.+?)(?: …)?$", page, flags=re.MULTILINE)
    # Below each heading.
    assert len(quoted) == len(re.findall(r"^### .+\n\n> ", page, flags=re.MULTILINE)) == page.count("\n### ") > 40
    assert [each for each in quoted if not any(each in text for text in said)] == []


def test_tables_are_what_the_benchmarks_have_saved(monkeypatch):
    """Write them anew with `python benchmarks/tables.py`."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tables

    marked = {
        page.relative_to(ROOT).as_posix(): set(re.findall(r"<!-- table: ([\w ]+) -->", page.read_text()))
        for page in (ROOT / "README.md", *PAGES)
    }
    assert {page: names for page, names in marked.items() if names} == {
        page: set(names) for page, names in tables.TABLES.items()
    }
    for page in tables.TABLES:
        text = (ROOT / page).read_text()
        assert tables.written(page, text) == text, page


def test_charts_are_what_the_benchmarks_have_saved(monkeypatch):
    """Draw them anew with `python benchmarks/tables.py`; each benchmark has one on their first page, with its scale."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import charts
    import tables

    index = (DOCS / "benchmarks" / "index.md").read_text()
    pages = {page.stem for page in (DOCS / "benchmarks").glob("*.md")} - {"index"}
    assert set(charts.CHARTS) == pages | set(tables.SECTIONS)
    for name, panels in charts.CHARTS.items():
        picture = charts.PICTURES / f"{name}.svg"
        assert picture.read_text() == charts.drawn(panels()), name
        assert len(re.findall(r"(linear|logarithmic) scale<", picture.read_text())) == len(panels()), name
        assert f"](../images/benchmarks/{name}.svg)" in index


NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"
# By page, the files of the numbers in its tables.
MEASURED = {
    "benchmarks/accumulation": ("accumulation", "memory", "contrastive", "custom_steps", "recompute"),
    "benchmarks/distribution": ("distribution", "backups"),
    "benchmarks/per_example": ("per_example", "input_gradients"),
    "benchmarks/privacy": ("privacy",),
    "benchmarks/sharding": ("sharding", "mesh", "pipeline", "estimate", "plan"),
    "guides/profiling": ("profiling",),
}
# Rows that no benchmark measures again.
MEASURED_ONCE = ("a worker raises an error", "`fit`, as above", "a dataset on each worker", "one process, stock `fit`")


def numbers_in(saved):
    """All numbers in what JSON holds, in its sentences too."""
    if isinstance(saved, dict):
        saved = [*saved, *saved.values()]
    if isinstance(saved, list):
        return [number for each in saved for number in numbers_in(each)]
    if isinstance(saved, str):
        return [float(each.replace(",", "")) for each in re.findall(NUMBER, saved)]
    return [float(saved)] if isinstance(saved, int | float) else []


@pytest.mark.parametrize("name", MEASURED)
def test_numbers_in_tables_are_those_that_benchmarks_have_saved(name):
    results = [ROOT / "benchmarks" / "results" / f"{each}.json" for each in MEASURED[name]]
    saved = numbers_in([json.loads(path.read_text()) for path in results])
    scales = {"": (1.0,), " ms": (1.0,), " s": (1.0,), " MB": (1.0, 1e-6), "%": (1.0, 100.0)}
    checked = 0
    for line in (DOCS / f"{name}.md").read_text().splitlines():
        label, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if not line.startswith("|") or label.startswith(MEASURED_ONCE):
            continue
        for cell in cells:
            if found := re.fullmatch(rf"({NUMBER})(| ms| s| MB|%)", cell):
                shown, decimals = float(found[1].replace(",", "")), len(found[1].partition(".")[2])
                near = 0.500001 * 10**-decimals
                assert any(abs(shown - scale * each) <= near for scale in scales[found[2]] for each in saved), line
                checked += 1
    assert checked > 8
