"""Merge adapters into the weights that they are added to (`evcl.nn.LoRA(tasks="merged")`)."""

from __future__ import annotations

import copy

import torch
from torch import nn

from evcl.methods.adapters import replaced, restarted
from evcl.nn.lora import AdaptedPeft, LoRA, adapted
from evcl.nn.network import sharing
from evcl.training.run import Run


@torch.no_grad()
def merge(run: Run, plain: nn.Module, lora: LoRA) -> nn.Module:
    """After a round, if adapters are to be merged, add their mean to the frozen weights, in the run's network and in a
    copy of the plain one, which is returned, and start from new ones. The frozen weights are those of all replicas, so
    there must be one.
    """
    network, q, plain = run.network, run.network.posterior, copy.deepcopy(plain, sharing(plain))
    layout, names = network.layout, network.adapters
    for trunk in (network.trunk, plain):
        for path, layer in adapted(trunk):
            assert not isinstance(layer, AdaptedPeft)
            prefix = f"{path}." if path else ""
            own = {name.removeprefix(prefix): layout.view(q.mean, name)[0] for name in names if name.startswith(prefix)}
            layer.merge(own, lora, run.rounds)
    none = torch.zeros_like(q.mean)
    fresh = run._around(network, none, none, layout, run.settings)
    network.posterior = replaced(q, layout, names, fresh.posterior)
    run.memory = restarted(run.memory, layout, names, fresh)
    run._changed()
    return plain
