"""Prequential scores: worked out by hand, and beside scikit-learn's."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, cohen_kappa_score, log_loss

from evcl._core.errors import EvclError
from evcl.metrics import expected_calibration_error
from evcl.streams.prequential import Prequential, window_of


def some(rows=500, classes=3, seed=0):
    """Probabilities and labels that agree more often than not."""
    draws = np.random.default_rng(seed)
    p = draws.dirichlet(np.ones(classes), rows)
    return p, np.array([draws.choice(classes, p=row) for row in p])


def reference(p, y):
    """The measures over some rows, by other code."""
    classes = np.arange(p.shape[1])
    return {
        "accuracy": accuracy_score(y, p.argmax(1)),
        "nll": log_loss(y, p, labels=classes),
        "brier": float(((p - np.eye(len(classes))[y]) ** 2).sum(1).mean()),
        "ece": expected_calibration_error(p, y),
        "kappa": cohen_kappa_score(y, p.argmax(1), labels=classes),
    }


def test_three_rows_by_hand():
    scores = Prequential(fading=0.5)
    scores.add([[0.8, 0.2]], ["dry"], ["dry", "wet"])
    scores.add([[0.4, 0.6], [0.5, 0.5]], ["dry", "wet"], ["dry", "wet"])
    assert scores.overall == {
        "accuracy": pytest.approx(1 / 3),
        "nll": pytest.approx(-(math.log(0.8) + math.log(0.4) + math.log(0.5)) / 3),
        "brier": pytest.approx((0.08 + 0.72 + 0.5) / 3),
        "ece": pytest.approx((0.2 + 0.6 + 0.5) / 3),
        "kappa": pytest.approx((1 / 3 - (2 * 2 + 1 * 1) / 9) / (1 - (2 * 2 + 1 * 1) / 9)),
    }
    weights = np.array([0.25, 0.5, 1.0])
    assert scores.decayed["accuracy"] == pytest.approx(0.25 / weights.sum())
    assert scores.decayed["brier"] == pytest.approx(weights @ [0.08, 0.72, 0.5] / weights.sum())


def test_each_measure_is_that_of_other_libraries():
    p, y = some()
    scores = Prequential(window=100)
    for start in range(0, 500, 7):  # batches that do not fit the windows
        scores.add(p[start : start + 7], y[start : start + 7], [0, 1, 2])
    assert scores.overall == pytest.approx(reference(p, y))
    for i in range(5):
        part = slice(100 * i, 100 * (i + 1))
        assert {name: curve[i] for name, curve in scores.curves.items()} == pytest.approx(reference(p[part], y[part]))


def test_decayed_scores_of_batches_are_those_of_single_rows():
    p, y = some()
    one, many = Prequential(fading=0.99), Prequential(fading=0.99)
    for i in range(len(y)):
        one.add(p[i : i + 1], y[i : i + 1], [0, 1, 2])
    for start in range(0, 500, 33):
        many.add(p[start : start + 33], y[start : start + 33], [0, 1, 2])
    assert one.decayed == pytest.approx(many.decayed)
    weights = 0.99 ** np.arange(499, -1, -1)
    assert one.decayed["accuracy"] == pytest.approx(np.average(p.argmax(1) == y, weights=weights))
    assert one.decayed["kappa"] == pytest.approx(cohen_kappa_score(y, p.argmax(1), sample_weight=weights))


def test_classes_may_grow_and_come_in_any_order():
    p, y = some()
    whole, grown = Prequential(), Prequential()
    whole.add(p, y, [0, 1, 2])
    grown.add(p[:200], y[:200], [0, 1, 2])
    grown.add(p[200:][:, [2, 0, 1]], y[200:], [2, 0, 1])
    assert grown.overall == pytest.approx(whole.overall)

    scores = Prequential()
    scores.add(np.zeros((1, 0)), ["a"], [])  # nothing is known yet
    assert scores.overall["accuracy"] == 0
    assert scores.overall["nll"] == pytest.approx(-math.log(1e-15))
    assert scores.overall["brier"] == 1
    scores.add([[1.0]], ["b"], ["a"])  # a label that never came
    assert scores.overall["accuracy"] == 0
    assert scores.overall["brier"] == pytest.approx((1 + 2) / 2)
    scores.add([[0.0, 1.0]], ["b"], ["a", "b"])
    assert scores.overall["accuracy"] == pytest.approx(1 / 3)


def test_windows_double_so_that_a_curve_keeps_its_size():
    p, y = some(1000)
    scores = Prequential()
    for start in range(0, 1000, 10):
        scores.add(p[start : start + 10], y[start : start + 10], [0, 1, 2])
        assert len(scores.curves["accuracy"]) <= 200
    assert scores.window == 8
    assert len(scores.curves["accuracy"]) == 125
    assert scores.curves["accuracy"][3] == pytest.approx((p.argmax(1) == y)[24:32].mean())
    assert scores.overall == pytest.approx(reference(p, y))
    assert [window_of(rows) for rows in (1, 100, 1000, 45_312)] == [1, 25, 25, 453]


def test_numbers_by_hand():
    scores = Prequential("numbers", window=2)
    scores.add_numbers([1.0, 0.0, 0.0], [1.0, 1.0, 2.0], [2.0, 3.0, 0.0])
    log = 0.5 * math.log(2 * math.pi)
    nll = [log + 0.5, log + 4.5, log + math.log(2)]
    wanted = {"rmse": math.sqrt(10 / 3), "nll": sum(nll) / 3, "coverage": 2 / 3}
    assert scores.overall == pytest.approx(wanted)
    assert scores.curves["rmse"] == pytest.approx([math.sqrt(5), 0])
    assert scores.curves["coverage"] == [0.5, 1.0]


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_scores_that_were_saved_go_on_as_if_they_had_not_been(kind):
    def add(scores, part):
        if kind == "classes":
            scores.add(p[part], [names[k] for k in y[part]], names)
        else:
            scores.add_numbers(p[part, 0], p[part, 1], p[part, 2])

    (p, y), names = some(), ["a", "b", "c"]
    through, stopped = Prequential(kind), Prequential(kind)
    for scores in (through, stopped):
        add(scores, slice(0, 300))
    told, arrays = stopped.state()
    again = Prequential.restored(json.loads(json.dumps(told)), arrays)
    for scores in (through, again):
        add(scores, slice(300, 500))
    assert again.overall == through.overall
    assert again.decayed == through.decayed
    assert again.curves == through.curves


def test_a_damaged_state_is_refused():
    told, arrays = Prequential().state()
    for change in ({"rows": 7}, {"kind": "dates"}, {"labels": ["a", "a"]}, {"window": None}, {"fading": 2}):
        with pytest.raises(EvclError):
            Prequential.restored({**told, **change}, arrays)
    with pytest.raises(EvclError):
        Prequential.restored(told, {"windows": arrays["windows"]})


def test_nothing_learned_has_no_scores_and_wrong_use_is_explained():
    assert all(math.isnan(value) for value in Prequential().overall.values())
    assert all(math.isnan(value) for value in Prequential("numbers").decayed.values())
    with pytest.raises(EvclError, match="call add_numbers"):
        Prequential("numbers").add([[1.0]], [0], [0])
    with pytest.raises(EvclError, match="call add"):
        Prequential().add_numbers([1.0], [1.0], [0])
    with pytest.raises(EvclError, match=r"\[n, 2\]"):
        Prequential().add([[1.0]], [0], [0, 1])
    with pytest.raises(EvclError, match="window"):
        Prequential(window=0)
    with pytest.raises(EvclError, match="fading"):
        Prequential(fading=1)
