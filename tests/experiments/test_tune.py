from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest

from evcl import experiments
from evcl._core.errors import EvclError
from evcl.experiments import Store, best_trial, configure, execute, read_search, tune, write_found
from evcl.experiments.engines import Inline
from evcl.experiments.search import _asked, refinement, trials

SEARCH = """
benchmarks = ["split-digits"]
validation = 0.2
seeds = [7, 8]
trials = 3
preset = "paper"
[methods.slow]
method = "evcl"
epochs = 1
std_update = "natural"
strength = {low = 1.0, high = 1e4}
tempering = {low = 0.01, high = 1.0}
[methods.ewc]
strength = {low = 1.0, high = 1e4}
epochs = {choices = [1, 2]}
"""


@pytest.fixture
def search(tmp_path):
    def write(text=SEARCH):
        (tmp_path / "search.toml").write_text(text)
        return tmp_path / "search.toml"

    return write


def test_a_search_starts_from_the_defaults_unless_it_names_a_preset(search):
    assert read_search(search()).preset == "paper"
    assert read_search(search(SEARCH.replace('preset = "paper"\n', ""))).preset == "default"


def test_every_method_has_as_many_trials_which_cover_its_space(search):
    found = read_search(search(SEARCH.replace("trials = 3", "trials = 16")))
    for method in ("slow", "ewc"):
        tried = trials(found, method)
        assert len(tried) == 16
        assert tried == trials(found, method)  # the same ones on every benchmark
        quarters = sorted(int(trial["strength"] >= bound) for trial in tried for bound in (10, 100, 1000))
        assert quarters.count(1) == pytest.approx(24, abs=3)
        assert all(1 <= trial["strength"] <= 1e4 for trial in tried)
    assert {trial["epochs"] for trial in trials(found, "ewc")} == {1, 2}
    assert {trial["std_update"] for trial in trials(found, "slow")} == {"natural"}


def test_alternatives_share_a_methods_trials(search):
    both = SEARCH.replace("[methods.ewc]", "[[methods.ewc]]") + '[[methods.ewc]]\nfisher_scale = "task"\nepochs = 1\n'
    tried = trials(read_search(search(both)), "ewc")
    assert [trial.get("fisher_scale") for trial in tried] == [None, None, "task"]
    more = read_search(search(both.replace("trials = 3", "trials = 6")))  # nothing is searched in the second table
    assert [trial.get("fisher_scale") for trial in trials(more, "ewc")] == [None] * 5 + ["task"]
    with pytest.raises(EvclError, match="for one method"):
        read_search(search(both + 'method = "evcl"\n'))
    with pytest.raises(EvclError, match="no more than its trials"):
        read_search(search(both.replace("trials = 3", "trials = 1")))


@pytest.mark.full
def test_a_search_is_refined_around_the_best_of_each_method(search):
    both = SEARCH.replace("[methods.ewc]", "[[methods.ewc]]").replace("trials = 3", "trials = 4\nrefine = 5")
    asked = read_search(search(both + '[[methods.ewc]]\nfisher_scale = "task"\nstrength = {low = 1.0, high = 16.0}\n'))
    outside = {"settings": {"fisher_scale": "task", "strength": 17.0}}  # of an earlier search, say
    near = refinement(asked, "ewc", [outside, {"settings": {"fisher_scale": "task", "strength": 16.0}}])
    assert len(near) == 5
    assert all(11.3 <= trial["strength"] <= 16 and trial["fisher_scale"] == "task" for trial in near)
    near = refinement(asked, "ewc", [{"settings": {"strength": 100.0, "epochs": 2}}])
    assert {trial["epochs"] for trial in near} == {2}
    found = tune(asked, "split-digits")
    for method in ("slow", "ewc"):
        tried = found["tried"][method]
        first = [trial for trial in tried if trial["settings"] in trials(asked, method)]
        assert (len(tried), len(first)) == (9, 4)
        near = refinement(asked, method, first)
        assert all(trial["settings"] in near for trial in tried if trial not in first)
        assert [trial["mean"] for trial in tried] == sorted((trial["mean"] for trial in tried), reverse=True)


