"""The code in the documentation runs as it stands, and its links lead somewhere."""

import re
import string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}-{index}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for index, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block):
    exec(compile(block, "documentation", "exec"), {"__name__": "documentation"})


PAGES = [
    path
    for folder in (ROOT, ROOT / "docs", ROOT / ".github")
    for path in sorted(folder.glob("*.md"))
    if path.name != "CHANGELOG.md"
]
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    kept = string.ascii_lowercase + string.digits + "-_ "
    return {"".join(each for each in heading.lower() if each in kept).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", ".github/pull_request_template.md"])
def test_paths_that_are_named_exist(name):
    page = ROOT / name
    if not page.exists():
        pytest.skip("a source distribution has no .github")
    paths = re.findall(r"`((?:keras_paragrad|tests|docs|benchmarks|examples|_keras)/[\w./]*)`", page.read_text())
    assert paths
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "keras_paragrad" / path).exists(), path


def test_the_first_example_is_short():
    lines = [line for line in BLOCKS[0].values[0].splitlines() if line.strip()]
    assert len(lines) <= 15
