"""Streams of rows as benchmarks: each batch is predicted before it is learned, and the predictions are scored."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from msgspec.structs import asdict
from torch import Tensor

from evcl._core.catalogue import METHOD_SUMMARIES, ROW_SUMMARIES
from evcl._core.errors import Diverged, EvclError, unknown
from evcl._core.interrupts import deferred
from evcl._core.settings import BAYESIAN, CORESET, TRAINING, Setting
from evcl.experiments.config import Config
from evcl.experiments.outcome import environment
from evcl.experiments.result import AlarmRow, Environment, Result, binned, prequential, summarise
from evcl.experiments.resume import identity, program_name
from evcl.experiments.run import Event, OnEvents
from evcl.methods import Method
from evcl.streams import SETTINGS, Prequential, Stream
from evcl.streams.evaluation import BATCH, Feed, batches
from evcl.streams.online import Online
from evcl.streams.prequential import window_of
from evcl.streams.saved import parts_of, restored
from evcl.streams.sources import Source, get
from evcl.training.checkpoint import Checkpoints, Saved, Writer

Learner = Stream | Online
NEITHER: dict[str, Setting | None] = dict.fromkeys((*TRAINING, *BAYESIAN, *CORESET))  # a stream has other settings
_OWN = {name: one for name, one in SETTINGS.items() if name not in ("seed", "method")}
METHODS = {
    "ekf": Method("ekf", METHOD_SUMMARIES["ekf"], True, settings={**NEITHER, "batch_size": BATCH, **_OWN}),
    "mesu": Method(
        "mesu",
        ROW_SUMMARIES["mesu"],
        True,
        settings={**NEITHER, "batch_size": BATCH, **{n: s for n, s in _OWN.items() if n not in ("covariance", "rank")}},
    ),
    "naive": Method(
        "naive",
        "plain online training: a step of Adam per batch",
        False,
        settings={
            **NEITHER,
            "batch_size": BATCH,
            "lr": Setting(0.003, "the learning rate of Adam", high=10.0, open_low=True),
        },
    ),
}
"""The methods for streams of rows."""


def method(name: str) -> Method:
    """The method of this name for streams of rows."""
    if name not in METHODS:
        raise unknown("method for a stream of rows", name, METHODS)
    return METHODS[name]


def execute(
    cells: Sequence[Config], on_event: OnEvents, allow_divergence: bool, checkpoints: Checkpoints | None
) -> list[Result]:
    """The results of cells, one after another, on the CPU."""
    return [_run(cell, partial(on_event, [i]), allow_divergence, checkpoints) for i, cell in enumerate(cells)]


def _run(
    cell: Config, on_event: Callable[[Any], object], allow_divergence: bool, checkpoints: Checkpoints | None
) -> Result:
    _check(cell)
    source, machine = get(cell.benchmark), environment("cpu")
    with contextlib.ExitStack() as stack:
        work, writer, start = _Work(made(cell, source), _scores(source)), None, time.monotonic()
        if checkpoints is not None:
            asked = stack.enter_context(deferred())
            own = replace(checkpoints.of(program_name([cell])), stop=checkpoints.stop or asked)
            writer = Writer(own, [identity(cell)], asdict(machine))
            writer.resume(work)
        learner, scores = work.learner, work.scores
        feed = Feed(learner, scores)
        for x, y in _rows(source, cell, scores.rows):
            feed(x, y)
            if writer is not None and writer.due():
                writer.save(work)
            if scores.rows % scores.window < len(y) or scores.rows == source.rows:
                if not (allow_divergence or math.isfinite(scores.overall["nll"])):
                    raise Diverged(f"{cell.name}, seed {cell.seed}: its predictions are no longer finite numbers")
                done = scores.rows / source.rows
                on_event(Event(cell.seeds, 0, 1, done, scores.overall["accuracy"] if done == 1 else None))
        seconds = time.monotonic() - start if writer is None else writer.seconds
    return _result(cell, source, learner, scores, seconds, machine)


def _check(cell: Config) -> None:
    """Raise if something is asked for that a stream of rows does not have."""
    name = cell.benchmark
    if cell.settings.validation:
        raise EvclError(f"every row of {name} is predicted before it is learned: leave out validation")
    if cell.network or cell.scenario:
        raise EvclError(f"{name} has no tasks, and a stream makes its own network: leave out network and scenario")
    if cell.device != "cpu":
        raise EvclError(f"{name} is learned on the CPU: leave out --device {cell.device}")
    if cell.log is not None:
        raise EvclError(f"{name} has no epochs to log: the curves are in its result")


def made(cell: Config, source: Source) -> Learner:
    """The learner of a cell."""
    settings = {name: value for name, value in cell.settings.items() if name not in ("batch_size", "validation")}
    count = len(source.classes)
    if cell.method == "naive":
        return Online(len(source.names), count, cell.seed, **settings)
    return Stream(classes=range(count), method=cell.method, seed=cell.seed, **settings)


def _scores(source: Source) -> Prequential:
    return Prequential("classes", window_of(source.rows))


def _rows(source: Source, cell: Config, done: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches after this many rows."""
    pieces = ((rows.x, rows.y) for rows in source.read(seed=cell.seed, start=done))
    return batches(pieces, int(cell.settings.batch_size), done)


