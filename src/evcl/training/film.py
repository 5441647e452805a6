"""The rows of tasks that a fit trains: FiLM rows (nn/film.py), or the weights of private layers (nn/private.py). They
have no terms and no standard deviation; Adam updates them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evcl._core.settings import Settings, decided
from evcl.nn import BayesianNetwork
from evcl.nn.film import FilmRows, Pair
from evcl.nn.private import Own, PrivateRows
from evcl.training.rules import Adam, Rule
from evcl.training.rules.adam import EPSILON as ADAM_EPSILON

EPSILON = 1e-5  # of Adam: a shift before a batch norm has no gradient but rounding errors, which must not move it
FASTER = 2.0  # learning rate of the rows, as a multiple of lr / scale; chosen on validation data of the digits


class RowsFit:
    """The rows of some tasks in one fit: `values` and `grads`, [R, K, ...] each.

    `rate` is the learning rate of the rows, as a multiple of lr, and `epsilon` that of Adam.
    """

    rate, epsilon = 1.0, ADAM_EPSILON

    def __init__(self, network: BayesianNetwork, tasks: Sequence[int]) -> None:
        assert network.film is not None
        self.network, self.tasks, self.table = network, list(tasks), network.film
        self.values = network.film[:, self.tasks].clone()
        self.grads = torch.zeros_like(self.values)

    def rows(self) -> FilmRows | PrivateRows:
        """The rows as a network computes with them; `collect` adds their gradients to `grads`."""
        raise NotImplementedError

    def collect(self) -> None:
        raise NotImplementedError

    def table_with(self, values: Tensor) -> Tensor:
        """[R, T, ...]: the rows of all tasks, with these values for the tasks of the fit."""
        table = self.table.clone()
        table[:, self.tasks] = values
        return table


class PrivateFit(RowsFit):
    """The weights of private layers. They are weights like others, and learn at the rate of others."""

    def rows(self) -> PrivateRows:
        pairs = zip(self.tasks, self.values.unbind(1), self.grads.unbind(1), strict=True)
        self._rows = PrivateRows(self.table, {task: Own(values, grads) for task, values, grads in pairs})
        return self._rows

    def collect(self) -> None:
        self._rows.collect()


class FilmFit(RowsFit):
    """FiLM rows: `values` and `grads` are [R, K, 2, U].

    `scale` is the standard deviation of initial weights to which lr is adapted. Rows are of the order of 1, so their
    learning rate is FASTER lr / scale: in relative terms, they move about as fast as the weights. With lr itself, they
    would hardly move in a task, and the trunk would have to change instead.
    """

    epsilon = EPSILON

    def __init__(self, network: BayesianNetwork, tasks: Sequence[int], scale: float = 1.0) -> None:
        super().__init__(network, tasks)
        self.rate = FASTER / scale
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


def rows_fit(network: BayesianNetwork, tasks: Sequence[int], scale: float) -> RowsFit:
    """The rows of these tasks, for a fit; `scale`: see FilmFit."""
    return PrivateFit(network, tasks) if network.private else FilmFit(network, tasks, scale)


class WithFilm:
    """An update rule that also updates the rows of tasks."""

    def __init__(self, rule: Rule, film: RowsFit, s: Settings) -> None:
        self.rule, self.count = rule, rule.count
        values = film.values.view(len(film.values), -1)
        self.grads = film.grads.view_as(values)
        self.base = values.new_zeros(len(values), 1) + film.rate * decided(s.lr)
        self.rate = self.base.clone()  # the current rate; a CUDA graph reads it at each step
        self.adam, self.scratch, self.factor = Adam(values, self.rate, film.epsilon), torch.zeros_like(values), 1.0
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
