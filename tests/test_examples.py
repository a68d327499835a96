"""Each example says how long it takes, shows how far it is, and ends with what was shown and where its picture is."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from runner import forked_scripts, own_process

pytestmark = pytest.mark.fast

EXAMPLES = Path(__file__).parents[1] / "examples"
# By example, what the whole form says at least; `number` is held to what `ENOUGH` says.
SAYS = {
    "digits": r"The promise held: after 60 updates the weights are the same to (?P<number>\S+);",
    "digits_on_workers": r"replicas: 1, accuracy: 0\.\d+\. .* differ from those of .* at most (?P<number>\S+)\.$",
    "find_mislabeled": r"90 of 1797 labels are wrong\. Of the 90 examples .*, (?P<number>\d+) are among them\.",
    "gan_on_replicas": r"the GAN has the weights of one device to (?P<number>\S+),",
    "gpt_hybrid": r"loss: (?P<number>[\d.]+)",
    "larger_than_a_device": r"shard='parameters': trained, loss of each epoch .* (?P<number>\S+)",
    "private_digits": r"At epsilon 8 .* is right on (?P<number>[\d.]+)% of held-out digits",
    "simclr_in_small_memory": r"batches of 256 lead to features with which (?P<number>[\d.]+)% of the digits",
}
ENOUGH = {
    "digits": lambda number: number < 1e-5,
    "digits_on_workers": lambda number: number < 1e-6,
    "find_mislabeled": lambda number: number > 0.75 * 90,
    "gan_on_replicas": lambda number: number < 2e-6,
    "gpt_hybrid": lambda number: number < 2.5,
    "larger_than_a_device": lambda number: number < 0.5,
    "private_digits": lambda number: number > 90,
    "simclr_in_small_memory": lambda number: number > 75,
}
# What the short form says, where that is less than the whole one says.
SHORTER = {
    "digits": r"The promise held: after 12 updates",
    "digits_on_workers": r"After 2 epochs the weights differ from those of Keras in one process by at most \d",
    "find_mislabeled": r"90 of 1797 labels are wrong",
    "gan_on_replicas": r"the GAN has the weights of one device to \d\.\de-0[789]",
    "gpt_hybrid": r"goes on after 'The statement ':",
    "larger_than_a_device": r"shard=None: out of memory\. OOM when allocating tensor",
    "private_digits": r"At epsilon 2 .* is right on [\d.]+% of held-out digits",
    "simclr_in_small_memory": r"batches of 32 to [\d.]+%",
}
NAMES = sorted(path.stem for path in EXAMPLES.glob("[a-z]*.py"))


def test_each_example_is_here():
    assert sorted(SAYS) == sorted(ENOUGH) == sorted(SHORTER) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_installed_is_named_in_a_sentence(name, tmp_path):
    """Without the folder of installed packages."""
    command = [sys.executable, "-S", EXAMPLES / f"{name}.py"]
    ran = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert re.fullmatch(
        rf"{name}\.py needs keras_paragrad(, \w+)* and \w+, which are not installed\. "
        r"Run pip install 'keras_paragrad\[demo\]'\.\n",
        ran.stderr,
    )


def check(printed, folder, takes):
    """What each example prints, whatever it shows."""
    # TensorFlow's log begins before anything can silence it.
    lines = [line for line in printed.splitlines() if line and not re.match(r"WARNING: All log|[IWE]\d{4} ", line)]
    assert any(re.fullmatch(rf"\w+\.py takes {takes}.*\.", line) for line in lines[:5]), printed
    shown = re.fullmatch(r"The (picture|report, to open in a browser): (.+)", lines[-1])
    assert shown, printed
    assert lines[-2].endswith("."), printed
    path = folder / shown[2]
    if shown[1] == "picture":
        assert path.read_bytes().startswith(b"\x89PNG")
    else:
        assert "</html>" in path.read_text()


# In `make test`: the one that starts workers, and one with a step of its own.
QUICK = ("digits_on_workers", "gan_on_replicas")


def marks_of(name):
    return [] if name in QUICK else [pytest.mark.long]


# What the tests set, and what changes how convolutions round on some processors: by more than this example allows.
ROUNDING = ("TF_ENABLE_ONEDNN_OPTS", "XLA_FLAGS")
AS_USERS_HAVE_IT = ("digits",)


@pytest.mark.few(0, "digits_on_workers")
@pytest.mark.not_fast
@pytest.mark.parametrize("name", [pytest.param(each, marks=marks_of(each)) for each in NAMES])
def test_the_short_form_runs(name, tmp_path):
    printed = tmp_path / "printed.txt"
    if name in AS_USERS_HAVE_IT:
        environment = {key: value for key, value in os.environ.items() if key not in ROUNDING}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, EXAMPLES / f"{name}.py", "--short"]
        with printed.open("w") as output:
            status = subprocess.run(command, cwd=tmp_path, env=environment, stdout=output, stderr=output, timeout=600)
        exitcode = status.returncode
    else:
        arguments = (str(EXAMPLES / f"{name}.py"), ["--short"], str(tmp_path))
        process = own_process.start(forked_scripts.run_script, arguments, {}, printed)
        process.join(600)
        process.kill()
        process.join()
        exitcode = process.exitcode
    said = printed.read_text()
    assert exitcode == 0, said
    assert re.search(SHORTER[name], said), said
    check(said, tmp_path, "half a minute, as it is short")


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_the_whole_form_shows_what_it_says(name, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, EXAMPLES / f"{name}.py"]
    said = []
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline = threading.Timer(1800, process.kill)
        deadline.start()
        for line in process.stdout:
            said.append(line)
        deadline.cancel()
    printed = "".join(said)
    assert process.returncode == 0, printed
    check(printed, tmp_path, "")
    number = [found["number"] for found in re.finditer(SAYS[name], printed, re.MULTILINE)][-1]
    assert ENOUGH[name](float(number)), printed
