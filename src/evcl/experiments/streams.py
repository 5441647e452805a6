"""Streams of rows as benchmarks: each batch is predicted before it is learned, and the predictions are scored."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from msgspec.structs import asdict
from torch import Tensor

from evcl._core.catalogue import METHOD_SUMMARIES, ROW_SUMMARIES
from evcl._core.errors import Diverged, EvclError, unknown
from evcl._core.settings import BAYESIAN, CORESET, TRAINING, Setting
from evcl.experiments.config import Config
from evcl.experiments.folder import identity, interruptible
from evcl.experiments.result import AlarmRow, Environment, Result, binned, prequential, summarise
from evcl.experiments.run import Event, OnEvents, cell_result, environment
from evcl.methods import Method
from evcl.streams import SETTINGS, Prequential, Stream
from evcl.streams.evaluation import BATCH_SETTING, Feed, batches
from evcl.streams.online import Online
from evcl.streams.prequential import window_of
from evcl.streams.saved import parts_of, restored
from evcl.streams.sources import Source, get
from evcl.training.checkpoint import Checkpoints, Saved, Writer

Learner = Stream | Online
NEITHER: dict[str, Setting | None] = dict.fromkeys((*TRAINING, *BAYESIAN, *CORESET))  # a stream has other settings
_OWN = {name: one for name, one in SETTINGS.items() if name not in ("seed", "method")}
_MESU = {name: one for name, one in _OWN.items() if name not in ("covariance", "rank")}
_NAIVE = {"lr": Setting(0.003, "the learning rate of Adam", high=10.0, open_low=True)}


def _method(name: str, summary: str, settings: Mapping[str, Setting]) -> Method:
    return Method(name, summary, name != "naive", settings={**NEITHER, "batch_size": BATCH_SETTING, **settings})


METHODS = {
    "ekf": _method("ekf", METHOD_SUMMARIES["ekf"], _OWN),
    "mesu": _method("mesu", ROW_SUMMARIES["mesu"], _MESU),
    "naive": _method("naive", "plain online training: a step of Adam per batch", _NAIVE),
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
    cell: Config, on_event: Callable[[Event], object], allow_divergence: bool, checkpoints: Checkpoints | None
) -> Result:
    _check(cell)
    source, machine = get(cell.benchmark), environment("cpu")
    with interruptible(checkpoints, [cell]) as own:
        work, start = _Work(made(cell, source), Prequential("classes", window_of(source.rows))), time.monotonic()
        writer = None if own is None else Writer(own, [identity(cell)], asdict(machine))
        if writer is not None:
            writer.resume(work)
        learner, scores = work.learner, work.scores
        feed = Feed(learner, scores)
        pieces = ((rows.x, rows.y) for rows in source.read(seed=cell.seed, start=scores.rows))
        for x, y in batches(pieces, int(cell.settings.batch_size), scores.rows):
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


class _Work:
    """A learner, the scores of its predictions, and what its checkpoints save of both (see `Resumable`)."""

    def __init__(self, learner: Learner, scores: Prequential) -> None:
        self.learner, self.scores = learner, scores

    def position(self) -> dict[str, object]:
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


def _result(
    cell: Config, source: Source, learner: Learner, scores: Prequential, seconds: float, machine: Environment
) -> Result:
    overall = scores.overall
    if not math.isfinite(overall["nll"]):
        overall = dict.fromkeys(overall, math.nan)
    alarms = [AlarmRow(one.row, one.surprise, [source.names[place] for place in one.columns]) for one in learner.alarms]
    if isinstance(learner, Online):  # what rows change
        size = sum(tensor.numel() * tensor.element_size() for tensor in learner.tensors().values())
    else:
        size = sum(array.nbytes for array in learner.state.arrays().values()) if learner.state else 0
    measures = {"average_accuracy": overall["accuracy"], "nll": overall["nll"], "ece": overall["ece"]}
    return cell_result(
        cell,
        machine,
        seconds,
        size,
        {},
        reliability=None if scores.reliability is None else binned(scores.reliability),
        prequential=prequential(scores.rows, scores.window, overall, scores.curves, alarms, source.changes),
        **{name: summarise([value]) for name, value in measures.items()},
    )
