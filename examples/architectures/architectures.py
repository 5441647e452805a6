"""Three networks in plain PyTorch and the streams that they learn, registered as benchmarks.

`python examples/architectures/compare.py` compares the methods on them. This file is also a plugin:

    evcl run vit-cifar10 --method evcl --plugin examples/architectures/architectures.py --set lr=0.002

`resnet-cifar10`, `vit-cifar10`: the pairs of split-cifar10-rgb, one head each, on a subset of the images: the first
1,000 of each class for training and the first 400 for testing, or the contents of the file that ARCHITECTURES_DATA
names.

`transformer-languages`: five languages over one alphabet. One letter in ten is random; every other letter is determined
by two of the last four letters. Which two, and how, differs between languages. An example is a context of twelve
letters, and its class is the next letter, so that next-letter prediction is classification with one class per letter.
Each language has its own head (the language is known when a continuation is asked for), and all share the trunk, which
can forget where to look and what it means. Each seed has different languages.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from evcl import EvclError
from evcl.benchmarks import Benchmark, Entry, Examples, Request, Task, generator, get, register
from evcl.benchmarks.benchmark import split_tasks

# --- networks --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.GroupNorm(8, outs)
        self.conv2, self.norm2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False), nn.GroupNorm(8, outs)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(ins, outs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Three stages of 16, 32 and 64 channels, after a convolution that halves the image.

    Group norm, not batch norm: it has no statistics, so that no task's images are normalised by another's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU())
        self.stages = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(self.stages(self.stem(x)), 1).flatten(1)


def encoder(layers: int, width: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)


class ViT(nn.Module):
    """A vision transformer: patches of 4 x 4, four layers of width 64; the output is the mean over the patches."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.zeros(1, 64, width))
        self.encoder = encoder(4, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(self.patches(x).flatten(2).transpose(1, 2) + self.places)
        return out.mean(1)


LETTERS, CONTEXT = 8, 12


class Transformer(nn.Module):
    """A causal transformer, two layers of width 64; the output is that at the last letter."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(CONTEXT, width)
        self.encoder = encoder(2, width)

    def forward(self, x: Tensor) -> Tensor:
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        h = self.letters(x) + self.places(torch.arange(x.shape[1], device=x.device))
        out: Tensor = self.encoder(h, mask=causal, is_causal=True)[:, -1]
        return out


# --- streams ---------------------------------------------------------------------------------------------------------

DATA = "ARCHITECTURES_DATA"
Arrays = dict[str, NDArray[np.uint8]]  # train_x, train_y, test_x, test_y: images [N, 3, 32, 32] and labels 0-9
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
WORDS = "plane car bird cat deer dog frog horse ship truck"


def subset(images: int = 2000, test_images: int = 800) -> Arrays:
    """The first images of each class, from evcl's cache; `images` and `test_images` are numbers per task."""
    found: dict[str, list[Tensor]] = {key: [] for key in ("train_x", "train_y", "test_x", "test_y")}
    for task in get("split-cifar10-rgb"):
        for name, part, count in (("train", task.train, images), ("test", task.test, test_images)):
            rows = torch.cat([(part.labels == c).nonzero().flatten()[: count // 2] for c in task.classes])
            found[f"{name}_x"].append(part.inputs[rows])
            found[f"{name}_y"].append(part.labels[rows])
    return {key: torch.cat(parts).to(torch.uint8).contiguous().numpy() for key, parts in found.items()}


def load(path: str) -> Arrays:
    """Read and check a file that `compare.py --export` wrote."""
    try:
        with Path(path).open("rb") as file, np.load(file) as arrays:
            found = dict(arrays)
        for name in ("train", "test"):
            x, y = found[f"{name}_x"], found[f"{name}_y"]
            if x.dtype != np.uint8 or x.shape != (len(y), 3, 32, 32) or y.shape != (len(x),):
                raise ValueError(f"{name}_x is {x.dtype} {x.shape}, {name}_y {y.shape}")
    except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, BadZipFile) as error:
        raise EvclError(f"{path} is not a file that compare.py --export wrote ({error})") from error
    return found


def _images(name: str, network: Callable[[], nn.Module], request: Request) -> Benchmark:
    path = os.environ.get(DATA)
    arrays = load(path) if path else subset()
    train, test = (
        Examples(torch.from_numpy(arrays[f"{key}_x"]), torch.from_numpy(arrays[f"{key}_y"]).long(), pixels=(-1.0, 1.0))
        for key in ("train", "test")
    )
    tasks = split_tasks(train, test, (request.classes or PAIRS)[: request.tasks], WORDS.split())
    return Benchmark(name, tasks, network=network, seed=request.seed)


def text(seed: int, language: int, length: int) -> Tensor:
    """Letters [length] of one of a seed's languages."""
    source = generator(seed, "language", language)
    near, far = sorted((torch.randperm(4, generator=source)[:2] + 1).tolist())
    follows = torch.randint(LETTERS, (LETTERS, LETTERS), generator=source).tolist()
    written = torch.randint(LETTERS, (length,), generator=source).tolist()
    certain = (torch.rand(length, generator=source) < 0.9).tolist()
    for i in range(4, length):
        if certain[i]:
            written[i] = follows[written[i - near]][written[i - far]]
    return torch.tensor(written)


def _languages(name: str, request: Request, train: int = 4000, test: int = 1000) -> Benchmark:
    tasks = []
    for k in range(request.tasks):
        windows = text(request.seed, k, train + test + 2 * CONTEXT).unfold(0, CONTEXT + 1, 1)
        whole = Examples(windows[:, :-1].float(), windows[:, -1])
        parts = whole.select(torch.arange(train)), whole.select(torch.arange(len(windows) - test, len(windows)))
        tasks.append(Task(f"language {k}", f"language {k}", tuple(range(LETTERS)), *parts))
    return Benchmark(name, tasks, network=Transformer, seed=request.seed)


NAMES = ("resnet-cifar10", "vit-cifar10", "transformer-languages")
for _entry in (
    Entry(NAMES[0], "a small ResNet, pairs of CIFAR-10 in colour", partial(_images, NAMES[0], ResNet), seeded=False),
    Entry(NAMES[1], "a small vision transformer, the same pairs", partial(_images, NAMES[1], ViT), seeded=False),
    Entry(NAMES[2], "a small causal transformer, made-up languages", partial(_languages, NAMES[2]), seeded=True),
):
    register(replace(_entry, most_tasks=5))
