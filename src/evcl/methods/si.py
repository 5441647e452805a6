"""Synaptic intelligence (Zenke, Poole and Ganguli, 2017): a weight matters if its own movement reduced the loss.

L_t = mean NLL + c sum_i (Omega_i / N_t) (theta_i - theta*_i)^2,   c = strength, theta* the weights after the last task
omega_i = -sum over steps of g_i (theta'_i - theta_i),   g the gradient of the mean NLL alone, theta' after the step
Omega_i <- max(0, Omega_i + N_t omega_i / (Delta_i^2 + xi)),   Delta_i = theta_i - theta*_i at the end of the task

In the paper Omega is not weighted by the numbers of rows N; with tasks of equal size that makes no difference. The
maximum is in the authors' code only. With c = 1, the default, undoing a movement costs at most the loss that it
saved; on validation data of the digits, values from 1 to 3 gave the same accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from evcl._core.settings import Setting, Settings
from evcl.methods.elastic_memory import Elastic
from evcl.methods.measures import PathIntegral
from evcl.methods.memory import per_weight
from evcl.methods.method import Fit, Learned, Learning, Method, Round


@dataclass(frozen=True)
class Memory:
    importance: Tensor = per_weight(low=0)  # Omega


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    pull = Elastic(round_.posterior, 2 * s.strength / round_.n * memory.importance)
    fitted = yield Fit(round_.tasks, terms=[pull], trackers=[PathIntegral(None if isinstance(s.xi, str) else s.xi)])
    path = fitted.tracked[0]
    assert path is not None
    return Learned(fitted.q, Memory((memory.importance + round_.n * path).clamp_min(0)))


SI = Method(
    name="si",
    learn=learn,
    memory=Memory,
    settings={
        "strength": Setting(1.0, "c, the weight of the penalty", high=1e12),
        "xi": Setting(
            "auto",
            "xi, which limits the importance of weights that hardly moved; auto: 4 times the mean squared movement of "
            "the weights in the task",
            high=1e6,
            open_low=True,
            auto=True,
        ),
    },
)
