"""The example that looks for wrong labels finds them."""

import re
from pathlib import Path

import forked_scripts
import own_process

EXAMPLE = Path(__file__).parents[2] / "examples" / "find_mislabeled.py"


def test_most_wrong_labels_are_found(tmp_path):
    printed = tmp_path / "printed"
    process = own_process.start(forked_scripts.run_script, (str(EXAMPLE), [], str(tmp_path)), {}, printed)
    process.join(180)
    process.kill()
    said = printed.read_text()
    assert process.exitcode == 0, said
    for quality in ("precision", "recall"):
        (value,) = re.findall(rf"{quality} +([0-9.]+)", said)
        assert float(value) > 0.75
    assert "90 of 1797 labels are wrong" in said
    assert said.count("called") == 12
