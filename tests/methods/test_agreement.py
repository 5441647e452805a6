"""Label noise is no ignorance, and chance is no change: what a teacher's answers on new rows say."""

from __future__ import annotations

import math

import pytest
import torch

from evcl.methods.agreement import left_out, of_classes, of_values

F64 = torch.float64


def world(n, seed, scale=1.5):
    """x [1, n, 3], the logits that rows really have, and their labels."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(1, n, 3, generator=source, dtype=F64)
    z = torch.stack([torch.zeros(1, n, dtype=F64), scale * x[..., 0]], 2)
    y = (torch.rand(1, n, generator=source, dtype=F64) < z.softmax(2)[..., 1]).long()
    return x, z.log_softmax(2), y


def test_a_row_is_predicted_from_the_others():
    source = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 12, k, generator=source, dtype=F64) for k in (3, 2))
    centred = x[0] - x[0].mean(0)
    kernel = centred @ centred.T
    scale = kernel.diagonal().mean()
    kernel = kernel + scale
    for i in range(12):
        rest = [j for j in range(12) if j != i]
        weights = torch.linalg.solve(kernel[rest][:, rest] + 0.1 * scale * torch.eye(11, dtype=F64), y[0, rest])
        torch.testing.assert_close(left_out(x, y, 0.1)[0, i], kernel[i, rest] @ weights)


def test_a_teacher_that_is_right_knows_all_however_noisy_the_labels():
    found = [of_classes(log_p, y, [x]) for x, log_p, y in (world(60, s) for s in range(200))]
    assert sum(float(one.knows) for one in found) / 200 > 0.98
    assert sum(float(one.surprised) for one in found) / 200 < 0.005


def test_a_teacher_that_knows_nothing_or_the_opposite():
    x, log_p, y = world(400, 0)
    nothing = of_classes(torch.full_like(log_p, -math.log(2)), y, [x])
    assert float(nothing.knows) < 0.02
    assert float(nothing.surprised) < 0.1
    x, log_p, y = world(400, 0, scale=6.0)
    opposite = of_classes(log_p.flip(2), y, [x])
    assert (float(opposite.knows), float(opposite.surprised)) == (0.0, 1.0)


def test_by_hand():
    x, log_p, y = world(300, 1, scale=4.0)
    log_p = (0.3 * log_p).log_softmax(2)  # not sure enough, so there is something to learn
    wrong = torch.nn.functional.one_hot(y, 2) - log_p.exp()
    gain = (wrong.square() - (wrong - left_out(x, wrong, 0.1)).square()).sum(2).mean()
    said = 0.5 - wrong.square().sum(2).mean()
    knows, surprised = of_classes(log_p, y, [x])
    assert float(knows) == pytest.approx(float(said / (said + gain)))
    assert 0.3 < float(knows) < 0.95
    assert float(surprised) == 0.0


def test_squared_errors_as_expected_contradict_nothing_and_four_times_larger_ones_do():
    source = torch.Generator().manual_seed(0)
    z = torch.randn(500, 60, generator=source, dtype=F64).square()
    assert float(of_values(z).mean()) < 0.01
    assert float(of_values(4 * z).mean()) == pytest.approx(0.75, abs=0.02)
    weights = torch.ones(500, 60, dtype=F64)
    torch.testing.assert_close(of_values(4 * z, weights), of_values(4 * z))
