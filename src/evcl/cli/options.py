"""What the commands share: the usage error, common options, and parsing of seeds and --set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from evcl import experiments
from evcl._core.errors import EvclError
from evcl._core.summaries import AGENT_SUMMARIES, BENCHMARK_SUMMARIES, METHOD_SUMMARIES, ROW_SUMMARIES


def a_method(incomplete: str) -> list[str]:
    """What a shell completes the name of a method to."""
    return [name for name in METHOD_SUMMARIES | AGENT_SUMMARIES | ROW_SUMMARIES if name.startswith(incomplete)]


def a_benchmark(incomplete: str) -> list[str]:
    return [name for name in BENCHMARK_SUMMARIES if name.startswith(incomplete)]


Plugins = Annotated[
    list[str] | None, typer.Option(metavar="FILE", help="A Python file or module that registers methods or benchmarks.")
]
Preset = Annotated[str, typer.Option(help="Where settings come from: tuned, default, paper or authors; see evcl list.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over each task's data.")]
GivenSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A setting: strength=0.1; see evcl list settings. May be repeated."
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="A local folder with data files [EVCL_DATA].")]
Device = Annotated[str, typer.Option(help="auto (cuda if there is one, else cpu), cpu, cuda or mps.")]
OneDevice = Annotated[str, typer.Option(help="cpu, cuda, mps, or auto: cuda if there is one, else cpu.")]
Precision = Annotated[str | None, typer.Option(help="Precision of matrix products: fp32 [CPU], tf32 [GPU] or bf16.")]
EngineName = Annotated[str, typer.Option("--engine", help="local (processes on this machine) or ray (a cluster).")]
Address = Annotated[str | None, typer.Option(help="Address of the Ray cluster [start one here].")]
Workers = Annotated[int | None, typer.Option(help="Number of parallel processes on a CPU [one per core].")]


def checked_device(name: str) -> str:
    """The device with this name on this machine; raises if there is none."""
    return experiments.where(name, None)[0]


def one_thread() -> None:
    """Let torch use one thread: for small matrix products, two threads are slower than one."""
    import torch

    torch.set_num_threads(1)


class Usage(EvclError):
    """Wrong usage: exit status 2."""


@contextmanager
def usage() -> Iterator[None]:
    """Turn errors inside this block into `Usage` errors: the command is wrong, not the run."""
    try:
        yield
    except EvclError as error:
        raise Usage(str(error), setting=error.setting) from error


def settings(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not value:
            raise Usage(f"--set takes name=value, not {pair!r}")
        if name in found:
            raise Usage(f"--set {name} is given twice")
        found[name] = value
    return found


def first_seeds(count: int) -> list[int]:
    if not 1 <= count <= experiments.MOST_SEEDS:
        raise Usage(f"--seeds must be a number from 1 to {experiments.MOST_SEEDS}, not {count}")
    return list(range(count))


def chosen_seeds(count: int | None, listed: str | None) -> list[int]:
    if listed is None:
        return first_seeds(3 if count is None else count)
    if count is not None:
        raise Usage("--seeds and --seed-list cannot be used together")
    try:
        return [int(seed) for seed in listed.split(",")]
    except ValueError:
        raise Usage(f"--seed-list takes whole numbers separated by commas, not {listed!r}") from None
