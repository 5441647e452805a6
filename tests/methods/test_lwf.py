"""Learning without forgetting: its targets and its loss by hand, its training by plain torch, and what it is for."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import skip_init

import evcl
from evcl._core.settings import resolve
from evcl.methods import METHODS, Round, TaskData, teach
from evcl.methods.data import Minibatch
from evcl.methods.teacher import others
from evcl.targets import CATEGORICAL
from evcl.training import Run, learn_stream

F64 = torch.float64
EXAMPLES = 30


def data(head, generator, labels=2):
    x = torch.randn(1, EXAMPLES, 5, generator=generator, dtype=F64)
    return TaskData(x, torch.randint(labels, (1, EXAMPLES), generator=generator), head, task=head)


def made(method, replicas=1, **given):
    """A run with heads of 2 and 3 classes."""
    settings = resolve(method, METHODS[method].known_settings, {"epochs": 4, "batch_size": EXAMPLES, **given})
    run = Run(evcl.nn.mlp(5, [7]), METHODS[method], [settings] * replicas, range(replicas), draw=True, dtype=F64)
    run.add_heads(7, [2, 3])
    return run


def logits(run, x, head, r=0):
    w = {name: view[r] for name, view in run.network.layout.views(run.network.posterior.mean).items()}
    hidden = torch.relu(x @ w["1.weight"].T + w["1.bias"])
    return hidden @ w[f"head {head}.weight"].T + w[f"head {head}.bias"]


def round_of(run, tasks, seen):
    return Round(1, tasks, run.network, run.network.posterior, seen, run.seeds, CATEGORICAL)


def test_the_last_network_s_outputs_on_the_new_inputs_are_the_targets(generator):
    run, task = made("lwf", replicas=2), data(1, generator, 3)
    (lesson,) = teach([task], round_of(run, [task], [0]), 2.0, {0: 1.0})
    assert list(lesson.heads) == [0]
    (said,) = lesson.said
    for r in range(2):
        torch.testing.assert_close(said[r], (logits(run, task.x[0], 0, r) / 2).log_softmax(1))


def test_the_loss_by_hand(generator):
    """strength T^2 mean_b sum_c p*_c (log p*_c - log p_c), at other weights than the teacher's."""
    run, task = made("lwf"), data(1, generator, 3)
    (lesson,) = teach([task], round_of(run, [task], [0]), 3.0, {0: 0.7})
    taught = (logits(run, task.x[0], 0) / 3).softmax(1)
    moved = run.network.posterior.map(lambda t: t + 0.1 * torch.randn(t.shape, generator=generator, dtype=F64))
    run.network.posterior = moved
    rows = torch.tensor([[4, 9, 2]])
    p = (logits(run, task.x[0, rows[0]], 0) / 3).softmax(1)
    taught = taught[rows[0]]
    wanted = 0.7 * 9 * (taught * (taught.log() - p.log())).sum(1).mean()
    run.network.bind(moved.mean, None, run.network.layout)
    found = lesson(run.network, Minibatch(*task.take(rows), rows))
    torch.testing.assert_close(found.detach(), wanted.unsqueeze(0))


def test_a_head_that_the_task_uses_itself_is_not_taught(generator):
    run, task = made("lwf"), data(0, generator)
    assert others([task], round_of(run, [task], [0])) == []
    assert teach([task], round_of(run, [task], [0]), 2.0, {}) == []
    both = [made(method) for method in ("lwf", "naive")]
    for one in both:
        for k in range(2):
            one.learn([data(0, torch.Generator().manual_seed(k))])
    assert torch.equal(*(one.network.posterior.mean for one in both))


def test_it_trains_as_plain_torch_does(generator):
    """Whole batches, Adam, a copy of the last network: every weight is the same, those of the old head too."""
    first, second = data(0, generator), data(1, generator, 3)
    run = made("lwf", strength=2.0, distill_temperature=1.5, lr=0.02, lr_schedule="constant")
    run.learn([first])
    sizes = {"1": (5, 7), "head 0": (7, 2), "head 1": (7, 3)}
    network = nn.ModuleDict({name: skip_init(nn.Linear, *size, dtype=F64) for name, size in sizes.items()})
    views = {name: view[0] for name, view in run.network.layout.views(run.network.posterior.mean).items()}
    network.load_state_dict(views)
    teacher = copy.deepcopy(network)
    run.learn([second])

    def say(one, k):
        return one[f"head {k}"](torch.relu(one["1"](second.x[0])))

    adam = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(4):
        adam.zero_grad()
        target = (say(teacher, 0) / 1.5).softmax(1).detach()
        lesson = F.kl_div((say(network, 0) / 1.5).log_softmax(1), target, reduction="batchmean")
        (F.cross_entropy(say(network, 1), second.y[0]) + 2 * 1.5**2 * lesson).backward()
        adam.step()
    for name, view in run.network.layout.views(run.network.posterior.mean).items():
        torch.testing.assert_close(view[0], network.state_dict()[name], rtol=3e-8, atol=1e-10)


def drift(strength):
    """How far the old head's predictions on the new inputs have gone: KL in nats."""
    source, longer = torch.Generator().manual_seed(0), {"epochs": 100, "lr": 0.05}
    run = made("lwf", strength=strength, **longer) if strength else made("naive", **longer)
    run.learn([data(0, source)])
    task = data(1, source, 3)
    before = logits(run, task.x[0], 0).log_softmax(1)
    run.learn([task])
    return float(F.kl_div(logits(run, task.x[0], 0).log_softmax(1), before, reduction="batchmean", log_target=True))


def test_the_stronger_it_is_the_less_old_outputs_move():
    naive, weak, usual, strong = (drift(strength) for strength in (0, 0.1, 1.0, 10.0))
    assert naive > 0.1
    assert naive / 2 > weak > usual > strong
    assert usual < naive / 10
    assert strong < naive / 100


def test_it_forgets_less_than_naive_training():
    """The mean over five seeds after five tasks of split-digits: 97.3 and 87.2 percent where the network is small."""
    benchmark = evcl.benchmarks.get("split-digits")
    final = {}
    for method in ("naive", "lwf"):
        settings = resolve(method, METHODS[method].known_settings, {"epochs": 20, "lr": 0.005})
        run = Run(evcl.nn.mlp(64, [20, 20]), METHODS[method], [settings] * 5, range(5), draw=True)
        final[method] = float(learn_stream(run, [benchmark]).accuracy[:, -1].mean())
    assert final["lwf"] > max(0.95, final["naive"] + 0.05)


@pytest.mark.parametrize("setting", [{"strength": -1}, {"distill_temperature": 0}])
def test_settings_out_of_bounds_are_refused(setting):
    with pytest.raises(evcl.EvclError, match=next(iter(setting))):
        evcl.Learner(evcl.nn.mlp(3, [3]), "lwf", **setting)
