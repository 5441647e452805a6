"""The example that maps what a model knows: it runs, tells four classes apart, and writes its figure."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "uncertainty_map.py"


@pytest.mark.full
def test_it_tells_the_classes_apart_and_writes_a_figure(tmp_path):
    run = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(re.match(r"(\d+) % right", run.stdout)[1]) > 95
    assert (tmp_path / "uncertainty_map.png").stat().st_size > 20_000
