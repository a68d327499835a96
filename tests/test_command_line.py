"""The command line: quick where it can be, and of help where words are wrong."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

import keras_paragrad
from keras_paragrad.cli.main import main

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
        "doctor --help",
        "estimate --help",
        "estimate missing.py:build_model",
        "explain --help",
        "launch --help",
        "report --help",
        "completions bash",
        "explain --gpu-memory-gb inf",
    ],
)
def test_answers_without_tensorflow(words):
    command = [sys.executable, "-P", "-c", LISTS, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    imported = re.search(r"IMPORTED (.*)", done.stderr)
    assert imported and set(eval(imported[1])) <= {"rich"}, done.stderr
    assert done.returncode == (2 if "inf" in words or "missing" in words else 0)


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
        ("explain --gpu 2", "Did you mean `--gpus`?"),
        ("explain --strategy mirored", "Did you mean `mirrored`?"),
        ("report --compair a b", "Did you mean `--compare`?"),
        ("explain --zzz", "unrecognized arguments: --zzz\n"),
        ("completions tcsh", "choose from"),
        *((f"explain --gpu-memory-gb {word}", "--gpu-memory-gb: expected a finite number") for word in ("inf", "nan")),
        *((f"explain --gpu-memory-gb={word}", "--gpu-memory-gb: expected a finite") for word in ("-5", "1e300", "x")),
        *(
            (f"explain --{name}={word}", f"argument --{name}: expected an integer")
            for name in ("cpus", "logical-cpus", "gpus", "tpu", "workers", "ps", "warmup-steps", "pack-bytes")
            for word in ("-1", "1.5", "x", "\u0663", "9" * 5000)
        ),
        ("explain --compute-capability 9" + "0" * 5000, "compute capability"),
        ("explain --collective-timeout 1e300", "--collective-timeout: expected a finite number from 1"),
        ("doctor --seconds inf", "--seconds: expected a finite number above 0"),
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


@pytest.mark.parametrize("words", ["report {long}", "report a\0b", "report a --output gs://bucket/x"])
def test_report_refuses_what_is_no_path(words, capsys):
    assert main(words.format(long="x" * 9999).split(" ")) == 1
    assert "must be a path" in capsys.readouterr().err


COMPLETED = {
    "la": ["launch"],
    "": ["completions", "doctor", "estimate", "explain", "launch", "report"],
    "--ver": ["--version"],
    "launch --wo": ["--workers"],
    "launch --workers ": [],
    "launch --workers 2 tr": ["train.py"],
    "launch --workers 2 train.py tr": ["train.py"],
    "explain --json --strategy m": ["mirrored", "multi_worker"],
    "completions ": ["bash", "zsh", "fish"],
    "report lo": ["logs"],
    "report --compare logs lo": ["logs"],
    "nothing --wo": [],
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(tmp_path, capsys):
    (tmp_path / "train.py").touch()
    (tmp_path / "logs").mkdir()
    assert main(["completions", "bash"]) == 0
    script = [capsys.readouterr().out]
    for line in COMPLETED:
        words = shlex.join(["keras-paragrad", *line.split(" ")])
        script.append(f"COMP_WORDS=({words}); COMP_CWORD=$(({'${#COMP_WORDS[@]}'} - 1))")
        script.append('_shtab_keras_paragrad; echo "${COMPREPLY[*]}"')
    command = ["bash", "-c", "\n".join(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert dict(zip(COMPLETED, map(str.split, done.stdout.splitlines()), strict=True)) == COMPLETED


@pytest.mark.parametrize(("shell", "begins"), [("zsh", "#compdef keras-paragrad"), ("fish", "# AUTOMATICALLY")])
def test_other_shells_get_code(shell, begins, capsys):
    assert main(["completions", shell]) == 0
    assert capsys.readouterr().out.startswith(begins)


def test_completions_name_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completions", "bash"]) == 1
    assert "Run pip install 'keras_paragrad[completions]'" in capsys.readouterr().err
