"""A run in float64 with two heads, its tasks and fits, and the same network in plain torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl._core.randomness import generator
from evcl._core.settings import resolve
from evcl.methods import METHODS, Fit, Learned, Round, TaskData, autograd_gradients, collapse, known_settings
from evcl.training import Run

F64 = torch.float64
EXAMPLES, INPUTS, HIDDEN = 30, 5, 7
PLAIN = {"batch_size": EXAMPLES, "epochs": 4, "lr": 0.02, "lr_schedule": "constant"}
PLAIN_FISHER = {"fisher_temperature": 1.0, "fisher_spread": 0.0}


def task(number, head, examples=EXAMPLES, classes=2):
    """Random inputs and random labels: not to be learned at once, so that gradients stay large."""
    source = generator(7, "task", number)
    x = torch.randn(1, examples, INPUTS, generator=source, dtype=F64)
    return TaskData(x, torch.randint(classes, (1, examples), generator=source), head, task=number)


def by_sign(k, head=0, examples=EXAMPLES, inputs=INPUTS):
    """A task whose label is the sign of input k."""
    x = torch.randn(1, examples, inputs, generator=generator(0, "task", k), dtype=F64)
    return TaskData(x, (x[:, :, k % inputs] > 0).long(), head, task=k)


TASKS = [task(0, 0), task(1, 1, 20), task(2, 0)]  # of different sizes; the last comes back to the first one's head


def run_of(
    method, replicas=1, network=None, hidden=(HIDDEN,), features=None, heads=(2, 2), seeds=None, usual=PLAIN,
    options=None, **given,
):  # fmt: skip
    """A run of a method, or of the method of this name, of a perceptron or of a network with this many `features`.
    `heads`: their classes; `usual`: settings that a method may not have; `options`: of the run.
    """
    method = METHODS[method] if isinstance(method, str) else method
    known, seeds = known_settings(method, given), range(replicas) if seeds is None else seeds
    settings = resolve(method.name, known, {**{name: usual[name] for name in usual if name in known}, **given})
    trunk = evcl.nn.mlp(INPUTS, list(hidden)) if network is None else network
    run = Run(trunk, method, [settings] * len(seeds), seeds, **{"draw": True, "dtype": F64, **(options or {})})
    run.add_heads(features or hidden[-1], list(heads))
    return run


def learned(method, tasks, **given):
    """A run that has learned these tasks, one after the other."""
    run = run_of(method, **given)
    for one in tasks:
        run.learn([one])
    return run


def same(one, other):
    """Whether two runs, or the runs of two learners, have the same tensors, bit for bit."""
    a, b = (getattr(each, "state", None) for each in (one, other))
    a, b = (a.run if a else one).tensors(), (b.run if b else other).tensors()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def round_of(run, tasks, number=None, seen=None):
    """The run's next round, or the one of this number after tasks with these heads."""
    number, seen = run.rounds if number is None else number, run.seen if seen is None else seen
    return Round(number, tasks, run.network, run.network.posterior, seen, run.seeds, run.likelihood)


def first_fit(run, tasks, **options):
    """What the run's method asks for first in its next round."""
    return next(run.method.learn(run.memory, round_of(run, tasks, **options), run.settings))


def fitting(**options):
    """A method's `learn` that makes one fit with these options, and remembers nothing new."""

    def learn(memory, round_, s):
        fitted = yield Fit(round_.tasks, **options)
        return Learned(fitted.q, memory)

    return learn


class Handed:
    """Noise that is a function of the number of draws before it, so that a reference can draw the same."""

    def __init__(self, size=1.0):
        self.size, self.turn = size, 0

    def normal_(self, out, shared=False):
        self.turn += 1
        drawn = torch.randn(out.shape[1:], generator=generator(0, "handed", self.turn), dtype=F64)
        return out.copy_(self.size * drawn.expand_as(out))

    def of(self, rows):
        return self

    def shared(self):
        return self


# --- the same in plain torch -----------------------------------------------------------------------------------------


def plain(run, r=0):
    """The network of a replica, a perceptron, in plain torch: {"1", ..., "head 0", "head 1", ...}."""
    shapes = {name.removesuffix(".weight"): s for name, s in run.network.layout.shapes.items() if "weight" in name}
    network = nn.ModuleDict({name: skip_init(nn.Linear, i, o, dtype=F64) for name, (o, i) in shapes.items()})
    network.load_state_dict(named(run, run.network.posterior.mean, r))
    return network


def logits(network, x, head=0):
    for name, layer in network.items():
        if not name.startswith("head"):
            x = torch.relu(layer(x))
    return network[f"head {head}"](x)


def used_by(network, head):
    """The weights that a task with this head trains."""
    return {name: w for name, w in network.named_parameters() if not name.startswith("head") or f"head {head}." in name}


def adam(weights, loss, steps=PLAIN["epochs"]):
    """Steps of Adam on these weights, by name, in place."""
    optimiser = torch.optim.Adam(weights.values(), lr=PLAIN["lr"])
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()


def copies(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def fisher_by_definition(weights, outputs, x):
    """The sum over the rows of x, and the mean over the classes, of the squared gradient of log p, by name."""
    found = {name: torch.zeros_like(w) for name, w in weights.items()}
    for row in x:
        log_p = outputs(row).log_softmax(0)
        for one in log_p:
            grads = torch.autograd.grad(one, list(weights.values()), retain_graph=True, materialize_grads=True)
            for name, grad in zip(weights, grads, strict=True):
                found[name] += one.detach().exp() * grad.square()
    return found


def named(run, flat, r=0):
    """[R, P] of a run as the weights of a replica by name."""
    return {name: view[r].clone() for name, view in run.network.layout.views(flat).items()}


def assert_weights(run, flat, wanted, rtol=1e-7, atol=1e-9):
    """[R, P] of a run is what plain torch has found for the weights of replica 0, by name."""
    for name, found in named(run, flat).items():
        torch.testing.assert_close(found, wanted[name].detach(), rtol=rtol, atol=atol)


def assert_springs(terms, q, rtol=1e-9, atol=1e-12):
    """The terms collapse into springs, and the gradients of these are those of autograd."""
    pull, rest = collapse(terms)
    assert rest == []
    found = [torch.zeros_like(q.mean)]
    pull.add_mean_gradient(q.mean, found[0], torch.empty_like(q.mean))
    if q.log_std is not None:
        found.append(torch.zeros_like(q.mean))
        pull.add_log_std_gradient(q.variance(), found[1], *(torch.empty_like(q.mean) for _ in range(2)))
    wanted = [grad for grad in autograd_gradients(terms, q) if grad is not None]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
