"""What the commands share: the usage error, common options, and parsing of seeds and --set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from evcl import experiments
from evcl._core.catalogue import AGENT_SUMMARIES, BENCHMARK_SUMMARIES, METHOD_SUMMARIES, ROW_SUMMARIES
from evcl._core.errors import EvclError


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


def takes_options(command: Callable[[Any], None]) -> Callable[..., None]:
    """The command with an option for each field of the dataclass that this function takes, inherited fields last."""
    hints = get_type_hints(command)
    kind = hints[next(name for name in hints if name != "return")]

    def call(**given: object) -> None:
        command(kind(**given))

    own = kind.__annotations__
    annotated = get_type_hints(kind, include_extras=True)
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=annotated[field.name],
        )
        for field in sorted(fields(kind), key=lambda field: field.name not in own)
    ]
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = annotated
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return call


@dataclass(frozen=True, kw_only=True)
class ManyRuns:
    """The options of commands that make many runs: where they are made."""

    engine: Annotated[str, typer.Option("--engine", help="local (processes on this machine) or ray (a cluster).")] = (
        "local"
    )
    address: Annotated[str | None, typer.Option(help="Address of the Ray cluster [start one here].")] = None
    workers: Annotated[int | None, typer.Option(help="Number of parallel processes on a CPU [one per core].")] = None
    device: Device = "auto"
    precision: Precision = None
    plugin: Plugins = None

    def make_engine(self) -> tuple[experiments.MakeEngine, str, str]:
        """A factory of engines, and the device and the precision that their cells use."""
        if self.workers is not None and not 1 <= self.workers <= 4096:
            raise Usage(f"--workers must be a number from 1 to 4096, not {self.workers}")
        if self.engine not in ("local", "ray"):
            raise Usage(f"--engine must be local or ray, not {self.engine!r}")
        if self.engine == "local":
            if self.address is not None:
                raise Usage("--address needs --engine ray")
            with usage():
                device, precision = experiments.where(self.device, self.precision)
            return partial(experiments.local, device, precision, workers=self.workers), device, precision
        from evcl.experiments import ray_engine

        ray_engine.connect(self.address, self.workers)
        device = ray_engine.device_of_cluster() if self.device == "auto" else self.device
        with usage():
            device, precision = experiments.where(device, self.precision, elsewhere=True)
        return partial(ray_engine.Ray, device), device, precision


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
