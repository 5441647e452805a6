"""Progressive networks (Rusu et al., 2016): each task has a column of its own, which reads from all earlier columns.

    h_i^k = f(W_i^k h_{i-1}^k + b_i^k + U_i^k (alpha_i^k * relu(V_i^k [h_{i-1}^j]_{j<k} + c_i^k))),   L_k = mean NLL

A column is a copy of the learner's network with weights of its own. Laterals from every earlier column lead into each
of its layers except the first (see nn/columns.py). It has an output layer of its own, also if tasks share a head.
Earlier columns do not change, so that nothing is forgotten. The price is growth: after T tasks there are T columns,
laterals between all pairs of them, and a step computes all columns.

Rusu et al. have one alpha per earlier column, which multiplies what V reads; here there is one per output of V, as in
Progress & Compress. Either only multiplies weights that are trained as well.

Predictions need the task, also if all tasks share a head; without one, the last column is used. A class that a shared
head did not have when a column learned has probability 0 there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from evcl._core.errors import EvclError
from evcl._core.randomness import Purpose
from evcl._core.settings import TRAINING, Settings
from evcl.methods.memory import per_task
from evcl.methods.method import Fit, Learned, Learning, Method, Round
from evcl.nn import Gaussian, head_names
from evcl.nn.columns import Columns

UNSEEN_LOGIT = -1e4  # logit of a class that a column has never seen: its probability is 0
FILM = replace(
    TRAINING["film"],
    refuses={"true": "its columns are weights of each task's own already, which FiLM's scales and shifts would repeat"},
)


@dataclass(frozen=True)
class Memory:
    """The output layers of all tasks. The network's own heads are those of the last task that used them."""

    outputs: dict[int, Tensor] = per_task()  # task -> [R, classes, features + 1]: weights and bias
    heads: dict[int, Tensor] = per_task()  # task -> [R, 1]: the number of its head


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    if len(round_.tasks) > 1:
        raise EvclError("progressive has one column per task: learn the tasks one after another, not jointly")
    (task,) = round_.tasks
    names = head_names(task.head)
    start = round_.posterior.mean
    if task.head in round_.seen:  # a column has an output layer of its own
        start = with_head(round_, start, names)
    fitted = yield Fit([task], start=Gaussian(start, None), fresh=True)
    layout, q = round_.network.layout, fitted.q.mean
    outputs = torch.cat([layout.view(q, names["weight"]), layout.view(q, names["bias"]).unsqueeze(2)], 2)
    number = torch.full_like(q[:, :1], task.head)
    return Learned(fitted.q, Memory({**memory.outputs, task.task: outputs}, {**memory.heads, task.task: number}))


def with_head(round_: Round, mean: Tensor, names: dict[str, str]) -> Tensor:
    """All weights, with new initial values for those of this head."""
    layout, weights = round_.network.layout, mean.clone()
    drawn = round_.network.redrawn(mean, round_.generators(Purpose.OUTPUT_LAYER))
    for name in names.values():
        layout.view(weights, name).copy_(layout.view(drawn, name))
    return weights


def predictor(memory: Memory, posterior: Gaussian, task: int | None) -> Gaussian:
    layout, number = posterior.layout, max(memory.outputs) if task is None else task
    assert layout is not None
    mean, own = posterior.mean.clone(), memory.outputs[number]
    names, known = head_names(int(memory.heads[number][0, 0])), own.shape[1]
    weight, bias = (layout.view(mean, names[key]) for key in ("weight", "bias"))
    weight[:, :known], weight[:, known:] = own[..., :-1], 0.0
    bias[:, :known], bias[:, known:] = own[..., -1], UNSEEN_LOGIT
    return Gaussian(mean, None)


def columns(network: nn.Module, rounds: int) -> Columns:
    return Columns(network, rounds)


PROGRESSIVE = Method(
    name="progressive",
    learn=learn,
    memory=Memory,
    settings={"film": FILM},
    predictor=predictor,
    trunk=columns,
    replays=True,
    needs_task=True,
    no_memory="the columns of earlier tasks never change, so there is nothing that kept rows could protect",
)
