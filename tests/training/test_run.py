"""Replicas against solo runs, the closed form against the reference, joint training, and a loss that is lost."""

from __future__ import annotations

import pytest
import torch

import evcl
from evcl.methods import METHODS
from evcl.randomness import GeneratorNoise, generator
from evcl.settings import resolve
from evcl.training import Run, TaskData

F64 = torch.float64


class Slice:
    """Replica r's share of another source's noise."""

    def __init__(self, source, replicas, r):
        self.source, self.replicas, self.r = source, replicas, r

    def normal(self, shape, like):
        return self.source.normal((self.replicas, *shape[1:]), like)[self.r : self.r + 1]

    def uniform(self, shape, like):
        return self.source.uniform((self.replicas, *shape[1:]), like)[self.r : self.r + 1]


def noise():
    return GeneratorNoise([generator(seed, "test noise") for seed in range(3)])


def convolutional():
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.utils.skip_init(torch.nn.Conv2d, 1, 4, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Flatten(),
        torch.nn.utils.skip_init(torch.nn.Linear, 36, 10),
        torch.nn.ReLU(),
    )


def trained(network, method, given, seeds, source, reference=False, rounds=2):
    """25 steps on each of two tasks of one head, in float64: the posterior, the Fisher and predictions."""
    settings = [resolve(method, METHODS[method].known_settings, {**g, "batch_size": 56, "epochs": 1}) for g in given]
    run = Run(network, METHODS[method], settings, seeds, draw=True, dtype=F64)
    streams = [evcl.benchmarks.get("permuted-digits", seed, 2) for seed in seeds]
    for k in range(rounds):
        x = torch.stack([s[k].train.x for s in streams]).to(F64)
        y = torch.stack([s[k].train.y for s in streams])
        if k == 0:
            run.add_head(run.features(x[0, :1]), 10)
        run.train([TaskData(x, y, 0)], noise=source(k), reference=reference)
    probabilities = run.predict(x[:, :20], 0)
    tensors = run.tensors()
    return {**tensors, "probabilities": probabilities}


@pytest.mark.parametrize("network", ["mlp", "convolutional"])
@pytest.mark.parametrize("method", ["evcl", "ewc", "vcl", "naive", "huber"])
def test_replicas_are_their_solo_runs(method, network):
    """50 steps; each replica has its own seed, data, strength and learning rate; the same noise is handed in."""
    make = convolutional if network == "convolutional" else lambda: evcl.nn.mlp(64, [20, 20])
    given = [{"lr": lr} for lr in (1e-3, 3e-3, 1e-2)]
    if method in ("evcl", "ewc"):
        given = [{**g, "strength": strength} for g, strength in zip(given, (1.0, 100.0, 1e4), strict=True)]
    if method in ("evcl", "vcl"):
        given = [{**g, "init_std": std} for g, std in zip(given, (0.001, 0.01, 0.05), strict=True)]
    together = trained(make(), method, given, [5, 6, 7], lambda k: noise())
    for r in range(3):
        alone = trained(make(), method, given[r : r + 1], [5 + r], lambda k, r=r: Slice(noise(), 3, r))
        for name, found in together.items():
            one = found if name == "used" else found[r : r + 1]
            torch.testing.assert_close(one, alone[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("method", "rounds"), [("evcl", 1), ("vcl", 1), ("ewc", 2)])
def test_the_fast_step_is_the_reference_step(method, rounds):
    """One round where there is a KL: in the second, weights without data rest at the prior, where the reference has a
    rounding error in place of 0, and Adam makes steps of it. The terms' own tests compare those gradients.
    """
    runs = [
        trained(evcl.nn.mlp(64, [20]), method, [{}], [3], lambda k: None, reference=reference, rounds=rounds)
        for reference in (False, True)
    ]
    for name in runs[0]:
        torch.testing.assert_close(runs[0][name], runs[1][name], rtol=1e-7, atol=1e-9)


def test_the_order_of_batches_is_a_function_of_seed_task_and_epoch():
    one, two, other = (
        torch.randperm(50, generator=generator(*k)) for k in ((0, "order", 1, 2),) * 2 + ((0, "order", 2, 1),)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_an_idle_head_does_not_move():
    benchmark = evcl.benchmarks.get("split-digits")
    learner = evcl.EVCL(evcl.nn.mlp(64, [20]), epochs=2)
    learner.learn(benchmark[0])

    def heads():
        network = learner._run.network
        views = [network.layout.views(t) for t in (network.posterior.mean, network.posterior.log_std)]
        return [v[name].clone() for v in views for name in ("head 0.weight", "head 0.bias")]

    before = heads()
    learner.learn(benchmark[1])
    assert all(torch.equal(a, b) for a, b in zip(before, heads(), strict=True))


def test_joint_training_sends_each_example_through_its_own_head():
    """Two tasks with the same inputs and opposite labels: only the heads can tell them apart."""
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    settings = resolve("joint", METHODS["joint"].known_settings, {"epochs": 60, "lr": 0.01})
    run = Run(evcl.nn.mlp(6, [10]), METHODS["joint"], [settings], [0], draw=True)
    for _ in range(2):
        run.add_head(10, 2)
    run.train([TaskData(x[None], y[None], 0), TaskData(x[None], 1 - y[None], 1)])
    for head, labels in ((0, y), (1, 1 - y)):
        accuracy = (run.predict(x[None], head)[0].argmax(1) == labels).float().mean()
        assert accuracy > 0.97


def test_a_lost_loss_stops_says_where_and_keeps_the_last_good_state():
    benchmark = evcl.benchmarks.get("split-digits")
    learner = evcl.EWC(evcl.nn.mlp(64, [20]), epochs=1)
    learner.learn(benchmark[0])
    before = {name: t.clone() for name, t in learner._run.tensors().items()}
    huge = torch.full((8, 64), 3e38)
    with pytest.raises(evcl.Diverged, match=r"task 'bad': the loss is not a number in epoch 1 of 3 .*smaller lr"):
        learner.learn((huge, [0, 1] * 4), task="bad", epochs=3)
    assert learner.tasks == ("0/1",)
    after = learner._run.tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)
    learner.learn(benchmark[1])  # and it goes on
    assert learner.tasks == ("0/1", "2/3")


def test_an_interrupt_leaves_the_learner_as_it_was():
    benchmark = evcl.benchmarks.get("split-digits")
    learner = evcl.EVCL(evcl.nn.mlp(64, [20]), epochs=2)

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.learn(benchmark[0], on_epoch=stop)
    assert learner.tasks == ()
    fresh = evcl.EVCL(evcl.nn.mlp(64, [20]), epochs=2)
    for one in (learner, fresh):
        one.learn(benchmark[0])
    a, b = learner._run.tensors(), fresh._run.tensors()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_memory_and_buffers_do_not_grow_with_tasks():
    benchmark = evcl.benchmarks.get("permuted-digits", tasks=4)
    learner = evcl.EVCL(evcl.nn.mlp(64, [10]), epochs=1)
    sizes = []
    for task in benchmark:
        learner.learn(task)
        sizes.append(sum(t.numel() for t in learner._run.tensors().values()))
    assert len(set(sizes)) == 1
