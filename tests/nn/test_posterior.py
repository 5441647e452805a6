from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from evcl.nn import Gaussian, Layout


def gaussian(generator, r=3, p=7):
    return Gaussian(*(torch.randn(r, p, generator=generator, dtype=torch.float64) for _ in range(2)))


def test_kl_is_the_one_of_torch_distributions(generator):
    q, p = gaussian(generator), gaussian(generator)
    expected = kl_divergence(Normal(q.mean, q.log_std.exp()), Normal(p.mean, p.log_std.exp())).sum(1)
    torch.testing.assert_close(q.kl(p), expected, rtol=1e-12, atol=1e-12)


def test_kl_with_itself_is_zero(generator):
    q = gaussian(generator)
    torch.testing.assert_close(q.kl(q), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_snapshot_does_not_move(generator):
    q = gaussian(generator)
    snapshot = q.snapshot()
    before = snapshot.mean.clone(), snapshot.log_std.clone()
    q.mean += 1
    q.log_std += 1
    assert torch.equal(snapshot.mean, before[0])
    assert torch.equal(snapshot.log_std, before[1])


shapes = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


@given(shapes, st.integers(1, 3), st.data())
def test_gather_and_scatter_are_inverse(shapes, r, data):
    layout = Layout({f"w{i}": shape for i, shape in enumerate(shapes)})
    names = data.draw(st.sets(st.sampled_from(sorted(layout.shapes)), min_size=1))
    flat = torch.arange(r * layout.size, dtype=torch.float64).view(r, -1)
    part = layout.part(names)
    taken = layout.gather(flat, part)
    for name, view in part.views(taken).items():
        assert torch.equal(view, layout.views(flat)[name])
    changed = flat.clone()
    layout.scatter_(changed, part, -taken)
    for name, view in layout.views(changed).items():
        assert torch.equal(view, layout.views(flat)[name] * (-1 if name in names else 1))


def test_growing_keeps_what_was_there():
    old = Layout({"trunk": (2, 2), "head": (2, 3), "other": (2,)})
    new = Layout({"trunk": (2, 2), "head": (4, 3), "other": (2,), "more": (1,)})
    flat = torch.arange(1.0, old.size + 1).view(1, -1)

    found = new.views(old.extending(new)(flat, -torch.ones(1, new.size)))
    before = old.views(flat)
    assert torch.equal(found["trunk"], before["trunk"])
    assert torch.equal(found["other"], before["other"])
    assert torch.equal(found["head"][:, :2], before["head"])
    assert (found["head"][:, 2:] == -1).all()
    assert (found["more"] == -1).all()
