"""Run a configuration (one benchmark, one method, several seeds) and return its result."""

from __future__ import annotations

import contextlib
import math
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from msgspec.structs import asdict
from msgspec.structs import replace as replaced
from numpy.typing import NDArray
from torch import Tensor

from evcl import benchmarks, methods, metrics, nn, training
from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose, generator
from evcl._core.ranks import Ranks
from evcl._core.torchrun import own as own_rank
from evcl.benchmarks import Benchmark
from evcl.experiments.config import Config
from evcl.experiments.folder import identity, interruptible
from evcl.experiments.result import Environment, Matrices, Result, Summary, binned, merge, summarise
from evcl.experiments.samples import picture
from evcl.experiments.trunk import is_text, parsed, trunk
from evcl.methods.parts import in_force
from evcl.targets import CATEGORICAL, Likelihood
from evcl.training import (
    Checkpointer,
    Checkpoints,
    Observer,
    Observers,
    Progress,
    Run,
    StreamResult,
    learn_stream,
)
from evcl.training.session import Undecided

_drawing = threading.Lock()  # there is one generator for all threads


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


OnEvent = Callable[[Event], object]
OnEvents = Callable[[Sequence[int], Event], object]
REPLICAS = 100  # at most this many cells train side by side


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
    on_event: OnEvents = lambda some, event: None,
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
        if kind == "rows":
            from evcl.experiments.streams import execute as run
        else:
            from evcl.experiments.agents import execute as run
        return run(cells, on_event, allow_divergence, checkpoints)
    try:
        return _side_by_side(cells, on_event, allow_divergence, ranks, checkpoints)
    except Undecided:
        results = []
        for i, cell in enumerate(cells):
            tell = partial(lambda i, some, event: on_event([i], event), i)
            results += _side_by_side([cell], tell, allow_divergence, ranks, checkpoints)
        return results


class Seeds:
    """The progress of a configuration whose seeds train apart: events of single seeds become events of all."""

    def __init__(self, config: Config, on_event: Callable[[Event], object]) -> None:
        self.on_event = on_event
        self.done = dict.fromkeys(config.seeds, 0.0)

    def __call__(self, event: Event) -> None:
        self.done |= dict.fromkeys(event.seeds, event.done)
        self.on_event(replace(event, done=sum(self.done.values()) / len(self.done)))


def execute_seeds(
    config: Config,
    on_event: Callable[[Event], object],
    allow_divergence: bool = False,
    workers: int | None = None,
    ranks: Ranks | None = None,
    checkpoints: Checkpoints | None = None,
) -> Result:
    """Run a configuration on this machine: on a CPU each of several seeds in a process of its own, at most `workers` at
    a time; on a GPU side by side. With `ranks`, several processes train all seeds side by side.
    """
    if ranks is not None or len(config.seeds) == 1:
        return execute(config, on_event, allow_divergence, ranks, checkpoints)
    if config.device == "cpu":
        return _in_processes(config, Seeds(config, on_event), allow_divergence, workers, checkpoints)
    heard, size, results = Seeds(config, on_event), REPLICAS if config.device == "cuda" else 1, list[Result]()
    for first in range(0, len(config.seeds), size):
        cells = config.cells[first : first + size]
        results += execute_together(cells, lambda _, event: heard(event), allow_divergence, checkpoints=checkpoints)
    return merge(results)


def _in_processes(
    config: Config, heard: Seeds, allow_divergence: bool, workers: int | None, checkpoints: Checkpoints | None
) -> Result:
    from evcl.experiments.engines import Processes, cores

    todo, results = deque(enumerate(config.cells)), dict[int, Result]()
    engine = Processes(workers or cores(), lambda i, some, event: heard(event), allow_divergence)
    try:
        while len(results) < len(config.seeds):
            while todo and engine.free():
                i, cell = todo.popleft()
                engine.start(i, [cell], checkpoints)
            for i, outcome in engine.ended(30.0):
                if isinstance(outcome, Exception):
                    raise outcome
                (results[i],) = outcome
    finally:
        engine.close()
    return merge([results[i] for i in range(len(results))])


