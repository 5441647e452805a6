"""Distillation, an elastic term on functions: keep the previous network's outputs on the new inputs.

    sum_k  w_k T^2 mean_b KL(softmax(z*_k(x_b) / T) || softmax(z_k(x_b) / T))

z*_k are the outputs of head k of the teacher on the examples of the new task. The teacher is the network as the last
task left it; for a posterior, its means. T is the rule `distill.temperature`. Nothing is kept except the network
itself. To second order, the elastic term on weights is the same loss on the old inputs, which are no longer available:
the two terms complement each other.

A head that no task of the round uses is distilled with w_k = min(1, distill n_k / n), n_k being the number of rows
that it has learned and n that of the round: no row of a teacher counts more than a label. If there are K > 50 such
heads, the round draws 50 of them and distils these with K / 50 times their weights, so that a round takes no longer
with thousands of heads.

A head that is used again has new labels, which may agree with the teacher or contradict it. There, w_k =
distill knows min(1, n_k / n): see forgetting.py, which also says how far the penalties on the weights then let go.

A network without heads, such as a language model, is one head that is always used again, with many softmaxes per
example: it is distilled with w = distill knows.

What the teacher says of inputs that never varied before is arbitrary, and to hold it there moves weights that matter on
the old inputs. So EVCL multiplies w_k by 0 where most of the variance of the new rows is in such inputs
(`task_inference.trusted`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl import curvature
from evcl._core.randomness import Purpose, generator
from evcl._core.settings import Setting, Settings
from evcl.methods.agreement import Forget
from evcl.methods.data import Minibatch, TaskData
from evcl.methods.forgetting import agreement, believed, let_go, retold
from evcl.methods.method import ALONE, Fit, Fitted, Learned, Learning, Loss, Method, Past, Round, Taught
from evcl.methods.parts import Part, Rules, rule
from evcl.methods.terms import Number
from evcl.nn import BayesianNetwork, Gaussian, Layout, outputs
from evcl.targets import Likelihood

T = TypeVar("T")
EVCL_DISTILL = 0.15  # the default of `distill`: a larger value learns less of the new task, a smaller one forgets more
MAX_DISTILLED_HEADS = 50  # heads that are distilled in a round; of more, this many are drawn
COMPARED_ROWS = (20, 500)  # minimum and maximum number of rows used to compare the curvatures of NLL and distillation


@dataclass(frozen=True)
class Distil(Rules):
    """The rules of distillation."""

    prefix: ClassVar[str] = "distill"
    temperature: float = rule(
        2.0,
        "T in softmax(logits / T), the softened outputs of teacher and network in the distillation loss",
        "ablated: from 1 to 4, digits and tables differ by at most 0.4 points and two standard errors; Li and Hoiem: 2",
        low=1e-2,
        high=1e3,
    )


DEFAULTS = Distil()
Trusted = Callable[[Any, Round, Settings], Number]
DISTILL = Setting(
    0.0,
    "weight of the distillation loss, which keeps the previous network's outputs on the new inputs; 0: only penalties "
    "on the weights protect earlier tasks",
    high=1e6,
)


def distillation(weight: float = 0.0, trusted: Trusted | None = None, rules: Distil = DEFAULTS) -> Part:
    """Distillation for a method whose `learn` takes a `Past`, and whose memory has `rows`, the number of rows that each
    head has learned. `weight`: the default of `distill`. `trusted`: (memory, round, settings) -> how far the teacher is
    trusted on the new inputs, a factor of w_k.
    """

    def wrap(method: Method) -> Method:
        def learn(memory: Any, round_: Round, s: Settings) -> Learning:
            past = protection(memory.rows, round_, s, trusted(memory, round_, s) if trusted else 1.0)

            def ended(fit: Fit, fitted: Fitted) -> Fitted:
                prior = next((term.prior for term in fit.terms if hasattr(term, "prior")), None)
                return fitted if prior is None else unlearned(fitted, prior, past, round_)

            return with_fits(method.learn(memory, round_, s, past), ended=ended)

        return replace(method, learn=learn)

    equation = "+ sum_k w_k T^2 mean KL(softmax(z*_k / T) || softmax(z_k / T)): the old outputs on the new inputs"
    settings = {"distill": replace(DISTILL, default=weight)}
    return Part("distillation", equation, {"distill": 0.0}, wrap, rules, settings)


def of_inner(function: Callable[..., T] | None) -> Callable[..., T] | None:
    """A function of a memory, for a memory that has the other one in its field `inner`; None for None."""
    return None if function is None else lambda memory, *rest: function(memory.inner, *rest)


def with_fits(
    asked: Learning,
    change: Callable[[Fit], Fit] = lambda fit: fit,
    ended: Callable[[Fit, Fitted], Fitted] = lambda fit, fitted: fitted,
) -> Learning:
    """The round of another method, with each of its fits, or what it is sent at their ends, changed."""
    answer: Fitted | None = None
    while True:
        try:
            fit = asked.send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            learned: Learned = end.value
            return learned
        answer = ended(fit, (yield change(fit)))


@dataclass(frozen=True)
class Distillation(Loss):
    """Distillation loss. `said` holds the teacher's log-probabilities for each example, [R, N, classes] per head."""

    said: Sequence[Tensor]
    temperature: Number
    strength: Sequence[Number]  # one per head; or [R, N], for each example its own
    heads: Sequence[int] = ()
    tasks: Sequence[
        int | None
    ] = ()  # with FiLM: the task whose row each head uses; empty: the row of the example's own task
    again: Callable[[Tensor], list[Tensor]] | None = None  # x [U, n, ...] -> what `said` holds for these inputs
    name: ClassVar[str] = "distillation"

    def __call__(self, network: BayesianNetwork, batch: Minibatch) -> Tensor:
        logits = batch.logits(network, self.heads, self.tasks)
        replicas = torch.arange(len(logits), device=logits.device).unsqueeze(1)
        warm, total = column(self.temperature, logits), logits.new_zeros(len(logits))
        parts = logits.split([said.shape[2] for said in self.said], 2)
        for said, strength, z in zip(self.said, self.strength, parts, strict=True):
            wanted = said[replicas % len(said), batch.rows]
            kl = F.kl_div((z / warm).log_softmax(2), wanted, reduction="none", log_target=True).sum(2)
            if isinstance(strength, Tensor) and strength.numel() > len(strength):
                total = total + (strength[replicas % len(strength), batch.rows] * kl).mean(1)
            else:
                total = total + column(strength, logits).flatten() * kl.mean(1)
        loss: Tensor = warm.square().flatten() * total
        return loss

    @torch.no_grad()
    def renew(self, x: Tensor) -> None:
        if self.again is None:
            super().renew(x)
        else:
            for said, new in zip(self.said, self.again(x), strict=True):
                said[:, : new.shape[1]].copy_(new)

    def taught(self) -> Taught | None:
        if type(self).__call__ is not Distillation.__call__:  # a subclass that computes something else
            return None
        return Taught(self.heads, self.said, self.strength, self.temperature)


