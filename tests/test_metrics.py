"""Numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evcl import metrics

NAN = math.nan
MATRIX = [[0.9, NAN, NAN], [0.7, 0.8, NAN], [0.8, 0.6, 1.0]]


def test_average_accuracy():
    assert metrics.average_accuracy(MATRIX) == pytest.approx(0.8)
    assert metrics.accuracy_curve(MATRIX) == pytest.approx([0.9, 0.75, 0.8])


def test_forgetting_is_the_fall_from_the_best():
    assert metrics.forgetting(MATRIX) == pytest.approx(((0.9 - 0.8) + (0.8 - 0.6)) / 2)
    assert metrics.forgetting([[0.5, NAN, NAN], [0.9, 0.5, NAN], [0.7, 0.5, 0.5]]) == pytest.approx(0.1)


def test_backward_transfer_is_against_the_first_measurement():
    assert metrics.backward_transfer(MATRIX) == pytest.approx(((0.8 - 0.9) + (0.6 - 0.8)) / 2)


def test_learning_accuracy_is_measured_before_anything_is_forgotten():
    assert metrics.learning_accuracy(MATRIX) == pytest.approx((0.9 + 0.8 + 1.0) / 3)
    assert math.isnan(metrics.learning_accuracy([[NAN, NAN], [0.9, 0.7]]))  # joint training


def test_a_single_task_has_neither():
    assert math.isnan(metrics.forgetting([[0.9]]))
    assert math.isnan(metrics.backward_transfer([[0.9]]))


def test_a_row_not_measured_is_not_invented():
    only_last = [[NAN, NAN], [0.9, 0.7]]
    assert metrics.average_accuracy(only_last) == pytest.approx(0.8)
    assert math.isnan(metrics.forgetting(only_last))


def test_nll():
    p = [[0.5, 0.5], [0.25, 0.75]]
    assert metrics.nll(p, [0, 1]) == pytest.approx(-(math.log(0.5) + math.log(0.75)) / 2)
    assert math.isfinite(metrics.nll([[1.0, 0.0]], [1]))


def test_expected_calibration_error():
    # bins of width 1/2: (0, 0.5] holds one example, confidence 0.5, right; (0.5, 1] two, confidence 0.8, one right
    p = [[0.5, 0.5], [0.8, 0.2], [0.2, 0.8]]
    assert metrics.expected_calibration_error(p, [0, 0, 0], bins=2) == pytest.approx(
        abs(1 - 0.5) / 3 + abs(1 - 1.6) / 3
    )
    perfect = np.tile([0.75, 0.25], (4, 1))
    assert metrics.expected_calibration_error(perfect, [0, 0, 0, 1]) == pytest.approx(0)
    assert metrics.expected_calibration_error([[1.0, 0.0]], [0]) == pytest.approx(0)


def test_other_shapes_are_refused():
    for bad in ([[0.1, 0.2]], [], [0.1]):
        with pytest.raises(ValueError, match="square"):
            metrics.average_accuracy(bad)
    with pytest.raises(ValueError, match="expected probabilities"):
        metrics.nll([[0.5, 0.5]], [0, 1])
