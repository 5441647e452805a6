"""SCoMMER: k-winners and dropout against loops over examples, the stable network against a plain average."""

from __future__ import annotations

import pytest
import small_runs
import torch
import torch.nn.functional as F
from small_runs import EXAMPLES, F64, HIDDEN, INPUTS, assert_weights, first_fit, logits, plain, run_of, task, used_by
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl._core.errors import EvclError
from evcl._core.randomness import generator
from evcl.methods import Minibatch
from evcl.methods.scommer import Dropping
from evcl.nn import KWinners, Part
from evcl.nn.winners import winners

PLAIN = {"winners": 1.0, "heterogeneous": 0.0, "semantic": 1000.0, "warmup": 1.0, "memory": 12}


def by_loop(h, k):
    """One example after another, one unit after another."""
    y = torch.zeros_like(h)
    for r in range(h.shape[0]):
        for b in range(h.shape[1]):
            scores = [float(unit.sum()) for unit in h[r, b]]
            for i in sorted(range(len(scores)), key=lambda i: -scores[i])[: k[r]]:
                y[r, b, i] = h[r, b, i]
    return y


@pytest.mark.parametrize("shape", [(2, 4, 7), (2, 3, 5, 2, 2)])
@pytest.mark.parametrize("k", [(3, 3), (1, 4)])
def test_the_winners_are_the_largest_units_of_each_example(shape, k):
    h = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=F64).relu()
    wanted = by_loop(h, k)
    assert torch.equal(winners(h, k[0] if k[0] == k[1] else torch.tensor(k)), wanted)
    used = wanted.flatten(3).sum(3).gt(0) if h.dim() > 3 else wanted.gt(0)
    assert used.sum(2).amax(1).tolist() <= list(k)


def test_gradients_flow_to_the_winners_alone():
    x = torch.tensor([[3.0, -1.0, 2.0, 1.0]], requires_grad=True)
    KWinners(0.5)(x).sum().backward()
    assert x.grad.tolist() == [[1.0, 0.0, 1.0, 0.0]]


def test_a_network_has_winners_in_place_of_relus_in_training_and_prediction():
    learner = evcl.Learner(evcl.nn.mlp(INPUTS, [10, 8]), "scommer", winners=0.25, epochs=1)
    x = torch.randn(40, INPUTS, generator=torch.Generator().manual_seed(0))
    learner.learn((x, (x[:, 0] > 0).long()))
    network = learner.mean_network()
    assert [type(module) for module in network[0]][2::2] == [KWinners, KWinners]
    assert int((network[0](x) > 0).sum(1).max()) <= 2  # ceil(0.25 * 8)
    torch.testing.assert_close(network(x).softmax(1), learner.predict_proba(x), rtol=1e-5, atol=1e-6)
    unlike = evcl.nn.mlp(INPUTS, [10, 8])
    assert not any(isinstance(module, KWinners) for module in unlike.modules())


