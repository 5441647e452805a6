"""The programs that compare streams: what they score, what they choose, and the tables they make."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from made_up_cells import EXPERIMENTS, programs_of

NAMES = ("stream_scores", "stream_learners", "run_streams", "run_alarms", "stream_tables")


@pytest.fixture
def programs():
    pytest.importorskip("river")
    with programs_of("streams", *NAMES) as found:
        yield dict(zip(NAMES, found, strict=True))


def test_a_label_that_never_came_and_rows_before_the_first_scored_one_do_not_count(programs):
    scores = programs["stream_scores"].Scores(2, skip=3)
    p = np.array([[1.0, 0.0], [0.9, 0.1], [0.8, 0.2], [0.0, 1.0], [0.5, 0.5]])
    scores.add(p[:4], np.array([0, 0, 0, 1]))  # the last is the first 1
    assert scores.scores.rows == 0
    scores.add(p[4:], np.array([1]))
    assert scores.scores.rows == 1
    assert scores.found()["nll"] == pytest.approx(np.log(2), abs=1e-6)
    assert scores.found()["nll_smoothed"] == pytest.approx(np.log(2), abs=1e-6)


def test_an_impossible_label_costs_less_in_the_second_log_loss(programs):
    scores = programs["stream_scores"].Scores(2)
    scores.add(np.array([[0.5, 0.5], [0.5, 0.5], [0.0, 1.0]]), np.array([0, 1, 0]))
    assert scores.found()["nll"] == pytest.approx(-np.log(1e-15), rel=1e-4)
    assert scores.found()["nll_smoothed"] == pytest.approx(-np.log(0.005), rel=1e-4)


def test_every_learner_predicts_before_it_learns_and_depends_on_its_seed_alone(programs):
    from evcl.streams.sources import generated

    learners = programs["stream_learners"]
    rows = next(generated("stagger", "none", 150).read(150))
    for name, make in learners.PEERS.items():
        first, same = (make(len(rows.names), 2, 5).step(rows.x, rows.y) for _ in range(2))
        assert first.shape == (150, 2)
        np.testing.assert_array_equal(first, same, err_msg=name)
        np.testing.assert_allclose(first.sum(1), 1, err_msg=name)
        wrong = make(len(rows.names), 2, 5).step(rows.x[:1], 1 - rows.y[:1])
        np.testing.assert_array_equal(first[0], wrong[0], err_msg=name)
        assert (first[75:].argmax(1) == rows.y[75:].numpy()).mean() > 0.8, name


def test_every_setting_of_a_search_works(programs):
    learners = programs["stream_learners"]
    x, y = torch.eye(3).repeat(10, 1), torch.tensor([0, 1, 2] * 10)
    for name, trials in learners.TRIALS.items():
        assert trials[0] == {}
        assert len(trials) == 8
        for settings in trials:
            assert learners.PEERS[name](3, 3, 0, **settings).step(x, y).shape == (30, 3)


def test_searches_use_other_rows_than_results(programs):
    run = programs["run_streams"]
    (search, *_), first = (run.jobs(part, ["sea"], ["evcl"], None) for part in ("search", "first"))
    assert search.seed not in {job.seed for job in first}
    (search, *_), first = (run.jobs(part, ["weather"], ["evcl"], None) for part in ("search", "first"))
    assert {job.skip for job in first} == {search.stop}
    assert len(run.jobs("first", ["weather"], ["naive bayes"], None)) == 1
    assert len(first) == 5


def test_tables_are_made_from_the_files(programs, tmp_path):
    tables, learners = programs["stream_tables"], programs["stream_learners"]
    measures = {"nll": 0.4, "nll_smoothed": 0.41, "ece": 0.02, "kappa": 0.5}
    found = [
        {"stream": "sea", "learner": name, "accuracy": 0.8 + 0.02 * (k == 0), **measures}
        for k, name in enumerate(learners.PEERS)
        for _ in range(5)
    ]
    (tmp_path / "first.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    made = tables.compared("first", folder=tmp_path)
    assert "| `sea` | **82.0 ± 0.0** | 80.0 ± 0.0 |" in made
    assert "| within 1 point of the best | 1 | 0 | 0 | 0 | 0 | 0 |" in made
    assert tables.streams() in (EXPERIMENTS.parent / "docs" / "named-streams.md").read_text("utf-8")


def test_the_table_of_alarms_chooses_at_the_same_rate(programs, tmp_path):
    tables = programs["stream_tables"]
    quiet, loud, late = [[]] * 8, [[10] * 9, [10], *[[]] * 6], [[10, 5400], [5100], *[[9000]] * 6]
    lines = [
        {"part": "calibration", "number": 0, "width": 0, "alarms": {"ADWIN of evcl": loud}},
        {"part": "check", "number": 0, "width": 0, "alarms": {"ADWIN of evcl": quiet}},
        {"part": "changes", "number": 0, "width": 0, "alarms": {"ADWIN of evcl": late}},
    ]
    (tmp_path / "alarms.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert tables.alarms(tmp_path).splitlines()[-1] == "| ADWIN of evcl | 0.01 | 0.00 | 1 of 1 | 100 | 100 |"


def test_detectors_find_a_series_that_turns(programs):
    errors = np.r_[np.zeros(500, int), np.ones(500, int)]
    for name, parameter in (("ADWIN", 0.002), ("DDM", 3.0), ("KSWIN", 1e-4)):
        (first, *_) = programs["run_alarms"].detected(name, parameter, errors)
        assert 500 <= first < 600
