"""Streams of rows as benchmarks: each batch is predicted before it is learned, and the predictions are scored."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from msgspec.structs import asdict
from torch import Tensor

from evcl._core.errors import Diverged, EvclError, unknown
from evcl._core.interrupts import deferred
from evcl._core.settings import BAYESIAN, CORESET, TRAINING, Setting
from evcl._core.summaries import METHOD_SUMMARIES, ROW_SUMMARIES
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
from evcl.streams.saved import save
from evcl.streams.sources import Source, get
from evcl.training import Checkpoints, Stopped
from evcl.training.checkpoint import DESCRIPTION, DIGEST, FORMAT, clear, digest, files, newest
from evcl.training.checkpointer import check_identity, unfinished

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
        saving = None
        if checkpoints is not None:
            asked = stack.enter_context(deferred())
            own = replace(checkpoints.of(program_name([cell])), stop=checkpoints.stop or asked)
            saving = _Saving(own, cell, machine)
        learner, scores, before = (saving and saving.found()) or (made(cell, source), _scores(source), 0.0)
        start, feed = time.monotonic(), Feed(learner, scores)
        for x, y in _rows(source, cell, scores.rows):
            feed(x, y)
            if saving is not None:
                saving.after(learner, scores, before + time.monotonic() - start)
            if scores.rows % scores.window < len(y) or scores.rows == source.rows:
                if not (allow_divergence or math.isfinite(scores.overall["nll"])):
                    raise Diverged(f"{cell.name}, seed {cell.seed}: its predictions are no longer finite numbers")
                done = scores.rows / source.rows
                on_event(Event(cell.seeds, 0, 1, done, scores.overall["accuracy"] if done == 1 else None))
        seconds = before + time.monotonic() - start
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


class _Saving:
    """The checkpoints of a cell. Each is the learner's file, with the scores beside."""

    def __init__(self, checkpoints: Checkpoints, cell: Config, machine: Environment) -> None:
        self.checkpoints, self.last = checkpoints, time.monotonic()
        self.about = {"owner": [identity(cell)], "environment": asdict(machine)}
        self.online = cell.method == "naive"
        self.written = files(checkpoints.folder)
        if self.written and not checkpoints.resume:
            raise EvclError(unfinished(checkpoints.folder))

    def found(self) -> tuple[Learner, Prequential, float] | None:
        """The learner, the scores and the seconds so far; None if there is nothing to resume."""
        saved = newest(self.checkpoints.folder) if self.checkpoints.resume else None
        if saved is None:
            return None
        check_identity(saved, json.loads(json.dumps(self.about["owner"])))
        arrays = {name.removeprefix("scores "): t for name, t in saved.tensors.items() if name.startswith("scores ")}
        scores = Prequential.restored(saved.description["scores"], arrays)
        learner = (Online if self.online else Stream).load(saved.path)
        if learner.rows != scores.rows:
            raise EvclError(f"the checkpoint {saved.path} does not fit the run: remove it, or pass --overwrite")
        return learner, scores, float(saved.description["seconds"])

    def after(self, learner: Learner, scores: Prequential, seconds: float) -> None:
        """Called after every batch: save if it is time to, and end if asked to."""
        stop = self.checkpoints.stop is not None and self.checkpoints.stop()
        if stop or 0 < self.checkpoints.seconds <= time.monotonic() - self.last:
            self._write(learner, scores, seconds)
        if stop:
            raise Stopped

    def _write(self, learner: Learner, scores: Prequential, seconds: float) -> None:
        told, arrays = scores.state()
        text = json.dumps({"format": FORMAT, **self.about, "seconds": seconds, "scores": told})
        beside = {f"scores {name}": torch.from_numpy(array) for name, array in arrays.items()}
        own = _tensors(learner)
        notes = {DESCRIPTION: text, DIGEST: digest(text, {**own, **beside})}
        folder = self.checkpoints.folder
        folder.mkdir(parents=True, exist_ok=True)
        number = max((int(path.stem) for path in self.written), default=0) + 1
        path = folder / f"{number:08d}.safetensors"
        if isinstance(learner, Online):
            learner.save(path, notes, beside)
        else:
            save(learner, path, notes, beside)
        self.written = [path, *self.written[:1]]
        clear(folder, self.written)
        self.last = time.monotonic()


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
