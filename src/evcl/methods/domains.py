"""How new inputs relate to what was learned: whether a task is a new domain, and how far old outputs can be trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from evcl._core.devices import double
from evcl._core.randomness import Purpose, generator
from evcl.methods.class_statistics import Statistics, base, known_inputs, scores, units
from evcl.methods.counting import MOST_HELD, added
from evcl.methods.data import TaskData
from evcl.methods.method import Asked, Newcomer, Round
from evcl.nn import Gaussian

# A task of known classes is a new domain if this share of its rows is recognised as its own, and if the earlier domains
# know less than KNOWN of what its own rows tell about its labels, or less than NEARLY and have MISSED times their NLL
RECOGNISED, KNOWN, NEARLY, MISSED = 0.75, 0.5, 0.8, 5.0
# but not if more than NEW of the variance of its inputs is in inputs that varied less than a tenth as much before
NEW, TENTH = 0.5, 0.1
FAMILIAR, STRANGE = 5.0, 10.0  # d at which old outputs are trusted fully, and not at all: see `familiarity`
MOST_ASKED = 500  # rows for which d is computed
JUDGED_HEAD = -1  # the head under which a task of an unknown domain is counted while it is judged


@torch.no_grad()
def domains(statistics: Statistics, q: Gaussian, asked: Asked, task: Newcomer) -> tuple[Tensor, Tensor] | None:
    """Whether a task of known classes is a new domain [R], and the share of its rows that belong to each of the known
    ones [R, domains]. None if the statistics of one of the heads are unknown.

    Half of its rows, at most 1,000, are counted as classes of their own; the other half is judged. The task is a new
    domain if all are true:

        recognised:  p(own | x) > p(d | x) for each known domain d, for three rows in four
        unknown:     I(known) < 1/2 I(own), or I(known) < 4/5 I(own) and NLL(known) > 5 NLL(own), where
                     NLL(d) = -log p(y | x, d) on average, and I(d) = H(y) - NLL(d); for rows of a single class, whose
                     entropy H(y) is 0, with log 2 in its place
        crowded:     half of the variance of its inputs, or more, is in inputs that varied before

    So a prediction can tell which domain an input is from, and the task's labels follow a rule that the known domains
    hardly know. Files of one distribution are not recognised: their rows are as likely under the earlier files. If a
    task uses other inputs, such as the columns of another product, no weight of these inputs has learned anything yet.
    So one softmax learns it without forgetting, and an input can not be taken for one of another domain.
    """
    x = known_inputs(statistics, q, asked)
    if x is None:
        return None
    judged = [_judged(statistics, x[r % len(x)], asked, task, r) for r in range(len(asked.seeds))]
    new, shares = zip(*judged, strict=True)
    return torch.stack(new), torch.stack(shares)


def _judged(statistics: Statistics, x: Tensor, asked: Asked, task: Newcomer, r: int) -> tuple[Tensor, Tensor]:
    seed, y = asked.seeds[r], task.y[r % len(task.y)]
    rows = (y >= 0).nonzero().flatten().cpu()
    rows = rows[torch.randperm(len(rows), generator=generator(seed, Purpose.DOMAIN, len(rows)))][: 2 * MOST_HELD].to(
        x.device
    )
    counted, judged = rows[::2], rows[1::2]
    alone = Statistics(
        {k: one[r : r + 1] for k, one in statistics.classes.items()},
        {name: one[r : r + 1] for name, one in statistics.common.items()},
    )
    size = 1 + max(max(some) for some in task.classes)
    own = TaskData(x.unsqueeze(0), y.unsqueeze(0), JUDGED_HEAD)
    alone = added(alone, own, counted.unsqueeze(0), size, [seed])
    *known, own_scores = (one[0] for one in scores(alone, [seed], x[judged].unsqueeze(0), [*asked.heads, JUDGED_HEAD]))
    count, y = 1 + max(task.domains), y[judged]
    of_domain = torch.stack([_total(known, [d == k for d in task.domains]) for k in range(count)], 1)
    label = torch.tensor([c for one, some in zip(known, task.classes, strict=True) for c in some[: one.shape[1]]])
    right = torch.cat(known, 1).masked_fill(label.to(y.device) != y.unsqueeze(1), -math.inf).logsumexp(1)
    by_known = right - of_domain.logsumexp(1)
    by_own = own_scores.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
    frequency = torch.bincount(y, minlength=size).to(x) / max(1, len(y))
    nll = -torch.stack([by_known, by_own])
    nll = nll[:, nll.isfinite().all(0)].mean(1)  # a row whose class has no other rows says nothing
    entropy = torch.special.entr(frequency).sum()
    info = torch.where(entropy > 0, entropy, math.log(2)) - nll
    unknown = (info[0] < KNOWN * info[1]) | ((info[0] < NEARLY * info[1]) & (nll[0] > MISSED * nll[1]))
    mine = (own_scores.logsumexp(1) > of_domain.amax(1)).sum()
    recognised = (mine + 1) / (len(judged) + 2) >= RECOGNISED
    crowded = ~_uses_other_inputs(statistics, x[rows], task.y.shape[1], r)
    return recognised & unknown & crowded, of_domain.softmax(1).sum(0)


def _uses_other_inputs(statistics: Statistics, x: Tensor, n: int, r: int) -> Tensor:
    """Whether most of the variance of a task with n rows, of which x are some, is in inputs that varied less than a
    tenth as much before, in all earlier rows together. False if the variances of earlier rows are unknown.
    """
    if "squares" not in statistics.common:
        return torch.tensor(False, device=x.device)
    variance = x.flatten(1).var(0, correction=0)
    new = statistics.common["squares"][r] < TENTH * n * variance
    return (variance * new).sum() > NEW * variance.sum()


def _total(scores: Sequence[Tensor], wanted: Sequence[bool]) -> Tensor:
    """[N]: log p(x) up to a constant, over the classes of the heads that are wanted."""
    return torch.cat([one for one, use in zip(scores, wanted, strict=True) if use], 1).logsumexp(1)


@torch.no_grad()
def familiarity(statistics: Statistics, round_: Round, heads: Iterable[int]) -> dict[int, Tensor]:
    """[R, 1] for each of these heads whose statistics are known: how far its outputs on the inputs of this round can be
    trusted.

        1 for d up to 5, 0 from d = 10 on, and a straight line between;
        d = median over rows of min_c (f(x) - m_c)^T S^-1 (f(x) - m_c) / D,    c a class of the head

    d is about 1 for inputs of the same kind, and 1 to 4 for other classes of the same images. It is large if inputs
    vary in directions in which those of earlier tasks did not. If most of their variance is in inputs that hardly
    varied before, the familiarity is 0 as well.
    """
    known = {k: statistics.classes[k] for k in heads if k in statistics.classes}
    if not known:
        return {}
    network, mean, replicas = round_.network, round_.posterior.mean, range(len(round_.seeds))
    every = []
    for i, task in enumerate(round_.tasks):
        rows = task.drawn(round_.generators(Purpose.FOLDS, i))[:, :MOST_ASKED]
        x = base(network, mean, task.take(rows)[0])
        if math.prod(x.shape[2:]) == statistics.common["centre"].shape[1]:
            every.append(x)
    if not every:
        return {}
    x = torch.cat(every, 1)
    classes = list(known.values())
    trust = torch.stack([_trust(statistics, classes, x[r], round_.n, r, round_.seeds[r]) for r in replicas])
    trust = round_.same(trust.to(mean))
    return {k: trust[:, i : i + 1] for i, k in enumerate(known)}


def _trust(statistics: Statistics, classes: Sequence[Tensor], x: Tensor, n: int, r: int, seed: int) -> Tensor:
    """[heads]: the familiarity of n rows, of which x [N, ...] are some, for heads with these classes and replica r."""
    root = statistics.posterior(r).root[0]

    def whitened(f: Tensor) -> Tensor:
        white: Tensor = torch.linalg.solve_triangular(root, double(f).T, upper=False).T
        return white

    z, distances = whitened(units(x, statistics.common, r, seed)), []
    for one in classes:
        apart = torch.cdist(z, whitened(one[r, :, 1:])).square().masked_fill(double(one[r, :, 0]) == 0, math.inf)
        distances.append(apart.amin(1).median() / z.shape[1])
    trust = ((STRANGE - torch.stack(distances)) / (STRANGE - FAMILIAR)).clamp(0, 1)
    return trust * ~_uses_other_inputs(statistics, x, n, r).to(trust.device)
