"""One adapter per task (`evcl.nn.LoRA(tasks="each")`): a wrapper around any method.

Every task starts from adapters that are 0, with the first prior, and so forgets nothing: the adapters and the head of
each task are kept as they were at its end, and predict it. What the method remembers of the adapters starts anew too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, make_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.settings import Settings
from evcl.methods.distillation import of_inner, with_fits
from evcl.methods.memories import Fresh, has_models, lasting, relaid
from evcl.methods.memory import per_task, per_weight
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.nn import Gaussian, Layout, head_names

M = TypeVar("M")


def check_restarts(method: Method, s: Settings, tasks: str) -> None:
    """Refuse a method whose memory of the adapters cannot start anew."""
    why = None
    if has_models(method.memory) or method.trunk is not None:
        why = "trains another network beside it"
    elif kept := lasting(method.memory, s):
        why = f"remembers {kept}"
    elif method.predictor is not None:
        why = "remembers more than numbers per weight"
    if why is not None:
        raise EvclError(f"{method.name} {why}: with it, adapters must be shared, not {tasks!r}")


def restarted(memory: M, layout: Layout, names: Sequence[str], fresh: Fresh) -> M:
    """The memory with the initial values of the weights of these names: they leave the layout and enter it again."""
    rest = layout.part([name for name in layout.shapes if name not in set(names)])
    some = Fresh(*(gaussian.map(lambda t: layout.gather(t, rest)) for gaussian in fresh))
    less = relaid(memory, layout.extending(rest), some, lambda model: model)
    return relaid(less, rest.extending(layout), fresh, lambda model: model)


def one_per_task(method: Method) -> Method:
    """The method, with adapters of its own for every task; `check_restarts` says whether it can have them."""
    memory = make_dataclass(
        "Memory",
        [
            ("inner", method.memory, field()),
            ("prior", Gaussian, per_weight(Gaussian, "prior")),  # the first prior, and the first posterior
            ("first", Gaussian, per_weight(Gaussian, "posterior")),
            ("own", dict[int, Tensor], per_task()),  # task -> [R, 1 or 2, n]: means and log sigmas of its own weights
            ("heads", dict[int, Tensor], per_task()),  # task -> [R, 1]: the number of its head
        ],
        frozen=True,
    )

    def learn(remembered: Any, round_: Round, s: Settings) -> Learning:
        if len(round_.tasks) > 1:
            raise EvclError("with one adapter per task, tasks are learned one after another, not jointly")
        (task,), layout, names = round_.tasks, round_.network.layout, _trunk(round_.network.layout)
        if task.head in round_.seen:
            raise EvclError("with one adapter per task, every task needs a head of its own: leave out head")
        fresh = Fresh(remembered.prior, remembered.first)
        inner = restarted(remembered.inner, layout, names, fresh)
        start = replaced(round_.posterior, layout, names, remembered.first)
        fits = method.learn(inner, replace(round_, posterior=start), Settings({**s, "distill": 0.0}))

        def started(fit: Fit) -> Fit:
            return replace(fit, start=start) if fit.start is None and fit.model is None else fit

        learned = yield from with_fits(fits, started)
        part = layout.part([*names, *head_names(task.head).values()])
        q = learned.posterior
        kept = torch.stack([layout.gather(t, part) for t in (q.mean, q.log_std) if t is not None], 1)
        own = {**remembered.own, task.task: kept}
        heads = {**remembered.heads, task.task: torch.full_like(q.mean[:, :1], task.head)}
        return Learned(q, memory(learned.memory, remembered.prior, remembered.first, own, heads))

    def predictor(remembered: Any, posterior: Gaussian, task: int | None) -> Gaussian:
        number = max(remembered.own, default=None) if task is None else task
        if number not in remembered.own:
            return posterior
        layout, kept = posterior.layout, remembered.own[number]
        assert layout is not None
        head = head_names(int(remembered.heads[number][0, 0])).values()
        part = layout.part([*_trunk(layout), *head])
        tensors = [posterior.mean.clone()] + ([] if posterior.log_std is None else [posterior.log_std.clone()])
        for flat, values in zip(tensors, kept.unbind(1), strict=True):
            layout.scatter_(flat, part, values)
        return Gaussian(tensors[0], tensors[1] if len(tensors) > 1 else None)

    return replace(
        method,
        memory=memory,
        learn=learn,
        predictor=predictor,
        log_joint=of_inner(method.log_joint),
        domains=None,  # no head is shared
        needs_task=True,
        kept_as="rows",
    )


def _trunk(layout: Layout) -> list[str]:
    """The names of the trunk's weights: adapters, because everything else is frozen. Those of slots contain a space."""
    return [name for name in layout.shapes if " " not in name]


def replaced(q: Gaussian, layout: Layout, names: Sequence[str], values: Gaussian) -> Gaussian:
    """q, with the weights of these names as in `values`."""
    part = layout.part(names)

    def change(flat: Tensor, new: Tensor) -> Tensor:
        changed = flat.clone()
        layout.scatter_(changed, part, layout.gather(new, part))
        return changed

    if q.log_std is None or values.log_std is None:
        return Gaussian(change(q.mean, values.mean), q.log_std)
    return Gaussian(change(q.mean, values.mean), change(q.log_std, values.log_std))
