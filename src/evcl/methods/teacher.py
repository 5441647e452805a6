"""Distillation, an elastic term on functions: keep the previous network's outputs on the new inputs.

    sum_k  w_k T^2 mean_b KL(softmax(z*_k(x_b) / T) || softmax(z_k(x_b) / T))

z*_k are the outputs of head k of the teacher on the examples of the new task. The teacher is the network as the last
task left it; for a posterior, its means. T is `distill_temperature`. Nothing is kept except the network itself. To
second order, the elastic term on weights is the same loss on the old inputs, which are no longer available: the two
terms complement each other.

A head that no task of the round uses is distilled with w_k = n_k / n, the number of rows it has learned divided by the
number of rows in the round. If there are K > 50 such heads, the round draws 50 of them and distils these with K / 50
times their weights, so that a round takes no longer with thousands of heads.

A head that is used again has new labels, which may agree with the teacher or contradict it. `agreement` measures on up
to 500 of the new rows how much the teacher `knows` of what can be known about them, and how far they have `surprised`
it (see agreement.py).

A network without heads, such as a language model, is one head that is always used again, with many softmaxes per
example: it is distilled with the weight TEXT_DISTILL * knows, where knows = 1 - NLL / log C, limited to 0 to 1. Where
the teacher knows new text, that text says most of what the old text did, and the teacher repeats it. So only
(1 - knows)^PRIOR_POWER of the posterior's precision is kept: a diagonal posterior takes all tokens of a text for
independent evidence, and would hardly move.

What the teacher says on inputs unlike those it has learned is arbitrary, and to hold it there moves weights that matter
on the old inputs. So EVCL multiplies w_k by the familiarity of the new inputs, from 0 to 1 (`domains.familiarity`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from evcl import curvature
from evcl._core.randomness import Purpose, generator
from evcl._core.settings import Setting, Settings
from evcl.methods.agreement import Agreement, of_classes, of_values
from evcl.methods.data import Minibatch, TaskData
from evcl.methods.method import ALONE, Fit, Fitted, Learned, Learning, Loss, Method, Past, Round, Taught
from evcl.methods.terms import Number
from evcl.nn import BayesianNetwork, Gaussian, Layout, outputs
from evcl.targets import Likelihood

T = TypeVar("T")
AGREEMENT_ROWS = 500  # maximum number of new rows used to measure whether the teacher agrees with the labels
EVCL_DISTILL = 0.15  # the default of `distill`: a larger value learns less of the new task, a smaller one forgets more
UNDISTILLED = 1.7  # factor on the elastic term where no distillation makes up for what a diagonal Fisher misses
MAX_PAST_WEIGHT = 10.0  # upper limit of n_k / n: with a larger weight, the new task is hardly learned
MAX_DISTILLED_HEADS = 50  # heads that are distilled in a round; of more, this many are drawn
TEACHER_DRAWS = 10  # draws of the weights that tell how sure a teacher is of numbers
TEXT_DISTILL = 0.2  # factor on the distillation of a network without heads
PRIOR_POWER = 4  # exponent of the fraction of precision that its prior keeps
COMPARED_ROWS = (20, 500)  # minimum and maximum number of rows used to compare the curvatures of NLL and distillation

DISTILLATION: dict[str, Setting] = {
    "distill": Setting(
        0.0,
        "weight of the distillation loss, which keeps the previous network's outputs on the new inputs; 0: only "
        "penalties on the weights protect earlier tasks",
        high=1e6,
    ),
    "distill_temperature": Setting(
        2.0,
        "T in softmax(logits / T), the softened outputs of teacher and network in the distillation loss",
        low=1e-2,
        high=1e3,
    ),
}


Familiar = Callable[[Any, Round], Mapping[int, Tensor]]


def with_distillation(method: Method, familiar: Familiar | None = None, **defaults: float) -> Method:
    """Add distillation to a method whose `learn` takes a `Past`, and whose memory has `rows`, the number of rows that
    each head has learned. `familiar`: (memory, round) -> the familiarity of the new inputs for heads where it is known.
    """

    def learn(memory: Any, round_: Round, s: Settings) -> Learning:
        past = protection(memory.rows, round_, s, familiar(memory, round_) if familiar else {})

        def ended(fit: Fit, fitted: Fitted) -> Fitted:
            prior = next((term.prior for term in fit.terms if hasattr(term, "prior")), None)
            return fitted if prior is None else unlearned(fitted, prior, past, round_)

        return with_fits(method.learn(memory, round_, s, past), ended=ended)

    own = {name: replace(DISTILLATION[name], default=value) for name, value in defaults.items()}
    return replace(method, learn=learn, settings={**method.settings, **DISTILLATION, **own})


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


@torch.no_grad()
def agreement(task: TaskData, round_: Round) -> Agreement | None:
    """Measure the agreement of the network as the last round left it. Rows are sampled, because data may be sorted.
    None if the likelihood has no softmaxes.
    """
    drawn = task.drawn(round_.generators(Purpose.AGREEMENT), AGREEMENT_ROWS)
    network, last = round_.network, round_.last_task(task.head)
    data, from_below = task.seen_by(network)
    (seen, y), about = data.take(drawn), task.take(drawn)[0]

    def said(heads: list[int]) -> Tensor:
        return outputs(network, round_.posterior.mean, network.layout, seen, heads, task=last, from_below=from_below)

    z = said([task.head])
    parts = round_.likelihood.softmaxes(z.flatten(0, 1), y.flatten(0, 1))
    if parts is None:
        return None
    if round_.likelihood.heads and drawn.shape[1] > 1:
        inputs = [about.flatten(2)] if about.is_floating_point() else []
        return of_classes(z.log_softmax(2), y, [said([]), *inputs])
    z, y = (part.unflatten(0, drawn.shape).flatten(1, 2) for part in parts)
    z = z.log_softmax(2)
    nll = -z.gather(2, y.unsqueeze(2)).squeeze(2).mean(1, keepdim=True)
    entropy = -(z.exp() * z).sum(2).mean(1, keepdim=True)
    most = math.log(max(2, z.shape[2]))
    return Agreement((1 - nll / most).clamp(0, 1), ((nll - entropy) / most).clamp(0, 1))


@torch.no_grad()
def believed(rows: Mapping[int, Tensor], round_: Round) -> Past:
    """Decide how a round protects the past if its targets are not classes, without distillation.

    The KL counts the rows that this head has learned from once, as Bayes' rule does. So the elastic term only protects
    the others. What the new rows contradict (`of_values`) is forgotten. But where the teacher is unsure itself, its
    errors contradict nothing. So only the part `known` of it is: the mean over the rows of min(1, noise / variance due
    to uncertain weights), which is 1 for inputs like those that were learned.
    """
    task = round_.tasks[0]
    if len(round_.tasks) != 1 or task.head not in rows:
        return ALONE
    q, network, likelihood = round_.posterior, round_.network, round_.likelihood
    at = task.drawn(round_.generators(Purpose.AGREEMENT), AGREEMENT_ROWS)
    (data, from_below), y, weights = task.seen_by(network), task.take(at)[1], task.take_weights(at)
    x, last = data.take(at)[0], round_.last_task(task.head)

    def said(drawn: Tensor) -> Tensor:
        return outputs(network, drawn, network.layout, x, [task.head], task=last, from_below=from_below)

    each = likelihood.surprise(said(q.mean).flatten(0, 1).unsqueeze(1), y.flatten(0, 1).unsqueeze(1), None)
    forgotten = of_values(each.unflatten(0, at.shape), weights).view(-1, 1)
    if q.log_std is not None:
        total = sum(likelihood.predict(said(one)) for one in _draws(q, round_))
        known = likelihood.known(torch.as_tensor(total) / TEACHER_DRAWS, TEACHER_DRAWS, weights)
        forgotten = known.to(forgotten).view(-1, 1) * forgotten
    share = rows[task.head] / torch.stack(list(rows.values())).sum(0)
    return Past([], 1 - share * forgotten, 1 - share)


def _draws(q: Gaussian, round_: Round) -> Iterator[Tensor]:
    """TEACHER_DRAWS draws of the weights [R, P]."""
    size, dtype = q.mean.shape[1], q.mean.dtype
    for i in range(TEACHER_DRAWS):
        z = [torch.randn(size, generator=g, dtype=dtype) for g in round_.generators(Purpose.DOUBT, i)]
        yield q.draw(torch.stack(z).to(q.mean.device))


def protection(
    rows: Mapping[int, Tensor], round_: Round, s: Settings, familiar: Mapping[int, Tensor] | None = None
) -> Past:
    """Decide how this round protects the past. `rows` is the number of rows that each head has learned, and `familiar`
    the familiarity of the new inputs for heads where it is known, [R, 1] each.

    The past must count only once. If a head is used again, the KL and distillation protect the fraction `knows`, and
    the elastic term does not. If the new rows contradict the old, distillation cannot help, and
    the penalties are stronger instead; so they are if the new rows are unfamiliar to other heads. What other heads have
    learned is always protected.
    """
    likelihood = round_.likelihood
    if not isinstance(s.distill, Tensor) and s.distill == 0:
        return ALONE
    whole = s.distill / EVCL_DISTILL
    whole = whole.clamp(max=1.0) if isinstance(whole, Tensor) else min(1.0, whole)
    if not likelihood.heads:
        return _retold(rows, round_, s, whole)
    if not likelihood.softmax:
        return believed(rows, round_)
    n, strengths = round_.n, {}
    head, familiar = round_.tasks[0].head, familiar or {}
    prior: Number = 1.0
    elastic: Number = 1.0
    total = torch.stack(list(rows.values())).sum(0) if rows else torch.zeros(())
    chosen = taught(round_.tasks, round_)
    counted = total  # rows that the chosen heads stand for, which may be more than there were
    if any(times > 1 for times in chosen.values()) and rows.keys() & chosen.keys():
        counted = total.maximum(torch.stack([times * rows[k] for k, times in chosen.items() if k in rows]).sum(0))
    for k, times in chosen.items():
        strengths[k] = times * s.distill * (rows[k] / n).clamp(max=MAX_PAST_WEIGHT) if k in rows else times * s.distill
        if k in familiar and k in rows:
            strengths[k] = familiar[k] * strengths[k]
            share = times * whole * (1 - familiar[k]) * rows[k] / counted
            elastic = elastic + share * (UNDISTILLED - 1)
    if len(round_.tasks) == 1 and head in rows:
        agreed = agreement(round_.tasks[0], round_)
        assert agreed is not None
        knows, surprised = agreed
        strengths[head] = s.distill * knows * (rows[head] / n).clamp(max=1.0)
        share = whole * rows[head] / total  # this head's fraction of all earlier rows
        prior = 1 - share * (1 - torch.maximum(knows, surprised))
        elastic = elastic - share * (1 - UNDISTILLED * surprised)
    return Past(teach(round_.tasks, round_, s.distill_temperature, strengths), prior, elastic)


def _retold(rows: Mapping[int, Tensor], round_: Round, s: Settings, whole: Number) -> Past:
    """`protection` for a network without heads: see the top of this file."""
    network = round_.network
    if not rows or len(round_.tasks) != 1 or network.task_weights is not None:
        return ALONE
    agreed = agreement(round_.tasks[0], round_)
    if agreed is None:
        return ALONE
    total = torch.stack(list(rows.values())).sum(0)
    strength = TEXT_DISTILL * whole * agreed.knows * (total / round_.n).clamp(max=1.0)
    teacher = round_.posterior.mean.clone()
    loss = Reading(round_.likelihood, teacher, network.layout, s.distill_temperature, strength)
    prior = 1 - whole * (1 - (1 - agreed.knows) ** PRIOR_POWER)
    return Past([loss], prior, 1 - whole * (1 - agreed.surprised))


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
                taught += share * strength * loss.temperature**2 * bent
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
