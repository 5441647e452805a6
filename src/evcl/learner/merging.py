"""Merge learners that started from one model and learned apart, at several sites: `merge`. Rows stay at their site."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evcl._core.density import of_sites
from evcl._core.errors import EvclError
from evcl._core.inputs import Label
from evcl._core.settings import Settings
from evcl.learner.learner import Learner
from evcl.learner.persist import ACCOUNT, DENSITY, Described, rebuilt, versions
from evcl.methods import packing
from evcl.methods.elastic_memory import Memory
from evcl.methods.kronecker_posterior import without_matrices
from evcl.methods.memories import keeps_examples
from evcl.methods.memory import TRUNK_KEY
from evcl.methods.merging import Moved, by_key, merged, undeclared
from evcl.nn import Gaussian, Layout, head_names
from evcl.posterior import Evidence
from evcl.training.session import Group

SAME = {  # what the description of every site must share with the base's
    "method": "another method",
    "settings": "other settings",
    "seed": "another seed",
    "trunk": "another network",
    "mlp": "another network",
    "dtype": "another dtype",
    "prior": "another first prior",
}


@torch.no_grad()
def merge(base: Learner, sites: Sequence[Learner], names: Sequence[str] | None = None) -> Learner:
    """One learner that has learned the rows of all sites: the product of their posteriors.

    Each of the `sites` is the learner `base`, or a copy of it, that has learned more tasks since. What they have of the
    base counts once. Class statistics, Fishers and densities of rows add up. Classes that are new at some site are
    added; if several sites have learned a class that is new, each keeps its own softmax for it, and predictions mix
    them by the likelihood of the input. `names` of the sites distinguish tasks of the same name.

    It is possible for posteriors with a variance for each weight, if the method's memory declares how it merges: those
    of evcl and vcl do, without kept rows or coresets. Of a Kronecker posterior, the diagonal is merged. The product is
    exact if the posteriors are: for a network they are approximations, best near the base, so the base should have
    learned the task already from a few rows.
    """
    names = [f"site {i + 1}" for i in range(len(sites))] if names is None else list(names)
    if len(sites) < 2 or len(names) != len(sites) or len(set(names)) != len(names):
        raise EvclError("merge takes a base and at least two sites, each with a name of its own")
    parts = [_Part("the base", base), *(_Part(name, site) for name, site in zip(names, sites, strict=True))]
    for part in parts:
        part.check(parts[0])
    for i, part in enumerate(parts[1:]):
        if any(torch.equal(part.tensors["posterior.mean"], one.tensors["posterior.mean"]) for one in parts[1 : 1 + i]):
            raise EvclError(f"{part.name} is the same model as another site: its rows would count twice")
        for one in parts[1 : 1 + i]:
            _refuse_shared_rows(one, part, parts[0])
    plan = _plan(parts)
    description, tensors = _merged(parts, plan)
    return rebuilt(description, tensors)


def _refuse_shared_rows(one: _Part, other: _Part, base: _Part) -> None:
    """Raise if both sites have learned a task that the base lacks: the same posterior once was the end of both."""
    known, own, theirs = (
        {record["posterior"]: record["task"] for record in part.records if "posterior" in record}
        for part in (base, one, other)
    )
    shared = [task for posterior, task in own.items() if posterior in theirs and posterior not in known]
    if shared:
        what = f"{one.name} and {other.name} have both learned the rows of {', '.join(map(repr, shared))}"
        raise EvclError(f"{what}, which would count twice: leave one of them out")


def _diagonal(learner: Learner) -> Learner:
    """The learner with a diagonal posterior, which alone is merged; itself if it has one."""
    run = learner.state.run
    if run.settings.get("posterior") != "kronecker" or not isinstance(run.memory, Memory):
        return learner
    made = copy.deepcopy(learner)
    run, given = made.state.run, {"posterior": "diagonal", "strength": "auto"}
    made.settings = Settings({**made.settings, **given})
    run.memory = without_matrices(run.memory, run.network)
    run.settings = run.settled(Settings({**run.settings, **given}))
    return made


class _Part:
    """The base or a site."""

    def __init__(self, name: str, learner: Learner) -> None:
        learner = _diagonal(learner)
        self.name, self.session, self.records = name, learner.state.session, list(learner.state.records)
        self.description, self.tensors = learner.described()
        run = learner.state.run
        self.network, self.memory, self.settings, self.rounds = run.network, run.memory, run.settings, run.rounds
        self.layout: Layout = run.network.layout
        self.keeps = bool(learner.kept)

    def check(self, base: _Part) -> None:
        """Raise if it cannot be merged, or does not continue the base."""
        own, theirs = self.description, base.description
        if own.get("likelihood", "categorical") != "categorical":
            raise EvclError(f"{self.name} predicts numbers, or several labels: only classifiers can be merged")
        if self.keeps or keeps_examples(type(self.memory)):
            raise EvclError(f"{self.name} keeps rows, which would leave their site: merge models that keep none")
        if self.network.posterior.log_std is None or self.network.task_weights is not None:
            what = "a variance per weight, and no FiLM rows: evcl and vcl"
            raise EvclError(f"{self.name}: {own['method']} with its settings cannot be merged; that needs {what}")
        if (field := undeclared(self.memory)) is not None:
            what = f"its memory's field {field!r} does not declare how, per_weight(merge=...)"
            raise EvclError(f"{self.name}: {own['method']} with its settings cannot be merged: {what}")
        for key, what in SAME.items():
            if own.get(key) != theirs.get(key):
                raise EvclError(f"{self.name} has {what} than the base: let every site start from the base's file")
        records = base.records
        if own["tasks"][: len(theirs["tasks"])] != theirs["tasks"] or self.records[: len(records)] != records:
            raise EvclError(f"{self.name} does not continue the base: its first tasks are others")
        if self is not base and len(own["tasks"]) == len(theirs["tasks"]):
            raise EvclError(f"{self.name} has learned nothing since the base")
        for name, tensor in base.tensors.items():
            fixed = name.startswith(("kept.", "statistics.", "film")) or name in ("centre", "width")
            if fixed and not torch.equal(tensor, self.tensors.get(name, tensor[:0])):
                raise EvclError(f"{self.name}: {name} has changed since the base, and cannot be merged")

    def new_tasks(self, base: _Part) -> list[str]:
        return list(self.session.tasks)[len(base.session.tasks) :]

    def per_weight(self, values: Mapping[int, Tensor]) -> Tensor:
        """[1, P]: for each weight, the value of its head, or of the trunk; 1 if it has none."""
        expanded = torch.ones(1, self.layout.size, dtype=torch.float64)
        heads = {
            name: g.number for gs in self.session.groups.values() for g in gs for name in head_names(g.number).values()
        }
        for name, span in self.layout.spans.items():
            k = heads.get(name, TRUNK_KEY)
            if k in values:
                expanded[:, span] = values[k].double()
        return expanded


@dataclass
class _Plan:
    """The heads and tasks of the merged learner, and where those of each part have gone."""

    heads: dict[str, list[Label]] = field(default_factory=dict)
    groups: dict[str, list[Group]] = field(default_factory=dict)
    shown: dict[str, list[set[Label]]] = field(default_factory=dict)
    tasks: dict[str, str] = field(default_factory=dict)
    seen: list[int] = field(default_factory=list)
    renamed: list[dict[str, str]] = field(default_factory=list)  # per part: task -> its name
    moved: list[dict[int, int]] = field(default_factory=list)  # per part: group number -> its number

    def group(self, number: int) -> Group:
        return next(group for groups in self.groups.values() for group in groups if group.number == number)

    @property
    def sizes(self) -> dict[int, int]:
        every = (group for groups in self.groups.values() for group in groups)
        return dict(sorted((group.number, len(group.classes)) for group in every))

    def rows(self, part: _Part, i: int, number: int) -> tuple[int, Tensor]:
        """The merged group of a part's group, and the position of each of its classes there."""
        own = next(g for gs in part.session.groups.values() for g in gs if g.number == number)
        into = self.group(self.moved[i][number])
        return into.number, torch.tensor([into.classes.index(label) for label in own.classes])


