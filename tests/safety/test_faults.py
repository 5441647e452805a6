"""Faults: kills, full disks, too little memory of a GPU, clocks that jump, file servers that lag."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import made_up
import numpy as np
import pytest
import torch
from forked import Calls, Killer, calls, ended, forked

import evcl as library
from evcl._core.errors import EvclError
from evcl._core.files import save_tensors, write_atomically, write_once
from evcl.experiments import Store, configure, write_result
from evcl.methods import METHODS, Fit, Learned, Method, register
from evcl.report import write_report
from evcl.tables import learn, load_model, predict

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
ROWS = "x,y\n" + "".join(f"{i % 7},{'ab'[i % 2]}\n" for i in range(40))


@pytest.fixture
def model(tmp_path):
    (tmp_path / "t.csv").write_text(ROWS)
    learn(tmp_path / "m.safetensors", tmp_path / "t.csv", "y", epochs=1, hidden=(50,))
    return tmp_path / "m.safetensors"


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*") if path.suffix in (".tmp", ".lock")]


# --- kills ---------------------------------------------------------------------------------------------------------


def killed_learns(model: Path, times: int, seed: int) -> tuple[int, int]:
    """Kill `evcl learn` this many times; how often the model was the old one afterwards, and how often the new one."""
    data, count = model.with_name("t.csv"), [0, 0]
    killer, k = Killer(lambda: learn(model, data, task="first", epochs=1), seed), 0
    while killer.kills < times:
        before, name, k = load_model(model).learner.tasks, f"task {k}", k + 1
        done = killer.kill(lambda name=name: learn(model, data, task=name, epochs=1))
        after = load_model(model).learner.tasks  # raises if it is damaged
        assert after == (*before, name) or (after == before and not done)
        if not done:
            count[after != before] += 1
    learn(model, data, task="last", epochs=1)
    assert leftovers(model.parent) == []
    return count[0], count[1]


def killed_writers(write: Callable[[], object], path: Path, times: int, seed: int) -> None:
    """What is written again and again, the same each time, is always there as a whole."""
    killer = Killer(write, seed)
    whole = path.read_bytes()
    while killer.kills < times:
        killer.kill(write)
        assert path.read_bytes() == whole
    write()
    assert leftovers(path.parent) == []


def killed_reports(folder: Path, times: int, seed: int) -> None:
    made_up.write(folder, made_up.result(), made_up.result("vcl"))
    killed_writers(lambda: write_report(folder), folder / "index.html", times, seed)


def test_learn_is_killed(model):
    assert sum(killed_learns(model, 4, 0)) == 4


@pytest.mark.full
def test_a_report_is_killed(tmp_path):
    killed_reports(tmp_path, 2, 0)


@pytest.mark.soak
def test_fifty_kills_of_each(model, tmp_path):
    assert sum(killed_learns(model, 50, 1)) == 50
    killed_reports(tmp_path / "runs", 50, 1)
    killed_writers(lambda: predict(model, tmp_path / "t.csv", tmp_path / "p.csv"), tmp_path / "p.csv", 50, 2)


# --- many processes teach one model ---------------------------------------------------------------------------------


def taught(model: Path, processes: int, teachings: int, kills: int, seed: int) -> None:
    """Processes teach one model, each its own tasks. So many of the teachings are killed at one of their calls, most of
    them while they hold the model's lock, and are begun again. In the end each teaching is there once, whole, in the
    order of its process.
    """
    data, source = model.with_name("t.csv"), random.Random(seed)
    lock = model.with_name(f".{model.name}.lock")
    whole = calls(lambda: learn(model, data, task="first", epochs=1))
    before, started = load_model(model).learner.tasks, time.monotonic()
    names = [f"p{i}" for i in range(processes)]
    doomed = source.sample([(name, k) for name in names for k in range(teachings)], kills)
    deaths = {teaching: source.randrange(1, whole + 1) for teaching in doomed}

    def said(name: str) -> list[str]:
        path = model.with_name(f"{name}.said")
        return path.read_text().split() if path.exists() else []

    def teach(name: str, again: bool) -> None:
        for k in range(len(said(name)), teachings):
            fatal = None if again else deaths.get((name, k))
            while True:
                try:
                    with Calls(fatal) if fatal else nullcontext():
                        learn(model, data, task=f"{name}-{k}", epochs=1)
                    break
                except EvclError as error:
                    if again and "is already learned" in str(error):  # it was killed before it could say so
                        break
                    if "at work on it" not in str(error):
                        raise
                    time.sleep(0.02)
            if fatal:  # it needed fewer calls than the first teaching
                os.kill(os.getpid(), signal.SIGKILL)
            again = False
            with model.with_name(f"{name}.said").open("a") as file:
                file.write(f"{name}-{k}\n")

    def begun(name: str, again: bool = False) -> int:
        return forked(lambda: teach(name, again))

    children, done, at_work = {begun(name): name for name in names}, 0, 0
    while children:
        time.sleep(0.005)
        for pid, name in list(children.items()):
            status = ended(pid)
            if status is not None:
                del children[pid]
            if status == -signal.SIGKILL:
                done, at_work = done + 1, at_work + (f"process {pid}" in _text(lock))
                children[begun(name, True)] = name
            else:
                assert status in (0, None), f"{name} ended with {status}"
    tasks = load_model(model).learner.tasks
    assert tasks[: len(before)] == before
    for name in names:
        wanted = [f"{name}-{k}" for k in range(teachings)]
        assert [task for task in tasks if task.startswith(f"{name}-")] == wanted == said(name)
    assert len(tasks) == len(before) + processes * teachings
    assert done == kills
    learn(model, data, task="last", epochs=1)
    assert leftovers(model.parent) == []
    took = time.monotonic() - started
    sys.stderr.write(f"{processes * teachings} teachings, {done} kills, {at_work} of them at work: {took:.0f} s\n")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_some_processes_teach_one_model(model):
    taught(model, 3, 2, 2, 0)


@pytest.mark.soak
def test_a_thousand_teachings(model):
    taught(model, 8, 125, 50, 1)


# --- full disks ----------------------------------------------------------------------------------------------------


def learner() -> library.Learner:
    found = library.Naive(library.nn.mlp(20, [50]), epochs=1)
    found.learn(np.zeros((4, 20), "f"), np.arange(4) % 2)
    return found


def writers(folder: Path, model: Path) -> dict[str, tuple[Path, object]]:
    from evcl.data import cache
    from evcl.experiments.store import Claim
    from evcl.training.checkpoint import write

    big = made_up.result()
    rows = folder / "rows.csv"
    rows.write_text("x\n" + "1\n" * 2000)
    return {
        "model": (folder / "a.safetensors", lambda: learner().save(folder / "a.safetensors")),
        "learn": (model, lambda: learn(model, model.with_name("t.csv"), task="more", epochs=1)),
        "csv": (folder / "p.csv", lambda: predict(model, rows, folder / "p.csv")),
        "parquet": (folder / "p.parquet", lambda: predict(model, rows, folder / "p.parquet")),
        "result": (folder / "r" / "result.json", lambda: write_result(folder / "r", big, overwrite=True)),
        "first result": (folder / "n" / "result.json", lambda: write_result(folder / "n", big)),
        "cell": (folder / "cells" / "k" / "result.json", lambda: Store(folder).complete(Claim("k", 1), big)),
        "checkpoint": (
            folder / "00000001.safetensors",
            lambda: write(folder / "00000001.safetensors", {}, {"a": torch.zeros(1000)}),
        ),
        "data set": (folder / "a.npy", lambda: cache.save(folder / "a.npy", np.zeros(5000, np.uint8))),
        "claim": (folder / "once", lambda: write_once(folder / "once", "x" * 5000)),
        "text": (folder / "text", lambda: write_atomically(folder / "text", lambda t: t.write_text("x" * 5000))),
        "tensors": (folder / "t", lambda: save_tensors(folder / "t", {"a": torch.zeros(1000)}, {})),
        "report": (folder / "reports" / "index.html", lambda: write_report(folder / "reports")),
    }


KINDS = ["model", "learn", "csv", "parquet", "result", "first result", "cell", "checkpoint", "data set", "claim"]
KINDS += ["text", "tensors", pytest.param("report", marks=pytest.mark.full)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk(model, tmp_path, kind):
    """By a limit on the size of files, which also holds for what libraries write."""
    made_up.write(tmp_path / "reports", made_up.result())
    path, write = writers(tmp_path, model)[kind]
    if kind not in ("first result", "claim", "cell"):
        write()
    elif kind == "cell":
        path.parent.mkdir(parents=True)
    before = path.read_bytes() if path.exists() else None
    if kind == "learn":
        write = lambda: learn(model, model.with_name("t.csv"), task="another", epochs=1)  # noqa: E731
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(EvclError) as refused:
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert "cannot write" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (path.read_bytes() if path.exists() else None) == before
    assert leftovers(tmp_path) == []
    write()  # there is room again
    assert path.stat().st_size > 1000


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.fixture
def greedy():
    """A method that learns its first task, and finds too little memory for each later one."""

    def learn(memory, round_, settings):
        if round_.number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nSee documentation")
        fitted = yield Fit(round_.tasks)
        return Learned(fitted.q, memory)

    yield register(Method(name="greedy", summary="needs much memory", bayesian=False, learn=learn)).name
    METHODS.remove("greedy")


def test_the_gpu_has_too_little_memory(evcl, tmp_path, greedy):
    (tmp_path / "t.csv").write_text(ROWS)
    words = ("learn", "--model", "m", "--data", "t.csv", "--epochs", 1)
    assert evcl(*words, "--target", "y", "--method", greedy)[0] == 0
    before = Path("m").read_bytes()
    status, _, err = evcl(*words, "--task", "two")
    assert status == 1
    assert err.count("\n") == 1
    assert "the GPU has too little memory: lower batch_size" in err
    assert Path("m").read_bytes() == before
    assert leftovers(tmp_path) == []
    words = ("run", "split-digits", "--method", greedy, "--epochs", 1, "--tasks", 2, "--seeds", 1)
    assert "the GPU has too little memory" in evcl(*words, "--out", "out")[2]
    assert not Path("out/result.json").exists()


def test_a_learner_goes_on_after_too_little_memory():
    """The round fails as a whole: the learner is as it was, and learns when there is memory again."""

    class Large(torch.nn.Sequential):
        full = False

        def forward(self, x):
            if self.full and len(x) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    with torch.random.fork_rng():
        network = Large(torch.nn.Linear(20, 50), torch.nn.ReLU())
    x, y = np.ones((4, 20), "f"), np.arange(4) % 2
    found = library.Naive(network, epochs=1)
    found.learn(x, y)
    before = found.predict_proba(x)
    Large.full = True
    with pytest.raises(torch.OutOfMemoryError):
        found.learn(x, y)
    Large.full = False
    assert np.array_equal(found.predict_proba(x), before)
    assert found.tasks == ("0",)
    found.learn(x, y)


# --- clocks ---------------------------------------------------------------------------------------

CELL = configure("split-digits", "naive", seeds=[0], tasks=1, given={"epochs": 1})


@pytest.mark.parametrize("jump", [-1e9, 1e9, 3e7])
def test_clocks_that_jump(tmp_path, jump):
    """Whoever waits counts by its own clock, whatever time a file server gives to a live owner's signs of life."""
    with Store(tmp_path) as first, Store(tmp_path) as other:
        assert first.take(CELL) is not None
        (owner,) = (tmp_path / "owners").iterdir()
        for _ in range(3):
            os.utime(owner, (time.time() + jump,) * 2)
            assert other.take(CELL) is None
