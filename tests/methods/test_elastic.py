"""EWC, online and offline, SI and MAS: by plain torch, step by step; and what any elastic term takes for importance."""

from __future__ import annotations

import pytest
import small_runs
import torch
import torch.nn.functional as F
from small_runs import (
    EXAMPLES,
    F64,
    PLAIN,
    PLAIN_FISHER,
    TASKS,
    assert_springs,
    assert_weights,
    copies,
    learned,
    logits,
    plain,
    run_of,
)

from evcl._core.randomness import generator
from evcl._core.settings import ELASTIC
from evcl.methods import Elastic, TaskData
from evcl.methods.ewc_offline import Anchors
from evcl.methods.importance import drawn_points
from evcl.methods.measures import IMPORTANCE, XI
from evcl.methods.terms import Spring
from evcl.nn import Gaussian, Layout

HALF = {"ewc": 0.5, "ewc-offline": 0.5, "si": 1.0, "mas": 1.0}  # of the squared distance


def sensitivities(used, outputs, x):
    """The sum over the rows of x of |d ||f(x)||^2 / d w|, by name: no labels are needed."""
    total = {name: torch.zeros_like(w) for name, w in used.items()}
    for row in x:
        grads = torch.autograd.grad(outputs(row).square().sum(), list(used.values()))
        for name, grad in zip(used, grads, strict=True):
            total[name] += grad.abs()
    return total


def path_integrals(used, start, path, xi, n):
    moved = {name: (w.detach() - start[name]).square() for name, w in used.items()}
    every = torch.cat([m.flatten() for m in moved.values()])
    damping = XI * every[every > 0].mean() if xi == "auto" else xi
    return {name: n * path[name] / (moved[name] + damping) for name in used}


def by_hand(method, strength, xi=None):
    """The weights after the tasks, and the anchors with their importance: of every task, or of all tasks together."""
    network, kept = plain(small_runs.run_of(method)), []
    weights = dict(network.named_parameters())
    for one in TASKS:
        used = small_runs.used_by(network, one.head)
        start, path = copies(used), {name: torch.zeros_like(w) for name, w in used.items()}
        adam = torch.optim.Adam(used.values(), lr=PLAIN["lr"])
        for _ in range(PLAIN["epochs"]):
            loss = F.cross_entropy(logits(network, one.x[0], one.head), one.y[0])
            g = dict(zip(used, torch.autograd.grad(loss, list(used.values())), strict=True))
            before = copies(used)
            for name, w in used.items():
                pulls = (f[name] / one.n * (before[name] - anchor[name]) for anchor, f in kept)
                w.grad = g[name] + 2 * HALF[method] * strength * sum(pulls)
            adam.step()
            for name, w in used.items():
                path[name] -= g[name] * (w.detach() - before[name])  # the penalty is not in g
        found = {
            "si": lambda: path_integrals(used, start, path, xi, one.n),  # noqa: B023
            "mas": lambda: sensitivities(used, lambda x: logits(network, x, one.head), one.x[0]),  # noqa: B023
        }.get(method, lambda: small_runs.fisher_by_definition(used, lambda x: logits(network, x, one.head), one.x[0]))()  # noqa: B023
        whole = {name: found.get(name, torch.zeros_like(w)) for name, w in weights.items()}
        if method != "ewc-offline" and kept:
            whole = {name: (kept[-1][1][name] + more).clamp_min(0) for name, more in whole.items()}
        one_more = copies(weights), {name: f.clamp_min(0) for name, f in whole.items()}
        kept = [*kept, one_more] if method == "ewc-offline" else [one_more]
    return weights, kept


@pytest.mark.parametrize(
    ("method", "strength", "given"),
    [
        ("ewc", 2.0, PLAIN_FISHER),
        ("ewc-offline", 2.0, PLAIN_FISHER),
        ("si", 0.7, {"xi": 0.05}),
        ("si", 0.7, {"xi": "auto"}),
        ("mas", 0.2, {}),
    ],
)
def test_it_is_what_plain_torch_makes_of_its_equations(method, strength, given):
    weights, kept = by_hand(method, strength, given.get("xi"))
    run = learned(method, TASKS, strength=strength, **given)
    assert_weights(run, run.network.posterior.mean, weights)
    offline = method == "ewc-offline"
    importance = run.memory.importance if offline else [run.memory.importance]
    for found, (_, wanted) in zip(importance, kept, strict=True):
        assert_weights(run, found, wanted)
    for found, (wanted, _) in zip(run.memory.anchors, kept, strict=True) if offline else ():
        assert_weights(run, found, wanted)
    assert float((importance[0] > 0).double().mean()) > 0.3


def test_the_anchors_are_one_spring_and_their_penalties_sum(generator):
    pairs = [
        (torch.rand(2, 9, generator=generator, dtype=F64), torch.randn(2, 9, generator=generator, dtype=F64))
        for _ in range(4)
    ]
    pairs[2][0][:, 3:] = 0  # a weight that a task did not use
    for w, _ in pairs:
        w[:, 8] = 0  # and one that none has used
    each = [Elastic(Gaussian(c, None), w) for w, c in pairs]
    whole = Anchors.of([Spring(w, c) for w, c in pairs])
    q = Gaussian(torch.randn(2, 9, generator=generator, dtype=F64), None)
    torch.testing.assert_close(whole.loss(q), sum(one.loss(q) for one in each))
    assert_springs([whole], q)
    pull = whole.springs().mean
    assert not (pull.w * (q.mean - pull.c))[:, 8].any()


