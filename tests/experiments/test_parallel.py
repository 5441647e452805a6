from __future__ import annotations

import pytest

from evcl.experiments import configure, execute, execute_all

GIVEN = {"epochs": 1}


def test_runs_in_parallel_are_the_runs_alone():
    configs = [configure("split-digits", m, seeds=[3], tasks=2, given=GIVEN) for m in ("evcl", "naive")]
    events = []
    found = dict(execute_all(configs, lambda index, event: events.append((index, event.task)), workers=2))
    for index, config in enumerate(configs):
        alone = execute(config)
        for key in alone.keys() - {"seconds"}:
            assert found[index][key] == alone[key]
    assert {(0, 0), (0, 1), (1, 0), (1, 1)} == set(events)


def test_one_that_fails_says_why():
    configs = [configure("split-digits", "naive", seeds=[0], tasks=1, given=GIVEN)]

    def stop(index, event):
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        list(execute_all(configs * 2, stop))
