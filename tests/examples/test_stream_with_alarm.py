"""The example of a stream with an alarm: it runs, notices the change soon, and writes its figure."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "stream_with_alarm.py"


@pytest.mark.full
def test_it_notices_the_change_and_writes_a_figure(tmp_path):
    run = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, check=True)
    first, *alarms = run.stdout.splitlines()
    assert float(re.search(r"accuracy ([\d.]+)", first)[1]) > 0.84
    rows = [int(re.match(r"alarm at reading ([\d,]+) ", line)[1].replace(",", "")) for line in alarms]
    assert any(3000 < row < 3200 for row in rows)
    assert (tmp_path / "stream_with_alarm.png").stat().st_size > 20_000
