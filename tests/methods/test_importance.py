"""What the elastic term takes for importance: the Fisher, a path integral, a sensitivity; all with the Fisher's sum."""

from __future__ import annotations

import pytest
import torch
from small_runs import EXAMPLES, TASKS, learned, run_of

from evcl._core.randomness import generator
from evcl._core.settings import ELASTIC
from evcl.methods import TaskData
from evcl.methods.importance import drawn_points
from evcl.methods.measures import IMPORTANCE
from evcl.nn import Gaussian, Layout

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
