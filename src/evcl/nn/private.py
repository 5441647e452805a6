"""Private layers: a part of the network of which every task has weights of its own, such as an encoder.

    PerTask(module)(x) = module(x; w_t),    w_t the weights of the current task t

They are point estimates, without a prior and without a penalty: only task t trains them, so that no other task can
change them. They are not part of the posterior: a method never sees them. Like FiLM rows (film.py), they are the rows
of a table beside it, [R, T, W], with the W private weights of task t in row t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl.nn.convert import bayesianize, register
from evcl.nn.film import Mixture
from evcl.nn.layer import BayesianLayer
from evcl.nn.network import BayesianNetwork


class PerTask(nn.Module):
    """`module`, with separate weights for every task. They learn from that task alone, without a prior.

    In a learner, each task starts from weights drawn anew if the network's weights are drawn from the seed; otherwise
    from the module's own.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.module(x)
        return found


class Own(NamedTuple):
    """The row of a task that a step trains, and where its gradient is added; [R, W] each."""

    values: Tensor
    grads: Tensor


class PrivateRows:
    """The rows of all tasks, [R, T, W]. `own` holds those that a step trains; `pending` collects what autograd found
    for them, until `collect`.
    """

    def __init__(self, table: Tensor, own: Mapping[int, Own] | None = None) -> None:
        self.table, self.own = table, own or {}
        self.pending: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

    def __len__(self) -> int:
        return self.table.shape[1]

    def row(self, task: int, span: slice) -> tuple[Tensor, Tensor | None]:
        """The private weights in `span` of a task, [R, w], and where their gradient is added."""
        if task in self.own:
            values, grads = self.own[task]
            return values[:, span], grads[:, span]
        return self.table[:, task, span], None

    def of(self, replicas: Sequence[int] | Tensor | slice) -> PrivateRows:
        """The rows of these replicas."""
        own = {task: Own(values[replicas], grads[replicas]) for task, (values, grads) in self.own.items()}
        found = PrivateRows(self.table[replicas], own)
        found.pending = self.pending
        return found

    def collect(self) -> None:
        """Add the gradients that layers left in `.grad` to the buffers."""
        for leaves, views in self.pending:
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    views[name].add_(leaf.grad)
                    leaf.grad = None
        self.pending.clear()


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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.inner.trunk._apply(fn)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        rows, task = self.weights.film, self.weights.task
        if not isinstance(rows, PrivateRows) or task is None:  # before the first task
            return self._run(x, self.start.expand(self.weights.replicas, -1), None, None)
        if not isinstance(task, Mixture):
            return self._run(x, *rows.row(task, self.span), rows)
        each = torch.stack([self._run(x, *rows.row(t, self.span), rows) for t in task.tasks])  # [K, R*B, ...]
        times = each.shape[1] // task.places.numel()
        place = task.places.flatten().repeat_interleave(times).view(1, -1, *[1] * (each.dim() - 2))
        return each.gather(0, place.expand(1, *each.shape[1:])).squeeze(0)

    def _run(self, x: Tensor, values: Tensor, grads: Tensor | None, rows: PrivateRows | None) -> Tensor:
        inner, weights = self.inner, self.inner.weights
        inner.bind(values, None, inner.layout, None if grads is None else (grads, None))
        weights.noise, weights.compute_dtype = self.weights.noise, self.weights.compute_dtype
        weights.batch, weights.mapped = x.shape[0], self.weights.mapped
        weights.passes += 1
        if grads is not None and rows is not None and torch.is_grad_enabled():
            rows.pending.append((weights.mean, inner.layout.views(grads)))
        found: Tensor = inner.trunk(x)
        return found


register(PerTask, BayesianPerTask)


def private_layers(trunk: nn.Module) -> list[BayesianPerTask]:
    """The private layers of a trunk, each with its place in a row."""
    found = [m for m in trunk.modules() if isinstance(m, BayesianPerTask)]
    end = 0
    for layer in found:
        layer.span = slice(end, end + layer.inner.layout.size)
        end = layer.span.stop
    return found


def first_private(
    layers: Sequence[BayesianPerTask], tasks: int, like: Tensor, sources: Sequence[Sequence[torch.Generator]] | None
) -> Tensor:
    """[R, tasks, W]: the first private weights of new tasks, for weights like these [R, P]: the modules' own or, with
    `sources` for each task and replica, drawn.
    """
    start = torch.cat([layer.start for layer in layers]).to(like)
    found = start.expand(len(like), tasks, -1).clone()
    for t, each in enumerate(sources or ()):
        for layer in layers:
            found[:, t, layer.span] = layer.inner.redrawn(found[:, t, layer.span].cpu(), each).to(like)
    return found