class Reports(Observer):
    """Passes on the progress of a program: its events are those of one configuration each."""

    def __init__(self, configs: Sequence[Config], tasks: int, jointly: bool, on_event: OnEvents) -> None:
        self.seeds, self.tasks, self.jointly, self.on_event = configs[0].seeds, tasks, jointly, on_event
        count = len(self.seeds)
        self.groups = [range(i * count, (i + 1) * count) for i in range(len(configs))]  # the cells of each
        self.logs = [one.log and not own_rank() and one.log.callback(one.seed) for c in configs for one in c.cells]
        self.now = Event(self.seeds, 0, tasks, 0.0)
        self.task = 0  # the last one of the round

    def begin_round(self, task: int, names: str) -> Observer:
        """What observes a round whose last task is `task`."""
        self.task, logs = task, [(r, log) for r, log in enumerate(self.logs) if log]
        return Observers(self, *(training.History(names, [log], r) for r, log in logs))

    def end_epoch(self, progress: Progress) -> None:
        part = progress.epoch / progress.epochs
        for group in self.groups:
            self._tell(group, self.task, part if self.jointly else (self.task + part) / self.tasks)

    def learned(self, task: int, accuracy: Tensor) -> None:
        """A task is learned, and those so far are measured."""
        for group, part in zip(self.groups, accuracy.split(len(self.seeds)), strict=True):
            self._tell(group, task, (task + 1) / self.tasks, float(part.mean()))

    def note(self, text: str) -> None:
        self.on_event(self.groups[0], replace(self.now, accuracy=None, note=text))

    def close(self) -> None:
        for log in self.logs:
            if log:
                log.close()

    def _tell(self, group: Sequence[int], task: int, done: float, accuracy: float | None = None) -> None:
        self.now = Event(self.seeds, task, self.tasks, done, accuracy)
        self.on_event(group, self.now)


def _side_by_side(
    cells: Sequence[Config],
    on_event: OnEvents,
    allow_divergence: bool,
    ranks: Ranks | None,
    checkpoints: Checkpoints | None,
) -> list[Result]:
    configs = _configurations(cells)
    lead = configs[0]
    seeded = benchmarks.BENCHMARKS[lead.benchmark].seeded
    streams = [
        benchmarks.get(lead.benchmark, seed, lead.tasks, lead.settings.validation, scenario=lead.scenario or None)
        for seed in (lead.seeds if seeded else lead.seeds[:1])
    ]
    run = Run(
        network(streams[0], lead.network),
        methods.get(lead.method),
        [cell.settings for cell in cells],
        [cell.seed for cell in cells],
        draw=True,
        device=lead.device,
        precision=lead.precision,
        allow_divergence=allow_divergence,
        ranks=ranks,
        likelihood=_likelihood(streams[0], cells),
    )
    reports = Reports(configs, len(streams[0]), run.method.jointly, on_event)
    infer = lead.scenario in ("domain", "class")
    if infer and run.needs_task:
        reports.note(
            f"scenario {lead.scenario} does not give the task, which {lead.method} needs to predict: it is inferred"
        )
    machine, identities = environment(lead.device), [identity(one) for one in configs]
    with contextlib.closing(reports), interruptible(checkpoints, configs) as own:
        saver = None if own is None else Checkpointer(own, identities, asdict(machine), reports.note, ranks)
        start = time.perf_counter()
        learned = learn_stream(run, streams, reports.begin_round, reports.learned, saver, infer)
        seconds = time.perf_counter() - start if saver is None else saver.seconds
    unsure: list[float] = []
    if streams[0].energy is not None:
        unsure = uncertainty(run, streams[0])
    seconds, size, names = round(seconds / len(cells), 3), run.memory_bytes(), [task.name for task in streams[0]]
    about = _trunk(streams[0], lead.network)
    results = [
        replaced(result_of(cell, r, learned, about, seconds, size, machine, names), resolved=[run.resolved[r]])
        for r, cell in enumerate(cells)
    ]
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


def _trunk(stream: benchmarks.Benchmark, text: str) -> dict[str, object]:
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


def cell_result(
    cell: Config, machine: Environment, seconds: float, size: int | None, trunk: Mapping[str, object], **measures: Any
) -> Result:
    """The result of a cell, with these measures and no others. `size`: the bytes that it keeps; `trunk`: what its
    configuration says of the network.
    """
    of_cell = {"precision": cell.precision, "device": cell.device}
    of_cell |= {"scenario": cell.scenario} if cell.scenario else {}
    none = summarise([None])
    needed = dict.fromkeys(("average_accuracy", "forgetting", "backward_transfer", "nll", "ece"), none)
    return Result(
        benchmark=cell.benchmark,
        method=cell.method,
        preset=cell.preset,
        config={**cell.settings, "tasks": cell.tasks, **trunk, **of_cell},
        seeds=list(cell.seeds),
        seconds=round(seconds, 3),
        memory_bytes=size,
        environment=machine,
        **{"accuracy": None, **needed, **measures},
    )


