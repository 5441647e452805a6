"""The example that shows what silent units do: a small run of it, and its parts."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "silent_units.py"
LEARNS = {"lr": 0.005, "batch_size": 64, "epochs": 30, "strength_scale": "none", "strength": 0.06, "tempering": 0.03}
LEARNS |= {"prior_std": 0.25}


@pytest.fixture(scope="module")
def example():
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def test_what_was_learned_is_measured_with_weights_put_back(example):
    found = example.measure("split-digits", 0, {**LEARNS, "fisher_spread": 0.2})
    assert len(found) == len(example.COLUMNS)
    assert found[0] > 90
    assert all(80 < found[i] <= 100 for i in (1, 2, 3, 5, 7))
    assert 1 <= found[4] <= found[6] <= 200  # units, of two layers of 100


def test_the_weights_of_silent_units_are_put_back_and_no_others(example):
    def weights(value):
        return {
            "0.1.weight": torch.full((3, 2), value),
            "0.1.bias": torch.full((3,), value),
            "1.weight": torch.full((2, 3), value),
            "1.bias": torch.full((2,), value),
        }

    made = example.put_back(weights(1.0), weights(0.0), [torch.tensor([False, True, False])])
    assert made["0.1.weight"].tolist() == [[1, 1], [0, 0], [1, 1]]
    assert made["0.1.bias"].tolist() == [1, 0, 1]
    assert made["1.weight"].tolist() == [[1, 0, 1], [1, 0, 1]]
    assert made["1.bias"].tolist() == [1, 1]


def test_it_prints_a_row_without_and_one_with_a_spread(example, program):
    out = program(EXAMPLE, "--benchmark", "split-digits", "--seeds", 2, "--epochs", 1)
    title, _, without, with_it = ([c.strip() for c in row.split("|")[1:-1]] for row in out.splitlines())
    assert title == ["fisher_spread", *example.COLUMNS]
    assert without[0] == "0.0"
    assert float(with_it[0]) > 0
    assert all(" ± " in cell for cell in without[1:] + with_it[1:])
