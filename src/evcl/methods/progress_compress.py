"""Progress & Compress (Schwarz et al., 2018): one network learns each task freely, and teaches it to another.

    progress:  the active column minimises the mean NLL of task t, without a penalty
    compress:  the knowledge base minimises
                   mean_b KL(p_active(.|x_b) || p(.|x_b)) + lambda/2 sum_i gamma F_i (theta_i - theta*_i)^2
    then       F <- gamma F + F_t, F_t scaled to a mean of 1;   theta* <- theta

The knowledge base is the learner's network, and alone predicts. The active column is drawn anew for each task. Each of
its layers except the first has a lateral from the knowledge base, which does not change meanwhile (see nn/columns.py):

    h_i = f(W_i h_{i-1} + b_i + U_i (alpha_i * relu(V_i h_{i-1}^KB + c_i)))

Both parts train for `epochs` epochs, so that the active column learns from each example as often as the network of any
other method does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from evcl._core.randomness import Purpose
from evcl._core.settings import ELASTIC, Settings
from evcl.methods.distillation import Distillation
from evcl.methods.elastic_memory import Memory as ElasticMemory
from evcl.methods.elastic_memory import elastic
from evcl.methods.measures import IMPORTANCE, trackers
from evcl.methods.memory import Model, model
from evcl.methods.method import Fit, Learned, Learning, Loss, Method, Round
from evcl.methods.progressive import FILM
from evcl.nn import Gaussian, outputs
from evcl.nn.columns import Columns, in_column


def active_column(network: nn.Module) -> Columns:
    """The knowledge base's column and the active one."""
    return Columns(network, 2, by_task=False)


@dataclass(frozen=True)
class Memory:
    base: ElasticMemory
    active: Model = model(active_column)


def learn(memory: Memory, round_: Round, s: Settings) -> Learning:
    progress = yield Fit(round_.tasks, model=begun(memory.active, round_), fresh=True, stage="progress")
    assert progress.model is not None
    compress = yield Fit(
        [replace(task, weights=torch.zeros_like(task.y, dtype=task.x.dtype)) for task in round_.tasks],
        losses=[taught(progress.model, round_)],
        terms=[elastic(memory.base, s, round_.n, s.fisher_decay)],
        trackers=trackers(s),
        rates={"stop_nll": 0.0},  # the labels have no weight
        fresh=round_.number == 0,
        stage="compress",
    )
    importance = IMPORTANCE[s.importance].measure(compress, round_, s)
    base = memory.base.after(compress, round_, importance, s.fisher_decay)
    return Learned(compress.q, Memory(base, progress.model))


def begun(active: Model, round_: Round) -> Model:
    """The active column with new weights, beside the knowledge base as it is."""
    network, base = active.network, round_.network
    mean = network.redrawn(active.posterior.mean, round_.generators(Purpose.ACTIVE_COLUMN))
    for name in base.trunk_names:
        network.layout.view(mean, in_column(0, name)).copy_(base.layout.view(round_.posterior.mean, name))
    statistics = dict(active.statistics)
    for name, measured in base.statistics().items():
        statistics[in_column(0, name)] = measured
        first = torch.ones_like if name.endswith("running_var") else torch.zeros_like
        statistics[in_column(1, name)] = first(measured)
    return replace(active, posterior=Gaussian(mean, None), statistics=statistics)


def taught(active: Model, round_: Round) -> Loss:
    """The loss that teaches the active column's predictions for the round's examples."""
    network, heads = active.network, list(dict.fromkeys(task.head for task in round_.tasks))
    sizes = [network.classes(k) for k in heads]
    z = [outputs(network, active.posterior.mean, network.layout, task.x, heads) for task in round_.tasks]
    said = [part.log_softmax(2) for part in torch.cat(z, 1).split(sizes, 2)]
    return Distillation(said, temperature=1.0, strength=[1.0] * len(heads), heads=heads)


PROGRESS_COMPRESS = Method(
    name="progress-compress",
    only_classes="it distils class probabilities",
    learn=learn,
    memory=Memory,
    settings={
        **ELASTIC,
        "film": FILM,
        # of 0.001 to 1 on validation data: 0.01 to 0.05 were best on split-digits, 0.05 and 0.1 on permuted-digits
        "strength": replace(ELASTIC["strength"], default=0.05),
        "importance": replace(
            ELASTIC["importance"],
            choices=tuple(IMPORTANCE),
            refuses={"kfac": "its penalty is that of a diagonal Fisher; use fisher, si or mas"},
        ),
        "fisher_scale": replace(ELASTIC["fisher_scale"], default="task"),
        "fisher_decay": replace(ELASTIC["fisher_decay"], default=0.99),
    },
    no_memory="it learns a new task in a second network, which knows no earlier ones",
    stages=2,
    apart=True,
)
