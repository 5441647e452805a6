from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from pathlib import Path

import pytest
from made_up_cells import untimed

from evcl.experiments import configure, execute, execute_all, merge
from evcl.experiments.parallel import programs
from evcl.experiments.result import MEASURES
from evcl.experiments.run import execute_together

sys.path.append(str(Path(__file__).parents[1] / "safety"))
from forked import forked, waited

GIVEN = {"epochs": 1}


def together(configs):
    """Their results, when all their seeds share a program."""
    found, count = execute_together([cell for config in configs for cell in config.cells]), len(configs[0].seeds)
    return [merge(found[i : i + count]) for i in range(0, len(found), count)]


@pytest.mark.full
def test_runs_in_parallel_are_the_runs_alone():
    configs = [configure("split-digits", m, seeds=[3, 1], tasks=2, given=GIVEN) for m in ("evcl", "naive")]
    events = []
    found = dict(execute_all(configs, lambda index, event: events.append((index, event.task)), workers=2))
    for index, config in enumerate(configs):
        alone = execute(config)  # both seeds in one program: they agree up to rounding
        for key in ("benchmark", "method", "preset", "config", "seeds", "environment"):
            assert getattr(found[index], key) == getattr(alone, key)
        for key in MEASURES:
            assert found[index].measure(key).per_seed == pytest.approx(alone.measure(key).per_seed, abs=1e-3)
    assert {(0, 0), (0, 1), (1, 0), (1, 1)} == set(events)


def test_a_seed_alone_is_the_same_in_a_process_of_its_own():
    configs = [configure("split-digits", "evcl", seeds=[seed], tasks=2, given=GIVEN) for seed in (3, 1)]
    found = dict(execute_all(configs, lambda *_: None, workers=1))
    for index, config in enumerate(configs):
        alone = execute(config)
        assert untimed(found[index]) == untimed(alone)


COPIES = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, workers are no copies")


@COPIES
def test_a_forked_program_has_workers_of_its_own():
    """What its parent's workers are copies of is not the child's."""
    config = configure("split-digits", "naive", seeds=[0, 1], tasks=1, given=GIVEN)
    assert len(list(execute_all([config], lambda *_: None, workers=2))) == 1

    def again() -> None:
        assert len(list(execute_all([config], lambda *_: None, workers=2))) == 1

    assert waited(forked(again), 120) == 0


@COPIES
def test_a_process_of_the_users_own_can_be_ended_after_a_run():
    config = configure("split-digits", "naive", seeds=[0, 1], tasks=1, given=GIVEN)
    list(execute_all([config], lambda *_: None, workers=2))
    own = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    own.start()
    own.terminate()
    own.join(30)
    assert own.exitcode == -signal.SIGTERM


def test_progress_counts_every_seed():
    config, heard = configure("split-digits", "naive", seeds=[3, 1, 2], tasks=2, given=GIVEN), []
    list(execute_all([config], lambda _, event: heard.append(event), workers=1))
    assert [event.done for event in heard] == sorted(event.done for event in heard)
    assert heard[-1].done == 1
    assert {event.seeds for event in heard} == {(3,), (1,), (2,)}


def test_what_can_share_a_program():
    def some(method, given=None, **options):
        return configure("split-digits", method, "paper", given=given, **options)

    configs = [some("evcl"), some("vcl"), some("evcl", {"strength": 7.0}), some("evcl", {"epochs": 2}),
               some("vcl", seeds=[5]), some("evcl", {"fisher": "sampled"}), some("evcl", {"tempering": 0.5}),
               some("evcl", {"validation": 0.2}), some("vcl", {"lr": 0.01})]  # fmt: skip
    assert programs(configs, replicas=100) == [[0, 2, 6], [1, 8], [3], [4], [5], [7]]
    assert programs([*configs[:1], *configs[2:3], some("evcl", {"strength": 8.0})], replicas=6) == [[0, 1], [2]]
    rates = [some("ivon", {"curvature_rate": rate}) for rate in ("auto", 0.1, 0.2)]
    assert programs(rates, replicas=100) == [[0], [1, 2]]


@pytest.mark.full
@pytest.mark.parametrize("benchmark", ["permuted-digits", "split-digits"])
def test_settings_that_share_a_program_learn_as_they_do_alone(benchmark):
    given = {"epochs": 3, "init_std": 0.05}
    configs = [configure(benchmark, "evcl", "paper", [3, 1], 3, {**given, "strength": one}) for one in (1.0, 1e4)]
    assert programs(configs, replicas=100) == [[0, 1]]
    for config, found in zip(configs, together(configs), strict=True):
        alone = execute(config)
        assert found.config == alone.config
        for key in MEASURES:
            assert found.measure(key).per_seed == pytest.approx(alone.measure(key).per_seed, abs=0.02)
        assert found.average_accuracy.per_seed == pytest.approx(alone.average_accuracy.per_seed, abs=5e-3)


def test_one_that_fails_says_why():
    configs = [configure("split-digits", "naive", seeds=[0], tasks=1, given=GIVEN)]

    def stop(index, event):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        list(execute_all(configs * 2, stop))
