"""The examples of one fit, in one pool, and what they are distilled from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Noise
from evcl.methods import NO_HEAD, Loss, Minibatch, TaskData
from evcl.methods.augment import augmented, check_images
from evcl.nn import BayesianNetwork
from evcl.nn.chain import Lessons
from evcl.nn.per_task import Mixture
from evcl.targets import CATEGORICAL, Objective


class Pool:
    """The examples of one fit, from one task or from several jointly, each through its own head.

    x [U, N, ...] and y [U, N]: replica r learns from row r mod U. If replicas share some tasks but not others, all
    examples are in one row, U = 1, and `own` [R, n] holds the positions of each replica's examples in that row.
    """

    def __init__(
        self,
        tasks: Sequence[TaskData],
        classes: Callable[[int], int],
        replicas: int = 1,
        likelihood: Objective = CATEGORICAL,
        augment: bool = False,
    ) -> None:
        self.likelihood, self.augment = likelihood, augment
        self.beside = bool(getattr(likelihood, "beside", False))  # the outputs have measured numbers beside them
        self._squares = getattr(likelihood, "squares", lambda outputs, y, columns: None)  # what these follow
        self.following = True  # False: these stay as they are
        self.sizes = [task.y.shape[1] for task in tasks]
        self.heads = sorted({task.head for task in tasks} - {NO_HEAD})
        starts, total = {}, 0
        for k in self.heads:
            starts[k] = total
            total += classes(k) * (2 if self.beside else 1)
        self.classes, self._starts = total, starts
        self.first = starts.get(tasks[0].head, 0)  # the first class of the first task's head
        self.own = None if len({len(task.y) for task in tasks}) == 1 else _own(tasks, replicas)
        if self.own is not None:
            tasks = [_in_one_row(task) for task in tasks]
        self.x = tasks[0].x if len(tasks) == 1 and tasks[0].reread is None else torch.cat([task.x for task in tasks], 1)
        if augment:
            check_images(self.x)
        several = len(self.heads) > 1
        if len({task.y.shape[2:] for task in tasks}) > 1:
            raise EvclError("tasks that are learned together must have equally many targets")
        shifted = several and not tasks[0].y.is_floating_point()  # classes are numbered over all heads
        self.y = torch.cat([task.y + starts[task.head] if shifted else task.y for task in tasks], 1)
        self.rows_of = {k: sum(task.n for task in tasks if task.head == k) for k in self.heads}
        self.weights: Tensor | None = None
        if any(task.weights is not None for task in tasks):
            self.weights = torch.cat([task.counts for task in tasks], 1)
        self.columns: Tensor | None = None
        if several:  # an example is classified among the classes of its own head
            wide = 2 if self.beside else 1
            own = [(starts[task.head], starts[task.head] + wide * classes(task.head)) for task in tasks]
            sizes = torch.tensor([task.y.shape[1] for task in tasks])
            self.columns = torch.tensor(own).repeat_interleave(sizes, 0).to(self.y.device)
        self._data = TaskData(self.x, self.y, -1, self.weights)
        self._below: TaskData | None = None  # see `keep_below`
        self.tasks = sorted({task.task for task in tasks})
        self._task_of: Tensor | None = None  # [N]: position in `tasks` of each example's task
        if len(self.tasks) > 1:
            sizes = torch.tensor([task.y.shape[1] for task in tasks])
            places = torch.tensor([self.tasks.index(task.task) for task in tasks])
            self._task_of = places.repeat_interleave(sizes).to(self.y.device)

    def keep_below(self, tasks: Sequence[TaskData], network: BayesianNetwork) -> None:
        """If a part of the network never changes, compute what it makes of these tasks, the pool's, once."""
        features = [network.below(task.x) for task in tasks]
        parts = [one for one in features if one is not None]
        if len(parts) == len(features):
            parts = parts if self.own is None else [one.flatten(0, 1).unsqueeze(0) for one in parts]
            self._below = TaskData(parts[0] if len(parts) == 1 else torch.cat(parts, 1), self.y, -1)

    def rewrite(self, x: Tensor, y: Tensor) -> None:
        """Replace the first rows, which belong to the first task, by x [n, ...] and y [n]."""
        if x.shape[1:] != self.x.shape[2:]:
            raise EvclError(f"x is {tuple(x.shape[1:])} per example, but at first it was {tuple(self.x.shape[2:])}")
        self.x[0, : len(x)].copy_(x)
        self.y[0, : len(y)].copy_(y)
        self.y[0, : len(y)] += self.first

    def __len__(self) -> int:
        """Number of examples that a replica learns from."""
        return sum(self.sizes)

    def task(self, rows: Tensor) -> int | Mixture:
        """The task of the examples at positions `rows` [R, B]."""
        return self.tasks[0] if self._task_of is None else Mixture(self.tasks, self._task_of[rows])

    def places(self, orders: Tensor) -> Tensor:
        """The positions in the pool of each replica's rows `orders` [R, n]."""
        return orders if self.own is None else self.own.to(orders.device).gather(1, orders)

    def minibatch(self, rows: Tensor, noise: Noise | None = None, inputs: bool = True) -> Minibatch:
        """The examples at positions `rows` [R, B] of the pool; with `augment`, their images cropped and flipped by the
        draws of `noise`. `inputs`: False if only the trunk looks at x; what is known of it is then there instead.
        """
        if self._below is not None:
            below, y = self._below.take(rows)
            x = self._data.take(rows)[0] if inputs else below
            return Minibatch(x, y, self.numbers(rows), below=below)
        x, y = self._data.take(rows)
        if self.augment and noise is not None:
            x = augmented(x, noise)
        return Minibatch(x, y, self.numbers(rows))

    def numbers(self, places: Tensor) -> Tensor:
        """The inverse of `places`: each replica's row numbers for these positions in the pool."""
        if self.own is None:
            return places
        if not hasattr(self, "_row_at"):
            row_at = torch.zeros(len(self.own), self.x.shape[1], dtype=torch.long)
            rows = torch.arange(len(self)).expand_as(self.own)
            self._row_at = row_at.scatter_(1, self.own, rows).to(self.y.device)
        return self._row_at.gather(1, places)

    def example_weights(self, rows: Tensor) -> Tensor | None:
        """[R, B]: the weights of the examples at `rows` [R, B]; None: all 1."""
        return self._data.take_weights(rows)

    def nll(self, network: BayesianNetwork, rows: Tensor, batch: Minibatch | None = None) -> Tensor:
        """[R]: the weighted mean negative log-likelihood of the examples at `rows` [R, B].

        `batch` is the minibatch of these rows, if it has been made already.
        """
        batch = self.minibatch(rows) if batch is None else batch
        y, weights = batch.y, self.example_weights(rows)
        outputs = batch.logits(network, self.heads).flatten(0, 1)
        columns = None if self.columns is None else self.columns[rows.flatten()]
        nll = self.likelihood.nll(outputs, y.flatten(0, 1), columns).view(rows.shape)
        self.follow(network, outputs, y, columns, weights)
        return nll.mean(1) if weights is None else (weights * nll).mean(1)

    @torch.no_grad()
    def follow(
        self, network: BayesianNetwork, outputs: Tensor, y: Tensor, columns: Tensor | None, weights: Tensor | None
    ) -> None:
        """Let the noise of each head follow the squared errors of a batch y [R, B, D], if the likelihood has noise."""
        squares = self._squares(outputs, y.flatten(0, 1), columns) if self.following else None
        if squares is None:
            return
        squares = squares.view(y.shape)
        rate = min(1.0, y.shape[1] / len(self))  # the noise of numbers follows the last epoch
        for k in self.heads:
            counts = torch.ones_like(squares[..., :1]) if weights is None else weights.unsqueeze(2)
            if columns is not None:
                counts = counts * (columns[:, 0] == self._starts[k]).view(*y.shape[:2], 1)
            network.number_head(k).follow((counts * squares).sum(1) / counts.sum(1), self.rows_of[k], rate)


