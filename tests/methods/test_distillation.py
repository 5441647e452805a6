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
from torch import nn

import evcl
from evcl.methods import Fitted, Round, TaskData
from evcl.methods.data import Minibatch
from evcl.methods.distillation import (
    EVCL_DISTILL,
    agreement,
    protection,
    unlearned,
)
from evcl.methods.kl import kl
from evcl.methods.label_noise import MIN_BETA, RIDGES, label_noise, tempering
from evcl.methods.method import more_rows
from evcl.nn import Gaussian, he_std, outputs
from evcl.targets import Energy, NextToken


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


def test_heads_that_the_task_does_not_use_are_taught_by_their_rows():
    run, s = run_of(classes=(3, 2, 2))
    past = protection(counted(h0=80, h1=4000), round_of(run, rows(2, 40, classes=2), [0, 1]), s)
    (lesson,) = past.losses
    assert list(lesson.heads) == [0, 1]
    assert [float(w) for w in lesson.strength] == pytest.approx([2.0 * EVCL_DISTILL, 1.0])  # 80 and 4,000 rows for 40
    assert (past.prior, past.elastic) == (1.0, 1.0)


def test_where_new_rows_contradict_the_old_weights_hold_on_and_nothing_is_taught():
    run, s = run_of(epochs=60)
    task = rows(0, 200)
    run.learn([task])
    turned = replace(task, y=2 - task.y)
    past = protection(run.memory.rows, round_of(run, turned, [0]), s)
    knows, surprised = agreement(turned, round_of(run, turned, [0]))
    assert float(surprised) > 0.9
    assert float(past.elastic) == pytest.approx(float(surprised))
    assert float(past.prior) == pytest.approx(float(surprised))
    assert float(past.losses[0].strength[0]) == pytest.approx(EVCL_DISTILL * float(knows))
    assert float(knows) < 0.1


def test_where_new_rows_agree_with_the_old_the_teacher_holds_and_the_elastic_term_lets_go():
    run, s = run_of(epochs=60)
    run.learn([rows(0, 200)])
    again = rows(0, 200, seed=1)
    past = protection(run.memory.rows, round_of(run, again, [0]), s)
    knows, surprised = agreement(again, round_of(run, again, [0]))
    assert float(knows) > 0.5
    assert float(past.elastic) == pytest.approx(float(surprised))
    assert float(surprised) < 0.2
    assert float(past.prior) == pytest.approx(float(knows))
    (lesson,) = past.losses
    assert (list(lesson.heads), float(lesson.strength[0])) == ([0], pytest.approx(EVCL_DISTILL * float(knows)))
    # as many rows as it had count, and no more
    twice = protection({0: run.memory.rows[0] / 4}, round_of(run, again, [0]), s)
    assert float(twice.losses[0].strength[0]) == pytest.approx(EVCL_DISTILL * float(knows) / 4)


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
    task, prior = rows(0, 200, seed=1), run.memory.prior
    past = protection(run.memory.rows, round_of(run, task, [0]), s)
    term = kl(prior, s.tempering, run.memory.beta, past, round_of(run, task, [0]), s)
    share = float(past.prior)
    assert 0 < share < 1
    first = first_std(run) if not given else torch.full_like(prior.mean, 0.3)
    wanted = share * prior.log_std.mul(-2).exp() + (1 - share) * first**-2
    torch.testing.assert_close(term.prior.log_std.mul(-2).exp(), wanted)
    assert torch.equal(term.prior.mean, prior.mean)
    assert term.weight == s.tempering / 200


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
    """The closed form, against ridge regressions that leave out a row each; of many inputs the last one matters."""
    run, _ = run_of(network=torch.nn.Flatten(), features=inputs, classes=(2,))
    task, n = rows(0, 60, inputs=inputs, classes=2), 60
    task = replace(task, x=(task.x * torch.where(torch.arange(inputs) < 1, 1 + inputs / 100, 1.0)).flip(2))
    x, labels = task.x[0] - task.x[0].mean(0), F.one_hot(task.y[0], 2).to(F64)
    scale, wrong = x.square().sum(1).mean(), torch.zeros(len(RIDGES), dtype=F64)
    kernel = x @ x.T + scale  # of a bias
    for i in range(n):
        rest = torch.arange(n) != i
        for j, ridge in enumerate(RIDGES):
            own = kernel[rest][:, rest] + ridge * scale * torch.eye(n - 1, dtype=F64)
            wrong[j] += (labels[i] - kernel[i, rest] @ torch.linalg.solve(own, labels[rest])).square().sum()
    share = float(wrong.min() / (labels - labels.mean(0)).square().sum())
    assert 0 < share < 1
    assert float(label_noise(task, round_of(run, task, []))) == pytest.approx(share)


