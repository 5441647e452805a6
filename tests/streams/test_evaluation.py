"""`evcl.streams.evaluate`: rows in order, each predicted before it is learned, whatever form they come in."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from counting import Averaging, Counting

from evcl._core.errors import EvclError
from evcl.streams import Stream
from evcl.streams.evaluation import evaluate

X = np.arange(10, dtype=np.float32)[:, None]
Y = np.array([0, 0, 0, 1, 0, 0, 1, 1, 0, 1])


def test_rows_one_by_one_by_hand():
    stream = Counting()
    found = evaluate(stream, (X, Y), batch=1, window=1)
    wrong = [True, False, False, True, False, False, True, True, False, True]  # the majority so far
    assert found.rows == 10
    assert found.window == 1
    assert found.curves["accuracy"] == [float(not one) for one in wrong]
    assert found.overall["accuracy"] == pytest.approx(0.5)
    p = [1e-15, 1, 1, 1e-15, 3 / 4, 4 / 5, 1 / 6, 2 / 7, 5 / 8, 3 / 9]
    assert found.overall["nll"] == pytest.approx(-np.log(p).mean())
    assert str(found).startswith("10 rows in ")


def test_a_batch_is_predicted_before_any_row_of_it_is_learned():
    stream = Counting()
    evaluate(stream, (X, Y), batch=4)
    assert stream.calls == [
        ("predict", 1), ("learn", [0]), ("predict", 2), ("learn", [1, 2]),  # the first batches are smaller
        ("predict", 4), ("learn", [3, 4, 5, 6]), ("predict", 3), ("learn", [7, 8, 9]),
    ]  # fmt: skip


def test_a_late_label_is_learned_late_and_the_prediction_made_at_arrival_counts():
    stream = Counting()
    found = evaluate(stream, (X, Y), batch=1, delay=3)
    wanted = [("predict", 1)] * 3
    for row in range(7):
        wanted += [("predict", 1), ("learn", [float(row)])]
    assert stream.calls == [*wanted, ("learn", [7.0, 8.0, 9.0])]
    # Rows 0 to 3 are predicted by nothing; row 4 knows row 0; row 9 knows rows 0 to 5.
    p = [1e-15] * 4 + [1, 1, 1e-15, 1 / 4, 4 / 5, 1 / 6]
    p[7] = 1e-15 if Y[:4].tolist().count(1) == 0 else Y[:4].tolist().count(1) / 4
    assert found.overall["nll"] == pytest.approx(-np.log(p).mean())


@pytest.mark.parametrize("delay", [1, 5, 100])
def test_every_row_is_learned_once_and_in_order_whatever_the_delay(delay):
    stream = Counting()
    evaluate(stream, (X, Y), batch=3, delay=delay)
    learned = [row for what, rows in stream.calls if what == "learn" for row in rows]
    assert learned == X[:, 0].tolist()


def test_rows_may_come_in_any_form():
    def rows():
        yield from zip(X, Y, strict=True)

    forms = [
        (X, Y),
        (torch.from_numpy(X), torch.from_numpy(Y)),
        [(X[:3], Y[:3]), (X[3:4], Y[3:4]), (X[4:], Y[4:])],
        rows(),
    ]
    found = [evaluate(Counting(), form, batch=4, window=2) for form in forms]
    assert all((one.overall, one.curves) == (found[0].overall, found[0].curves) for one in found)


def test_numbers_by_hand():
    y = np.array([2.0, 1.0] * 5)
    found = evaluate(Averaging(), (X, y), batch=2)
    means = [np.mean([0.0, *y[: max(0, i + i % 2 - 1)]]) for i in range(10)]  # batches of 1, 2, 2, 2, 2, 1 rows
    assert found.overall["rmse"] == pytest.approx(np.sqrt(np.mean((y - means) ** 2)))
    assert set(found.curves) == {"rmse", "nll", "coverage"}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ((X[:0], Y[:0]), {}, "there are no rows"),
        ((X, Y[:3]), {}, r"expected rows \[n, inputs\]"),
        (7, {}, "rows must be"),
        ((X, Y), {"batch": 0}, "batch"),
        ((X, Y), {"delay": -1}, "delay"),
        ((X, Y * np.nan), {}, "not a finite number"),
        ((X, np.array(["a", "b"] * 5)), {}, "whole number"),
        ([X, Y], {}, "expected pairs"),
        ([(X, Y, Y)], {}, "expected pairs"),
        (X, {}, "expected pairs"),
        ("rows", {}, "expected pairs"),
    ],
)
def test_what_is_wrong_is_said(rows, options, message):
    with pytest.raises(EvclError, match=message):
        evaluate(Counting(), rows, **options)


def test_yes_or_no_labels_are_not_scored():
    with pytest.raises(EvclError, match="not likelihood='bernoulli'"):
        evaluate(Stream(likelihood="bernoulli"), (X, Y))


@pytest.mark.full
def test_a_million_rows_need_no_more_memory_than_a_few():
    def rows(count):
        draws = np.random.default_rng(0)
        for _ in range(count // 10_000):
            yield draws.normal(size=(10_000, 2)), draws.integers(0, 3, 10_000)

    def peak(count):
        tracemalloc.start()
        evaluate(Counting(record=False), rows(count), batch=5_000)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(20_000)  # what is imported at the first use
    assert peak(1_000_000) < 1.2 * peak(200_000)


def test_labels_that_are_texts_are_refused_in_one_line():
    rows = np.zeros((2, 3)), np.array(["wet", "dry"])
    with pytest.raises(EvclError, match="numbers: give each class a whole number") as error:
        evaluate(Counting(), rows)
    assert "\n" not in str(error.value)
