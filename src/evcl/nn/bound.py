"""A network's flat buffers, bound to its layers: which weights the next forward pass computes with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from evcl._core.errors import retired
from evcl.nn.columns import Columns
from evcl.nn.layer import Grads, Named, Weights
from evcl.nn.per_task import Mixture, TaskRows, TaskWeights
from evcl.posterior import Gaussian, Layout


class Bound(nn.Module):
    """The part of a `BayesianNetwork` that gives its layers their weights."""

    trunk: nn.Module
    trunk_names: tuple[str, ...]
    weights: Weights
    layout: Layout
    posterior: Gaussian
    beside: Gaussian
    task_weights: TaskWeights | None

    def bind(
        self,
        mean: Tensor,
        variance: Tensor | None,
        layout: Layout,
        grads: tuple[Tensor, Tensor | None] | None = None,
        task_rows: TaskRows | None = None,
    ) -> None:
        """Compute with these flat buffers from now on.

        The leaf tensors to differentiate, `weights.mean` and `weights.variance`, are made when a layer asks for them:
        there may be thousands of heads. They share memory with the buffers, so the next forward pass uses values
        updated in place. With `grads`, also flat buffers, a backward pass followed by `collect_gradients` adds the
        gradients to them. `task_rows`: rows to use instead of the network's own.
        """
        self.weights.replicas = len(mean)
        if task_rows is None and self.task_weights is not None:
            task_rows = TaskRows(self.task_weights.table)
            task_rows = task_rows if self.weights.rows is None else task_rows.of(self.weights.rows)
        self.weights.task_rows = task_rows
        self.weights.mean = _leaves(layout, mean)
        self.weights.variance = None if variance is None else _leaves(layout, variance)
        if others := self.at_rest - layout.shapes.keys():
            rest = self.beside.mean if self.weights.rows is None else self.beside.mean[self.weights.rows]
            self.weights.mean |= {name: self.layout.view(rest, name) for name in others}
        self.weights.grads = None
        if grads is not None:
            self.weights.grads = Grads(layout.views(grads[0]), None if grads[1] is None else layout.views(grads[1]))

    def leaves(self, layout: Layout) -> list[Tensor]:
        """The leaf tensors to differentiate: the parts of the means, in the layout's order, then of the variances."""
        bound = [self.weights.mean, *([] if self.weights.variance is None else [self.weights.variance])]
        return [named[name] for named in bound for name in layout.shapes]

    def collect_gradients(self) -> None:
        """Add gradients in `.grad` to the flat buffers, for layers that do not write there directly."""
        weights = self.weights
        assert weights.grads is not None
        both = ((weights.mean, weights.grads.mean, 1), (weights.variance, weights.grads.variance, 2))
        for leaves, views, scale in both:
            for name, leaf in (leaves or {}).items():
                if leaf.grad is not None and views is not None:
                    views[name].add_(leaf.grad, alpha=scale)
                    leaf.grad = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside this context, compute with replica 0 alone, at the posterior's mean."""
        with self.weights.restored():
            self.weights.rows, self.weights.noise = [0], None
            self.bind(self.posterior.mean[:1], None, self.layout)
            yield

    @contextmanager
    def only(self, rows: Sequence[int]) -> Iterator[None]:
        """Inside this context, the bound weights belong to these replicas."""
        retired("BayesianNetwork.only")
        with self.weights.restored():
            self.weights.rows = rows
            yield

    @contextmanager
    def narrowed(self, rows: Tensor) -> Iterator[None]:
        """Inside this context, compute with these replicas alone, out of those bound; autograd takes the gradients."""
        retired("BayesianNetwork.narrowed")
        weights = self.weights
        with weights.restored():
            weights.replicas, weights.rows, weights.grads = len(rows), rows, None
            weights.narrow(rows, rows)
            yield

    @contextmanager
    def lent(self, weights: Tensor, layout: Layout) -> Iterator[None]:
        """Inside this context, a training step computes with these weights [R, P] instead of its own, without noise."""
        with self.weights.restored():
            self.bind(weights, None, layout)
            self.weights.noise = None
            yield

    @contextmanager
    def using(self, task: int | Mixture | None) -> Iterator[None]:
        """Inside this context, compute with the weights of this task; None: as before."""
        before = self.weights.task
        self.weights.task = before if task is None else task
        try:
            yield
        finally:
            self.weights.task = before

    @property
    def at_rest(self) -> set[str]:
        """The names of the trunk's weights that are no longer trained: those of all columns but the last."""
        return self.trunk.at_rest(self.trunk_names) if isinstance(self.trunk, Columns) else set()


def _leaves(layout: Layout, flat: Tensor) -> Named:
    return Named(partial(_leaf, layout, flat.detach()))


def _leaf(layout: Layout, flat: Tensor, name: str) -> Tensor:
    return layout.view(flat, name).detach().requires_grad_()
