"""Commands that are killed at random calls of their code: the same command goes on, and ends with the same result."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from forked import Killer, forked, waited
from local_server import Server, reply
from safetensors import safe_open

from evcl import data
from evcl.cli import main
from evcl.data.catalog import CATALOG
from evcl.streams import commands

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
SEARCH = """benchmarks = ["split-digits:2"]
validation = 0.1
seeds = [100]
trials = 4
preset = "paper"
[methods.ewc]
strength = {low = 1.0, high = 1e4}
epochs = 2
"""
AGENTS = ("--set", "steps=512", "--set", "envs=4", "--set", "rollout=32", "--set", "episodes=2", "--set", "passes=1")
OFTEN = ("--tasks", "3", "--seeds", "1", "--checkpoint-seconds", "1e-6", "--out", "run", "--resume")
RUNS = {
    "agents": ("run", "cartpole-variants", *AGENTS, *OFTEN),
    "replay of agents": ("run", "cartpole-variants", "--method", "clear", *AGENTS, *OFTEN),
    "replay": ("run", "split-digits", "--method", "derpp", "--epochs", "2", *OFTEN),
    "reproduce": ("reproduce", "split-digits", "--method", "vcl", "--seeds", "2", "--epochs", "1", "--workers", "1",
                  "--device", "cpu"),
}  # fmt: skip


def evcl(*words: str) -> Callable[[], None]:
    """A command, to be run in a process of its own; it prints nothing."""

    def work() -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        sys.argv = ["evcl", *words]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise

    return work


def survives(work: Callable[[Path], None], same: Callable[[Path], Any], root: Path, times: int, seed: int) -> None:
    """Run `work` in folders until it was killed this many times, and go on in each until it has ended: what is `same`
    of the folder is then what it is if nobody is killed.
    """

    def there(place: Path) -> None:
        place.mkdir(exist_ok=True)
        os.chdir(place)
        work(place)

    begun, number = time.monotonic(), 0
    killer = Killer(partial(there, root / "whole"), seed)
    wanted = same(root / "whole")
    while killer.kills < times:
        if killer.kill(partial(there, root / str(number))):
            assert same(root / str(number)) == wanted
            number += 1
    assert waited(forked(partial(there, root / str(number))), 600) == 0
    for place in range(number + 1):
        assert same(root / str(place)) == wanted
        assert [path for path in (root / str(place)).rglob(".*") if path.suffix in (".tmp", ".part")] == []
    took = time.monotonic() - begun
    sys.stderr.write(f"{times} kills, {number + 1} ended: {took:.0f} s\n")


def results(folder: Path, pattern: str = "result.json") -> dict[str, Any]:
    """The results of a folder, without the seconds they took."""

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: timeless(one) for key, one in value.items() if "seconds" not in key}
        return [timeless(one) for one in value] if isinstance(value, list) else value

    found = {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob(pattern))}
    assert found
    return {name: timeless(json.loads(text)) for name, text in found.items()}


def tensors(folder: Path) -> dict[str, Any]:
    """The numbers of the model of a stream."""
    with safe_open(folder / "m.safetensors", "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def killed_run(name: str, root: Path, times: int) -> None:
    survives(lambda _: evcl(*RUNS[name])(), results, root, times, list(RUNS).index(name))


def killed_tune(root: Path, times: int) -> None:
    def work(place: Path) -> None:
        (place / "search.toml").write_text(SEARCH)
        evcl("tune", "search.toml", "--device", "cpu", "--workers", "1")()

    survives(work, partial(results, pattern="split-digits-2.json"), root, times, 0)


def killed_stream(root: Path, times: int) -> None:
    rows = np.random.default_rng(0).normal(size=(1500, 3)).round(3)
    lines = [f"{a},{b},{'xy'[int(a + c > 0)]}" for a, b, c in rows.tolist()]

    def work(place: Path) -> None:
        commands.SAVE_EVERY = 0.05
        (place / "rows.csv").write_text("\n".join(["a,b,class", *lines]) + "\n")
        evcl("stream", "rows.csv", "--target", "class", "--out", "m.safetensors", "--quiet")()

    survives(work, tensors, root, times, 3)


def killed_fetch(root: Path, times: int) -> None:
    """From a mirror on this machine that sends a file in pieces, over a second."""
    wanted, files = tiny.web(size=20_000)
    server = Server()

    def slowly(request: Any, name: str) -> None:
        body = files[name]
        start = int((request.headers["Range"] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        reply(request, b"", 206 if start else 200, len(body) - start)
        for first in range(start, len(body), max(1, len(body) // 20)):
            try:
                request.wfile.write(body[first : first + max(1, len(body) // 20)])
            except OSError:  # it was killed
                return
            time.sleep(0.01)

    entry = tiny.entry(wanted, files, mirrors=(server.add("slow", slowly),), most_bytes=2**23)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def work(place: Path) -> None:
        os.environ |= {"EVCL_CACHE": str(place / "cache"), "NO_PROXY": "*"}
        os.environ.pop("EVCL_OFFLINE", None)
        CATALOG.add(entry.name, entry, overwrite=True)
        data.fetch(entry.name)

    def same(place: Path) -> dict[str, bytes]:
        return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*.npy"))}

    try:
        survives(work, same, root, times, 4)
    finally:
        server.done.set()
        server.http.shutdown()
        server.http.server_close()
        thread.join()


KILLED = {"fetch": killed_fetch, "stream": killed_stream, "tune": killed_tune}
KILLED |= {name: partial(killed_run, name) for name in RUNS}


@pytest.mark.parametrize("times", [pytest.param(4, marks=pytest.mark.full), pytest.param(50, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", KILLED)
def test_kills(name, times, tmp_path):
    KILLED[name](tmp_path, times)
