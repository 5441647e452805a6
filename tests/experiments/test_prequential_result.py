"""The block of a result that says how well a stream was predicted: written, merged over seeds, checked when read."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from evcl._core.errors import EvclError
from evcl.experiments import merge, read_result, write_result
from evcl.experiments.result import AlarmRow, prequential, summarise

KEPT = Path(__file__).with_name("kept") / "result.json"


def one_seed(seed, accuracy, alarms=()):
    block = prequential(5, 2, {"accuracy": accuracy, "nll": 0.5}, {"accuracy": [1.0, 0.5, float("nan")]}, alarms, [3])
    empty = summarise([None])
    return replace(
        read_result(KEPT),
        seeds=[seed],
        accuracy=None,
        average_accuracy=summarise([accuracy]),
        **dict.fromkeys(("forgetting", "backward_transfer", "nll", "ece"), empty),
        prequential=block,
    )


@pytest.fixture
def both():
    alarm = SimpleNamespace(row=3, surprise=4.5, columns=("rain", 2))
    return merge([one_seed(0, 0.6), one_seed(1, 0.8, [alarm])])


def test_seeds_are_merged_and_a_file_holds_what_was_written(both, tmp_path):
    found = read_result(write_result(tmp_path, both))
    assert found == both
    assert found.prequential.measures["accuracy"].mean == pytest.approx(0.7)
    assert found.prequential.curves == {"accuracy": [[1.0, 0.5, None]] * 2}
    assert found.prequential.alarms == [[], [AlarmRow(3, 4.5, ["rain", "2"])]]
    assert found.prequential.changes == [3]
    assert found.accuracy is None
    assert not found.diverged


def test_a_result_without_the_block_is_written_without_it(tmp_path):
    written = write_result(tmp_path, read_result(KEPT)).read_text()
    assert "prequential" not in written


def test_streams_of_different_lengths_are_not_merged(both):
    short = replace(both, prequential=replace(both.prequential, rows=4))
    with pytest.raises(EvclError, match="different numbers of rows"):
        merge([both, short])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.update(rows=0), "should be at least 1"),
        (lambda b: b.update(rows=7), "should have 4 numbers for each of 2 seeds"),
        (lambda b: b["measures"]["accuracy"]["per_seed"].append(1), "one number per seed, from 0 to 1"),
        (lambda b: b["measures"]["accuracy"].update(mean=1.5), "one number per seed, from 0 to 1"),
        (lambda b: b["curves"]["accuracy"][0].__setitem__(0, -0.5), "should lie between 0 and 1"),
        (lambda b: b["alarms"][1][0].update(row=5), "rows of the stream"),
        (lambda b: b["alarms"].pop(), "a list per seed"),
        (lambda b: b.update(changes=[-1]), "rows of the stream"),
        (lambda b: b["alarms"][1][0].update(columns="rain"), "Expected `array`"),
    ],
)
def test_what_cannot_be_is_refused(both, tmp_path, change, message):
    path = write_result(tmp_path, both)
    content = json.loads(path.read_text())
    change(content["prequential"])
    path.write_text(json.dumps(content))
    with pytest.raises(EvclError) as error:
        read_result(path)
    assert message in str(error.value)
