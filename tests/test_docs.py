"""The code in the documentation runs as it stands."""

import re
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


def test_the_first_example_is_short():
    lines = [line for line in BLOCKS[0].values[0].splitlines() if line.strip()]
    assert len(lines) <= 15
