"""Run a configuration (one benchmark, one method, several seeds) and return its result."""

from __future__ import annotations

import contextlib
import math
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import asdict
from msgspec.structs import replace as replaced
from torch import Tensor

import evcl.experiments.streams  # noqa: F401 - adds streams of rows to the benchmarks
from evcl import benchmarks, methods, metrics, nn
from evcl._core import bounds
from evcl._core.errors import EvclError
from evcl._core.interrupts import deferred
from evcl._core.ranks import Ranks
from evcl._core.settings import SEED, VALIDATION, Settings, resolve
from evcl._core.torchrun import own as own_rank
from evcl.callbacks.logs import Log
from evcl.experiments.generated import uncertainty
from evcl.experiments.presets import preset as get_preset
from evcl.experiments.result import Environment, Matrices, Result, merge, summarise
from evcl.experiments.resume import identity, program_name
from evcl.experiments.samples import picture
from evcl.experiments.trunk import is_text, parsed, trunk
from evcl.likelihoods import CATEGORICAL, Likelihood
from evcl.training import (
    Checkpointer,
    Checkpoints,
    History,
    Observer,
    Observers,
    Progress,
    Run,
    StreamResult,
    learn_stream,
)
from evcl.training.session import Undecided

MOST_SEEDS = bounds.MOST_SEEDS
"""The maximum number of seeds of a run."""
_drawing = threading.Lock()  # there is one generator for all threads


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
    given: Mapping[str, Any] | None = None,
    device: str = "cpu",
    precision: str | None = None,
) -> Config:
    """A checked configuration: the preset's settings, overridden by the `given` ones.

    `method`: None: the one that the benchmark names, which is `evcl` for tasks and `ekf` for streams of rows.

    `given` may also contain `network`, such as "400x400" or "resnet18", in place of the benchmark's own (see
    `experiments.trunk`), and `scenario` (see `benchmarks.scenario`). A preset may name them and a number of tasks, too.

    `precision` is that of matrix products: fp32 (a CPU's default), tf32 (a GPU's) or bf16; all state is float32.
    """
    entry = benchmarks.BENCHMARKS[benchmark]
    method = entry.method if method is None else method
    chosen = method_of(benchmark, method)
    count = benchmarks.check_tasks(entry, tasks)
    if preset in ("paper", "authors") and (entry.kind is not None or entry.score == "log_likelihood"):
        raise EvclError(f"{benchmark} is not in the paper: leave out --preset", setting="preset")
    values = {**get_preset(preset, benchmark, chosen, count), **(given or {})}
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
    if kind is None:
        return methods.get(name)
    found: methods.Method = kind.method(name)
    return found


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


@dataclass(frozen=True)
class Event:
    """The progress of a run: after an epoch or, with `accuracy` (the mean over the tasks seen), after a task.

    With a `note`, there is no progress, but a message for the user.
    """

    seeds: tuple[int, ...]  # the seeds that it concerns
    task: int
    tasks: int
    done: float  # fraction of the whole run, from 0 to 1
    accuracy: float | None = None
    note: str | None = None


OnEvent = Callable[[Event], None]


def execute(
    config: Config,
    on_event: OnEvent | None = None,
    allow_divergence: bool = False,
    ranks: Ranks | None = None,
    checkpoints: Checkpoints | None = None,
) -> Result:
    """Run the configuration, its seeds side by side as replicas, and return the contents of `result.json`.

    If a seed diverges, raise; with `allow_divergence`, record its accuracy as missing. `checkpoints`: see
    `execute_together`.
    """
    return merge(
        execute_together(
            config.cells, lambda _, event: on_event and on_event(event), allow_divergence, ranks, checkpoints
        )
    )


def execute_together(
    cells: Sequence[Config],
    on_event: Callable[[Sequence[int], Event], object] = lambda some, event: None,
    allow_divergence: bool = False,
    ranks: Ranks | None = None,
    checkpoints: Checkpoints | None = None,
) -> list[Result]:
    """The results of cells that share a program (see `bundle`), each as a replica. Its time is divided among them.

    If a cell diverges, raise; with `allow_divergence`, record its accuracy as missing. `on_event(indices, event)` is
    called with the cells of one configuration. `ranks`: the processes that train the cells together, all of which call
    this function. With `checkpoints`, the program saves its state regularly, at Ctrl-C and at SIGTERM, in its own
    folder, and can resume from there. The caller removes the checkpoints once the results are written.

    Seeds that disagree on whether a task is a new domain cannot share a network: each of their cells runs alone.
    """
    kind = benchmarks.BENCHMARKS[cells[0].benchmark].kind
    if kind is not None:
        if ranks is not None:
            raise EvclError(f"{cells[0].benchmark} is learned by a single process: leave out torchrun")
        return kind.execute(cells, on_event, allow_divergence, checkpoints)
    try:
        return _side_by_side(cells, on_event, allow_divergence, ranks, checkpoints)
    except Undecided:
        found = []
        for i, cell in enumerate(cells):
            tell = partial(_tell, on_event, i)
            found += _side_by_side([cell], tell, allow_divergence, ranks, checkpoints)
        return found


