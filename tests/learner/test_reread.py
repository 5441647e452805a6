"""Loaders that are read anew in each epoch, and gradients that are computed in parts."""

from __future__ import annotations

import signal

import pytest
import torch
from checks import refused, same
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evcl

Y = torch.arange(300) % 3
X = torch.randn(300, 6, generator=torch.Generator().manual_seed(0)) + Y[:, None]


def network():
    module, source = nn.Sequential(nn.utils.skip_init(nn.Linear, 6, 16), nn.Tanh()), torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data.normal_(0, 0.4, generator=source)
    return module


def made(method="evcl", **options):
    return evcl.Learner(network(), method, **{"epochs": 4, "batch_size": 30, **options})


def loader(x=X, y=Y, batch=50, **options):
    return DataLoader(TensorDataset(x, y), batch, **options)


def mean(learner):
    return learner.state.run.network.posterior.mean


@pytest.mark.parametrize("method", ["naive", "evcl", "vcl", "ewc", "si", "er", "agem", "lwf", "kfac-evcl", "vogn"])
def test_a_loader_that_fits_in_memory_is_learned_as_if_it_were_read_once(method):
    """In the second task, EVCL distils, and er and agem replay."""
    whole, learner = made(method), made(method)
    for k in range(2):
        whole.learn((X + k, Y))
        learner.learn(loader(X + k), reread=True)
    assert [epoch.nll for epoch in learner.history["1"]] == pytest.approx([epoch.nll for epoch in whole.history["1"]])
    assert same(learner, whole)


@pytest.mark.parametrize("method", ["evcl", "er", "lwf"])
def test_a_loader_that_does_not_fit_is_learned_in_parts(method):
    learner = made(method, epochs=15)
    for _ in range(2):
        learner.learn(loader(shuffle=True), reread=80)
    assert learner.measure((X, Y), task=0).accuracy > 0.75
    rows = learner.state.run.memory
    if method == "evcl":
        assert float(rows.rows[0]) == 300  # all examples count, not only those held at a time


class Augmented(Dataset):
    """Counts how often each example is read, and moves it at random each time."""

    def __init__(self):
        self.reads, self.seen = torch.zeros(60, dtype=torch.long), []

    def __len__(self):
        return 60

    def __getitem__(self, i):
        self.reads[i] += 1
        moved = X[i] + torch.randn(6)
        self.seen.append(float(moved[0]))
        return moved, int(Y[i])


def test_a_data_set_is_read_anew_in_each_epoch_and_the_seed_decides_what_it_draws():
    before = torch.random.get_rng_state()
    means = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        data, learner = Augmented(), made(epochs=3)
        learner.learn(data, reread=True)
        assert data.reads.tolist() == [4] * 60  # once before the first epoch
        assert len(set(data.seen)) == 4 * 60
        means.append(mean(learner))
    torch.random.set_rng_state(before)
    assert torch.equal(*means)


def test_workers_read_the_same():
    alone, learner = made(epochs=2), made(epochs=2)
    alone.learn(loader(), reread=True)
    learner.learn(loader(num_workers=2), reread=True)
    assert torch.equal(mean(learner), mean(alone))


def test_the_sample_is_uniform_and_has_every_class():
    y = torch.zeros(1000, dtype=torch.long)
    y[-1] = 1  # a class of one example, which may not be in the sample
    learner = made("naive", epochs=1)
    learner.learn(loader(torch.arange(1000.0)[:, None].expand(-1, 6) / 1000, y), reread=200)
    assert learner.classes() == (0, 1)
    density = learner.state.session.density
    assert abs(float(density.mean.mean()) - 0.5) < 0.08


