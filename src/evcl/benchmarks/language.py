"""Streams for generative models: one character per task, and texts decade by decade.

Of characters (Nguyen et al., 2018, section 6.2), the pixels are explained, and labels are not used. The texts are the
State of the Union addresses, read as characters, in windows of WINDOW_CHARACTERS. Characters that are rare in the first
decades are one and the same. Of each decade's windows, one in ten is to test; the split is fixed. If a decade has more
than TRAIN_WINDOWS to train on, these are spread evenly over it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl._core.tasks import Examples, Task
from evcl.benchmarks.benchmark import Benchmark, Entry, Request, entry
from evcl.benchmarks.registered import digits, mnist, notmnist
from evcl.data import load_texts
from evcl.nn import VAE, task_vae
from evcl.targets import Bound, NextToken

SOTU_DECADES = "sotu-decades"
WINDOW_CHARACTERS = 64
TRAIN_WINDOWS, TEST_WINDOWS = 2000, 300  # windows per decade
FIRST_YEAR, DECADES = 1790, 23  # until 2019; the 2020s have two addresses
ALPHABET = "\n etaonirshdlcufmpgywbvkxjqz,.-';:\"$0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ?!()"
OTHER = len(ALPHABET)
CHANNELS, KERNEL, DILATIONS = 128, 3, (1, 2, 4, 8)  # of the network: a character sees the 30 before it


class CharacterModel(nn.Module):
    """Causal convolutions: [M, T] characters -> [M, (T - 1) x V] logits of each next character."""

    def __init__(self, vocabulary: int = OTHER + 1, width: int = CHANNELS) -> None:
        super().__init__()
        self.letters = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, KERNEL, dilation=d) for d in DILATIONS)
        self.next = nn.Conv1d(width, vocabulary, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.letters(x[:, :-1]).transpose(1, 2)
        for layer, dilation in zip(self.layers, DILATIONS, strict=True):
            h = h + F.relu(layer(F.pad(h, ((KERNEL - 1) * dilation, 0))))
        logits: Tensor = self.next(h).transpose(1, 2).flatten(1)
        return logits


def bits_per_character(log_likelihood: float) -> float:
    """Of a window whose log-likelihood is this, in nats; its first character is given."""
    return -log_likelihood / ((WINDOW_CHARACTERS - 1) * float(torch.tensor(2.0).log()))


def numbered(text: str) -> Tensor:
    """[n]: the numbers of a text's characters. White space is a space or, if it has one, a line break."""
    place = {letter: i for i, letter in enumerate(ALPHABET)}
    plain = text.translate({0x2019: "'", 0x2018: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: "-"})
    return torch.tensor([place.get(letter, OTHER) for letter in plain], dtype=torch.uint8)


@cache
def _decades(data_dir: Path | None) -> list[tuple[Examples, Examples]]:
    texts, years = load_texts("sotu", data_dir)
    tasks = []
    for k in range(DECADES):
        own = [text for text, year in zip(texts, years.tolist(), strict=True) if year // 10 == k]
        whole = numbered("\n".join(own))
        windows = whole[: len(whole) // WINDOW_CHARACTERS * WINDOW_CHARACTERS].view(-1, WINDOW_CHARACTERS)
        held = torch.arange(len(windows)) % 10 == 9
        parts = (_spread(windows[~held], TRAIN_WINDOWS), _spread(windows[held], TEST_WINDOWS))
        tasks.append(tuple(Examples(part, torch.zeros(len(part), dtype=torch.long)) for part in parts))
    return tasks  # type: ignore[return-value]


def _spread(windows: Tensor, most: int) -> Tensor:
    """At most this many of the windows, at equal distances."""
    rows = torch.arange(min(most, len(windows)))
    return windows[rows * len(windows) // len(rows)]


def _sotu(request: Request) -> Benchmark:
    tasks = []
    for k, parts in enumerate(_decades(request.data_dir)[: request.tasks]):
        name = f"{FIRST_YEAR + 10 * k}s"
        tasks.append(Task(name, name, (0,), *parts))
    return Benchmark(SOTU_DECADES, tasks, network=CharacterModel, seed=request.seed, energy=NextToken())


CHARACTERS = 10
WORDS = {"characters-notmnist": "ABCDEFGHIJ"}


def characters(
    name: str, load: Callable[[Path | None], tuple[Examples, Examples]], network: Callable[[], VAE], samples: int
) -> Entry:
    """A benchmark with one task per character. Pixels are within 0 to 1, and labels are not used."""

    def build(request: Request) -> Benchmark:
        train, test = (_images(part) for part in load(request.data_dir))
        tasks = []
        for k in range(request.tasks):
            called = WORDS.get(name, "0123456789")[k]
            parts = (part.select((part.labels == k).nonzero().flatten()) for part in (train, test))
            tasks.append(Task(called, called, (k,), *parts))
        return Benchmark(name, tasks, network=network, seed=request.seed, energy=Bound(samples=samples))

    return entry(name, build, CHARACTERS, "has one character per task", score="log_likelihood")


def _images(part: Examples) -> Examples:
    """Images [N, 1, height, width], with pixels from 0 to 1."""
    if part.pixels is not None:
        return replace(part, pixels=(0.0, 1.0))
    side = round(part.inputs[0].numel() ** 0.5)
    return replace(part, inputs=part.inputs.view(-1, 1, side, side))


_LARGE = partial(task_vae, 784)
_SMALL = partial(task_vae, 64, width=64, latents=8, encoder_layers=2)
ENTRIES = (
    entry(SOTU_DECADES, _sotu, DECADES, "has one decade per task", score="log_likelihood"),
    characters("characters-mnist", mnist, _LARGE, samples=1000),
    characters("characters-notmnist", notmnist, _LARGE, samples=1000),
    characters("characters-digits", digits, _SMALL, samples=500),
)
