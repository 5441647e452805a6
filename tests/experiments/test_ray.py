"""Sweeps on a Ray cluster: what is lost on the way is run again, and the results are those of this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_up_cells import untimed

from evcl._core.errors import EvclError
from evcl.experiments import Store, configure, local, ray_engine, work
from evcl.experiments.store import key

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'evcl[ray]'"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own files and processes
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def cluster():
    """Three nodes of one core, on this machine."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    nodes.add_node(num_cpus=1)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def busy_worker():
    """A process of ours that runs a program now; None if there is none."""
    parents, titles = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(path.name)] = (path / "cmdline").read_text()
        except OSError:
            continue

    def ours(pid):
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    return next((pid for pid, title in titles.items() if title.startswith("ray::_run") and ours(pid)), None)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds its workers in /proc")
@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.soak)])
def test_a_node_is_removed_and_a_worker_killed_and_every_cell_has_its_result(count, cluster, tmp_path):
    config = configure("split-digits", "evcl", seeds=range(count), tasks=2, given={"epochs": 2})
    cells = config.cells
    ray_engine.connect(cluster.address)
    found, events = {}, work(cells, Store(tmp_path / "ray"), lambda heard: ray_engine.Ray("cpu", heard))
    for i, result in events:
        assert i not in found
        found[i] = result
        if len(found) == max(count // 10, 2):
            begun = time.monotonic()
            while (victim := busy_worker()) is None:
                assert time.monotonic() - begun < 60
                time.sleep(0.002)
            os.kill(victim, signal.SIGKILL)
        if len(found) == max(count // 4, 3):
            cluster.remove_node(sorted(cluster.worker_nodes, key=lambda node: node.node_id)[0], allow_graceful=False)
    assert len(cluster.worker_nodes) == 1
    here = dict(work(cells, Store(tmp_path / "local"), lambda heard: local("cpu", "fp32", heard)))
    assert found.keys() == here.keys() == set(range(count))
    for i, cell in enumerate(cells):
        assert untimed(found[i]) == untimed(here[i])
        files = {path.name for path in (tmp_path / "ray" / "cells" / key(cell)).iterdir()}
        assert files == {"claim-1.json", "result.json"}


def test_ray_that_is_not_there_is_said_in_one_line(evcl, monkeypatch, tmp_path):
    (tmp_path / "s.toml").write_text('benchmarks = ["split-digits:1"]\nmethods = ["naive"]\n')
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, and nobody listens
        address = f"127.0.0.1:{held.getsockname()[1]}"
        status, _, err = evcl("sweep", "s.toml", "--engine", "ray", "--address", address)
    assert (status, err.count("\n")) == (1, 1)
    assert f"Ray cannot be used at {address}" in err
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(EvclError, match=r"--engine ray needs Ray: pip install 'evcl\[ray\]'"):
        ray_engine.connect(None)


class Lost:
    """A cluster that runs one program, and whose head is lost then."""

    def __init__(self):
        self.exceptions = SimpleNamespace(RayError=KeyError)
        self.waits = 0

    def remote(self, **_):
        return lambda run: SimpleNamespace(remote=lambda *args: partial(run, *args))

    def cluster_resources(self):
        return {"CPU": 2.0}

    def wait(self, refs, **_):
        self.waits += 1
        if self.waits > 1:
            raise ConnectionError("failed to\nconnect")
        return refs[:1], refs[1:]

    def get(self, ref):
        return ref()

    def cancel(self, *_, **__):
        raise ConnectionError


@pytest.mark.full
def test_a_head_that_is_lost_is_said_in_one_line_and_another_engine_goes_on(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", Lost())
    cells = configure("split-digits", "naive", seeds=range(3), tasks=1, given={"epochs": 1}).cells
    found = {}

    def sweep():
        for i, result in work(cells, Store(tmp_path), lambda heard: ray_engine.Ray("cpu", heard)):
            found[i] = result

    with pytest.raises(EvclError, match=r"cannot be reached any more \(failed to connect\): give the same command"):
        sweep()
    assert len(found) == 1
    rest = dict(work(cells, Store(tmp_path), lambda heard: local("cpu", "fp32", heard)))
    assert rest.keys() == {0, 1, 2}
    assert all(rest[i] == result for i, result in found.items())
