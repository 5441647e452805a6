"""The tables in docs/RESULTS.md are those that the programs write from the result files."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up_cells import programs_of

PROGRAMS = {
    "field/write_tables.py": ("field",),
    "generative/generative_tables.py": (),
    "months/write_table.py": ("generated", "learners"),
    "rl/agents.py": (),
    "streams/stream_tables.py": ("run_alarms", "run_streams", "stream_learners", "stream_scores"),
}


@pytest.mark.records
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_document_has_the_tables_of_the_results(program):
    with programs_of(Path(program).parent, Path(program).stem, also=PROGRAMS[program]) as (made,):
        text = made.DOCUMENT.read_text("utf-8")
        assert made.filled(text) == text, f"run python experiments/{program}"
