"""Networks of the kinds that people bring, small, and two tasks for each; also used by another process of a test."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import evcl

HOW = {"epochs": 2, "batch_size": 8, "fisher_examples": 8, "predict_samples": 4, "seed": 2}


class Block(nn.Module):
    """torchvision's BasicBlock."""

    def __init__(self, ins, outs, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False), nn.BatchNorm2d(outs)
        self.downsample = None
        if stride != 1 or ins != outs:
            self.downsample = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """The layers of torchvision's resnet18 without its last one, `width` channels wide at first (there 64)."""

    def __init__(self, width=8):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        ins = width
        for i, outs in enumerate((width, 2 * width, 4 * width, 8 * width)):
            stride = 1 if i == 0 else 2
            setattr(self, f"layer{i + 1}", nn.Sequential(Block(ins, outs, stride), Block(outs, outs, 1)))
            ins = outs
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return torch.flatten(self.avgpool(x), 1)


class Reader(nn.Module):
    """An LSTM on texts of different lengths."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 8, padding_idx=0)
        self.reads = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True, dropout=0.1)

    def forward(self, x):
        lengths = (x != 0).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.reads(packed)
        return torch.cat([h[-2], h[-1]], 1)


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


KINDS = {"bert": bert, "peft": peft, "lstm": Reader, "resnet18": ResNet18, "two inputs": TwoInputs}


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
    if kind == "resnet18":
        return torch.randn(n, 3, 32, 32, generator=source) + y.view(-1, 1, 1, 1), y
    if kind == "two inputs":
        image = torch.randn(n, 1, 6, 6, generator=source)
        return {"image": image, "about": torch.randn(n, 3, generator=source) + y.view(-1, 1)}, y
    ids = torch.randint(3, 20, (n, 8), generator=source) + 18 * y.view(-1, 1)
    there = torch.arange(8) < torch.randint(4, 9, (n, 1), generator=source)
    ids = torch.where(there, ids, 0)
    return (ids if kind == "lstm" else {"input_ids": ids, "attention_mask": there.long()}), y
