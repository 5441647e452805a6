"""`result.json`: written as it always was, and read only if it is one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from evcl._core.errors import EvclError
from evcl.experiments import Summary, configure, execute, merge, read_result, write_result
from evcl.experiments.result import AlarmRow, prequential, summarise, to_json

KEPT = Path(__file__).with_name("kept") / "result.json"  # written before a result had a type


def test_what_is_read_is_written_byte_for_byte(tmp_path):
    found = read_result(KEPT)
    assert (found.benchmark, found.seeds, found.tasks, found.config["lr"]) == ("split-digits", [0, 7], 2, 1e-5)
    assert found.accuracy[1][0] == [0.5063291139240507, None]
    assert found.average_accuracy.mean == pytest.approx(0.48418, abs=1e-5)
    assert write_result(tmp_path, found).read_bytes() == KEPT.read_bytes()


def test_a_run_writes_the_same_keys_in_the_same_order(tmp_path):
    since = {
        "distill",
        "distill.temperature",
        "forget",
        "forget.significance",
        "forget.ridge",
        "tempering.noise",
        "rules",
        "parts",
        "optimizer",
        "momentum",
        "film",
        "augment",
        "memory_bytes",
    }

    def keys(text):
        found = [line.partition(":")[0] for line in text.splitlines() if ":" in line]
        return [key for key in found if key.strip(' "') not in since]

    config = configure("split-digits", "vcl", seeds=[0, 7], tasks=2, given={"epochs": 1, "lr": 1e-5})
    path = write_result(tmp_path, execute(config))
    later = ("inferred_accuracy", "reliability", "task_names", "parts", "rules", "resolved")
    written = {key: value for key, value in json.loads(path.read_text()).items() if key not in later}
    assert keys(to_json(written)) == keys(KEPT.read_text())
    config = json.loads(path.read_text())["config"]
    assert {key: config[key] for key in config if key not in since} == json.loads(KEPT.read_text())["config"]


def test_a_summary_is_worked_out_by_hand():
    assert summarise([0.5, 1.0]) == Summary(0.75, pytest.approx(0.125**0.5), [0.5, 1.0])
    assert summarise([0.5]) == Summary(0.5, None, [0.5])
    assert summarise([0.5, None, float("nan")]) == Summary(None, None, [0.5, None, None])
    assert summarise([0.5, None]).measured == [0.5]


@pytest.fixture
def changed(tmp_path):
    """The kept file with a change."""

    def write(change):
        content = json.loads(KEPT.read_text())
        change(content)
        (tmp_path / "result.json").write_text(json.dumps(content))
        return tmp_path / "result.json"

    return write


def test_what_newer_versions_add_is_passed_over(changed):
    def later(content):
        content |= {"log_likelihood": content["nll"], "accuracy": None}
        content["environment"]["gpus"] = 3

    found = read_result(changed(later))
    assert found.accuracy is None
    assert not found.diverged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(schema=7), "(schema 7)"),
        (lambda r: r.pop("ece"), "missing required field `ece`"),
        (lambda r: r.update(method="a" * 201), "length <= 200 - at `$.method`"),
        (lambda r: r["config"].update({"a" * 201: 1}), "length <= 200"),
        (lambda r: r.update(seconds="1"), "Expected `float`, got `str` - at `$.seconds`"),
        (lambda r: r.update(seconds=float("nan")), "JSON is malformed"),
        (lambda r: r.update(seconds=-1), "seconds and memory_bytes should be at least 0"),
        (lambda r: r.update(seeds=[0, 0]), "seeds should be"),
        (lambda r: r.update(seeds=[]), "seeds should be"),
        (lambda r: r.update(seeds=["0", "7"]), "Expected `int`, got `str` - at `$.seeds[0]`"),
        (lambda r: r["config"].pop("tasks"), "config.tasks should be"),
        (lambda r: r["config"].update(tasks=True), "config.tasks should be"),
        (lambda r: r["config"].update(validation=2), "config.validation should be at least 0 and less than 1"),
        (lambda r: r["config"].update(validation="0"), "config.validation should be at least 0 and less than 1"),
        (lambda r: r["accuracy"].pop(), "accuracy has the shape (1, 2, 2), not (2, 2, 2)"),
        (lambda r: r["accuracy"][0].pop(), "inhomogeneous"),
        (lambda r: r["accuracy"][0][0].__setitem__(0, 1.5), "accuracy should lie between 0 and 1"),
        (lambda r: r["accuracy"][0][1].__setitem__(0, None), "the last row of accuracy"),
        (lambda r: r["average_accuracy"].update(mean=None), "the last row of accuracy, and so its average"),
        (lambda r: r["nll"]["per_seed"].pop(), "nll should have one number per seed, from 0 to 1e+06"),
        (lambda r: r["backward_transfer"].update(std=9), "backward_transfer should have one number per seed"),
        (lambda r: r["ece"].update(mean="high"), "Expected `float | null`, got `str` - at `$.ece.mean`"),
        (lambda r: r["environment"].pop("torch"), "missing required field `torch` - at `$.environment`"),
    ],
)
def test_a_file_that_is_no_result_is_refused_in_one_line(change, message, changed):
    path = changed(change)
    with pytest.raises(EvclError) as raised:
        read_result(path)
    text = str(raised.value)
    assert text.startswith(f"{path} is not a result of evcl (")
    assert message in text
    assert "\n" not in text


# --- the block that says how well a stream was predicted ---------------------------------------------------------


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
    with pytest.raises(EvclError, match=re.escape(message)):
        read_result(path)