def test_label_noise_bears_numbers_that_overflow():
    run, _ = run_of()
    task = rows(0, 100)
    broken = torch.where(torch.arange(100).view(1, -1, 1) == 7, torch.inf, task.x)
    for x in (broken, torch.zeros_like(broken)):
        assert 0 <= float(label_noise(replace(task, x=x), round_of(run, task, []))) <= 1


def test_clear_labels_have_no_noise_and_drawn_ones_have():
    run, _ = run_of(classes=(2,))
    task = rows(0, 400, classes=2)
    task = replace(task, x=torch.cat([0.1 * task.x[..., :1] + 2 * task.y.unsqueeze(2), task.x[..., 1:]], 2))
    drawn = replace(task, y=torch.randint(2, task.y.shape, generator=torch.Generator().manual_seed(1)))
    same = replace(task, y=torch.zeros_like(task.y))
    clear, noisy, none = (float(label_noise(one, round_of(run, one, []))) for one in (task, drawn, same))
    assert clear < 0.1
    assert noisy > 0.8
    assert none == 0


def test_tempering_follows_the_noise_of_labels():
    """Clear labels are fitted closely, noisy ones are not learned by heart."""
    run, s = run_of(classes=(2,))
    assert tempering(run_of(tempering=0.4)[1], round_of(run, rows(0), [])) == 0.4
    found = []
    for part in (0.0, 0.15):
        task = rows(0, 1000, classes=2)
        task = replace(task, x=task.x.sign())
        wrong = torch.rand(task.y.shape, generator=torch.Generator().manual_seed(1)) < part
        task = replace(task, y=torch.where(wrong, 1 - task.y, task.y))
        round_ = round_of(run, task, [])
        found.append(float(tempering(s, round_)))
        assert found[-1] == pytest.approx(max(MIN_BETA, 0.1 * float(label_noise(task, round_))))
    assert found[0] < 0.001
    assert 0.03 < found[1] < 0.1


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


@pytest.mark.parametrize("chain", [True, False])
def test_learning_without_forgetting_is_what_plain_torch_makes_of_its_equations(chain):
    """Whole batches, Adam, a copy of the last network: every weight is the same, those of the old head too."""
    second = small_runs.task(1, 1, classes=3)
    run = small_runs.run_of("lwf", heads=(2, 3), strength=2.0, **{"distill.temperature": 1.5})
    if not chain:
        run.network.trunk.append(nn.Identity())
    run.learn([small_runs.task(0, 0)])
    network, teacher = plain(run), plain(run)
    run.learn([second])

    def loss():
        target = (logits(teacher, second.x[0]) / 1.5).softmax(1).detach()
        lesson = F.kl_div((logits(network, second.x[0]) / 1.5).log_softmax(1), target, reduction="batchmean")
        return F.cross_entropy(logits(network, second.x[0], 1), second.y[0]) + 2 * 1.5**2 * lesson

    small_runs.adam(dict(network.named_parameters()), loss)
    small_runs.assert_weights(run, run.network.posterior.mean, dict(network.named_parameters()))


def test_without_forgetting_a_head_that_the_task_uses_itself_is_not_taught():
    tasks = [small_runs.task(0, 0), small_runs.task(1, 0)]
    assert small_runs.same(*(small_runs.learned(method, tasks) for method in ("lwf", "naive")))


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
    x, y = digits()
    learner = evcl.EVCL(evcl.nn.mlp(64, [50]), seed=seed)
    first = x[(y < 2)][100:]
    for k in range(0, 10, 2):
        mine = (y >= k) & (y < k + 2)
        learner.learn(x[mine][:100], y[mine][:100], task=str(k), epochs=20)
        if k == 0:
            before = learner.predictions(first, task="0").epistemic.mean()
    after = learner.predictions(first, task="0").epistemic.mean()
    assert after > before / 5, (before, after)  # with the variances that distillation leaves, it falls to a fiftieth


# --- a network without heads: a language model keeps what it says of text --------------------------------------------


LETTERS, LENGTH = 5, 8


class Next(nn.Module):
    """The logits of the next letter, from the last one."""

    def __init__(self):
        super().__init__()
        self.letters, self.next = nn.Embedding(LETTERS, 6), nn.Linear(6, LETTERS)

    def forward(self, x):
        return self.next(torch.tanh(self.letters(x[:, :-1]))).flatten(1)


