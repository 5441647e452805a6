"""The FiLM rows that a fit trains: see nn/film.py. They have no terms and no standard deviation; Adam updates them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evcl._core.settings import Settings, decided
from evcl.nn import BayesianNetwork
from evcl.nn.film import FilmRows, Pair
from evcl.training.rules import Adam, Rule

EPSILON = 1e-5  # of Adam: a shift before a batch norm has no gradient but rounding errors, which must not move it
FASTER = 2.0  # learning rate of the rows, as a multiple of lr / scale; chosen on validation data of the digits


class FilmFit:
    """The rows of some tasks in one fit: `values` and `grads`, [R, K, 2, U] each.

    `scale` is the standard deviation of initial weights to which lr is adapted. Rows are of the order of 1, so their
    learning rate is FASTER lr / scale: in relative terms, they move about as fast as the weights. With lr itself, they
    would hardly move in a task, and the trunk would have to change instead.
    """

    def __init__(self, network: BayesianNetwork, tasks: Sequence[int], scale: float = 1.0) -> None:
        assert network.film is not None
        self.network, self.tasks, self.table, self.scale = network, list(tasks), network.film, scale
        self.values = network.film[:, self.tasks].clone()
        self.grads = torch.zeros_like(self.values)
        self._leaves: list[tuple[Tensor, Tensor]] = []

    def rows(self) -> FilmRows:
        """The rows as leaf tensors, which share memory with `values`; `collect` adds their gradients to `grads`."""
        own: dict[int, dict[str, Pair]] = {}
        self._leaves = []
        for k, task in enumerate(self.tasks):
            own[task] = {}
            for name in self.network.sites:
                scale, shift = (t.detach().requires_grad_() for t in self._views(self.values, k, name))
                own[task][name] = scale, shift
                self._leaves += zip((scale, shift), self._views(self.grads, k, name), strict=True)
        return FilmRows(self.table, self.network.sites, own)

    def collect(self) -> None:
        for leaf, grad in self._leaves:
            if leaf.grad is not None:
                grad.add_(leaf.grad)
                leaf.grad = None

    def buffers(self, task: int, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """gamma, b and their gradients, [R, units] each."""
        k = self.tasks.index(task)
        return (*self._views(self.values, k, name), *self._views(self.grads, k, name))

    def _views(self, flat: Tensor, k: int, name: str) -> Pair:
        scale, shift = flat[:, k, :, self.network.sites[name]].unbind(1)
        return scale, shift

    def table_with(self, values: Tensor) -> Tensor:
        """[R, T, 2, U]: the rows of all tasks, with these values for the tasks of the fit."""
        table = self.table.clone()
        table[:, self.tasks] = values
        return table


class WithFilm:
    """An update rule that also updates FiLM rows."""

    def __init__(self, rule: Rule, film: FilmFit, s: Settings) -> None:
        self.rule, self.count = rule, rule.count
        values = film.values.view(len(film.values), -1)
        self.grads = film.grads.view_as(values)
        self.base = values.new_zeros(len(values), 1) + FASTER / film.scale * decided(s.lr)
        self.rate = self.base.clone()  # the current rate; a CUDA graph reads it at each step
        self.adam, self.scratch, self.factor = Adam(values, self.rate, EPSILON), torch.zeros_like(values), 1.0
        self._set_rates()

    def __call__(self) -> None:
        self.rule()
        self.adam.step(self.grads, self.scratch)

    def buffers(self) -> list[Tensor]:
        return [*self.rule.buffers(), *self.adam.state(), self.grads]

    def scale(self, factor: float) -> None:
        self.rule.scale(factor)
        if factor != self.factor:
            self.factor = factor
            self._set_rates()

    def freeze(self, rows: Tensor) -> None:
        self.rule.freeze(rows)
        self.base.masked_fill_(rows.view(-1, 1), 0.0)
        self._set_rates()

    def resume(self, steps: int) -> None:
        self.rule.resume(steps)
        self.adam.count.fill_(min(steps, 2**24))

    def _set_rates(self) -> None:
        torch.mul(self.base, self.factor, out=self.rate)
        if not self.rate.is_cuda:  # one number, if all replicas have the same, takes the fused kernel
            numbers = set(self.rate.flatten().tolist())
            self.adam.lr = numbers.pop() if len(numbers) == 1 else self.rate
