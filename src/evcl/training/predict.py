"""Predictions: averages over draws of the weights, which are determined by the seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evcl._core.devices import double
from evcl._core.errors import EvclError
from evcl._core.forms import widened
from evcl._core.randomness import Purpose, generator
from evcl.methods import TaskData
from evcl.methods.memories import with_examples
from evcl.methods.method import Asked, Newcomer
from evcl.nn import BayesianNetwork, Gaussian, head_names, outputs
from evcl.nn.per_task import TaskWeights
from evcl.targets.likelihood import Means
from evcl.training.growing import Growing

KEPT_NUMBERS = 20_000_000  # largest size of weight draws that are kept: 80 MB in float32
AHEAD = 4  # threads that make the next draws of a large network while a GPU computes, which needs less time for one


def draws(
    network: BayesianNetwork, q: Gaussian, seeds: Sequence[int], samples: int, heads: Iterable[int]
) -> Iterator[Tensor]:
    """The weight draws [R, P] of a prediction through these heads; each depends on the seed, not on the heads."""
    mean, log_std = q.mean, q.log_std
    if log_std is None:
        yield mean
        return
    spans = network.layout.spans
    trunk = max((spans[name].stop for name in network.trunk_names), default=0)
    parts = {-1: slice(0, trunk)}
    for k in heads:
        names = head_names(k)
        parts[k] = slice(spans[names["weight"]].start, spans[names["bias"]].stop)
    distinct = sorted(set(seeds))
    own = torch.tensor([distinct.index(seed) for seed in seeds], device=mean.device)
    std = log_std.exp()

    def noise(draw: int) -> Tensor:
        """Made on the CPU, so that every device predicts the same."""
        found = torch.zeros(len(distinct), mean.shape[1], dtype=mean.dtype)  # 0 for other heads, which are not asked
        for k, span in parts.items():
            for row, seed in zip(found, distinct, strict=True):
                row[span].normal_(generator=generator(seed, Purpose.PREDICT, draw, k))
        return found

    slow = len(distinct) * mean.shape[1] > KEPT_NUMBERS // AHEAD and samples > 1
    for found in ahead(noise, samples) if slow and not mean.is_cpu else map(noise, range(samples)):
        yield mean + std * found.to(mean.device)[own]


def ahead(make: Callable[[int], Tensor], count: int) -> Iterator[Tensor]:
    """make(0), make(1), ...: threads make the next ones before they are asked for."""
    with ThreadPoolExecutor(AHEAD, "evcl-draws") as threads:
        coming: deque[Future[Tensor]] = deque()
        for i in range(count):
            coming.append(threads.submit(make, i))
            if len(coming) > AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def of_each(found: Tensor, sizes: Sequence[int], function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of each head's part of the last axis [..., sum of sizes], concatenated again. Heads of one size are
    computed at once: there may be thousands.
    """
    if len(set(sizes)) == 1:
        return function(found.unflatten(-1, (len(sizes), -1))).flatten(-2)
    return torch.cat([function(part) for part in found.split(list(sizes), -1)], -1)


