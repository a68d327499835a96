"""The example that trains SimCLR in the memory of a slice."""

from pathlib import Path

import forked_scripts
import own_process
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "simclr_in_small_memory.py"


@pytest.mark.slow(20)
def test_it_compares_two_batches(tmp_path):
    printed = tmp_path / "printed"
    arguments = (str(EXAMPLE), ["--updates", "3"], str(tmp_path))
    process = own_process.start(forked_scripts.run_script, arguments, {}, printed)
    process.join(180)
    process.kill()
    said = printed.read_text()
    assert process.exitcode == 0, said
    assert "3 updates" in said
    rows = [line for line in said.splitlines() if "%" in line]
    assert len(rows) == 3
    assert "256" in rows[-1] and "32" in rows[-1]
