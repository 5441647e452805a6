"""One network in two processes that torchrun starts equals one in one process with the same batches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ranked
import torch
from safetensors.torch import load_file
from two_processes import in_two

import evcl
from evcl._core.errors import EvclError
from evcl._core.randomness import GeneratorNoise, PartNoise, generator
from evcl._core.ranks import Ranks, check_batch, joined


def start(*words, **variables):
    """A process on one thread, with these variables, in a group of its own."""
    own = {"PYTHONPATH": str(Path(ranked.__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1", **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen([sys.executable, *map(str, words)], env={**os.environ, **own}, **pipes)


def end(*started):
    """Wait for the processes: (status, standard output, standard error) of each. Nothing that they started is left."""
    try:
        said = [one.communicate(timeout=300) for one in started]
    finally:
        for one in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
    return [(one.returncode, *both) for one, both in zip(started, said, strict=True)]


def torchrun(*arguments):
    """Two processes on this machine: (status, standard output, standard error)."""
    (ended,) = end(start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments))
    return ended


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    in_two(ranked.main, folder, "cpu")
    return lambda name: [load_file(folder / f"{name} {rank}.safetensors") for rank in range(2)]


def close(a, b):
    return torch.allclose(a, b, rtol=1e-9, atol=1e-9) if a.dtype == torch.float64 else torch.allclose(a, b, 1e-5, 1e-5)


@pytest.mark.parametrize("name", ranked.CASES)
def test_two_processes_end_where_one_does(trained, name):
    alone = ranked.train(name, None)
    both = trained(name)
    sums = both[0].pop("sums").tolist()
    del both[1]["sums"]
    for key, wanted in alone.items():
        assert torch.equal(both[0][key], both[1][key]), f"{key} is not the same on both"
        assert close(both[0][key], wanted), f"{key}: {(both[0][key] - wanted).abs().max()}"
    if name != "coresets":  # which have steps of their own
        epochs = len(alone["nll"])
        steps = epochs * -(-ranked.EXAMPLES // ranked.BATCH)
        own = ranked.CASES[name]
        matrices = own[0] == "evcl" and own[3].get("posterior", "auto") == "auto"
        draws = (4 if matrices else max(1, own[3].get("fisher_draws", 0))) * 2
        taught = 2 if ranked.CASES[name][0] == "evcl" else 0  # the second task's Fishers of NLL and distillation
        assert len(sums) == steps + epochs + draws + taught, "one sum a step, one an epoch, one a Fisher"
    if name == "stopped":
        assert len(alone["nll"]) < 40, "nothing stopped"


def test_a_learner_shared_by_two_processes_stops_when_the_first_says(trained):
    alone, both = ranked.learn(None), trained("learner")
    assert alone["epochs"].tolist()[1] == 2
    for key, wanted in alone.items():
        assert torch.equal(both[0][key], both[1][key])
        if key != "account.places":  # an order that rounding decides
            assert close(both[0][key], wanted), key


def test_the_noise_of_parts_is_that_of_the_whole():
    def noise():
        return GeneratorNoise([generator(seed, "whole") for seed in range(2)])

    whole = noise().normal_(torch.empty(2, 7, 3))
    again = torch.empty(2, 14, 2)
    for draw in ("normal_", "uniform_"):
        whole = getattr(noise(), draw)(torch.empty(2, 14, 2))
        for part in (slice(0, 3), slice(3, 7)):  # two rows an example
            getattr(PartNoise(noise(), part, 7), draw)(again[:, 2 * part.start : 2 * part.stop])
        assert torch.equal(whole, again)
        common = getattr(PartNoise(noise(), slice(3, 7), 7).shared(), draw)(torch.empty(2, 4))
        assert torch.equal(common, getattr(noise(), draw)(torch.empty(2, 4)))


def test_the_command_in_two_processes(evcl, tmp_path):
    """The result is that of one process, written and told once."""
    options = ("run", "split-digits", "--seeds", "1", "--epochs", "1", "--tasks", "2", "--set", "batch_size=50")
    options = (*options, "--device", "cpu", "--preset", "paper")  # which no search changes
    in_two(ranked.command, tmp_path, *options, "--out", str(tmp_path / "two"))
    out = "".join((tmp_path / f"said {rank}").read_text() for rank in range(2))
    assert out.count("task 1 of 2 learned") == 1
    assert out.count("result: ") == 1
    assert evcl(*options, "--out", tmp_path / "one")[0] == 0
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    assert one["accuracy"] == two["accuracy"]
    assert one["nll"]["per_seed"] == pytest.approx(two["nll"]["per_seed"], rel=1e-5)
    assert one["config"] == two["config"]


KILLED = """
import os, signal
from evcl.training import Checkpointer

save, saved = Checkpointer.save, 0

def saves(self, position):
    global saved
    saved += 1
    save(self, position)
    if saved == {count} and self.ranks.rank == {rank} and not os.path.exists("{mark}"):
        open("{mark}", "x").close()
        os.kill(os.getpid(), signal.{how})

