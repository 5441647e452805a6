"""A whole stream: task after task, measured on every task seen so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from evcl.benchmarks import Benchmark, Examples, Task
from evcl.errors import EvclError
from evcl.inputs import positions
from evcl.training.run import Run
from evcl.training.saver import Saver
from evcl.training.task import Progress, TaskData


@dataclass(frozen=True)
class StreamResult:
    """accuracy [R, after task, on task], NaN where not measured, or lost; each task's last probabilities and labels."""

    accuracy: Tensor
    probabilities: list[Tensor]  # a task: [R, N, classes]
    labels: list[Tensor]  # a task: [U, N] (see TaskData), positions among the classes


OnTask = Callable[[int, Tensor], None]


def learn_stream(
    run: Run,
    streams: Sequence[Benchmark],
    on_epoch: Callable[[int, Progress], None] | None = None,
    on_task: OnTask | None = None,
    saver: Saver | None = None,
) -> StreamResult:
    """Let the run learn a stream; replica r learns `streams[r mod len(streams)]`.

    `on_epoch(task, progress)` and `on_task(task, accuracy [R, tasks seen])` report on the way. `saver` saves the run,
    and knows where to go on.
    """
    tasks = [[stream[k] for stream in streams] for k in range(len(streams[0]))]
    heads: dict[str, int] = {}
    accuracy = torch.full((len(run.seeds), len(tasks), len(tasks)), torch.nan, dtype=torch.float64)
    rounds = [list(range(len(tasks)))] if run.method.joint else [[k] for k in range(len(tasks))]
    probabilities: list[Tensor] = []
    labels: list[Tensor] = []
    seen: list[int] = []  # the tasks' heads
    shape = tuple(tasks[0][0].train.inputs.shape[1:])
    first = 0 if saver is None else saver.first(len(rounds))
    for number, round_ in enumerate(rounds):
        last = round_[-1]
        own = [_head(run, tasks[k][0], heads) for k in round_]
        before, seen = seen, [*seen, *own]
        if number < first:
            continue
        learned = saver is not None and saver.enter(number, run, accuracy, (before, seen), shape)
        if not learned:
            training = [_data(run, tasks[k], [t.train for t in tasks[k]], h) for k, h in zip(round_, own, strict=True)]
            try:
                run.learn(training, on_epoch=on_epoch and partial(on_epoch, last), watch=saver)
            except EvclError as error:
                raise type(error)(f"task {tasks[last][0].name!r}: {error}") from error
            del training
            if saver is not None:
                saver.learned()
        draws = list(run.draws(heads.values()))
        for k in range(last + 1):
            if saver is not None:
                saver.pause()
            data = _data(run, tasks[k], [t.held_out for t in tasks[k]], heads[tasks[k][0].head])
            p = _predict(run, data, draws)
            y = data.y.repeat(len(run.seeds) // len(data.y), 1)
            accuracy[:, last, k] = (p.argmax(2) == y).double().mean(1).cpu()
            if round_ is rounds[-1]:  # before that nobody asks for them, and they grow with the tasks
                probabilities.append(p)
                labels.append(data.y)
        accuracy[run.lost.cpu(), last] = torch.nan
        if on_task is not None:
            on_task(last, accuracy[:, last, : last + 1])
    return StreamResult(accuracy, probabilities, labels)


def _predict(run: Run, data: TaskData, draws: Sequence[Tensor]) -> Tensor:
    """Probabilities [R, N, classes]; of several processes, each predicts a part."""
    if run.ranks is None:
        return run.predict(data.x, data.head, draws)
    mean, part = run.network.posterior.mean, run.ranks.part(data.x.shape[1])
    found = mean.new_zeros(len(mean), data.x.shape[1], run.classes(data.head))
    if part.stop > part.start:
        found[:, part] = run.predict(data.x[:, part], data.head, draws)
    return run.ranks.sum_(found)


def _head(run: Run, task: Task, heads: dict[str, int]) -> int:
    """The number of the task's head, which is made when the first task comes that uses it."""
    if task.head not in heads:
        example = task.train.inputs[:1].to(run.network.posterior.mean)
        heads[task.head] = run.add_head(run.features(example), len(task.classes))
    return heads[task.head]


def _data(run: Run, tasks: Sequence[Task], parts: Sequence[Examples], head: int) -> TaskData:
    """The same task of each stream, on the run's device: labels become positions among the classes."""
    mean = run.network.posterior.mean
    y = torch.stack([positions(part.y.tolist(), task.classes) for task, part in zip(tasks, parts, strict=True)])
    x = torch.stack([part.x for part in parts]) if len(parts) > 1 else parts[0].x.unsqueeze(0)
    return TaskData(x.to(mean), y.to(mean.device), head)
