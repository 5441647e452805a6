"""Plain networks from a learner's weights: modules of torch alone, from the inputs to the outputs of its heads."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl.nn import PerTask, head_names
from evcl.nn.film import folded_
from evcl.nn.initial import blank
from evcl.nn.inputs import headed
from evcl.nn.per_task import TaskWeights

if TYPE_CHECKING:
    from evcl.learner.learner import Learner


def mean_network(learner: Learner, task: str | int | None) -> nn.Module:
    """A plain network with the mean weights: see `Learner.mean_network`."""
    if learner.method.generative:
        raise EvclError(f"{learner.method.name} trains no network: it predicts by a likelihood per class alone")
    groups = learner.state.session.groups[learner.state.head(task)]
    if len(groups) > 1:
        raise EvclError(
            f"the classes of this head were learned in {len(groups)} groups, and a likelihood per class tells them "
            "apart: no plain network has that. Use predict_proba, or a learner with one_softmax=True"
        )
    run, number, k = learner.state.run, learner.state.number(task), groups[0].number
    heads = [k] if run.likelihood.heads else []
    model = next(plain_networks(learner, [run.predictor(number).mean], heads, number))
    scale, head = learner.state.session.scales.get(learner.state.head(task)), model[-1]
    if scale is not None and isinstance(head, nn.Linear):
        run.likelihood.rescale_head(head, run.network, k, scale)
    return model


@torch.no_grad()
def plain_networks(
    learner: Learner, draws: Iterable[Tensor], heads: Sequence[int], number: int | None
) -> Iterator[nn.Sequential]:
    """For each of these weights [1, P], the trunk and a linear layer on it, whose outputs are the logits of these heads
    side by side; without heads, the trunk's features. `number`: whose task's columns and FiLM row to use.

    All of them share the tensors that do not learn, unless there is FiLM, which is multiplied into the layers.
    """
    run = learner.state.run
    network, plain = run.network, learner.state.plain
    if learner.method.trunk is not None:  # the columns up to the task's own
        plain = run.plain_trunk(run.rounds if number is None else number + 1)
    shared: nn.Module | None = None
    for weights in draws:
        if shared is None:
            shared = _fixed(copy.deepcopy(plain).to(weights), network.statistics())
        names = dict(shared.named_parameters())
        frozen = [p for name, p in names.items() if name not in network.trunk_names] + list(shared.buffers())
        trunk = copy.deepcopy(shared, {id(t): t for t in frozen} if network.task_weights is None else {})
        views = network.layout.views(weights)
        for name, parameter in trunk.named_parameters():
            if name in network.trunk_names:
                parameter.copy_(views[name][0])
        for module, first in zip(trunk.modules(), plain.modules(), strict=True):
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:  # its row is not a weight
                module.weight[module.padding_idx] = first.get_parameter("weight")[module.padding_idx]
        own, task = network.task_weights, number or 0
        if own is not None and any(isinstance(module, PerTask) for module in trunk.modules()):
            _set_private(trunk, own, task)
        elif own is not None:
            folded_(trunk, own, task)
        yield headed(trunk, _head(views, heads), network.call).eval()


def _set_private(trunk: nn.Module, weights: TaskWeights, task: int) -> None:
    """Give the private layers of a plain trunk the weights of a task."""
    own = [module for module in trunk.modules() if isinstance(module, PerTask)]
    for layer, module in zip(weights.kind.parts, own, strict=True):
        views = layer.inner.layout.views(weights.table[:1, task, layer.span])
        for name, parameter in module.module.named_parameters():
            parameter.copy_(views[name][0])


def _fixed(trunk: nn.Module, statistics: dict[str, Tensor]) -> nn.Module:
    """The trunk with the statistics of replica 0."""
    for name, buffer in trunk.named_buffers():
        if name in statistics:
            buffer.copy_(statistics[name][0])
    return trunk


def _head(views: dict[str, Tensor], heads: Sequence[int]) -> nn.Module:
    if not heads:
        return nn.Identity()
    weight, bias = (torch.cat([views[head_names(k)[key]][0] for k in heads]) for key in ("weight", "bias"))
    head = blank(nn.Linear, weight.shape[1], weight.shape[0]).to(weight)
    head.weight.copy_(weight)
    head.bias.copy_(bias)
    return head
