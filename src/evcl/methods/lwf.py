"""Learning without forgetting (Li and Hoiem, 2016): the last network teaches the old heads on the new inputs.

L_t = mean NLL + strength * sum_{k < t} T^2 mean_b KL(softmax(z*_k(x_b) / T) || softmax(z_k(x_b) / T))

z*_k are the outputs of head k by the network that the last task left, on the examples of the new task; T is the
`distill_temperature`. Nothing is kept but the network itself. A task that shares its head with an earlier one has
labels of its own there, which the teacher would contradict: such a head is not taught.
"""

from __future__ import annotations

from evcl._core.settings import Setting, Settings
from evcl._core.summaries import METHOD_SUMMARIES
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.teacher import DISTILLATION, others, teach


def learn(memory: object, round_: Round, s: Settings) -> Learning:
    strengths = dict.fromkeys(others(round_.tasks, round_), s.strength)
    fitted = yield Fit(round_.tasks, losses=teach(round_.tasks, round_, s.distill_temperature, strengths))
    return Learned(fitted.q, memory)


LWF = Method(
    name="lwf",
    summary=METHOD_SUMMARIES["lwf"],
    bayesian=False,
    learn=learn,
    settings={
        "strength": Setting(1.0, "weight of the distillation loss", high=1e6),
        "distill_temperature": DISTILLATION["distill_temperature"],
    },
)