def text(shift, rows=200, letters=LETTERS):
    """[rows, LENGTH]: of two letters in three, the next is `shift` further on; the others are random."""
    source = torch.Generator().manual_seed(0)
    found = torch.randint(0, letters, (rows, LENGTH), generator=source)
    for t in range(1, LENGTH):
        follows = torch.rand(rows, generator=source) < 2 / 3
        found[:, t] = torch.where(follows, (found[:, t - 1] + shift) % letters, found[:, t])
    return found


def reader(method="evcl", likelihood=None, **settings):
    learner = evcl.Learner(Next(), method, likelihood=likelihood or NextToken(), epochs=20, lr=0.02, **settings)
    learner.learn(text(1))
    return learner


def round_on(learner, x):
    run, shown = learner.state.run, x.unsqueeze(0).float()
    task = TaskData(shown, shown, 1)
    return Round(1, [task], run.network, run.network.posterior, [0], run.seeds, run.likelihood)


@pytest.fixture(scope="module")
def learner():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return reader()


def protected(learner, x, rows=100.0):
    counted = {0: torch.tensor([[rows]])}
    return protection(counted, round_on(learner, x), learner.state.run.settings)


@pytest.mark.parametrize("rows", [50.0, 1000.0])
def test_how_much_is_told_and_how_much_of_the_prior_is_kept(learner, rows):
    x, run = text(2), learner.state.run
    z = outputs(run.network, run.network.posterior.mean, run.network.layout, x.unsqueeze(0).float(), [])
    nll = F.cross_entropy(z.view(-1, LETTERS), x[:, 1:].flatten())
    knows = max(0.0, 1 - float(nll) / math.log(LETTERS))
    past = protected(learner, x, rows)
    (loss,) = past.losses
    assert float(loss.strength) == pytest.approx(EVCL_DISTILL * knows * min(1.0, rows / 200), abs=1e-5)
    assert float(past.prior) == pytest.approx(1 - knows, abs=1e-5)


def test_it_is_the_sum_of_the_kls_of_all_letters(learner):
    x, run = text(1, 30), learner.state.run
    (loss,) = protected(learner, x).losses
    teacher, network, layout = run.network.posterior.mean, run.network, run.network.layout
    weights = teacher + 0.1 * torch.randn(teacher.shape, generator=torch.Generator().manual_seed(0))
    shown = x.unsqueeze(0).float()
    batch = Minibatch(shown, shown, torch.arange(30).unsqueeze(0))
    old, new = (outputs(network, w, layout, shown, []).view(-1, LETTERS) for w in (teacher, weights))
    t = loss.temperature
    each = F.kl_div((new / t).log_softmax(1), (old / t).softmax(1), reduction="none").sum(1)
    network.bind(weights, None, layout)
    bound = network.weights.mean
    found = loss(network, batch).detach()
    assert network.weights.mean is bound  # the step goes on with its own weights
    assert float(found) == pytest.approx(float(loss.strength) * t**2 * float(each.sum()) / 30, rel=1e-5)
    network.bind(teacher, None, layout)
    assert abs(float(loss(network, batch).detach())) < 1e-6


def test_an_energy_that_is_no_sum_of_cross_entropies_is_not_distilled():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = reader(likelihood=Energy(lambda outputs, y: outputs.square().sum(1)))
    assert protected(plain, text(1)) == ((), 1.0, 1.0)


def test_a_language_model_keeps_its_first_text_and_learns_the_second():
    """The second text has three of the five letters, and naive training forgets what follows the others."""
    first, second, found = text(1), text(1, letters=3), {}
    for method in ("evcl", "naive"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            one = reader(method)
        before = [float(one.log_likelihood(x).mean()) for x in (first, second)]
        one.learn(second)
        found[method] = [float(one.log_likelihood(x).mean()) - b for x, b in zip((first, second), before, strict=True)]
    assert found["evcl"][0] > 0.6 * found["naive"][0]  # nats lost
    assert found["evcl"][1] > found["naive"][1] / 2  # nats won


def test_seeds_side_by_side_are_as_each_alone():
    found = []
    for seeds in ([0, 1], [0], [1]):
        with torch.random.fork_rng():
            network = Next()
        given = {"heads": (), "features": 1, "usual": {"epochs": 2, "batch_size": 8}}
        run = small_runs.run_of("evcl", network=network, seeds=seeds, options={"likelihood": NextToken()}, **given)
        run.network.whole = (LENGTH - 1) * LETTERS  # outputs
        for k in range(2):
            x = text(k + 1, 24).unsqueeze(0).double()
            run.learn([TaskData(x, x, k, task=k)])
        found.append(run.log_likelihood(TaskData(x, x, 0, task=0)))
    torch.testing.assert_close(found[0], torch.cat(found[1:]))
    assert not torch.allclose(*found[1:], rtol=1e-3)
