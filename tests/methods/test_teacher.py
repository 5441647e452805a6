"""The elastic term on functions: what is taught, how much of the past it holds, and what the weights are left with."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import small_runs
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from small_runs import F64, HIDDEN, INPUTS, fisher_by_definition, logits, named, plain

import evcl
from evcl.methods import Fitted, TaskData
from evcl.methods.label_noise import RIDGE, label_noise, tempering
from evcl.methods.method import more_rows
from evcl.methods.teacher import UNTAUGHT, USUAL, agreement, protection, unlearned
from evcl.methods.vcl import kl
from evcl.nn import Gaussian, he_std, outputs


def run_of(method="evcl", classes=(3, 3), **given):
    run = small_runs.run_of(method, heads=classes, usual={"epochs": 3, "batch_size": 8}, **given)
    return run, run.settings


def rows(head, n=40, seed=0, classes=3, inputs=INPUTS):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(1, n, inputs, generator=source, dtype=F64)
    return TaskData(x, (x[..., 0] > 0).long() + (x[..., 1] > 0).long() * (classes > 2), head)


def round_of(run, task, seen):
    return small_runs.round_of(run, [task], 1, seen)


def counted(**of):
    return {int(k.removeprefix("h")): torch.tensor([[float(n)]], dtype=F64) for k, n in of.items()}


def test_agreement_by_hand():
    run, _ = run_of()
    task = rows(0)
    z = outputs(run.network, run.network.posterior.mean, run.network.layout, task.x, [0])[0]
    nll = F.cross_entropy(z, task.y[0])
    entropy = torch.special.entr(z.softmax(1)).sum(1).mean()
    knows, surprised = agreement(task, round_of(run, task, [0]))
    assert float(knows) == pytest.approx(max(0.0, 1 - float(nll) / math.log(3)))
    assert float(surprised) == pytest.approx(min(1.0, max(0.0, float(nll - entropy) / math.log(3))))


def test_heads_that_the_task_does_not_use_are_taught_by_their_rows():
    run, s = run_of(classes=(3, 2, 2))
    past = protection(counted(h0=80, h1=4000), round_of(run, rows(2, 40, classes=2), [0, 1]), s)
    (lesson,) = past.losses
    assert list(lesson.heads) == [0, 1]
    assert [float(w) for w in lesson.strength] == pytest.approx(
        [2.0 * USUAL, 10.0 * USUAL]
    )  # 80 rows for 40; 100 times as many count for 10
    assert (past.prior, past.elastic) == (1.0, 1.0)


def test_where_new_rows_contradict_the_old_weights_hold_on_and_nothing_is_taught():
    run, s = run_of(epochs=60)
    task = rows(0, 200)
    run.learn([task])
    turned = replace(task, y=2 - task.y)
    past = protection(run.memory.rows, round_of(run, turned, [0]), s)
    knows, surprised = agreement(turned, round_of(run, turned, [0]))
    assert float(surprised) > 0.9
    assert float(past.elastic) == pytest.approx(UNTAUGHT * float(surprised))
    assert float(past.prior) == pytest.approx(float(surprised))
    assert float(past.losses[0].strength[0]) == float(knows) < 0.1


def test_where_new_rows_agree_with_the_old_the_teacher_holds_and_the_elastic_term_lets_go():
    run, s = run_of(epochs=60)
    run.learn([rows(0, 200)])
    again = rows(0, 200, seed=1)
    past = protection(run.memory.rows, round_of(run, again, [0]), s)
    knows, surprised = agreement(again, round_of(run, again, [0]))
    assert float(knows) > 0.5
    assert float(past.elastic) == pytest.approx(UNTAUGHT * float(surprised))
    assert float(surprised) < 0.2
    assert float(past.prior) == pytest.approx(float(knows))
    (lesson,) = past.losses
    assert (list(lesson.heads), float(lesson.strength[0])) == ([0], float(knows))
    # as many rows as it had count, and no more
    twice = protection({0: run.memory.rows[0] / 4}, round_of(run, again, [0]), s)
    assert float(twice.losses[0].strength[0]) == pytest.approx(float(knows) / 4)


def test_what_other_heads_have_learned_is_held_in_any_case():
    run, s = run_of(epochs=60)
    run.learn([rows(0, 200)])
    again = rows(0, 200, seed=1)
    alone, both = (
        protection(past, round_of(run, again, seen), s)
        for past, seen in ((counted(h0=100), [0]), (counted(h0=100, h1=300), [0, 1]))
    )
    assert 1 - float(both.prior) == pytest.approx((1 - float(alone.prior)) / 4)
    assert 1 - float(both.elastic) == pytest.approx((1 - float(alone.elastic)) / 4)


def first_std(run):
    """The first prior's: the trunk's layer has other inputs than the heads."""
    found = torch.full_like(run.network.posterior.mean, he_std(HIDDEN))
    for name in run.network.trunk_names:
        found[:, run.network.layout.spans[name]] = he_std(INPUTS)
    return found


@pytest.mark.parametrize("given", [{}, {"prior_std": 0.3}])
def test_a_posterior_that_lets_go_is_nearer_to_the_first_prior(given):
    """Precisions are mixed, and the means stay."""
    run, s = run_of(epochs=5, tempering=0.01, **given)
    run.learn([rows(0)])
    task, prior = rows(0, seed=1), run.memory.prior
    past = protection(run.memory.rows, round_of(run, task, [0]), s)
    term = kl(prior, s.tempering, run.memory.beta, past, round_of(run, task, [0]), s)
    share = float(past.prior)
    assert 0 < share < 1
    first = first_std(run) if not given else torch.full_like(prior.mean, 0.3)
    wanted = share * prior.log_std.mul(-2).exp() + (1 - share) * first**-2
    torch.testing.assert_close(term.prior.log_std.mul(-2).exp(), wanted)
    assert torch.equal(term.prior.mean, prior.mean)
    assert term.weight == s.tempering / 40


def test_without_distillation_nothing_is_asked_and_everything_held():
    run, s = run_of(distill=0.0, tempering=0.01)
    run.learn([rows(0)])
    past = protection(run.memory.rows, round_of(run, rows(0), [0]), s)
    assert past == ((), 1.0, 1.0)
    prior = run.memory.prior
    term = kl(prior, s.tempering, run.memory.beta, past, round_of(run, rows(0), [0]), s)
    assert torch.equal(term.prior.log_std, prior.log_std)
    assert torch.equal(term.prior.mean, prior.mean)
    assert term.weight == s.tempering / 40


@pytest.mark.parametrize("inputs", [INPUTS, 5000])
def test_label_noise_is_how_badly_a_row_is_predicted_from_the_others(inputs):
    """The closed form, against ridge regressions that leave out a row each; many inputs are taken in pieces."""
    run, _ = run_of(network=torch.nn.Flatten(), features=inputs)
    task, n = rows(0, 30, inputs=inputs), 30
    x, labels = task.x[0] - task.x[0].mean(0), F.one_hot(task.y[0], 3).to(F64)
    scale, wrong = x.square().sum(1).mean(), 0
    kernel = x @ x.T + scale  # of a bias
    for i in range(n):
        rest = torch.arange(n) != i
        own = kernel[rest][:, rest] + RIDGE * scale * torch.eye(n - 1, dtype=F64)
        wrong += int((kernel[i, rest] @ torch.linalg.solve(own, labels[rest])).argmax() != task.y[0, i])
    by_chance = 1 - float(labels.mean(0).max())
    assert 0 < wrong < n
    assert float(label_noise(task, round_of(run, task, []))) == pytest.approx(min(1.0, wrong / n / by_chance))


def test_label_noise_bears_numbers_that_overflow():
    run, _ = run_of()
    task = rows(0, 100)
    broken = torch.where(torch.arange(100).view(1, -1, 1) == 7, torch.inf, task.x)
    for x in (broken, torch.zeros_like(broken)):
        assert 0 <= float(label_noise(replace(task, x=x), round_of(run, task, []))) <= 1


def test_clear_labels_have_no_noise_and_drawn_ones_have():
    run, _ = run_of(classes=(2,))
    task = rows(0, 400, classes=2)
    drawn = replace(task, y=torch.randint(2, task.y.shape, generator=torch.Generator().manual_seed(1)))
    same = replace(task, y=torch.zeros_like(task.y))
    clear, noisy, none = (float(label_noise(one, round_of(run, one, []))) for one in (task, drawn, same))
    assert clear < 0.1
    assert noisy > 0.8
    assert none == 0


def test_tempering_follows_the_rows_and_the_noise_of_their_labels():
    """Clear labels are fitted closely, noisy ones are not learned by heart."""
    run, s = run_of(classes=(2,))
    assert tempering(run_of(tempering=0.4)[1], round_of(run, rows(0), [])) == 0.4
    for n in (100, 1000):
        task = rows(0, n, classes=2)
        wrong = torch.rand(task.y.shape, generator=torch.Generator().manual_seed(1)) < 0.15
        task = replace(task, y=torch.where(wrong, 1 - task.y, task.y))
        round_ = round_of(run, task, [])
        wanted = 0.2 * float(label_noise(task, round_)) ** 2 * math.sqrt(n / 10_000)
        assert 0.001 < wanted < 0.03
        assert float(tempering(s, round_)) == pytest.approx(wanted)


def test_the_past_counts_once_whatever_its_tempering():
    """What rows added to the first prior's precision was in units of the last beta, and counts in those of the next."""
    run, s = run_of(distill=0.0)
    run.learn([rows(0)])
    prior, task = run.memory.prior, rows(0, n=40)
    past = protection(run.memory.rows, round_of(run, task, [0]), s)
    before = float(run.memory.beta[0])
    term = kl(prior, 3 * before, run.memory.beta, past, round_of(run, task, [0]), s)
    first = first_std(run)
    added = prior.log_std.mul(-2).exp() - first**-2
    wanted = first**-2 + added.clamp_min(0) / 3
    for name in ("head 1.weight", "head 1.bias"):  # which is not trained now
        span = run.network.layout.spans[name]
        wanted[:, span] = prior.log_std[:, span].mul(-2).exp()
    torch.testing.assert_close(term.prior.log_std.mul(-2).exp(), wanted)