@pytest.mark.full
def test_the_best_of_this_search_and_earlier_ones_are_measured_again(search, tmp_path, evcl):
    (tmp_path / "first.toml").write_text(SEARCH)
    assert evcl("tune", str(tmp_path / "first.toml"), "--device", "cpu")[0] == 0
    first = json.loads((tmp_path / "first" / "split-digits.json").read_text())["tried"]
    more = 'trials = 1\nrefine = 1\nafter = ["first"]\nconfirm = 2\nconfirm_seeds = [9]'
    asked = read_search(search(SEARCH.replace("trials = 3", more)))
    found = tune(asked, "split-digits")
    for method, of in (("slow", "evcl"), ("ewc", "ewc")):
        assert len(found["tried"][method]) <= 2  # one of the trials, and one near the best, wherever that is from
        everything = sorted(first[method] + found["tried"][method], key=lambda trial: -trial["mean"])
        again = found["confirmed"][method]
        assert all(trial["settings"] in [one["settings"] for one in everything[:3]] for trial in again)
        assert len(again) == 2
        assert again[0]["mean"] >= again[1]["mean"]
        assert best_trial(found, method) == again[0]
        settings = {**again[0]["settings"], "validation": 0.2}
        alone = execute(configure("split-digits", of, "paper", [9], given=settings))
        assert again[0]["per_seed"] == pytest.approx(alone.average_accuracy.per_seed)
    (tmp_path / "first" / "split-digits.json").unlink()
    with pytest.raises(EvclError, match="not the result of a search"):
        tune(asked, "split-digits")


@pytest.mark.full
def test_a_trial_is_the_run_of_its_settings_on_validation_data(search):
    found = tune(read_search(search()), "split-digits")
    assert found["validation"] == 0.2
    assert [len(found["tried"][method]) for method in ("slow", "ewc")] == [3, 3]
    for method, of in (("slow", "evcl"), ("ewc", "ewc")):
        means = [trial["mean"] for trial in found["tried"][method]]
        assert means == sorted(means, reverse=True)
        best = found["tried"][method][0]
        settings = {**best["settings"], "validation": 0.2}
        alone = [execute(configure("split-digits", of, "paper", [seed], given=settings)) for seed in (7, 8)]
        assert best["per_seed"] == pytest.approx([one.average_accuracy.mean for one in alone])


@pytest.mark.full
def test_a_trial_that_diverges_is_lost_and_the_others_are_kept(search):
    wild = SEARCH.replace("epochs = 1\n", "epochs = 1\nstd_lr_scale = 1000.0\nlr = {choices = [0.001, 10.0]}\n")
    found = tune(read_search(search(wild.replace('std_update = "natural"', 'std_update = "adam"'))), "split-digits")
    means = [trial["mean"] for trial in found["tried"]["slow"]]
    assert means[-1] is None
    assert found["tried"]["ewc"][0]["mean"] > 0.5


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("trials = 3", "", "search.toml: the key 'trials' is missing"),
        ("trials = 3", "trials = 3\nrefine = -1", "refine: must be a whole number >= 0, not -1"),
        ("trials = 3", "trials = 3\nconfirm = 1", "needs confirm_seeds"),
        ("trials = 3", "trials = 3\nconfirm = 1\nconfirm_seeds = [8]", "none of which may be in seeds"),
        ("trials = 3", "trials = 3\nafter = [1]", r"after\[0\]: must be a string, not \[1\]"),
        ("trials = 3", "trials = 2.9", "trials: must be a whole number, not 2.9"),
        ('["split-digits"]', '"split-digits"', "benchmarks: must be a list, not 'split-digits'"),
        ('"split-digits"', '"split-digits:abc"', "with its number of tasks"),
        ("{choices = [1, 2]}", "{choices = []}", "choices"),
        ("low = 1.0, high", 'low = "a", high', "with 0 < low < high"),
        ("[methods.ewc]", "[other.ewc]", "unknown key 'other'"),
        ("validation = 0.2", "validation = 0", "validation: must be a number > 0.0, not 0"),
        ("validation = 0.2", "validation = 2", "validation: must be a number < 1.0, not 2"),
        ("seeds = [7, 8]", "seeds = [7, 7]", "seeds must be different"),
        ('"split-digits"', '"split-digit"', "split-digits"),
        ("strength = {low", "strenth = {low", "strength"),
        ("low = 1.0, high = 1e4", "low = 0.0, high = 1e4", "with 0 < low < high"),
        ("preset", "presets", "unknown key 'presets'; did you mean 'preset'"),
        ("trials = 3", "trials = 1000000000", "trials: must be a whole number <= 1000, not 1000000000"),
        ("[7, 8]", "[7, -8]", r"seeds\[1\]: must be a whole number >= 0, not \[7, -8\]"),
        ("[7, 8]", "[7, [8]]", r"seeds\[1\]: must be a whole number, not \[7, \[8\]\]"),
        ('"evcl"', '{name = "evcl"}', "methods.slow: unknown method"),
        (
            "strength = {low = 1.0, high = 1e4}\ntemp",
            "strength = {low = 1.0, high = 1e40}\ntemp",
            "methods.slow.strength",
        ),
        ("epochs = 1", "epochs = -1", "methods.slow.epochs: epochs must be"),
        ('"natural"', '"epochs"', "methods.slow.std_update: std_update must be"),
        ("epochs = 1", "epoch = 1", "methods.slow.epoch: unknown setting of evcl 'epoch'; did you mean 'epochs'"),
        ('"split-digits"', '"split-digits:99"', "benchmarks: tasks of split-digits must be"),
        ('"paper"', '"pepper"', "preset: unknown preset 'pepper'; did you mean 'paper'"),
        ("trials = 3", "trials = 3\nafter = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("trials = 3", "a." * 40_000 + "trials = 3", "a key has more than 20 parts"),
        ("trials = 3", "trials = 3\n" + "#" * 1_000_000, "larger than the limit of 1,000,000 bytes"),
        ("[methods.ewc]", "[methods.ewc", "cannot be read as TOML"),
    ],
)
def test_a_search_that_cannot_be_run_says_why(old, new, message, search):
    with pytest.raises(EvclError, match=message):
        read_search(search(SEARCH.replace(old, new, 1)))


