"""Prediction: the part of a learner that uses what was learned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evcl._core.errors import BadExample, EvclError, unknown
from evcl._core.inputs import Label, positions
from evcl._core.tasks import Examples, Task
from evcl.learner import generating, values
from evcl.learner.reading import INFER, Reader, in_form, like
from evcl.targets import CATEGORICAL
from evcl.targets.answers import Predictions
from evcl.targets.classes import normalised_entropy
from evcl.training import Run, Session, TaskData


class Predictor:
    """The read-only half of a `Learner`: it predicts and measures, and changes nothing."""

    _run: Run
    _session: Session
    _reader: Reader
    _busy: bool  # a task is being learned
    _shape: tuple[int, ...] | None  # of an example of the last task, as it is computed with

    # --- what it knows ---------------------------------------------------------------------------------------------

    @property
    def _heads(self) -> dict[str, list[Label]]:
        """Maps each head to its classes, in the order of its outputs."""
        return self._session.heads

    @property
    def _tasks(self) -> dict[str, str]:
        """Maps each task to its head."""
        return self._session.tasks

    @property
    def likelihood(self) -> str:
        """What the targets are: categorical, gaussian, bernoulli or poisson; without labels, the name of the energy."""
        return self._run.likelihood.name

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the learned tasks, in order."""
        return tuple(self._tasks)

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of the heads, in order. A head is named after the task it was made for."""
        return tuple(self._heads)

    def classes(self, task: str | int | None = None) -> tuple[Label, ...]:
        """The labels of a task's head: the columns of `predict_proba`. With task="infer", the labels of all heads."""
        if task != INFER or not self._tasks:
            return tuple(self._heads[self._head(task)])
        found = tuple(dict.fromkeys(label for classes in self._heads.values() for label in classes))
        if len({type(label) for label in found}) != 1:
            raise EvclError("to infer the task, the labels of all heads must have one type: all text, or all numbers")
        return found

    def predicted_as(self, task: str) -> str:
        """The first task whose predictions are the same as those of this one, for any input: tasks that share a head
        have the same, unless each has weights of its own.
        """
        head, own = self._tasks[task], self._run.predicts_by_task or self._run.network.film is not None
        return task if own else next(name for name, other in self._tasks.items() if other == head)

    @property
    def knows_unfamiliar(self) -> bool:
        """Whether predictions can say how unfamiliar an input is (see `Predictions`)."""
        return self._session.density is not None

    def _check_idle(self) -> None:
        if self._busy:
            raise EvclError("a task is being learned: the learner can be used after it has ended, or in end_task")

    def _examples(self, data: Any, verb: str) -> tuple[Tensor, Any]:
        if isinstance(data, (Task, Examples)):
            part = data.train if isinstance(data, Task) else data
            data = tuple(part) if self._run.likelihood.heads else (part.x, None)
        x, y = self._reader.examples(data, verb, self._run.network.posterior.mean.device)
        return self._tested(x), y

    # --- prediction ------------------------------------------------------------------------------------------------

    def predict_proba(self, x: Any, task: str | int | None = None) -> Any:
        """Probabilities [N, classes], averaged over draws from the posterior: a tensor if `x` is one, else an array.

        `x` is one array [N, ...], or several inputs in the form that they were learned in: a tuple, or a dict, whose
        labels, if it has any, are ignored.

        The seed fixes the draws, so the same input always gives the same output. `task` is a name or a number, and may
        be omitted if there is only one head. With task="infer", the head that predicts an example is inferred (see
        `predictions`).
        """
        self._check_labelled()
        if task != INFER and self._run.likelihood.softmax:
            return in_form(x, self._probabilities(self._inputs(x), task))
        if self._run.likelihood.beside:
            raise EvclError("numbers have no class probabilities: use predict, or predictions for their uncertainty")
        return self.predictions(x, task).probabilities

    def predict(self, x: Any, task: str | int | None = None) -> Any:
        """The most probable label of each input, [N], in the form in which labels were given to `learn`.

        Of targets other than classes, the expected numbers or counts, or labels 0 and 1; [N, D] if there are several.
        """
        if task == INFER or not self._run.likelihood.softmax:
            return self.predictions(x, task)[0]
        return self._labels(x, self._probabilities(self._inputs(x), task), self.classes(task))

    def predictions(self, x: Any, task: str | int | None = None) -> Any:
        """`Predictions`: labels and probabilities, how uncertain they are, and why. Of numbers and counts, `Numbers`.

        With task="infer", each example is predicted by one of the heads: the one with the largest likelihood of the
        example, if the method has a likelihood per class; otherwise the least uncertain one, with the smallest entropy
        relative to its maximum, log(classes). The columns are then the classes of all heads, in the order of
        `classes("infer")`; classes that the example's head does not know have probability 0.
        """
        self._check_idle()
        self._check_labelled()
        if not self._run.likelihood.softmax:
            return values.predictions(self, x, task)
        checked, classes = self._inputs(x), self.classes(task)
        self._check_idle()
        asked = self._asked(task)
        heads = [head for head, _ in asked]
        parts = []
        for head, (p, aleatoric) in zip(heads, self._with_entropy(checked, asked), strict=True):
            entropy = torch.special.entr(p).sum(1)
            columns = [classes.index(label) for label in self._heads[head]]
            wide = p if len(heads) == 1 else p.new_zeros(len(p), len(classes)).index_copy(1, _index(p, columns), p)
            parts.append((wide, entropy, torch.minimum(aleatoric, entropy), normalised_entropy(p)))
        best = torch.stack([relative for *_, relative in parts]).argmin(0)
        by_task = task == INFER and self._run.needs_task
        if task == INFER and not by_task and (likely := self._likeliest(checked)) is not None:
            best = likely
        rows = torch.arange(len(best), device=best.device)
        chosen = [torch.stack([part[i] for part in parts])[best, rows] for i in range(4)]
        first = {head: name for name, head in reversed(self._tasks.items())}
        names = self.tasks if by_task else [first[head] for head in heads]
        tasks = np.array(names)[best.cpu().numpy()]
        p, entropy, aleatoric = (in_form(x, tensor) for tensor in chosen[:3])
        unfamiliar = self._unfamiliar(x, checked, chosen[3])
        found = self._labels(x, chosen[0], classes)
        return Predictions(found, p, entropy, aleatoric, entropy - aleatoric, tasks, unfamiliar)

    def _unfamiliar(self, x: Any, checked: Tensor, doubt: Tensor) -> Any:
        """How far inputs lie from everything learned from, in the form of x; None if unknown."""
        seen = self._session.density
        if seen is None or len(seen.mean) != checked[0].numel():
            return None
        return in_form(x, seen.unfamiliar(checked, doubt.to(checked)))

    # --- without labels --------------------------------------------------------------------------------------------

    def log_likelihood(self, x: Any, task: str | int | None = None, *, draws: int | None = None) -> Any:
        """log p(x) of each example, [N], in nats, under a task's model: a tensor if `x` is one, else an array.

        For a learner with `likelihood="bound"`, it is estimated by importance sampling with this many latent `draws`
        per example, 1,000 by default, at the posterior's means. For any other energy, it is the negative energy of x,
        or of the pair (x, y). The task may be left out if all tasks share the whole network, as in a language model.
        """
        found = generating.log_likelihood(self, x, task, draws)
        return in_form(x[0] if isinstance(x, tuple) else x, found)

    def sample(self, task: str | int | None = None, n: int = 1) -> Tensor:
        """n inputs that a task's model generates, [n, ...], in the shape that was learned: the mean of p(x | z), for z
        from N(0, I), at the posterior's means. The seed fixes them.
        """
        return generating.sample(self, task, n, self._shape)

    def _check_labelled(self) -> None:
        if not self._run.likelihood.heads:
            raise EvclError(
                f"with likelihood={self._run.likelihood.name!r} there are no labels to predict: use log_likelihood, "
                "sample or mean_network"
            )

    @property
    def kept(self) -> int:
        """The number of examples of earlier tasks that the learner keeps."""
        return sum(task.y.shape[1] for task in self._run.kept_examples())

    def evaluate(self, tasks: Task | Iterable[Task] | None = None) -> dict[str, float]:
        """The accuracy on the test set of each of these tasks. All of them must have been learned. Of numbers and
        counts, the root of the mean squared error; without labels, the mean log-likelihood.

        Without tasks, the accuracy on the rows that the learner keeps of each earlier task: how much of it is left now.
        It has trained on these rows, so the accuracy on new ones may be lower.
        """
        if tasks is None:
            if not self._run.kept_examples():
                raise EvclError("no rows of earlier tasks are kept to evaluate on: pass the tasks, evaluate(tasks)")
            return self.evaluate_kept()
        tasks = tasks_of(tasks, "evaluate")
        for task in tasks:
            if task.name not in self._tasks:
                learned = ", ".join(self.tasks) or "none"
                raise EvclError(f"task {task.name!r} has not been learned, only {learned} so far")
        if not self._run.likelihood.heads:
            return {task.name: float(self.log_likelihood(task.test.x, task.name).mean()) for task in tasks}
        return {task.name: self.measure(task)[0] for task in tasks}

    def evaluate_kept(self, least: int = 1) -> dict[str, float]:
        """The accuracy on the rows that are kept of each task, if there are at least `least`; empty if none are."""
        parts: dict[str, list[TaskData]] = {}
        for kept in self._run.kept_examples():
            parts.setdefault(self.tasks[kept.task], []).append(kept)
        found = {}
        for name in self.tasks:
            x, y = self._session.rows(parts.get(name, []))
            if len(x) >= max(1, least):
                found[name] = self._measured(x, y, name)[0]
        return found

    def measure(self, data: Any, task: str | int | None = None, *, label: str | None = None) -> Any:
        """`Measures`: accuracy, NLL and expected calibration error on any data: a pair (x, y), a Dataset, batches, or a
        task. Of numbers and counts, `NumberMeasures`.

        A benchmark's task is measured on its test set, with its own head. A label that the head does not know counts as
        wrong, with the smallest possible probability. `label` names the column of labels in a dict, as in `learn`.
        """
        self._check_labelled()
        if isinstance(data, Task):
            task = data.name if task is None else task
            data = data.test
        with self._reader.reading(label):
            x, y = self._examples(data, "measure")
        return self._measured(x, y, task)

    def _measured(self, x: Tensor, y: Any, task: str | int | None) -> Any:
        """`measure`, for checked inputs and targets."""
        likelihood = self._run.likelihood
        if not likelihood.heads:
            return (float(generating.of_rows(self, x, y, task).mean()),)
        if likelihood.softmax:
            classes = self.classes(task)
            return CATEGORICAL.measure(self._probabilities(x, task), positions(y, classes, unknown=len(classes)))
        if y.shape[1] != (wanted := len(self._heads[self._head(task)])):
            raise EvclError(f"its head has {wanted} targets per example, but these have {y.shape[1]}")
        return values.widened(self, x, task).measure(y)

    def _probabilities(self, x: Tensor, task: str | int | None) -> Tensor:
        self._check_idle()
        head, number = self._head(task), self._number(task)

        def predict(x: Tensor) -> list[Tensor]:
            each = self._run.predict_each(x, [group.number for group in self._session.groups[head]], task=number)
            return [self._session.mixed(x, head, each)]

        (p,) = self._tried(x, predict)
        return p

    def _asked(self, task: str | int | None) -> list[tuple[str, int | None]]:
        """The heads that predict, each with the number of the task whose weights it uses."""
        if task != INFER:
            return [(self._head(task), self._number(task))]
        if self._run.needs_task:  # tasks that share a head have different weights
            return [(head, number) for number, head in enumerate(self._tasks.values())]
        first = list(self._tasks.values())  # each head uses the weights of its first task
        return [(head, first.index(head) if self._run.predicts_by_task else None) for head in self._heads]

    def _with_entropy(self, x: Tensor, asked: Sequence[tuple[str, int | None]]) -> list[tuple[Tensor, Tensor]]:
        """For each head, with the weights of the task beside it: the probabilities, and the mean entropy of the
        predictions of single draws of the weights.
        """
        session = self._session
        numbers = [[group.number for group in session.groups[head]] for head, _ in asked]
        calls = [(some, number) for some, (_, number) in zip(numbers, asked, strict=True)]
        if all(number is None for _, number in asked):
            calls = [([k for some in numbers for k in some], None)]

        def predict(x: Tensor) -> list[Tensor]:
            pairs = [pair for some, number in calls for pair in self._run.predict_with_entropy(x, some, number)]
            found: list[Tensor] = []
            for head, _ in asked:
                own = [pairs.pop(0) for _ in session.groups[head]]
                found += session.mixed_with_entropy(x, head, own)
            return found

        found = self._tried(x, predict)
        return list(zip(found[::2], found[1::2], strict=True))

    def _likeliest(self, x: Tensor) -> Tensor | None:
        """[N]: the position of the head with the largest likelihood of each example; None if it is unknown."""
        groups = self._session.groups.values()
        found = self._run.evidence(x.unsqueeze(0), [group.number for some in groups for group in some])
        if found is None:
            return None
        each = [part.logsumexp(2) for part in found.split([len(some) for some in groups], 2)]
        return torch.stack(each)[:, 0].argmax(0)

    def _tried(self, x: Tensor, predict: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """The result of `predict` without the replica axis. Raises if a prediction is not finite."""
        try:
            with self._run.network.keeping():
                found = [tensor[0] for tensor in predict(x.unsqueeze(0))]
        except RuntimeError as error:
            raise self._refused(x, error) from error
        for tensor in found:
            if not bool(tensor.isfinite().all()):
                row = int((~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero()[0])
                raise BadExample("its probabilities are not finite: its inputs are too large for the network", row)
        return found

    def _number(self, task: str | int | None) -> int | None:
        """The number of the given task; None if no task is given."""
        if task is None:
            return None if self._run.network.film is None else 0  # with FiLM, `_head` refuses more than one task
        if isinstance(task, Integral):
            return int(task)
        return list(self._tasks).index(str(task))

    @staticmethod
    def _labels(x: Any, p: Tensor, classes: Sequence[Label]) -> Any:
        cut = any(isinstance(label, str) and label.endswith("\0") for label in classes)  # numpy would cut it off
        found, x = np.array(classes, dtype=object if cut else None)[p.argmax(1).cpu().numpy()], like(x)
        return torch.from_numpy(found).to(x.device) if isinstance(x, Tensor) and found.dtype.kind in "ib" else found

    def _head(self, task: str | int | None) -> str:
        """The head of the task with this name or number; without a task, the only head."""
        if not self._tasks:
            raise EvclError("nothing has been learned yet: call learn first")
        if task is None:
            if len(self._heads) > 1:
                raise EvclError(f"there are {len(self._heads)} heads: choose a task, one of {', '.join(self._tasks)}")
            if self._run.network.film is not None and len(self._tasks) > 1:
                names = ", ".join(self._tasks)
                raise EvclError(f"each task has scales and shifts or layers of its own: choose a task, one of {names}")
            return next(iter(self._heads))
        if isinstance(task, Integral) and not isinstance(task, bool):
            if not 0 <= task < len(self._tasks):
                raise EvclError(f"there is no task {task}: only {len(self._tasks)} learned so far, numbered from 0")
            return list(self._tasks.values())[int(task)]
        if not isinstance(task, str):
            raise EvclError(f"a task must be a name or a number, not {task!r}")
        if task not in self._tasks:
            raise unknown("task", task, self._tasks)
        return self._tasks[task]

    def _inputs(self, x: Any) -> Tensor:
        """Convert the inputs to one tensor, and try the network on one example."""
        return self._tested(self._reader.tensor(x, self._run.network.posterior.mean.device))

    def _tested(self, x: Tensor) -> Tensor:
        """Try the network on one example, so that a mistake is found before any work; returns x."""
        try:
            self._run.features(x[:1])
        except EvclError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            raise self._refused(x, error) from error
        return x

    def _refused(self, x: Tensor, error: Exception) -> EvclError:
        form, shapes = self._run.network.call.form, f"inputs of shape {tuple(x.shape)}"
        if form is not None:
            args, named = form.unpack(x[:1])
            both = [*((f"input {i}", t) for i, t in enumerate(args)), *((repr(name), t) for name, t in named.items())]
            shapes = ", ".join(f"{name} [{', '.join(map(str, (len(x), *t.shape[1:])))}]" for name, t in both)
        return EvclError(f"the network does not take {shapes}: {str(error).splitlines()[0]}")


def _index(like: Tensor, values: list[int]) -> Tensor:
    return torch.tensor(values, device=like.device)


def tasks_of(tasks: Any, verb: str) -> list[Task]:
    """A list of tasks, from a benchmark, a single task or several tasks."""
    found = [tasks] if isinstance(tasks, Task) else list(tasks) if isinstance(tasks, Iterable) else [tasks]
    for task in found:
        if not isinstance(task, Task):
            own = ": for data of your own, use measure((x, y))" if verb == "evaluate" else ""
            raise EvclError(f"{verb} takes a benchmark or its tasks, not {type(task).__name__}{own}")
    return found