def _plan(parts: Sequence[_Part]) -> _Plan:
    base = parts[0].session
    plan = _Plan(
        {name: list(classes) for name, classes in base.heads.items()},
        {name: [group._replace(classes=list(group.classes)) for group in some] for name, some in base.groups.items()},
        {name: [set(some) for some in each] for name, each in base.shown.items()},
        dict(base.tasks),
        list(base.seen),
    )
    known = len(plan.sizes)
    for part in parts:
        new = part.new_tasks(parts[0]) if part is not parts[0] else []
        every = [task for other in parts[1:] for task in other.new_tasks(parts[0])]
        plan.renamed.append({task: f"{part.name}: {task}" if every.count(task) > 1 else task for task in new})
        plan.moved.append({k: k for k in range(known)})
        for head, groups in part.session.groups.items():  # classes that joined a softmax of the base
            for group in groups:
                if group.number < known:
                    own = plan.group(group.number).classes
                    own += [label for label in group.classes if label not in own]
                    plan.shown[head][group.domain] |= part.session.shown[head][group.domain] & set(group.classes)
    for i, part in enumerate(parts[1:], 1):
        _add_groups(plan, part, i, known, base.groups)
        names = plan.renamed[i]
        for task in names:
            head = part.session.tasks[task]
            plan.tasks[names[task]] = names.get(head, head)
        plan.seen += [plan.moved[i][k] for k in part.session.seen[len(base.seen) :]]
    for name, groups in plan.groups.items():
        plan.heads[name] = list(dict.fromkeys([*plan.heads.get(name, []), *(c for g in groups for c in g.classes)]))
    return plan


