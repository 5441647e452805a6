"""The presets are what the searches chose."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from evcl._core.errors import EvclError
from evcl._core.settings import BAYESIAN, CORESET, ELASTIC, TRAINING
from evcl.experiments import PAPER_BENCHMARKS, RESULT, best_trial, configure, preset, read_result, recipe
from evcl.methods import METHODS
from evcl.methods.teacher import DISTILLATION

PAPER = Path(__file__).parents[2] / "experiments" / "paper"


def test_the_presets_are_what_the_searches_found():
    make = runpy.run_path(str(PAPER / "make_presets.py"))
    text = make["PRESETS"].read_text("utf-8")
    assert make["filled"](text) == text, "run python experiments/paper/make_presets.py"


def test_a_tuned_run_is_the_chosen_trial_with_everything_that_was_not_searched():
    make = runpy.run_path(str(PAPER / "make_presets.py"))
    found = make["found"]("paper-5-cifar10", "split-cifar10")
    trial = found["tried"]["evcl"][0]["settings"]
    searched = configure("split-cifar10", "evcl", found["preset"], given=trial)
    written = make["table"]("x", "split-cifar10", "evcl", found, trial)
    assert "batch_size = 256" in written  # of the preset that the search began from
    assert all(searched.settings[name] == value for name, value in trial.items())


MEASURED = [  # results on test data, and the searches that chose their settings
    ("tuned/permuted-mnist", "paper-6-permuted"),
    ("tuned/split-mnist", "paper-6-split"),
    ("tuned/split-notmnist", "paper-4-split"),
    ("tuned/split-fashion-mnist", "paper-6-split"),
    ("tuned/split-cifar10", "paper-5-cifar10"),
    ("ten-tasks", "ten-tasks"),
    ("seeds-20/split-notmnist", "paper-7-split-notmnist"),
    ("seeds-20/split-cifar10", "paper-7-split-cifar10"),
    ("seeds-20-before/split-notmnist", "paper-4-split"),
    ("seeds-20-before/split-cifar10", "paper-5-cifar10"),
]


@pytest.mark.parametrize(("folder", "search"), MEASURED)
def test_what_met_the_test_data_is_what_a_search_chose(folder, search):
    found = runpy.run_path(str(PAPER / "make_presets.py"))["found"]
    results = [read_result(path) for path in (PAPER / "results" / folder).rglob(RESULT)]
    assert results
    for result in results:
        benchmark = f"{result.benchmark}:10" if folder == "ten-tasks" else result.benchmark
        chosen = best_trial(found(search, benchmark), result.method)["settings"]
        assert {name: result.config[name] for name in chosen} == chosen, result.method
        assert result.validation == 0


def test_the_recipe_that_met_the_test_data_is_the_one_that_loses_least_on_all_benchmarks():
    found = runpy.run_path(str(PAPER / "make_presets.py"))["found"]
    chosen, _ = recipe([found("recipe-8", benchmark) for benchmark in PAPER_BENCHMARKS], "evcl")
    for path in (PAPER / "results" / "recipe").rglob(RESULT):
        config = read_result(path).config
        assert {name: config[name] for name in chosen} == chosen


@pytest.mark.parametrize("benchmark", ["split-mnist", "permuted-digits"])
@pytest.mark.parametrize("method", ["evcl", "ewc", "lwf"])
def test_the_preset_default_is_nothing_but_the_defaults(method, benchmark):
    defaults = {name: setting.default for name, setting in METHODS[method].known_settings.items()}
    found = configure(benchmark, method, "default").settings
    assert {name: found[name] for name in defaults} == defaults


def test_a_preset_that_is_gone_says_which_there_are():
    with pytest.raises(EvclError, match=r"unknown preset 'recipe'.*default, paper, tuned"):
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


def test_what_the_paper_leaves_open_is_what_the_defaults_were():
    found = preset("paper", "split-mnist", METHODS["evcl"])
    assert found.keys() == {**TRAINING, **BAYESIAN, **ELASTIC, **DISTILLATION, **CORESET}.keys()
    open_ = {"stop_nll": 0.0, "std_rate": 0.01, "strength_scale": "none", "fisher_draws": 0, "coreset": "none"}
    assert {name: found[name] for name in open_} == open_


def test_a_number_of_tasks_has_settings_of_its_own():
    five, ten, three = (configure("permuted-mnist", "evcl", tasks=n).settings for n in (5, 10, 3))
    found = runpy.run_path(str(PAPER / "make_presets.py"))["found"]("ten-tasks-2", "permuted-mnist:10")
    assert ten.lr == found["confirmed"]["evcl"][0]["settings"]["lr"] != five.lr
    assert three == five
