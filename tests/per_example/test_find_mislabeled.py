"""The example that looks for wrong labels finds them."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "find_mislabeled.py"


def test_most_wrong_labels_are_found():
    finished = subprocess.run([sys.executable, "-P", EXAMPLE], capture_output=True, text=True, timeout=180, check=True)
    for quality in ("precision", "recall"):
        (value,) = re.findall(rf"{quality} +([0-9.]+)", finished.stdout)
        assert float(value) > 0.75
    assert "90 of 1797 labels are wrong" in finished.stdout
    assert finished.stdout.count("called") == 12
