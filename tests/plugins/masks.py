"""A subnetwork per task: random gates on the hidden units (XdG, Masse et al., 2018), and weights that are frozen once a
task has learned them (PackNet, Mallya and Lazebnik, 2018).

h_l = m_tl * relu(W_l h_{l-1} + b_l),   m_tl ~ Bernoulli(keep) for each unit, drawn once per task

Task t uses only the weights between units with an open gate. It trains those that no earlier task used, and uses the
others unchanged. Each task is predicted with its own weights, so nothing is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evcl._core.settings import Setting, Settings
from evcl.methods import Fit, Learned, Learning, Method, Round, per_weight, register
from evcl.nn import Gaussian


@dataclass(frozen=True)
class Memory:
    masks: dict[int, Tensor] = per_weight(dict, low=0, high=1)  # task's number -> 1 for the weights it uses


def drawn(round_: Round, head: int, keep: Tensor | float) -> Tensor:
    """[R, P]: 1 for the weights between units with an open gate, in a multilayer perceptron and its head."""
    layout, sources = round_.network.layout, round_.generators("mask")
    mask = torch.zeros_like(round_.posterior.mean)
    live: Tensor | None = None  # [R, i]: the gates of the layer before; None for the inputs, which are all used
    for name in round_.network.names_of([head]):
        part = layout.view(mask, name)
        if name.endswith("weight"):
            new = torch.ones_like(part[:, :, 0])
            if name in round_.network.trunk_names:
                rows = [torch.rand(part.shape[1], generator=g, dtype=torch.float64) for g in sources]
                new = (torch.stack(rows).to(mask.device) < keep).to(mask)
            part.copy_(new.unsqueeze(2) if live is None else new.unsqueeze(2) * live.unsqueeze(1))
            live = new
        else:
            part.copy_(new)
    return mask


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    (task,) = round_.tasks
    before, mask = round_.posterior, drawn(round_, task.head, s.keep)
    taken = torch.stack([torch.zeros_like(mask), *memory.masks.values()]).amax(0)
    moves = (mask > 0) & (taken == 0)
    fitted = yield Fit([task], start=Gaussian(before.mean * mask, None), moves=moves)
    learned = torch.where(moves, fitted.q.mean, before.mean)
    return Learned(Gaussian(learned, None), Memory({**memory.masks, task.task: mask}))


def predictor(memory: Memory, posterior: Gaussian, task: int | None) -> Gaussian:
    """The weights of this task; without a task, those of the last one."""
    mask = memory.masks[max(memory.masks) if task is None else task]
    return Gaussian(posterior.mean * mask, None)


register(
    Method(
        name="plugin-masks",
        summary="random hidden units per task; what a task has learned stands still",
        bayesian=False,
        learn=learn,
        memory=Memory,
        settings={"keep": Setting(0.5, "part of the hidden units that a task uses", high=1.0, open_low=True)},
        predictor=predictor,
    ),
    overwrite=True,
)
