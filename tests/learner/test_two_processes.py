"""Every kind of network learns two tasks, is saved, loaded by another process, and resumed there."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import kinds
import pytest
import torch

import evcl

pytestmark = pytest.mark.filterwarnings("ignore")
NEEDS = {"bert": "transformers", "peft": "peft"}
PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/../nn"]
import kinds, torch
import evcl

kind, folder = sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
learner = evcl.load(folder + "/model.safetensors", kinds.made(kind))
assert learner.tasks == ("first",)
learner.learn(kinds.task(kind, 1), task="second", checkpoint=folder + "/checkpoint")
learner.save(folder + "/after.safetensors")
"""


class Stop(evcl.Callback):
    def end_epoch(self, epoch):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.full
@pytest.mark.parametrize("kind", kinds.KINDS)
def test_two_tasks_in_two_processes(kind, tmp_path):
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind], reason=f"needs the package {NEEDS[kind]}")
    learner = kinds.learner_of(kind)
    (x, y), second = kinds.task(kind, 0), kinds.task(kind, 1)
    learner.learn((x, y), task="first", validation=0.25)
    learner.save(tmp_path / "model.safetensors")
    stopped = evcl.load(tmp_path / "model.safetensors", kinds.made(kind))
    with pytest.raises(KeyboardInterrupt):
        stopped.learn(second, task="second", checkpoint=tmp_path / "checkpoint", callbacks=[Stop()])
    assert (tmp_path / "checkpoint").is_dir()
    here = Path(__file__).parent
    subprocess.run([sys.executable, "-c", PROGRAM, str(here), kind, str(tmp_path)], check=True, timeout=300)
    learner.learn(second, task="second")  # without interruption, in this process
    other = evcl.load(tmp_path / "after.safetensors", kinds.made(kind))
    assert other.tasks == ("first", "second")
    for name in other.tasks:
        torch.testing.assert_close(
            torch.as_tensor(other.predict_proba(x, name)), torch.as_tensor(learner.predict_proba(x, name))
        )
    first = other.card()["tasks"][0]
    assert (first["examples"], first["validation"]["examples"]) == (12, 4)
