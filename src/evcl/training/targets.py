"""Targets other than classes within a session: their heads, and the scale on which a network learns numbers.

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
from evcl._core.inputs import Label
from evcl.methods import TaskData
from evcl.methods.memories import rescaled
from evcl.nn import head_names
from evcl.targets.scale import Scale, first_scale

if TYPE_CHECKING:
    from evcl.training.run import Run
    from evcl.training.session import Given, Session


def prepared(session: Session, task: Given, number: int) -> TaskData:
    """A task's data on the run's device. Its head is made, or expressed on another scale; without heads, it is a name
    only, without weights.
    """
    run, name, likelihood = session.run, task.head, session.run.likelihood
    places: list[Label] = [name]
    if likelihood.heads and isinstance(task.y, Tensor):
        places = list(range(task.y.shape[2]))
    known = session.heads.get(name)
    if known is None:
        k = run.add_head(session.features(task), len(places)) if likelihood.heads else _without_heads(session, task)
        session.heads[name], session.groups[name], session.shown[name] = places, [session.group(k, places)], [{*places}]
    elif len(known) != len(places):
        raise EvclError(f"its head has {len(known)} targets per example, but this task has {len(places)}")
    session.domains[task.name], session.lacking = 0, []
    if likelihood.heads:
        _rescale(session, task)
    run.add_task_weights(number + 1)
    return data(session, task, number)


def _without_heads(session: Session, task: Given) -> int:
    """The number of a new task's name, whose targets the network's own outputs explain."""
    run = session.run
    if not session.heads:
        x = task.x[0, :1].to(run.network.posterior.mean)
        run.network.whole = run.features(x)
        run.likelihood.check(run.network, x)
    return len(session.groups)


def data(session: Session, task: Given, number: int) -> TaskData:
    """A task's inputs and targets, numbers on the scale of its head. Without targets, the inputs are explained."""
    mean, scale = session.run.network.posterior.mean, session.scales.get(task.head)
    x = task.x.to(mean)
    y = x
    if isinstance(task.y, Tensor):
        y = task.y.to(mean.device) if scale is None else scale.standardised(task.y).to(mean)
    weights = None if task.weights is None else task.weights.to(mean)
    return TaskData(x, y, session.groups[task.head][0].number, weights, number)


def _rescale(session: Session, task: Given) -> None:
    """Learn the scale of a task's targets, and express its head on it."""
    run, name, y = session.run, task.head, task.y
    assert isinstance(y, Tensor)
    k, before = session.groups[name][0].number, session.scales.get(name, first_scale(y.shape[2]))
    w = y.new_ones(y.shape[1], 1) if task.weights is None else task.weights[0].to(y).unsqueeze(1)
    scale = run.likelihood.place(run.network, k, before, y[0], w)
    if before.rows and scale is not before:
        rescale(run, k, before, scale)
    session.scales = {**session.scales, name: scale._replace(rows=before.rows + y.shape[1])}


def rescale(run: Run, k: int, before: Scale, after: Scale) -> None:
    """Express head k on another scale of its targets, in the posterior and in the memory: the function it computes,
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
    run.account = None if run.account is None else run.account.rescaled(k, r)

    def change(task: TaskData) -> TaskData:
        if task.head != k:
            return task
        return replace(task, y=after.standardised(before.restored(task.y.double())).to(task.y))

    network.posterior, run.memory = rescaled(network.posterior, run.memory, factor, shift, change)
    run.changed()