@dataclass(frozen=True)
class Reading(Loss):
    """Distillation loss of a network without heads: strength * T^2 times the sum of the KLs of an example's softmaxes.
    The teacher reads each batch anew: what it says of all examples may not fit into memory.
    """

    likelihood: Likelihood
    teacher: Tensor  # [R, P]
    layout: Layout
    temperature: Number
    strength: Number
    name: ClassVar[str] = "distillation"

    def __call__(self, network: BayesianNetwork, batch: Minibatch) -> Tensor:
        with torch.no_grad(), network.lent(self.teacher, self.layout):
            wanted = self._said(batch.through(network), batch)
        log_p = self._said(batch.logits(network, self.heads).flatten(0, 1), batch)
        kl = F.kl_div(log_p, wanted, reduction="none", log_target=True).sum((2, 3)).mean(1)
        factor: Tensor = column(self.strength, kl) * column(self.temperature, kl).square()
        return factor.flatten() * kl

    def _said(self, outputs: Tensor, batch: Minibatch) -> Tensor:
        """[R, B, parts, V]: log-probabilities."""
        parts = self.likelihood.softmaxes(outputs, batch.y.flatten(0, 1))
        assert parts is not None
        z = parts[0].unflatten(0, batch.rows.shape)
        said: Tensor = (z / column(self.temperature, z).unsqueeze(3)).log_softmax(3)
        return said

    def renew(self, x: Tensor) -> None:
        """It stores nothing for each row."""


