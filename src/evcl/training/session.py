"""Names of tasks, heads and classes. `Learner` and `evcl run` both use a `Session`, one round after another."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evcl._core.density import Density
from evcl._core.devices import double
from evcl._core.errors import EvclError
from evcl._core.inputs import Label, positions
from evcl.methods import TaskData
from evcl.methods.method import Newcomer
from evcl.nn.inputs import Call
from evcl.targets.scale import Scale
from evcl.training import targets
from evcl.training.run import Run

MOST_DOMAINS = 100  # that a head may have; a task after these joins the domain that it resembles most
ROWS_PER_CLASS = 10  # a task of at least this many rows per class would have rows of every class, if it had all of them


class Given(NamedTuple):
    """A task as the caller passes it: inputs [U, N, ...] (see TaskData), and U lists of labels or, if the likelihood is
    not that of classes, targets [U, N, D].

    `counts` has the number of rows of each label. A stream gives it, since it may give only some of the rows.
    """

    name: str
    head: str
    classes: Sequence[Label]  # classes that its head must have, even if no label uses them
    x: Tensor
    y: Sequence[Sequence[Label]] | Tensor
    counts: Mapping[Label, int] | None = None
    weights: Tensor | None = None  # [U, N]: those of the examples; None: all 1
    reread: bool = False  # its rows are read anew in every epoch, and so must all be learned in one softmax

    def rows(self) -> Mapping[Label, int]:
        """The number of rows of each label."""
        if isinstance(self.y, Tensor):
            return {}
        return Counter(label for row in self.y for label in row) if self.counts is None else self.counts


class Group(NamedTuple):
    """Classes of a head that are learned together, in one softmax: a head of the network.

    A class may be in several groups of a domain: it belongs to the last of them.
    """

    number: int  # of the network's head
    classes: list[Label]  # in the order of its outputs
    domain: int = 0  # each domain of a head has likelihoods of its own, also for the same classes


class Undecided(EvclError):
    """Replicas disagree on whether a task is a new domain, and cannot be learned side by side."""


class Session:
    """A run, the names of its tasks and heads, and the heads' classes.

    A head is one softmax over its classes. But if the run tells classes apart that were not learned together (see
    `Method.log_joint`), the new classes of a task that lacks half of the old ones, or more, are a group of classes with
    a softmax of its own. So are the classes of a task that is a new domain of its head (see `Method.domains`).
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.heads: dict[str, list[Label]] = {}  # head -> its classes, in the order of its outputs
        self.groups: dict[str, list[Group]] = {}  # head -> its groups of classes
        self.shown: dict[str, list[set[Label]]] = {}  # head -> for each domain, the classes that some row had
        self.tasks: dict[str, str] = {}  # task -> its head
        self.domains: dict[str, int] = {}  # task -> its domain; known in advance for tasks of a resumed stream
        self.seen: list[int] = []  # the network's heads that tasks have used, in order
        self.lacking: list[Label] = []  # old classes that the last task had no rows of, but whose softmax it trained
        self.scales: dict[str, Scale] = {}  # head -> the scale of its targets, if they are not classes
        self.density: Density | None = None  # summary of all training rows, if the learner keeps one

    def forked(self, call: Call) -> Session:
        """A session of its own with a fork of the run, to learn a round while this one predicts."""
        made = copy.copy(self)
        made.run = self.run.forked(call)
        made.heads, made.groups = dict(self.heads), dict(self.groups)  # their values are replaced, never changed
        made.shown, made.domains = dict(self.shown), dict(self.domains)
        return made

    @contextmanager
    def round(self, given: Sequence[Given], ended: Callable[[], None] = lambda: None) -> Iterator[list[TaskData]]:
        """Add or extend the heads of these tasks and yield their data; learn them inside this context.

        On success, the tasks are recorded and `ended` is called. If learning fails, the session is left unfinished: let
        a fork learn.
        """
        try:
            with self.run.network.keeping():
                moved = [task._replace(x=task.x.to(self.run.network.posterior.mean)) for task in given]
                prepared = [self._prepared(task, len(self.tasks) + i) for i, task in enumerate(moved)]
                heads = [k for task in given for k in self._used(task)]
                yield [part for parts in prepared for part in parts]
            self.tasks = {**self.tasks, **{task.name: task.head for task in given}}
            self.seen = [*self.seen, *heads]
            ended()
        except EvclError as error:
            raise error.within(f"task {given[-1].name!r}") from error

    def _prepared(self, task: Given, number: int) -> list[TaskData]:
        """The task's data on the run's device, one part for each group of classes that it uses, the largest first."""
        if not self.run.likelihood.softmax:
            return [targets.prepared(self, task, number)]
        run, name = self.run, task.head
        known, rows = self.heads.get(name, []), task.rows()
        present = set(rows)
        classes = _merged(known, task.classes, list(present))
        groups = list(self.groups.get(name, []))
        domain = self._domain(task, groups)
        every = [*self.shown.get(name, []), set()]  # a new domain is the last
        shown = every[domain]
        if not groups:
            (k,) = run.add_heads(self.features(task), [len(classes)])
            groups = [Group(k, classes)]
        elif self._apart(task, present, shown) and (domain > 0 or self._tells_apart(task, groups)):
            own = [label for label in classes if label in present - shown]
            groups.append(Group(run.add_head(self.features(task), len(own)), own, domain))
        here = {label for group in groups if group.domain == domain for label in group.classes}
        new = [label for label in classes if label not in here and (label in present or label not in known)]
        if new:
            self._add(groups, domain, new, rows)
        every[domain] = shown | present
        self.heads[name], self.groups[name], self.domains[task.name] = classes, groups, domain
        self.shown[name] = every if every[-1] else every[:-1]
        owner = {label: g for label, (g, _) in self.owners(name, domain).items()}
        used = {label for label in owner if owner[label] in {owner[one] for one in present}}
        few = sum(rows.values()) < ROWS_PER_CLASS * len(used)
        self.lacking = [] if few else [label for label in classes if label in used & shown - present]
        run.add_task_weights(number + 1)
        return self._parts(task, number)

    def add_errors(self, errors: Mapping[str, Tensor], known: set[str]) -> None:
        """Count errors on new rows of these heads' targets; those that are not `known` are made in this round."""
        run = self.run
        scales = {name: self.scales[name].tested_on(each, name not in known) for name, each in errors.items()}
        self.scales = {**self.scales, **scales}
        for name in errors.keys() & known:
            run.likelihood.expect(run.network, self.groups[name][0].number, errors[name], scales[name])

    def _add(self, groups: list[Group], domain: int, new: Sequence[Label], rows: Mapping[Label, int]) -> None:
        """Add classes to the group of this domain that has the most rows of a task, in place."""
        most = [sum(rows.get(label, 0) for label in group.classes) for group in groups]
        mine = [i for i, group in enumerate(groups) if group.domain == domain]
        k = max(mine, key=lambda i: (most[i], i))
        groups[k] = groups[k]._replace(classes=[*groups[k].classes, *new])
        self.run.grow_head(groups[k].number, len(groups[k].classes))

    def _domain(self, task: Given, groups: Sequence[Group]) -> int:
        """The domain of a task: a new one, or the one that most of its rows belong to."""
        name, known = task.head, sorted({group.domain for group in groups})
        if task.name in self.domains or not groups or not self.run.tells_classes_apart:
            return self.domains.get(task.name, 0)
        shown = set().union(*self.shown[name])
        if not shown & task.rows().keys():
            return 0  # new classes are no domain: they are a group of their own
        place = {label: i for i, label in enumerate(self.heads[name])}
        y = torch.tensor([[place[label] if label in shown else -1 for label in row] for row in task.y])
        mean = self.run.network.posterior.mean
        classes = [[place[label] for label in group.classes] for group in groups]
        newcomer = Newcomer(y.to(mean.device), classes, [group.domain for group in groups])
        answer = self.run.domains(task.x.to(mean), [group.number for group in groups], newcomer)
        if answer is None:
            return 0
        new, shares = answer
        most = [row.index(max(row)) for row in shares]
        full = len(known) >= MOST_DOMAINS
        each = {d if full or not opens else len(known) for d, opens in zip(most, new, strict=True)}
        if len(each) > 1:
            raise Undecided("seeds disagree on whether this task is a new domain of its head: learn them separately")
        return each.pop()

    @staticmethod
    def _apart(task: Given, present: set[Label], shown: set[Label]) -> bool:
        """Whether a task's new classes are a group of their own: if it has rows of half of the old classes at most. A
        softmax over all would learn, from its rows, never to predict the others.
        """
        if not present & shown:
            return True
        return not task.reread and bool(present - shown) and 2 * len(present & shown) <= len(shown)

    def _tells_apart(self, task: Given, groups: Sequence[Group]) -> bool:
        """Whether these groups of classes can be told apart from new classes. A model of an earlier version cannot: it
        has no statistics of its classes. In a stream, where `counts` are given, they are known.
        """
        if not self.run.tells_classes_apart or task.counts is not None:
            return self.run.tells_classes_apart
        x = task.x[:, :1].to(self.run.network.posterior.mean)
        return self.run.evidence(x, [group.number for group in groups]) is not None

    group = Group

    def features(self, task: Given) -> int:
        """The width of the trunk's output for a task's inputs."""
        return self.run.features(task.x[:1, 0].to(self.run.network.posterior.mean))

    def owners(self, name: str, domain: int) -> dict[Label, tuple[int, int]]:
        """For each class of a domain of a head: its group, and its position there."""
        groups = self.groups[name]
        last = {label: g for g, group in enumerate(groups) if group.domain == domain for label in group.classes}
        return {
            label: (last[label], groups[last[label]].classes.index(label))
            for label in self.heads[name]
            if label in last
        }

    def _used(self, task: Given) -> list[int]:
        """The network's heads that a task uses, that with the most rows first."""
        if not self.run.likelihood.softmax:
            return [self.groups[task.head][0].number]
        owner = {label: g for label, (g, _) in self.owners(task.head, self.domains[task.name]).items()}
        rows: Counter[int] = Counter()
        for label, count in task.rows().items():
            rows[owner[label]] += count
        return [self.groups[task.head][g].number for g in sorted(rows, key=lambda g: (-rows[g], g))]

    def _parts(self, task: Given, number: int) -> list[TaskData]:
        groups, whole, used = self.groups[task.head], self.data(task), self._used(task)
        owners = self.owners(task.head, self.domains[task.name])
        places = torch.tensor([owners.get(label, (-1, -1)) for label in self.heads[task.head]])
        group, place = (column[whole.y] for column in places.to(whole.y.device).T)
        whole = replace(whole, y=place, task=number)
        if len(used) == 1:
            return [replace(whole, head=used[0])]
        parts = []
        for k in used:
            mine = group == next(g for g, one in enumerate(groups) if one.number == k)
            least = int(mine.sum(1).min())  # streams of several seeds must have equally many rows
            rows = torch.stack([row.nonzero().flatten()[:least] for row in mine])
            parts.append(replace(whole, head=k).select(rows))
        return parts

    def group_of(self, task: Given, data: TaskData) -> list[Label]:
        """The classes that a part of a task's data is classified among, in the order of its labels."""
        return next(group.classes for group in self.groups[task.head] if group.number == data.head)

    def data(self, task: Given) -> TaskData:
        """A task's data on the run's device; labels become class indices within its head."""
        mean = self.run.network.posterior.mean
        number = list(self.tasks).index(task.name) if task.name in self.tasks else 0
        if not self.run.likelihood.softmax:
            return targets.data(self, task, number)
        y = torch.stack([positions(row, self.heads[task.head]) for row in task.y])
        weights = None if task.weights is None else task.weights.to(mean)
        return TaskData(task.x.to(mean), y.to(mean.device), self.groups[task.head][0].number, weights, number)

    def rows(self, parts: Sequence[TaskData]) -> tuple[Tensor, Any]:
        """The inputs [N, ...] of parts of one task, and their targets as the user gave them."""
        groups = {group.number: (name, group.classes) for name, some in self.groups.items() for group in some}
        given: list[Any] = []
        for part in parts:
            name, classes = groups[part.head]
            given.append(self.run.likelihood.given(part.y[0], classes, self.scales.get(name)))
        x = torch.cat([part.x[0] for part in parts]) if parts else torch.empty(0)
        return x, torch.cat(given) if given and isinstance(given[0], Tensor) else [y for some in given for y in some]

    # --- prediction ------------------------------------------------------------------------------------------------

    def predict(self, data: TaskData, name: str) -> Tensor:
        """Predictions [R, N, classes of the head `name`] for a task's inputs; with several processes, each predicts a
        part.

        Weight draws are kept from one task to the next, whatever their size.
        """
        run = self.run
        draws = run.draws(range(len(run.network.heads)), data.task, keep=True)

        def predicted(x: Tensor) -> Tensor:
            with run.network.keeping():
                each = run.predict_each(x, [group.number for group in self.groups[name]], draws, data.task)
                return self.mixed(x, name, each)

        if run.ranks is None:
            return predicted(data.x)
        mean, part = run.network.posterior.mean, run.ranks.part(data.x.shape[1])
        outputs = mean.new_zeros(len(mean), data.x.shape[1], len(self.heads[name]))
        if part.stop > part.start:
            outputs[:, part] = predicted(data.x[:, part])
        return run.ranks.sum_(outputs)

    def predict_inferring(self, data: TaskData, name: str) -> Tensor:
        """`predict` for a method that needs the task, which is not given: each example is predicted as one of the task,
        out of those that use this head, whose prediction is least uncertain.
        """
        tasks = [number for number, head in enumerate(self.tasks.values()) if head == name]
        each = torch.stack([self.predict(replace(data, task=number), name) for number in tasks])
        best = torch.special.entr(each).sum(3).argmin(0)
        return each.gather(0, best[None, :, :, None].expand(1, *each.shape[1:])).squeeze(0)

    def infer(self, data: TaskData, label: Sequence[Sequence[Label]]) -> dict[str, Tensor]:
        """[R] each: the accuracy on these inputs, with these labels for each stream, if the task is not given. Each
        example is predicted by one of the heads, chosen in one of these ways:

        entropy: the head with the smallest entropy, relative to its maximum, log(classes)
        information: the head whose outputs tell least about the weights: the smallest mutual information, also relative
        likelihood: the head with the largest likelihood p(x, head), if the method has a likelihood per class
        """
        run, first = self.run, {head: number for number, head in reversed(list(enumerate(self.tasks.values())))}
        scores: dict[str, list[Tensor]] = {"entropy": [], "information": []}
        right = []
        pairs = [(name, first[name] if run.predicts_by_task else None) for name in self.heads]
        for (p, aleatoric), classes in zip(self.each_head(data.x, pairs), self.heads.values(), strict=True):
            entropy = torch.special.entr(p).sum(2)
            most = math.log(max(2, len(classes)))
            scores["entropy"].append(-entropy / most)
            scores["information"].append((aleatoric - entropy).clamp(max=0) / most)
            places = [positions(row, classes, unknown=len(classes)) for row in label]
            wanted = torch.stack([places[r % len(places)] for r in range(len(p))]).to(p.device)
            right.append(p.argmax(2) == wanted)
        if not run.method.bayesian:
            del scores["information"]  # without draws of the weights, there is none
        every = run.evidence(data.x, [group.number for groups in self.groups.values() for group in groups])
        if every is not None:
            sizes = [len(groups) for groups in self.groups.values()]
            scores["likelihood"] = [part.logsumexp(2) for part in every.split(sizes, 2)]
        accuracies = {}
        for how, each in scores.items():
            best = torch.stack(each).argmax(0, keepdim=True)
            accuracy = double(torch.stack(right).gather(0, best).squeeze(0)).mean(1)
            unknown = torch.stack(each).isnan().any(2).any(0)
            accuracies[how] = torch.where(unknown, torch.nan, accuracy).cpu()
        return accuracies

    def each_head(self, x: Tensor, asked: Sequence[tuple[str, int | None]]) -> list[tuple[Tensor, Tensor]]:
        """For each of these heads, with the weights of the task beside it: the probabilities [R, N, classes], and the
        mean entropy of the predictions of single draws of the weights, [R, N].
        """
        numbers = [[group.number for group in self.groups[head]] for head, _ in asked]
        calls = list(zip(numbers, (task for _, task in asked), strict=True))
        if all(task is None for _, task in asked):
            calls = [([k for some in numbers for k in some], None)]
        pairs = iter([pair for some, task in calls for pair in self.run.predict_with_entropy(x, some, task)])
        return [self.mixed_with_entropy(x, head, [next(pairs) for _ in self.groups[head]]) for head, _ in asked]

    def mixed(self, x: Tensor, name: str, each: Sequence[Tensor]) -> Tensor:
        """[R, N, classes of a head]: the sum over the head's groups of p(g | x) p(y | x, g), from the predictions of
        each of them.
        """
        if len(each) == 1:
            return each[0]
        return self._mixture(self.group_probabilities(x, name), name, each)

    def _mixture(self, group: Tensor, name: str, each: Sequence[Tensor]) -> Tensor:
        """`mixed`, with the probabilities of the groups."""
        place = {label: i for i, label in enumerate(self.heads[name])}
        mixture = each[0].new_zeros(*each[0].shape[:2], len(place))
        owners = {d: self.owners(name, d) for d in {one.domain for one in self.groups[name]}}
        for g, (p, one) in enumerate(zip(each, self.groups[name], strict=True)):
            mine = [(place[label], position) for label, (i, position) in owners[one.domain].items() if i == g]
            into, own = torch.tensor(mine, dtype=torch.long, device=p.device).view(-1, 2).T
            p = p[:, :, own]
            p = group[:, :, g : g + 1] * p / p.sum(2, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
            mixture.index_add_(2, into, p)
        return mixture

    def mixed_with_entropy(self, x: Tensor, name: str, each: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """`mixed`, and the mean entropy of single draws of the weights: that of the groups, and of the classes within
        them. `each` has both for every group.
        """
        if len(each) == 1:
            return each[0]
        group = self.group_probabilities(x, name)
        within = (group * torch.stack([entropy for _, entropy in each], 2)).sum(2)
        p = self._mixture(group, name, [one for one, _ in each])
        return p, torch.special.entr(group).sum(2) + within

    def group_probabilities(self, x: Tensor, name: str) -> Tensor:
        """[R, N, groups]: p(g | x) for the groups of a head; uniform if the run knows no likelihood of these inputs."""
        numbers = [group.number for group in self.groups[name]]
        evidence = self.run.evidence(x, numbers)
        if evidence is None:
            warnings.warn(
                f"head {name!r} has {len(numbers)} groups of classes that were learned apart, and inputs of shape "
                f"{tuple(x.shape[2:])} say nothing about which of them: all are taken to be equally likely. Give "
                "inputs of the shape of the first task, or learn with one_softmax=True",
                stacklevel=2,
            )
            return x.new_full((len(self.run.seeds), x.shape[1], len(numbers)), 1 / len(numbers))
        return evidence.softmax(2)


def _merged(head: Sequence[Label], known: Sequence[Label], y: Sequence[Label]) -> list[Label]:
    """A head's classes followed by the new ones: those that the task declares, then those in its labels, sorted."""
    kinds = {type(label) for label in (*head, *known, *y)}
    if len(kinds) > 1:
        raise EvclError("a head's labels must be all integers or all strings; these are a mixture")
    classes = list(dict.fromkeys([*head, *known, *sorted(set(y))]))
    if len(classes) < 2:
        raise EvclError(
            f"a new head needs at least two classes, but the labels contain only {classes[0]!r}: "
            "name all classes with classes=[...]"
        )
    return classes
