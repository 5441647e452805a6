"""Context-dependent gating (Masse, Grant and Freedman, 2018): each task uses its own random part of the hidden units.

    h_l = m_tl * f(W_l h_{l-1} + b_l),   m_tl in {0, 1}, 0 for a fraction `gated` of the units, drawn once per task
    L_t = mean NLL + lambda/2 sum_i F_i (theta_i - theta*_i)^2,   F <- F + F_t   (with `importance` none: mean NLL)

A gate closes what the next layer reads: it sets columns of that layer's weights to 0. That is the same as setting the
unit's output to 0, whatever activation or norm comes before it. The weights into and out of a closed unit have no
gradient and do not move. Gates are on the inputs of linear layers and convolutions that depend on trained weights:
hidden units, the channels of a convolution, the features that a head reads. Weights of other layers, such as norms,
and the network's own inputs have no gates.

Predictions need the task, also if all tasks share a head; without one, the gates of the last task are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose
from evcl._core.settings import ELASTIC, Setting, Settings
from evcl.curvature.fisher import layers_in_use
from evcl.methods.elastic_memory import Memory as ElasticMemory
from evcl.methods.elastic_memory import elastic
from evcl.methods.measures import IMPORTANCE, trackers
from evcl.methods.memory import per_task
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.nn import Gaussian, Layout, Linear, head_names
from evcl.nn.layers import Conv


@dataclass(frozen=True)
class Memory:
    base: ElasticMemory
    gates: dict[int, Tensor] = per_task(inputs=True)  # task -> [R, inputs of all layers], 1 or 0


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    before, layout = round_.posterior.mean, round_.network.layout
    gates = drawn(round_, s.gated)
    mask = spread(gates, layout, before)
    protects = s.importance != "none"
    terms = [elastic(memory.base, s, round_.n)] if protects else []
    start = Gaussian(before * mask, None)
    fitted = yield Fit(round_.tasks, terms=terms, start=start, moves=mask > 0, trackers=trackers(s))
    learned = Gaussian(torch.where(mask > 0, fitted.q.mean, before), None)
    base = memory.base
    if protects:
        importance = mask * IMPORTANCE[s.importance].measure(fitted, round_, s)
        base = base.after(replace(fitted, q=learned), round_, importance, s.fisher_decay)
    return Learned(learned, Memory(base, {**memory.gates, **{task.task: gates for task in round_.tasks}}))


def drawn(round_: Round, gated: Tensor | float) -> Tensor:
    """[R, inputs of all layers]: the gates of this round's tasks."""
    hidden, sources = read_by_gates(round_), round_.generators(Purpose.GATES)
    parts, device = [], round_.posterior.mean.device
    for name, width in widths(round_.network.layout):
        part = torch.ones(len(sources), width, device=device)
        if name in hidden:
            places = [torch.rand(width, generator=g).argsort().argsort() for g in sources]
            part = (torch.stack(places).to(device) < (1 - gated) * width).to(part)  # at least one is open
        parts.append(part)
    return torch.cat(parts, 1).to(torch.uint8)


def read_by_gates(round_: Round) -> set[str]:
    """The names of weights whose inputs have gates, found by running the network on one example."""
    network, task = round_.network, round_.tasks[0]
    x = task.x[:, :1].expand(len(round_.seeds), *[-1] * (task.x.dim() - 1))
    used = layers_in_use(network, round_.posterior.mean, network.layout, x, [task.head])
    gated = {la.names["weight"] for la, learned in used.items() if learned and type(la) in (Linear, Conv)}
    other = {name for la in used if type(la) not in (Linear, Conv) for name in la.names.values()}
    if not gated - other:
        raise EvclError("xdg closes hidden units, but this network trains none: use another method")
    return {HEADS if name == head_names(task.head)["weight"] else name for name in gated - other}


HEADS = "heads"  # stands for the weights of every head: all heads read the same features


def widths(layout: Layout) -> Iterator[tuple[str, int]]:
    """The number of inputs of each weight of the trunk that has inputs, then that of the heads."""
    heads = _heads(layout)
    if not heads:
        raise EvclError("xdg closes units below the heads, but this network has no heads: use evcl, vcl or ewc")
    for name, shape in layout.shapes.items():
        if len(shape) > 1 and name not in heads:
            yield name, shape[1]
    yield HEADS, layout.shapes[heads[0]][1]


def _heads(layout: Layout) -> list[str]:
    names = (head_names(k)["weight"] for k in count())
    heads = []
    while (name := next(names)) in layout.shapes:
        heads.append(name)
    return heads


def spread(gates: Tensor, layout: Layout, like: Tensor) -> Tensor:
    """[R, P]: 0 for the weights that read from a closed unit, otherwise 1."""
    mask, sizes = torch.ones_like(like), list(widths(layout))
    for (name, _), part in zip(sizes, gates.to(like).split([width for _, width in sizes], 1), strict=True):
        for one in _heads(layout) if name == HEADS else [name]:
            view = layout.view(mask, one)
            view.mul_(part.view(len(part), 1, -1, *[1] * (view.dim() - 3)))
    return mask


def predictor(memory: Memory, posterior: Gaussian, task: int | None) -> Gaussian:
    gates, layout = memory.gates[max(memory.gates) if task is None else task], posterior.layout
    assert layout is not None
    return Gaussian(posterior.mean * spread(gates, layout, posterior.mean), None)


XDG = Method(
    name="xdg",
    learn=learn,
    memory=Memory,
    settings={
        **ELASTIC,
        # 0.5 and 0.65 were the best of 0.2, 0.5, 0.65 and 0.8 on validation data of permuted-digits; split-digits has
        # no preference
        "gated": Setting(0.5, "fraction of the hidden units that each task sets to 0, drawn at random", high=0.99),
        "importance": Setting(
            "fisher",
            "what protects the weights that several tasks use: the elastic term with this measure of importance, or "
            "nothing (none)",
            choices=("none", *IMPORTANCE),
            refuses={"kfac": "a matrix couples weights of units that a task closes with others; use fisher, si or mas"},
        ),
    },
    predictor=predictor,
    needs_task=True,
    no_memory="kept rows of earlier tasks would need the units that this task closes",
    apart=True,
)
