"""Many tasks with a head each: the time of a task does not grow, and the file loads in seconds. `make test` counts
calls instead: tests/test_many_heads.py.

`python tests/soak/test_heads.py METHOD TASKS` measures it. EVCL distils at most 50 earlier heads, so its time grows
until there are as many.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from cost import measured

import evcl


def taught(method: str, tasks: int, path: Path) -> dict[str, float]:
    """Learn this many tasks, save, load, predict with the last head, infer: seconds of the processor. Those of a task
    are medians over the first, the second and the last tenth of the tasks.
    """
    learner = evcl.Learner(evcl.nn.mlp(4, [8]), method, epochs=1)
    rng = np.random.default_rng(0)
    each = []
    for k in range(tasks):
        x = rng.normal(size=(20, 4)) + k % 7
        start = time.process_time()
        learner.learn(x, np.arange(20) % 2, head="new")
        each.append(time.process_time() - start)
    tenth = max(5, tasks // 10)
    parts = {"first": each[2:tenth], "second": each[tenth : 2 * tenth], "last": each[-tenth:]}
    found = {name: statistics.median(part) for name, part in parts.items()}
    for name, call in {
        "save": lambda: learner.save(path),
        "load": lambda: evcl.load(path),
        "predict": lambda: learner.predict(np.zeros((200, 4)), tasks - 1),
        "infer": lambda: learner.predict(np.zeros((200, 4)), "infer"),
    }.items():
        with measured() as cost:
            call()
        found[name] = cost.seconds
    assert len(evcl.load(path).heads) == tasks
    sys.stderr.write(f"{method}, {tasks} tasks: { ({name: round(value, 4) for name, value in found.items()}) }\n")
    return found


@pytest.mark.soak
@pytest.mark.parametrize("method", ["naive", "ewc", "evcl"])
def test_a_thousand_tasks_with_a_head_each(method, tmp_path):
    found = taught(method, 1000, tmp_path / "m.safetensors")
    assert found["last"] < 1.5 * found["first"]
    assert found["load"] < 3
    assert found["infer"] < 5


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        taught(sys.argv[1], int(sys.argv[2]), Path(place) / "m.safetensors")
