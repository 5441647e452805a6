"""What the elastic term takes for importance: the Fisher, a path integral, a sensitivity; all with the Fisher's sum."""

from __future__ import annotations

import pytest
import torch
from small_runs import TASKS, run_of

import evcl
from evcl._core.randomness import generator
from evcl._core.settings import ELASTIC
from evcl.methods import TaskData
from evcl.methods.importance import IMPORTANCE, _drawn
from evcl.nn import Gaussian, Layout

METHODS, OTHERS = ["ewc", "evcl", "ewc-offline"], ["si", "mas"]


def importance_of(run):
    found = run.memory.importance
    return found if isinstance(found, torch.Tensor) else sum(found)


def learned(method, importance, tasks=TASKS[:1], **given):
    run = run_of(method, importance=importance, **given)
    for one in tasks:
        run.learn([one])
    return run


def test_the_setting_names_every_measure():
    assert ELASTIC["importance"].choices == (*IMPORTANCE, "kfac")


@pytest.mark.parametrize("importance", OTHERS)
@pytest.mark.parametrize("method", METHODS)
def test_it_is_another_division_of_the_fishers_sum(method, importance):
    """The first task trains without a penalty: all measures see the same weights."""
    fisher, other = (learned(method, name, replicas=2) for name in ("fisher", importance))
    assert torch.equal(fisher.network.posterior.mean, other.network.posterior.mean)
    ours, theirs = importance_of(other), importance_of(fisher)
    torch.testing.assert_close(ours.sum(1), theirs.sum(1))
    assert not torch.allclose(ours, theirs, rtol=0.1)
    assert float(ours.min()) >= 0
    unused = run_of("naive").network.layout.view(ours[:1], "head 1.weight")
    assert not unused.any()


@pytest.mark.parametrize("importance", OTHERS)
@pytest.mark.parametrize("method", METHODS)
def test_it_changes_the_second_task_and_so_does_its_strength(method, importance):
    def end(name, strength):
        return learned(method, name, TASKS[:2], strength=strength).network.posterior.mean

    ends = [end("fisher", 3.0), end(importance, 3.0), end(importance, 30.0)]
    for a in range(3):
        for b in range(a):
            assert not torch.allclose(ends[a], ends[b], rtol=1e-3)


@pytest.mark.parametrize("importance", list(IMPORTANCE))
def test_a_strength_means_the_same_for_any_number_of_rows(importance):
    """Twice the rows, all of them twice: the penalty on the next task, of as many rows as before, counts twice."""
    one = TASKS[0]
    twice = TaskData(one.x.repeat(1, 2, 1), one.y.repeat(1, 2), 0, task=0)
    once, double = (
        importance_of(learned("ewc", importance, [data], batch_size=data.y.shape[1])) for data in (one, twice)
    )
    torch.testing.assert_close(double, 2 * once)


def test_a_strength_means_the_same_for_any_learning_rate():
    """By itself a path integral changes with the rate, relative to the Fisher; as the importance of EWC it does not."""
    own = []
    for lr in (0.002, 0.05):
        fisher, si = (importance_of(learned("ewc", name, lr=lr, epochs=20)) for name in ("fisher", "si"))
        torch.testing.assert_close(si.sum(1), fisher.sum(1))
        alone = run_of("si", lr=lr, epochs=20)
        alone.learn(TASKS[:1])
        own.append(float(alone.memory.importance.sum() / fisher.sum()))
    assert max(own) > 1.5 * min(own)


def test_the_path_integral_is_that_of_the_si_method():
    """Without a spread, the path of the means; without sigma, that of `si` to a factor."""
    one = importance_of(learned("ewc", "si", fisher_spread=0.0))
    si = run_of("si")
    si.learn([TASKS[0]])
    omega = si.memory.importance
    torch.testing.assert_close(one / one.sum(), omega / omega.sum())


def test_the_sensitivity_is_that_of_the_mas_method():
    one = importance_of(learned("ewc", "mas", fisher_spread=0.0))
    mas = run_of("mas")
    mas.learn([TASKS[0]])
    omega = mas.memory.importance
    torch.testing.assert_close(one / one.sum(), omega / omega.sum())


@pytest.mark.parametrize("importance", OTHERS)
def test_units_that_were_silent_are_protected_too(importance):
    """`fisher_spread` gives the weights out of a silent unit a part of their neighbours' importance."""
    found = {}
    for spread in (0.0, 0.2):
        run = run_of("ewc", importance=importance, fisher_spread=spread)
        run.network.layout.view(run.network.posterior.mean, "1.bias")[0, 2] = -100.0  # unit 2 is silent
        run.learn([TASKS[0]])
        found[spread] = run.network.layout.view(importance_of(run), "head 0.weight")[0]
    assert not found[0.0][:, 2].any()
    assert (found[0.2][:, 2] > 0).all()


@pytest.mark.parametrize("importance", OTHERS)
def test_coresets_and_tasks_learned_jointly(importance):
    run = learned("evcl", importance, TASKS, coreset="random", coreset_size=4)
    kept = run.memory.inner.importance
    assert float(kept.min()) >= 0
    assert float(kept.max()) > 0
    both = run_of("evcl", importance=importance), run_of("evcl")
    for one in both:
        one.learn(TASKS[:2])  # both heads in one round
    torch.testing.assert_close(*(importance_of(one).sum(1) for one in both))


def test_an_unknown_measure_is_refused():
    with pytest.raises(evcl.EvclError, match="importance must be one of fisher, si, mas"):
        evcl.Learner(evcl.nn.mlp(3, [3]), "evcl", importance="no")


def test_posterior_draws_do_not_depend_on_padding():
    """On a GPU, the buffers of a fit are padded; the weights that are drawn must be those of a CPU."""
    plain = Layout({"weight": (2, 3), "bias": (2,)})
    padded = plain.part(["weight", "bias"], {"weight": (2, 4)}, align=16)
    q = Gaussian(torch.arange(8.0).unsqueeze(0), torch.zeros(1, 8))
    wide = q.map(lambda flat: plain.gather(flat, padded))
    ours, theirs = (_drawn(*given, 2, [generator(0, "draw")]) for given in ((q, plain), (wide, padded)))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(padded.gather(b, plain), a)
        assert not torch.equal(a, q.mean)
