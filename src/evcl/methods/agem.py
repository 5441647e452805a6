"""A-GEM, averaged gradient episodic memory (Chaudhry et al., 2019): no step against the gradient of the kept rows.

    g = gradient of the mean NLL of a batch of the new task,    k = that of as many kept rows, each through its own head
    if g.k < 0:  g <- g - (g.k / k.k) k

and the optimiser takes g. Kept rows only forbid directions; they are not trained on.
"""

from __future__ import annotations

from evcl._core.settings import Settings
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.methods.rehearsal import REHEARSAL, Rehearsal
from evcl.methods.samplers import Interleaved


def learn(memory: Rehearsal, round_: Round, s: Settings) -> Learning:
    kept, fit = memory.recalled(round_), Fit(round_.tasks)
    if kept:
        sampler = Interleaved(len(round_.tasks))
        fit = Fit([*round_.tasks, *kept], sampler=sampler, batch=2 * s.batch_size, project=True)
    fitted = yield fit
    return Learned(fitted.q, memory.after(round_, s))


AGEM = Method(
    name="agem",
    learn=learn,
    memory=Rehearsal,
    settings=REHEARSAL,
)
