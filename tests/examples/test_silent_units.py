"""The example that shows what silent units do: a whole small run of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "silent_units.py"


def test_it_prints_a_row_without_and_one_with_a_spread():
    options = ["--benchmark", "split-digits", "--seeds", "2", "--epochs", "2"]
    done = subprocess.run([sys.executable, EXAMPLE, *options], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    title, _, without, with_it = ([cell.strip() for cell in row.split("|")[1:-1]] for row in done.stdout.splitlines())
    assert title[:3] == ["fisher_spread", "learned", "after the third task"]
    assert title[3:] == ["layer 1 put back", "layer 2 put back"]
    assert without[0] == "0.0"
    assert float(with_it[0]) > 0
    for row in (without, with_it):
        assert all(0 <= float(cell.split(" ± ")[0]) <= 100 for cell in row[1:])
    assert without[1] == with_it[1]  # until there is something to hold, nothing is different