def _add_groups(plan: _Plan, part: _Part, i: int, known: int, base: Mapping[str, Sequence[Group]]) -> None:
    """Add the softmaxes that are new at a site. If another site has learned one of the classes too, they become a
    domain of their own: each site's likelihood of an input then tells whose softmax predicts it.
    """
    for head, groups in part.session.groups.items():
        name = plan.renamed[i].get(head, head)
        mine = plan.groups.setdefault(name, [])
        by_domain = plan.shown.setdefault(name, [])
        domains = {group.domain: group.domain for group in base.get(head, ())}
        others = {label for group in mine for label in group.classes}
        others -= {label for group in base.get(head, ()) for label in group.classes}
        for group in groups:
            if group.number < known:
                continue
            domain = group.domain
            if domain in domains and others & set(group.classes):
                domain = -1 - domain  # a key for its new number
            if domain not in domains:
                domains[domain] = len(by_domain)
                by_domain.append(set())
            number = 1 + max(plan.sizes, default=-1)
            plan.moved[i][group.number] = number
            mine.append(Group(number, list(group.classes), domains[domain]))
            by_domain[domains[domain]] |= part.session.shown[head][group.domain] & set(group.classes)


def _merged(parts: Sequence[_Part], plan: _Plan) -> tuple[Described, dict[str, Tensor]]:
    """The description and tensors of the merged learner: see `Learner.described`."""
    base = parts[0]
    trunk = {name: base.layout.shapes[name] for name in base.network.trunk_names}
    heads: dict[str, tuple[int, ...]] = {}
    for k, size in plan.sizes.items():
        names = head_names(k)
        heads |= {names["weight"]: (size, base.description["features"]), names["bias"]: (size,)}
    moved = [_moved(part, i, plan, Layout({**trunk, **heads})) for i, part in enumerate(parts)]
    dtype = base.tensors["posterior.mean"].dtype
    q = _posterior(parts, moved).map(lambda flat: flat.to(dtype))
    assert q.log_std is not None
    memory = merged([part.memory for part in parts], moved, q, base.settings)
    drop = ("memory/", DENSITY, ACCOUNT)
    tensors = {name: tensor for name, tensor in base.tensors.items() if not name.startswith(drop)}
    tensors |= {"posterior.mean": q.mean, "posterior.log_std": q.log_std}
    tensors |= {f"memory/{name}": tensor for name, tensor in packing.tensors(memory).items()}
    densities = [part.session.density for part in parts if part.session.density is not None]
    if len(densities) == len(parts):
        density = of_sites(densities[0], densities[1:])
        tensors |= {f"{DENSITY}{name}": tensor for name, tensor in density.tensors().items()}
    description = base.description | {
        "memory": [packing.outline(memory)],
        "heads": [[name, classes] for name, classes in plan.heads.items()],
        "tasks": [[task, head] for task, head in plan.tasks.items()],
        "rounds": base.rounds + sum(part.rounds - base.rounds for part in parts[1:]),
        "groups": {name: [list(g) if g.domain else list(g[:2]) for g in some] for name, some in plan.groups.items()},
        "shown": {name: _shown(plan, name) for name in plan.heads},
        "seen": plan.seen,
        "records": _records(parts, plan),
        "versions": versions(),
    }
    return description, {name: tensor.contiguous() for name, tensor in tensors.items()}