class Predicting(Growing):
    """Replicas that can predict. The draws of the last prediction are kept until the posterior changes."""

    _kept: tuple[Gaussian, Any, list[Tensor]] | None = None  # the draws of the last prediction

    def _changed(self) -> None:
        super()._changed()
        self._kept = None

    @contextmanager
    def predicting_from(self, q: Gaussian, task_weights: TaskWeights | None = None) -> Iterator[None]:
        """Inside this context, predict from these weights and, if given, those of tasks."""
        before = self.network.posterior, self.method, self.network.task_weights
        self.network.posterior = q
        if task_weights is not None:
            self.network.task_weights = task_weights
        self.method = replace(self.method, predictor=None)
        try:
            yield
        finally:
            (self.network.posterior, self.method, self.network.task_weights), self._kept = before, None

    def widen_kept(self, columns: int) -> None:
        """Pad the kept examples, which are packed, to at least this many columns: see `evcl._core.forms`."""

        def change(task: TaskData) -> TaskData:
            return replace(task, x=widened(task.x, columns))

        self.memory = with_examples(self.memory, change)

    def predictor(self, task: int | None = None) -> Gaussian:
        """The weights that predict a task: the posterior, or what the method's `predictor` returns."""
        posterior, make = self.network.posterior, self.method.predictor
        if make is None:
            return posterior
        named = replace(posterior, layout=self.network.layout)
        found = make(self.memory, named, task)
        return posterior if found is named else found

    @property
    def predicts_by_task(self) -> bool:
        """Whether each task's predictions use different weights: a method chooses them, or some belong to a task."""
        return self.network.task_weights is not None or self.method.predictor is not None

    @property
    def needs_task(self) -> bool:
        """Whether predictions differ from task to task, also for tasks that share a head."""
        return self.network.task_weights is not None or self.method.needs_task

    @property
    def tells_classes_apart(self) -> bool:
        """Whether new classes of a head may be learned apart from its old ones: see `Method.log_joint`."""
        apart = self.method.log_joint is not None and not self.method.generative
        return apart and self.network.task_weights is None and not self.network.takes_tokens

    @torch.no_grad()
    def log_joint(self, x: Tensor, heads: Sequence[int]) -> list[Tensor] | None:
        """[R, N, C] for each of these heads: log p(x, class) up to a constant, by the method's likelihood per class;
        None if it has none, or knows too little. x [U, N, ...]: see TaskData.
        """
        if self.method.log_joint is None:
            return None
        return self.method.log_joint(self.memory, self.network.posterior, self._asked(x, heads))

    def _asked(self, x: Tensor, heads: Sequence[int]) -> Asked:
        return Asked(self.network, x, heads, list(self.seeds))

    @torch.no_grad()
    def domains(self, x: Tensor, heads: Sequence[int], task: Newcomer) -> tuple[list[bool], list[list[float]]] | None:
        """For each replica, whether a task with these inputs is a new domain, and how many of its rows belong to each
        known one; None if the method cannot tell. See `Method.domains`.
        """
        if self.method.domains is None:
            return None
        found = self.method.domains(self.memory, self.network.posterior, self._asked(x, heads), task)
        if found is None:
            return None
        both = torch.cat([double(found[0].unsqueeze(1)), double(found[1])], 1)
        if self.ranks is not None:
            self.ranks.broadcast_(both)
        return [bool(row[0]) for row in both], both[:, 1:].tolist()

    @torch.no_grad()
    def evidence(self, x: Tensor, heads: Sequence[int]) -> Tensor | None:
        """[R, N, heads]: log p(x, head) up to a constant, or None: see `log_joint`."""
        found = self.log_joint(x, heads)
        return None if found is None else torch.stack([scores.logsumexp(2) for scores in found], 2)

    @torch.no_grad()
    def predict(
        self,
        x: Tensor,
        head: int,
        draws: Iterable[Tensor] | None = None,
        chunk: int | None = None,
        task: int | None = None,
    ) -> Tensor:
        """Probabilities [R, N, classes] for x [U, N, ...] (see TaskData), averaged over fixed draws of the weights."""
        if self.method.generative:
            return self._generated(x, [head])[0]
        total: Tensor | float = 0.0
        count = 0
        for p in self._drawn(x, [head], draws, chunk, task):
            total, count = total + p, count + 1
        return torch.as_tensor(total) / count

    @torch.no_grad()
    def predict_each(
        self, x: Tensor, heads: Sequence[int], draws: Iterable[Tensor] | None = None, task: int | None = None
    ) -> list[Tensor]:
        """`predict` for each of these heads. The trunk is computed only once."""
        if len(heads) == 1 or self.method.generative:
            return [self.predict(x, k, draws, task=task) for k in heads]
        total: Tensor | float = 0.0
        count = 0
        for p in self._drawn(x, heads, draws, task=task):
            total, count = total + p, count + 1
        return list((torch.as_tensor(total) / count).split([self.classes(k) for k in heads], 2))

    @torch.no_grad()
    def predict_with_entropy(
        self, x: Tensor, heads: Sequence[int], task: int | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """For each of these heads: `predict`, and the mean over the weight draws of the entropy of each draw's own
        prediction, [R, N], in nats. The trunk is computed only once.
        """
        if self.method.generative:
            return [(p, torch.special.entr(p).sum(2)) for p in self._generated(x, heads)]
        sizes = [self.classes(k) for k in heads]
        total: Tensor | float = 0.0
        entropy: Tensor | float = 0.0  # [R, N, heads]
        count = 0
        for p in self._drawn(x, heads, task=task):
            own = of_each(torch.special.entr(p), sizes, lambda part: part.sum(-1, keepdim=True))
            total, entropy, count = total + p, entropy + own, count + 1
        each = (torch.as_tensor(total) / count).split(sizes, 2)
        return list(zip(each, (torch.as_tensor(entropy) / count).unbind(2), strict=True))

    @torch.no_grad()
    def log_likelihood(self, data: TaskData, samples: int | None = None) -> Tensor:
        """[R, N]: log p of each example at the means of the weights: see `Likelihood.log_likelihood`."""
        with self.precise():
            return self.likelihood.log_likelihood(self._means(data.task), data.x, data.y, samples)

    @torch.no_grad()
    def sample(self, task: int, count: int) -> Tensor:
        """[R, count, D]: inputs that a task's model generates at the means of the weights: see `Likelihood.sample`."""
        with self.precise():
            return self.likelihood.sample(self._means(task), count)

    def _means(self, task: int) -> Means:
        return Means(self.network, self.predictor(task).mean, self.seeds, task)

    def _generated(self, x: Tensor, heads: Sequence[int]) -> list[Tensor]:
        """The predictions of a method that predicts without the network."""
        found = self.log_joint(x, heads)
        if found is None:
            raise EvclError(f"{self.method.name} cannot predict inputs of another shape than it has learned from")
        return [scores.softmax(2) for scores in found]

    def _drawn(
        self,
        x: Tensor,
        heads: Sequence[int],
        draws: Iterable[Tensor] | None = None,
        chunk: int | None = None,
        task: int | None = None,
    ) -> Iterator[Tensor]:
        """Predictions [R, N, ...] for each draw of the weights; those of several heads are concatenated."""
        network = self.network
        if len(self.seeds) > 1:
            self.check_independent(network, x)
        sizes = [network.classes(k) for k in heads]
        predict = self.likelihood.predict
        if len(heads) > 1 and not self.likelihood.softmax:
            raise EvclError("numbers are predicted through one head at a time: choose a task")

        def each_head(found: Tensor) -> Tensor:
            return predict(found) if len(sizes) == 1 else of_each(found, sizes, predict)

        with self.precise(), network.keeping():
            for weights in self.draws(heads, task) if draws is None else draws:
                yield outputs(network, weights, network.layout, x, heads, chunk, each_head, task)

    def draws(self, heads: Iterable[int], task: int | None = None) -> Sequence[Tensor] | Iterator[Tensor]:
        """The weight draws [R, P] for predictions. If they are not too large, they are kept until the posterior
        changes.
        """
        posterior, wanted, samples = self.predictor(task), tuple(heads), self.settings.get("predict_samples", 1)
        if posterior.mean.numel() * samples > KEPT_NUMBERS:
            return draws(self.network, posterior, self.seeds, samples, wanted)
        versions = (posterior.mean._version, posterior.log_std._version if posterior.log_std is not None else 0)
        if self._kept is None or self._kept[0] is not posterior or self._kept[1] != (wanted, versions):
            found = list(draws(self.network, posterior, self.seeds, samples, wanted))
            self._kept = (posterior, (wanted, versions), found)
        return self._kept[2]
