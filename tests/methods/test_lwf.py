"""Learning without forgetting: its targets and its loss by hand, its training by plain torch, and what it is for."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from small_runs import adam, assert_weights, learned, logits, plain, round_of, run_of, task

from evcl.methods import teach
from evcl.methods.teacher import others

made = partial(run_of, heads=(2, 3))


def data(head):
    """For a head of 2 classes, or of 3."""
    return task(head, head, classes=2 + head)


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