def column(value: Number, like: Tensor) -> Tensor:
    """`value` as [R, 1, 1], without a copy from the host, which a CUDA graph could not capture."""
    return value.view(-1, 1, 1) if isinstance(value, Tensor) else like.new_full((len(like), 1, 1), value)


@torch.no_grad()
def teach(tasks: Sequence[TaskData], round_: Round, temperature: Number, strengths: Mapping[int, Number]) -> list[Loss]:
    """Distillation losses on these examples, with the network as the last round left it as the teacher. `strengths`
    maps heads to weights.
    """
    heads = list(strengths)
    if not heads:
        return []
    mean, layout = round_.posterior.mean, round_.network.layout
    sizes = [round_.network.classes(k) for k in heads]
    rows = [round_.last_task(k) for k in heads] if round_.network.task_weights is not None else []

    def said(x: Tensor) -> list[Tensor]:
        if rows:
            parts = [outputs(round_.network, mean, layout, x, [k], task=t) for k, t in zip(heads, rows, strict=True)]
        else:
            parts = list(outputs(round_.network, mean, layout, x, heads).split(sizes, 2))
        warm = column(temperature, parts[0])
        return [(part / warm).log_softmax(2) for part in parts]

    targets = [torch.cat(each, 1) for each in zip(*(said(task.x) for task in tasks), strict=True)]
    return [Distillation(targets, temperature, list(strengths.values()), heads, rows, said)]


def others(tasks: Sequence[TaskData], round_: Round) -> list[int]:
    """The heads of earlier rounds that none of these tasks uses."""
    own = {task.head for task in tasks}
    return [k for k in dict.fromkeys(round_.seen) if k not in own]


def taught(tasks: Sequence[TaskData], round_: Round) -> dict[int, float]:
    """The `others` that are distilled, the same for all seeds, each with the number of heads that it stands for."""
    heads = others(tasks, round_)
    if len(heads) <= MAX_DISTILLED_HEADS:
        return dict.fromkeys(heads, 1.0)
    drawn = torch.randperm(len(heads), generator=generator(0, Purpose.TAUGHT, round_.number))[:MAX_DISTILLED_HEADS]
    return {heads[i]: len(heads) / MAX_DISTILLED_HEADS for i in sorted(drawn.tolist())}


def protection(rows: Mapping[int, Tensor], round_: Round, s: Settings, trust: Number = 1.0) -> Past:
    """Decide how this round protects the past. `rows` is the number of rows that each head has learned, and `trust` a
    factor on the distillation of heads that the round does not use.
    """
    likelihood = round_.likelihood
    if not isinstance(s.distill, Tensor) and s.distill == 0:
        return ALONE
    forgets, forget = s.get("forget", True), Forget.of(s)
    if likelihood.heads and not likelihood.softmax:
        return believed(rows, round_, forget) if forgets else ALONE
    whole = s.distill / EVCL_DISTILL
    whole = whole.clamp(max=1.0) if isinstance(whole, Tensor) else min(1.0, whole)
    temperature, n = Distil.of(s).temperature, round_.n
    alone = len(round_.tasks) == 1 and bool(rows)
    if not likelihood.heads:
        agreed = agreement(round_.tasks[0], round_, forget) if alone and round_.network.task_weights is None else None
        if agreed is None:
            return ALONE
        strength = s.distill * agreed.knows * (torch.stack(list(rows.values())).sum(0) / n).clamp(max=1.0)
        teacher, layout = round_.posterior.mean.clone(), round_.network.layout
        past = retold(agreed, whole) if forgets else ALONE
        return past._replace(losses=[Reading(likelihood, teacher, layout, temperature, strength)])
    strengths: dict[int, Number] = {}
    for k, times in taught(round_.tasks, round_).items():
        strengths[k] = trust * times * ((s.distill * rows[k] / n).clamp(max=1.0) if k in rows else s.distill)
    head, past = round_.tasks[0].head, ALONE
    if alone and head in rows:
        agreed = agreement(round_.tasks[0], round_, forget)
        assert agreed is not None
        strengths[head] = s.distill * agreed.knows * (rows[head] / n).clamp(max=1.0)
        past = let_go(agreed, whole * rows[head] / torch.stack(list(rows.values())).sum(0)) if forgets else ALONE
    return past._replace(losses=teach(round_.tasks, round_, temperature, strengths))


