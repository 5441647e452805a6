"""Merge adapters into the weights that they are added to (`evcl.nn.LoRA(tasks="merged")`)."""

from __future__ import annotations

import copy

import torch

from evcl.methods.adapters import replaced, restarted
from evcl.nn.lora import AdaptedPeft, LoRA, adapted
from evcl.nn.network import sharing
from evcl.training.run import Run, around


@torch.no_grad()
def merge(run: Run, lora: LoRA) -> None:
    """After a round, if adapters are to be merged, add their mean to the frozen weights, in the run's network and in a
    copy of the plain one, and start from new ones. The frozen weights are those of all replicas, so there must be one.
    """
    network, q = run.network, run.network.posterior
    layout, names = network.layout, network.adapters
    run.plain = copy.deepcopy(run.plain, sharing(run.plain))
    for trunk in (network.trunk, run.plain):
        for path, layer in adapted(trunk):
            assert not isinstance(layer, AdaptedPeft)
            prefix = f"{path}." if path else ""
            own = {name.removeprefix(prefix): layout.view(q.mean, name)[0] for name in names if name.startswith(prefix)}
            layer.merge(own, lora, run.rounds)
    none = torch.zeros_like(q.mean)
    fresh = around(network, none, none, layout, run.settings)
    network.posterior = replaced(q, layout, names, fresh.posterior)
    run.memory = restarted(run.memory, layout, names, fresh)
    run.changed()
