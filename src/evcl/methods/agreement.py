"""Does a teacher know what new rows say? Estimates that take neither label noise for ignorance nor chance for change.

On average they say, but for a small rest, that nothing has changed, if the new rows are of the distribution that the
teacher has learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from evcl._core.devices import double
from evcl.methods.parts import Rules, rule
from evcl.methods.terms import Number

COLUMNS_AT_ONCE = 4096  # added to the kernel at a time: large images would need gigabytes at once


@dataclass(frozen=True)
class Forget(Rules):
    """The rules of forgetting."""

    prefix: ClassVar[str] = "forget"
    significance: float = rule(
        2.0,
        "what is learned from the teacher's errors, and how much larger they are than it expects, count from this many "
        "standard errors above 0",
        "derived: where nothing changes, chance is taken for change in one round of forty",
        high=1e3,
    )
    ridge: float = rule(
        0.1,
        "ridge of the regressions that learn the teacher's errors, as a fraction of the mean of the kernel's diagonal",
        "ablated: with 0.01 and 1, ten digits in one head win 0.4 and 0.1 points, and noisy labels lose nothing",
        low=1e-6,
        high=1e6,
    )


DEFAULTS = Forget()


class Agreement(NamedTuple):
    """How well a teacher agrees with the labels of new rows, [R, 1] each, from 0 to 1."""

    knows: Tensor
    surprised: Tensor


def left_out(x: Tensor, y: Tensor, ridge: Number) -> Tensor:
    """[R, n, C]: y [R, n, C] of each row, as a ridge regression on x [R, n, inputs] of the other rows predicts it.

    With K the kernel of the inputs, whose mean diagonal is m, and G = (K + ridge m I)^-1, it is y_i - (G y)_i / G_ii.
    """
    kernel = y.new_zeros(len(x), x.shape[1], x.shape[1])
    for some in x.split(COLUMNS_AT_ONCE, 2):
        centred = double(some).nan_to_num()  # an untrained network may overflow: training says so if it matters
        centred = centred - centred.mean(1, keepdim=True)
        kernel += centred @ centred.mT
    scale = kernel.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-12).view(-1, 1, 1)
    ridge, identity = (
        ridge.unsqueeze(2) if isinstance(ridge, Tensor) else ridge,
        torch.eye(x.shape[1], dtype=kernel.dtype, device=kernel.device),
    )
    inverse = torch.linalg.inv(kernel + scale * (1 + ridge * identity))  # the 1 adds a bias
    predicted: Tensor = y - inverse @ y / inverse.diagonal(dim1=1, dim2=2).unsqueeze(2)
    return predicted


def of_classes(log_p: Tensor, y: Tensor, about: list[Tensor], rules: Forget = DEFAULTS) -> Agreement:
    """For a teacher's log-probabilities log_p [R, n, C] of classes y [R, n].

    Of what can be known about the labels, it knows what it says, and does not know what can be learned of its errors
    from these rows. With r_i = onehot(y_i) - p_i, and r~_i as a ridge regression on the other rows predicts it from
    x_i, one of the inputs `about` [R, n, inputs],

        knows = said / (said + gain),   said = sum_i |onehot(y_i) - 1/C|^2 - |r_i|^2,
        gain = sum_i |r_i|^2 - |r_i - r~_i|^2,

    with the larger gain, and 1 if none is significant: label noise cannot be learned, and does not count. New rows
    surprise it by the nats that it needs more than it expects, as a fraction of log C, if these are significant, and by
    no more than what it does not know:

        surprised = min(1 - knows, (NLL - H) / log C),

    where NLL is the teacher's, and H, its mean entropy, is the NLL that it expects.
    """
    p = double(log_p).exp()
    wrong = torch.nn.functional.one_hot(y, p.shape[2]) - p
    gains = torch.stack(
        [wrong.square().sum(2) - (wrong - left_out(x, wrong, rules.ridge)).square().sum(2) for x in about]
    )
    gain = significant(gains, rules).amax(0)
    said = (1 - 1 / p.shape[2] - wrong.square().sum(2).mean(1, keepdim=True)).clamp_min(0)
    knows = torch.where(gain > 0, said / (said + gain).clamp_min(1e-12), 1.0)
    excess = -log_p.gather(2, y.unsqueeze(2)).squeeze(2) + (p * log_p).sum(2)
    share = significant(double(excess), rules) / torch.tensor(max(2, p.shape[2])).log()
    return Agreement(knows.to(log_p), torch.minimum(1 - knows, share).clamp(0, 1).to(log_p))


def of_values(squares: Tensor, weights: Tensor | None = None, rules: Forget = DEFAULTS) -> Tensor:
    """[R, 1]: the fraction of what earlier rows said that new ones contradict, whose squared errors are these multiples
    [R, n] of what the likelihood expects.

    With z their mean, the old rows would have to be z times noisier for the new ones to fit: they count 1 / z times, if
    z is significantly above 1.
    """
    more = significant(double(squares) - 1, rules, weights)
    return (more / (1 + more)).to(squares)


def significant(each: Tensor, rules: Forget, weights: Tensor | None = None) -> Tensor:
    """[..., 1]: the mean of numbers [..., n] with these weights if it is significantly above 0, else 0."""
    w = torch.ones_like(each) if weights is None else weights.to(each).expand_as(each)
    w = w / w.sum(-1, keepdim=True).clamp_min(1e-12)
    mean = (w * each).sum(-1, keepdim=True)
    error = (w.square() * (each - mean).square()).sum(-1, keepdim=True).sqrt()
    return torch.where(mean > rules.significance * error, mean, 0.0)
