"""`sample_weight` of `learn`: a weight is a number of copies, and an example of weight 0 is not there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checks import refused, same, state
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

import evcl

SOURCE = np.random.default_rng(0)
Y = np.arange(60) % 2
X = (SOURCE.normal(size=(60, 4)) + Y[:, None]).astype(np.float32)
COPIES = SOURCE.integers(1, 4, 60)
ROWS = np.repeat(np.arange(60), COPIES)


def mlp():
    return evcl.nn.mlp(4, [8])


def layers():
    return nn.Sequential(nn.utils.skip_init(nn.Linear, 4, 8), nn.Tanh())


def small(method="evcl", make=mlp, **options):
    return evcl.Learner(make(), method, **{"epochs": 4, "lr": 0.01, "batch_size": 16, **options})


@pytest.mark.parametrize(("method", "fisher"), [("naive", None), ("evcl", "exact"), ("evcl", "empirical")])
@pytest.mark.parametrize("make", [mlp, layers])
def test_a_weight_is_a_number_of_copies(method, fisher, make):
    """One batch per epoch, and hardly any noise: NLL, weights and Fisher are those of the copies."""
    options = {"dtype": torch.float64, "batch_size": 1000, "epochs": 8, "init": "draw"}
    if method == "evcl":
        options |= {"init_std": 1e-8, "std_update": "adam", "std_lr_scale": 1e-6, "tempering": 0.0, "fisher": fisher}
        options |= {"distill": 0, "fisher_scale": "none"}  # a row of weight 3 is one row, and three copies are three
    weighted, copied, plain = (small(method, make, **options) for _ in range(3))
    copies = COPIES + 5 * Y
    rows = np.repeat(np.arange(60), copies)
    for _ in range(2):
        weighted.learn(X, Y, sample_weight=copies)
        copied.learn(X[rows], Y[rows])
        plain.learn(X, Y)
    a, b, c = map(state, (weighted, copied, plain))
    for name in ("posterior.mean", "memory/importance") if method == "evcl" else ("posterior.mean",):
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-7)
    assert (a["posterior.mean"] - c["posterior.mean"]).abs().max() > 0.01
    for one, other in zip(weighted.history["1"], copied.history["1"], strict=True):
        assert one.nll == pytest.approx(other.nll, rel=1e-6)
        assert one.elastic == pytest.approx(other.elastic, rel=1e-4, abs=1e-12)


def test_class_statistics_are_those_of_copies():
    """The first task decides the features. Of the second, the means of the classes are the same; counts and squares are
    scaled, as all weights are, to a mean of 1.
    """
    learners = [small("generative-classifier", dtype=torch.float64) for _ in range(2)]
    for learner in learners:
        learner.learn(X, Y, task="a")
    before = learners[0].state.run.memory.common["scatter"]
    learners[0].learn(X, Y, task="b", sample_weight=COPIES)
    learners[1].learn(X[ROWS], Y[ROWS], task="b")
    a, b = (one.state.run.memory for one in learners)
    scale = len(X) / len(ROWS)
    torch.testing.assert_close(a.classes[1][..., 1:], b.classes[1][..., 1:])
    torch.testing.assert_close(a.classes[1][..., 0], b.classes[1][..., 0] * scale)
    torch.testing.assert_close(a.common["scatter"] - before, (b.common["scatter"] - before) * scale)
    assert a.classes[1][..., 0].sum() == pytest.approx(60)


def test_in_small_batches_a_weight_counts_as_copies_on_average():
    """Other batches, and so other numbers; but predictions are near those of the copies."""
    odd = X[:, 0] > 0.5
    y, heavy = np.where(odd, 1 - Y, Y), np.where(odd, 8, 1)  # heavy rows whose labels are the other way round
    rows = np.repeat(np.arange(60), heavy)
    found = []
    for x, labels, weight in ((X, y, heavy), (X[rows], y[rows], None), (X, y, None)):
        learners = [small("naive", seed=seed, epochs=120 * 60 // len(x)) for seed in range(3)]  # equally many steps
        for learner in learners:
            learner.learn(x, labels, sample_weight=weight)
        found.append(np.mean([learner.predict_proba(X)[:, 1] for learner in learners], 0))
    weighted, copied, plain = found
    near, far = np.abs(weighted - copied).mean(), np.abs(weighted - plain).mean()
    assert near < far / 2, (near, far)


@pytest.mark.parametrize("method", ["evcl", "er", "ewc"])
@pytest.mark.parametrize("options", [{}, {"validation": 0.2, "patience": 2}, {"class_weight": "balanced"}], ids=str)
def test_an_example_of_weight_0_is_not_there(method, options):
    kept = np.arange(60) % 3 != 0
    weight = np.where(kept, COPIES, 0)
    dropped, absent = small(method), small(method)
    dropped.learn(X, Y, sample_weight=weight, **options)
    absent.learn(X[kept], Y[kept], sample_weight=COPIES[kept], **options)
    assert same(dropped, absent)
    assert dropped.card()["tasks"][0]["examples"] == absent.card()["tasks"][0]["examples"]


def test_only_ratios_matter():
    plain, ones, sevens = (small() for _ in range(3))
    plain.learn(X, Y)
    ones.learn(X, Y, sample_weight=np.ones(60))
    sevens.learn(X, Y, sample_weight=[7] * 60)
    assert same(plain, ones, sevens)
    some = [small() for _ in range(3)]
    for learner, factor in zip(some, (1.0, 2.0**-1000, 2.0**1000), strict=True):
        learner.learn(X, Y, sample_weight=COPIES * factor)
    assert same(*some)
    assert not same(some[0], plain)


def test_weights_of_classes_and_of_examples_are_multiplied():
    both, product = small(dtype=torch.float64), small(dtype=torch.float64)
    both.learn(X, Y, class_weight={1: 4.0}, sample_weight=COPIES)
    product.learn(X, Y, sample_weight=COPIES * np.where(Y == 1, 4.0, 1.0))
    for name, tensor in state(both).items():
        torch.testing.assert_close(tensor, state(product)[name])


def test_a_validation_part_has_the_weights_of_its_examples():
    """Its NLL is the weighted mean of its own examples."""
    learner, seen = small(epochs=1, dtype=torch.float64), []
    heavy = np.where(Y == 1, 5.0, 1.0)

    class Look(evcl.Callback):
        def end_epoch(self, epoch):
            seen.append(epoch.validation_nll)

    learner.learn(X, Y, sample_weight=heavy, validation=0.3, callbacks=[Look()])
    by_class = small(epochs=1, dtype=torch.float64)
    by_class.learn(X, Y, class_weight={1: 5.0}, validation=0.3, callbacks=[Look()])
    assert seen[0] == pytest.approx(seen[1], rel=1e-9)


@pytest.mark.parametrize("form", ["pair", "tensors", "data set", "batches", "loader", "named"])
def test_data_of_every_form(form):
    whole = TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
    data = {
        "pair": (X, Y),
        "tensors": (torch.as_tensor(X), torch.as_tensor(Y)),
        "data set": whole,
        "batches": [(X[:25], Y[:25]), (X[25:], Y[25:])],
        "loader": DataLoader(whole, batch_size=16, generator=torch.Generator()),
        "named": {"x": X, "label": Y},
    }[form]
    weight = torch.as_tensor(COPIES) if form == "tensors" else list(COPIES)
    learner, wanted = small(), small()
    learner.learn(data, sample_weight=weight)
    wanted.learn((X, Y), sample_weight=COPIES)
    assert same(learner, wanted)


def test_two_groups_of_classes_keep_the_weights_of_their_rows():
    """New rows of classes that were learned in two softmaxes: each part has the weights of its own rows."""
    y = Y + 2 * (np.arange(60) % 4 > 1)
    learners = small(), small()
    for k, learner in enumerate(learners):
        learner.learn((X[y < 2], y[y < 2]), "a")
        learner.learn((X[y > 1], y[y > 1]), "b", "a")
        order = np.argsort(y > 1, kind="stable") if k else np.arange(60)
        learner.learn((X[order], y[order]), "c", "a", sample_weight=COPIES[order])
    assert len(learners[0].state.session.groups["a"]) == 2
    assert same(*learners)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (COPIES[:-1], "there are 60 inputs but 59 values of sample_weight"),
        (np.ones((60, 1)), "sample_weight must have shape [examples], not (60, 1)"),
        (3.0, "sample_weight must have shape [examples], not ()"),
        (np.where(np.arange(60) == 7, -1.0, 1.0), "finite numbers of at least 0, but row 7 has -1.0"),
        (np.where(np.arange(60) == 9, np.nan, 1.0), "finite numbers of at least 0, but row 9 has nan"),
        (np.where(np.arange(60) == 9, np.inf, 1.0), "finite numbers of at least 0, but row 9 has inf"),
        (np.zeros(60), "sample_weight is 0 for every example"),
        (["a"] * 60, "sample_weight must be numbers, one per example, not <U1"),
        ([[1], [2, 3]] * 30, "sample_weight must be an array"),
        ("balanced", "sample_weight must be numbers"),
    ],
    ids=range(10),
)
def test_bad_weights_are_refused_in_one_line(weight, message):
    learner = small()
    with refused(message):
        learner.learn(X, Y, sample_weight=weight)
    assert learner.tasks == ()
    assert same(learner, small())


def test_examples_in_an_unknown_order_have_no_weights():
    data = TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
    for loader in (
        DataLoader(data, 16, shuffle=True),
        DataLoader(data, 16, drop_last=True),
        DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 16, False)),
        DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 16, True)),
    ):
        with pytest.raises(evcl.EvclError, match="this DataLoader shuffles or drops examples: pass its data set"):
            small().learn(loader, sample_weight=COPIES)
    with pytest.raises(evcl.EvclError, match="reread cannot be used with sample_weight"):
        small().learn(data, sample_weight=COPIES, reread=True)
    for weights in ({"sample_weight": COPIES}, {"class_weight": "balanced"}):
        with pytest.raises(evcl.EvclError, match="class_weight, sample_weight: not with coresets"):
            small(coreset="random").learn(X, Y, **weights)
