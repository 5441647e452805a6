"""The presets are what the searches chose."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from evcl._core.catalogue import METHOD_SUMMARIES
from evcl._core.errors import EvclError
from evcl._core.settings import CORESET, renamed
from evcl.experiments import RESULT, best_trial, configure, preset, read_result
from evcl.methods import METHODS

PAPER = Path(__file__).parents[2] / "experiments" / "paper"


@pytest.mark.records
def test_the_presets_are_what_the_searches_found():
    make = runpy.run_path(str(PAPER / "make_presets.py"))
    text = make["PRESETS"].read_text("utf-8")
    assert make["filled"](text) == text, "run python experiments/paper/make_presets.py"


@pytest.mark.records
def test_a_tuned_run_is_the_chosen_trial_with_everything_that_was_not_searched():
    make = runpy.run_path(str(PAPER / "make_presets.py"))
    found = make["found"]("paper-5-cifar10", "split-cifar10")
    trial = found["tried"]["evcl"][0]["settings"]
    searched = configure("split-cifar10", "evcl", found["preset"], given=trial)
    written = make["table"]("x", "split-cifar10", "evcl", found, trial)
    assert "batch_size = 256" in written  # of the preset that the search began from
    assert all(searched.settings[name] == value for name, value in trial.items())


BEFORE = {  # version 0.1's choices
    "permuted-mnist": "paper-6-permuted",
    "split-mnist": "paper-6-split",
    "split-notmnist": "paper-4-split",
    "split-fashion-mnist": "paper-6-split",
    "split-cifar10": "paper-5-cifar10",
}
SEVENTH = {benchmark: f"paper-7-{benchmark}" for benchmark in BEFORE} | {"split-notmnist": "paper-8-split-notmnist"}


@pytest.mark.records
@pytest.mark.parametrize(
    ("folder", "searches"), [("before", BEFORE), ("seeds-20", SEVENTH), ("seeds-20-before", BEFORE)]
)
def test_what_met_the_test_data_is_what_a_search_chose(folder, searches):
    found = runpy.run_path(str(PAPER / "make_presets.py"))["found"]
    results = [read_result(path) for path in (PAPER / "results" / folder).rglob(RESULT)]
    assert results
    for result in results:
        chosen = best_trial(found(searches[result.benchmark], result.benchmark), result.method)["settings"]
        assert {name: result.config[name] for name in chosen} == chosen, (result.benchmark, result.method)
        assert result.validation == 0


@pytest.mark.records
@pytest.mark.parametrize("folder", ["tuned", "ten-tasks", "with-coresets", "default"])
def test_what_met_the_test_data_is_the_preset(folder):
    results = [read_result(path) for path in (PAPER / "results" / folder).rglob(RESULT)]
    assert results
    for result in results:
        wanted = preset(result.preset, result.benchmark, METHODS[result.method], result.tasks)
        wanted |= {"coreset": result.config["coreset"]} if folder == "with-coresets" else {}
        older = {"one_softmax": True, "posterior": "diagonal"}  # than these settings
        config = {**older, **renamed(result.config)}
        assert {name: config[name] for name in wanted} == wanted, (result.benchmark, result.method)
        assert result.preset == ("default" if folder == "default" else "tuned")
        assert result.validation == 0


@pytest.mark.parametrize("benchmark", ["split-mnist", "permuted-digits"])
@pytest.mark.parametrize("method", ["evcl", "ewc", "lwf"])
def test_the_preset_default_is_nothing_but_the_defaults(method, benchmark):
    defaults = {name: setting.default for name, setting in METHODS[method].known_settings.items()}
    found = configure(benchmark, method, "default").settings
    assert {name: found[name] for name in defaults} == defaults


def test_a_preset_that_is_gone_says_which_there_are():
    with pytest.raises(EvclError, match=r"unknown preset 'recipe'.*authors, default, paper, tuned"):
        configure("split-mnist", "evcl", "recipe")


BUILT_IN = ("evcl", "vcl", "vcl-random-coreset", "vcl-kcenter-coreset", "ewc", "random-coreset", "kcenter-coreset",
            "naive", "joint")  # fmt: skip


@pytest.mark.parametrize("benchmark", ["split-digits", "permuted-digits", "split-mnist"])
@pytest.mark.parametrize("method", BUILT_IN)
def test_the_paper_names_every_setting(method, benchmark):
    """Otherwise its numbers would move with a default."""
    known = METHODS[method].known_settings
    fixed = {name for name, setting in known.items() if len(setting.choices) == 1}
    assert fixed == ({"coreset"} if "coreset" in method else set())
    assert preset("paper", benchmark, METHODS[method]).keys() == known.keys() - fixed


@pytest.mark.parametrize("name", ["paper", "default"])
@pytest.mark.parametrize("method", METHOD_SUMMARIES)
def test_a_preset_leaves_a_method_what_its_name_says(method, name):
    """A table for all methods must not switch off what one of them is about."""
    known = METHODS[method].known_settings
    found = {key: setting.default for key, setting in known.items()} | preset(name, "split-mnist", METHODS[method])
    assert (found.get("importance") == "kfac" or found.get("posterior") == "kronecker") == method.startswith("kfac-")
    assert found["film"] == method.endswith("-film")
    if method in ("vogn", "ivon"):  # its momentum is not that of SGD
        assert found["momentum"] == known["momentum"].default > 0


def test_what_the_paper_leaves_open_is_what_the_defaults_were():
    found = preset("paper", "split-mnist", METHODS["evcl"])
    assert found.keys() == METHODS["evcl"].known_settings.keys() | CORESET.keys()
    open_ = {"stop_nll": 0.0, "std_rate": 0.01, "strength_scale": "none", "fisher_draws": 0, "coreset": "none"}
    assert {name: found[name] for name in open_} == open_


@pytest.mark.records
def test_a_number_of_tasks_has_settings_of_its_own():
    five, ten, three = (configure("permuted-mnist", "evcl", tasks=n).settings for n in (5, 10, 3))
    found = runpy.run_path(str(PAPER / "make_presets.py"))["found"]("ten-tasks-2", "permuted-mnist:10")
    assert ten.lr == found["confirmed"]["evcl"][0]["settings"]["lr"] != five.lr
    assert three == five
