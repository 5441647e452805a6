"""Learners made from a learner: with a layer of lower rank (see `evcl.nn.truncate`), or with more inputs."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evcl._core.errors import EvclError, unknown
from evcl.methods import memories
from evcl.nn import MLP, Gaussian
from evcl.nn.truncation import low_rank

if TYPE_CHECKING:
    from evcl.learner.learner import Learner


@torch.no_grad()
def truncated(learner: Learner, layer: str, rank: float) -> Learner:
    made = copy.deepcopy(learner)
    run, network, name = made.state.run, made.state.run.network, f"{layer}.weight"
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
    for trunk in (network.trunk, made.state.plain):
        weight = trunk.state_dict()[name]
        weight.copy_(low_rank(weight, layer, rank))
    return made


@torch.no_grad()
def with_inputs(learner: Learner, count: int) -> Learner:
    """A copy with this many more inputs, after those it has. The weights of a new input start at their prior, with
    mean 0. All else is what it would be if the new inputs had been 0 in every row learned, so predictions for such rows
    stay.
    """
    from evcl.learner.persist import rebuilt

    plain, method = learner.state.plain, learner.method
    what = "its network is not an evcl.nn.mlp" if not isinstance(plain, MLP) else ""
    what = what or ("it has a column of layers for each task" if method.trunk is not None else "")
    filmed = learner.state.run.network.task_weights is not None
    what = what or ("it has scales and shifts of each task" if filmed else "")
    what = what or ("its first prior is its own" if learner.state.run.prior != "zero" else "")
    if what:
        raise EvclError(f"{method.name} cannot have more inputs: {what}")
    assert isinstance(plain, MLP)
    inputs, made = plain.inputs + count, rebuilt(*learner.described())
    try:
        made.state.run.grow_inputs(count)
    except EvclError as error:
        raise EvclError(f"{method.name} cannot have more inputs: {error}") from None
    made.state.plain.inputs = inputs  # type: ignore[assignment]
    made.state = replace(made.state, shape=None if made.state.shape is None else (inputs,))
    if made.state.session.density is not None:
        made.state.session.density = made.state.session.density.with_inputs(count)
    return rebuilt(*made.described()).to(learner.state.run.network.posterior.mean.device)
