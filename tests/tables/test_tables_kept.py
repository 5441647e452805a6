"""A model file of the first format, kept for ever: each later version loads it, predicts the same, and learns on.

It was made in `tests/tables/kept` by evcl 0.1.0, from the two CSV files beside it, with

    evcl learn --model model-1.safetensors --data january.csv --target buys --hidden 6 --epochs 100 --set lr=0.01
    evcl learn --model model-1.safetensors --data february.csv --epochs 100
    evcl predict --model model-1.safetensors --data new.csv --out predictions-1.csv

Never make it again: where the format changes, a second file comes beside it.
"""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

import evcl as package

KEPT = Path(__file__).with_name("kept")


def rows_of(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("number", [1])
def test_a_model_of_an_earlier_version(evcl, number):
    shutil.copy(KEPT / f"model-{number}.safetensors", "m")
    evcl.done("predict", "--model", "m", "--data", KEPT / "new.csv", "--out", "p.csv", "--only-predictions")
    found, wanted = rows_of("p.csv"), rows_of(KEPT / f"predictions-{number}.csv")
    assert list(found[0]) == list(wanted[0])
    assert len(found) == len(wanted) == 12
    assert {row["prediction"] for row in wanted} == {"no", "yes"}
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.pop("prediction") == theirs.pop("prediction")
        assert {name: float(v) for name, v in ours.items()} == pytest.approx(
            {name: float(v) for name, v in theirs.items()}, abs=1e-4
        )
    out = evcl("inspect", "m")[1]
    for text in ("january", "february", "age, income, city (3 categories)", "no, yes", "2026-11-15"):
        assert text in out
    evcl.done("learn", "--model", "m", "--data", KEPT / "february.csv", "--task", "march", "--epochs", "1")
    assert package.load(KEPT / f"model-{number}.safetensors").tasks == ("january", "february")
