"""The program of the comparison, on small runs: what it searches, chooses, runs and prints."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from evcl import rl

PROGRAM = Path(__file__).parents[2] / "experiments" / "rl" / "agents.py"
SMALL = {"steps": 128, "envs": 4, "rollout": 16, "passes": 1, "episodes": 1}


@pytest.fixture
def program(tmp_path, monkeypatch):
    about = importlib.util.spec_from_file_location("agents_program", PROGRAM)
    made = importlib.util.module_from_spec(about)
    about.loader.exec_module(made)
    monkeypatch.setattr(made, "FOLDER", tmp_path)
    monkeypatch.setattr(made, "TUNED", tmp_path / "tuned.json")
    (tmp_path / "tuned.json").write_text(json.dumps({stream: {"*": {}} for stream in rl.STREAMS}))
    return made


@pytest.mark.full
def test_from_the_search_to_the_table(program, tmp_path, monkeypatch):
    monkeypatch.setitem(program.TRIALS, "cartpole-variants", {"ewc": program.grid(strength=(1.0, 2.0))})
    streams = ["cartpole-variants"]
    program.search(streams, 1, SMALL, 2)
    program.search(streams, 1, SMALL, 2)  # it is done already
    tried = program.tried(streams[0])
    assert [one["settings"] for one in tried] == [{"strength": 1.0}, {"strength": 2.0}]
    best = max(tried, key=lambda one: one["mean"])["settings"]
    program.tune()
    assert json.loads((tmp_path / "tuned.json").read_text())[streams[0]]["ewc"] == best
    program.final(streams, list(program.METHODS), 1, SMALL, 2)
    lines = program.tables(streams).splitlines()
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == list(program.METHODS)
    assert lines[0].startswith("cartpole-variants, 2 tasks of 128 environment steps, 5 seeds (")


def test_every_method_has_as_many_trials(program):
    assert list(program.TRIALS) == list(rl.STREAMS)
    for methods in program.TRIALS.values():
        assert len({len(trials) for trials in methods.values()}) == 1
        for name, trials in methods.items():
            assert all(set(trial) <= set(rl.method(name).known_settings) for trial in trials)


@pytest.mark.records
def test_the_tuned_settings_are_the_best_trials():
    """Where a search has been made."""
    for stream in rl.STREAMS:
        path = PROGRAM.parent / "search" / f"{stream}.json"
        tried = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for name in {one["method"] for one in tried}:
            known = rl.method(name, stream).known_settings
            best = max((one for one in tried if one["method"] == name), key=lambda one: one["mean"] or -1e9)
            assert {key: known[key].default for key in best["settings"]} == best["settings"]
