from __future__ import annotations

import copy
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import blobs, refused, same, state
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import evcl
from evcl.training import predict


def small(method=evcl.EVCL, **options):
    return method(evcl.nn.mlp(4, [16]), **{"epochs": 20, "lr": 0.01, **options})


# --- the documented way --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "given", "name"),
    [
        ("evcl", {}, "evcl"),
        ("evcl", {"memory": 20}, "evcl-er"),
        ("vcl", {"memory": 20}, "vcl-er"),
        ("naive", {"memory": 20}, "er"),
        ("vcl", {"coreset": "kcenter"}, "vcl-kcenter-coreset"),
    ],
)
def test_a_learner_is_called_what_its_settings_compose(method, given, name):
    assert repr(evcl.Learner(evcl.nn.mlp(4, [5]), method, **given)) == f"Learner({name!r}, seed=0, 0 tasks learned)"


@pytest.mark.parametrize("labels", [(3, 8), ("cat", "dog"), (-1, 1), (True, False)])
def test_original_labels_come_back(labels):
    x, y = blobs(labels)
    learner = small(epochs=100)
    assert learner.learn((x, y)) == "0"
    assert learner.learn((x, y), task="again") == "again"
    found = learner.predict(x, task=0)
    assert (found == y).mean() > 0.9
    assert isinstance(found, np.ndarray)
    assert learner.classes("again") == tuple(sorted(np.unique(y).tolist()))
    p = learner.predict_proba(x, task="again")
    assert isinstance(p, np.ndarray)
    assert p.sum(1) == pytest.approx(np.ones(len(x)))


def test_tensors_in_tensors_out():
    x, y = blobs()
    learner = small()
    learner.learn((torch.from_numpy(x), torch.from_numpy(y)))
    assert isinstance(learner.predict(torch.from_numpy(x)), torch.Tensor)
    assert isinstance(learner.predict_proba(torch.from_numpy(x).double()), torch.Tensor)
    assert isinstance(learner.predict(x.tolist()), np.ndarray)


@pytest.mark.filterwarnings("ignore::evcl.ForgettingWarning")
def test_a_head_grows_with_new_labels_and_keeps_what_it_knew():
    x, y = blobs((0, 1), n=200)
    more = (x + np.float32(8), np.full(len(x), 7))
    learner = small(evcl.EWC, strength=1e3)
    learner.learn((x, y), task="jan")
    old = learner.mean_network()[1].weight.detach().clone()
    learner.learn(more, task="feb", head="jan", epochs=1)
    assert learner.classes() == (0, 1, 7)
    assert learner.predict_proba(x).shape == (200, 3)
    assert learner.mean_network()[1].weight.shape == (3, 16)
    assert (learner.mean_network()[1].weight[:2] - old).abs().max() < 0.1
    learner.learn((np.concatenate([x, more[0]]), np.concatenate([y, more[1]])), head="feb")
    assert (learner.predict(more[0]) == 7).mean() > 0.9


def test_prediction_is_fixed_and_each_example_for_itself():
    x, y = blobs(n=50)
    learner = small(init_std=0.1)
    learner.learn((x, y))
    p = learner.predict_proba(x)
    assert np.array_equal(p, learner.predict_proba(x))
    alone = np.concatenate([learner.predict_proba(x[i : i + 1]) for i in range(len(x))])
    np.testing.assert_allclose(alone, p, atol=1e-6)
    np.testing.assert_allclose(learner.predict_proba(x[::-1].copy())[::-1], p, atol=1e-6)


def test_prediction_advances_no_generator():
    learners = [small() for _ in range(2)]
    for i, learner in enumerate(learners):
        learner.learn(blobs(seed=1))
        if i:
            learner.predict_proba(blobs(seed=1)[0])
        learner.learn(blobs(seed=2))
    assert same(*learners)


