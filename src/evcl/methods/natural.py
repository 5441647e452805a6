"""What the update rules of VOGN, IVON, noisy K-FAC and the Kalman filter have in common.

With a KL term of weight w to the prior N(m, s), and with g and h the mean and the curvature of the mean NLL's gradient,
the objective mean NLL + w KL(q || prior) is minimal where

    g + d (mu - m) = 0,    v = w / (h + d),    d = w / s
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Noise
from evcl._core.settings import BAYESIAN, TRAINING, Setting, Settings, decided
from evcl.methods.kl import kl
from evcl.methods.method import ALONE, Fit, Learned, Learning, Round, Tracker
from evcl.methods.terms import Springs
from evcl.methods.vcl import Memory
from evcl.nn import BayesianNetwork, Gaussian, Layout

Source = Callable[[Tensor, Noise], Tensor]


class NaturalRule:
    """An update rule that computes its own gradient: subclasses define `source` and `step`. See `Fit.rule`."""

    passes = 1
    whole = False  # True if a step needs all its examples at once: its gradient cannot be computed in parts

    def __init__(
        self, q: Gaussian, variance: Tensor | None, grads: Tensor, pull: Springs | None, s: Settings, rounded: object
    ) -> None:
        if variance is None or q.log_std is None:
            raise EvclError(f"{type(self).__name__} needs a Bayesian method")
        self.mean, self.log_std, self.variance, self.grads, self.pull, self.settings = (
            q.mean, q.log_std, variance, grads, pull, s,
        )  # fmt: skip
        self.layout = q.layout
        self.count = torch.zeros((), dtype=q.mean.dtype, device=q.mean.device)
        lr = torch.as_tensor(decided(s.get("lr", 1.0)), dtype=q.mean.dtype, device=q.mean.device)
        self._base = lr.expand(len(q.mean), 1).clone(memory_format=torch.contiguous_format)
        self.lr = self._base.clone()  # [R, 1]; a CUDA graph reads it at each step
        self.moves = torch.ones_like(self._base, dtype=torch.bool)
        self.means: list[Tensor] = []  # what `source` fills beside `grads`
        self.prepare()

    def prepare(self) -> None:
        """Create what the steps need: the rule's tensors are known."""

    def source(self, network: BayesianNetwork, layout: Layout, pool: Any, at: Callable[..., Source]) -> Source:
        """Make the function that computes a step's gradient: see `evcl.training.rules.Estimating`."""
        raise NotImplementedError

    def step(self) -> tuple[Tensor, Tensor]:
        """The new means and variances."""
        raise NotImplementedError

    def begin(self, examples: int) -> None:
        """A step begins."""
        self.count.add_(1)

    def end(self) -> None:
        """The fit has ended."""

    def __call__(self) -> None:
        mean, variance = self.step()
        torch.where(self.moves, mean, self.mean, out=self.mean)
        torch.where(self.moves, variance, self.variance, out=self.variance)
        torch.where(self.moves, 0.5 * self.variance.log(), self.log_std, out=self.log_std)

    def state(self) -> list[Tensor]:
        """The tensors of its own that a step changes."""
        return []

    def buffers(self) -> list[Tensor]:
        return [self.mean, self.log_std, self.variance, self.grads, self.count, *self.state()]

    def scale(self, factor: float) -> None:
        torch.mul(self._base, factor, out=self.lr)

    def freeze(self, rows: Tensor) -> None:
        self.moves &= ~rows.view(-1, 1)

    def resume(self, steps: int) -> None:
        self.count.fill_(steps)

    def prior(self) -> tuple[Tensor, Tensor, Tensor]:
        """m, s and d = w / s, [R, P] each, of the KL term."""
        if self.pull is None or self.pull.mean is None or self.pull.linear is None:
            raise EvclError(f"{type(self).__name__} needs a KL term")
        d = self.pull.linear.w.expand_as(self.mean)
        if not bool((d > 0).all()):
            raise EvclError("tempering must be above 0: without a KL term, the variances have no optimum")
        return self.pull.mean.c, self.pull.linear.c, d


WITHOUT: dict[str, Setting | None] = {
    **dict.fromkeys(("optimizer", "std_update", "std_rate", "std_lr_scale")),  # of the usual update rule
    "film": replace(
        TRAINING["film"],
        refuses={"true": "its steps change the posterior alone, and FiLM's scales and shifts are not part of it"},
    ),
}
NO_MEMORY = "its update rule computes the posterior from the rows of the new task"
FULL_BETA_ROWS = 1000  # rows; beta is smaller for fewer
MAX_RATE = 0.16  # of a rate that was raised for a short task


class AtEnd(Tracker):
    """Something [R, P] of the rule, when the fit has ended."""

    def __init__(self, read: Callable[[], Tensor | None]) -> None:
        self.read = read

    def result(self) -> Tensor | None:
        return self.read()


class Rates(NamedTuple):
    """What the settings of these names are when they are auto, if a task has many rows and steps."""

    tempering: float
    lr: float
    curvature_rate: float

    def settings(self) -> dict[str, Setting | None]:
        beta, often = self.tempering, "number of steps in the task"
        return {
            **WITHOUT,
            "tempering": replace(
                BAYESIAN["tempering"],
                help=f"beta, the weight of the KL term; auto: {beta:g}, and {beta:g} sqrt(n / 1000) for n < 1000 rows",
            ),
            "lr": Setting(
                "auto",
                "learning rate of the natural-gradient step on the means; auto: "
                f"{self.lr:g}, or 8 / {often} if that is larger, limited to {MAX_RATE:g}",
                high=10.0,
                open_low=True,
                auto=True,
            ),
            "momentum": Setting(0.9, "b1, the fraction of the last step's direction that is kept", high=0.9999),
            "curvature_rate": Setting(
                "auto",
                "b2, the fraction of the curvature that each step replaces; auto: "
                f"{self.curvature_rate:g}, or 800 / ({often})^2 if that is larger, limited to {MAX_RATE:g}",
                high=1.0,
                open_low=True,
                auto=True,
            ),
        }


def learn_with(rule: type[NaturalRule], numbers: Rates) -> Callable[[Memory, Round, Settings], Learning]:
    """VCL's algorithm with this rule.

    A task of few rows has a smaller KL term, so that q does not stay at the prior, and larger rates, so that few steps
    suffice. On held-out data of permuted-digits (5 tasks, 4 seeds), accuracy in % with the numbers alone, and with this
    rule:

        rows per task      30        100       400       1120
        vogn            14, 37    20, 47    57, 62    68, 68
        ivon            15, 44    42, 59    67, 70    77, 77
    """

    def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
        beta = s.tempering
        if isinstance(beta, str):
            beta = numbers.tempering * min(1.0, round_.n / FULL_BETA_ROWS) ** 0.5
        steps = s.epochs * -(-round_.n // s.batch_size)
        usual = {"lr": (numbers.lr, 8 / steps), "curvature_rate": (numbers.curvature_rate, 800 / steps**2)}
        rates = {k: max(long, min(MAX_RATE, short)) for k, (long, short) in usual.items() if isinstance(s[k], str)}
        term = kl(memory.prior, beta, memory.beta, ALONE, round_, s)
        fitted = yield Fit(round_.tasks, terms=[term], rule=rule, rates=rates)
        return Learned(fitted.q, memory.after(fitted.q, beta, ALONE, round_, s))

    return learn
