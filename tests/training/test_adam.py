from __future__ import annotations

import pytest
import torch

from evcl.training import Adam


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


def changed(*args, **kwargs):
    raise TypeError("_fused_adam_() got an unexpected keyword argument 'lr'")


@pytest.mark.parametrize("instead", [None, changed])
def test_a_torch_without_its_private_kernel_gives_the_same_numbers(instead, generator, monkeypatch):
    grads = torch.randn(30, 3, 20, generator=generator, dtype=torch.float64)

    def moved():
        adam = Adam(torch.ones(3, 20, dtype=torch.float64), 0.01)
        for grad in grads:
            adam.step(grad, torch.empty_like(grad))
        return adam.state()

    fused = moved()
    monkeypatch.delattr(torch, "_fused_adam_")
    if instead is not None:
        monkeypatch.setattr(torch, "_fused_adam_", instead, raising=False)
    for ours, theirs in zip(moved(), fused, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