Checkpointer.save = saves
"""  # one of the processes is killed or stopped once, after a checkpoint


def killed(folder, rank, count, how="SIGKILL"):
    """A plugin that kills the process `rank` once, or stops it, after its checkpoint number `count`."""
    plugin = folder / "killed.py"
    plugin.write_text(KILLED.format(mark=folder / "mark", rank=rank, count=count, how=how))
    return plugin


@pytest.mark.full
def test_the_command_in_two_processes_is_resumed(tmp_path):
    """With coresets: a round has two fits."""
    options = ("-m", "evcl", "run", "split-digits", "--method", "vcl-random-coreset", "--epochs", "5", "--tasks", "2")
    options = (*options, "--seeds", "2", "--device", "cpu", "--checkpoint-seconds", "1e-6")
    assert torchrun(*options, "--out", tmp_path / "whole")[0] == 0
    options = (*options, "--out", tmp_path / "part", "--plugin", killed(tmp_path, rank=0, count=7))
    assert torchrun(*options)[0] != 0
    assert (tmp_path / "mark").exists()
    assert not (tmp_path / "part" / "result.json").exists()
    status, out, err = torchrun(*options, "--resume")
    assert status == 0, err
    assert "holds no checkpoint" not in out
    whole, part = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "part"))
    assert {**whole, "seconds": 0} == {**part, "seconds": 0}
    assert [path.name for path in (tmp_path / "part").iterdir()] == ["result.json"]


@pytest.mark.full
def test_more_processes_than_examples_is_one_line(tmp_path):
    options = ("-m", "evcl", "run", "split-digits", "--set", "batch_size=1", "--out", tmp_path / "none")
    status, out, err = torchrun(*options, "--device", "cpu")
    assert status != 0
    assert [line for line in err.splitlines() if line.startswith("evcl:")] == [
        "evcl: 2 processes cannot share batches of 1 examples: start at most 1, or set a larger batch_size"
    ]
    assert not out
    assert not (tmp_path / "none").exists()


def test_only_run_is_for_torchrun(evcl, monkeypatch):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    status, _, err = evcl("list")
    assert status == 2
    assert err == "evcl: torchrun works only with evcl run: start evcl list without it\n"


def test_what_torchrun_should_have_set(monkeypatch, evcl):
    monkeypatch.setenv("WORLD_SIZE", "two")
    status, _, err = evcl("list")
    assert status == 1
    assert err == "evcl: WORLD_SIZE must be a whole number, as set by torchrun, not 'two'\n"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(EvclError, match="RANK must be a whole number"), joined():
        pass


@pytest.mark.parametrize(
    ("backends", "capturable"),
    [("cpu:gloo,cuda:gloo", False), ("cpu:gloo", False), ("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True)],
)
def test_only_sums_of_nccl_are_captured(backends, capturable, monkeypatch):
    for name, value in (("get_rank", 0), ("get_world_size", 2), ("get_backend_config", backends)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    assert Ranks().capturable == capturable


def test_one_process_needs_no_group():
    with joined() as ranks:
        assert ranks is None
    check_batch(1, 1)
    with pytest.raises(EvclError, match="2 processes cannot share batches of 1 examples: start at most 1"):
        check_batch(1, 2)


class Alone:
    """A group of which this is the only one: enough to see what is refused before anything is sent."""

    rank, size = 0, 1


def test_a_batch_norm_that_measures_needs_the_whole_batch():
    layers = torch.nn.utils.skip_init(torch.nn.Linear, 6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU()
    data = ranked.task(0, torch.float32)
    learner = evcl.VCL(torch.nn.Sequential(*layers), init="draw").share(Alone())
    with pytest.raises(EvclError, match="a BatchNorm measures statistics of whole batches"):
        learner.learn((data.x[0], data.y[0]), epochs=1)


PATIENCE = """
from datetime import timedelta
from evcl._core import ranks

ranks.COLLECTIVE_TIMEOUT = timedelta(seconds=8)
"""


def by_hand(*arguments, hangs=False):
    """Two processes that nobody watches, as on two machines: (status, standard output, standard error) of each. If the
    second `hangs`, it is killed when the first has ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    first, second = (start("-m", "evcl", *arguments, RANK=rank, LOCAL_RANK=rank, **group) for rank in ("0", "1"))
    if not hangs:
        return end(first, second)
    try:
        (ended,) = end(first)
    finally:
        os.killpg(second.pid, signal.SIGKILL)
    return [ended, *end(second)]


@pytest.mark.full
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_process_that_is_lost_ends_the_other_with_one_line(how, tmp_path):
    """It was killed, or it hangs: then the other gives up after a time, here of 8 seconds."""
    options = ("run", "split-digits", "--method", "evcl", "--preset", "paper", "--epochs", "2", "--tasks", "2")
    options = (*options, "--seeds", "1", "--device", "cpu", "--checkpoint-seconds", "1e-6", "--set", "batch_size=100")
    assert [status for status, *_ in by_hand(*options, "--out", tmp_path / "whole")] == [0, 0]
    plugin = killed(tmp_path, rank=1, count=4, how=how)
    plugin.write_text(plugin.read_text() + PATIENCE)
    options = (*options, "--out", tmp_path / "part", "--plugin", plugin)
    (status, _, err), (lost, *_) = by_hand(*options, hangs=how == "SIGSTOP")
    assert (status, lost) == (1, -signal.SIGKILL)
    (line,) = [line for line in err.splitlines() if line.startswith("evcl: ")]
    assert "another process of this run has ended, or does not answer" in line
    assert [status for status, *_ in by_hand(*options, "--resume")] == [0, 0]
    whole, part = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "part"))
    assert {**whole, "seconds": 0} == {**part, "seconds": 0}
