"""README.md alone leads from an empty folder to a model of a CSV file, in five minutes and ten commands."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from follow_readme import follow, steps

import evcl

resource = pytest.importorskip("resource")  # Windows has none, and the programs of an environment in another folder


def test_it_has_ten_commands_or_fewer():
    found = steps()
    assert found[0][1].startswith("pip install")
    assert len(found) <= 10


@pytest.mark.full
def test_a_reader_has_a_trained_saved_and_reloaded_model_in_five_minutes(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    follow(tmp_path, lent=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 300  # of a core, whatever else runs
    with Path(tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 500
    assert sum(row["prediction"] == row["buys"] for row in rows) > 450
    assert (tmp_path / "shop.safetensors").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("evcl", {"one_softmax": True}, "(`one_softmax=True`) it has 94 %"),
        ("evcl", {"posterior": "diagonal"}, '(`posterior="diagonal"`) it has 93 %'),
        ("evcl", {"one_softmax": True, "posterior": "diagonal"}, "has 93 %, with both 74 %"),
        ("generative-classifier", {}, "(`generative-classifier`) has 96 %"),
    ],
)
def test_what_makes_the_first_number(method, settings, said):
    benchmark = evcl.benchmarks.get("permuted-digits", seed=0)
    learner = evcl.Learner(evcl.nn.mlp(64, [100, 100]), method, seed=0, **settings)
    for task in benchmark:
        learner.learn(task, epochs=20)
    accuracy = learner.evaluate(benchmark)
    assert f"{100 * sum(accuracy.values()) / len(accuracy):.0f} %" == said[-4:]
    assert said in " ".join(Path(__file__).parents[1].joinpath("README.md").read_text("utf-8").split())