@torch.no_grad()
def unlearned(fitted: Fitted, prior: Gaussian, past: Past, round_: Round) -> Fitted:
    """The result of a fit, with variances as if only the labels had been learned from.

    Distillation makes variances smaller, as more data would. But its rows have no labels, and `prior` already has the
    precision of the rows they stand for. So of the precision that the fit added to the prior's, each weight keeps the
    part r = H / (H + D). H is the diagonal Fisher of the NLL and D is that of the distillation loss, both at the means.
    Without heads, both are of the same softmaxes of the same rows: D is `strength` times H.
    """
    log_std = fitted.q.log_std
    for loss in past.losses:
        if isinstance(loss, Reading) and log_std is not None and prior.log_std is not None:
            return _with_part(fitted, prior, 1 / (1 + loss.strength) * torch.ones_like(log_std))
    distilled = [loss for loss in past.losses if isinstance(loss, Distillation)]
    if log_std is None or prior.log_std is None or not distilled:
        return fitted
    classes = sum(round_.network.classes(k) for loss in distilled for k in [round_.tasks[0].head, *loss.heads])
    count = min(max(COMPARED_ROWS[0], round_.n // classes), COMPARED_ROWS[1])

    def some(i: int, task: TaskData) -> tuple[Tensor, Tensor, bool]:
        data, from_below = task.seen_by(fitted.network)
        return *data.take(task.drawn(round_.generators(Purpose.UNLEARNED, i), count)), from_below

    def curvature_of(rows: tuple[Tensor, Tensor, bool], head: int, film: int | None, temperature: Number) -> Tensor:
        about = (fitted.network, fitted.own.mean, fitted.layout, [head], *rows[:2])
        sample = curvature.Sample(*about, task=film, ranks=round_.ranks, from_below=rows[2])
        return curvature.fisher(sample, temperature=temperature)

    labels, taught = torch.zeros_like(fitted.own.mean), torch.zeros_like(fitted.own.mean)
    for i, task in enumerate(round_.tasks):
        rows, share = some(i, task), task.n / round_.n
        labels += share * curvature_of(rows, task.head, task.task, 1.0)
        for loss in distilled:
            film = loss.tasks or [task.task] * len(loss.heads)
            for k, row, strength in zip(loss.heads, film, loss.strength, strict=True):
                bent = curvature_of(rows, k, row, loss.temperature)
                taught += share * strength * bent
    layout, r = fitted.network.layout, torch.ones_like(log_std)
    layout.scatter_(r, fitted.layout, torch.where(taught > 0, labels / (labels + taught), 1.0))
    return _with_part(fitted, prior, r)


def _with_part(fitted: Fitted, prior: Gaussian, r: Tensor) -> Fitted:
    """The result of a fit with the part r [R, P] of the precision that it added to the prior's."""
    log_std = fitted.q.log_std
    assert log_std is not None
    before, after = prior.precision(), fitted.q.precision()
    kept = torch.where((r < 1) & (after > before), -0.5 * (before + r * (after - before)).log(), log_std)
    return replace(fitted, q=Gaussian(fitted.q.mean, kept, fitted.q.layout))
