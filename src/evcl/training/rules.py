"""Update rules: Adam or SGD for the means, Adam or a natural step for sigma, on flat buffers [R, P].

`Rule` is the contract. Once per fit, `Fit(rule=make)` calls make(q, variance, grads, pull, settings, rounded), where
`rounded` is a copy of means and variances [S, R, P] in a lower precision that the rule updates too, or None.

`Update`, the default: add the springs of the method's terms to the gradient, and update the posterior.

Means are updated by Adam or SGD; log sigmas by Adam or by a natural step. With v = sigma^2, the curvature H of the mean
NLL, and a KL of weight beta/N to a prior of variance s, the objective is minimal at

    v = k s / (k + H + d (v - u)),   k = beta / (N s)

(d and u belong to the elastic term, see methods/terms.py). The gradient in the buffer of the variances, twice that of
the NLL, is an unbiased estimate of H. So the natural step keeps a running mean of H, and moves log sigma a fraction
`std_rate` of the way to the optimum. However small sigma is, this converges after a few times 1/std_rate steps, whereas
Adam moves log sigma by at most one learning rate per step.

H changes while the means are learned, so the mean weights step t by t: of t steps so far, the newest has the weight
2 / (t + 1), but at least `NEWEST`. What was measured in the first fraction f of a fit then has the weight f^2, and the
variance is 4/3 of that of a plain mean.

The noise of an estimate grows as 1/sigma, so each is weighted by the v at which it was made: H = mean(v grad) /
mean(v). In a plain mean, the estimates of the first steps, when sigma was small, would dominate. If noise makes H
negative, |H| is used instead: H is known no better than that, and with 0 sigma would grow to that of the prior.

There are three implementations, which the tests compare: torch operations; one pass of native.c; one GPU kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from evcl._core.devices import limited
from evcl._core.errors import EvclError
from evcl._core.settings import Settings, decided
from evcl.kernels.native import Native, native
from evcl.methods import Spring, Springs
from evcl.nn import BayesianNetwork, Gaussian, Layout


class Rate:
    """A learning rate per replica, which can be scaled, and be 0 for some. `now` [R, 1] is the tensor that a CUDA graph
    reads at each step. On a CPU, `numbers` are its values, and `value` is one number if all replicas have the same.
    """

    def __init__(self, rate: Tensor | float, like: Tensor) -> None:
        column = torch.as_tensor(rate, dtype=like.dtype, device=like.device).expand(len(like), 1)
        self._base, self._factor = column.clone(memory_format=torch.contiguous_format), 1.0
        self.now, self.numbers = self._base.clone(), list[float]()
        self.value: Tensor | float = self.now
        self._set()

    def scale(self, factor: float) -> None:
        """From now on, it is `factor` times what it was at first."""
        if factor != self._factor:
            self._factor = factor
            self._set()

    def freeze(self, rows: Tensor) -> None:
        """From now on, it is 0 for the replicas for which `rows` [R] is True."""
        self._base.masked_fill_(rows.view(-1, 1), 0.0)
        self._set()

    def _set(self) -> None:
        torch.mul(self._base, self._factor, out=self.now)
        if not self.now.is_cuda:  # reading a value does not make the host wait
            self.numbers[:] = self.now.flatten().tolist()
            self.value = self.numbers[0] if len(set(self.numbers)) == 1 else self.now


class Rule(Protocol):
    """Updates q and its variances, [R, P] each, in place, from the gradient in `grads` [S, R, P] and the springs
    `pull`.

    `grads[1]` holds twice the gradient with respect to the variances. On a GPU, a step is captured as a CUDA graph
    unless the fit has capture=False: a rule then must not read anything on the host.
    """

    count: Tensor  # number of steps taken, on the device

    def __call__(self) -> None:
        """Take a step."""

    def buffers(self) -> list[Tensor]:
        """Every tensor that a step changes or reads."""
        ...

    def scale(self, factor: float) -> None:
        """From now on, learning rates are `factor` times those of the settings."""

    def freeze(self, rows: Tensor) -> None:
        """Stop updating the replicas for which `rows` [R] is True."""

    def resume(self, steps: int) -> None:
        """Continue after this many steps; the buffers have been restored."""


@runtime_checkable
class Estimating(Rule, Protocol):
    """A rule that also computes the gradient that it uses, in place of the gradient by local reparameterisation."""

    passes: int  # how often a step computes the gradient and updates, on the same examples
    means: list[Tensor]  # what `source` fills with means over the examples, beside `grads`

    def begin(self, examples: int) -> None:
        """A step begins, on this many examples."""

    def end(self) -> None:
        """The fit has ended."""

    def source(self, network: BayesianNetwork, layout: Layout, pool: Any, at: Callable[..., Any]) -> Callable[..., Any]:
        """Return (rows [R, B], noise) -> NLL [R], which writes means over these examples into `grads` and `means`.
        Processes that share a batch then average these.

        `pool` holds the examples. at(theta [1, R, P], into [1, R, P]) makes such a function for the gradient at point
        weights: it writes that of the mean NLL and the losses, at the present values of `theta`, into `into`.
        """
        ...


BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


class Adam:
    """Updates `weights` [R, P] in place; `lr` is a number or [R, 1]."""

    def __init__(self, weights: Tensor, lr: Tensor | float, epsilon: float = EPSILON) -> None:
        self.weights, self.lr, self.epsilon = weights, lr, epsilon
        self.first, self.second = torch.zeros_like(weights), torch.zeros_like(weights)
        self.count = torch.zeros((), device=weights.device)

    def state(self) -> list[Tensor]:
        return [self.weights, self.first, self.second, self.count]

    def step(self, grad: Tensor, scratch: Tensor) -> None:
        """One step against `grad`; `scratch`, of the same shape, is overwritten."""
        self.count.add_(1)
        if not isinstance(self.lr, Tensor) and self._fused(self.lr, grad):
            return
        bias1, bias2 = (self._bias(beta) for beta in (BETA1, BETA2))
        self.first.lerp_(grad, 1 - BETA1)
        self.second.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        torch.sqrt(self.second, out=scratch)
        scratch.div_(bias2.sqrt()).add_(self.epsilon)
        torch.div(self.first, scratch, out=scratch)
        self.weights.sub_(scratch.mul_(self.lr / bias1))

    def _bias(self, beta: float) -> Tensor:
        """1 - beta^steps, on the device, so that a graph can be made of this."""
        if limited(self.count.device):
            return -torch.expm1(math.log(beta) * self.count)  # accurate in float32, too
        return 1 - beta ** self.count.double()

    def _fused(self, lr: float, grad: Tensor) -> bool:
        """What torch.optim.Adam(fused=True) calls, without its overhead. The function is private: if this version of
        torch lacks it or takes other arguments, nothing has moved, and the answer is False.
        """
        try:
            torch._fused_adam_(
                [self.weights],
                [grad],
                [self.first],
                [self.second],
                [],
                [self.count],
                lr=lr,
                beta1=BETA1,
                beta2=BETA2,
                weight_decay=0.0,
                eps=self.epsilon,
                amsgrad=False,
                maximize=False,
            )
        except (AttributeError, TypeError, NotImplementedError):
            return False
        return True


class SGD:
    """Updates `weights` [R, P] in place; `lr` and `momentum` are numbers or [R, 1]."""

    def __init__(self, weights: Tensor, lr: Tensor | float, momentum: Tensor | float = 0.0) -> None:
        self.weights, self.lr, self.momentum = weights, lr, momentum
        moving = isinstance(momentum, Tensor) or momentum > 0
        self.velocity = torch.zeros_like(weights) if moving else None
        self.count = torch.zeros((), device=weights.device)

    def state(self) -> list[Tensor]:
        return [self.weights, *([] if self.velocity is None else [self.velocity]), self.count]

    def step(self, grad: Tensor, scratch: Tensor) -> None:
        """One step against `grad`; `scratch`, of the same shape, is overwritten."""
        self.count.add_(1)
        if self.velocity is not None:
            grad = self.velocity.mul_(self.momentum).add_(grad)
        if isinstance(self.lr, Tensor):
            self.weights.sub_(torch.mul(grad, self.lr, out=scratch))
        else:
            self.weights.add_(grad, alpha=-self.lr)


NEWEST = (
    1 - BETA2
)  # at least this is the weight of the newest step in the two running means whose ratio is the curvature


class Update:
    """Calling it updates `q` and `variance` in place, from the gradients `grads` [S, R, P] and the springs `pull`.

    `rounded` [S, R, P] is a copy of the means and variances in a lower precision, which is updated too.
    """

    def __init__(
        self,
        q: Gaussian,
        variance: Tensor | None,
        grads: Tensor,
        pull: Springs | None,
        s: Settings,
        rounded: Tensor | None = None,
    ) -> None:
        self.pull = pull
        if self.pull is not None and not self.pull.finite():
            raise EvclError("the penalty is infinite: use a smaller strength, or a larger init_std or prior_std")
        self.q, self.variance, self.grads, self.settings, self.rounded = q, variance, grads, s, rounded
        lr = decided(s.lr)
        self.mean = SGD(q.mean, lr, s.momentum) if s.optimizer == "sgd" else Adam(q.mean, lr)
        self.log_std: Adam | Natural | None = None
        if q.log_std is not None:
            self.log_std = Adam(q.log_std, lr * s.std_lr_scale)
            if s.std_update == "natural":
                if self.pull is None or self.pull.linear is None:
                    raise EvclError(
                        "std_update=natural needs a method with a closed-form KL term; std_update=adam does not"
                    )
                if not bool((self.pull.linear.w > 0).all()):
                    raise EvclError(
                        "std_update=natural needs tempering above 0, because sigma has no optimum without a KL term; "
                        "std_update=adam allows 0"
                    )
                self.log_std = Natural(q.log_std, decided(s.std_rate))
        self._parts = [part for part in (self.mean, self.log_std) if part is not None]
        self.rates = [Rate(part.lr, q.mean) for part in self._parts]
        self._set_rates()
        self.count = self.mean.count  # number of steps taken
        self._counts: Tensor | None = None  # number of steps taken, for the GPU kernel
        self._taken = [0]  # number of steps taken, for compiled CPU code, which takes Python numbers
        self.scratch, self.second = torch.zeros_like(q.mean), torch.zeros_like(q.mean)
        self._move = self._choose()

    def __call__(self) -> None:
        if self._move is None:
            self._plain()
            if self.rounded is not None:
                for copy, own in zip(self.rounded, (self.q.mean, self.variance), strict=False):
                    copy.copy_(own)
        else:
            self._move()

    def freeze(self, rows: Tensor) -> None:
        """Stop updating the replicas for which `rows` [R] is True."""
        for rate in self.rates:
            rate.freeze(rows)
        self._set_rates()

    def scale(self, factor: float) -> None:
        """From now on, learning rates, except that of natural steps, are `factor` times those of the settings."""
        for part, rate in zip(self._parts, self.rates, strict=True):
            if not isinstance(part, Natural):
                rate.scale(factor)
        self._set_rates()

    def resume(self, steps: int) -> None:
        """Continue after this many steps; the other buffers have been restored."""
        counts = [part.count for part in self._parts if not isinstance(part, Natural)]
        for count in counts if self._counts is None else [*counts, self._counts]:
            count.fill_(min(steps, 2**24))  # the largest count that float32 reaches in steps of 1
        self._taken[0] = steps

    def _set_rates(self) -> None:
        for part, rate in zip(self._parts, self.rates, strict=True):
            part.lr = rate.now if isinstance(part, Natural) else rate.value

    def buffers(self) -> list[Tensor]:
        """Every tensor that an update changes or reads."""
        tensors = [t for part in self._parts for t in part.state()]
        return [*tensors, self.grads, *(t for t in (self.variance, self.rounded, self._counts) if t is not None)]

    def _choose(self) -> Callable[[], None] | None:
        """The faster implementation, if one is available: for Adam only. It must not refer to `self`: the reference
        cycle would keep the memory until Python's garbage collector runs.
        """
        if isinstance(self.mean, SGD):
            return None
        values, on_gpu = self.q.mean, self.q.mean.is_cuda
        single = values.dtype == torch.float32
        compiled = native() if single and values.is_cpu and self.pull is not None else None
        kernels = gpu_kernels() if single and on_gpu else None
        if compiled is None and kernels is None:
            return None
        pull = self.pull or Springs()
        for part in (pull.mean, pull.linear, pull.square):
            if part is not None:  # the kernel reads [R, P] numbers from each
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
            self.log_std.step(grad, self.variance, self.pull, self.count)
            return
        grad.mul_(self.variance)  # by the chain rule, now the gradient of log sigma
        if self.pull is not None:
            self.pull.add_log_std_gradient(self.variance, grad, self.scratch, self.second)
        self.log_std.step(grad, self.scratch)
        torch.mul(self.log_std.weights, 2, out=self.variance).exp_()

    def _compiled(self, compiled: Native, pull: Springs) -> Callable[[], None]:
        """The update by native.c, one replica at a time."""
        zero = Spring(self.scratch, self.scratch)  # for a part that `pull` does not have
        mean, linear, square = (part or zero for part in (pull.mean, pull.linear, pull.square))
        means, log_stds = [], []
        for r in range(len(self.q.mean)):
            adam = self.mean
            assert isinstance(adam, Adam)
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
        numbers = [rate.numbers for rate in self.rates]
        count, parts, taken = self.count, (means, log_stds)[: len(self.rates)], self._taken

        def move() -> None:
            taken[0] = steps = taken[0] + 1
            count.fill_(steps)
            correction, root = 1 / (1 - BETA1**steps), (1 - BETA2**steps) ** -0.5
            for calls, rates, by_adam in zip(parts, numbers, (True, not natural), strict=False):
                for call, rate in zip(calls, rates, strict=True):
                    if rate != 0:
                        call(*((rate * correction, root) if by_adam else (rate, max(NEWEST, 2 / (steps + 1)))))

        return move

    def _kernels(self, kernels: Any, pull: Springs) -> Callable[[], None]:
        """The update by one GPU kernel, in which a CUDA graph needs no number from the host."""
        springs = [None if part is None else (part.w, part.c) for part in (pull.mean, pull.linear, pull.square)]
        states, rates = [part.state()[:3] for part in self._parts], [rate.now for rate in self.rates]
        buffers = self.grads, self.variance, self.rounded, self.count
        self._counts, move = kernels.update(states, isinstance(self.log_std, Natural), rates, springs, *buffers)
        return cast(Callable[[], None], move)


class Natural:
    """The natural step on log sigma, explained at the top of this file.

    `lr`, a number or [R, 1], is the fraction of the way to the optimum that one step moves log sigma.
    """

    def __init__(self, weights: Tensor, lr: Tensor | float) -> None:
        self.weights, self.lr = weights, lr
        self.measured = torch.zeros_like(weights)  # running mean of v times the gradient
        self.mean_variance = torch.zeros_like(weights)  # running mean of v

    def state(self) -> list[Tensor]:
        return [self.weights, self.measured, self.mean_variance]

    def step(self, grad: Tensor, variance: Tensor, pull: Springs, count: Tensor) -> None:
        """Step number `count`. `grad` is twice the NLL's gradient of the variance; `variance` is set for the next."""
        linear, square = pull.linear, pull.square
        assert linear is not None
        newest = (2 / (count + 1)).clamp_min(NEWEST).to(variance)
        self.measured.lerp_(variance * grad, newest)
        self.mean_variance.lerp_(variance, newest)
        stiff = linear.w + (self.measured / self.mean_variance).abs()
        if square is not None:
            stiff = stiff + square.w * (variance - square.c)
        stiff = stiff.maximum(0.1 * linear.w)  # limits how far the elastic term can make sigma grow
        # A weight without data has stiffness exactly w and variance exactly c, so that it stays there.
        self.weights += 0.5 * self.lr * (linear.w / stiff * (linear.c / variance)).log()
        torch.exp(2 * self.weights, out=variance)

    def settle(self, curvature: Tensor, pull: Springs) -> None:
        """Move log sigma to the optimum for this H [R, P], except where it is 0: v is the root of
        d v^2 + (k + H - d u) v - k s.
        """
        linear, square = pull.linear, pull.square
        assert linear is not None
        rest, d = linear.w + curvature.abs(), 0.0 if square is None else square.w
        rest = rest if square is None else rest - d * square.c
        stiff = (rest + (rest.square() + 4 * d * linear.w * linear.c).sqrt()) / 2
        best = 0.5 * (linear.w * linear.c / stiff.maximum(0.1 * linear.w)).log()
        torch.where(curvature == 0, self.weights, best, out=self.weights)


@cache
def gpu_kernels() -> Any:
    """The module of Triton kernels; None if Triton is not installed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    from evcl.kernels import gpu  # not inside `try`: a mistake in our own import must not switch the kernels off

    return gpu