def _tell(on_event: Callable[[Sequence[int], Event], object], i: int, some: Sequence[int], event: Event) -> None:
    on_event([i], event)


def _side_by_side(
    cells: Sequence[Config],
    on_event: Callable[[Sequence[int], Event], object],
    allow_divergence: bool,
    ranks: Ranks | None,
    checkpoints: Checkpoints | None,
) -> list[Result]:
    configs = _configurations(cells)
    lead, count = configs[0], len(configs[0].seeds)
    groups = [range(i, i + count) for i in range(0, len(cells), count)]  # the cells of each configuration
    seeded = benchmarks.BENCHMARKS[lead.benchmark].seeded
    streams = [
        benchmarks.get(lead.benchmark, seed, lead.tasks, lead.settings.validation, scenario=lead.scenario or None)
        for seed in (lead.seeds if seeded else lead.seeds[:1])
    ]
    run = Run(
        network(streams[0], lead.network),
        [methods.get(cell.method) for cell in cells],
        [cell.settings for cell in cells],
        [cell.seed for cell in cells],
        draw=True,
        device=lead.device,
        precision=lead.precision,
        allow_divergence=allow_divergence,
        ranks=ranks,
        likelihood=_likelihood(streams[0], cells),
    )
    tasks = len(streams[0])
    now = Event(lead.seeds, 0, tasks, 0.0)

    def hear(group: Sequence[int], event: Event) -> None:
        nonlocal now
        now = event
        on_event(group, event)

    class Reporter(Observer):
        """Reports the cells' progress in a round whose last task is `task`."""

        def __init__(self, task: int) -> None:
            self.task = task

        def end_epoch(self, progress: Progress) -> None:
            done = progress.epoch / progress.epochs
            whole = done if run.method.jointly else (self.task + done) / tasks
            for group in groups:
                hear(group, Event(lead.seeds, self.task, tasks, whole))

    logs = [None if cell.log is None or own_rank() else cell.log.callback(cell.seed) for cell in cells]

    def observer(task: int, names: str) -> Observer:
        histories = [History(names, [log], r) for r, log in enumerate(logs) if log is not None]
        return Observers(Reporter(task), *histories)

    def after_task(task: int, accuracy: Tensor) -> None:
        for group, part in zip(groups, accuracy.split(count), strict=True):
            hear(group, Event(lead.seeds, task, tasks, (task + 1) / tasks, float(part.mean())))

    def note(text: str) -> None:
        on_event(groups[0], replace(now, accuracy=None, note=text))

    infer = lead.scenario in ("domain", "class")
    if infer and run.needs_task:
        note(f"scenario {lead.scenario} does not give the task, which {lead.method} needs to predict: it is inferred")
    machine = environment(lead.device)
    with contextlib.ExitStack() as stack:
        for log in logs:
            if log is not None:
                stack.callback(log.close)
        if checkpoints is None:
            start = time.perf_counter()
            found = learn_stream(run, streams, observer, after_task, infer=infer)
            seconds = time.perf_counter() - start
        else:
            asked = stack.enter_context(deferred())
            stop, own = checkpoints.stop or asked, checkpoints.of(program_name(configs))
            identities = [identity(one) for one in configs]
            checkpointer = Checkpointer(replace(own, stop=stop), identities, asdict(machine), note, ranks)
            found = learn_stream(run, streams, observer, after_task, checkpointer, infer)
            seconds = checkpointer.seconds
    seconds = round(seconds / len(cells), 3)
    shape = {"tasks": tasks, **_trunk(streams[0], lead.network), "precision": lead.precision, "device": lead.device}
    if lead.scenario:
        shape["scenario"] = lead.scenario
    sizes = run.memory_bytes()
    unsure = uncertainty(run, streams[0])
    results = [_result(cell, r, found, shape, seconds, sizes[r], machine) for r, cell in enumerate(cells)]
    if not unsure:
        return results
    return [replaced(one, sample_uncertainty=summarise([u])) for one, u in zip(results, unsure, strict=True)]


