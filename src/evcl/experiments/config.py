"""A configuration: one benchmark, one method and its settings, several seeds; checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from evcl import benchmarks, methods
from evcl._core import bounds
from evcl._core.errors import EvclError
from evcl._core.settings import SEED, VALIDATION, Settings, resolve
from evcl.experiments.config_file import Space
from evcl.experiments.known import preset as get_preset
from evcl.experiments.trunk import parsed

if TYPE_CHECKING:
    from evcl.callbacks.logs import Log

MOST_SEEDS = bounds.MOST_SEEDS
"""The maximum number of seeds of a run."""


@dataclass(frozen=True)
class Config:
    """Everything that determines a result, checked."""

    benchmark: str
    method: str
    preset: str
    seeds: tuple[int, ...]
    tasks: int
    settings: Settings  # the method's, and `validation`
    device: str = "cpu"
    precision: str = "fp32"
    network: str = ""  # a network in place of the benchmark's own, as text: see trunk.py
    scenario: str = ""  # task, domain or class; empty: the benchmark's own
    log: Log | None = field(default=None, compare=False)  # does not affect the result

    @property
    def name(self) -> str:
        return f"{self.benchmark} {self.method}"

    @property
    def cells(self) -> list[Config]:
        """One cell per seed: a cell is a configuration of one seed."""
        return [replace(self, seeds=(seed,)) for seed in self.seeds]

    @property
    def seed(self) -> int:
        """The seed, if this is a cell."""
        (seed,) = self.seeds
        return seed


def configure(
    benchmark: str,
    method: str | None = None,
    preset: str = "tuned",
    seeds: Sequence[int] = (0, 1, 2),
    tasks: int | None = None,
    given: Mapping[str, object] | None = None,
    device: str = "cpu",
    precision: str | None = None,
) -> Config:
    """A checked configuration: the preset's settings, overridden by the `given` ones.

    `method`: None: the one that the benchmark names, which is `evcl` for tasks and `ekf` for streams of rows.

    `given` may also contain `network`, such as "400x400" or "resnet18", in place of the benchmark's own (see
    `experiments.trunk`), and `scenario` (see `benchmarks.SCENARIOS`). A preset may name them, and a number of tasks.

    `precision` is that of matrix products: fp32 (a CPU's default), tf32 (a GPU's) or bf16; all state is float32.
    """
    entry = benchmarks.BENCHMARKS[benchmark]
    method = entry.method if method is None else method
    chosen = method_of(benchmark, method)
    count = benchmarks.check_tasks(entry, tasks)
    if preset in ("paper", "authors") and (entry.kind is not None or entry.score == "log_likelihood"):
        raise EvclError(f"{benchmark} is not in the paper: leave out --preset", setting="preset")
    values: Space = {**get_preset(preset, benchmark, chosen, count), **(given or {})}
    usual = values.pop("tasks", None)
    count = count if tasks is not None or usual is None else benchmarks.check_tasks(entry, usual)
    network = str(values.pop("network", ""))
    if network:
        parsed(network)
    scenario = str(values.pop("scenario", ""))
    if scenario and scenario not in benchmarks.SCENARIOS:
        known_ones = ", ".join(benchmarks.SCENARIOS)
        raise EvclError(f"scenario must be one of {known_ones}, not {scenario!r}", setting="scenario")
    own = methods.known_settings(chosen, values) if entry.kind is None else chosen.known_settings
    known = {**own, "validation": VALIDATION}
    if "epochs" in values and "steps" in known and "epochs" not in known:
        raise EvclError(
            f"{benchmark} has no epochs: --set steps=N sets the environment steps per task", setting="epochs"
        )
    settings = resolve(method, known, values)
    if not 0 < len(seeds) <= MOST_SEEDS:
        raise EvclError(f"the number of seeds must be from 1 to {MOST_SEEDS}, not {len(seeds)}", setting="seeds")
    seeds = tuple(int(SEED.check("seed", seed)) for seed in seeds)
    if len(set(seeds)) != len(seeds):
        raise EvclError(f"seeds must be different numbers, not {list(seeds)}", setting="seeds")
    device = "cpu" if entry.cpu and device == "auto" else device
    return Config(benchmark, method, preset, seeds, count, settings, *where(device, precision), network, scenario)


def method_of(benchmark: str, name: str) -> methods.Method:
    """The method with the settings that it has on this benchmark."""
    kind = benchmarks.BENCHMARKS[benchmark].kind
    if kind == "rows":
        from evcl.experiments import streams

        return streams.method(name)
    if kind == "agents":
        from evcl import rl

        return rl.method(name, benchmark)
    return methods.get(name)


def where(device: str, precision: str | None, elsewhere: bool = False) -> tuple[str, str]:
    """Check the device and the precision of matrix products, and replace `auto` and None by the actual values.

    `elsewhere`: the cells run on other machines, so this one need not have such a device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not elsewhere and not torch.cuda.is_available():
        raise EvclError("device cuda cannot be used: torch finds no GPU here")
    if device == "mps" and elsewhere:
        raise EvclError("device mps is for this machine only: use --engine local, or another device")
    if device == "mps" and not torch.backends.mps.is_available():
        raise EvclError("device mps cannot be used: torch finds no Apple GPU here")
    known = {"cpu": ("fp32", "bf16"), "cuda": ("tf32", "fp32", "bf16"), "mps": ("fp32",)}
    if device not in known:
        raise EvclError(f"device must be auto, cpu, cuda or mps, not {device!r}")
    precision = known[device][0] if precision is None else precision
    if precision not in known[device]:
        raise EvclError(f"precision on {device} must be one of {', '.join(known[device])}, not {precision!r}")
    return device, precision
