from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from pathlib import Path

import pytest
from made_up_cells import untimed

from evcl.experiments import configure, execute, execute_all, merge
from evcl.experiments.programs import programs
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

    configs = [some("evcl"), some("vcl"), some("ewc"), some("evcl", {"strength": 7.0}), some("evcl", {"epochs": 2}),
               some("vcl", seeds=[5]), some("evcl", {"fisher": "sampled"}), some("joint"), some("naive"), some("lwf"),
               some("vcl", {"std_update": "natural"})]  # fmt: skip
    assert programs(configs, replicas=100) == [[0, 1, 3, 6], [2, 8, 9], [4], [5], [7], [10]]
    assert programs(configs[:4], replicas=6) == [[0, 1], [2], [3]]
    coresets = [some(name) for name in ("vcl", "vcl-random-coreset", "vcl-kcenter-coreset", "random-coreset")]
    assert programs([*coresets, some("kcenter-coreset")], replicas=100) == [[0], [1, 2], [3, 4]]
    for method in ("noisy-kfac", "td-vcl"):  # each of their fits has a rule or a sampler of its own
        assert programs([some(method, {"coreset": kind}) for kind in ("random", "kcenter")], replicas=100) == [[0], [1]]
    rates = [some("ivon", {"curvature_rate": rate}) for rate in ("auto", 0.1, 0.2)]
    assert programs(rates, replicas=100) == [[0], [1, 2]]


BAYESIAN = {"epochs": 3, "init_std": 0.05}
SHARING = {
    "permuted-digits": [
        ("evcl", {**BAYESIAN, "strength": 1.0}),
        ("vcl", BAYESIAN),
        ("evcl", {**BAYESIAN, "strength": 1e4}),
        ("evcl", {**BAYESIAN, "strength": 1.0, "fisher": "empirical"}),
    ],
    "split-digits": [("ewc", {"epochs": 3}), ("lwf", {"epochs": 3, "strength": 5.0}), ("naive", {"epochs": 3})],
}


@pytest.mark.full
@pytest.mark.parametrize("benchmark", SHARING)
def test_methods_that_share_a_program_learn_as_they_do_alone(benchmark):
    configs = [configure(benchmark, method, "paper", [3, 1], 3, given) for method, given in SHARING[benchmark]]
    assert programs(configs, replicas=100) == [list(range(len(configs)))]
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


def test_both_kinds_of_coreset_share_a_program():
    for kind in ("vcl-{}-coreset", "{}-coreset"):
        given = {"epochs": 2, "coreset_size": 20}
        configs = [
            configure("permuted-digits", kind.format(name), seeds=[3, 1], tasks=2, given=given)
            for name in ("random", "kcenter")
        ]
        for config, found in zip(configs, together(configs), strict=True):
            alone = execute(config)
            assert found.config == alone.config
            for key in MEASURES:
                assert found.measure(key).per_seed == pytest.approx(alone.measure(key).per_seed, abs=0.02)
