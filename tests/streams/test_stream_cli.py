"""`evcl stream`: files are learned row after row, the command goes on where it stopped, and its models predict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file, save_file

import evcl as library
from evcl.cli.stream import alarm_line
from evcl.streams import commands
from evcl.streams.table import NOTE, Raised, load
from evcl.tables.saved import notes_of


def weather(rows=400, seed=0, change=None, start="2024-01-01"):
    """Rain by heat, every six hours; the rule is reversed at the row `change`."""
    draws = np.random.default_rng(seed)
    heat, sky = draws.normal(20, 5, rows).round(2), draws.choice(["clear", "cloudy"], rows)
    wet = heat < 20
    if change is not None:
        wet ^= np.arange(rows) >= change
    when = pd.date_range(start, periods=rows, freq="6h")
    return pd.DataFrame({"when": when, "heat": heat, "sky": sky, "rain": np.where(wet, "yes", "no")})


FAST = ("--target", "rain", "--time", "when", "--batch", "32")


def tensors(path):
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}


@pytest.fixture
def learned(evcl):
    """A model of 250 rows, and the report on them."""
    weather(250).to_csv("a.csv", index=False)
    out = evcl.done("stream", "a.csv", *FAST, "--out", "m", "--json")
    return json.loads(out)


def test_the_whole_way(evcl, learned):
    assert learned["rows"] == learned["new_rows"] == 250
    assert learned["columns"] == ["when", "heat", "sky"]
    assert learned["classes"] == ["yes", "no"] or learned["classes"] == ["no", "yes"]
    assert learned["overall"]["accuracy"] > 0.75
    assert set(learned["overall"]) == {"accuracy", "nll", "brier", "ece", "kappa"}
    out = evcl.done("inspect", "m")
    assert "a stream of 250 rows" in out
    assert "up to    2024-03-03 06:00" in out
    assert json.loads(evcl.done("inspect", "m", "--json"))["overall"] == learned["overall"]


def test_an_alarm_is_one_line_with_its_time(evcl):
    weather(350, change=250).to_csv("a.csv", index=False)
    out = evcl.done("stream", "a.csv", *FAST, "--out", "m", "--false-alarms", "0.001")
    line = next(line for line in out.splitlines() if line.startswith("alarm at row "))
    told = json.loads(evcl.done("inspect", "m", "--json"))["alarms"][0]
    assert 250 < told["row"] < 300  # counted from 1
    assert told["when"] == str(pd.Timestamp("2024-01-01") + pd.Timedelta(hours=6 * (told["row"] - 1)))[:16]
    assert line.startswith(f"alarm at row {told['row']} ({told['when']}): ")
    assert line.endswith(told["action"])
    assert "when" not in told["columns"]  # that dates move is no news
    assert len(told["reasons"]) == len(told["columns"])
    assert line in evcl("inspect", "m")[1]


def test_an_alarm_says_what_moved_and_what_changed(evcl, learned):
    one = Raised(1234, None, 9.0, ["heat", "sky=fog", "wind"], "it forgets faster", ["inputs", "relation", "inputs"])
    wanted = "alarm at row 1,234: heat, wind moved; the relation of sky=fog to rain changed; it forgets faster"
    assert alarm_line(load(Path("m")), one) == wanted


def test_rows_without_a_label_are_not_counted_as_learned(evcl):
    table = weather(350, change=250)
    table.loc[::5, "rain"] = None
    table.to_csv("a.csv", index=False)
    out = evcl.done("stream", "a.csv", *FAST, "--out", "m", "--false-alarms", "0.001")
    assert "280 rows predicted, then learned, 70 without a label passed over" in out
    assert "alarm at labelled row 2" in out
    assert "alarm at labelled row 2" in evcl("inspect", "m")[1]
    assert "there are no new rows" in evcl("stream", "a.csv", *FAST, "--out", "m")[1]


def test_lines_of_progress_and_a_table_are_printed(evcl):
    weather(100).to_csv("a.csv", index=False)
    out = evcl.done("stream", "a.csv", *FAST)
    assert "read dates: when" in out
    assert "columns  when (date), heat, sky (text)" in out
    assert "95 of 100 rows: accuracy " in out or "100 of 100 rows: accuracy " in out
    assert "100 rows predicted, then learned" in out
    for name in ("accuracy", "log-loss", "Brier", "ECE", "kappa"):
        assert f"\n{name} " in out
    assert evcl("stream", "a.csv", *FAST, "--quiet")[1] == ""


def test_the_same_command_goes_on_where_it_was_stopped(evcl, monkeypatch):
    weather(200).to_csv("a.csv", index=False)
    evcl.done("stream", "a.csv", *FAST, "--out", "whole", "--delay", "20", "--quiet")
    learn, calls = commands.TableStream.learn, 0

    def stopped(self, *arguments):
        nonlocal calls
        calls += 1
        if calls == 6:
            signal.raise_signal(signal.SIGINT)
        return learn(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(commands.TableStream, "learn", stopped)
        status, _, err = evcl("stream", "a.csv", *FAST, "--out", "m", "--delay", "20", "--quiet")
    assert status == 1
    assert err == "evcl: interrupted; 63 rows are learned and saved in m, and the same command goes on from there\n"
    assert "63 of 200 rows were learned already" in evcl.done("stream", "a.csv", *FAST, "--out", "m", "--delay", "20")
    assert tensors("m") == tensors("whole")
    assert load(Path("m")).scores.overall == load(Path("whole")).scores.overall


def test_a_file_that_grows_is_learned_from_where_it_ended(evcl):
    whole = weather(120)
    whole[:80].to_csv("a.csv", index=False)
    evcl.done("stream", "a.csv", *FAST, "--out", "m", "--quiet")
    whole.to_csv("a.csv", index=False)
    _, out, _ = evcl("stream", "a.csv", *FAST, "--out", "m")
    assert "80 of 120 rows were learned already" in out
    assert "40 rows predicted, then learned" in out
    assert "there are no new rows" in evcl("stream", "a.csv", *FAST, "--out", "m")[1]
    weather(50, start="2024-06-01").to_csv("b.csv", index=False)
    told = json.loads(evcl.done("stream", "b.csv", *FAST, "--out", "m", "--json"))
    assert (told["rows"], told["new_rows"]) == (170, 50)
    whole[:30].to_csv("a.csv", index=False)
    assert evcl("stream", "a.csv", *FAST, "--out", "m")[0] == 1


def test_a_file_that_was_changed_where_it_was_learned_is_refused(evcl):
    days = weather(40, start="2024-01-01").assign(when=np.repeat(pd.date_range("2024-01-01", periods=8), 5))
    late = days[:3].assign(rain="late", when=days.when[20])
    changed = {
        "late rows": (FAST, pd.concat([days, late]), "but only rows of a later when can be new"),
        "a row less": (FAST, days.drop(7), "the files have 39 rows, but 40 were learned: did they shrink?"),
        "other rows": (FAST[:2], days.assign(rain=["yes", *["new"] * 39]), "(column 'rain' differs), but only rows at"),
        "a row inserted": (FAST[:2], pd.concat([days[:9], late[:1], days[9:]]), "only rows at the end can be new"),
    }
    for name, (options, table, message) in changed.items():
        days.assign(rain=days.rain.where(days.index > 0, "yes")).to_csv("a.csv", index=False)
        Path("m").unlink(missing_ok=True)
        evcl.done("stream", "a.csv", *options, "--out", "m", "--quiet")
        before = Path("m").read_bytes()
        table.assign(rain=table.rain.where(table.index > 0, "yes")).to_csv("a.csv", index=False)
        status, _, err = evcl("stream", "a.csv", *options, "--out", "m")
        assert (status, err.count("\n"), message in err) == (1, 1, True), (name, err)
        assert Path("m").read_bytes() == before


def test_what_was_learned_is_known_by_its_rows_and_not_by_its_name(evcl):
    whole = weather(90)
    whole[:40].to_csv("today.csv", index=False)
    words = ("--target", "rain", "--out", "m")
    evcl.done("stream", "today.csv", *words, "--quiet")
    Path("today.csv").rename("yesterday.csv")
    whole[40:70].assign(gust=1.5).to_csv("today.csv", index=False)
    out = evcl("stream", "yesterday.csv", "today.csv", *words)[1]
    assert "40 of 70 rows were learned already" in out
    assert "30 rows predicted, then learned" in out
    assert "there are no new rows" in evcl("stream", "yesterday.csv", "today.csv", *words, "--drop", "heat")[1]
    whole[70:].to_csv("today.csv", index=False)  # another file of that name
    assert "20 rows predicted, then learned" in evcl("stream", "today.csv", *words)[1]
    assert load(Path("m")).stream.rows == 90


def test_rows_are_learned_in_the_order_of_time(evcl):
    whole = weather(150)
    whole[:70].to_csv("z.csv", index=False)
    whole[70:].to_csv("a.csv", index=False)
    whole.sample(frac=1, random_state=0).to_csv("mixed.csv", index=False)
    whole.to_parquet("sorted.parquet")
    found = {}
    for name, files in {"two": ["a.csv", "z.csv"], "mixed": ["mixed.csv"], "sorted": ["sorted.parquet"]}.items():
        out = evcl.done("stream", *files, *FAST, "--json")
        found[name] = json.loads(out)
    assert found["two"]["overall"] == found["mixed"]["overall"] == found["sorted"]["overall"]
    assert found["mixed"]["notes"] == ["the rows are not in the order of when: they are all read, and sorted"]
    assert found["two"]["notes"] == []


def test_files_with_other_columns_are_one_stream(evcl):
    whole = weather(90)
    whole[:45].assign(code="a7").to_csv("a.csv", index=False)
    whole[45:].drop(columns="sky").assign(code=7, wind=1.5).to_csv("b.csv", index=False)
    out = evcl.done("stream", "a.csv", "b.csv", *FAST, "--out", "m", "--json")
    told = json.loads(out)
    assert told["rows"] == 90
    assert told["columns"] == ["when", "heat", "sky", "code", "wind"]
    encoder = load(Path("m")).encoder
    assert {"sky missing", "code=a7", "code=7", "wind missing"} <= set(encoder.inputs_of)
    table = whole.sample(frac=1, random_state=0)
    table[:45].to_csv("c.csv", index=False)
    table[45:].drop(columns="sky").to_csv("d.csv", index=False)
    assert "so they need the same columns, but one has no 'sky'" in evcl.refused("stream", "c.csv", "d.csv", *FAST)


def test_models_predict_files(evcl, learned):
    weather(60, seed=5).to_csv("new.csv", index=False)
    before = tensors("m")
    out = evcl.done("predict", "--model", "m", "--data", "new.csv", "--out", "p.csv")
    assert "60 predicted, mean entropy " in out
    found = pd.read_csv("p.csv")
    assert list(found) == ["when", "heat", "sky", "rain", "prediction", *sorted(
        (f"probability_{label}" for label in learned["classes"]), key=list(found).index), "entropy"]  # fmt: skip
    assert (found.prediction == found.rain).mean() > 0.75
    assert np.allclose(found.probability_yes + found.probability_no, 1, atol=1e-5)
    told = json.loads(evcl.done("predict", "--model", "m", "--data", "new.csv", "--out", "p.csv", "--json"))
    assert told["accuracy"] == pytest.approx((found.prediction == found.rain).mean())
    found.drop(columns=["sky", "rain"])[["when", "heat"]].assign(sea="calm").to_csv("other.csv", index=False)
    out = evcl.done("predict", "--model", "m", "--data", "other.csv", "--out", "p.csv", "--key", "when")
    assert "note: there is no column sky: its values count as missing" in out
    assert next(iter(pd.read_csv("p.csv"))) == "when"
    assert tensors("m") == before
    assert library.Stream.load("m").rows == 250


def test_many_whole_numbers_as_classes_are_noted(evcl):
    pd.DataFrame({"x": np.arange(60) / 7, "y": np.arange(60) % 30 + 5}).to_csv("a.csv", index=False)
    words = ("stream", "a.csv", "--target", "y")
    assert "note: y has 30 different numbers, each of which is learned as a class" in evcl(*words)[1]
    assert "different numbers" not in evcl(*words, "--kind", "class")[1]


def test_numbers_and_counts(evcl):
    draws = np.random.default_rng(0)
    size = draws.normal(80, 20, 200).round(1)
    table = pd.DataFrame({"size": size, "price": 2.5 * size + draws.normal(0, 5, 200).round(2)})
    table.loc[7, "price"] = None
    table.assign(rooms=draws.poisson(size / 20)).to_csv("a.csv", index=False)
    told = json.loads(evcl.done("stream", "a.csv", "--target", "price", "--drop", "rooms", "--out", "m", "--json"))
    assert told["notes"] == ["price has numbers with fractions, so it is learned as a number"]
    assert told["unlabelled"] == 1
    assert told["rows"] == 199
    assert told["lately"]["rmse"] < 40
    assert set(told["overall"]) == {"rmse", "nll", "coverage"}
    _, out, _ = evcl("predict", "--model", "m", "--data", "a.csv", "--out", "p.csv")
    assert "within 95% intervals, against 199 targets" in out
    assert list(pd.read_csv("p.csv"))[-4:] == ["prediction", "std", "low_95", "high_95"]
    counts = ("stream", "a.csv", "--target", "rooms", "--drop", "price", "--kind", "count", "--json")
    assert json.loads(evcl.done(*counts))["kind"] == "count"


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["none.csv", *FAST], 1, "there is no file none.csv"),
        (["a.csv", "--target", "snow"], 1, "a.csv: there is no column 'snow', the target; it has 'when', 'heat'"),
        (["a.csv", "--target", "rain", "--time", "hour"], 1, "there is no column 'hour', the time"),
        (["a.csv", "--target", "rain", "--time", "sky"], 1, "--time should be a column of dates or numbers"),
        (["a.csv", "--target", "rain", "--time", "rain"], 2, "name the same column"),
        (["a.csv", "--target", "rain", "--drop", "x"], 1, "there is no column 'x' to drop"),
        (["a.csv", "--target", "rain", "--batch", "0"], 2, "--batch"),
        (["a.csv", "--target", "rain", "--delay", "-1"], 2, "--delay"),
        (["a.csv", "--target", "rain", "--false-alarms", "2"], 2, "--false-alarms"),
        (["a.csv", "--target", "rain", "--kind", "date"], 2, "--kind"),
        (["a.csv"], 2, "--target is missing"),
        (["a.csv", "--target", "rain", "--json", "--quiet"], 2, "cannot be used together"),
        (["a.csv", "--target", "rain", "--out", "no/m"], 1, "there is no folder no"),
        (["a.csv", "--target", "rain", "--out", "a.csv"], 1, "a.csv"),
        (["empty.csv", "--target", "rain"], 1, "it holds no rows"),
        (["unlabelled.csv", "--target", "rain"], 1, "no row has a label in the column 'rain'"),
        (["gap.csv", *FAST], 1, "the time is missing: fill it in, or leave out --time to take the rows in"),
        ([".", "--target", "rain"], 1, "evcl stream learns rows of tables"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(evcl, words, status, message):
    table = weather(20)
    table.to_csv("a.csv", index=False)
    table[:0].to_csv("empty.csv", index=False)
    table.assign(rain=None).to_csv("unlabelled.csv", index=False)
    table.assign(when=table.when.where(table.heat < 25)).to_csv("gap.csv", index=False)
    found, _, err = evcl("stream", *words)
    assert found == status
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.csv", "--target", "sky", "--time", "when"], "m was made with --target rain, not sky"),
        (["a.csv", "--target", "rain"], "m was made with --time when, not None"),
        ([*("a.csv", *FAST), "--seed", "7"], "--seed is fixed when a model is created (0)"),
        ([*("a.csv", *FAST), "--kind", "number"], "--kind is fixed when a model is created (class)"),
        ([*("old.csv", *FAST)], "line 2: it is earlier than rows that were learned already"),
    ],
)
def test_a_model_goes_on_as_it_began(evcl, learned, words, message):
    weather(20, start="2023-01-01").to_csv("old.csv", index=False)
    before = Path("m").read_bytes()
    assert message in evcl.refused("stream", *words, "--out", "m")
    assert Path("m").read_bytes() == before


def test_other_commands_say_what_to_use(evcl, learned):
    for words in (["learn", "--model", "m", "--data", "a.csv"], ["export", "m", "m.onnx"]):
        assert "it is a stream, not a learner: use evcl.Stream.load" in evcl.refused(*words)
    status, _, err = evcl("predict", "--model", "m", "--data", "a.csv", "--out", "p.csv", "--task", "x")
    assert (status, err) == (2, "evcl: --task: m is a stream, which has no tasks\n")
    library.Stream.load("m").save("plain")
    assert "a stream of 250 rows, saved from Python" in evcl("inspect", "plain")[1]
    assert "use evcl.Stream.load" in evcl("predict", "--model", "plain", "--data", "a.csv", "--out", "p.csv")[2]
    assert "is not a model of evcl stream" in evcl("stream", "a.csv", *FAST, "--out", "plain")[2]


def test_arrays_of_another_shape_are_refused_in_one_line(evcl):
    draws = np.random.default_rng(0)
    for name, width in (("a", 3), ("b", 4)):
        np.savez(f"{name}.npz", image=draws.normal(size=(40, 2, width)), wet=draws.integers(0, 2, 40))
    evcl.done("stream", "a.npz", "--target", "wet", "--out", "m")
    wanted = "b.npz: column 'image': its values have shape (2, 4), not (2, 3)"
    for words in (
        ["predict", "--model", "m", "--data", "b.npz", "--out", "p.csv"],
        ["stream", "a.npz", "b.npz", "--target", "wet", "--out", "m"],
        ["stream", "a.npz", "b.npz", "--target", "wet", "--out", "n"],
    ):
        assert wanted in evcl.refused(*words)


def test_a_damaged_table_is_refused(evcl, learned):
    tensors, notes = load_file("m"), notes_of(Path("m"))
    for change in ({"format": 9}, {"labels": ["yes"]}, {"encoder": {}}, {"raised": [[1]]}, {"kind": "date"}):
        save_file(tensors, "m", {**notes, NOTE.name: json.dumps({**json.loads(notes[NOTE.name]), **change})})
        status, _, err = evcl("inspect", "m")
        assert status == 1
        assert err.startswith("evcl: cannot load m: ")
        assert err.count("\n") == 1


@pytest.mark.full
def test_a_killed_command_loses_at_most_what_was_not_saved(tmp_path):
    weather(3000).to_csv(tmp_path / "a.csv", index=False)
    often = "import evcl.streams.commands as c; c.SAVE_EVERY = 0.2; from evcl.cli import main; main()"
    words = [sys.executable, "-c", often, "stream", "a.csv", *FAST, "--quiet", "--out"]
    killed = subprocess.Popen([*words, "m"], cwd=tmp_path)
    while not (tmp_path / "m").exists():
        assert killed.poll() is None
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert 0 < load(tmp_path / "m").done < 3000
    for name in ("m", "whole"):
        subprocess.run([*words, name], cwd=tmp_path, check=True)
    assert tensors(tmp_path / "m") == tensors(tmp_path / "whole")
