"""Private layers: a part of the network of which every task has weights of its own, such as an encoder.

PerTask(module)(x) = module(x; w_t),    w_t the weights of the current task t (see per_task.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl.nn.convert import bayesianize, register
from evcl.nn.layer import BayesianLayer, Named
from evcl.nn.network import BayesianNetwork
from evcl.nn.per_task import Kind, Mixture, Sources, TaskRows, TaskWeights

EPSILON = 1e-8  # of Adam: these are weights like others


class PerTask(nn.Module):
    """`module`, with separate weights for every task. They learn from that task alone, without a prior.

    In a learner, each task starts from weights drawn anew if the network's weights are drawn from the seed; otherwise
    from the module's own.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y


class BayesianPerTask(BayesianLayer):
    """The form of `PerTask` in a network of replicas. `inner` computes with the row of the current task; it is no
    submodule, since its layers have no weights in the posterior.
    """

    inner: BayesianNetwork
    start: Tensor
    span: slice  # of its weights in a row

    def __init__(self, layer: PerTask) -> None:
        super().__init__(layer)
        inner = bayesianize(layer.module, init_std=None)
        if inner.owned or inner.direct is not None or inner.statistics() or any(True for _ in inner.trunk.parameters()):
            raise EvclError("PerTask takes layers that have a Bayesian form, without running statistics")
        self.__dict__["inner"] = inner
        self.register_buffer("start", inner.posterior.mean[0].clone())  # the module's own weights, saved with it

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.inner.trunk._apply(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, x: Tensor) -> Tensor:
        rows, task = self.weights.task_rows, self.weights.task
        if not isinstance(task, Mixture):
            return self._run(x, rows, task)
        each = torch.stack([self._run(x, rows, t) for t in task.tasks])  # [K, R*B, ...]
        times = each.shape[1] // task.places.numel()
        place = task.places.flatten().repeat_interleave(times).view(1, -1, *[1] * (each.dim() - 2))
        return each.gather(0, place.expand(1, *each.shape[1:])).squeeze(0)

    def _run(self, x: Tensor, rows: TaskRows | None, task: int | None) -> Tensor:
        inner, weights = self.inner, self.inner.weights
        if rows is None or task is None:  # before the first task
            inner.bind(self.start.expand(self.weights.replicas, -1), None, inner.layout)
        else:
            values, grads = rows.row(task)
            into = None if grads is None else (grads[:, self.span], None)
            inner.bind(values[:, self.span], None, inner.layout, into)
            if grads is not None:
                weights.mean = Named(partial(self._leaf, rows, task))
        weights.noise, weights.compute_dtype = self.weights.noise, self.weights.compute_dtype
        weights.batch, weights.mapped = x.shape[0], self.weights.mapped
        weights.passes += 1
        y: Tensor = inner.trunk(x)
        return y

    def _leaf(self, rows: TaskRows, task: int, name: str) -> Tensor:
        return rows.part(task, (self.span.start, name), lambda row: self.inner.layout.view(row[:, self.span], name))


register(PerTask, BayesianPerTask)


def private_weights(trunk: nn.Module, like: Tensor) -> TaskWeights | None:
    """A table [R, 0, W] of the private weights of a trunk, whose weights are like these [R, P]; None if there are none.
    Its parts are the layers, each of which has its place in a row.
    """
    layers = [m for m in trunk.modules() if isinstance(m, BayesianPerTask)]
    end = 0
    for layer in layers:
        layer.span = slice(end, end + layer.inner.layout.size)
        end = layer.span.stop
    return TaskWeights(Kind(layers, _first, 1.0, False, EPSILON), like.new_zeros(len(like), 0, end)) if layers else None


def _first(layers: Sequence[BayesianPerTask], tasks: int, table: Tensor, sources: Sequence[Sources] | None) -> Tensor:
    """[R, tasks, W]: the first private weights of new tasks: the modules' own or, with `sources`, drawn."""
    start = torch.cat([layer.start for layer in layers]).to(table)
    weights = start.expand(len(table), tasks, -1).clone()
    for t, each in enumerate(sources or ()):
        for layer in layers:
            weights[:, t, layer.span] = layer.inner.redrawn(weights[:, t, layer.span].cpu(), each).to(table)
    return weights
