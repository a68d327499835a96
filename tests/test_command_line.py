"""The command line: quick where it can be, and of help where words are wrong."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import keras_paragrad
from keras_paragrad.cli.main import main
from keras_paragrad.pages import pages

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.fast

# At a terminal; what a command imports is listed at its end.
LISTS = """
import atexit, sys
sys.argv[0] = "keras-paragrad"
heavy = {"h5py", "jax", "keras", "numpy", "pandas", "rich", "tensorflow", "torch"}
atexit.register(lambda: print("IMPORTED", sorted(heavy & set(sys.modules)), file=sys.stderr))
from keras_paragrad.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "words",
    [
        "--version",
        "--help",
        "docs",
        "docs guides/launch",
        "docs nowhere",
        "doctor --help",
        "estimate --help",
        "estimate missing.py:build_model",
        "launch --help",
        "report --help",
        "doctor --seconds inf",
    ],
)
def test_answers_without_tensorflow(words):
    command = [sys.executable, "-P", "-c", LISTS, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    imported = re.search(r"IMPORTED (.*)", done.stderr)
    assert imported and set(eval(imported[1])) <= {"rich"}, done.stderr
    assert done.returncode == (2 if {"inf", "nowhere", "missing.py:build_model"} & {*words.split()} else 0)


def test_what_imports_the_package_gets_its_components():
    """Also while Python looks for a module to run: Keras must know our classes before a model is loaded."""
    assert keras_paragrad.AccumulatingOptimizer.__module__ == "keras_paragrad.accumulation.optimizer"


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"keras-paragrad {keras_paragrad.__version__}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("lanch --workers 2 train.py", "Did you mean `launch`?"),
        ("launch --worker 2 train.py", "Did you mean `--workers`?"),
        ("launch --workers 2 --grace-second=5 train.py", "Did you mean `--grace-seconds`?"),
        ("report --outputt a b", "Did you mean `--output`?"),
        ("doctor --zzz", "unrecognized arguments: --zzz\n"),
        *((f"doctor --seconds {word}", "--seconds: expected a finite number") for word in ("inf", "nan")),
        *((f"doctor --seconds={word}", "--seconds: expected a finite number") for word in ("-5", "1e300", "x")),
        *(
            (f"launch --workers={word} train.py", "argument --workers: expected an integer")
            for word in ("-1", "1.5", "x", "\u0663", "9" * 5000)
        ),
        ("launch --devices-per-worker 999999999 train.py", "--devices-per-worker: expected an integer from 1 to 1024"),
        ("launch --workers 999999999 train.py", "--workers: expected an integer from 1 to 1024"),
        ("launch --workers 2 --grace-seconds 1e12 train.py", "--grace-seconds: expected a finite number from 0"),
        ("launch --workers 2 --max-restarts 1e3 train.py", "--max-restarts: expected an integer"),
    ],
    ids=lambda words: words[:60],
)
def test_wrong_words(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert says in said and len(said) < 5000


@pytest.mark.parametrize(
    "words",
    [
        *("report nowhere", "estimate nowhere.py:build", "estimate here.py:build"),
        *("launch", "launch nowhere.py", "launch -m nowhere_at_all", "estimate a --length x", "doctor --seconds 0"),
    ],
)
def test_errors_begin_alike(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").touch()
    try:
        status = main(words.split())
    except SystemExit as ended:
        status = ended.code
    (error,) = (line for line in capsys.readouterr().err.splitlines() if "error:" in line)
    assert status in (1, 2) and error.startswith(f"keras-paragrad {words.split()[0]}: error: ")


@pytest.mark.parametrize("words", ["report {long}", "report a\0b", "report a --output gs://bucket/x"])
def test_report_refuses_what_is_no_path(words, capsys):
    assert main(words.format(long="x" * 9999).split(" ")) == 1
    assert "must be a path" in capsys.readouterr().err


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["digest", "docs", "doctor", "estimate", "launch", "report"])
def test_help_has_examples_and_what_shows_its_page(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    examples, _, shown_by = capsys.readouterr().out.partition("examples:\n")[2].partition("explained by: ")
    program, *words = shown_by.split()
    assert program == "keras-paragrad" and main(words) == 0
    assert capsys.readouterr().out.startswith("# ")
    lines = examples.split("\n  keras-paragrad "[1:])[1:]
    assert lines and all(line.split()[0] == command for line in lines)


PAGES = sorted((ROOT / "docs").rglob("*.md"))


def test_docs_lists_every_page(capsys):
    assert main(["docs"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs").with_suffix("")) for page in PAGES)
    assert listed["guides/launch"] == "Launching several workers"


@pytest.mark.parametrize("word", ["guides/launch", "docs/guides/launch.md", "guides/launch.md"])
def test_docs_shows_a_page(word, capsys):
    assert main(["docs", word]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# Launching several workers\n")
    assert "(fault_tolerance.md)" in shown


def test_every_page_is_shown_without_comments(capsys):
    for page in pages():
        assert main(["docs", page]) == 0
        shown = re.sub(r"^```.*?^```$", "", capsys.readouterr().out, flags=re.MULTILINE | re.DOTALL)
        assert shown.startswith("# ") and "<!--" not in shown, page


@pytest.mark.parametrize(
    ("word", "title"),
    [
        ("oom", "# A model or batch that doesn't fit\n"),
        ("Multi-GPU", "# Distributed training\n"),
        ("elastic training", "# Training that outlives its machines\n"),
    ],
)
def test_docs_finds_a_page_by_a_word_of_its_index(word, title, capsys):
    assert main(["docs", word]) == 0
    assert capsys.readouterr().out.startswith(title)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("guides/lanch", "there is no page 'guides/lanch'. Did you mean `guides/launch`?"),
        ("lanch", "Did you mean `launch`?"),
        ("zzz", "there is no page 'zzz'. `keras-paragrad docs` lists all."),
        (
            "profiling",
            "is several pages: keras-paragrad docs guides/profiling, keras-paragrad docs reference/profiling",
        ),
    ],
)
def test_docs_refuses_other_names(word, says, capsys):
    assert main(["docs", word]) == 2
    found = capsys.readouterr()
    assert says in found.err and found.out == ""


def test_docs_are_formatted_on_a_terminal():
    ours, theirs = os.openpty()
    code = "import sys; sys.argv[0] = 'keras-paragrad'; from keras_paragrad.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "docs", "index"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    shown = b""
    with subprocess.Popen(command, stdout=theirs, env=environment) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):
            while data := os.read(ours, 4096):
                shown += data
        assert process.wait(60) == 0
    os.close(ours)
    assert b"\x1b[1m" in shown and b"# keras_paragrad" not in shown


@pytest.mark.parametrize(("level", "quiet"), [(None, True), ("0", False)], ids=["unset", "asked for"])
def test_log_lines_of_tensorflow_are_shown_where_asked_for(level, quiet):
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": level} if level else {}
    command = [sys.executable, "-P", "-c", LISTS, "digest", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 2
    first, *lines = [line for line in done.stderr.splitlines() if not line.startswith("IMPORTED")]
    assert first == "keras-paragrad digest: loading TensorFlow..."
    assert all(line.startswith("keras-paragrad digest: ") for line in lines) == quiet


@pytest.mark.parametrize("words", ["doctor", "estimate {here}/model.py:build", "report {here}"])
def test_the_first_line_comes_before_anything_heavy_is_imported(words, tmp_path):
    """Within a second, wherever Python starts in one."""
    (tmp_path / "model.py").touch()
    code = LISTS.replace(
        "from keras_paragrad.cli.main",
        """
class Stop:
    def find_spec(self, name, *_):
        if name in heavy - {"rich"}:
            os._exit(9)

import os
sys.meta_path.insert(0, Stop())
from keras_paragrad.cli.main""",
    )
    command = [sys.executable, "-P", "-c", code, *words.format(here=tmp_path).split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.startswith(f"keras-paragrad {words.split()[0]}: "), done.stderr
    if words.split()[0] == "doctor":
        assert done.returncode == 9
