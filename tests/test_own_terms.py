"""Training on one's own terms: data of every form, callbacks, losses apart, early stopping, class weights."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest
import torch
from checks import refused, same, state
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import evcl
from evcl.callbacks import Callback, TensorBoard

linear = partial(nn.utils.skip_init, nn.Linear)


def clouds(n=60, seed=0, apart=1.0, labels=("no", "yes")):
    source = np.random.default_rng(seed)
    y = np.arange(n) % len(labels)
    x = source.normal(size=(n, 4)) + apart * y[:, None]
    return x.astype(np.float32), np.array(labels)[y]


X, Y = clouds()
NUMBERS = (Y == "yes").astype(int)


def mlp():
    return evcl.nn.mlp(4, [8])


def convolutional(seed=0):
    """A network that is no chain, with statistics of its own."""
    network = nn.Sequential(linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
    with torch.no_grad():
        source = torch.Generator().manual_seed(seed)
        network[0].weight.normal_(generator=source)
        network[0].bias.zero_()
    return network


def small(network=None, method="evcl", **options):
    return evcl.Learner(network or mlp(), method, **{"epochs": 4, "lr": 0.01, "batch_size": 16, "seed": 0, **options})


# --- data ----------------------------------------------------------------------------------------------------------


class Texts(Dataset):
    """A data set as a user writes it: arrays of bytes, and text for labels."""

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return (X[i] * 10).astype(np.uint8), Y[i]


def of_batches(x=X, y=Y, size=25):
    for start in range(0, len(x), size):
        yield x[start : start + size], y[start : start + size]


@pytest.mark.parametrize(
    ("data", "plain"),
    [
        (lambda: TensorDataset(torch.from_numpy(X), torch.from_numpy(NUMBERS)), (X, NUMBERS)),
        (lambda: Subset(Texts(), range(40)), ((X[:40] * 10).astype(np.uint8), Y[:40])),
        (Texts, ((X * 10).astype(np.uint8), Y)),
        (of_batches, (X, Y)),
        (lambda: list(of_batches()), (X, Y)),
        (lambda: list(of_batches(size=30)), (X, Y)),  # two of them: no pair (x, y)
        (lambda: DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(NUMBERS)), 7,
                            generator=torch.Generator()), (X, NUMBERS)),
    ],
)  # fmt: skip
def test_every_form_of_data_is_the_same_data(data, plain):
    learner, other = small(), small()
    learner.learn(data())
    other.learn(plain)
    assert learner.classes() == other.classes()
    assert same(learner, other)


def test_a_loader_may_use_its_memory_again():
    def batches():
        buffer = np.empty((20, 4), np.float32)
        for start in range(0, 60, 20):
            buffer[:] = X[start : start + 20]
            yield buffer, Y[start : start + 20]

    learner, other = small(), small()
    learner.learn(batches())
    other.learn((X, Y))
    assert same(learner, other)


class Endless(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Uneven(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return torch.zeros(4 - i), i


class Pictures(Uneven):
    def __getitem__(self, i):
        return object(), i


USED = of_batches()
list(USED)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Endless(), "an IterableDataset yields single examples: wrap it in a DataLoader"),
        (TensorDataset(torch.zeros(0, 4), torch.zeros(0)), "the data set is empty"),
        (Uneven(), "data set item 1: x is (3,), but in item 0 it is (4,)"),
        (Pictures(), "use a transform to convert images to tensors"),
        (USED, "there are no batches: an exhausted iterator yields none"),
        ([(X, Y), (X[:, :3], Y), (X, Y)], "batch 1: x is [n, 3], but in batch 0 it is [n, 4]"),
        ([(X, Y), (X, Y[:3]), (X, Y)], "batch 1: there are 60 inputs but 3 labels"),
        ([(X, Y), (X * np.inf, Y), (X, Y)], "batch 1: the inputs contain NaN or infinity"),
        (iter([X, Y]), "learn takes a pair (x, y), or batches that are such pairs, but item 0 is a ndarray"),
        ({"x": X, "y": Y}, "there is no column 'label' or 'labels' among x, y: name the column of the labels"),
        (7, "learn takes a Task, a pair (x, y), a torch Dataset or batches (x, y), not int"),
    ],
)
def test_data_that_is_none_is_one_clear_line(data, message):
    learner = small()
    with refused(message):
        learner.learn(data)
    assert learner.tasks == ()


# --- callbacks -----------------------------------------------------------------------------------------------------


class Heard(Callback):
    """Notes every call, and does what it is told to at one of them."""

    def __init__(self, log, name="", at=None, do=lambda: None):
        self.log, self.name, self.at, self.do = log, name, at, do

    def _note(self, *what):
        self.log.append((self.name, *what) if self.name else what)
        return self.do() if what == self.at else None

    def begin_task(self, task, epochs):
        self._note("begin task", task, epochs)

    def begin_epoch(self, task, epoch):
        self._note("begin", epoch)

    def end_epoch(self, epoch):
        return self._note("end", epoch.epoch)

    def end_task(self, task, history):
        self._note("end task", task, len(history))


def test_callbacks_are_told_in_order_and_looking_on_changes_nothing():
    log, learner, other = [], small(epochs=2), small(epochs=2)
    learner.learn((X, Y), task="first", callbacks=[Heard(log, "a"), Heard(log, "b")])
    calls = [("begin task", "first", 2), ("begin", 1), ("end", 1), ("begin", 2), ("end", 2), ("end task", "first", 2)]
    assert log == [(name, *call) for call in calls for name in ("a", "b")]
    other.learn((X, Y), task="first")
    assert same(learner, other)
    assert learner.history == other.history


def test_a_callback_that_returns_true_ends_the_task_and_the_others_are_told():
    log = []
    given = {"lr_schedule": "constant", "std_rate": 0.01}  # by default they depend on how many epochs there are
    learner, other = (small(**given) for _ in range(2))
    stop = Heard(log, "a", at=("end", 2), do=lambda: True)
    learner.learn((X, Y), task="first", callbacks=[stop, Heard(log, "b")])
    other.learn((X, Y), task="first", epochs=2)
    assert same(learner, other)  # consolidated as ever
    assert log[-3:] == [("b", "end", 2), ("a", "end task", "first", 2), ("b", "end task", "first", 2)]
    assert len(learner.history["first"]) == 2
    small().learn((X, Y), callbacks=[Heard(log, at=("end", 1), do=lambda: "a word")])
    assert log[-1] == ("end task", "0", 4)


@pytest.mark.parametrize("at", [("begin task", "second", 4), ("begin", 1), ("end", 3), ("end task", "second", 4)])
@pytest.mark.parametrize("make", [mlp, convolutional])
def test_an_exception_in_a_callback_leaves_the_learner_as_it_was(at, make):
    error = KeyboardInterrupt if at[0] == "end" else ZeroDivisionError

    def fail():
        raise error("mine")

    learner, other = small(make()), small(make())
    for one in (learner, other):
        one.learn((X, Y), task="old")
    more = clouds(seed=1, labels=("yes", "no", "more"))
    with pytest.raises(error, match="mine"):
        learner.learn(more, "second", "old", callbacks=[Heard([], at=at, do=fail)])
    assert learner.tasks == ("old",)
    assert list(learner.history) == ["old"]
    assert learner.classes() == ("no", "yes")
    assert np.array_equal(learner.predict_proba(X), other.predict_proba(X))
    for one in (learner, other):  # and it goes on as if nothing had been
        one.learn(clouds(seed=2), "next", "old")
    assert same(learner, other)


@pytest.mark.parametrize(
    "change",
    [
        lambda learner: learner.learn((X, Y)),
        lambda learner: learner.learn_jointly(list(evcl.benchmarks.get("split-digits", 0, 1))),
        lambda learner: learner.keep(20),
        lambda learner: learner.to("cpu"),
        lambda learner: learner.share(None),
    ],
)
def test_a_learner_changes_one_thing_at_a_time(change):
    learner = small()
    learner.learn((X, Y))
    with pytest.raises(evcl.EvclError, match=r"a task is being learned|use learn"):
        learner.learn((X, Y), callbacks=[Heard([], at=("end", 1), do=lambda: change(learner))])
    assert learner.tasks == ("0",)


def test_what_is_saved_during_a_task_is_the_state_before_it(tmp_path):
    learner, path = small(), tmp_path / "m"
    learner.learn((X, Y))
    learner.learn((X, Y), callbacks=[Heard([], at=("end", 1), do=lambda: learner.save(path))])
    assert evcl.load(path).tasks == ("0",)
    learner.learn((X, Y), callbacks=[Heard([], at=("end task", "2", 4), do=lambda: learner.save(path))])
    assert evcl.load(path).tasks == ("0", "1", "2")


@pytest.mark.parametrize("callbacks", [[Heard], [print], Heard, 3, [None]])
def test_what_is_no_callback_is_one_clear_line(callbacks):
    with pytest.raises(evcl.EvclError, match="callbacks must be a list"):
        small().learn((X, Y), callbacks=callbacks)


def test_joint_tasks_have_one_history():
    tasks = list(evcl.benchmarks.get("split-digits")[:2])
    log = []
    learner = evcl.Learner(evcl.nn.mlp(64, [8]), "joint", epochs=2)
    names = learner.learn_jointly(tasks, callbacks=[Heard(log)])
    assert log[0] == ("begin task", " + ".join(names), 2)
    assert [len(learner.history[name]) for name in names] == [2, 2]


def test_a_learning_rate_that_falls_is_reported():
    learner = small(lr_schedule="cosine")
    learner.learn((X, Y))
    rates = [epoch.lr for epoch in learner.history["0"]]
    assert rates == pytest.approx([0.01 * (1 + np.cos(np.pi * k / 4)) / 2 for k in range(4)])


# --- the losses apart ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mlp, convolutional])
def test_the_terms_are_those_of_the_equations(make):
    """The KL and the elastic term of the last epoch, from what is remembered before and after the task."""
    learner = small(
        make(), dtype=torch.float64, posterior="diagonal", strength=7.0, tempering=0.3, fisher_floor=0.01,
        fisher_scale="none", distill=0,
    )  # fmt: skip
    learner.learn((X, Y), task="old")
    before = state(learner)
    learner.learn(clouds(seed=1), "second", "old")
    m, s = (state(learner)[f"posterior.{part}"] for part in ("mean", "log_std"))
    m0, s0 = before["posterior.mean"], before["posterior.log_std"]
    q, prior = (torch.distributions.Normal(a, b.exp()) for a, b in ((m, s), (m0, s0)))
    kl = 0.3 / 60 * torch.distributions.kl_divergence(q, prior).sum()
    stiff = 7.0 * before["memory/importance"] + 0.01 * before["memory/used"]
    elastic = 0.5 * (stiff * ((m - m0) ** 2 + ((2 * s).exp() - (2 * s0).exp()) ** 2)).sum()
    last = learner.history["second"][-1]
    assert last.kl == pytest.approx(float(kl), rel=1e-9)
    assert last.elastic == pytest.approx(float(elastic), rel=1e-9)
    assert min(last.kl, last.elastic) > 0
    assert last.other == 0
    assert last.loss == pytest.approx(last.nll + last.kl + last.elastic)


def test_the_first_tasks_elastic_term_and_a_plain_networks_kl_are_0():
    learner = small(method="ewc")
    learner.learn((X, Y))
    assert [(e.kl, e.elastic, e.other) for e in learner.history["0"]] == [(0, 0, 0)] * 4
    learner.learn((X, Y))
    assert learner.history["1"][-1].elastic > 0


def test_a_term_of_ones_own_is_reported():
    learner = small(method="huber", dtype=torch.float64)
    learner.learn((X, Y))
    before = state(learner)["posterior.mean"]
    learner.learn(clouds(seed=1), head="0")
    after = state(learner)["posterior.mean"]
    expected = 0.1 * nn.functional.huber_loss(after, before, reduction="sum", delta=0.1)
    assert learner.history["1"][-1].other == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("weight", [None, {"yes": 3.0}])
def test_the_nll_is_the_mean_over_the_epoch(weight):
    """One step an epoch, of a plain network: the NLL of the epoch is that of the weights before it."""
    learner = small(method="naive", batch_size=60, epochs=1, dtype=torch.float64)
    learner.learn((X, Y), task="old")
    p = learner.predict_proba(X.astype(float))[np.arange(60), (Y == "yes").astype(int)]
    w = np.ones(60) if weight is None else np.where(Y == "yes", 3.0, 1.0)
    learner.learn((X, Y), "second", "old", class_weight=weight)
    assert learner.history["second"][0].nll == pytest.approx(-np.average(np.log(p), weights=w), rel=1e-9)


# --- early stopping ------------------------------------------------------------------------------------------------


def noisy(n, seed):
    """Labels that are half noise: a network that learns them by heart gets worse on others."""
    source = np.random.default_rng(seed)
    x = source.normal(size=(n, 4)).astype(np.float32)
    return x, ((x[:, 0] + source.normal(size=n)) > 0).astype(int)


def wide():
    return evcl.nn.mlp(4, [32])


def nll_of(learner, held):
    return -np.log(learner.predict_proba(held[0])[np.arange(200), held[1]]).mean()


@pytest.mark.parametrize(
    ("method", "make"),
    [("evcl", wide), ("evcl", convolutional), ("naive", wide), ("naive", convolutional), ("random-coreset", wide)],
)
def test_a_task_ends_with_the_weights_of_the_best_epoch(method, make):
    train, held = noisy(40, 0), noisy(200, 1)
    options = {"epochs": 200, "lr": 0.03, "lr_schedule": "constant"} | (
        {"std_rate": 0.01, "posterior": "diagonal"} if method == "evcl" else {}
    )
    learner = small(make(), method, **options)
    learner.learn(train, validation=held, patience=5)
    nll = [epoch.validation_nll for epoch in learner.history["0"]]
    best = int(np.argmin(nll))
    assert len(nll) == best + 1 + 5 < 200
    assert nll_of(learner, held) == pytest.approx(nll[best], rel=1e-5)
    other = small(make(), method, **options)
    other.learn(train, epochs=best + 1)  # without a validation part, and as many epochs
    assert same(learner, other)  # the Fisher, the prior and the statistics of norms too
    accuracy = learner.history["0"][best].validation_accuracy
    assert accuracy == pytest.approx((learner.predict(held[0]) == held[1]).mean())


def test_however_a_task_ends_the_best_epoch_is_kept():
    class At(Callback):
        def end_epoch(self, epoch):
            return epoch.epoch == 60

    train, held = noisy(40, 0), noisy(200, 1)
    learner = small(wide(), "naive", epochs=200, lr=0.03)
    learner.learn(train, validation=held, patience=100, callbacks=[At()])
    nll = [epoch.validation_nll for epoch in learner.history["0"]]
    assert len(nll) == 60
    assert min(nll) < nll[-1] - 0.01
    assert nll_of(learner, held) == pytest.approx(min(nll), rel=1e-5)


@pytest.mark.parametrize("make", [mlp, convolutional])
def test_without_patience_a_validation_part_is_only_measured(make):
    learner, other = small(make()), small(make())
    learner.learn((X, Y), validation=clouds(seed=1))
    other.learn((X, Y))
    assert same(learner, other)
    assert all(epoch.validation_accuracy is not None for epoch in learner.history["0"])
    assert other.history["0"][0].validation_nll is None


def test_a_part_is_held_out_in_proportion_and_not_learned_from():
    x, y = clouds(100, labels=("a", "a", "a", "b"))
    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear(4, 4)

        def forward(self, x):
            if torch.is_grad_enabled() and len(x) > 1:
                seen.append(x.detach().clone())
            return self.inner(x).tanh()

    learner = small(Watched(), "naive", init="draw", epochs=1)
    learner.learn((x, y), validation=0.2)
    learned = {tuple(row) for batch in seen for row in batch.tolist()}
    part = [label for row, label in zip(x.tolist(), y, strict=True) if tuple(row) not in learned]
    assert len(learned) == 80
    assert sorted(part) == ["a"] * 15 + ["b"] * 5
    other = small(Watched(), "naive", init="draw", epochs=1)
    other.learn((x, y), validation=0.2)
    assert same(learner, other)  # the same part for the same seed


def test_a_benchmarks_own_validation_part():
    task = evcl.benchmarks.get("split-digits", validation=0.2)[0]
    learner = evcl.EVCL(evcl.nn.mlp(64, [8]), epochs=3)
    learner.learn(task, validation=task.validation, patience=2)
    assert learner.history[task.name][-1].validation_accuracy > 0.5


def test_with_coresets_the_validation_part_is_looked_at_before_the_tuning():
    learner = small(epochs=3, coreset="random", coreset_size=5)
    learner.learn((X, Y), validation=0.2, patience=3)
    told = [(epoch.tuning, epoch.validation_nll is None) for epoch in learner.history["0"]]
    assert told == [(False, False)] * 3 + [(True, True)] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 3}, "patience needs a validation part"),
        ({"validation": 0.1, "patience": 0}, "patience must be a whole number of at least 1"),
        ({"validation": 0}, "validation must be a finite number above 0 and at most 0.9, not 0"),
        ({"validation": 1.5}, "validation must be a finite number above 0"),
        ({"validation": "much"}, "validation must be a finite number above 0"),
        ({"validation": (X[:, :3], Y)}, "validation: the network takes 4 numbers per example, not 3"),
        ({"validation": (X, Y[:3])}, "validation: there are 60 inputs but 3 labels"),
        ({"validation": (X, np.full(60, "other"))}, "validation: label 'other' is not among the classes"),
        ({"validation": 3j}, "validation takes a Task, a pair (x, y)"),
        ({"class_weight": "even"}, "class_weight must be 'balanced' or a mapping {label: weight}, not 'even'"),
        ({"class_weight": [1, 2]}, "class_weight must be 'balanced' or a mapping"),
        ({"class_weight": {"maybe": 2}}, "class_weight: 'maybe' is not among the classes ['no', 'yes']"),
        ({"class_weight": {"yes": 0}}, "class_weight: the weight of 'yes' must be a number above 0, not 0"),
        ({"class_weight": {"yes": np.nan}}, "class_weight: the weight of 'yes' must be a number above 0, not nan"),
        ({"class_weight": {"yes": "2"}}, "class_weight: the weight of 'yes' must be a number above 0, not '2'"),
    ],
)
def test_terms_that_make_no_sense_are_one_clear_line(options, message):
    learner = small()
    with refused(message):
        learner.learn((X, Y), **options)
    assert learner.tasks == ()
    assert same(learner, small())


# --- class weights -------------------------------------------------------------------------------------------------


def test_balanced_is_scikit_learns():
    from sklearn.utils.class_weight import compute_class_weight

    x, y = clouds(90, labels=("a", "a", "a", "a", "b", "c"))
    names = np.array(["a", "b", "c"])
    weights = dict(zip(names, compute_class_weight("balanced", classes=names, y=y), strict=True))
    learners = [small() for _ in range(4)]
    each = "balanced", weights, {k: 5 * v for k, v in weights.items()}, None
    for learner, given in zip(learners, each, strict=True):
        learner.learn((x, y), class_weight=given)
    assert same(*learners[:2])
    for one in learners[2:]:  # only ratios count
        close = [torch.allclose(state(one)[name], t, atol=1e-4) for name, t in state(learners[0]).items()]
        assert all(close) == (one is learners[2])


# --- TensorBoard ---------------------------------------------------------------------------------------------------


class Writer:
    def __init__(self):
        self.written, self.flushed, self.closed = [], 0, False

    def add_scalar(self, tag, value, step):
        self.written.append((tag, value, step))

    def flush(self):
        self.flushed += 1

    def close(self):
        self.closed = True


METRICS = ("loss", "nll", "kl", "elastic", "lr", "validation_nll", "validation_accuracy")


def test_every_metric_is_written_for_tensorboard():
    writer, learner = Writer(), small(epochs=2, distill=0, posterior="diagonal")
    callback = TensorBoard("nowhere", writer=writer)
    learner.learn((X, Y), task="a", callbacks=[callback], validation=0.2)
    learner.learn((X, Y), task="b", callbacks=[callback])
    callback.close()
    wanted = [(f"{m}/a", getattr(e, m), e.epoch) for e in learner.history["a"] for m in METRICS]
    wanted += [(f"{m}/b", getattr(e, m), e.epoch) for e in learner.history["b"] for m in METRICS[:-2]]
    assert writer.written == wanted
    assert (writer.flushed, writer.closed) == (4, True)  # every epoch


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_tensorboard_reads_what_is_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    learner, callback = small(epochs=3), TensorBoard(tmp_path)
    learner.learn((X, Y), task="a", callbacks=[callback])
    callback.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.value for e in events.Scalars("nll/a")] == pytest.approx([e.nll for e in learner.history["a"]], rel=1e-6)
    assert [e.step for e in events.Scalars("kl/a")] == [1, 2, 3]


def test_without_tensorboard_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(evcl.EvclError, match=r"pip install 'evcl\[tensorboard\]'"):
        TensorBoard(tmp_path)
