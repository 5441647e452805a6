"""Every kind of network learns two tasks, is saved, loaded by another process, and resumed there."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from checks import quietly
from models import lstm, resnet
from torch import nn

import evcl

pytestmark = pytest.mark.filterwarnings("ignore")
NEEDS = {"bert": "transformers", "peft": "peft"}
PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/..", sys.argv[1] + "/../nn"]
import torch
import evcl
from test_two_processes import made, task

kind, folder = sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
learner = evcl.load(folder + "/model.safetensors", made(kind))
assert learner.tasks == ("first",)
learner.learn(task(kind, 1), task="second", checkpoint=folder + "/checkpoint")
learner.save(folder + "/after.safetensors")
"""
HOW = {"epochs": 2, "batch_size": 8, "fisher_examples": 8, "predict_samples": 4, "seed": 2}


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.about, self.out = nn.Conv2d(1, 4, 3), nn.Linear(3, 8), nn.Linear(24, 8)

    def forward(self, image, about):
        seen = F.adaptive_avg_pool2d(torch.relu(self.image(image)), 2).flatten(1)
        return torch.relu(self.out(torch.cat([seen, torch.relu(self.about(about))], 1)))


def bert():
    import transformers

    small = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**small, intermediate_size=32, max_position_embeddings=32)
    return transformers.BertForSequenceClassification(config).eval()


def peft():
    import peft

    return peft.get_peft_model(bert(), peft.LoraConfig(r=2, target_modules=["query", "value"]))


KINDS = {"bert": bert, "peft": peft, "lstm": lstm, "resnet": resnet, "two inputs": TwoInputs}


def made(kind):
    """The network, always with the same weights."""
    return quietly(KINDS[kind])


def learner_of(kind):
    return evcl.EVCL(made(kind), **HOW, prior="network" if kind in ("bert", "peft") else "zero")


def task(kind, k, n=16):
    """The inputs and labels of task k."""
    source, y = torch.Generator().manual_seed(k), torch.arange(n) % 2
    if kind == "resnet":
        return torch.randn(n, 1, 12, 12, generator=source) + y.view(-1, 1, 1, 1), y
    if kind == "two inputs":
        image = torch.randn(n, 1, 6, 6, generator=source)
        return {"image": image, "about": torch.randn(n, 3, generator=source) + y.view(-1, 1)}, y
    words = 4 if kind == "lstm" else 18
    ids = torch.randint(1, 1 + words, (n, 8), generator=source) + words * y.view(-1, 1)
    there = torch.arange(8) < torch.randint(4, 9, (n, 1), generator=source)
    ids = torch.where(there, ids, 0)
    return (ids if kind == "lstm" else {"input_ids": ids, "attention_mask": there.long()}), y


class Stop(evcl.Callback):
    def end_epoch(self, epoch):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_two_tasks_in_two_processes(kind, tmp_path):
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind], reason=f"needs the package {NEEDS[kind]}")
    learner = learner_of(kind)
    (x, y), second = task(kind, 0), task(kind, 1)
    learner.learn((x, y), task="first", validation=0.25)
    learner.save(tmp_path / "model.safetensors")
    stopped = evcl.load(tmp_path / "model.safetensors", made(kind))
    with pytest.raises(KeyboardInterrupt):
        stopped.learn(second, task="second", checkpoint=tmp_path / "checkpoint", callbacks=[Stop()])
    assert (tmp_path / "checkpoint").is_dir()
    here = Path(__file__).parent
    subprocess.run([sys.executable, "-c", PROGRAM, str(here), kind, str(tmp_path)], check=True, timeout=300)
    learner.learn(second, task="second")  # without interruption, in this process
    other = evcl.load(tmp_path / "after.safetensors", made(kind))
    assert other.tasks == ("first", "second")
    for name in other.tasks:
        torch.testing.assert_close(
            torch.as_tensor(other.predict_proba(x, name)), torch.as_tensor(learner.predict_proba(x, name))
        )
    first = other.card()["tasks"][0]
    assert (first["examples"], first["validation"]["examples"]) == (12, 4)
