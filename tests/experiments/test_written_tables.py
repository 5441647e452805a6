"""The tables in docs/RESULTS.md are those that the programs write from the result files."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "field/write_tables.py": ("field",),
    "generative/generative_tables.py": (),
    "rl/agents.py": (),
    "streams/stream_tables.py": ("run_alarms", "run_streams", "stream_learners", "stream_scores"),
}


@pytest.mark.records
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_document_has_the_tables_of_the_results(program, monkeypatch):
    path = ROOT / "experiments" / program
    monkeypatch.syspath_prepend(str(path.parent))
    names = (path.stem, *PROGRAMS[program])
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        made = importlib.import_module(path.stem)
        text = made.DOCUMENT.read_text("utf-8")
        assert made.filled(text) == text, f"run python experiments/{program}"
    finally:
        for name in names:
            sys.modules.pop(name, None)