@pytest.mark.full
def test_the_command_line_keeps_what_it_has_found(evcl, search):
    path = search()
    status, out, err = evcl("tune", str(path), "--device", "cpu")
    assert (status, err) == (0, "")
    assert "split-digits, validation" in out
    found = path.with_suffix("") / "split-digits.json"
    made = found.stat().st_mtime_ns
    assert json.loads(found.read_text())["benchmark"] == "split-digits"
    assert evcl("tune", str(path), "--device", "cpu")[0] == 0
    assert found.stat().st_mtime_ns == made
    found.write_text(json.dumps(json.loads(found.read_text()), indent=1))  # as version 0.1 wrote it
    assert evcl("tune", str(path), "--device", "cpu")[1] == out.partition("\n")[2]
    search(SEARCH.replace("seeds = [7, 8]", "seeds = [7, 9]"))
    status, _, err = evcl("tune", str(path), "--device", "cpu")
    assert status == 1
    assert "holds the result of another search: pass --overwrite" in err
    found.write_text("{")
    status, _, err = evcl("tune", str(path), "--device", "cpu")
    assert (status, err.count("\n")) == (1, 1)
    assert "is not the result of a search" in err


def test_what_was_found_is_written_with_one_line_per_trial(tmp_path):
    trial = {"settings": {"lr": 0.1, "epochs": 2}, "mean": 0.5, "std": None, "per_seed": [0.5, None]}
    found = {
        "benchmark": "split-digits",
        "seeds": [7, 8],
        "methods": {"evcl": [{"lr": {"low": 0.1, "high": 1.0}}, {"lr": 2}], "ewc": {}},
        "confirmed": {"evcl": [trial]},
        "tried": {"evcl": [trial, trial], "ewc": []},
    }
    write_found(tmp_path / "a" / "found.json", found)
    text = (tmp_path / "a" / "found.json").read_text()
    assert json.loads(text) == found
    lines = text.splitlines()
    assert lines.count(f"   {json.dumps(trial)}") == 2
    assert lines.count(f"   {json.dumps(trial)},") == 1
    assert {' "seeds": [7, 8],', '  "ewc": {}', '  "ewc": []'} < set(lines)
    with pytest.raises(ValueError, match="JSON compliant"):
        write_found(tmp_path / "found.json", {"tried": {"evcl": [{"mean": math.nan}]}})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_another_search_found_meanwhile_is_not_replaced(evcl, search, monkeypatch):
    path, came = search(), Path("o/split-digits.json")

    def tune(*_):
        came.parent.mkdir()
        asked = _asked(read_search(path))
        came.write_text(json.dumps({**asked, "trials": 99, "tried": {}, "benchmark": "split-digits"}))
        return {}

    monkeypatch.setattr(experiments, "tune", tune)
    status, _, err = evcl("tune", str(path), "--device", "cpu", "--out", "o")
    assert status == 1
    assert err == "evcl: o/split-digits.json holds the result of another search: pass --overwrite or another --out\n"
    assert json.loads(came.read_text())["trials"] == 99


def test_a_search_that_is_stopped_goes_on_where_it_was(search, tmp_path):
    asked, ran = read_search(search()), []

    class Counting(Inline):
        def run(self, cells, on_event, checkpoints):
            ran.append(cells[0].seeds)
            if len(ran) == 6:
                raise KeyboardInterrupt
            return super().run(cells, on_event, checkpoints)

    store = Store(tmp_path / "cells")
    with pytest.raises(KeyboardInterrupt):
        tune(asked, "split-digits", store=store, engine=Counting)
    found = tune(asked, "split-digits", store=store, engine=Counting)
    assert len(ran) == 1 + 2 * 3 * 2  # methods, trials and seeds, and the one that was stopped
    again = tune(asked, "split-digits", store=store, engine=Counting)
    assert len(ran) == 13
    assert again["tried"] == found["tried"]


def test_the_repositorys_searches_can_be_run():
    folder = Path(__file__).parents[2] / "search"
    for path in sorted(folder.glob("*.toml")):
        assert read_search(path).trials == tomllib.loads(path.read_text())["trials"]
