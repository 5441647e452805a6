"""Networks of the kinds that people bring, small, and two tasks for each; also used by another process of a test."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import LSTM, ResNet
from torch import nn

import evcl

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


KINDS = {"bert": bert, "peft": peft, "lstm": LSTM, "resnet": ResNet, "two inputs": TwoInputs}


def made(kind):
    """The network, always with the same weights; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return KINDS[kind]()


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