def _moved(part: _Part, i: int, plan: _Plan, layout: Layout) -> Moved:
    """Where a part's weights and classes are in the merged learner."""
    place, heads = torch.arange(part.layout.size), {}
    for groups in part.session.groups.values():
        for group in groups:
            into, rows = heads[group.number] = plan.rows(part, i, group.number)
            for kind, name in head_names(group.number).items():
                span = layout.spans[head_names(into)[kind]]
                where = torch.arange(span.start, span.stop).view(layout.shapes[head_names(into)[kind]])
                place[part.layout.spans[name]] = where[rows].flatten()
    return Moved(part.name, place, layout.size, heads, plan.sizes)


def _posterior(parts: Sequence[_Part], moved: Sequence[Moved]) -> Gaussian:
    """The product of the posteriors: q_0, and the evidence by which each site's differs from it.

    For a weight that the base does not have, q_0 is the first prior. What rows add to a precision is in the units of
    its memory, such as the beta that they were learned with (see methods/kl.py): all are converted to the mean of the
    sites' units.
    """
    given = [part.memory.units() if hasattr(part.memory, "units") else {} for part in parts]
    usual = by_key("mean", [to.by_head(one) for to, one in zip(moved, given, strict=True)])
    whole = torch.zeros(1, moved[0].size, dtype=torch.float64)
    mean, precision, gaussians = whole, whole + 1, []
    for part, to, units in zip(parts, moved, given, strict=True):
        q, now = part.network.posterior, {k: usual[to.heads[k][0] if k in to.heads else k] for k in units}
        first, own = (
            one.map(lambda flat: flat[:1].double().cpu())
            for one in (part.network.first_prior(part.settings.prior_std, q.mean), q)
        )
        ratio = part.per_weight(units) / part.per_weight(now)
        added = first.precision() + ratio * (own.precision() - first.precision())
        gaussians.append(Gaussian(own.mean, -0.5 * added.clamp_min(1e-12).log()))
        mean, precision = (
            t.index_copy(1, to.place, new) for t, new in ((mean, first.mean), (precision, first.precision()))
        )
    base, *sites = gaussians
    mean = mean.index_copy(1, moved[0].place, base.mean)
    precision = precision.index_copy(1, moved[0].place, base.precision())
    prior = Gaussian(mean, -0.5 * precision.log())
    q = prior
    for site, to in zip(sites, moved[1:], strict=True):
        rows = site.since(Gaussian(prior.mean[:, to.place], -0.5 * precision[:, to.place].log()))
        q = q.plus(Evidence(to.whole(rows.precision), to.whole(rows.pull), prior.mean))
    return q


def _shown(plan: _Plan, name: str) -> list[Any]:
    """The classes that some row had: one list per domain, or one list."""
    each = [[label for label in plan.heads[name] if label in some] for some in plan.shown[name]]
    return each if len(each) > 1 else each[0]


def _records(parts: Sequence[_Part], plan: _Plan) -> list[Any]:
    records = list(parts[0].records)
    for names, part in zip(plan.renamed[1:], parts[1:], strict=True):
        records += [{**one, "task": names[one["task"]]} for one in part.records if one["task"] in names]
    return records
