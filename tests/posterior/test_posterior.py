"""Posteriors as values, compared with dense matrices in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

import evcl
from evcl.posterior import Gaussian, Layout
from evcl.posterior.classes import ClassMeans


def gaussian(generator, r=3, p=7):
    return Gaussian(*(torch.randn(r, p, generator=generator, dtype=torch.float64) for _ in range(2)))


def test_kl_is_the_one_of_torch_distributions(generator):
    q, p = gaussian(generator), gaussian(generator)
    expected = kl_divergence(Normal(q.mean, q.log_std.exp()), Normal(p.mean, p.log_std.exp())).sum(1)
    torch.testing.assert_close(q.kl(p), expected, rtol=1e-12, atol=1e-12)


def dense(q, r=0):
    """The precision and the mean of one replica, as a matrix and a vector."""
    return torch.diag(1 / q.variance()[r]), q.mean[r]


def test_products_draws_and_evidence_are_those_of_dense_matrices(generator):
    before, after, v = gaussian(generator), gaussian(generator), torch.randn(3, 7, generator=generator).double()
    after.log_std = before.log_std - after.log_std.abs()  # rows add precision
    (first, m0), (own, m) = dense(before), dense(after)
    torch.testing.assert_close(after.precision_times(v)[0], own @ v[0])
    torch.testing.assert_close(after.draw(v)[0], m + torch.linalg.cholesky(own).mT.inverse() @ v[0])
    rows = after.since(before)
    start = gaussian(generator)
    with_rows, (wide, at) = start.plus(rows), dense(start)
    precision = wide + own - first
    torch.testing.assert_close(dense(with_rows)[0], precision)
    torch.testing.assert_close(dense(with_rows)[1], precision.inverse() @ (wide @ at + own @ m - first @ m0))
    for left, right in ((with_rows.minus(rows), start), (before.plus(rows), after), (after.minus(rows), before)):
        torch.testing.assert_close(left.mean, right.mean)
        torch.testing.assert_close(left.log_std, right.log_std)
    twice = rows + rows
    torch.testing.assert_close(start.plus(twice).mean, start.plus(rows).plus(rows).mean)


def test_evidence_that_is_not_there_is_not_taken_away(generator):
    before, after = gaussian(generator), gaussian(generator)
    after.log_std = before.log_std - 1
    before.layout = Layout({"a": (3,), "b": (2, 2)})
    with pytest.raises(evcl.EvclError, match="weight 0 of 'a' would be -"):
        before.minus(after.since(before))


# --- classes on fixed features --------------------------------------------------------------------------------------


def class_means(f, y, classes=3):
    """What these rows say about the means of their classes, each statistic by its definition."""
    count = torch.stack([(y == c).sum() for c in range(classes)]).double()
    mean = torch.stack([f[y == c].mean(0) if count[c] else torch.zeros(f.shape[1]).double() for c in range(classes)])
    away = f - mean[y]
    return ClassMeans(count[None], mean[None], (away.T @ away)[None], pseudo=0.4)


def test_rows_of_classes_are_added_and_taken_away_exactly(generator):
    f = torch.randn(60, 4, generator=generator).double() + 3
    y = torch.arange(60) % 2
    y[50:] = 2  # a class that only the new rows have
    old, new, every = class_means(f[:40], y[:40]), class_means(f[40:], y[40:]), class_means(f, y)
    both = old.plus(new)
    for found, wanted in ((both, every), (both.minus(new), old), (both.minus(old), new)):
        for name in ("count", "mean", "scatter"):
            torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    with pytest.raises(evcl.EvclError, match="class 2 would have -10 rows: this evidence is not in there"):
        old.minus(new)
    wide = ClassMeans(new.count / 10, new.mean, new.scatter * 9, new.pseudo)
    with pytest.raises(evcl.EvclError, match="the scatter of its features would have the eigenvalue -"):
        every.minus(wide)


# --- as a user sees it ----------------------------------------------------------------------------------------------


def test_a_learner_shows_its_posterior_by_weight_name():
    digits = evcl.benchmarks.get("split-digits", tasks=2)
    learner = evcl.VCL(evcl.nn.mlp(64, [5]), seed=0, epochs=1, prior_std=0.5)
    learner.learn(digits[0])
    posterior = learner.posterior
    name = next(iter(posterior))
    one = posterior[name]
    assert list(posterior)[-2:] == ["head 0.weight", "head 0.bias"]
    assert len(posterior) == 4
    assert one.mean.shape == one.std.shape == one.draw(8).shape[1:] == (5, 64)
    torch.testing.assert_close(one.precision, 1 / one.std.square())
    assert torch.equal(one.draw(8), one.draw(8))
    assert not torch.equal(one.draw(8), one.draw(8, seed=1))
    torch.testing.assert_close(one.draw(4000).std(0), one.std, rtol=0.15, atol=0)
    prior = torch.distributions.Normal(0.0, 0.5)
    expected = kl_divergence(Normal(one.mean, one.std), prior).sum()
    assert one.kl() == pytest.approx(float(expected), rel=1e-4)
    assert posterior.kl() == pytest.approx(sum(each.kl() for each in posterior.values()))
    one.mean.zero_()
    learner.learn(digits[1])
    assert torch.equal(posterior[name].mean, one.mean)
    assert not torch.equal(learner.posterior[name].mean, one.mean)
    with pytest.raises(evcl.EvclError, match="there are no weights 'w'"):
        posterior["w"]


def test_point_weights_have_a_mean_and_say_what_they_lack():
    one = evcl.Naive(evcl.nn.mlp(64, [5]), seed=0).posterior["1.weight"]
    assert one.mean.shape == (5, 64)
    for ask in (lambda: one.std, lambda: one.precision, lambda: one.draw(2), one.kl):
        with pytest.raises(evcl.EvclError, match=r"point weights have no .*: use a Bayesian method"):
            ask()


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
