"""The alarm: how often it is false, how late it is, and what it names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import evcl
from evcl.streams.alarm import QUIET_ROWS, Columns, Detector
from evcl.streams.arrays import Array
from evcl.streams.observing import Classes, Targets


def detected(rate: float, p: Array, y: Targets) -> list[int]:
    """The rows of the alarms for predicted probabilities p [n, C] of the classes y [n]."""
    detector, found = Detector(rate), []
    for i in range(0, len(y), 50):
        raised = detector.learn(Classes().softer(p[None, i : i + 50], y[i : i + 50]))
        if raised is not None:
            found.append(i + raised[0])
    return found


def drawn(rows: int, seed: int, classes: int = 2) -> tuple[Array, Targets]:
    """Probabilities, and labels that have them."""
    source = torch.Generator().manual_seed(seed)
    p = torch.randn(rows, classes, generator=source, dtype=torch.float64).mul(2).softmax(1)
    return p.numpy(), torch.multinomial(p, 1, generator=source).squeeze(1).numpy()


@pytest.mark.parametrize("classes", [2, 5])
def test_false_alarms_are_no_more_frequent_than_chosen(classes: int) -> None:
    """At most one in 500 rows: 20,000 rows would have 40, and fewer because an alarm is followed by a pause."""
    assert len(detected(1 / 500, *drawn(20_000, 0, classes))) <= 20_000 / (500 + QUIET_ROWS)


def test_a_learner_that_is_usually_too_sure_raises_no_more_alarms() -> None:
    p, y = drawn(20_000, 1)
    too_sure = p**1.5 / (p**1.5).sum(1, keepdims=True)
    assert len(detected(1 / 1000, too_sure, y)) <= 20_000 / 1000


def test_labels_that_turn_round_are_noticed_within_a_few_rows() -> None:
    p, y = drawn(4000, 2)
    y[2000:] = 1 - y[2000:]
    first = next(row for row in detected(1e-4, p, y) if row >= 2000)
    assert first < 2030


def test_the_lower_the_rate_the_later_the_alarm() -> None:
    p, y = drawn(4000, 3)
    y[2000:] = 1 - y[2000:]
    rows = [next(row for row in detected(rate, p, y) if row >= 2000) for rate in (1e-2, 1e-4, 1e-8)]
    assert rows == sorted(rows)


def test_the_columns_that_moved_are_named() -> None:
    source = torch.Generator().manual_seed(0)
    found, p = Columns(6, 1), np.full((400, 2), 0.5)
    z = torch.randn(400, 6, generator=source, dtype=torch.float64).numpy()
    y = torch.randint(0, 2, (400,), generator=source).numpy()
    z[350:, 2] += 2.0
    y[350:] = z[350:, 4] > 0  # nobody predicted this
    for i in range(0, 400, 10):
        if i == 350:
            assert found.moved() == ((), ())
        e, b = Classes().derivatives(p[None, i : i + 10], y[i : i + 10])
        found.learn(z[i : i + 10], e[0], b[0])
    columns, reasons = found.moved()
    assert dict(zip(columns, reasons, strict=True)) == {2: "inputs", 4: "relation"}


def test_a_stream_without_a_change_raises_no_alarm() -> None:
    source = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 4, generator=source)
    y = (x[:, 0] + 0.5 * torch.randn(3000, generator=source) > 0).long()
    stream = evcl.Stream(classes=[0, 1], memories=[float("inf"), 300])
    stream.learn(x, y)
    assert stream.alarms == []


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_false_alarms_of_the_learner_itself(seed: int) -> None:
    """Over rules with noise that no network of this size has exactly, at most one false alarm in 1,000 rows."""
    source = torch.Generator().manual_seed(seed)
    x = torch.rand(8000, 5, generator=source)
    y = ((x[:, 0] > 0.4) ^ (x[:, 1] > 0.6)).long()
    noisy = torch.rand(8000, generator=source) < 0.1
    y = torch.where(noisy, 1 - y, y)
    stream = evcl.Stream(classes=[0, 1], false_alarms=1e-3)
    for i in range(0, 8000, 32):
        stream.learn(x[i : i + 32], y[i : i + 32])
    assert len(stream.alarms) <= 8
