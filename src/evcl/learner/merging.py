"""Merge learners that started from one model and learned apart, at several sites: `merge`. Rows stay at their site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.inputs import Label
from evcl.learner import card
from evcl.learner.describing import DENSITY
from evcl.learner.learner import Learner
from evcl.learner.loading import rebuilt
from evcl.learner.product import Counted, Diagonal, density, product, statistics, summed
from evcl.methods.class_statistics import Statistics
from evcl.methods.vcl import TRUNK
from evcl.nn import Layout, head_names
from evcl.training.session import Group

FIELDS = ("prior", "importance", "used", "rows", "beta", "factors", "classes")  # of memories that can be merged
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

    It is possible for evcl and vcl without kept rows or coresets, whose posteriors have a variance for each weight. The
    product is exact if the posteriors are: for a network they are approximations, best near the base, so the base
    should have learned the task already from a few rows.
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
        {record["posterior"]: record["task"] for record in part.learner.parts.records if "posterior" in record}
        for part in (base, one, other)
    )
    shared = [task for posterior, task in own.items() if posterior in theirs and posterior not in known]
    if shared:
        what = f"{one.name} and {other.name} have both learned the rows of {', '.join(map(repr, shared))}"
        raise EvclError(f"{what}, which would count twice: leave one of them out")


class _Part:
    """The base or a site."""

    def __init__(self, name: str, learner: Learner) -> None:
        self.name, self.learner, self.session = name, learner, learner.parts.session
        self.description, self.tensors = learner.described()
        self.layout: Layout = learner.parts.run.network.layout
        self.memory = learner.parts.run.memory

    def check(self, base: _Part) -> None:
        """Raise if it cannot be merged, or does not continue the base."""
        own, theirs = self.description, base.description
        q, told = self.learner.parts.run.network.posterior, own["memory"][0].get("fields", {})
        if own.get("likelihood", "categorical") != "categorical":
            raise EvclError(f"{self.name} predicts numbers, or several labels: only classifiers can be merged")
        if self.learner.kept or "inner" in told or "kept" in told:
            raise EvclError(f"{self.name} keeps rows, which would leave their site: merge models that keep none")
        if (
            q.log_std is None
            or self.learner.parts.run.network.film is not None
            or not set(told) <= set(FIELDS)
            or getattr(self.memory, "factors", None)
        ):
            what = "a variance per weight, and no other memory of tasks: evcl and vcl"
            raise EvclError(f"{self.name}: {own['method']} with its settings cannot be merged; that needs {what}")
        for key, what in SAME.items():
            if own.get(key) != theirs.get(key):
                raise EvclError(f"{self.name} has {what} than the base: let every site start from the base's file")
        records = base.learner.parts.records
        if (
            own["tasks"][: len(theirs["tasks"])] != theirs["tasks"]
            or self.learner.parts.records[: len(records)] != records
        ):
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
        """[P]: for each weight, the value of its head, or of the trunk; 1 if it has none."""
        found = torch.ones(self.layout.size, dtype=torch.float64)
        heads = {
            name: g.number for gs in self.session.groups.values() for g in gs for name in head_names(g.number).values()
        }
        for name, span in self.layout.spans.items():
            k = heads.get(name, TRUNK)
            if k in values:
                found[span] = float(values[k][0, 0])
        return found


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
        shown = plan.shown.setdefault(name, [])
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
                domains[domain] = len(shown)
                shown.append(set())
            number = 1 + max(plan.sizes, default=-1)
            plan.moved[i][group.number] = number
            mine.append(Group(number, list(group.classes), domains[domain]))
            shown[domains[domain]] |= part.session.shown[head][group.domain] & set(group.classes)


def _merged(parts: Sequence[_Part], plan: _Plan) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and tensors of the merged learner: see `Learner.described`."""
    base = parts[0]
    trunk = {name: base.layout.shapes[name] for name in base.learner.parts.run.network.trunk_names}
    heads: dict[str, tuple[int, ...]] = {}
    for k, size in plan.sizes.items():
        names = head_names(k)
        heads |= {names["weight"]: (size, base.description["features"]), names["bias"]: (size,)}
    layout = Layout({**trunk, **heads})
    places = [_places(part, i, plan, layout) for i, part in enumerate(parts)]
    q, beta = _posterior(parts, places, plan, layout)
    description, tensors = dict(base.description), dict(base.tensors)
    dtype = base.tensors["posterior.mean"].dtype
    mean, log_std = (t.to(dtype) for t in (q.mean[None], -0.5 * q.precision.log()[None]))
    tensors |= {"posterior.mean": mean, "posterior.log_std": log_std}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("memory/")}
    tensors |= {"memory/prior/mean": mean.clone(), "memory/prior/log_std": log_std.clone()}
    told = dict(description["memory"][0]["fields"])
    rows = _rows(parts, plan)
    told["rows"], told["beta"] = _put(tensors, "rows", rows), _put(tensors, "beta", beta)
    if "importance" in told:
        decay = float(base.learner.settings["fisher_decay"])
        each = [
            _spread(part.memory.importance[0].double(), place, layout.size)
            for part, place in zip(parts, places, strict=True)
        ]
        used = [
            _spread(part.memory.used[0].double(), place, layout.size) for part, place in zip(parts, places, strict=True)
        ]
        tensors["memory/importance"] = summed(each[0], each[1:], decay).clamp_min(0).to(dtype)[None]
        tensors["memory/used"] = torch.stack(used).amax(0).to(dtype)[None]
    if "classes" in told:
        told["classes"] = {"fields": _statistics(parts, plan, tensors)}
    densities = [part.session.density for part in parts]
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(DENSITY)}
    if all(one is not None for one in densities):
        found = density(densities[0], densities[1:])  # type: ignore[arg-type]
        tensors |= {f"{DENSITY}{name}": tensor for name, tensor in found.tensors().items()}
    description |= {
        "memory": [{"fields": told}],
        "heads": [[name, classes] for name, classes in plan.heads.items()],
        "tasks": [[task, head] for task, head in plan.tasks.items()],
        "rounds": int(summed(*_pair([torch.tensor(part.learner.parts.run.rounds) for part in parts]))),
        "groups": {name: [list(g) if g.domain else list(g[:2]) for g in some] for name, some in plan.groups.items()},
        "shown": {name: _shown(plan, name) for name in plan.heads},
        "seen": plan.seen,
        "records": _records(parts, plan),
        "versions": card.versions(),
    }
    return description, {name: tensor.contiguous() for name, tensor in tensors.items()}


