"""The command, in processes that are interrupted and terminated: --resume ends with the same bytes. Kills at any moment
are in tests/safety/test_kills.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from made_up_cells import untimed

from evcl.experiments import configure, execute, merge, read_result
from evcl.training import Checkpoints
from evcl.training.checkpoint import newest

COMMAND = ["run", "split-digits", "--tasks", "3"]
# A plugin: from the 20th step on a process takes its time; the first to come there sends a signal.
AT_A_STEP = """
import multiprocessing, os, signal, time
from evcl.training import Step

step, taken = Step.__call__, 0

def stepped(self, *args):
    global taken
    taken += 1
    if taken >= 20:
        try:
            open("{folder}/sent", "x")
            os.kill({whom}, signal.{how})
        except FileExistsError:
            time.sleep(0.05)
    return step(self, *args)

Step.__call__ = stepped
"""


def start(command, folder, plugin):
    """The command in a session of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plugin.py"
    path.write_text(plugin)
    words = [sys.executable, "-m", "evcl", *command, "--plugin", str(path), "--out", str(folder / "r")]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(words, **options)


def nobody_is_left(session, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def checkpoints(folder):
    return {path.name: newest(path) for path in sorted((folder / "r" / "checkpoint").iterdir())}


def bits(folder):
    """Of every tensor in the programs' last checkpoints: when a run is done, of all that it ends with."""
    return {
        f"{program} {name}": bytes(t.reshape(-1).view(torch.uint8).numpy())
        for program, saved in checkpoints(folder).items()
        for name, t in saved.tensors.items()
    }


def never_interrupted(folder, seeds, epochs):
    """The result, and the bits, of the same run in this process."""
    config = configure("split-digits", "evcl", seeds=seeds, tasks=3, given={"epochs": epochs})
    kept = Checkpoints(folder / "r" / "checkpoint", 0)
    results = [execute(cell, checkpoints=kept) for cell in config.cells]
    return untimed(merge(results)), bits(folder)


@pytest.fixture
def gone_on_with(evcl, monkeypatch):
    """Go on in this process; the last checkpoints are left there for the test to see."""
    monkeypatch.setattr(Checkpoints, "remove", lambda self: None)

    def call(command, folder):
        status, _, err = evcl(*command, "--out", folder / "r", "--resume")
        assert (status, err) == (0, "")
        return untimed(read_result(folder / "r" / "result.json")), bits(folder)

    return call


@pytest.mark.full
@pytest.mark.parametrize(
    ("seeds", "how", "whom"),
    [
        ((7,), "SIGINT", "os.getpid()"),
        ((0, 1), "SIGTERM", "multiprocessing.parent_process().pid"),
        ((0, 1), "SIGTERM", "0"),
    ],
    ids=["Ctrl-C", "SIGTERM, a process a seed", "SIGTERM to all processes"],
)
def test_a_signal_saves_and_says_how_to_go_on(seeds, how, whom, tmp_path, gone_on_with):
    """There is no checkpoint but at the ends of tasks, so that what is gone on from is what the signal saved."""
    command = [*COMMAND, "--epochs", "10", "--checkpoint-seconds", "0", "--seed-list", ",".join(map(str, seeds))]
    process = start(command, tmp_path, AT_A_STEP.format(folder=tmp_path, whom=whom, how=how))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    kept = tmp_path / "r" / "checkpoint"
    again = f"it is saved in {kept}, and the same command with --resume continues from there"
    assert err == f"evcl: interrupted; {again}\n"
    assert nobody_is_left(process.pid)
    abouts = [saved.description for saved in checkpoints(tmp_path).values()]
    places = [(about["round"], about["learned"], about.get("stage")) for about in abouts]
    assert (0, False, 0) in places  # in the first task, which has 50 steps
    assert gone_on_with(command, tmp_path) == never_interrupted(tmp_path / "whole", seeds, 10)


@pytest.mark.soak
def test_the_processes_of_the_seeds(tmp_path, gone_on_with):
    """One of them is killed: another goes on where it was. Then a run's parent: they end with it, and it is gone on."""
    command = [*COMMAND, "--epochs", "10", "--seeds", "2", "--checkpoint-seconds", "0.01"]
    killed = start(command, tmp_path, AT_A_STEP.format(folder=tmp_path, whom="os.getpid()", how="SIGKILL"))
    _, err = killed.communicate(timeout=120)
    assert (killed.returncode, err) == (0, "")
    whole = never_interrupted(tmp_path / "whole", (0, 1), 10)
    assert untimed(read_result(tmp_path / "r" / "result.json")) == whole[0]
    again = tmp_path / "again"
    parent = start(
        command, again, AT_A_STEP.format(folder=again, whom="multiprocessing.parent_process().pid", how="SIGKILL")
    )
    parent.communicate(timeout=120)
    assert parent.returncode == -signal.SIGKILL
    assert nobody_is_left(parent.pid)
    assert gone_on_with(command, again) == whole


DIES = """
import os, signal
from evcl.training import Step

step, taken = Step.__call__, 0

def stepped(self, *args):
    global taken
    taken += 1
    if taken > 30:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args)

Step.__call__ = stepped
"""


@pytest.mark.soak
def test_processes_that_die_again_and_again_leave_what_they_have_done(tmp_path, gone_on_with):
    command = [*COMMAND, "--epochs", "40", "--seeds", "2", "--checkpoint-seconds", "0.01"]
    died = start(command, tmp_path, DIES)
    _, err = died.communicate(timeout=120)
    assert (died.returncode, err.count("\n")) == (1, 1)
    assert "its process ended by SIGKILL, 3 times" in err
    assert "the same command with --resume continues from there" in err
    assert gone_on_with(command, tmp_path) == never_interrupted(tmp_path / "whole", (0, 1), 40)