def test_kept_draws_follow_the_posterior():
    x, y = blobs(n=40)
    learner = small(init_std=0.1, epochs=1)
    learner.learn((x, y))
    before = learner.predict_proba(x)
    learner.state.run.network.posterior.mean.mul_(0.5)
    assert not np.allclose(learner.predict_proba(x), before)
    learner.learn((x, 1 - y), head="0")
    run = learner.state.run
    fresh = predict.weight_draws(run.network, run.structured, run.seeds, run.settings.predict_samples, [0])
    assert all(torch.equal(a, b) for a, b in zip(run.draws([0]), fresh, strict=True))


def test_torchs_own_precision_settings_do_no_harm():
    """A processor with matrix units for bf16 follows the setting, so its results differ by the rounding of bf16."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    learners = [small(epochs=1) for _ in range(2)]
    learners[0].learn((X, Y))
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        learners[1].learn((X, Y))
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    plain, other = (learner.predict_proba(X) for learner in learners)
    np.testing.assert_allclose(other, plain, atol=0.05)


def test_a_large_model_is_loaded_as_a_small_one_is(tmp_path):
    """Its weights have no memory until they are read."""
    x, y = blobs(n=40)
    learner = evcl.EVCL(evcl.nn.mlp(4, [520, 520]), epochs=1)
    learner.learn((x, y))
    learner.save(tmp_path / "model.safetensors")
    assert np.array_equal(evcl.load(tmp_path / "model.safetensors").predict_proba(x), learner.predict_proba(x))


def test_threads_make_the_noise_of_a_prediction_in_its_order():
    slow_first = {0: 0.02, 1: 0.01}

    def make(i):
        time.sleep(slow_first.get(i, 0.0))
        return torch.tensor(i)

    for count in (0, 1, predict.NOISE_THREADS, 3 * predict.NOISE_THREADS + 1):
        assert [int(one) for one in predict.ahead(make, count)] == list(range(count))
    some = predict.ahead(make, 100)
    assert int(next(some)) == 0
    some.close()  # a caller that needs no more leaves no thread at work
    assert not any(thread.name.startswith("evcl-draws") for thread in threading.enumerate())


def test_more_draws_average_more_weights():
    x, y = blobs(n=40)
    found = []
    for draws in (1, 2):
        learner = small(init_std=0.3, predict_samples=draws)
        learner.learn((x, y), epochs=1)
        found.append(learner.predict_proba(x))
        assert len(list(learner.state.run.draws([0]))) == draws
    assert not np.allclose(found[0], found[1])


def test_the_mean_network_is_plain_and_ends_in_the_head():
    x, y = blobs()
    learner = small(evcl.EWC)
    learner.learn((x, y))
    plain = learner.mean_network()
    assert {type(m) for m in plain.modules()} <= {nn.Sequential, evcl.nn.MLP, nn.Flatten, nn.Linear, nn.ReLU}
    with torch.no_grad():
        p = plain(torch.from_numpy(x)).softmax(1).numpy()
    np.testing.assert_allclose(p, learner.predict_proba(x), atol=1e-6)
    learner.learn((x, y))
    for task, message in (
        ((), "there are 2 heads: choose a task, one of 0, 1"),
        (("nope",), "unknown task 'nope'; known: 0, 1"),
    ):
        with refused(message):
            learner.mean_network(*task)


def test_a_network_of_ones_own_of_any_shape():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            make = torch.nn.utils.skip_init
            self.conv, self.out = make(nn.Conv2d, 1, 4, 3), make(nn.Linear, 4, 8)

        def forward(self, x):
            return self.out(self.conv(x).relu().mean((2, 3))).relu()

    source = torch.Generator().manual_seed(0)
    x = torch.randn(80, 1, 6, 5, generator=source)
    y = (torch.arange(80) % 2).long()
    x[y == 1] *= 3
    learner = evcl.EVCL(Net(), init="draw", epochs=60, lr=0.01, dtype=torch.float64)
    learner.learn((x, y))
    assert (learner.predict(x) == y).float().mean() > 0.8
    assert learner.predict_proba(torch.randn(2, 1, 9, 9, generator=source)).dtype == torch.float64


@pytest.mark.parametrize("method", ["predict", "predict_proba", "predictions"])
@pytest.mark.parametrize("task", [0, "infer"])
def test_probabilities_are_numbers_or_an_error(method, task):
    learner = evcl.Naive(evcl.nn.mlp(4, [50, 50, 50]), epochs=1)
    learner.learn(blobs())
    x = blobs()[0][:5]
    assert len(getattr(learner, method)(x, task)) > 0
    x[3:] = 1e38, -3e38, 2e38, -1e38
    with pytest.raises(evcl.EvclError, match=r"^example 3: its probabilities are not finite"):
        getattr(learner, method)(x, task)


# --- save and load -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    learner = small()
    learner.learn(blobs(("a", "b")), task="first")
    learner.learn(blobs((3, 4)), task="second")
    learner.save(tmp_path / "m.safetensors")
    return learner, tmp_path / "m.safetensors"


@pytest.mark.filterwarnings("ignore::evcl.ForgettingWarning")
def test_a_saved_file_holds_no_code_and_everything_else(saved):
    learner, path = saved
    assert not [p for p in path.parent.iterdir() if p != path]  # no temporary left
    tensors = load_file(path)
    assert set(tensors) == {
        *("account.fishers", "account.places"),
        "posterior.mean", "posterior.log_std", "memory/prior/mean", "memory/prior/log_std", "memory/importance",
        "memory/used", "memory/classes/classes/0", "memory/classes/classes/1", "memory/classes/common/centre",
        "memory/classes/common/scale", "memory/classes/common/scatter", "memory/classes/common/nll",
        "memory/classes/common/squares", "memory/rows/0", "memory/rows/1", "memory/beta/-1", "memory/beta/0",
        "memory/beta/1", *(f"memory/factors/{one}.weight/{k}" for one in ("1", "head 0", "head 1") for k in (0, 1)),
        "density.about", "density.mean", "density.variance", "density.rows", "density.low", "density.high",
    }  # fmt: skip
    with safe_open(path, framework="pt") as file:
        description = json.loads(file.metadata()["evcl"])
    assert description["heads"] == [["first", ["a", "b"]], ["second", [3, 4]]]
    assert description["tasks"] == [["first", "first"], ["second", "second"]]
    assert description["settings"] == dict(learner.settings)
    back = evcl.load(path)
    x = blobs()[0]
    assert back.predict(x, "first").tolist() == learner.predict(x, "first").tolist()
    back.learn(blobs(("a", "c")), head="first")
    assert back.classes("first") == ("a", "b", "c")


def test_a_network_of_ones_own_is_handed_in_and_checked(tmp_path):
    def net(width=5):
        return nn.Sequential(torch.nn.utils.skip_init(nn.Linear, 4, width), nn.ReLU())

    learner = evcl.EVCL(net(), init="draw", epochs=2)
    learner.learn(blobs())
    learner.save(tmp_path / "m")
    with pytest.raises(evcl.EvclError, match=r"your own network: pass it as load\(path, network=...\)"):
        evcl.load(tmp_path / "m")
    back = evcl.load(tmp_path / "m", network=net())
    assert np.array_equal(back.predict_proba(blobs()[0]), learner.predict_proba(blobs()[0]))
    with pytest.raises(evcl.EvclError, match=r"the network does not fit the file: 0\.bias"):
        evcl.load(tmp_path / "m", network=net(6))


def rewritten(path, change):
    with safe_open(path, framework="pt") as file:
        description = json.loads(file.metadata()["evcl"])
    tensors = load_file(path)
    change(description, tensors)
    save_file(tensors, path, {"evcl": json.dumps(description)})


@pytest.mark.parametrize(
    "change",
    [
        lambda d, t: d.pop("heads"),
        lambda d, t: d.update(format=99),
        lambda d, t: d.update(heads="x"),
        lambda d, t: d.update(seed=-4),
        lambda d, t: d.update(rounds="x"),
        lambda d, t: d["heads"][0].__setitem__(1, ["a", "a"]),
        lambda d, t: d["heads"][0].__setitem__(1, [None, "a"]),
        lambda d, t: d["settings"].update(device="cpu"),
        lambda d, t: t["memory/importance"].fill_(-1),
        lambda d, t: t["memory/used"].fill_(1.5),
        lambda d, t: t.update({"kept.more": torch.zeros(1)}),
        lambda d, t: d.update(method="gone"),
        lambda d, t: d.update(dtype="torch.int8"),
        lambda d, t: d.update(features=10**12),
        lambda d, t: d.update(tasks=[["a", "nowhere"]]),
        lambda d, t: d["mlp"].update(hidden=[10**9]),
        lambda d, t: d["mlp"].update(inputs=None),
        lambda d, t: d["settings"].update(strength=-1),
        lambda d, t: t.pop("memory/importance"),
        lambda d, t: t.update({"memory/used": t["memory/used"][:, :-1].clone()}),
        lambda d, t: t.update({"posterior.mean": t["posterior.mean"] * torch.nan}),
        lambda d, t: t.update({"posterior.mean": t["posterior.mean"].half()}),
        lambda d, t: t.update({"memory/tuned/mean": torch.zeros(1, 3)}),  # a copy, of a method without coresets
    ],
)
def test_a_damaged_file_is_one_clear_line(saved, change):
    path = saved[1]
    rewritten(path, change)
    with refused(f"cannot load {path}: "):
        evcl.load(path)


def test_a_truncated_or_foreign_file_is_one_clear_line(saved, tmp_path):
    path = saved[1]
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(evcl.EvclError, match="cut short or not a safetensors file"):
            evcl.load(path)
    path.write_bytes(b"\x80\x05not a model" * 50)
    with pytest.raises(evcl.EvclError, match="not a safetensors file"):
        evcl.load(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(evcl.EvclError, match="was not saved by evcl"):
        evcl.load(path)
    with pytest.raises(evcl.EvclError, match="there is no file"):
        evcl.load(tmp_path / "none")
    with pytest.raises(evcl.EvclError, match="cannot write"):
        saved[0].save(tmp_path / "no" / "such" / "folder")


# --- coresets ------------------------------------------------------------------------------------------------------


def test_a_coreset_is_kept_saved_and_predicts(tmp_path):
    learner = small(coreset="kcenter", coreset_size=20, epochs=60)
    first, second = blobs(("a", "b"), seed=1), blobs((3, 4), seed=2)
    learner.learn(first, task="first")
    learner.learn(second, task="second")
    p = learner.predict_proba(first[0], "first")
    run = learner.state.run
    with run.predicting_from(run.network.posterior):  # and not from the copy that was tuned
        assert not np.allclose(learner.predict_proba(first[0], "first"), p, atol=1e-3)
    assert np.array_equal(learner.predict_proba(first[0], "first"), p)
    assert (learner.predict(first[0], "first") == first[1]).mean() > 0.9

    learner.save(tmp_path / "m")
    tensors = load_file(tmp_path / "m")
    for i, (x, y) in enumerate((first, second)):
        kept, places = (tensors[f"memory/kept/{i}/{part}"][0] for part in ("x", "y"))
        rows = [next(r for r in range(len(x)) if np.array_equal(x[r], one)) for one in kept.numpy()]
        assert len(set(rows)) == 20
        assert [sorted(set(y.tolist())).index(label) for label in y[rows].tolist()] == places.tolist()
    back = evcl.load(tmp_path / "m")
    assert np.array_equal(back.predict_proba(first[0], "first"), p)
    for one in (learner, back):
        one.learn(blobs(("a", "c"), seed=3), head="first")  # its head grows, and the coresets' labels stay
    assert learner.classes("first") == ("a", "b", "c")
    assert np.array_equal(*(one.predict_proba(first[0], "first") for one in (learner, back)))


def test_epochs_are_those_of_tuning_too():
    learner = small(coreset="random")
    learner.learn((X, Y), epochs=2)
    heard = [(e.epoch, e.epochs, e.tuning) for e in learner.history["0"]]
    assert heard == [(1, 4, False), (2, 4, False), (3, 4, True), (4, 4, True)]


@pytest.mark.parametrize("method", ["vcl-random-coreset", "random-coreset"])
def test_the_mean_network_is_of_what_predicts(method):
    x, y = blobs(n=100)
    learner = evcl.Learner(evcl.nn.mlp(4, [16]), method, epochs=60, lr=0.03)
    learner.learn((x, y))
    with torch.no_grad():
        p = learner.mean_network()(torch.from_numpy(x)).softmax(1).numpy()
    assert (p.argmax(1) == y).mean() > 0.9
    if method == "random-coreset":
        np.testing.assert_allclose(p, learner.predict_proba(x), atol=1e-6)


def test_coresets_need_inputs_of_one_shape():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.utils.skip_init(nn.Conv2d, 1, 4, 3)

        def forward(self, x):
            return self.conv(x).mean((2, 3))

    learner = evcl.VCL(Net(), init="draw", epochs=1, coreset="random")
    learner.learn((torch.zeros(10, 1, 6, 5), torch.arange(10) % 2), task="small")
    with pytest.raises(evcl.EvclError, match=r"task 'large': coresets need inputs of one shape, but \(1, 9, 9\)"):
        learner.learn((torch.zeros(10, 1, 9, 9), torch.arange(10) % 2), task="large", head="small")
    assert learner.tasks == ("small",)


# --- what is refused -----------------------------------------------------------------------------------------------

X, Y = blobs()


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ((X, Y.astype(float)), {}, "labels are float64, but classes are integers or strings: for numbers, make the"),
        ((X, np.random.default_rng(0).normal(size=len(X))), {}, "likelihood='gaussian'"),
        ((X, np.eye(2)[Y]), {}, "one class per example, not (60, 2)"),
        ((X, Y[:-1]), {}, "there are 60 inputs but 59 labels"),
        ((X, np.zeros(len(X), int)), {}, "at least two classes, but the labels contain only 0"),
        ((X, [None] * len(X)), {}, "64-bit integers or strings"),
        ((X, [0, "a"] * 30), {}, "all of one type"),
        ((X, [0, 2**70] * 30), {}, "64-bit integers"),
        ((X, [[0], [1, 2]]), {}, "labels must be an array"),
        (([[1.0], [1.0, 2.0]], [0, 1]), {}, "inputs must be an array"),
        ((np.where(X > 3, np.inf, X), Y), {}, "NaN or infinity (first in example"),
        ((X[:0], Y[:0]), {}, "the inputs are empty: shape (0, 4)"),
        ((X[:, :3], Y), {}, "the network takes 4 numbers per example, not 3"),
        ((X[:, 0], Y), {}, "inputs must have shape [examples, ...], not (60,)"),
        ((X.astype(str), Y), {}, "inputs must be numbers"),
        ((X.astype(complex), Y), {}, "inputs must be numbers"),
        ("data.csv", {}, "learn takes a Task, a pair (x, y), a torch Dataset or batches (x, y), not str"),
        ((X, Y, Y), {}, "the third part of an item (x, y, task) is its task, but these are several (0, 1)"),
        ((X, Y), {"head": "nothing"}, "unknown task 'nothing'; did"),
        ((X, Y), {"head": 7}, "there is no task 7: only 1 learned so far, numbered from 0"),
        ((X, Y), {"task": "something"}, "'something' is already learned: choose another name"),
        ((X, Y), {"task": "new"}, "a task's name must be text other than 'new' and 'infer', not 'new'"),
        ((X, Y), {"task": 3}, "a task's name must be text other than 'new' and 'infer', not 3"),
        ((X, Y), {"head": [0]}, "a task must be a name or a number, not [0]"),
        ((X, Y), {"epochs": 0}, "epochs must be a whole number of at least 1"),
        ((X, Y), {"epochs": 2.5}, "epochs must be a whole number"),
        ((X, Y.astype(str)), {"head": "something"}, "all integers or all strings"),
        ((X, Y), {"head": None}, "head must be 'new', or the name or number"),
    ],
)
def test_bad_data_is_refused_in_one_line_and_nothing_changes(data, options, message):
    learner = small()
    learner.learn((X, Y), task="something", epochs=1)
    before = state(learner)
    with refused(message):
        learner.learn(data, **options)
    assert learner.tasks == ("something",)
    assert same(learner, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "evlc"}, "unknown method 'evlc'; did you mean 'evcl'?"),
        ({"strenght": 1}, "unknown setting of evcl 'strenght'; did you mean 'strength'?"),
        ({"method": "naive", "strength": 1}, "unknown setting of naive 'strength'"),
        ({"strength": -1}, "strength must be a finite number of at least 0 and at most 1e+12, or auto, not -1"),
        ({"strength": float("nan")}, "strength must be"),
        ({"lr": float("inf")}, "lr must be"),
        ({"lr": 0}, "lr must be a finite number above 0"),
        ({"init_std": "wide"}, "init_std must be"),
        ({"batch_size": True}, "batch_size must be"),
        ({"fisher": "true"}, "fisher must be one of exact, sampled, empirical, not 'true'"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"seed": 10**400}, "seed must be"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        ({"device": "banana"}, "device 'banana' cannot be used here"),
        ({"init_std": 1e-20}, "init_std must be a finite number of at least 1e-08"),
        ({"init": "he"}, "init must be"),
        ({"coreset": "k-center"}, "coreset must be one of none, random, kcenter, not 'k-center'"),
        ({"dtype": torch.float16}, "dtype must be"),
    ],
)
def test_bad_options_are_refused(options, message):
    with refused(message):
        evcl.Learner(evcl.nn.mlp(4, [3]), **options)


def test_bad_questions_are_refused():
    learner = small()
    benchmark = evcl.benchmarks.get("split-digits")
    with pytest.raises(evcl.EvclError, match="nothing has been learned yet"):
        learner.predict(X)
    learner.learn((X, Y), epochs=1)
    learner.learn((X, Y), epochs=1)
    for task, message in ((None, "there are 2 heads"), (2, "no task 2"), (-1, "no task -1"), ("9", "unknown task '9'")):
        with pytest.raises(evcl.EvclError, match=message):
            learner.predict_proba(X, task=task)
    with pytest.raises(evcl.EvclError, match="the network takes 4 numbers per example, not 5"):
        learner.predict(np.zeros((2, 5)), task=0)
    with pytest.raises(evcl.EvclError, match="task '0/1' has not been learned, only 0, 1 so far"):
        learner.evaluate(benchmark)
    with pytest.raises(evcl.EvclError, match="evaluate takes a benchmark or its tasks, not int"):
        learner.evaluate([3])


def test_odd_but_honest_data_is_taken():
    learner = small(epochs=1)
    frozen = X.copy()
    frozen.flags.writeable = False
    for x in (frozen, X.astype(">f4"), X.astype(np.longdouble), X[:, ::-1], X.tolist()):
        learner.learn((x, np.array(Y.tolist(), dtype=object)))
    learner.learn((X[:1], [0]), head="0")
    assert learner.classes(np.int64(0)) == (0, 1)
    small(seed=2**63 - 1)
    assert small(seed=2**53 + 1).seed == 2**53 + 1


def test_odd_paths_are_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learner = small(epochs=1)
    learner.learn((X, Y))
    (tmp_path / "file").write_text("")
    for path in ("", "/", "a\0b", "file/x", "n" * 300, None):
        with pytest.raises(evcl.EvclError, match="cannot write"):
            learner.save(path)
        with pytest.raises(evcl.EvclError, match="there is no file"):
            evcl.load(path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_names_heads_and_numbers_do_not_mix():
    benchmark = evcl.benchmarks.get("permuted-digits")
    learner = evcl.Naive(evcl.nn.mlp(64, [5]), epochs=1)
    learner.learn(benchmark[1])  # its head is called "permutation 0"
    with pytest.raises(evcl.EvclError, match="a head is already called 'permutation 0'"):
        learner.learn(tuple(benchmark[0].train), task="permutation 0")
    with pytest.raises(evcl.EvclError, match="'permutation 2' is already learned"):
        learner.learn_jointly([benchmark[2], benchmark[2]])
    with pytest.raises(evcl.EvclError, match="learn_jointly takes a benchmark or its tasks, not tuple"):
        learner.learn_jointly([(X, Y)])
    assert learner.tasks == ("permutation 1",)
    with pytest.raises(evcl.EvclError, match="evaluate takes a benchmark or its tasks, not int"):
        learner.evaluate(5)


def test_the_mean_network_of_a_single_layer():
    for width in (2, 8):
        learner = evcl.EWC(torch.nn.utils.skip_init(nn.Linear, 4, width), init="draw", epochs=5)
        learner.learn((X, Y))
        with torch.no_grad():
            p = learner.mean_network()(torch.from_numpy(X)).softmax(1).numpy()
        np.testing.assert_allclose(p, learner.predict_proba(X), atol=1e-6)


def test_frozen_layers_and_buffers_are_saved(tmp_path):
    def net(seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
        module[0].requires_grad_(False)
        module[1].running_mean += seed
        return module

    learner = evcl.EVCL(net(1), unsupported="deterministic", epochs=2)
    learner.learn((X, Y))
    learner.save(tmp_path / "m")
    back = evcl.load(tmp_path / "m", network=net(2))
    assert np.array_equal(back.predict_proba(X), learner.predict_proba(X))
    x = torch.from_numpy(X)
    torch.testing.assert_close(back.mean_network()(x), learner.mean_network()(x))


def test_a_forward_that_writes_to_its_input_does_no_harm():
    class Shifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.utils.skip_init(nn.Linear, 4, 5)

        def forward(self, x):
            x -= 0.5
            return self.layer(x).relu_()

    learner = evcl.EVCL(Shifts(), init="draw", epochs=2)
    x = torch.from_numpy(X.copy())
    learner.learn((x, Y))
    first = learner.predict_proba(x)
    assert torch.equal(first, learner.predict_proba(x))
    assert torch.equal(x, torch.from_numpy(X))


def test_a_posterior_that_is_lost_in_the_last_step_is_not_kept():
    learner = small(lr=1.0, std_update="adam", std_lr_scale=1000.0, epochs=1)
    with pytest.raises(evcl.Diverged):
        learner.learn((X, Y))
    assert learner.tasks == ()
    stiff = small(strength=1e12, epochs=1)
    stiff.learn((X, Y))
    stiff.state.run.memory.importance.add_(1e30)
    with pytest.raises(evcl.EvclError, match="task '1': the penalty is infinite"):
        stiff.learn((X, Y))


def test_a_trunk_must_end_in_features():
    with pytest.raises(evcl.EvclError, match=r"must turn 1 inputs into \[1, features\], not \(1, 2, 2\)"):
        evcl.EVCL(nn.Unflatten(1, (2, 2))).learn((X, Y))
    with pytest.raises(evcl.EvclError, match="does not take inputs of shape"):
        evcl.EVCL(nn.Unflatten(1, (3, 2))).learn((X, Y))


@pytest.mark.parametrize(("name", "spread"), [("evcl-own-heads", 0.0), ("vcl-kcenter", None)])
def test_a_model_from_before_there_was_a_setting_goes_on_as_it_was(name, spread):
    with safe_open(Path(__file__).parent / "fixtures" / "models" / f"{name}.safetensors", framework="pt") as file:
        saved, tensors = json.loads(file.metadata()["evcl"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert saved["format"] == 1
    saved["settings"].pop("fisher_spread", None)
    assert evcl.learner.rebuilt(saved, tensors).settings.get("fisher_spread") == spread


@pytest.mark.parametrize(("shift", "scale"), [(5000.0, 2.0), (0.0, 1e-3)])
def test_inputs_on_a_scale_that_networks_hardly_learn_from_are_named(shift, scale):
    with pytest.warns(UserWarning, match=r"the inputs are not scaled \(.*scale each column to mean 0"):
        evcl.EVCL(evcl.nn.mlp(4, [5])).learn(shift + scale * X[:, :4], Y, epochs=1)


def test_a_network_that_scales_its_inputs_is_not_warned_of():
    with torch.random.fork_rng():
        network = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 5), nn.ReLU())
    evcl.EVCL(network).learn(5000 + 2 * X[:, :4], Y, epochs=1)


def test_saving_before_the_first_task_changes_nothing(tmp_path):
    learners = [evcl.EVCL(evcl.nn.mlp(X.shape[1], [5]), seed=3)]
    learners[0].save(tmp_path / "m.safetensors")
    learners.append(evcl.load(tmp_path / "m.safetensors"))
    for learner in learners:
        learner.learn(X, Y, epochs=2)
    assert (learners[0].predict_proba(X) == learners[1].predict_proba(X)).all()


@pytest.mark.parametrize("method", ["evcl", "vcl", "ewc"])
def test_kept_rows_can_be_dropped_again(method):
    learner = evcl.Learner(evcl.nn.mlp(6, [8]), method, epochs=2, seed=0)
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    learner.learn((x, y), "a")
    learner.keep(10).learn((x, y), "b", head="a")
    assert learner.state.run.kept_examples()
    learner.keep(0).learn((x, y), "c", head="a")
    assert not learner.state.run.kept_examples()


def own_trunk(value):
    """A network of the user's own, with these weights."""
    network = nn.Sequential(nn.Linear(6, 8, device="meta"), nn.ReLU()).to_empty(device="cpu")
    for parameter in network.parameters():
        parameter.data.fill_(value)
    return network


