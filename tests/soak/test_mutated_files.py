"""Whatever a file holds, a reader takes it or refuses it in one line: see mutated.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def tried(count, seed):
    """In a process of its own, so that a crash is seen, and memory is its own."""
    command = [sys.executable, str(Path(__file__).with_name("mutated.py")), str(count), str(seed)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120 + count,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *defects, last = map(json.loads, done.stdout.splitlines())
    assert last == {"tried": count}
    return defects


def test_three_hundred_mutated_files():
    assert tried(300, 0) == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 5))
def test_ten_thousand_mutated_files(seed):
    assert tried(2_500, seed) == []
