"""Learning without forgetting: its targets and its loss by hand, its training by plain torch, and what it is for."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from small_runs import F64, adam, assert_weights, learned, logits, plain, round_of, run_of, task

from evcl.methods import teach
from evcl.methods.data import Minibatch
from evcl.methods.teacher import others

made = partial(run_of, heads=(2, 3))


def data(head):
    """For a head of 2 classes, or of 3."""
    return task(head, head, classes=2 + head)


def test_the_last_network_s_outputs_on_the_new_inputs_are_the_targets():
    run, one = made("lwf", replicas=2), data(1)
    (lesson,) = teach([one], round_of(run, [one], seen=[0]), 2.0, {0: 1.0})
    assert list(lesson.heads) == [0]
    (said,) = lesson.said
    for r in range(2):
        torch.testing.assert_close(said[r], (logits(plain(run, r), one.x[0]) / 2).log_softmax(1).detach())


def test_the_loss_by_hand(generator):
    """strength T^2 mean_b sum_c p*_c (log p*_c - log p_c), at other weights than the teacher's."""
    run, one, rows = made("lwf"), data(1), torch.tensor([[4, 9, 2]])
    (lesson,) = teach([one], round_of(run, [one], seen=[0]), 3.0, {0: 0.7})
    taught = (logits(plain(run), one.x[0, rows[0]]) / 3).softmax(1)
    moved = run.network.posterior.map(lambda t: t + 0.1 * torch.randn(t.shape, generator=generator, dtype=F64))
    run.network.posterior = moved
    p = (logits(plain(run), one.x[0, rows[0]]) / 3).softmax(1)
    wanted = 0.7 * 9 * (taught * (taught.log() - p.log())).sum(1).mean()
    run.network.bind(moved.mean, None, run.network.layout)
    found = lesson(run.network, Minibatch(*one.take(rows), rows))
    torch.testing.assert_close(found.detach(), wanted.detach().unsqueeze(0))


def test_a_head_that_the_task_uses_itself_is_not_taught():
    run, one = made("lwf"), data(0)
    assert others([one], round_of(run, [one], seen=[0])) == []
    assert teach([one], round_of(run, [one], seen=[0]), 2.0, {}) == []
    both = [learned(method, [task(0, 0), task(1, 0)]).network.posterior.mean for method in ("lwf", "naive")]
    assert torch.equal(*both)


def test_it_trains_as_plain_torch_does():
    """Whole batches, Adam, a copy of the last network: every weight is the same, those of the old head too."""
    run, second = made("lwf", strength=2.0, distill_temperature=1.5), data(1)
    run.learn([data(0)])
    network = plain(run)
    teacher = copy.deepcopy(network)
    run.learn([second])

    def loss():
        target = (logits(teacher, second.x[0]) / 1.5).softmax(1).detach()
        lesson = F.kl_div((logits(network, second.x[0]) / 1.5).log_softmax(1), target, reduction="batchmean")
        return F.cross_entropy(logits(network, second.x[0], 1), second.y[0]) + 2 * 1.5**2 * lesson

    adam(dict(network.named_parameters()), loss)
    assert_weights(run, run.network.posterior.mean, dict(network.named_parameters()))


def drift(strength):
    """How far the old head's predictions on the new inputs have gone: KL in nats."""
    given = {"epochs": 100, "lr": 0.05, "lr_schedule": "cosine", **({"strength": strength} if strength else {})}
    run, one = made("lwf" if strength else "naive", **given), data(1)
    run.learn([data(0)])
    before = logits(plain(run), one.x[0]).log_softmax(1)
    run.learn([one])
    after = logits(plain(run), one.x[0]).log_softmax(1)
    return float(F.kl_div(after, before, reduction="batchmean", log_target=True).detach())


def test_the_stronger_it_is_the_less_old_outputs_move():
    naive, weak, usual, strong = (drift(strength) for strength in (0, 0.1, 1.0, 10.0))
    assert naive > 0.1
    assert naive / 2 > weak > usual > strong
    assert usual < naive / 10
    assert strong < naive / 100
