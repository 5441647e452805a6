from __future__ import annotations

import pytest
import torch

from evcl.methods import Centred, Pull
from evcl.training import Adam
from evcl.training.adam import fused_update


def test_it_is_torchs_adam_with_a_rate_a_replica(generator):
    start = torch.randn(3, 20, generator=generator, dtype=torch.float64)
    grads = torch.randn(30, 3, 20, generator=generator, dtype=torch.float64)
    grads[:, :, 0] = 0
    rates = [1e-3, 1e-2, 0.3]
    for lr in (torch.tensor(rates, dtype=torch.float64).unsqueeze(1), 0.01):
        ours = start.clone()
        adam = Adam(ours, lr)
        for grad in grads:
            adam.step(grad, torch.empty_like(grad))
        for r in range(3):
            theirs = torch.nn.Parameter(start[r].clone())
            optimiser = torch.optim.Adam([theirs], lr=rates[r] if isinstance(lr, torch.Tensor) else lr)
            for grad in grads:
                theirs.grad = grad[r].clone()
                optimiser.step()
            torch.testing.assert_close(ours[r], theirs.detach(), rtol=1e-12, atol=1e-14)
        assert torch.equal(ours[:, 0], start[:, 0])  # no gradient, no move


@pytest.mark.parametrize("bayesian", [False, True])
def test_the_fused_update_is_the_steps_own(bayesian, generator):
    """What a GPU compiles, against the operations of a CPU, with every part of a pull."""
    draw = lambda: torch.randn(3, 20, generator=generator, dtype=torch.float64)  # noqa: E731
    springs = [Centred(draw().square(), draw().square()) for _ in range(3)]
    lr = torch.tensor([[1e-3], [1e-2], [0.3]], dtype=torch.float64)
    start, pull, scratch = draw(), Pull(*springs), [draw(), draw()]
    fast, slow = Adam(start.clone(), lr), Adam(start.clone(), lr)
    variance = (2 * start).exp() if bayesian else None
    for step in range(1, 6):
        grad = draw()
        count = torch.tensor(float(step))
        parts = [(part.w, part.c) for part in (springs[1:] if bayesian else springs[:1])]
        if bayesian:
            own = (2 * slow.weights).exp()
            wanted = grad * own
            pull.add_log_std_gradient(own, wanted, *scratch)
        else:
            wanted = grad.clone()
            pull.add_mean_gradient(slow.weights, wanted, scratch[0])
        slow.step(wanted, scratch[0])
        fused_update(fast.weights, fast.first, fast.second, count, lr, grad, variance, parts)
    torch.testing.assert_close(fast.weights, slow.weights, rtol=1e-10, atol=1e-12)
    if bayesian:
        torch.testing.assert_close(variance, (2 * slow.weights).exp(), rtol=1e-10, atol=1e-12)
