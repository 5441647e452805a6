"""Domains of a head: opened where the rows ask for it and nowhere else, predicted as a mixture, bounded in number."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_groups import DIGITS as ALL_DIGITS
from test_groups import PERMUTED, covariance, groups, learned, stream
from test_groups import five as five_of
from torch.distributions import MultivariateNormal

import evcl
from evcl._core.randomness import generator
from evcl.experiments import execute
from evcl.methods import METHODS, class_statistics, task_inference
from evcl.methods.method import Asked, Newcomer
from evcl.training import Checkpoints

DIGITS = ALL_DIGITS["domain"]


def domains(learner):
    return 1 + max(group.domain for group in groups(learner))


def rows(n, seed, shift=0.0, rule=1.0, columns=4):
    """A table whose label is the sign of a sum; `shift` moves the first column, `rule` turns the labels around."""
    x = torch.randn(n, columns, generator=torch.Generator().manual_seed(seed))
    y = (rule * (x[:, 1] + x[:, 2]) > 0).long()
    x[:, 0] += shift
    return x, y


@pytest.fixture(scope="module")
def five():
    return five_of("domain")


# --- when a task is a new domain --------------------------------------------------------------------------------------


def test_other_digits_under_the_same_labels_are_domains(five):
    assert domains(five) == 5
    assert five.classes() == (0, 1)
    accuracy = [five.measure((task.test.x, task.test.y)).accuracy for task in DIGITS]
    assert np.mean(accuracy) > 0.95
    one = learned(DIGITS, one_softmax=True)
    forgotten = [one.measure((task.test.x, task.test.y)).accuracy for task in DIGITS]
    assert domains(one) == 1
    assert np.mean(forgotten) < 0.9


@pytest.mark.parametrize("sizes", [[50] * 8, [200] * 4, [60, 1000], [1000, 60], [12, 1000]])
def test_files_of_one_distribution_share_a_softmax(sizes):
    data = PERMUTED[0].train
    learner, start = evcl.EVCL(evcl.nn.mlp(64, [20]), epochs=2), 0
    for k, size in enumerate(sizes):
        part = slice(start, start + size)
        learner.learn((data.x[part], data.y[part]), str(k), "0" if k else "new", classes=range(10))
        start += size
    assert len(groups(learner)) == 1


@pytest.mark.parametrize(
    ("change", "new"),
    [
        ({}, False),
        ({"shift": 0.5}, False),  # drift
        ({"shift": 3.0}, False),  # a column tells them apart, but the rule is the same
        ({"rule": -1.0}, False),  # another rule for inputs of the same kind: nothing could tell which one holds
        ({"shift": 20.0, "rule": -1.0}, True),
    ],
)
@pytest.mark.parametrize("n", [100, 1500])
def test_a_table_is_a_new_domain_only_if_inputs_and_labels_both_differ(change, new, n):
    learner = evcl.EVCL(evcl.nn.mlp(4, [10]), epochs=2)
    learner.learn(rows(n, 0), "0")
    learner.learn(rows(n, 1, **change), "1", "0")
    assert domains(learner) == 1 + new


def test_a_domain_that_comes_back_is_recognised():
    learner = evcl.EVCL(evcl.nn.mlp(4, [10]), epochs=2)
    for k, domain in enumerate([0, 1, 0, 1, 1, 0]):
        learner.learn(rows(300, k, 20.0 * domain, 1.0 - 2 * domain), str(k), "0" if k else "new")
    assert list(learner.state.session.domains.values()) == [0, 1, 0, 1, 1, 0]
    assert learner.state.run.seen == (0, 1, 0, 1, 1, 0)
    counts = [float(t[0, :, 0].sum()) for t in learner.state.run.memory.classes.classes.values()]
    assert counts == [900, 900]


def test_the_judgement_is_what_its_equations_say(five):
    """Compared with Gaussians that are fitted to the same rows, one by one, in float64."""
    statistics, run = five.state.run.memory.classes, five.state.run
    x, y = DIGITS[2].train.x[:90], DIGITS[2].train.y[:90]
    heads, r, seed = [0, 1], 0, five.seed
    asked = Asked(run.network, x.unsqueeze(0), heads, [seed])
    task = Newcomer(y.unsqueeze(0), [[0, 1], [0, 1]], [0, 1])
    (new,), (shares,) = task_inference.domains(run.memory, run.network.posterior, asked, task)
    order = torch.randperm(90, generator=generator(seed, "domain", 90))
    f = class_statistics.units(x, statistics.common, r, seed).double()
    counted, judged = order[::2], order[1::2]
    every = torch.cat(list(statistics.classes.values()), 1)[0].double()  # of five domains
    own = torch.stack([f[counted][y[counted] == c].mean(0) for c in (0, 1)])
    n = torch.cat([every[:, 0], torch.stack([(y[counted] == c).sum() for c in (0, 1)])])
    centred = f[counted] - own[y[counted]]
    scatter = class_statistics.square(statistics.common["scatter"][0].double()) + centred.T @ centred
    shared = covariance(scatter, n.sum())
    means = torch.cat([every[:, 1:], own])
    joint = [(a.log() + MultivariateNormal(m, shared).log_prob(f[judged])) for a, m in zip(n, means, strict=True)]
    joint = torch.stack(joint, 1) / statistics.temperature
    domain = torch.stack([joint[:, [0, 1]].logsumexp(1), joint[:, [2, 3]].logsumexp(1)], 1)
    mine = joint[:, [10, 11]]
    share = (mine.logsumexp(1) > domain.amax(1)).double().mean()
    label = y[judged]
    frequency = label.double().mean()
    entropy = torch.special.entr(torch.stack([frequency, 1 - frequency])).sum()
    right = torch.stack([joint[:, [0, 2]].logsumexp(1), joint[:, [1, 3]].logsumexp(1)], 1)
    known = (domain.logsumexp(1) - right.gather(1, label[:, None])[:, 0]).mean()
    own_nll = -mine.log_softmax(1).gather(1, label[:, None]).mean()
    told = (entropy - known) / (entropy - own_nll)
    torch.testing.assert_close(shares.double(), domain.softmax(1).sum(0), rtol=1e-3, atol=1e-3)
    assert bool(new) == bool(share > 0.5 and told < 0.5)


def test_rows_of_new_classes_say_nothing_about_domains():
    """A task with old and new classes is no new domain because of the new ones: they join the old ones' softmax."""
    x, y = PERMUTED[0].train.x, PERMUTED[0].train.y
    learner = evcl.EVCL(evcl.nn.mlp(64, [20]), epochs=2)
    few, more = (y < 5).nonzero().flatten()[:200], ((y > 1) & (y < 8)).nonzero().flatten()[200:400]
    learner.learn((x[few], y[few]), "0")
    with pytest.warns(evcl.ForgettingWarning):  # it has no rows of 0 and 1
        learner.learn((x[more], y[more]), "1", "0")
    assert len(groups(learner)) == 1


