"""The numbers of tables, streams of rows and agents, as they were when NUMBERS was raised.

python tests/test_golden_applications.py   writes tests/golden/applications.json anew. Do so only with a new NUMBERS.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import evcl
from evcl import rl
from evcl.cli import main
from evcl.experiments.store import NUMBERS

FILE = Path(__file__).parent / "golden" / "applications.json"
TABLES = {  # the target, and the options of `evcl learn`
    "class evcl": ("buys", []),
    "class vcl": ("buys", ["--method", "vcl", "--hidden", "12,8"]),
    "class ewc": ("buys", ["--method", "ewc"]),
    "class evcl rows": ("buys", ["--keep", "40"]),
    "number evcl": ("price", []),
    "number ewc": ("price", ["--method", "ewc"]),
    "count evcl": ("visits", ["--kind", "count"]),
}
STREAMS = {  # the target, and the settings of `evcl.Stream`
    "class": ("buys", {}),
    "class units": ("buys", {"covariance": "units"}),
    "class low-rank": ("buys", {"covariance": "low-rank", "rank": 5}),
    "class diagonal": ("buys", {"covariance": "diagonal"}),
    "class mesu": ("buys", {"method": "mesu"}),
    "number": ("price", {"likelihood": "gaussian"}),
    "count": ("visits", {"likelihood": "poisson"}),
}
FILES = {"class": "buys", "number": "price", "count": "visits"}  # of `evcl stream`
OF_AGENTS = ("evcl", "vcl", "ewc", "clear", "naive", "separate")
AGENTS = [*(f"ppo {method}" for method in OF_AGENTS), "dqn evcl", "dqn ewc", "dqn naive"]
CASES = [
    *(f"tables {name}" for name in TABLES),
    *(f"stream {name}" for name in STREAMS),
    *(f"stream file {name}" for name in FILES),
    *(f"agents {name}" for name in AGENTS),
]
SMALL_AGENT = {"steps": 128, "envs": 4, "rollout": 16, "batch_size": 64, "passes": 4, "episodes": 4, "lr": 0.01}
# Another CPU rounds differently: without the compiled update and with SSE alone (see test_golden.py) tables and agents,
# which train in float32, part by up to 5e-5, and streams of rows, which are filtered in float64, by up to 3e-16. Agents
# take few steps: in 512 steps rounding changed an action, and with it every later one.
TOLERANCE = {"tables": 1e-3, "stream": 1e-9, "agents": 1e-3}
MEANT = "raise NUMBERS in experiments/store.py if this is meant, and run python tests/test_golden_applications.py"


def rows(count: int, seed: int, shift: float = 0.0) -> dict[str, np.ndarray]:
    """Customers: a number with gaps, a number, a category, and a class, a number and a count that follow from them."""
    draws = np.random.default_rng(seed)
    age, income = draws.normal(40 + 10 * shift, 10, count).round(1), draws.normal(3, 1, count).round(3)
    city = np.array(["bath", "hull", "york", "leeds"])[draws.integers(0, 3 + (shift > 0), count)]
    score = (age - 40) / 10 + income - 3 + (city == "bath")
    noise = draws.normal(0, 0.3, count)
    return {
        "age": np.where(np.arange(count) % 17 == 0, "", age.astype(str)),
        "income": income,
        "city": city,
        "buys": np.where(score + noise > shift, "yes", "no"),
        "price": (10 + 2 * score + noise).round(3),
        "visits": draws.poisson(np.exp(0.4 * score)),
    }


def written(folder: Path, name: str, target: str, *about: object) -> Path:
    columns = rows(*about)
    names = ["age", "income", "city", target]
    path = folder / f"{name}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *zip(*(columns[key] for key in names), strict=True)])
    return path


def call(*arguments: object) -> str:
    """What a command prints."""
    said = io.StringIO()
    called = mock.patch.object(sys, "argv", ["evcl", *map(str, arguments)])
    with called, contextlib.redirect_stdout(said), pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code, said.getvalue()
    return said.getvalue()


def numbers_of(path: Path) -> dict[str, float]:
    """The mean of every column of predictions, and how often each word stands there."""
    with path.open(newline="") as file:
        table = list(csv.DictReader(file))
    found: dict[str, float] = {}
    for name in list(table[0])[4:]:
        try:
            found[name] = float(np.mean([float(row[name]) for row in table]))
        except ValueError:
            found |= {f"{name} {word}": [row[name] for row in table].count(word) for word in ("no", "yes")}
    return found


def of_a_table(name: str) -> dict[str, float]:
    """Two files are learned, and a third is predicted."""
    target, options = TABLES[name]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        january = written(folder, "january", target, 160, 0)
        february = written(folder, "february", target, 120, 1, 1.0)
        march = written(folder, "march", target, 60, 2, 0.5)
        model, out = folder / "m", folder / "p.csv"
        call("learn", "--model", model, "--data", january, "--target", target, "--epochs", 10, *options)
        call("learn", "--model", model, "--data", february)
        call("predict", "--model", model, "--data", march, "--out", out)
        return numbers_of(out)


def of_a_stream(name: str) -> dict[str, float]:
    target, settings = STREAMS[name]
    old, new = rows(160, 0), rows(160, 1, 1.0)
    halves = [
        [half["age"] == "", half["income"], half["city"] == "bath", half["city"] == "york"] for half in (old, new)
    ]
    x = np.concatenate([np.stack(half, 1) for half in halves])
    y = np.concatenate([half[target] == "yes" if target == "buys" else half[target] for half in (old, new)])
    stream = evcl.Stream(**settings)
    found = evcl.streams.evaluate(stream, (x, y.astype(float if target == "price" else int)), batch=8)
    return {**found.overall, "alarms": len(stream.alarms)}


def of_a_stream_of_a_file(name: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as made:
        path = written(Path(made), "rows", FILES[name], 300, 0)
        told = json.loads(call("stream", path, "--target", FILES[name], "--kind", name, "--json"))
    return told["overall"]


def of_an_agent(name: str) -> dict[str, float]:
    algorithm, method = name.split()
    settings = {**SMALL_AGENT, "algorithm": algorithm}
    found = rl.learn(rl.stream("cartpole-variants", 2), method, settings, [1])
    mean = found.agent.network.posterior.mean.double()
    returns = {f"return {t} {k}": float(found.returns[0, t, k]) for t in range(2) for k in range(t + 1)}
    return {**returns, "weights": float(mean.square().mean().sqrt())}


def measure(case: str) -> dict[str, float]:
    for start, of in {
        "tables ": of_a_table,
        "stream file ": of_a_stream_of_a_file,
        "stream ": of_a_stream,
        "agents ": of_an_agent,
    }.items():
        if case.startswith(start):
            return of(case.removeprefix(start))
    raise KeyError(case)


def kept() -> dict:
    return json.loads(FILE.read_text("utf-8"))


def test_the_file_is_of_this_numerical_version_and_has_every_case():
    assert kept()["numbers"] == NUMBERS, "run python tests/test_golden_applications.py"
    assert list(kept()["cases"]) == CASES, "run python tests/test_golden_applications.py"


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_as_they_were(case):
    wanted, found = kept()["cases"][case], measure(case)
    relative = TOLERANCE[case.split()[0]]
    text = f"{MEANT}\n{case}\nexpected {wanted}\ncame     {found}"
    assert found == pytest.approx(wanted, rel=relative, abs=relative), text


def write() -> None:
    torch.set_num_threads(1)
    lines = [f"  {json.dumps(case)}: {json.dumps(measure(case))}" for case in CASES]
    text = ",\n".join(lines)
    FILE.write_text(f'{{\n "numbers": {NUMBERS},\n "cases": {{\n{text}\n }}\n}}\n', "utf-8")


if __name__ == "__main__":
    write()
    sys.stdout.write(f"wrote {FILE}\n")