@pytest.mark.parametrize("make", [lambda: own_trunk(0.2), lambda: evcl.nn.mlp(6, [8])])
def test_examples_can_be_kept_at_any_time_if_the_prior_is_a_network(make, tmp_path):
    """A learner from a file keeps examples, and learns with them, as one that was never saved."""
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    tasks = [(x, (x[:, k] > 0).long()) for k in range(3)]
    options = {"prior": "network", "init": "network", "epochs": 2}
    learner = evcl.Learner(make(), "evcl", **options)
    learner.learn(tasks[0])
    learner.save(tmp_path / "model")
    own = isinstance(learner.state.plain, evcl.nn.MLP)
    loaded = evcl.load(tmp_path / "model", network=None if own else own_trunk(0.7))
    for each in (learner, loaded):
        each.learn(tasks[1])
        each.keep(10)
        each.learn(tasks[2])
    assert same(learner, loaded)
    assert (learner.predict_proba(x, 0) == loaded.predict_proba(x, 0)).all()


def test_a_file_whose_first_prior_does_not_fit_is_refused(tmp_path):
    learner = evcl.Learner(evcl.nn.mlp(6, [8]), "evcl", prior="network", epochs=1)
    description, tensors = learner.described()
    for value in (torch.zeros(1, 3), torch.full((1, 56), torch.nan)):
        with pytest.raises(evcl.EvclError, match="its first prior must be"):
            evcl.learner.rebuilt(description, {**tensors, "centre": value})
    with pytest.raises(evcl.EvclError, match="prior must be"):
        evcl.learner.rebuilt({**description, "prior": "none"}, tensors)


def test_a_single_row_is_learned_with_a_checkpoint(tmp_path):
    learner = evcl.Learner(evcl.nn.mlp(6, [8]), "naive", epochs=1)
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    learner.learn((x, (x[:, 0] > 0).long()), "a")
    learner.learn((x[:1], [0]), "b", head="a", checkpoint=tmp_path / "checkpoint")
    assert learner.tasks == ("a", "b")


def test_validation_examples_of_another_group_are_left_out():
    learner = evcl.Learner(evcl.nn.mlp(6, [8]), "evcl", epochs=2)
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    learner.learn((x, y), "a")
    learner.learn((x + 3, y + 2), "b", head="a")
    both = torch.cat([x, x + 3]), torch.cat([y, y + 2])
    learner.learn(both, task="c", head="a", validation=both)
    assert learner.tasks == ("a", "b", "c")


def test_a_deep_copy_learns_as_the_learner_does():
    learner = small(epochs=3)
    learner.learn(blobs())
    both = [learner.keep(20), copy.deepcopy(learner).keep(20)]
    for one in both:
        one.learn(blobs(seed=1), head=0)
    ours, theirs = (one.predict_proba(blobs()[0]) for one in both)
    assert np.array_equal(ours, theirs)
    assert both[1].kept == 20
