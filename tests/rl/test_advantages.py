"""GAE and V-trace beside their definitions as sums, in float64."""

from __future__ import annotations

import pytest
import torch

from evcl.rl import Path, gae, vtrace

T, B = 7, 5


@pytest.fixture
def rollout():
    g = torch.Generator().manual_seed(0)

    def some():
        return torch.randn(T, B, generator=g, dtype=torch.float64)

    terminated = (torch.rand(T, B, generator=g) < 0.2).double()
    cut = (torch.rand(T, B, generator=g) < 0.2).double() * (1 - terminated)
    return Path(some(), terminated, terminated + cut), some(), some(), (0.5 * some()).exp()


def rest(path, t, b):
    """The steps from t to the end of the episode, or of the rollout."""
    for u in range(t, T):
        yield u
        if path.ended[u, b]:
            return


def test_gae_is_the_decayed_sum_of_td_errors(rollout):
    path, values, following, _ = rollout
    found = gae(path, values, following, 0.9, 0.8)
    for t in range(T):
        for b in range(B):
            wanted = 0.0
            for u in rest(path, t, b):
                after = 0.0 if path.terminated[u, b] else following[u, b]
                wanted += (0.9 * 0.8) ** (u - t) * (path.rewards[u, b] + 0.9 * after - values[u, b])
            assert found[t, b] == pytest.approx(float(wanted), abs=1e-12)


def test_vtrace_is_the_sum_of_its_paper(rollout):
    """v_t = V_t + sum_u gamma^(u-t) (prod_{w<u} c_w) delta_u, and A_t = rho_t (r_t + gamma v_{t+1} - V_t)."""
    path, values, following, ratios = rollout
    targets, advantages = vtrace(path, values, following, ratios, 0.9)
    cut = ratios.clamp(max=1.0)
    for b in range(B):
        wanted = torch.zeros(T, dtype=torch.float64)
        for t in range(T):
            weight, total = 1.0, values[t, b].clone()
            for u in rest(path, t, b):
                after = 0.0 if path.terminated[u, b] else following[u, b]
                total += weight * cut[u, b] * (path.rewards[u, b] + 0.9 * after - values[u, b])
                weight = weight * 0.9 * cut[u, b]
            wanted[t] = total
        torch.testing.assert_close(targets[:, b], wanted, rtol=1e-12, atol=1e-12)
        for t in range(T):
            if path.terminated[t, b]:
                later = 0.0
            elif path.ended[t, b] or t == T - 1:
                later = following[t, b]
            else:  # the state after this step is that before the next
                later = following[t, b] + wanted[t + 1] - values[t + 1, b]
            own = cut[t, b] * (path.rewards[t, b] + 0.9 * later - values[t, b])
            assert advantages[t, b] == pytest.approx(float(own), abs=1e-12)


def test_on_policy_vtrace_is_gae_with_decay_1(rollout):
    path, values, following, _ = rollout
    same = torch.ones_like(values)
    same_values = torch.cat([following[:1] * 0 + values[:1], values[1:]])
    targets, _ = vtrace(path, same_values, following, same, 0.9)
    torch.testing.assert_close(targets - same_values, gae(path, same_values, following, 0.9, 1.0))
