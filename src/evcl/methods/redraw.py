"""Start a task from means that are drawn again, rather than from those that the last task ended with.

The drawn weights are those that the round trains: the trunk's and those of its tasks' heads. Where a standard deviation
is larger than `init_std`, it starts from `init_std` again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evcl._core.randomness import Purpose
from evcl._core.settings import Setting, Settings
from evcl.methods.method import Round
from evcl.nn import Gaussian, log_stds
from evcl.nn.convert import INIT_SHARE

REDRAW = Setting(
    "none",
    "where the means start in a later task: where the last task left them (none); at a draw from the last posterior, "
    "so that weights that earlier tasks need stay near their means (posterior); or at a draw from the distribution of "
    "initial weights, which needs many epochs (initial)",
    choices=("none", "posterior", "initial"),
)


def redrawn(round_: Round, s: Settings) -> Gaussian | None:
    """The weights to start from, over all weights; None: those of the last round."""
    if s.redraw == "none" or not round_.seen:
        return None
    network, q = round_.network, round_.posterior
    assert q.log_std is not None
    sources = round_.generators(Purpose.REDRAW)
    if s.redraw == "initial":
        mean = network.redrawn(q.mean, sources)
    else:
        z = [torch.randn(q.mean.shape[1], generator=source, dtype=torch.float64) for source in sources]
        mean = q.draw(torch.stack(z).to(q.mean))
    used = torch.zeros_like(q.mean, dtype=torch.bool)
    for name in network.names_of([task.head for task in round_.tasks]):
        used[:, network.layout.spans[name]] = True
    start: Tensor = log_stds(s.init_std, network.scales, network.layout, q.mean, INIT_SHARE)
    log_std = torch.where(used, torch.minimum(q.log_std, start), q.log_std)
    return Gaussian(torch.where(used, mean, q.mean), log_std)