class _Work:
    """A learner, the scores of its predictions, and what its checkpoints save of both (see `Resumable`)."""

    def __init__(self, learner: Learner, scores: Prequential) -> None:
        self.learner, self.scores = learner, scores

    def position(self) -> dict[str, Any]:
        return {"scores": self.scores.state()[0], "learner": self._parts()[0]}

    def tensors(self) -> dict[str, Tensor]:
        arrays = self.scores.state()[1]
        return {**self._parts()[1], **{f"scores {name}": torch.from_numpy(array) for name, array in arrays.items()}}

    def load(self, saved: Saved) -> None:
        about = saved.description
        arrays = {name: tensor.numpy() for name, tensor in saved.named("scores ").items()}
        self.scores = Prequential.restored(about["scores"], arrays)
        self.learner = (Online.restored if isinstance(self.learner, Online) else restored)(
            about["learner"], saved.tensors
        )
        if self.learner.rows != self.scores.rows:
            raise saved.unfit("its rows")

    def _parts(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return self.learner.parts() if isinstance(self.learner, Online) else parts_of(self.learner)


def _tensors(learner: Learner) -> dict[str, Tensor]:
    """Every tensor that rows change, by name."""
    if isinstance(learner, Online):
        return learner.tensors()
    return {name: torch.from_numpy(array) for name, array in learner.state.arrays().items()} if learner.state else {}


def _result(
    cell: Config, source: Source, learner: Learner, scores: Prequential, seconds: float, machine: Environment
) -> Result:
    measures, none = scores.overall, summarise([None])
    if not math.isfinite(measures["nll"]):
        measures = dict.fromkeys(measures, math.nan)
    alarms = [AlarmRow(one.row, one.surprise, [source.names[place] for place in one.columns]) for one in learner.alarms]
    state = _tensors(learner)
    return Result(
        benchmark=cell.benchmark,
        method=cell.method,
        preset=cell.preset,
        config={**cell.settings, "tasks": cell.tasks, "precision": cell.precision, "device": cell.device},
        seeds=list(cell.seeds),
        accuracy=None,
        average_accuracy=summarise([measures["accuracy"]]),
        forgetting=none,
        backward_transfer=none,
        nll=summarise([measures["nll"]]),
        ece=summarise([measures["ece"]]),
        reliability=None if scores.reliability is None else binned(scores.reliability),
        prequential=prequential(scores.rows, scores.window, measures, scores.curves, alarms, source.changes),
        seconds=round(seconds, 3),
        memory_bytes=sum(tensor.numel() * tensor.element_size() for tensor in state.values()),
        environment=machine,
    )
