"""Whatever a file holds, a reader takes it or refuses it in one line: see mutated.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
HERE = Path(__file__).parent


def tried(count, seed, *options):
    """In a process of its own, so that a crash is seen, and memory is its own."""
    done = subprocess.run(
        [sys.executable, str(HERE / "mutated.py"), str(count), str(seed), *options],
        capture_output=True,
        text=True,
        timeout=900 + count,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *defects, last = map(json.loads, done.stdout.splitlines())
    return defects, last


def test_the_corpus_and_some_mutated_files():
    defects, last = tried(120, 0)
    assert defects == []
    assert last["tried"] >= 120 + len([path for path in (HERE / "corpus").rglob("*") if path.is_file()])


def test_the_corpus_is_small_and_is_of_the_targets():
    from entries import TARGETS

    folders = {name.replace(" ", "-").replace(",", "") for name in TARGETS}
    for path in (HERE / "corpus").iterdir():
        assert path.name in folders
    assert sum(path.stat().st_size for path in (HERE / "corpus").rglob("*") if path.is_file()) < 200_000


@pytest.mark.soak
def test_ten_minutes_of_mutated_files():
    defects, last = tried(10**9, 1, "--seconds", "600")
    assert defects == []
    assert last["tried"] > 2_000


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 6))
def test_ten_thousand_mutated_files(seed):
    assert tried(2_500, seed)[0] == []
