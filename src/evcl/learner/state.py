"""What a learner is between tasks, and how it predicts and measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evcl._core.errors import BadExample, EvclError, unknown
from evcl._core.inputs import Label, positions
from evcl._core.settings import Setting
from evcl._core.tasks import Examples, Task
from evcl.learner.persist import Record
from evcl.learner.reading import INFER, Reader, in_form, like
from evcl.nn import LoRA
from evcl.targets import CATEGORICAL
from evcl.targets.answers import Numbers, Outcome, Outputs, Predictions
from evcl.targets.classes import normalised_entropy
from evcl.targets.likelihood import NO_DENSITY
from evcl.training import Run, Session, TaskData

COUNT = Setting(1, "examples to generate", low=1, high=10_000_000)
DRAWS = Setting(1000, "draws", low=1, high=10_000_000)
MAX_ROWS_TESTED = 2000  # at most this many rows of a task are predicted before they are learned


@dataclass(frozen=True)
class State:
    """What a learner is between tasks: it predicts and measures, and never changes. A round makes another from a fork.

    Attributes:
        run: the network, its weights, the memory of the method, the positions of the generators
        session: the names of tasks, heads and classes
        reader: reads what users pass, and knows the form of the inputs
        adapters: those of the network, if it has any
        shape: of an example of the last task, as it is computed with
        records: what was learned, one per task
        trial: whether it learns a part of a task, to see how large errors are on the rest
    """

    run: Run
    session: Session
    reader: Reader
    adapters: LoRA | None = None
    shape: tuple[int, ...] | None = None
    records: tuple[Record, ...] = ()
    trial: bool = False

    def forked(self, label: str | None = None) -> State:
        """A state of its own, with the same tensors, to learn a round while this one predicts. `label` names the column
        of labels.
        """
        reader = self.reader.forked(label, not self.tasks)
        session = self.session.forked(reader.call)
        return replace(self, run=session.run, session=session, reader=reader)

    @property
    def plain(self) -> nn.Module:
        """The network in plain torch, of which the run has a Bayesian copy."""
        return self.run.plain

    # --- what it knows ---------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the learned tasks, in order."""
        return tuple(self.session.tasks)

    def classes(self, task: str | int | None = None) -> tuple[Label, ...]:
        """See `Learner.classes`."""
        if task != INFER or not self.session.tasks:
            return tuple(self.session.heads[self.head(task)])
        labels = tuple(dict.fromkeys(label for classes in self.session.heads.values() for label in classes))
        if len({type(label) for label in labels}) != 1:
            raise EvclError("to infer the task, the labels of all heads must have one type: all text, or all numbers")
        return labels

    def record(self, task: str | int | None = None) -> Record:
        """The record of a task, by default the last one; empty if there is none."""
        if task is None:
            return self.records[-1] if self.records else {}
        self.head(task)  # raises if there is no such task
        name = self.tasks[int(task)] if isinstance(task, Integral) else task
        return next((one for one in self.records if one["task"] == name), {})

    def predicted_as(self, task: str) -> str:
        """See `Learner.predicted_as`."""
        head, own = self.session.tasks[task], self.run.predicts_by_task or self.run.network.task_weights is not None
        return task if own else next(name for name, other in self.session.tasks.items() if other == head)

    def examples(self, data: object, verb: str) -> tuple[Tensor, Any]:
        if isinstance(data, (Task, Examples)):
            part = data.train if isinstance(data, Task) else data
            data = tuple(part) if self.run.likelihood.heads else (part.x, None)
        x, y = self.reader.examples(data, verb, self.run.network.posterior.mean.device)
        return self.tested(x), y

    # --- prediction ------------------------------------------------------------------------------------------------

    def predict_proba(self, x: object, task: str | int | None = None) -> Any:
        """See `Learner.predict_proba`."""
        self._check_labelled()
        if task != INFER and self.run.likelihood.softmax:
            return in_form(x, self.probabilities(self.inputs(x), task))
        if self.run.likelihood.beside:
            raise EvclError("numbers have no class probabilities: use predict, or predictions for their uncertainty")
        return self.predictions(x, task).probabilities

    def predict(self, x: object, task: str | int | None = None) -> Any:
        """See `Learner.predict`."""
        if task == INFER or not self.run.likelihood.softmax:
            return self.predictions(x, task)[0]
        return self._labels(x, self.probabilities(self.inputs(x), task), self.classes(task))

    def predictions(self, x: object, task: str | int | None = None, draws: int | None = None) -> Any:
        """See `Learner.predictions`."""
        if draws is not None:
            each = self._drawn(x, task, int(DRAWS.check("draws", draws)))
            if self.run.likelihood.heads:
                return self.predictions(x, task)._replace(draws=in_form(x, each))
            return Outputs(*(in_form(x, one) for one in (each.mean(0), each.std(0, correction=0), each)))
        self._check_labelled()
        if not self.run.likelihood.softmax:
            return self._values(x, task)
        checked, classes = self.inputs(x), self.classes(task)
        pairs = self._asked(task)
        heads = [head for head, _ in pairs]
        parts = []
        tensors = self.tried(checked, lambda x: [part for both in self.session.each_head(x, pairs) for part in both])
        for head, p, aleatoric in zip(heads, tensors[::2], tensors[1::2], strict=True):
            entropy = torch.special.entr(p).sum(1)
            columns = [classes.index(label) for label in self.session.heads[head]]
            wide = p if len(heads) == 1 else p.new_zeros(len(p), len(classes)).index_copy(1, _index(p, columns), p)
            parts.append((wide, entropy, torch.minimum(aleatoric, entropy), normalised_entropy(p)))
        best = torch.stack([relative for *_, relative in parts]).argmin(0)
        by_task = task == INFER and self.run.needs_task
        if task == INFER and not by_task and (likely := self._likeliest(checked)) is not None:
            best = likely
        rows = torch.arange(len(best), device=best.device)
        chosen = [torch.stack([part[i] for part in parts])[best, rows] for i in range(4)]
        first = {head: name for name, head in reversed(self.session.tasks.items())}
        names = self.tasks if by_task else [first[head] for head in heads]
        tasks = np.array(names)[best.cpu().numpy()]
        p, entropy, aleatoric = (in_form(x, tensor) for tensor in chosen[:3])
        unfamiliar = self.unfamiliar(x, checked, chosen[3])
        return Predictions(
            self._labels(x, chosen[0], classes), p, entropy, aleatoric, entropy - aleatoric, tasks, unfamiliar
        )

    def _drawn(self, x: object, task: str | int | None, count: int) -> Tensor:
        """[S, N, ...]: the predictions by each of this many draws of the weights."""
        run, checked, name, heads = self.run, self.inputs(x), "", list[int]()
        if not run.method.bayesian or run.method.generative or run.likelihood.draws:
            raise EvclError("there are no draws without a Bayesian network: use predictions(x), or evcl, vcl, ...")
        if not run.likelihood.heads:
            self._unlabelled(task)
        elif task == INFER:
            raise EvclError("the draws of a prediction are those of one task: choose a task")
        else:
            name = self.head(task)
            heads = [group.number for group in self.session.groups[name]]
        number, scale = self.number(task), self.session.scales.get(name)

        def each(x: Tensor) -> list[Tensor]:
            found = (run.predict_each(x, heads, [w], number) for w in run.draws(heads, number, samples=count))
            return [self.session.mixed(x, name, one) if heads else one[0] for one in found]

        drawn = torch.stack([run.likelihood.expected(one, scale) for one in self.tried(checked, each)])
        return drawn.squeeze(2) if scale is not None and drawn.shape[2] == 1 else drawn

    def unfamiliar(self, x: object, checked: Tensor, doubt: Tensor) -> Any:
        """How far inputs lie from everything learned from, in the form of x; None if unknown."""
        seen = self.session.density
        if seen is None or len(seen.mean) != checked[0].numel():
            return None
        return in_form(x, seen.unfamiliar(checked, doubt.to(checked)))

    # --- values: numbers, counts and labels --------------------------------------------------------------------------

    @property
    def draws(self) -> int:
        """How many draws of the weights a prediction averages over."""
        return int(self.run.settings.get("predict_samples", 1)) if self.run.network.posterior.log_std is not None else 1

    def outcome(self, x: Tensor, task: str | int | None) -> Outcome:
        """The prediction for x [N, ...], averaged over draws."""
        if task == INFER:
            raise EvclError("the task can be inferred from class probabilities only: choose a task")
        run, name, number = self.run, self.head(task), self.number(task)
        head = self.session.groups[name][0].number
        (averaged,) = self.tried(x, lambda x: [run.predict(x, head, task=number)])
        return run.likelihood.outcome(averaged, self.session.scales[name], self.draws)

    def widened(self, x: Tensor, task: str | int | None) -> Outcome:
        """`outcome`, with more epistemic variance for rows that have values outside the range of the training rows.

        Data say nothing about the function there. Let x' be the nearest row within the range, e the distance between
        both (see `Density.within`), f the mean that the network predicts, and s the deviation of the targets; of
        counts, their mean. The function may change as the network does beyond the edge of the data, or not at all, or
        by s per deviation of the inputs as it does within the data on average. So the variance grows by
        (f(x) - f(x'))^2 + (e s)^2.
        """
        outcome, seen, run = self.outcome(x, task), self.session.density, self.run
        name = self.head(task)
        spread = run.likelihood.spread(run.network, self.session.groups[name][0].number, self.session.scales[name])
        if spread is None or seen is None or len(seen.mean) != x[0].numel():
            return outcome
        moved, far = seen.within(x)
        rows = far.nonzero().flatten()
        if not len(rows):
            return outcome
        return outcome.widened(rows, self.outcome(moved[rows], task), far[rows].unsqueeze(1), spread)

    def _values(self, x: object, task: str | int | None) -> Predictions | Numbers:
        """`predictions` for values."""
        checked = self.inputs(x)
        first = {head: name for name, head in reversed(self.session.tasks.items())}
        tasks = np.full(len(checked), first[self.head(None if task == INFER else task)])
        outcome = self.widened(checked, task)
        shaped = [in_form(x, one[:, 0] if one.shape[1] == 1 else one) for one in outcome.parts]
        return outcome.answer([*shaped, tasks, self.unfamiliar(x, checked, outcome.doubt)])

    def new_errors(self, x: Tensor, y: Tensor, weights: Tensor | None, head: str) -> Tensor:
        """[n, D]: the squared errors, without the part that uncertain weights explain, on rows that were not learned
        from, x and y [N, D], or on some of them; of counts, as multiples of the rate. They are multiplied by `weights`
        [N].
        """
        step = math.ceil(len(y) / MAX_ROWS_TESTED)
        some, wanted = x[::step], y[::step]
        task = next(name for name, own in self.session.tasks.items() if own == head)
        errors = self.outcome(some, task).errors(wanted.to(some.device))
        return errors if weights is None else weights[::step].to(errors).unsqueeze(1) * errors

    # --- without labels --------------------------------------------------------------------------------------------

    def log_likelihood(self, x: object, task: str | int | None = None, *, draws: int | None = None) -> Any:
        """See `Learner.log_likelihood`."""
        if task is None and self.session.tasks and not self.run.predicts_by_task:
            task = 0  # all tasks have the same network
        self._unlabelled(task)
        values = self._log_likelihood(*self.examples(x, "log_likelihood"), task, draws)
        return in_form(x[0] if isinstance(x, tuple) else x, values)

    def _log_likelihood(self, x: Tensor, y: object, task: str | int | None, draws: int | None = None) -> Tensor:
        """[N]: that of checked inputs, and of targets if there are any."""
        number = self._unlabelled(task)
        head = self.session.groups[self.head(task)][0].number
        given = TaskData(x.unsqueeze(0), (y if isinstance(y, Tensor) else x).unsqueeze(0), head, None, number)
        return self.run.log_likelihood(given, None if draws is None else int(DRAWS.check("draws", draws)))[0]

    def sample(self, task: str | int | None = None, n: int = 1) -> Tensor:
        """See `Learner.sample`."""
        samples = self.run.sample(self._unlabelled(task), int(COUNT.check("n", n)))[0]
        return samples if self.shape is None else samples.view(len(samples), *self.shape)

    def _unlabelled(self, task: str | int | None) -> int:
        """The number of a task without labels."""
        if self.run.likelihood.heads:
            raise EvclError(NO_DENSITY)
        self.head(task)  # raises if there is no such task
        return self.number(task) or 0

    def _check_labelled(self) -> None:
        if not self.run.likelihood.heads:
            raise EvclError(
                f"with likelihood={self.run.likelihood.name!r} there are no labels to predict: use log_likelihood, "
                f"{'sample' if self.run.likelihood.draws else 'predictions(x, draws=32)'} or mean_network"
            )

    def evaluate(self, tasks: Task | Iterable[Task] | None = None) -> dict[str, float]:
        """See `Learner.evaluate`."""
        if tasks is None:
            if not self.run.kept_examples():
                raise EvclError("no rows of earlier tasks are kept to evaluate on: pass the tasks, evaluate(tasks)")
            return self.evaluate_kept()
        tasks = tasks_of(tasks, "evaluate")
        for task in tasks:
            if task.name not in self.session.tasks:
                learned = ", ".join(self.tasks) or "none"
                raise EvclError(f"task {task.name!r} has not been learned, only {learned} so far")
        if not self.run.likelihood.heads:
            return {task.name: float(self.log_likelihood(task.test.x, task.name).mean()) for task in tasks}
        return {task.name: self.measure(task)[0] for task in tasks}

    def evaluate_kept(self, least: int = 1) -> dict[str, float]:
        """See `Learner.evaluate_kept`."""
        parts: dict[str, list[TaskData]] = {}
        for kept in self.run.kept_examples():
            parts.setdefault(self.tasks[kept.task], []).append(kept)
        accuracies = {}
        for name in self.tasks:
            x, y = self.session.rows(parts.get(name, []))
            if len(x) >= max(1, least):
                accuracies[name] = self.measured(x, y, name)[0]
        return accuracies

    def measure(self, data: object, task: str | int | None = None, *, label: str | None = None) -> Any:
        """See `Learner.measure`."""
        self._check_labelled()
        if isinstance(data, Task):
            task = data.name if task is None else task
            data = data.test
        x, y = replace(self, reader=self.reader.forked(label)).examples(data, "measure")
        return self.measured(x, y, task)

    def measured(self, x: Tensor, y: Any, task: str | int | None) -> Any:
        """`measure`, for checked inputs and targets."""
        likelihood = self.run.likelihood
        if not likelihood.heads:
            return (float(self._log_likelihood(x, y, task).mean()),)
        if likelihood.softmax:
            classes = self.classes(task)
            return CATEGORICAL.measure(self.probabilities(x, task), positions(y, classes, unknown=len(classes)))
        if y.shape[1] != (wanted := len(self.session.heads[self.head(task)])):
            raise EvclError(f"its head has {wanted} targets per example, but these have {y.shape[1]}")
        return self.widened(x, task).measure(y)

    def probabilities(self, x: Tensor, task: str | int | None) -> Tensor:
        head, number = self.head(task), self.number(task)

        def predict(x: Tensor) -> list[Tensor]:
            each = self.run.predict_each(x, [group.number for group in self.session.groups[head]], task=number)
            return [self.session.mixed(x, head, each)]

        (p,) = self.tried(x, predict)
        return p

    def _asked(self, task: str | int | None) -> list[tuple[str, int | None]]:
        """The heads that predict, each with the number of the task whose weights it uses."""
        if task != INFER:
            return [(self.head(task), self.number(task))]
        if self.run.needs_task:  # tasks that share a head have different weights
            return [(head, number) for number, head in enumerate(self.session.tasks.values())]
        first = list(self.session.tasks.values())  # each head uses the weights of its first task
        return [(head, first.index(head) if self.run.predicts_by_task else None) for head in self.session.heads]

    def _likeliest(self, x: Tensor) -> Tensor | None:
        """[N]: the position of the head with the largest likelihood of each example; None if it is unknown."""
        groups = self.session.groups.values()
        evidence = self.run.evidence(x.unsqueeze(0), [group.number for some in groups for group in some])
        if evidence is None:
            return None
        each = [part.logsumexp(2) for part in evidence.split([len(some) for some in groups], 2)]
        return torch.stack(each)[:, 0].argmax(0)

    def tried(self, x: Tensor, predict: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """The result of `predict` without the replica axis. Raises if a prediction is not finite."""
        try:
            with self.run.network.keeping():
                tensors = [tensor[0] for tensor in predict(x.unsqueeze(0))]
        except RuntimeError as error:
            raise self._refused(x, error) from error
        for tensor in tensors:
            if not bool(tensor.isfinite().all()):
                row = int((~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()[0])
                raise BadExample("its probabilities are not finite: its inputs are too large for the network", row)
        return tensors

    def number(self, task: str | int | None) -> int | None:
        """The number of the given task; None if no task is given."""
        if task is None:
            return None if self.run.network.task_weights is None else 0  # with FiLM, `_head` refuses more than one task
        if isinstance(task, Integral):
            return int(task)
        return list(self.session.tasks).index(str(task))

    @staticmethod
    def _labels(x: object, p: Tensor, classes: Sequence[Label]) -> Any:
        cut = any(isinstance(label, str) and label.endswith("\0") for label in classes)  # numpy would cut it off
        labels, x = np.array(classes, dtype=object if cut else None)[p.argmax(1).cpu().numpy()], like(x)
        return torch.from_numpy(labels).to(x.device) if isinstance(x, Tensor) and labels.dtype.kind in "ib" else labels

    def head(self, task: str | int | None) -> str:
        """The head of the task with this name or number; without a task, the only head."""
        tasks, heads = self.session.tasks, self.session.heads
        if not tasks:
            raise EvclError("nothing has been learned yet: call learn first")
        if task is None:
            if len(heads) > 1:
                raise EvclError(f"there are {len(heads)} heads: choose a task, one of {', '.join(tasks)}")
            if self.run.network.task_weights is not None and len(tasks) > 1:
                names = ", ".join(tasks)
                raise EvclError(f"each task has scales and shifts or layers of its own: choose a task, one of {names}")
            return next(iter(heads))
        if isinstance(task, Integral) and not isinstance(task, bool):
            if not 0 <= task < len(tasks):
                raise EvclError(f"there is no task {task}: only {len(tasks)} learned so far, numbered from 0")
            return list(tasks.values())[int(task)]
        if not isinstance(task, str):
            raise EvclError(f"a task must be a name or a number, not {task!r}")
        if task not in tasks:
            raise unknown("task", task, tasks)
        return tasks[task]

    def inputs(self, x: object) -> Tensor:
        """Convert the inputs to one tensor, and try the network on one example."""
        return self.tested(self.reader.tensor(x, self.run.network.posterior.mean.device))

    def tested(self, x: Tensor) -> Tensor:
        """Try the network on one example, so that a mistake is found before any work; returns x."""
        try:
            self.run.features(x[:1])
        except EvclError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            raise self._refused(x, error) from error
        return x

    def _refused(self, x: Tensor, error: Exception) -> EvclError:
        form, shapes = self.run.network.call.form, f"inputs of shape {tuple(x.shape)}"
        if form is not None:
            args, named = form.unpack(x[:1])
            both = [*((f"input {i}", t) for i, t in enumerate(args)), *((repr(name), t) for name, t in named.items())]
            shapes = ", ".join(f"{name} [{', '.join(map(str, (len(x), *t.shape[1:])))}]" for name, t in both)
        return EvclError(f"the network does not take {shapes}: {str(error).splitlines()[0]}")


def _index(like: Tensor, values: list[int]) -> Tensor:
    return torch.tensor(values, device=like.device)


def tasks_of(tasks: Any, verb: str) -> list[Task]:
    """A list of tasks, from a benchmark, a single task or several tasks."""
    listed = [tasks] if isinstance(tasks, Task) else list(tasks) if isinstance(tasks, Iterable) else [tasks]
    for task in listed:
        if not isinstance(task, Task):
            own = ": for data of your own, use measure((x, y))" if verb == "evaluate" else ""
            raise EvclError(f"{verb} takes a benchmark or its tasks, not {type(task).__name__}{own}")
    return listed