def test_agreement_does_not_depend_on_the_order_of_rows():
    """A file sorted by its labels: its first 1,000 rows are of one class."""
    run, _ = run_of(classes=(2,), epochs=20)
    task = rows(0, n=2000, classes=2)
    run.learn([task])
    order = (1 - task.y[0]).argsort(stable=True)
    turned = TaskData(task.x, torch.where(task.x[..., 1] > 0, task.y, 1 - task.y), 0)
    both = [agreement(one, round_of(run, one, [0])) for one in (turned, turned.select(order.unsqueeze(0)))]
    for one, other in zip(*both, strict=True):
        assert float(one) == pytest.approx(float(other), abs=0.1)


def test_rows_are_counted_by_head():
    run, _ = run_of()
    first = more_rows({}, round_of(run, rows(0, 30), []))
    second = more_rows(first, round_of(run, rows(0, 12), [0]))
    assert (first[0].tolist(), second[0].tolist()) == ([[30.0]], [[42.0]])


def digits():
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(x))
    return (x[order] / 16).astype("float32"), y[order]


def test_files_of_one_distribution_do_not_freeze_the_network():
    """26 files of 50 rows: EVCL ended at chance once, where naive training had 94."""
    x, y = digits()
    found = {}
    for method in ("evcl", "naive"):
        learner = evcl.Learner(evcl.nn.mlp(64, [100]), method, epochs=5)
        for k in range(26):
            learner.learn((x[50 * k : 50 * k + 50], y[50 * k : 50 * k + 50]), task=str(k), head="0" if k else "new")
        found[method] = float((learner.predict(x[1300:]) == y[1300:]).mean())
    assert found["evcl"] > found["naive"] - 0.01 > 0.85


