"""The usual rule: the springs of the method's terms are added to the gradient, and the posterior moves.

Means move by Adam. So do log sigmas, or by a natural step. With v = sigma^2, the curvature H of the mean NLL and a KL
of weight beta/N to a prior of variance s, the objective is least where

    v = k s / (k + H + d (v - u)),   k = beta / (N s)

(d and u are the elastic term's, see methods/terms.py), and the gradient that a pass leaves in the buffer of the
variances, twice the NLL's, is an unbiased measurement of H. So the natural step keeps a running mean of H and
moves log sigma a part of the way, `std_rate`, to there: however small sigma is, it converges after a few times
1/std_rate steps, where Adam moves it by one learning rate a step at most.

The noise of a measurement grows as 1/sigma, so each counts by the v it was made at: H = mean(v grad) / mean(v). In a
plain mean those of the first steps, made while sigma was small, would drown the others. Where noise has still brought H
below 0, |H| stands for it: it is known no better than that, and with 0 sigma would run to the prior.

There are three forms of the same, which the tests compare: plain operations; one pass of native.c; one kernel on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.settings import Settings
from evcl.kernels.native import Native, native
from evcl.methods import Spring, Springs
from evcl.nn import Gaussian
from evcl.training.rules.adam import BETA1, BETA2, Adam

DECAY = 0.999  # of the running means of which the curvature is the ratio


class Update:
    """Calling it moves `q` and `variance` (in place) by what `grads` [S, R, P] holds and the springs `pull` ask for.

    `low` [S, R, P] is a copy of the means and variances in another precision, which it keeps up.
    """

    def __init__(
        self,
        q: Gaussian,
        variance: Tensor | None,
        grads: Tensor,
        pull: Springs | None,
        s: Settings,
        low: Tensor | None = None,
    ) -> None:
        self.pull = pull
        if self.pull is not None and not self.pull.finite():
            raise EvclError("the penalty is infinite: a smaller strength, or a larger init_std or prior_std, is needed")
        self.q, self.variance, self.grads, self.settings, self.low = q, variance, grads, s, low
        self.mean = Adam(q.mean, s.lr)
        self.log_std: Adam | Natural | None = None
        if q.log_std is not None:
            self.log_std = Adam(q.log_std, s.lr * s.std_lr_scale)
            if s.std_update == "natural":
                if self.pull is None or self.pull.linear is None:
                    raise EvclError(
                        "std_update natural needs a method with a KL term in closed form; std_update=adam needs none"
                    )
                if not bool((self.pull.linear.w > 0).all()):
                    raise EvclError(
                        "std_update natural needs a tempering above 0: without a KL sigma has no optimum; "
                        "std_update=adam takes 0 too"
                    )
                self.log_std = Natural(q.log_std, s.std_rate)
        self._base = [_column(part.lr, q.mean) for part in self._parts()]
        self.rates = [rate.clone() for rate in self._base]  # as they are now; a graph reads them at each step
        self._numbers: list[list[float]] = []
        self._factor = 1.0
        self._set_rates()
        self.count = self.mean.count  # of steps taken
        self._counts: Tensor | None = None  # a kernel's own
        self._taken = 0  # the same for compiled code, which is given numbers
        self.scratch, self.second = torch.zeros_like(q.mean), torch.zeros_like(q.mean)
        self._move = self._choose()

    def __call__(self) -> None:
        if self._move is None:
            self._plain()
            if self.low is not None:
                for copy, own in zip(self.low, (self.q.mean, self.variance), strict=False):
                    copy.copy_(own)
        else:
            self._move()

    def freeze(self, rows: Tensor) -> None:
        """The replicas where `rows` [R] is true move no more."""
        for base in self._base:
            base.masked_fill_(rows.view(-1, 1), 0.0)
        self._set_rates()

    def scale(self, factor: float) -> None:
        """Adam's learning rates are this part of what the settings say."""
        if factor != self._factor:
            self._factor = factor
            self._set_rates()

    def resume(self, steps: int) -> None:
        """This many steps were taken; the other buffers are as those left them."""
        counts = [part.count for part in self._parts() if isinstance(part, Adam)]
        for count in counts if self._counts is None else [*counts, self._counts]:
            count.fill_(min(steps, 2**24))  # where counting by 1 ends in float32
        self._taken = steps

    def _set_rates(self) -> None:
        for part, base, rate in zip(self._parts(), self._base, self.rates, strict=True):
            torch.mul(base, self._factor if isinstance(part, Adam) else 1.0, out=rate)
            part.lr = rate
        if not self.q.mean.is_cuda:  # where the host waits for nothing anyway
            self._numbers[:] = [rate.flatten().tolist() for rate in self.rates]
            for part, numbers in zip(self._parts(), self._numbers, strict=True):
                if isinstance(part, Adam) and len(set(numbers)) == 1:
                    part.lr = numbers[0]

    def _parts(self) -> list[Adam | Natural]:
        return [part for part in (self.mean, self.log_std) if part is not None]

    def buffers(self) -> list[Tensor]:
        """Everything that an update changes, and what it reads."""
        found = [t for part in self._parts() for t in part.state()]
        return [*found, self.grads, *(t for t in (self.variance, self.low, self._counts) if t is not None)]

    def _choose(self) -> Callable[[], None] | None:
        """The faster form, if there is one here. It does not hold on to `self`: that would be a cycle, and its memory
        would stay until Python looks for those.
        """
        values, on_gpu = self.q.mean, self.q.mean.is_cuda
        single = values.dtype == torch.float32
        compiled = native() if single and not on_gpu and self.pull is not None else None
        kernels = gpu_kernels() if single and on_gpu else None
        if compiled is None and kernels is None:
            return None
        pull = self.pull or Springs()
        for part in (pull.mean, pull.linear, pull.square):
            if part is not None:  # a kernel reads [R, P] numbers of each
                part.w, part.c = part.w.expand_as(values).contiguous(), part.c.expand_as(values).contiguous()
        return self._compiled(compiled, pull) if compiled is not None else self._kernels(kernels, pull)

    def _plain(self) -> None:
        grad = self.grads[0]
        if self.pull is not None:
            self.pull.add_mean_gradient(self.q.mean, grad, self.scratch)
        self.mean.step(grad, self.scratch)
        if self.log_std is None or self.variance is None:
            return
        grad = self.grads[1]
        if isinstance(self.log_std, Natural):
            assert self.pull is not None
            self.log_std.step(grad, self.variance, self.pull)
            return
        grad.mul_(self.variance)  # the chain rule: now of log sigma
        if self.pull is not None:
            self.pull.add_log_std_gradient(self.variance, grad, self.scratch, self.second)
        self.log_std.step(grad, self.scratch)
        torch.mul(self.log_std.weights, 2, out=self.variance).exp_()

    def _compiled(self, compiled: Native, pull: Springs) -> Callable[[], None]:
        """By native.c, a replica at a time."""
        zero = Spring(self.scratch, self.scratch)  # of a part that the pull does not have
        mean, linear, square = (part or zero for part in (pull.mean, pull.linear, pull.square))
        means, log_stds = [], []
        for r in range(len(self.q.mean)):
            adam = self.mean
            state = [t[r] for t in (adam.weights, adam.first, adam.second, self.grads[0], mean.w, mean.c)]
            means.append(compiled.bind("update_mean", state[0].numel(), *state))
        part, variance = self.log_std, self.variance
        natural = isinstance(part, Natural)
        if part is not None and variance is not None:
            own = part.state()[:3]
            rest = (self.grads[1], variance, linear.w, linear.c, square.w, square.c)
            for r in range(len(self.q.mean)):
                state = [t[r] for t in (*own, *rest)]
                name = "update_natural" if natural else "update_log_std"
                log_stds.append(compiled.bind(name, state[0].numel(), *state))
        count, parts, numbers = self.count, (means, log_stds)[: len(self.rates)], self._numbers

        def move() -> None:
            self._taken = steps = self._taken + 1
            count.fill_(steps)
            correction, root = 1 / (1 - BETA1**steps), (1 - BETA2**steps) ** -0.5
            for calls, rates, by_adam in zip(parts, numbers, (True, not natural), strict=False):
                for call, rate in zip(calls, rates, strict=True):
                    if rate != 0:
                        call(*((rate * correction, root) if by_adam else (rate,)))

        return move

    def _kernels(self, kernels: Any, pull: Springs) -> Callable[[], None]:
        """By one kernel on a GPU, where a graph takes no number from the host."""
        springs = [None if part is None else (part.w, part.c) for part in (pull.mean, pull.linear, pull.square)]
        states = [part.state()[:3] for part in self._parts()]
        rates, count, grads, variance, low = self.rates, self.count, self.grads, self.variance, self.low
        mean, std = states[0], states[1] if len(states) > 1 else []
        counts = self._counts = kernels.counts(self.q.mean)
        natural = isinstance(self.log_std, Natural)

        def move() -> None:
            kernels.update(mean, std, natural, rates, grads, variance, springs, count, counts, low)

        return move


