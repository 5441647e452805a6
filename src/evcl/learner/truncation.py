"""A learner with a layer of lower rank: see `evcl.nn.truncate`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evcl._core.errors import unknown
from evcl.methods import memories
from evcl.nn import Gaussian
from evcl.nn.truncation import low_rank

if TYPE_CHECKING:
    from evcl.learner.learner import Learner


@torch.no_grad()
def truncated(learner: Learner, layer: str, rank: float) -> Learner:
    made = copy.deepcopy(learner)
    run, network, name = made.parts.run, made.parts.run.network, f"{layer}.weight"
    if name in network.trunk_names:
        q = network.posterior
        mean = q.mean.clone()
        view = network.layout.view(mean, name)
        view.copy_(torch.stack([low_rank(weight, layer, rank) for weight in view]))

        def changed(t: Tensor) -> Tensor:
            return mean if t.shape == q.mean.shape and t.equal(q.mean) else t

        run.memory = memories.mapped(run.memory, changed)
        network.posterior = Gaussian(mean, q.log_std)
        run.changed()
        return made
    frozen = network.trunk.state_dict()
    if name not in frozen:
        known = [one.removesuffix(".weight") for one in (*network.trunk_names, *frozen) if one.endswith(".weight")]
        raise unknown("layer", layer, known)
    for trunk in (network.trunk, made.parts.plain):
        weight = trunk.state_dict()[name]
        weight.copy_(low_rank(weight, layer, rank))
    return made
