"""`benchmarks/gpu.py`: its form for CPUs, what becomes of cases that go wrong, and the docs that follow from it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    return gpu


def of_broken_cases(gpu, *modules):
    return {"broken": gpu.Part("what goes wrong", modules or ("trainings.gpu_cases",), 1.0)}


def lines_of(path):
    (card,) = json.loads(path.read_text()).values()
    return card["parts"]["broken"]["lines"]


@pytest.mark.long
@pytest.mark.parametrize("words", [[], ["--every"]], ids=["first", "every"])
def test_all_parts_run_small_on_cpus(words, tmp_path):
    """Nothing is compared with time; the script itself says what failed."""
    command = [sys.executable, "-W", "ignore", BENCHMARKS / "gpu.py", "--cpu", "--seconds", "900", *words]
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run(
        [*command, "--output", tmp_path / "gpu.json"],
        env={**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=960,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    (card,) = json.loads((tmp_path / "gpu.json").read_text()).values()
    assert set(card["parts"]) == {"found", "right", "devices", "fast", "memory", "seen"}
    assert all(part["lines"] for part in card["parts"].values())
    # What may be refused on a GPU holds here.
    outcomes = {line["outcome"] for part in card["parts"].values() for line in part["lines"].values()}
    assert outcomes == {"holds", "measured"}


def test_a_case_that_goes_wrong_is_a_failed_line_and_the_rest_goes_on(gpu, tmp_path, capsys):
    path = tmp_path / "gpu.json"
    status = gpu.main(["--cpu", "--seconds", "60", "--output", str(path)], of_broken_cases(gpu))
    assert status == 1
    lines = lines_of(path)
    assert {name: line["outcome"] for name, line in lines.items()} == {
        "holds": "holds",
        "is off": "FAILS",
        "raises": "raised",
        "hangs": "timed out",
        "returns nothing": "empty",
        "ends its process": "crashed",
        "comes after them": "holds",
    }
    assert "ValueError: the reason (gpu_cases.py:" in lines["raises"]["text"]
    assert lines["hangs"]["seconds"] < 10
    printed = capsys.readouterr().out
    assert "2 of 7 lines passed" in printed
    assert all(name in printed for name in lines)


def test_a_module_that_fails_is_a_line_too(gpu, tmp_path):
    path = tmp_path / "gpu.json"
    parts = of_broken_cases(gpu, "gpu_cases_that_are_not_there", "trainings.gpu_cases")
    assert gpu.main(["--cpu", "--seconds", "60", "--output", str(path)], parts) == 1
    lines = lines_of(path)
    assert lines["gpu_cases_that_are_not_there"]["outcome"] == "raised"
    assert lines["comes after them"]["outcome"] == "holds"


def test_what_there_was_no_time_for_is_said(gpu, tmp_path):
    path = tmp_path / "gpu.json"
    assert gpu.main(["--cpu", "--seconds", "0", "--output", str(path)], of_broken_cases(gpu)) == 1
    (line,) = lines_of(path).values()
    assert line["outcome"] == "not run"
    assert "--seconds" in line["text"]


def test_lines_are_kept_as_they_are_known_and_other_parts_stay(gpu, tmp_path):
    from gpu_parts.case import Line
    from gpu_parts.saved import Results, read

    path = tmp_path / "folder" / "gpu.json"
    for part, name in (("right", "one"), ("fast", "two"), ("right", "three")):
        # A new run of one part, on the same card.
        results = Results(path, "2026-01-02")
        results.meet({"card": "A card", "driver": "1"})
        results.add(part, name, Line("some text"))
        assert read(path)["A card"]["parts"][part]["lines"][name]["text"] == "some text"
    parts = read(path)["A card"]["parts"]
    assert {part: list(found["lines"]) for part, found in parts.items()} == {"right": ["three"], "fast": ["two"]}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.long
def test_without_a_gpu_the_script_says_what_to_do(gpu, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "LIBRARIES", ("libnot_here.so.9",))
    assert gpu.main([]) == 2
    said = capsys.readouterr().err
    assert "--cpu" in said
    assert "libnot_here.so.9" in said
    assert "tensorflow[and-cuda]" in said


def test_parts_are_listed_and_chosen(gpu, capsys):
    assert gpu.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(gpu.PARTS)
    with pytest.raises(SystemExit):
        gpu.main(["--only", "wrong"])
    assert "invalid choice" in capsys.readouterr().err


def test_docs_say_what_was_run(gpu):
    """Write them anew with `python benchmarks/gpu.py --docs`."""
    from gpu_parts import saved

    found = saved.read(saved.RESULTS)
    shows = {name: part.shows for name, part in gpu.PARTS.items()}
    assert saved.PAGE.read_text() == saved.page(found, shows)
    for path in saved.SAYING:
        link = os.path.relpath(saved.PAGE, path.parent)
        (said,) = saved.MARKED.findall(path.read_text())
        assert saved.sentence(found, link) in said


def test_the_page_of_a_run(gpu):
    from gpu_parts import saved
    from gpu_parts.case import Line

    lines = {"one": Line("a | b < c", "holds").to_dict(), "two": Line("off", "FAILS").to_dict()}
    machine = {"card": "A card", "driver": "1.2", "date": "2026-01-02"}
    found = {"A card": {"machine": machine, "parts": {"right": {"date": "2026-01-02", "lines": lines}}}}
    page = saved.page(found, {"right": "whether it is right"})
    assert "| one | holds | a \\| b &lt; c |" in page
    assert "| two | **FAILS** | off |" in page
    assert "1 of 2 checks and measurements passed. driver 1.2, date 2026-01-02." in page
    assert "checked on one A card: [what holds on a GPU](page.md)." in saved.sentence(found, "page.md")
    assert "haven't been tried" in saved.sentence({}, "docs/benchmarks/gpu.md")
