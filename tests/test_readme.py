"""README.md alone leads from an empty folder to a model of a CSV file, in five minutes and ten commands."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
from follow_readme import follow, steps


def test_it_has_ten_commands_or_fewer():
    found = steps()
    assert found[0][1].startswith("pip install")
    assert len(found) <= 10


@pytest.mark.full
@pytest.mark.skipif(os.name != "posix", reason="the environment's programs are in another folder on Windows")
def test_a_reader_has_a_trained_saved_and_reloaded_model_in_five_minutes(tmp_path):
    done = follow(tmp_path, lent=True)
    assert sum(one.seconds for one in done) < 300
    with Path(tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 500
    assert sum(row["prediction"] == row["buys"] for row in rows) > 450
    assert (tmp_path / "shop.safetensors").exists()