class Natural:
    """The natural step on log sigma; `lr` is a number or [R, 1]."""

    def __init__(self, weights: Tensor, lr: Tensor | float) -> None:
        self.weights, self.lr = weights, lr
        self.measured = torch.zeros_like(weights)  # the running mean of v times the gradient
        self.mean_variance = torch.zeros_like(weights)  # that of v

    def state(self) -> list[Tensor]:
        return [self.weights, self.measured, self.mean_variance]

    def step(self, grad: Tensor, variance: Tensor, pull: Springs) -> None:
        """`grad` is twice the NLL's gradient of the variance; `variance` is set for the next step."""
        linear, square = pull.linear, pull.square
        assert linear is not None
        self.measured.lerp_(variance * grad, 1 - DECAY)
        self.mean_variance.lerp_(variance, 1 - DECAY)  # both begin at 0, and in their ratio that cancels
        stiff = linear.w + (self.measured / self.mean_variance).abs()
        if square is not None:
            stiff = stiff + square.w * (variance - square.c)
        stiff = stiff.maximum(0.1 * linear.w)  # where the elastic term would have sigma grow, it grows by no more
        # A weight without data has a stiffness of w and a variance of c: exactly, so that it stays there.
        self.weights += 0.5 * self.lr * (linear.w / stiff * (linear.c / variance)).log()
        torch.exp(2 * self.weights, out=variance)


def _column(rate: Tensor | float, like: Tensor) -> Tensor:
    """[R, 1], a copy"""
    return (
        torch.as_tensor(rate, dtype=like.dtype, device=like.device)
        .expand(len(like), 1)
        .clone(memory_format=torch.contiguous_format)
    )


@cache
def gpu_kernels() -> Any:
    """The module of Triton kernels; None where there is no Triton."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    from evcl.kernels import gpu  # not inside `try`: a mistake in our own import must not switch the kernels off

    return gpu