def _likelihood(stream: benchmarks.Benchmark, cells: Sequence[Config]) -> Likelihood:
    """What the stream's network minimises. Raises if a method cannot."""
    if stream.energy is None:
        return CATEGORICAL
    for cell in cells:
        methods.check_targets(methods.get(cell.method), cell.settings, stream.energy)
        if cell.scenario:
            raise EvclError(f"{cell.benchmark} has no labels, and so no scenario", setting="scenario")
    return stream.energy


def _configurations(cells: Sequence[Config]) -> list[Config]:
    """The configurations whose seeds are a program's cells."""
    seeds = tuple(dict.fromkeys(cell.seed for cell in cells))
    configs = [replace(cell, seeds=seeds) for cell in cells[:: len(seeds)]]
    if [cell for config in configs for cell in config.cells] != list(cells):
        raise ValueError("a program's cells must be ordered by configuration, each with the same seeds")
    return configs


def network(stream: benchmarks.Benchmark, text: str = "") -> torch.nn.Module:
    """The trunk that learns a stream: its own, or that of the `text`.

    A network may draw from torch's generator, as torch's layers do: it always draws the same numbers, and the
    generator's state is restored afterwards.
    """
    if text:
        return _made(lambda: trunk(text, stream[0].train.inputs.shape[1:]))
    if stream.network is None:
        return nn.mlp(stream.inputs, stream.hidden)
    return _made(stream.network)


def _made(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return make()


def _trunk(stream: benchmarks.Benchmark, text: str) -> dict[str, Any]:
    """The description of the trunk in a result."""
    if text:
        hidden = parsed(text).get("hidden")
        return {"network": text} if hidden is None else {"hidden": hidden, "network": text}
    if stream.network is None:
        return {"hidden": list(stream.hidden)}
    name = getattr(stream.network, "__name__", type(stream.network).__name__)
    return {"network": f"own {name}" if is_text(name) else name}


def environment(device: str) -> Environment:
    from evcl import __version__

    return Environment(
        evcl=__version__,
        torch=str(torch.__version__),
        device=torch.cuda.get_device_name() if device == "cuda" else _processor() + " mps" * (device == "mps"),
        threads=torch.get_num_threads(),
        platform=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    )


@cache
def _processor() -> str:
    """The CPU's name, as far as the platform reports it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "cpu"


def _result(
    cell: Config,
    r: int,
    found: StreamResult,
    shape: Mapping[str, Any],
    seconds: float,
    size: int,
    machine: Environment,
) -> Result:
    """The result of a cell, which is replica r of its program and keeps `size` bytes."""
    matrix = found.accuracy[r].numpy()
    diverged = bool(np.isnan(matrix[-1]).all())  # its predictions are from before it diverged

    def per_task(measure: Callable[[Any, Any], float]) -> float:
        """The mean over tasks, after the last one."""
        each = zip(found.probabilities, found.labels, strict=True)
        return math.nan if diverged else float(np.mean([measure(p[r].cpu(), y[r % len(y)].cpu()) for p, y in each]))

    matrices: Matrices = [[[value if math.isfinite(value) else None for value in row] for row in matrix.tolist()]]
    mean, labelled = summarise([metrics.average_accuracy(matrix)]), bool(found.labels)
    return Result(
        benchmark=cell.benchmark,
        method=cell.method,
        preset=cell.preset,
        config={**cell.settings, **shape},
        seeds=list(cell.seeds),
        accuracy=matrices if labelled else None,
        average_accuracy=mean if labelled else summarise([None]),
        log_likelihoods=None if labelled else matrices,
        log_likelihood=None if labelled else mean,
        samples=None if found.samples is None or diverged else picture(found.samples[r].numpy()),
        forgetting=summarise([metrics.forgetting(matrix)]),
        backward_transfer=summarise([metrics.backward_transfer(matrix)]),
        nll=summarise([per_task(metrics.nll) if labelled else None]),
        ece=summarise([per_task(metrics.expected_calibration_error) if labelled else None]),
        inferred_accuracy={
            how: summarise([math.nan if diverged else float(each[r])])
            for how, each in found.inferred.items()
            if bool(each[r].isfinite())
        },
        seconds=seconds,
        memory_bytes=size,
        environment=machine,
    )