class Interrupt(evcl.Callback):
    def end_epoch(self, epoch):
        if epoch.epoch == 2:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupted_task_resumes(tmp_path):
    whole, learner, again = (made(epochs=5) for _ in range(3))
    whole.learn(loader(shuffle=True), reread=100)
    with pytest.raises(KeyboardInterrupt):
        learner.learn(loader(shuffle=True), reread=100, checkpoint=tmp_path / "c", callbacks=[Interrupt()])
    again.learn(loader(shuffle=True), reread=100, checkpoint=tmp_path / "c")
    assert len(again.history["0"]) < 5
    assert torch.equal(mean(again), mean(whole))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (iter(loader()), {}, "an iterator can be read only once: pass the DataLoader itself"),
        ((X, Y), {}, "reread needs a DataLoader or a torch Dataset, not tuple"),
        ([], {}, "there are no batches to read"),
        (loader(), {"validation": 0.1}, "a fraction cannot be held out: pass validation data of their own"),
        (loader(), {"class_weight": "balanced"}, "reread cannot be used with class_weight"),
        (loader(), {"reread": -3}, "reread must be a whole number of at least 1"),
        ([(X[:50], Y[:50]), (X[:50, :5], Y[:50])], {}, "x is (5,) per example, but in the first batch it is (6,)"),
    ],
    ids=range(7),
)
def test_what_cannot_be_read_anew_is_refused_in_one_line(data, options, message):
    learner = made(epochs=1)
    with refused(message):
        learner.learn(data, **{"reread": True, **options})
    assert not learner.tasks


@pytest.mark.parametrize(("method", "options"), [("vcl", {"coreset": "random"}), ("derpp", {}), ("evcl-er", {})])
def test_a_method_that_needs_all_rows_at_once_says_so(method, options):
    learner = made(method, epochs=1, **options)
    if not options:  # in a first task, there is nothing to replay
        learner.learn((X, Y))
    with pytest.raises(evcl.EvclError, match="reread"):
        learner.learn(loader(), reread=True)


# --- gradients in parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["naive", "ewc", "er", "agem", "lwf", "si", "ekf"])
@pytest.mark.parametrize("chain", [False, True])
def test_a_gradient_in_parts_is_that_of_the_whole_batch(method, chain):
    """Point weights draw nothing, so the parts add up to the same step; 50 rows in 4 parts are 13, 13, 13 and 11."""

    def learned(parts):
        module = evcl.nn.mlp(6, [16]) if chain else network()
        learner = evcl.Learner(module, method, epochs=2, batch_size=50, accumulate=parts, dtype=torch.float64)
        for k in range(2):
            learner.learn((X[:180] + k, Y[:180]))
        return mean(learner)

    torch.testing.assert_close(learned(4), learned(1), rtol=1e-7, atol=1e-9)


def test_a_filter_that_needs_each_examples_gradient_says_so():
    learner = evcl.Learner(network(), "ekf", rank=2, accumulate=2)
    with pytest.raises(evcl.EvclError, match="needs all examples of a step at once: leave out accumulate"):
        learner.learn((X, Y))


def test_parts_bound_the_rows_that_go_through_the_network_at_once():
    sizes = []

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = network()

        def forward(self, x):
            sizes.append(len(x))
            return self.body(x)

    learner = evcl.EVCL(Counting(), epochs=1, batch_size=60, accumulate=4, fisher_examples=10, tempering=0.01)
    learner.learn((X[:60], Y[:60]))
    assert 15 in sizes
    whole = evcl.EVCL(network(), epochs=30, batch_size=60)
    parts = evcl.EVCL(network(), epochs=30, batch_size=60, accumulate=4)
    for one in (whole, parts):
        one.learn((X, Y))
    assert parts.measure((X, Y)).accuracy == pytest.approx(whole.measure((X, Y)).accuracy, abs=0.05)


def test_accumulate_is_saved_and_checked(tmp_path):
    learner = made(accumulate=3, epochs=1)
    learner.learn((X, Y))
    learner.save(tmp_path / "model.safetensors")
    assert evcl.load(tmp_path / "model.safetensors", network()).state.run.accumulate == 3
    with pytest.raises(evcl.EvclError, match="accumulate must be a whole number of at least 1"):
        made(accumulate=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("method", ["naive", "evcl"])
def test_on_a_gpu(method):
    """Reread steps run eagerly there, those in parts as a CUDA graph. Only EVCL remembers the first task."""
    for options, data, more in (({}, loader(shuffle=True), {"reread": 100}), ({"accumulate": 3}, (X, Y), {})):
        learner = made(method, device="cuda", epochs=20, **options)
        for _ in range(2):
            learner.learn(data, **more)
        assert learner.measure((X, Y), task=0 if method == "evcl" else 1).accuracy > 0.75
