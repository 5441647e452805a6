"""A long stream: memory, and the time to train on a task and to consolidate it, do not grow with the tasks.

With its defaults, EVCL gives each permutation a softmax of its own and distils up to 50 of them, so that its time grows
until then.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import pytest

from evcl.experiments import configure, execute
from evcl.training import Run

PAGE = 4096
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@pytest.fixture
def learned(monkeypatch):
    """Learn so many tasks of permuted-digits: the seconds of each, the memory behind each in MB, and the result."""

    def learn(tasks):
        seconds, memory = [], []
        whole = Run.learn

        def timed(self, *arguments, **options):
            start = time.process_time()  # the machine may be busy
            whole(self, *arguments, **options)
            seconds.append(time.process_time() - start)

        def after(event):
            if event.accuracy is not None:
                memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 2**20)

        monkeypatch.setattr(Run, "learn", timed)
        given = {"epochs": 1, "predict_samples": 1, "one_softmax": True, "distill": 0.0}
        result = execute(configure("permuted-digits", "evcl", seeds=[0], tasks=tasks, given=given), after)
        return seconds, memory, result

    return learn


def check(seconds, memory, result, tasks):
    tenth = max(10, tasks // 10)
    first, last = (statistics.median(part) for part in (seconds[10 : 10 + tenth], seconds[-tenth:]))
    assert last < 1.5 * first, f"{1000 * first:.1f} ms a task at first, {1000 * last:.1f} ms at the end"
    assert memory[-2] < memory[9] + 8, f"{memory[9]:.1f} MB after task 10, {memory[-2]:.1f} MB at the end"
    (matrix,) = result.accuracy
    assert [sum(value is not None for value in row) for row in matrix] == list(range(1, tasks + 1))


def test_thirty_tasks(learned):
    check(*learned(30), 30)


@pytest.mark.soak
def test_a_thousand_tasks(learned):
    check(*learned(1000), 1000)