def over_tasks(matrix: NDArray[np.float32]) -> dict[str, Summary]:
    """What follows from a matrix of scores [after task, of task]."""
    return {
        "forgetting": summarise([metrics.forgetting(matrix)]),
        "backward_transfer": summarise([metrics.backward_transfer(matrix)]),
    }


def matrices_of(matrix: NDArray[np.float32]) -> Matrices:
    """The matrix of one seed, as a result has it."""
    return [[[value if math.isfinite(value) else None for value in row] for row in matrix.tolist()]]


def result_of(
    cell: Config,
    r: int,
    found: StreamResult,
    trunk: Mapping[str, object],
    seconds: float,
    size: int,
    machine: Environment,
    names: Sequence[str] = (),
) -> Result:
    """The result of a cell, which is replica r of its program and keeps `size` bytes. `names`: those of its tasks."""
    matrix = found.accuracy[r].numpy()
    diverged = bool(np.isnan(matrix[-1]).all())  # its predictions are from before it diverged
    each = [(p[r].cpu(), y[r % len(y)].cpu()) for p, y in zip(found.probabilities, found.labels, strict=True)]

    def per_task(measure: Callable[[Tensor, Tensor], float]) -> Summary:
        """The mean over tasks, after the last one."""
        return summarise([math.nan if diverged else float(np.mean([measure(p, y) for p, y in each]))])

    mean = summarise([metrics.average_accuracy(matrix)])
    if not found.labels:
        measures: dict[str, Any] = {"log_likelihoods": matrices_of(matrix), "log_likelihood": mean}
    else:
        measures = {"accuracy": matrices_of(matrix), "average_accuracy": mean, "nll": per_task(metrics.nll)}
        measures["ece"] = per_task(metrics.expected_calibration_error)
        if not diverged:
            measures["reliability"] = binned(sum(metrics.reliability(p, y) for p, y in each))
    if found.samples is not None and not diverged:
        measures["samples"] = picture(found.samples[r].numpy())
    measures["inferred_accuracy"] = {
        how: summarise([math.nan if diverged else float(one[r])])
        for how, one in found.inferred.items()
        if bool(one[r].isfinite())
    }
    measures |= over_tasks(matrix)
    composed = methods.for_settings(methods.get(cell.method), cell.settings)
    measures |= {"task_names": list(names), "composed": None if composed.name == cell.method else composed.name}
    measures |= in_force(composed, cell.settings)
    return cell_result(cell, machine, seconds, size, trunk, **measures)


WIDTH, EPOCHS, STEPS, BATCH, LR = 256, 30, 1000, 128, 1e-3  # of the classifier; it takes at most this many steps
SAMPLES_PER_TASK = 100


def uncertainty(run: Run, stream: Benchmark) -> list[float]:
    """For each replica, the mean over tasks k and their samples x of KL(one-hot k || p(. | x)) = -log p(k | x) after
    the last task, in nats. p is a classifier, an MLP trained on the training sets of all tasks (Nguyen et al., 2018).
    """
    if not isinstance(run.network.trunk, nn.VAE):
        return []
    classify = _classifier(stream, run.network.posterior.mean.device)
    with torch.no_grad():
        each = [-classify(run.sample(k, SAMPLES_PER_TASK))[:, :, k].mean(1) for k in range(len(stream))]
    kl: list[float] = torch.stack(each).mean(0).tolist()
    return kl


def _classifier(stream: Benchmark, device: torch.device) -> Callable[[Tensor], Tensor]:
    """x [R, n, D] -> log-probabilities [R, n, tasks]. It is a function of the stream alone."""
    x = torch.cat([task.train.x.flatten(1) for task in stream]).to(device)
    y = torch.cat([torch.full((len(task.train),), k) for k, task in enumerate(stream)]).to(device)
    from evcl.nn.vae import layers

    source = generator(0, Purpose.CLASSIFIER)
    network = torch.nn.Sequential(*layers([x.shape[1], WIDTH, WIDTH, len(stream)], source)).to(device)
    optimiser = torch.optim.Adam(network.parameters(), LR)
    for rows in _batches(len(x), source):
        optimiser.zero_grad()
        F.cross_entropy(network(x[rows.to(device)]), y[rows.to(device)]).backward()
        optimiser.step()
    return lambda images: network(images).log_softmax(2)


def _batches(n: int, source: torch.Generator) -> Sequence[Tensor]:
    return torch.randint(n, (min(STEPS, 1 + EPOCHS * n // BATCH), BATCH), generator=source).unbind(0)
