"""A stream of texts for a language model: the State of the Union addresses, decade by decade.

A text is read as characters, in windows of LENGTH. Characters that are rare in the first decades are one and the same.
Of each decade's windows, one in ten is to test; the split is fixed. If a decade has more than MOST windows to train on,
these are spread evenly over it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evcl._core.catalogue import BENCHMARK_SUMMARIES
from evcl._core.errors import EvclError
from evcl._core.tasks import Examples, Task
from evcl.benchmarks.benchmark import Benchmark, Entry, Request
from evcl.data import load_texts
from evcl.targets import NextToken

NAME = "sotu-decades"
LENGTH = 64  # characters of a window
MOST, MOST_TEST = 2000, 300  # windows per decade
FIRST_YEAR, DECADES = 1790, 23  # until 2019; the 2020s have two addresses
ALPHABET = "\n etaonirshdlcufmpgywbvkxjqz,.-';:\"$0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ?!()"
OTHER = len(ALPHABET)
WIDTH, KERNEL, DILATIONS = 128, 3, (1, 2, 4, 8)  # of the network: a character sees the 30 before it


class CharacterModel(nn.Module):
    """Causal convolutions: [M, T] characters -> [M, (T - 1) x V] logits of each next character."""

    def __init__(self, vocabulary: int = OTHER + 1, width: int = WIDTH) -> None:
        super().__init__()
        self.letters = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, KERNEL, dilation=d) for d in DILATIONS)
        self.next = nn.Conv1d(width, vocabulary, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.letters(x[:, :-1]).transpose(1, 2)
        for layer, dilation in zip(self.layers, DILATIONS, strict=True):
            h = h + F.relu(layer(F.pad(h, ((KERNEL - 1) * dilation, 0))))
        found: Tensor = self.next(h).transpose(1, 2).flatten(1)
        return found


def bits_per_character(log_likelihood: float) -> float:
    """Of a window whose log-likelihood is this, in nats; its first character is given."""
    return -log_likelihood / ((LENGTH - 1) * float(torch.tensor(2.0).log()))


def characters(text: str) -> Tensor:
    """[n]: the numbers of a text's characters. White space is a space or, if it has one, a line break."""
    place = {letter: i for i, letter in enumerate(ALPHABET)}
    plain = text.translate({0x2019: "'", 0x2018: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: "-"})
    return torch.tensor([place.get(letter, OTHER) for letter in plain], dtype=torch.uint8)


@cache
def _decades(data_dir: Path | None) -> list[tuple[Examples, Examples]]:
    texts, years = load_texts("sotu", data_dir)
    found = []
    for k in range(DECADES):
        own = [text for text, year in zip(texts, years.tolist(), strict=True) if year // 10 == k]
        whole = characters("\n".join(own))
        windows = whole[: len(whole) // LENGTH * LENGTH].view(-1, LENGTH)
        held = torch.arange(len(windows)) % 10 == 9
        parts = (_spread(windows[~held], MOST), _spread(windows[held], MOST_TEST))
        found.append(tuple(Examples(part, torch.zeros(len(part), dtype=torch.long)) for part in parts))
    return found  # type: ignore[return-value]


def _spread(windows: Tensor, most: int) -> Tensor:
    """At most this many of the windows, at equal distances."""
    rows = torch.arange(min(most, len(windows)))
    return windows[rows * len(windows) // len(rows)]


def _build(request: Request) -> Benchmark:
    if request.classes is not None:
        raise EvclError(f"{NAME} has one decade per task: leave classes out")
    tasks = []
    for k, parts in enumerate(_decades(request.data_dir)[: request.tasks]):
        name = f"{FIRST_YEAR + 10 * k}s"
        tasks.append(Task(name, name, (0,), *parts))
    return Benchmark(NAME, tasks, network=CharacterModel, seed=request.seed, energy=NextToken())


ENTRIES = (
    Entry(
        NAME,
        BENCHMARK_SUMMARIES[NAME],
        _build,
        seeded=False,
        tasks=DECADES,
        most_tasks=DECADES,
        score="log_likelihood",
    ),
)