def test_a_convolution_too():
    trunk = nn.Sequential(
        skip_init(nn.Conv2d, 1, 6, 3), nn.ReLU(), nn.Flatten(), skip_init(nn.Linear, 24, 8), nn.ReLU()
    )
    learner = evcl.Learner(trunk, "scommer", winners=0.5, epochs=2, init="draw", memory=10)
    x = torch.randn(40, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    for k in range(2):
        learner.learn((x, (x[:, 0, 0, k] > 0).long()))
    inside = learner.mean_network(0)[0][:2](x)
    assert int((inside.flatten(2).sum(2) > 0).sum(1).max()) == 3
    assert learner.state.run.memory.wins[0].shape == (1, 2, 6 + 8)


def test_a_network_without_relus_is_refused():
    with pytest.raises(EvclError, match="this network has none"):
        evcl.Learner(nn.Sequential(skip_init(nn.Linear, 3, 4), nn.Tanh()), "scommer")


def test_without_sparsity_it_is_replay_with_a_teacher_in_plain_torch():
    """Winners 1 and no dropout, in one batch per epoch: the working network, and the stable one, step by step."""
    tasks = [task(0, 0), task(1, 1)]
    given = {**PLAIN, "stable_decay": 0.7, "stable_rate": 1.0, "consistency": 0.4}
    run = run_of("scommer", **given)
    network, stable = plain(run), plain(run)
    run.learn([tasks[0]])
    kept, fit = run.memory.rehearsal.kept[0], first_fit(run, [tasks[1]])
    run.learn([tasks[1]])
    for number, one in enumerate(tasks):
        used = used_by(network, 0) | used_by(network, one.head)
        adam = torch.optim.Adam(used.values(), lr=0.02)
        for i in range(4):
            adam.zero_grad()
            loss = F.cross_entropy(logits(network, one.x[0], one.head), one.y[0])
            if number:
                sizes = [one.n for one in fit.data]
                rows = fit.sampler(sizes, fit.batch, generator(0, "order", 1, i))
                old = rows[rows >= EXAMPLES] - EXAMPLES
                assert len(old) == EXAMPLES
                z = logits(network, kept.x[0][old], 0)
                away = (z - logits(stable, kept.x[0][old], 0).detach()).square().mean()
                loss = 0.5 * (loss + F.cross_entropy(z, kept.y[0][old]) + 0.4 * away)
            loss.backward()
            adam.step()
            a = 0.7 if number else min(0.7, 1 - 1 / (i + 2))
            for name, w in used.items():
                own = dict(stable.named_parameters())[name]
                own.data.mul_(a).add_((1 - a) * w.data)
    assert_weights(run, run.network.posterior.mean, network.state_dict())
    assert_weights(run, run.memory.stable.mean, stable.state_dict())


class Fixed:
    """Noise that is known."""

    def __init__(self, value):
        self.value = value

    def shared(self):
        return self

    def uniform_(self, out):
        return out.copy_(self.value)


def dropping_of(run, base):
    """The dropout of a second round after these counts of wins, and the layer that drops."""
    dropping = Dropping(base, 1, small_runs.round_of(run, [task(0, 0)], 1, []), run.settings)
    dropping.begin(run.network.posterior, Part(run.network.layout, run.network.layout))
    (layer,) = (module for module in run.network.modules() if type(module).__name__ == "KWinnersLayer")
    return dropping, layer


def test_dropout_is_heterogeneous_for_new_classes_and_semantic_for_known_ones():
    run = run_of("scommer", winners=0.5)
    r, units, m = 1, HIDDEN, 5  # 1.1 * ceil(0.5 * 7) = 4.4: five units stay
    base = torch.zeros(r, 4, units, dtype=F64)
    base[0, 1] = torch.tensor([8, 4, 0, 0, 0, 0, 2.0])  # classes 1 and 3 are known, the others are not
    base[0, 3] = torch.tensor([0, 2, 6, 0, 0, 3, 0.0])
    dropping, layer = dropping_of(run, base)
    rows = torch.tensor([[0, 1, 2, EXAMPLES]])
    dropping.show(Minibatch(torch.zeros(1, 4, 5), torch.tensor([[0, 1, 1, 1]]), rows))
    uniform = torch.rand(r, 2, units, generator=torch.Generator().manual_seed(0), dtype=F64)
    layer.weights.noise = Fixed(uniform)
    kept = dropping.drop(torch.ones(1, 4, units, dtype=F64), layer)[0]
    n, used, s = base[0, 1], base[0].sum(0), run.settings
    keys = -s.heterogeneous * used / 8 - (-uniform[0, 0].log()).log()
    drawn = sorted(range(units), key=lambda i: -float(keys[i]))[:m]
    assert kept[0].nonzero().flatten().tolist() == sorted(drawn)
    stays = 1 - torch.exp(-s.semantic * n / 8)
    assert torch.equal(kept[1], (uniform[0, 1] < stays).double())
    assert torch.equal(kept[1], kept[2])
    assert kept[3].tolist() == [1.0] * units  # a kept row


def test_wins_are_counted_per_class_and_for_the_rows_of_the_task_alone():
    run = run_of("scommer", winners=0.3, memory=12)
    for one in (task(0, 0), task(1, 1)):
        run.learn([one])
        network = plain(run)
        h = torch.relu(network["1"](one.x[0]))
        active = winners(h.unsqueeze(0), 3)[0] > 0
        for c in range(2):
            assert torch.equal(run.memory.wins[one.head][0, c], active[one.y[0] == c].sum(0).to(F64))


def test_a_rate_below_1_skips_updates():
    found = []
    for rate in (0.5, 1.0):
        run = small_runs.learned("scommer", [task(0, 0)], **{**PLAIN, "stable_rate": rate, "stable_decay": 0.5})
        found.append(run.memory.stable.mean)
        assert torch.equal(run.predictor(0).mean, run.memory.stable.mean)
        assert not torch.equal(run.memory.stable.mean, run.network.posterior.mean)  # where learning goes on
    assert not torch.allclose(*found)


def test_a_head_that_grows_keeps_the_counts_of_its_classes():
    benchmark = evcl.benchmarks.get("split-digits", tasks=2, scenario="class")
    learner = evcl.Learner(evcl.nn.mlp(64, [20]), "scommer", epochs=2)
    learner.learn(benchmark[0])
    before = learner.state.run.memory.wins[0].clone()
    learner.learn(benchmark[1])
    after = learner.state.run.memory.wins[0]
    assert before.shape == (1, 2, 20)
    assert after.shape == (1, 4, 20)
    assert torch.equal(after[:, :2], before)