def test_epistemic_uncertainty_falls_with_every_row_learned():
    source = np.random.default_rng(0)
    x = source.normal(size=(4000, 8)).astype("float32")
    y = (x[:, 0] * x[:, 1] + x[:, 2] > 0).astype(int)
    found = []
    for n in (20, 100, 1000):
        learner = evcl.EVCL(evcl.nn.mlp(8, [50]), epochs=20)
        learner.learn((x[:n], y[:n]))
        found.append(float(learner.predictions(x[3000:]).epistemic.mean()))
    assert found == sorted(found, reverse=True)
    assert found[0] > 2 * found[-1] > 0


def test_of_the_precision_that_a_fit_added_only_the_part_of_the_labels_stays():
    run, s = run_of(classes=(3, 2))
    task, layout = rows(1, n=15, classes=2), run.network.layout
    round_ = round_of(run, task, [0])
    past = protection(counted(h0=45), round_, s)
    prior = Gaussian(run.network.posterior.mean, torch.full_like(run.network.posterior.mean, -2.0), layout)
    log_std = torch.full_like(prior.mean, -3.0)
    log_std[:, :3] = -1.0  # where a fit has made a variance larger, there is nothing to take back
    q = Gaussian(prior.mean, log_std, layout)
    fitted = Fitted(run.network, q, q, layout, torch.ones_like(prior.mean[0]))
    found = unlearned(fitted, prior, past, round_).q.log_std

    network = plain(run)
    weights, wanted = dict(network.named_parameters()), {}
    labels, taught = (
        fisher_by_definition(weights, lambda x, k=k, t=t: logits(network, x, k) / t, task.x[0])
        for k, t in ((1, 1), (0, 2))
    )
    for name, own in labels.items():
        r = torch.where(taught[name] > 0, own / (own + s.distill * 3 * 4 * taught[name]), 1.0)  # n_0 / n, T^2
        wanted[name] = -0.5 * (math.exp(4) + r * (math.exp(6) - math.exp(4))).log()
    kept = named(run, log_std)
    wanted = {name: torch.where(kept[name] == -1, -1.0, value) for name, value in wanted.items()}
    small_runs.assert_weights(run, found, wanted, rtol=1e-9)
    names = layout.spans
    assert (found[:, names["head 0.weight"]] == -2).all()  # no label of this task says anything about another head
    assert (found[:, names["head 1.weight"]] == -3).all()  # and no teacher about its own


def test_without_a_teacher_nothing_is_taken_back():
    run, s = run_of(distill=0.0)
    task = rows(1)
    round_ = round_of(run, task, [0])
    q = run.network.posterior
    fitted = Fitted(run.network, q, q, run.network.layout, torch.ones_like(q.mean[0]))
    assert unlearned(fitted, q, protection(counted(h0=40), round_, s), round_) is fitted


@pytest.mark.parametrize("seed", [0, 1])
def test_other_tasks_do_not_make_an_old_one_look_certain(seed):
    """Four tasks with heads of their own say nothing new about the first one."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    learner = evcl.EVCL(evcl.nn.mlp(64, [50]), seed=seed)
    first = x[(y < 2)][100:]
    for k in range(0, 10, 2):
        mine = (y >= k) & (y < k + 2)
        learner.learn(x[mine][:100], y[mine][:100], task=str(k), epochs=20)
        if k == 0:
            before = learner.predictions(first, task="0").epistemic.mean()
    after = learner.predictions(first, task="0").epistemic.mean()
    assert after > before / 5, (before, after)  # with the variances that distillation leaves, it falls to a fiftieth
