"""Learning without forgetting (Li and Hoiem, 2016): distil the previous network's old heads on the new inputs.

L_t = mean NLL + strength * sum_{k < t} T^2 mean_b KL(softmax(z*_k(x_b) / T) || softmax(z_k(x_b) / T))

z*_k are the outputs of head k of the network as the last task left it, on the examples of the new task; T is
`distill.temperature`. Nothing is kept except the network itself. A head that the new task shares with an earlier one is
not distilled, because the teacher would contradict the new labels. Of more than 50 heads, 50 are drawn: see
distillation.py.
"""

from __future__ import annotations

from evcl._core.settings import Setting, Settings
from evcl.methods.distillation import Distil, taught, teach
from evcl.methods.method import Fit, Learned, Learning, Method, Round


def learn(memory: object, round_: Round, s: Settings) -> Learning:
    strengths = {k: times * s.strength for k, times in taught(round_.tasks, round_).items()}
    fitted = yield Fit(round_.tasks, losses=teach(round_.tasks, round_, Distil.of(s).temperature, strengths))
    return Learned(fitted.q, memory)


LWF = Method(
    name="lwf",
    only_classes="it distils class probabilities",
    learn=learn,
    settings={
        "strength": Setting(1.0, "weight of the distillation loss", high=1e6),
        **Distil().settings,
    },
)
