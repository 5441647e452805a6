"""Forgetting on surprise: where new rows are about what old ones were, the evidence of these counts less.

    q_{t-1}  ->  precision p_0 + prior (p_{t-1} - p_0),    elastic term x elastic

`agreement` measures, on up to 500 of the new rows of a head that is used again, how much the teacher, which is the
network as the last task left it, `knows` of what can be known about them, and how far they have `surprised` it, from 0
to 1 (see agreement.py). With share, the head's fraction of all earlier rows,

    prior = 1 - share (1 - max(knows, surprised)),    elastic = 1 - share (1 - surprised)

The past must count only once: distillation protects the fraction `knows`, and the elastic term lets go accordingly. If
the new rows contradict the old, distillation cannot help, and the penalties hold on. What other heads have learned is
always protected. For targets that are no classes see `believed`.

In a network without heads, such as a language model, knows = 1 - NLL / log C and surprised = (NLL - H) / log C, where
NLL is the teacher's, and H, its mean entropy, is the NLL that it expects. Where it knows new text, that text says most
of what the old text did, and the teacher repeats it. So only 1 - knows of the posterior's precision is kept: a diagonal
posterior takes all tokens of a text for independent evidence, and would hardly move.

It is a part of methods with distillation, and in force beside it: `distill=0` is Bayes' rule, and forgets nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from evcl._core.randomness import Purpose
from evcl._core.settings import Setting
from evcl.methods.agreement import DEFAULTS, Agreement, Forget, of_classes, of_values
from evcl.methods.data import TaskData
from evcl.methods.method import ALONE, Past, Round
from evcl.methods.parts import Part
from evcl.methods.terms import Number
from evcl.nn import Gaussian, outputs

AGREEMENT_ROWS = 500  # maximum number of new rows used to measure whether the teacher agrees with the labels
TEACHER_DRAWS = 10  # draws of the weights that tell how sure a teacher is of numbers


FORGET = Setting(
    True,
    "whether a round keeps less of the last posterior and of the elastic term where its rows are about what earlier "
    "ones were; only beside distillation",
)


def let_go(agreed: Agreement, share: Tensor) -> Past:
    """What is kept of the evidence of a head that is used again, and has this share of all earlier rows."""
    knows, surprised = agreed
    return Past(prior=1 - share * (1 - torch.maximum(knows, surprised)), elastic=1 - share * (1 - surprised))


def retold(agreed: Agreement, whole: Number) -> Past:
    """What a network without heads keeps of its evidence."""
    return Past(prior=1 - whole * agreed.knows, elastic=1 - whole * (1 - agreed.surprised))


FORGETTING = Part(
    "forgetting",
    "KL to p_0 + prior (p_{t-1} - p_0) in place of p_{t-1}, the elastic term x elastic, by how new rows agree with old",
    {"forget": False, "distill": 0.0},
    settings={"forget": FORGET},
    rules=DEFAULTS,
)


@torch.no_grad()
def agreement(task: TaskData, round_: Round, rules: Forget = DEFAULTS) -> Agreement | None:
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
        return of_classes(z.log_softmax(2), y, [said([]), *inputs], rules)
    z, y = (part.unflatten(0, drawn.shape).flatten(1, 2) for part in parts)
    z = z.log_softmax(2)
    nll = -z.gather(2, y.unsqueeze(2)).squeeze(2).mean(1, keepdim=True)
    entropy = -(z.exp() * z).sum(2).mean(1, keepdim=True)
    most = math.log(max(2, z.shape[2]))
    return Agreement((1 - nll / most).clamp(0, 1), ((nll - entropy) / most).clamp(0, 1))


@torch.no_grad()
def believed(rows: Mapping[int, Tensor], round_: Round, rules: Forget = DEFAULTS) -> Past:
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
    forgotten = of_values(each.unflatten(0, at.shape), weights, rules)
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
