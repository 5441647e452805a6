"""Streams of characters for generative models: one character per task (Nguyen et al., 2018, section 6.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from evcl._core.catalogue import BENCHMARK_SUMMARIES
from evcl._core.errors import EvclError
from evcl._core.tasks import Examples, Task
from evcl.benchmarks.benchmark import Benchmark, Entry, Request
from evcl.benchmarks.registered import digits, mnist, notmnist
from evcl.nn import VAE, task_vae
from evcl.targets import Bound

CHARACTERS = 10
WORDS = {"characters-notmnist": "ABCDEFGHIJ"}


def characters(
    name: str, load: Callable[[Path | None], tuple[Examples, Examples]], network: Callable[[], VAE], samples: int
) -> Entry:
    """A benchmark with one task per character. Pixels are within 0 to 1, and labels are not used."""

    def build(request: Request) -> Benchmark:
        if request.classes is not None:
            raise EvclError(f"{name} has one character per task: leave classes out")
        train, test = (_images(part) for part in load(request.data_dir))
        tasks = []
        for k in range(request.tasks):
            called = WORDS.get(name, "0123456789")[k]
            parts = (part.select((part.labels == k).nonzero().flatten()) for part in (train, test))
            tasks.append(Task(called, called, (k,), *parts))
        return Benchmark(name, tasks, network=network, seed=request.seed, energy=Bound(samples=samples))

    about = {"seeded": False, "tasks": CHARACTERS, "most_tasks": CHARACTERS, "score": "log_likelihood"}
    return Entry(name, BENCHMARK_SUMMARIES[name], build, **about)  # type: ignore[arg-type]


def _images(part: Examples) -> Examples:
    """Images [N, 1, height, width], with pixels from 0 to 1."""
    if part.pixels is not None:
        return replace(part, pixels=(0.0, 1.0))
    side = round(part.inputs[0].numel() ** 0.5)
    return replace(part, inputs=part.inputs.view(-1, 1, side, side))


_LARGE = partial(task_vae, 784)
_SMALL = partial(task_vae, 64, width=64, latents=8, encoder_layers=2)
ENTRIES = (
    characters("characters-mnist", mnist, _LARGE, samples=1000),
    characters("characters-notmnist", notmnist, _LARGE, samples=1000),
    characters("characters-digits", digits, _SMALL, samples=500),
)
