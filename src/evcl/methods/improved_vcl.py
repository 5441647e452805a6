"""Improved VCL (Swaroop et al., 2019): VCL in which every task starts from means drawn anew, and trains to convergence.

L_t = mean NLL + beta/N_t KL(q_t || q_{t-1}), as in VCL; q_t starts from drawn means and standard deviations `init_std`

A fit that starts from the last posterior stays near it, and units that the earlier tasks left unused stay unused. The
authors draw the means from the distribution of initial weights (`redraw=initial`), and rely on the KL alone to lead the
fit back to what earlier tasks need. That takes hundreds of epochs, and data that determine the weights. By default they
are drawn from q_{t-1} instead (`redraw=posterior`): weights that the data did not determine are as wide as the first
prior and so are drawn anew, and weights that earlier tasks need start near their means.
"""

from __future__ import annotations

from dataclasses import replace

from evcl._core.settings import BAYESIAN, TRAINING, Settings
from evcl.methods import vcl
from evcl.methods.composed import DISTILLATION, TEMPERING
from evcl.methods.forgetting import FORGETTING
from evcl.methods.method import ALONE, Learning, Method, Past, Round
from evcl.methods.parts import compose
from evcl.methods.redraw import REDRAW, redrawn


def learn(memory: vcl.Memory, round_: Round, s: Settings, past: Past = ALONE) -> Learning:
    return vcl.learn(memory, round_, s, past, redrawn(round_, s))


# The defaults of `tempering` and `epochs` were chosen on the validation data of permuted-digits and split-digits: with
# a smaller beta the KL does not bring the weights back, with a larger one the network learns less of small tasks.
PLAIN = Method(
    name="improved-vcl",
    bayesian=True,
    learn=learn,
    memory=vcl.Memory,
    settings={
        "redraw": replace(REDRAW, default="posterior"),
        "tempering": replace(BAYESIAN["tempering"], default=0.03),
        "epochs": replace(TRAINING["epochs"], default=100),
    },
)
IMPROVED_VCL = compose(PLAIN, TEMPERING, DISTILLATION, FORGETTING)