def _pair(parts: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    return parts[0], parts[1:]


def _places(part: _Part, i: int, plan: _Plan, layout: Layout) -> Tensor:
    """[P']: the position of each of a part's weights among those of the merged learner."""
    found = torch.arange(part.layout.size)
    for groups in part.session.groups.values():
        for group in groups:
            into, rows = plan.rows(part, i, group.number)
            for kind, name in head_names(group.number).items():
                span = layout.spans[head_names(into)[kind]]
                where = torch.arange(span.start, span.stop).view(layout.shapes[head_names(into)[kind]])
                found[part.layout.spans[name]] = where[rows].flatten()
    return found


def _spread(values: Tensor, place: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.float64).index_copy_(0, place, values)


def _posterior(
    parts: Sequence[_Part], places: Sequence[Tensor], plan: _Plan, layout: Layout
) -> tuple[Diagonal, dict[int, Tensor]]:
    """The product of the posteriors, and the beta of each head and the trunk. What rows add to a precision is in units
    of the beta that they were learned with (see methods/vcl.py): all are converted to the mean beta of the sites.
    """
    betas = [
        {k if k == TRUNK else plan.moved[i][k]: value for k, value in part.memory.beta.items()}
        for i, part in enumerate(parts)
    ]
    keys = {k: None for some in betas for k in some}
    usual = {}
    for k in keys:
        given = [some[k] for some in betas[1:] if k in some] or [betas[0][k]]
        usual[k] = torch.stack(given).mean(0)
    first = torch.ones(layout.size, dtype=torch.float64)
    found = []
    for i, (part, place) in enumerate(zip(parts, places, strict=True)):
        network, s = part.learner.parts.run.network, part.learner.settings
        q = network.posterior
        width = network.first_log_std(s.prior_std, q.mean)[0].double().expand(part.layout.size).cpu()
        own = (-2 * width).exp()
        first[place] = own
        now = {k: usual[k if k == TRUNK else plan.moved[i][k]] for k in part.memory.beta}
        units = part.per_weight(part.memory.beta) / part.per_weight(now)
        precision = own + units * (q.map(lambda flat: flat[0].double().cpu()).precision() - own)
        found.append(Diagonal(place, q.mean[0].double().cpu(), precision.clamp_min(1e-12)))
    mean = torch.zeros(layout.size, dtype=torch.float64)
    centre = parts[0].learner.parts.run.network.centre
    if not centre.is_meta:
        mean[: centre.shape[1]] = centre[0].double()
    base = found[0]
    prior = Diagonal(torch.arange(layout.size), mean.index_copy(0, base.place, base.mean), first.clone())
    prior.precision[base.place] = base.precision
    return product(prior, found[1:]), usual


def _rows(parts: Sequence[_Part], plan: _Plan) -> dict[int, Tensor]:
    """The number of rows that each head has learned from."""
    every = [{plan.moved[i][k]: n for k, n in part.memory.rows.items()} for i, part in enumerate(parts)]
    like = next((n for some in every for n in some.values()), torch.zeros(1, 1))
    nothing = torch.zeros_like(like)
    return {
        k: summed(*_pair([some.get(k, every[0].get(k, nothing)) for some in every]))
        for k in dict.fromkeys(k for some in every for k in some)
    }


def _put(tensors: dict[str, Tensor], name: str, values: Mapping[Any, Tensor]) -> dict[str, Any]:
    """Add a dict of a memory to the tensors; returns its outline."""
    tensors |= {f"memory/{name}/{key}": value for key, value in values.items()}
    return {"dict": [[key, "tensor"] for key in values]}


def _statistics(parts: Sequence[_Part], plan: _Plan, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Add the statistics of classes to the tensors; returns their outline."""
    each: list[Statistics] = [part.memory.classes for part in parts]
    if all(one.classes for one in each):
        for part, one in zip(parts, each, strict=True):
            one.joined(one.classes)  # raises if they do not fit each other
            if any(not torch.equal(one.common[name], each[0].common[name]) for name in ("centre", "scale")):
                raise EvclError(f"{part.name}: its inputs are scaled in another way than the base's")
        counted = [
            Counted(one, {k: plan.rows(part, i, k) for k in one.classes})
            for i, (part, one) in enumerate(zip(parts, each, strict=True))
        ]
        found = statistics(counted[0], counted[1:], plan.sizes)
    else:
        found = Statistics()
    return {
        "classes": _put(tensors, "classes/classes", found.classes),
        "common": _put(tensors, "classes/common", found.common),
    }


def _shown(plan: _Plan, name: str) -> list[Any]:
    """The classes that some row had: one list per domain, or one list."""
    each = [[label for label in plan.heads[name] if label in some] for some in plan.shown[name]]
    return each if len(each) > 1 else each[0]


def _records(parts: Sequence[_Part], plan: _Plan) -> list[Any]:
    found = list(parts[0].learner.parts.records)
    for names, part in zip(plan.renamed[1:], parts[1:], strict=True):
        found += [{**one, "task": names[one["task"]]} for one in part.learner.parts.records if one["task"] in names]
    return found