def _own(tasks: Sequence[TaskData], replicas: int) -> Tensor:
    """[R, n]: the positions of each replica's examples in a single row that holds all of them."""
    parts, start = [], 0
    for task in tasks:
        u, n = task.y.shape[:2]
        first = start + n * (torch.arange(replicas) % u)
        parts.append(first.unsqueeze(1) + torch.arange(n))
        start += u * n
    return torch.cat(parts, 1)


def _in_one_row(task: TaskData) -> TaskData:
    weights = None if task.weights is None else task.weights.reshape(1, -1)
    x, y = (t.flatten(0, 1).unsqueeze(0) for t in (task.x, task.y))
    return TaskData(x, y, task.head, weights, task.task)


def all_heads(pool: Pool, losses: Sequence[Loss]) -> list[int]:
    """The heads of the data, followed by those that only losses use."""
    return list(dict.fromkeys([*pool.heads, *(k for loss in losses for k in loss.heads)]))


def find_lessons(
    losses: Sequence[Loss], pool: Pool, classes: Callable[[int], int], like: Tensor, most: int | None
) -> Lessons | None:
    """The lessons for weights like these [R, P]; None if there are other losses, or more than `most` columns."""
    replicas, heads = len(like), all_heads(pool, losses)
    taught = losses[0].taught() if len(losses) == 1 else None
    if taught is None or len(set(taught.heads)) < len(taught.heads):
        return None
    ends = dict(zip(heads, torch.tensor([classes(k) for k in heads]).cumsum(0).tolist(), strict=True))
    columns = ends[heads[-1]]
    if most is not None and columns > most:
        return None
    spans = [(ends[k] - classes(k), ends[k]) for k in taught.heads]
    u = replicas
    if pool.own is None:
        lengths = {len(said) for said in taught.said}
        u = max(lengths) if all(max(lengths) % n == 0 for n in lengths) else replicas
    q, negentropy = (like.new_zeros(u, pool.y.shape[1], n) for n in (columns, len(taught.heads)))
    each = any(isinstance(w, Tensor) and w.numel() > len(w) for w in taught.strength)
    if each and most is not None:  # the kernels of a GPU have no strengths for each example
        return None
    temperature = like.new_empty(replicas).copy_(torch.as_tensor(taught.temperature).reshape(-1))
    strengths = like.new_zeros(replicas, *([pool.y.shape[1]] if each else []), len(taught.heads))
    for k, (said, strength) in enumerate(zip(taught.said, taught.strength, strict=True)):
        for r in range(replicas):
            places = slice(None) if pool.own is None else pool.own[r].to(like.device)
            weight = strength[r % len(strength)] if isinstance(strength, Tensor) else strength
            strengths[(r, places, k) if each else (r, k)] = weight
            if r < u:
                log_q = said[r % len(said)]
                q[r, places, slice(*spans[k])] = log_q.exp()
                negentropy[r, places, k] = (log_q.exp() * log_q).sum(1)
    value = like.new_zeros(replicas)
    return Lessons(q, negentropy, torch.tensor(spans, device=like.device), temperature, strengths, pool.classes, value)
