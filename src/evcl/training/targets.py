"""Targets other than classes within a session: their heads, and the scale on which a network learns them.

A network learns numbers as z = (y - m) / s (see `evcl.targets.scale`). A task with another mean or scale changes m and
s to m' and s'. A head is linear, so the same function on
the new scale is known exactly: with r = s / s', its weights and their standard deviations are multiplied by r, and
its bias becomes r b + (m - m') / s'. The Fisher of these weights is divided by r^2, and the noise multiplied by r^2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl.methods import TaskData
from evcl.methods.memory import rescaled
from evcl.nn import head_names
from evcl.targets.scale import Scale, first_scale

if TYPE_CHECKING:
    from evcl.training.run import Run
    from evcl.training.session import Given, Session


def prepared(session: Session, task: Given, number: int) -> TaskData:
    """A task's data on the run's device, its targets on the scale of the head, which is made or rescaled."""
    run, name, y = session.run, task.head, task.y
    assert isinstance(y, Tensor)
    outputs = y.shape[2]
    known = session.heads.get(name)
    if known is not None and len(known) != outputs:
        raise EvclError(f"its head has {len(known)} targets per example, but this task has {outputs}")
    if known is None:
        k = run.add_head(session.features(task), outputs)
        session.heads[name] = list(range(outputs))
        session.groups[name] = [session.group(k, list(range(outputs)))]
        session.shown[name] = [set(range(outputs))]
    session.domains[task.name], session.lacking = 0, []
    k = session.groups[name][0].number
    before = session.scales.get(name, first_scale(outputs))
    w = _counted(y[0], None if task.weights is None else task.weights[0])
    scale = run.likelihood.place(run.network, k, before, y[0], w)
    if before.rows and scale is not before:
        _rescale(run, k, before, scale)
    session.scales = {**session.scales, name: scale._replace(rows=before.rows + y.shape[1])}
    run.add_film(number + 1)
    mean = run.network.posterior.mean
    weights = None if task.weights is None else task.weights.to(mean)
    return TaskData(task.x.to(mean), scale.standardised(y).to(mean), k, weights, number)


def _counted(y: Tensor, weights: Tensor | None) -> Tensor:
    """[N, 1]: how much each row of y [N, D] counts."""
    return y.new_ones(len(y), 1) if weights is None else weights.to(y).unsqueeze(1)


def _rescale(run: Run, k: int, before: Scale, after: Scale) -> None:
    """Express head k on another scale of its targets, in the posterior and in the memories: the function it computes,
    and how sure it is of it, stay the same.
    """
    network, names = run.network, head_names(k)
    layout, like = network.layout, network.posterior.mean
    factor = torch.ones_like(like[:1])
    shift = torch.zeros_like(factor)
    r = (before.std / after.std).to(like)
    layout.view(factor, names["weight"]).copy_(r.view(1, -1, 1).expand_as(layout.view(factor, names["weight"])))
    layout.view(factor, names["bias"]).copy_(r.view(1, -1))
    layout.view(shift, names["bias"]).copy_(((before.mean - after.mean) / after.std).to(like).view(1, -1))
    network.number_head(k).rescale(r)

    def change(task: TaskData) -> TaskData:
        if task.head != k:
            return task
        return replace(task, y=after.standardised(before.restored(task.y.double())).to(task.y))

    held = rescaled((network.posterior, *run.memories), factor, shift, change)
    network.posterior, run.memories = held[0], tuple(held[1:])
    run._changed()
