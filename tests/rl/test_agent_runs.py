"""`evcl run` on streams of environments, and the film strip."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from evcl import benchmarks, rl
from evcl._core.errors import EvclError
from evcl.experiments import read_result
from evcl.experiments.samples import decoded
from evcl.report.html_page import page
from evcl.report.results import by_benchmark, find_results
from evcl.rl.acting import films

TINY = ("--set", "steps=256", "--set", "envs=4", "--set", "rollout=32", "--set", "episodes=2", "--set", "passes=1")


def test_a_run_writes_returns(evcl, tmp_path):
    run = ("run", "cartpole-variants", "--tasks", "2", "--seeds", "1", "--out", str(tmp_path), *TINY)
    status, _, err = evcl(*run)
    assert status == 0, err
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["accuracy"] is None
    ((first, last),) = found["returns"]
    assert found["average_return"]["mean"] == pytest.approx(sum(last) / 2)
    assert found["forgetting"]["mean"] == pytest.approx(first[0] - last[0])
    assert found["config"]["steps"] == 256
    assert read_result(tmp_path / "result.json").score == "average_return"
    status, out, _ = evcl(*run)
    assert "already holds this run" in " ".join(out.split())


@pytest.mark.full
def test_the_report_shows_an_episode_of_each_task(evcl, tmp_path):
    for method in ("naive", "separate"):
        out = str(tmp_path / method)
        run = ("run", "cartpole-variants", "--method", method, "--tasks", "2", "--seeds", "2", "--out", out)
        status, _, err = evcl(*run, *TINY)
        assert status == 0, err
    heights = [
        struct.unpack(">I", decoded(read_result(tmp_path / method / "result.json").samples)[20:24])[0]
        for method in ("naive", "separate")
    ]
    assert heights == [2 * 62, 62]  # one agent per task: only the last one is left
    shown = page(by_benchmark(find_results(tmp_path)), "agents")
    assert "An episode of each task" in shown
    assert shown.count("data:image/png;base64,") == 2


def test_a_film_beside_others_is_that_of_a_seed_alone():
    agent = rl.Agent(rl.stream("cartpole-variants", 1), "naive", {}, [3, 4])
    beside, alone = films(agent, 0, 3, [0, 1])[1], rl.frames(agent, 0, 3, replica=1)
    assert [one.tolist() for one in beside] == [one.tolist() for one in alone]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--epochs", "3"), "has no epochs: --set steps=N"),
        (("--method", "joint"), "joint learns all tasks at once, which an agent cannot: use evcl, vcl, ewc, si or mas"),
        (("--preset", "paper"), "cartpole-variants is not in the paper: leave out --preset"),
        (("--memory", "100"), "unknown setting of evcl 'memory'"),
        (("--set", "steps=0"), "steps must be a whole number of at least 1"),
    ],
)
def test_wrong_usage_is_one_clear_line(evcl, given, words):
    status, _, err = evcl("run", "cartpole-variants", *given)
    assert status == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("given", [("--validation", "0.1"), ("--network", "20"), ("--scenario", "domain")])
def test_what_streams_of_environments_do_not_have(evcl, tmp_path, given):
    status, _, err = evcl("run", "cartpole-variants", "--seeds", "1", "--out", str(tmp_path), *TINY, *given)
    assert status == 1
    assert "leave out" in err


def test_the_benchmark_itself_has_no_examples():
    with pytest.raises(EvclError, match=r"evcl\.rl\.stream"):
        benchmarks.get("cartpole-variants")


def test_a_film_strip(tmp_path):
    from evcl.report.film_strip import film_strip

    agent = rl.Agent(rl.stream("cartpole-variants", 1), "naive", {}, [0])
    shown = rl.frames(agent, 0, 4)
    assert len(shown) == 4
    assert shown[0].shape == (60, 150, 3)
    assert film_strip(shown, tmp_path / "strip.png", "CartPole").stat().st_size > 1000
    with pytest.raises(EvclError, match="at least one"):
        film_strip([], tmp_path / "none.png")


def test_retired_names_work_and_say_what_to_use():
    with pytest.warns(DeprecationWarning, match=r"use evcl\.rl\.method"):
        assert list(rl.METHODS) == ["evcl", "vcl", "ewc", "clear", "naive", "separate"]
    with pytest.warns(DeprecationWarning, match=r"use Variant"):
        envs = rl.CartPole(rl.Variant(), [0], 2, "test", torch.device("cpu"))
    assert envs.observations.shape == (2, 4)
