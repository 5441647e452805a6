"""Learn a whole stream task by task, and evaluate on every task seen so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from evcl._core.devices import double
from evcl._core.inputs import Label, positions
from evcl._core.tasks import Examples, Task
from evcl.methods import TaskData
from evcl.training.checkpointer import Checkpointer
from evcl.training.observer import Observer, Observers
from evcl.training.run import Run
from evcl.training.session import Given, Session


@dataclass(frozen=True)
class StreamResult:
    """accuracy [R, after task, on task], NaN if it was not evaluated or the replica diverged; and the final
    probabilities and labels of each task. If the likelihood is an energy, the mean log-likelihood is in place of the
    accuracy, and there are no probabilities; `samples` are what a generative model generates.
    """

    accuracy: Tensor
    probabilities: list[Tensor]  # per task: [R, N, classes]
    labels: list[Tensor]  # per task: [U, N] (see TaskData), class indices
    inferred: dict[str, Tensor] = field(default_factory=dict)  # [R] each: mean accuracy if tasks are inferred, by how
    samples: Tensor | None = None  # [R, after task, of task, KEPT_SAMPLES, ...], uint8: 0 to 255 is 0 to 1


KEPT_SAMPLES = 3  # samples of each task that are kept of a generative model, after each round
OnTask = Callable[[int, Tensor], None]
MakeObserver = Callable[[int, str], Observer]  # (the last task of a round, the names of its tasks) -> its observer


def learn_stream(
    run: Run,
    streams: Sequence[Sequence[Task]],
    make_observer: MakeObserver | None = None,
    on_task: OnTask | None = None,
    checkpointer: Checkpointer | None = None,
    infer: bool = False,
) -> StreamResult:
    """Learn a stream; replica r learns `streams[r mod len(streams)]`.

    `make_observer` makes an observer for each round. `on_task(task, accuracy [R, tasks seen])` is called after each
    evaluation. `checkpointer` saves the run, and knows where to resume it. `infer`: predictions are not told the task,
    and a method that needs it infers it.
    """
    session = Session(run)
    tasks = [[stream[k] for stream in streams] for k in range(len(streams[0]))]
    place = OnDevice(run.network.posterior.mean.device)
    rounds = [list(range(len(tasks)))] if run.method.jointly else [[k] for k in range(len(tasks))]
    evaluation = Evaluation(session, tasks, place, infer)
    first = 0 if checkpointer is None else checkpointer.first(len(rounds))
    known = [] if checkpointer is None else checkpointer.domains(rounds[first][-1] + 1)
    session.domains = {tasks[k][0].name: domain for k, domain in enumerate(known)}
    for number, round_ in enumerate(rounds):
        last = round_[-1]
        watching = Observer()
        learned = number < first
        with session.round([_given(tasks[k], [place(t.train) for t in tasks[k]], learned) for k in round_]) as training:
            if not learned and checkpointer is not None:
                own_heads = [data.head for data in training]
                learned = checkpointer.enter(
                    number, run, session.seen, own_heads, evaluation.kept(), list(session.domains.values())
                )
            if not learned:
                if make_observer is not None:
                    watching = make_observer(last, " + ".join(tasks[k][0].name for k in round_))
                own = watching if checkpointer is None else Observers(watching, checkpointer)
                watching.begin(run.settings.epochs * run.method.stages)
                run.learn(training, observer=own)
                if checkpointer is not None:
                    checkpointer.learned()
        del training
        watching.end()
        if number < first:
            continue
        for k in range(last + 1):
            if checkpointer is not None:
                checkpointer.pause()
            evaluation(last, k, round_ is rounds[-1])
        evaluation.end(last)
        if on_task is not None:
            on_task(last, evaluation.accuracy[:, last, : last + 1])
    return evaluation.result()


class Evaluation:
    """Measures the tasks seen so far after each round. If the likelihood is an energy, `accuracy` is the mean
    log-likelihood of the examples, and samples of a generative model are drawn.
    """

    def __init__(self, session: Session, tasks: Sequence[Sequence[Task]], place: OnDevice, infer: bool) -> None:
        run, count = session.run, len(tasks)
        self.run, self.session, self.tasks = run, session, tasks
        self.held_out = HeldOut(session, tasks, place)
        self.predict = session.predict_inferring if infer and run.needs_task else session.predict
        self.accuracy = torch.full((len(run.seeds), count, count), torch.nan, dtype=torch.float64)
        self.samples: Tensor | None = None
        if run.likelihood.draws:
            shape = tasks[0][0].train.inputs.shape[1:]
            self.samples = torch.zeros(len(run.seeds), count, count, KEPT_SAMPLES, *shape, dtype=torch.uint8)
        self.probabilities: list[Tensor] = []
        self.labels: list[Tensor] = []
        self.inferred: dict[str, list[Tensor]] = {}

    def kept(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of earlier rounds."""
        name = "accuracy" if self.run.likelihood.heads else "log_likelihood"
        return {name: self.accuracy, **({} if self.samples is None else {"samples": self.samples})}

    def __call__(self, last: int, k: int, final: bool) -> None:
        """Measure task k after task `last`; `final`: it is the last of all."""
        run, session, data = self.run, self.session, self.held_out(k)
        if not run.likelihood.heads:
            self.accuracy[:, last, k] = double(run.log_likelihood(data)).mean(1).cpu()
            return
        p = self.predict(data, self.tasks[k][0].head)
        y = data.y.repeat(len(run.seeds) // len(data.y), 1)
        self.accuracy[:, last, k] = double(p.argmax(2) == y).mean(1).cpu()
        if final:  # only the last round's are returned, and they grow with the number of tasks
            self.probabilities.append(p)
            self.labels.append(data.y)
            if len(session.heads) > 1 and (run.method.bayesian or run.method.log_joint is not None):
                for how, accuracy in session.infer(data, self.held_out.labels(k)).items():
                    self.inferred.setdefault(how, []).append(accuracy)

    def end(self, last: int) -> None:
        """The round that ended with task `last` is measured."""
        self.accuracy[self.run.diverged.cpu(), last] = torch.nan
        for k in range(0 if self.samples is None else last + 1):
            assert self.samples is not None
            samples = (255 * self.run.sample(k, KEPT_SAMPLES).clamp(0, 1)).round().cpu()
            self.samples[:, last, k] = samples.view_as(self.samples[:, last, k])

    def result(self) -> StreamResult:
        means = {how: torch.stack(accuracies).mean(0) for how, accuracies in self.inferred.items()}
        return StreamResult(self.accuracy, self.probabilities, self.labels, means, self.samples)


def _given(tasks: Sequence[Task], parts: Sequence[Examples], shape_alone: bool = False) -> Given:
    """The same task of each stream, with the classes of the first. With `shape_alone`, a single example, which is
    enough to make its head.
    """
    task = tasks[0]
    y = [part.y.tolist() for part in parts]
    for r, own in enumerate(tasks):
        if own.classes != task.classes:
            y[r] = [task.classes[i] for i in positions(y[r], own.classes).tolist()]
        else:
            positions(list(set(y[r])), own.classes)  # raises if a label is not among the classes
    counts = Counter(label for row in y for label in row)
    if shape_alone:
        parts, y = [part.select(torch.tensor([0])) for part in parts], [row[:1] for row in y]
    return Given(task.name, task.head, task.classes, _inputs(parts), y, counts)


def _inputs(parts: Sequence[Examples]) -> Tensor:
    """[U, N, ...]"""
    return torch.stack([part.x for part in parts]) if len(parts) > 1 else parts[0].x.unsqueeze(0)


class OnDevice:
    """Images of a stream on a GPU, where they are permuted and scaled each time that they are used.

    Tasks that permute the same images share one copy of them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moved: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, part: Examples) -> Examples:
        if self.device.type == "cpu" or part.pixels is None:
            return part
        order = None if part.permutation is None else self._copy(part.permutation)
        return replace(part, inputs=self._copy(part.inputs), permutation=order)

    def _copy(self, given: Tensor) -> Tensor:
        if id(given) not in self.moved:
            self.moved[id(given)] = given, given.to(self.device)  # the first is kept so that its id stays its own
        return self.moved[id(given)][1]


class HeldOut:
    """The data that each task is measured on. Labels are kept: they take longer to prepare than to predict."""

    def __init__(self, session: Session, tasks: Sequence[Sequence[Task]], place: OnDevice) -> None:
        self.session, self.tasks, self.place = session, tasks, place
        self.known: dict[int, TaskData] = {}  # without inputs

    def __call__(self, k: int) -> TaskData:
        parts = [self.place(task.held_out) for task in self.tasks[k]]
        if k in self.known:
            return replace(self.known[k], x=_inputs(parts).to(self.session.run.network.posterior.mean))
        data = self.session.data(_given(self.tasks[k], parts))
        self.known[k] = replace(data, x=data.x[:, :0])
        return data

    def labels(self, k: int) -> Sequence[Sequence[Label]]:
        """Those of each stream."""
        y = _given(self.tasks[k], [task.held_out for task in self.tasks[k]]).y
        assert not isinstance(y, Tensor)
        return y
