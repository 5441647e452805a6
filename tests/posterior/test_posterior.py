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
from evcl.posterior.kronecker import Block, KroneckerGaussian


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


# --- Kronecker products ---------------------------------------------------------------------------------------------

LAYOUT = Layout({"w": (2, 3), "b": (2,), "table": (4, 2), "free": (3,)})
EVERY = slice(None)
BLOCKS = {"w": Block("w", EVERY, "b", EVERY, False), "table": Block("table", EVERY, None, EVERY, True)}
PLACES = {  # of each block's matrix, row after row, among the weights
    "w": [0, 1, 2, 6, 3, 4, 5, 7],
    "table": [8, 10, 12, 14, 9, 11, 13, 15],
}


def kronecker(generator, products=1, size=1.0):
    def covariance(n):
        root = torch.randn(2, products, n, n + 2, generator=generator, dtype=torch.float64)
        return size * root @ root.mT

    factors = {"w": (covariance(4), covariance(2)), "table": (covariance(4).diagonal(dim1=2, dim2=3), covariance(2))}
    rest = torch.zeros(2, LAYOUT.size, dtype=torch.float64)
    rest[:, -3:] = size + torch.rand(2, 3, generator=generator, dtype=torch.float64)
    return KroneckerGaussian(torch.randn(2, LAYOUT.size, generator=generator).double(), LAYOUT, BLOCKS, factors, rest)


def matrix(q, r=1):
    """The precision of a replica as a whole matrix."""
    found = torch.diag(q.rest[r])
    for key, at in PLACES.items():
        for a, g in zip(*(one[r] for one in q.factors[key]), strict=True):
            found[torch.tensor(at).unsqueeze(1), at] += torch.kron(g, a.diag() if a.dim() == 1 else a)
    return found


@pytest.mark.parametrize("products", [1, 2])
def test_a_kronecker_gaussian_is_the_one_of_its_whole_matrix(products, generator):
    q, prior = kronecker(generator, products), kronecker(generator, 3 - products)
    v = torch.randn(2, LAYOUT.size, generator=generator).double()
    own, first = matrix(q), matrix(prior)
    torch.testing.assert_close(q.precision_times(v)[1], own @ v[1])
    torch.testing.assert_close(q.marginals().variance()[1], own.inverse().diagonal())
    torch.testing.assert_close(q.views()["free"].log_std[1], -0.5 * q.rest[1, -3:].log())
    root = torch.stack([q.draw(e.expand(2, -1))[1] - q.mean[1] for e in torch.eye(LAYOUT.size).double()], 1)
    torch.testing.assert_close(root @ root.T, own.inverse())
    normal, other = (
        torch.distributions.MultivariateNormal(one.mean[1], precision_matrix=p) for one, p in ((q, own), (prior, first))
    )
    torch.testing.assert_close(q.kl(prior)[1], kl_divergence(normal, other))


def test_evidence_of_kronecker_products_is_added_and_taken_away(generator):
    q, rows = kronecker(generator), kronecker(generator, size=0.1)
    own, more = matrix(q), matrix(rows)
    exact = torch.linalg.solve(own + more, own @ q.mean[1] + more @ rows.mean[1])
    for how in ("tasks", "nearest"):
        torch.testing.assert_close(q.plus(rows, how).mean[1], exact)
    torch.testing.assert_close(matrix(q.plus(rows, "tasks")), own + more)
    twice = q.plus(q)
    torch.testing.assert_close(matrix(twice), 2 * own)  # the nearest product to a sum of equal ones is exact
    once = twice.minus(q)
    torch.testing.assert_close(matrix(once), own)
    torch.testing.assert_close(once.mean[1], q.mean[1])
    torch.testing.assert_close(once.marginals().variance()[1], own.inverse().diagonal())
    with pytest.raises(evcl.EvclError, match="the precision of 'w' would have the eigenvalue -"):
        rows.minus(q)
    with pytest.raises(evcl.EvclError, match="a sum of 3 Kronecker products has no root: merge them into one"):
        kronecker(generator, 3).draw(q.mean)


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


def test_the_means_of_classes_are_the_gaussian_of_its_whole_matrix(generator):
    f, y = torch.randn(40, 4, generator=generator).double(), torch.arange(40) % 3
    q, prior = class_means(f, y), class_means(1.5 * f[:20] + 1, y[:20])

    def whole(one):
        n = one.count.sum()
        covariance = (one.scatter[0] + 0.4 * one.scatter[0].trace() / (4 * n) * torch.eye(4)) / (n + 0.4)
        blocks = torch.block_diag(*(covariance / c for c in one.count[0]))
        return torch.distributions.MultivariateNormal(one.mean.flatten(), blocks)

    v = torch.randn(1, 3, 4, generator=generator).double()
    own = whole(q)
    torch.testing.assert_close(q.precision_times(v).flatten(), own.precision_matrix @ v.flatten())
    root = torch.stack([(q.draw(e.view(1, 3, 4)) - q.mean).flatten() for e in torch.eye(12).double()], 1)
    torch.testing.assert_close(root @ root.T, own.covariance_matrix)
    torch.testing.assert_close(q.kl(prior)[0], kl_divergence(own, whole(prior)))
    torch.testing.assert_close(q.views()["mean"].variance().flatten(), own.variance)


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