# --- measures of importance, all with the Fisher's sum ---------------------------------------------------------------


METHODS, OTHERS = ["ewc", "evcl", "ewc-offline"], ["si", "mas"]


def importance_of(method, importance="fisher", tasks=TASKS[:1], **given):
    """[R, P], after these tasks."""
    found = learned(method, tasks, importance=importance, **given).memory.importance
    return found if isinstance(found, torch.Tensor) else sum(found)


def test_the_setting_names_every_measure():
    assert ELASTIC["importance"].choices == (*IMPORTANCE, "kfac")


@pytest.mark.parametrize("importance", OTHERS)
@pytest.mark.parametrize("method", METHODS)
def test_it_is_another_division_of_the_fishers_sum(method, importance):
    """The first task trains without a penalty: all measures see the same weights."""
    ours, theirs = (importance_of(method, name, replicas=2) for name in (importance, "fisher"))
    torch.testing.assert_close(ours.sum(1), theirs.sum(1))
    assert not torch.allclose(ours, theirs, rtol=0.1)
    assert float(ours.min()) >= 0
    unused = run_of("naive").network.layout.view(ours[:1], "head 1.weight")
    assert not unused.any()


@pytest.mark.parametrize("importance", list(IMPORTANCE))
def test_a_strength_means_the_same_for_any_number_of_rows(importance):
    """Twice the rows, all of them twice: the penalty on the next task, of as many rows as before, counts twice."""
    one = TASKS[0]
    twice = TaskData(one.x.repeat(1, 2, 1), one.y.repeat(1, 2), 0, task=0)
    once, double = (importance_of("ewc", importance, [data], batch_size=data.n) for data in (one, twice))
    torch.testing.assert_close(double, 2 * once)


@pytest.mark.parametrize("method", ["ewc", "imm-mode", "mas"])
def test_it_is_that_of_examples_and_not_of_batches(method):
    """The weights being equal, the batch size of training does not enter; how many examples are measured does."""
    measured = "examples" if method == "mas" else "fisher_examples"
    given = {"lr": 1e-12, "epochs": 1}  # the weights stay as they are
    memories = [
        learned(method, TASKS[:1], batch_size=rows, **{measured: examples}, **given).memory
        for rows, examples in ((EXAMPLES, EXAMPLES), (7, EXAMPLES), (EXAMPLES, 10))
    ]
    found, other, few = (one.weight if method == "imm-mode" else one.importance for one in memories)
    torch.testing.assert_close(found, other, rtol=1e-6, atol=1e-14)
    assert not torch.allclose(found, few, rtol=1e-2)
    assert float(found.min()) >= 0
    assert float(found.max()) > 1e-4


@pytest.mark.parametrize("importance", OTHERS)
def test_it_is_that_of_the_method_of_this_name_up_to_a_factor(importance):
    """Without a spread, and without sigma."""
    one = importance_of("ewc", importance, fisher_spread=0.0)
    omega = learned(importance, TASKS[:1]).memory.importance
    torch.testing.assert_close(one / one.sum(), omega / omega.sum())


@pytest.mark.parametrize("importance", OTHERS)
def test_units_that_were_silent_are_protected_too(importance):
    """`fisher_spread` gives the weights out of a silent unit a part of their neighbours' importance."""
    found = {}
    for spread in (0.0, 0.2):
        run = run_of("ewc", importance=importance, fisher_spread=spread)
        run.network.layout.view(run.network.posterior.mean, "1.bias")[0, 2] = -100.0  # unit 2 is silent
        run.learn([TASKS[0]])
        found[spread] = run.network.layout.view(run.memory.importance, "head 0.weight")[0]
    assert not found[0.0][:, 2].any()
    assert (found[0.2][:, 2] > 0).all()


@pytest.mark.parametrize("importance", OTHERS)
def test_coresets_and_tasks_learned_jointly(importance):
    run = learned("evcl", TASKS, importance=importance, coreset="random", coreset_size=4)
    least, most = run.memory.inner.importance.aminmax()
    assert 0 <= float(least) < float(most)
    both = run_of("evcl", importance=importance), run_of("evcl")
    for one in both:
        one.learn(TASKS[:2])  # both heads in one round
    torch.testing.assert_close(*(one.memory.importance.sum(1) for one in both))


def test_posterior_draws_do_not_depend_on_padding():
    """On a GPU, the buffers of a fit are padded; the weights that are drawn must be those of a CPU."""
    plain = Layout({"weight": (2, 3), "bias": (2,)})
    padded = plain.part(["weight", "bias"], {"weight": (2, 4)}, align=16)
    q = Gaussian(torch.arange(8.0).unsqueeze(0), torch.zeros(1, 8))
    wide = q.map(lambda flat: plain.gather(flat, padded))
    ours, theirs = (drawn_points(*given, 2, [generator(0, "draw")]) for given in ((q, plain), (wide, padded)))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(padded.gather(b, plain), a)
        assert not torch.equal(a, q.mean)
