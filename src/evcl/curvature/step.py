"""The curvature of a training step, from the gradients of its single examples at point weights.

    gradient = mean_b d_b,   d_b = -d log p(y_b|x_b) / d theta
    squares: mean_b d_b^2 (`empirical`), or the diagonal of mean_b sum_c p_c d_bc d_bc^T (`exact`), the Fisher

An example with weight u counts u times in both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evcl._core.randomness import Noise
from evcl.curvature.fisher import Call, add, gradient_of, output_gradients, record, uses_of
from evcl.curvature.kfac import FactorSums, Kronecker
from evcl.nn import BayesianNetwork, Layout
from evcl.nn.slots import foreign
from evcl.targets.likelihood import Estimate, own_columns


class StepCurvature:
    """Calling it with rows [R, B] of `pool` returns their mean NLL [R], and fills `gradient`, `squares` [R, P] and, if
    `per_example`, `rows` [R, K, P]: K vectors whose outer products add up to the Fisher of the mean NLL. If `factored`,
    `found` has the Kronecker factors of every layer, and `squares` is 0 for weights that have them.
    """

    rows: Tensor
    found: Kronecker

    def __init__(
        self,
        network: BayesianNetwork,
        layout: Layout,
        pool: Any,
        kind: str,
        per_example: bool = False,
        factored: bool = False,
    ) -> None:
        self.network, self.layout, self.pool, self.kind = network, layout, pool, kind
        self.per_example, self.factored = per_example, factored

    def __call__(self, theta: Tensor, rows: Tensor, gradient: Tensor, squares: Tensor, noise: Noise) -> Tensor:
        network, size = self.network, rows.shape[1]
        network.bind(theta, None, self.layout)
        leaves = network.leaves(self.layout)
        network.weights.noise = noise  # for dropout
        with record(network, self.pool.heads) as calls, torch.enable_grad():
            nll, targets = self._targets(rows, noise)
            mean, total = nll.detach().mean(1), nll.sum() / size
            into = self.layout.views(gradient.zero_()).values()
            for view, grad in zip(
                into, torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True), strict=True
            ):
                view.copy_(grad)
        if self.factored:
            sums = FactorSums(network, self.layout, theta)
            for i, deltas in enumerate(output_gradients(calls, targets)):
                sums.add(calls, deltas, size, first=i == 0)
            self.found = sums.mean(size)
            squares.copy_(self.found.diagonal)
            return mean
        parts, kept = self.layout.views(squares.zero_()), []
        for deltas in output_gradients(calls, targets):
            if self.per_example:
                kept.append(self._rows(theta, calls, deltas, size))
            else:
                add(torch.square, parts, calls, deltas, size)
        if self.per_example:
            self.rows = torch.cat(kept, 1).div_(size**0.5)
            torch.sum(self.rows.square(), 1, out=squares)
        else:
            squares.div_(size)
        return mean

    def _targets(self, rows: Tensor, noise: Noise) -> tuple[Tensor, list[Tensor]]:
        """The weighted NLL of each example [R, B], and the scalars whose gradients of single examples are squared."""
        network, pool = self.network, self.pool
        batch, weights = pool.minibatch(rows, noise), pool.example_weights(rows)
        outputs = network.apply_heads(batch.through(network), pool.heads)
        columns = None if pool.columns is None else pool.columns[rows.flatten()]
        nll = pool.likelihood.nll(outputs, batch.y.flatten(0, 1), columns).view(rows.shape)
        pool.follow(network, outputs, batch.y, columns, weights)
        counts = torch.ones_like(nll) if weights is None else weights
        if self.kind == "empirical":
            return counts * nll, [(counts.sqrt() * nll).sum()]
        if columns is not None and batch.y.is_floating_point():
            outputs = own_columns(outputs, columns)
        elif columns is not None:  # not infinite: p log p is 0
            outputs = outputs.masked_fill(foreign(columns, outputs.shape[1]), -1e30)
        shaped = outputs.unflatten(0, rows.shape)
        return counts * nll, pool.likelihood.fisher_targets(shaped, batch.y, counts, Estimate(self.kind))

    @torch.no_grad()
    def _rows(self, theta: Tensor, calls: list[Call], deltas: tuple[Tensor | None, ...], size: int) -> Tensor:
        """[R, B, P]: the gradient of each example."""
        gradients = theta.new_zeros(len(theta), size, self.layout.size)
        named = {name: view.flatten(0, 1) for name, view in self.layout.views(gradients).items()}
        for uses in uses_of(named, calls, deltas, size).values():
            for use in uses:
                part = use[0].part(named, use[1])
                assert part is not None
                part += gradient_of(*use, slice(0, size)).flatten(0, 1)
        return gradients
