"""Memory aware synapses (Aljundi et al., 2018): a weight matters if the outputs are sensitive to it.

L_t = mean NLL + strength sum_i (Omega_i / N_t) (theta_i - theta*_i)^2,   theta* the weights after the last task
Omega_i <- Omega_i + N_t mean_n |d ||f(x_n)||^2 / d theta_i|,   f the outputs of the task's head

No labels are used. As in the paper, the absolute value is taken of each example's gradient, never of a batch's. In the
paper Omega is not weighted by the numbers of rows N; with tasks of equal size that makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from evcl._core.settings import Setting, Settings
from evcl.methods.elastic_memory import Elastic
from evcl.methods.measures import sensitivity
from evcl.methods.memory import per_weight
from evcl.methods.method import Fit, Learned, Learning, Method, Round


@dataclass(frozen=True)
class Memory:
    importance: Tensor = per_weight(low=0)  # Omega


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    pull = Elastic(round_.posterior, 2 * s.strength / round_.n * memory.importance)
    fitted = yield Fit(round_.tasks, terms=[pull])
    return Learned(fitted.q, Memory(memory.importance + sensitivity(fitted, round_, s.examples)))


MAS = Method(
    name="mas",
    learn=learn,
    memory=Memory,
    settings={
        # on validation data of the digits; 0.003 to 0.03 are as good, but squared outputs are larger with other data
        "strength": Setting(0.01, "lambda, the weight of the penalty", high=1e12),
        "examples": Setting(
            5000, "maximum number of training examples used to measure the importance", low=1, high=100_000_000
        ),
    },
    apart=True,
)