@pytest.mark.parametrize(("label", "domains"), [(1, 1), (0, 2)], ids=["as known", "another rule"])
def test_rows_of_one_class_are_a_new_domain_only_if_the_known_ones_are_wrong(label, domains):
    """They are far from all rows before in x_0. The rule so far, x_1 > 0, holds for them, or it does not."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=source)
    learner = evcl.EVCL(evcl.nn.mlp(3, [20]), epochs=5)
    learner.learn((x[:300], (x[:300, 1] > 0).long()), "0")
    far = x[300:] * 0.3 + torch.tensor([6.0, 2.0, 0.0])
    with contextlib.nullcontext() if domains == 2 else pytest.warns(evcl.ForgettingWarning):
        learner.learn((far, torch.full((100,), label)), "1", "0")
    assert len(groups(learner)) == domains


# --- predictions ------------------------------------------------------------------------------------------------------


def test_predictions_are_the_mixture_of_the_domains(five):
    x, session = DIGITS[1].test.x[:20], five.state.session
    weight = session.group_probabilities(x.unsqueeze(0), "0")[0]
    each = torch.stack([five.state.run.predict(x.unsqueeze(0), group.number)[0] for group in groups(five)])
    torch.testing.assert_close(five.predict_proba(x), (weight.T.unsqueeze(2) * each).sum(0))
    assert (weight.argmax(1) == 1).double().mean() > 0.9


def test_domains_may_have_other_classes(tmp_path):
    """New classes in a domain that is not the first, classes without rows, and a domain that has one class."""

    def of(classes, seed, far):
        x = torch.randn(40 * len(classes), 3, generator=torch.Generator().manual_seed(seed))
        y = torch.tensor(classes).repeat(40)
        x[:, 0] += 3 * (y if not far else -y)
        x[:, 1] += 8 * far
        return x, y

    learner = evcl.EVCL(evcl.nn.mlp(3, [12]), epochs=50)
    learner.learn(of([0, 1], 0, 0), "0")
    learner.learn(of([0, 1], 1, 1), "1", "0", classes=[7])
    with pytest.warns(evcl.ForgettingWarning, match="has no rows of 0,"):  # the second domain has them
        learner.learn(of([1, 2], 2, 1), "2", "0")  # a new class beside an old one of the second domain
    learner.learn(of([3], 3, 1), "3", "0")
    assert [group.domain for group in groups(learner)] == [0, 1, 1, 0]
    assert learner.classes() == (0, 1, 7, 2, 3)
    assert [group.classes for group in groups(learner)] == [[0, 1], [0, 1, 7], [2], [3]]
    assert learner.state.session.shown["0"] == [{0, 1, 3}, {0, 1, 2}]
    learner.save(tmp_path / "m")
    assert evcl.load(tmp_path / "m").state.session.shown == learner.state.session.shown
    p = learner.predict_proba(torch.cat([of([0, 1], 9, 0)[0], of([0, 1, 2], 9, 1)[0]]))
    torch.testing.assert_close(p.sum(1), torch.ones(len(p)))
    assert learner.measure(of([0, 1], 8, 0)).accuracy > 0.9
    assert learner.measure(of([0, 1, 2], 8, 1)).accuracy > 0.7


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_head_has_at_most_a_hundred_domains_and_stays_as_large_as_it_then_is():
    learner, sizes = evcl.EVCL(evcl.nn.mlp(4, [5]), epochs=1), []
    for k in range(104):
        learner.learn(rows(40, k, 20.0 * k, (-1.0) ** k), str(k), "0" if k else "new")
        sizes.append(sum(t.numel() for t in learner.state.run.tensors().values()))
    assert domains(learner) == 100
    assert len(set(sizes)) == 100
    assert len(set(sizes[99:])) == 1


def rewritten(path, change, tensors=lambda name: True):
    """The file beside it with another description, and those of its tensors."""
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    told = json.loads(about["evcl"])
    change(told)
    kept = {name: t for name, t in load_file(path).items() if tensors(name)}
    save_file(kept, path.with_name("n"), {**about, "evcl": json.dumps(told)})
    return path.with_name("n")


def month(k, number, columns=12, seed=0):
    """A month that uses three columns of its own, by a rule that is turned around every month."""
    x, y = rows(1000, 100 * seed + number + k, rule=(-1.0) ** k, columns=3)
    wide = torch.zeros(len(x), columns)
    wide[:, 3 * k : 3 * k + 3] = x
    return wide, y


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_months_that_use_other_columns_are_kept(seed, heads):
    """Distillation on the new inputs, where the old columns are empty, would ruin what the network says on the old. The
    weights of the new columns are free, so one softmax is enough, and nothing grows.
    """
    learner, sizes = evcl.EVCL(evcl.nn.mlp(12, [20, 20]), epochs=20, seed=seed), []
    for k in range(4):
        learner.learn(month(k, 0, seed=seed), str(k), "0" if k and not heads else "new")
        sizes.append(sum(t.numel() for t in learner.state.run.tensors().values()))
    accuracy = [learner.measure(month(k, 50, seed=seed), str(k) if heads else None).accuracy for k in range(4)]
    assert np.mean(accuracy) > 0.94
    assert heads or (domains(learner) == 1 and len(set(sizes)) == 1)


def test_a_month_that_uses_the_same_columns_by_another_rule_is_a_domain():
    learner = evcl.EVCL(evcl.nn.mlp(12, [20]), epochs=2)
    for k in range(3):
        learner.learn(month(k, 0), str(k), "0" if k else "new")
    assert domains(learner) == 1
    x, y = month(0, 70)
    x[:, 0] += 20
    learner.learn((x, 1 - y), "3", "0")
    assert domains(learner) == 2


def test_statistics_of_an_earlier_version_lack_the_squares(tmp_path):
    """They are used as before, and no month is known to use other columns."""
    learner = evcl.EVCL(evcl.nn.mlp(12, [20]), epochs=2)
    learner.learn(month(0, 0), "0")
    learner.save(tmp_path / "m")

    def change(told):
        told["memory"][0]["fields"]["classes"]["fields"]["common"]["dict"].remove(["squares", "tensor"])

    back = evcl.load(rewritten(tmp_path / "m", change, lambda name: "squares" not in name))
    back.learn(month(1, 0), "1", "0")
    assert domains(back) == 2
    assert "squares" not in back.state.run.memory.classes.common
    assert len(back.predict(month(1, 50)[0])) == 1000


@pytest.mark.parametrize(("known", "count"), [(0.25, 1), (1.0, 2)])
def test_how_much_the_known_domains_may_tell_is_a_setting(known, count):
    """The second task is elsewhere, and its labels follow the same rule."""
    learner = evcl.EVCL(evcl.nn.mlp(4, [10]), epochs=2, **{"infer.known": known})
    learner.learn(rows(400, 0), "0")
    learner.learn(rows(400, 1, shift=3.0), "1", "0")
    assert domains(learner) == count


@pytest.mark.parametrize("domain", [2, -1, "1", True, 1.0])
def test_a_file_with_impossible_domains_is_refused(domain, tmp_path):
    learned(DIGITS[:2], epochs=1).save(tmp_path / "m")
    path = rewritten(tmp_path / "m", lambda told: told["groups"]["0"][1].__setitem__(2, domain))
    with pytest.raises(evcl.EvclError, match="domains of its groups are not in order"):
        evcl.load(path)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_seeds_that_disagree_are_learned_alone(tmp_path):
    """Each ends as if the other had not been there."""

    def without_seed_1(memory, posterior, asked, newcomer):
        new, shares = METHODS["evcl"].domains(memory, posterior, asked, newcomer)
        return new & (torch.tensor(asked.seeds) != 1), shares

    evcl.methods.register(replace(METHODS["evcl"], name="disagrees", domains=without_seed_1))
    try:
        alone = [execute(stream("disagrees", (seed,))) for seed in (0, 1)]
        both = execute(stream("disagrees", (0, 1)), checkpoints=Checkpoints(tmp_path))
    finally:
        METHODS.remove("disagrees")
    assert both.accuracy == [one.accuracy[0] for one in alone]
    assert alone[0].average_accuracy.mean > alone[1].average_accuracy.mean + 0.05
