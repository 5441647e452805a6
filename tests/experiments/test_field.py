"""The table of the field: what is searched, that the best trial meets the test data, and what the table shows."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from made_up_cells import EXPERIMENTS, programs_of

from evcl._core.catalogue import METHOD_SUMMARIES
from evcl._core.errors import EvclError
from evcl._core.settings import renamed
from evcl.experiments import RESULT, compare, configure, read_result
from evcl.experiments.engines import Inline
from evcl.experiments.result import to_json
from evcl.experiments.search import best_trial, named_tasks, read_found, trials
from evcl.methods import METHODS

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from made_up import result

FOLDER = EXPERIMENTS / "field"


@pytest.fixture
def programs():
    with programs_of("field", "field", "run", "write_tables") as found:
        yield found


def test_every_method_is_in_the_table_once(programs):
    field, _, _ = programs
    names = [*field.FIELD["fast"], *field.FIELD["slow"]]
    assert sorted(names) == sorted(METHOD_SUMMARIES), "add the method to experiments/field/field.toml"
    assert not set(field.FIELD["search_seeds"]) & set(field.FIELD["test_seeds"])


def test_every_method_has_as_many_trials_its_defaults_among_them(programs):
    field, _, _ = programs
    for benchmark in (one for one in field.BENCHMARKS if field.searched(one) == one):
        name, tasks = named_tasks(benchmark)
        common = {"batch_size", "epochs"}
        for method in field.methods_on(benchmark):
            search = field.search_of(benchmark, [method])
            tried = [configure(name, method, "default", (100,), tasks, one) for one in trials(search, method)]
            assert len({str(one.settings) for one in tried}) == field.FIELD["trials"], (benchmark, method)
            defaults = {key: setting.default for key, setting in METHODS[method].known_settings.items()}
            different = {key for key, value in defaults.items() if tried[0].settings[key] != value}
            assert different <= common, (benchmark, method)


@pytest.fixture
def small(programs, monkeypatch):
    """Two methods, two trials and a stream of two tasks, in this process."""
    field, run, write_tables = programs
    digits = {"slow": False, "epochs": 1, "batch_size": 64, "lr": {"low": 1e-3, "high": 1e-2}}
    fast = {"evcl": {}, "ewc": {"strength": {"low": 0.1, "high": 10.0}}}
    given = {"benchmarks": {"split-digits:2": digits}, "fast": fast, "slow": {}, "trials": 2, "test_seeds": [40, 41]}
    for key, value in given.items():
        monkeypatch.setitem(field.FIELD, key, value)
    monkeypatch.setattr(field, "RANGES", fast)
    monkeypatch.setattr(run, "SCENARIOS", [])
    for module in (run, write_tables):
        monkeypatch.setattr(module, "BENCHMARKS", ["split-digits:2"])
    monkeypatch.setattr("evcl.experiments.engines.local", lambda device, precision, on_event, **how: Inline(on_event))
    return programs


def test_the_best_trial_meets_the_test_data_and_nothing_is_done_twice(small, tmp_path, monkeypatch, capsys):
    field, run, write_tables = small
    go = partial(run.main, ["search", "--device", "cpu", "--folder", str(tmp_path)])
    go()
    path = tmp_path / "search" / "split-digits-2" / "ewc.json"
    found = json.loads(path.read_text("utf-8"))
    first, second = found["tried"]["ewc"]
    assert found["tried"].keys() == found["methods"].keys() == {"ewc"}
    assert first["mean"] >= second["mean"]
    assert [len(one["per_seed"]) for one in (first, second)] == [1, 1]
    found["tried"]["ewc"] = [{**second, "mean": 1.0}, first]  # as if the other one had been best
    path.write_text(json.dumps(found), "utf-8")

    test = partial(run.main, ["test", "--device", "cpu", "--folder", str(tmp_path)])
    test()
    for method in ("evcl", "ewc"):
        ended = read_result(tmp_path / "results" / "split-digits-2" / method / RESULT)
        assert ended.seeds == [40, 41]
        assert (ended.validation, ended.tasks, ended.preset) == (0, 2, "default")
        if method == "ewc":
            assert ended.config | second["settings"] == ended.config
            assert ended.config | first["settings"] != ended.config

    run.main(["memory", "--folder", str(tmp_path)])
    kept = json.loads((tmp_path / "results" / "memory.json").read_text("utf-8"))["split-digits:2"]
    weights = 64 * 100 + 100 + 100 * 100 + 100 + 2 * (2 * 100 + 2)
    own = 4 * 4 * weights  # means, sigmas, Fisher, which are in use
    inputs, outputs = 65**2 + 101**2 + 2 * 101**2, 100**2 + 100**2 + 2 * 2**2
    factors = 4 * (inputs + outputs)  # of each layer, for EVCL's posterior
    # and the likelihood of each class, with at most as many numbers as its own
    assert 1.01 * own + factors < kept["evcl"] < 2.1 * own + factors
    assert kept["ewc"] == pytest.approx(3 * 4 * weights, rel=0.01)
    shown = write_tables.made(tmp_path / "results")
    assert "| method | split-digits, 2 tasks |" in shown
    assert f"| {kept['evcl'] / 1e6:.2f} |" in shown

    monkeypatch.setattr(run, "kept_bytes", None)
    for name in ("tune", "execute_all"):
        monkeypatch.setattr(compare, name, None)
    for again in (go, partial(run.main, ["memory", "--folder", str(tmp_path)])):
        again()
    monkeypatch.setattr(compare, "execute_all", lambda todo, *how, **more: iter(todo))
    test()  # nothing to do
    monkeypatch.setitem(field.FIELD["fast"]["ewc"], "strength", {"low": 0.1, "high": 11.0})
    with pytest.raises(EvclError, match="another search"):
        go()


def test_the_table_compares_seed_by_seed(programs, tmp_path):
    write_tables = programs[2]
    made = {
        "evcl": result("evcl", "split-digits", (0.80, 0.82, 0.84)),
        "ewc": result("ewc", "split-digits", (0.77, 0.81, 0.83)),
        "si": result("si", "split-digits", (0.79, 0.82, 0.84)),
        "joint": result("joint", "split-digits", (0.90, 0.90, 0.90)),
    }
    for method, one in made.items():
        folder = tmp_path / "split-digits" / method
        folder.mkdir(parents=True)
        (folder / RESULT).write_text(to_json(one), "utf-8")
    (tmp_path / "memory.json").write_text('{"split-digits": {"evcl": 4000000, "ewc": 3000000, "joint": 1}}')
    marks = [f"<!-- {name} -->\nold\n<!-- end {name} -->\n" for name in ("scenarios", "texts", "field")]
    with pytest.raises(EvclError, match="must have the lines <!-- scenarios -->"):
        write_tables.filled("".join(marks[1:]), tmp_path)
    text = write_tables.filled("".join(["before\n", *marks, "after\n"]), tmp_path)
    assert text == write_tables.filled(text, tmp_path)
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    field = text.partition("<!-- field -->")[2]
    rows = [line.strip("| ").split(" | ") for line in field.splitlines() if line.startswith("|")]
    assert rows[:6] == [
        ["method", "split-digits"],
        ["---", "---:"],
        ["EVCL", "82.00 ± 2.00"],
        ["EWC", "80.33 ± 3.06"],
        ["SI", "81.67 ± 2.52"],
        ["joint", "90.00 ± 0.00"],
    ]
    evcl, ewc, si, joint = rows[8:]
    # 0.9 just after each of the first four tasks, and then what is left of the fifth
    assert evcl[1:] == [
        "82.00 ± 2.00", "-", "8.00 ± 2.00", "88.40 ± 0.40", "0.180 ± 0.020", "1.80 ± 0.20", "4.00", "0.4",
    ]  # fmt: skip
    assert ewc[2] == "**+1.67 ± 0.67**"  # 3, 1 and 1 points
    assert si[2] == "+0.33 ± 0.33"
    assert joint[2:5] == ["**−8.00 ± 1.15**", "-", "-"]  # noqa: RUF001
    assert joint[7] == "all data"


@pytest.mark.records
def test_what_met_the_test_data_is_what_a_search_chose(programs):
    field, _, _ = programs
    paths = [
        (b, path) for b in field.BENCHMARKS for path in (FOLDER / "results" / compare.place(b)).glob(f"*/{RESULT}")
    ]
    assert paths
    for benchmark, path in paths:
        found = read_result(path)
        search = field.search_of(field.searched(benchmark), [found.method])
        tried = read_found(compare.search_file(FOLDER, field.searched(benchmark), found.method), search)
        chosen = best_trial(tried, found.method)["settings"]  # defaults have changed since
        config = renamed(found.config)
        assert config | chosen == config, path
        tasks = compare.chosen(field.PLAN, FOLDER, benchmark, found.method).tasks
        assert (found.seeds, found.tasks, found.validation) == (field.FIELD["test_seeds"], tasks, 0)
