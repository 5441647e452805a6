"""A run in float64 with two heads, its tasks, and the same network in plain torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl._core.randomness import generator
from evcl._core.settings import resolve
from evcl.methods import METHODS, TaskData
from evcl.training import Run

F64 = torch.float64
EXAMPLES, INPUTS, HIDDEN = 30, 5, 7
PLAIN = {"batch_size": EXAMPLES, "epochs": 4, "lr": 0.02, "lr_schedule": "constant"}


def task(number, head, examples=EXAMPLES):
    """Random inputs and random labels: not to be learned at once, so that gradients stay large."""
    source = generator(7, "task", number)
    x = torch.randn(1, examples, INPUTS, generator=source, dtype=F64)
    return TaskData(x, torch.randint(2, (1, examples), generator=source), head, task=number)


TASKS = [task(0, 0), task(1, 1, 20), task(2, 0)]  # of different sizes; the last comes back to the first one's head


def run_of(method, replicas=1, **given):
    settings = resolve(method, METHODS[method].known_settings, {**PLAIN, **given})
    run = Run(
        evcl.nn.mlp(INPUTS, [HIDDEN]), METHODS[method], [settings] * replicas, range(replicas), draw=True, dtype=F64
    )
    run.add_heads(HIDDEN, [2, 2])
    return run


def plain(run):
    """The network of replica 0 in plain torch: {"1", "head 0", "head 1"}."""
    sizes = {"1": (INPUTS, HIDDEN), "head 0": (HIDDEN, 2), "head 1": (HIDDEN, 2)}
    network = nn.ModuleDict({name: skip_init(nn.Linear, *size, dtype=F64) for name, size in sizes.items()})
    network.load_state_dict(named(run, run.network.posterior.mean))
    return network


def logits(network, x, head):
    return network[f"head {head}"](torch.relu(network["1"](x)))


def used_by(network, head):
    """The weights that a task with this head trains."""
    return {name: w for name, w in network.named_parameters() if name.startswith(("1", f"head {head}"))}


def named(run, flat):
    """[R, P] of a run as the weights of replica 0 by name."""
    return {name: view[0].clone() for name, view in run.network.layout.views(flat).items()}


def assert_weights(run, flat, wanted):
    """[R, P] of a run is what plain torch has found for the weights of replica 0, by name."""
    for name, found in named(run, flat).items():
        torch.testing.assert_close(found, wanted[name].detach(), rtol=1e-7, atol=1e-10)


def two_tasks(method, **given):
    """The weights after each of the first two tasks."""
    run, ends = run_of(method, **given), []
    for one in TASKS[:2]:
        run.learn([one])
        ends.append(run.network.posterior.mean.clone())
    return ends


def moved(method, **given):
    """How far the second task moves the weights."""
    first, last = two_tasks(method, **given)
    return float((last - first).norm())
