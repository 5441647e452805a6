"""k-center against a slow and obvious one, with copies and ties; the rows of a coreset and the others."""

from __future__ import annotations

import pytest
import torch
from calls import heard
from hypothesis import given, settings
from hypothesis import strategies as st

from evcl.methods.selection import choose, eager, kcenter, lazy, others

FORMS = {"lazy": lazy, "eager": lambda x, count: eager(x[None], count)[0]}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def reference(x, count):
    """Greedy farthest-point, one after the other, in float64; the first index wins a tie."""
    points = x.double()
    to_mean = (points - points.mean(0)).square().sum(1).tolist()
    chosen = [to_mean.index(min(to_mean))][:count]
    while len(chosen) < count:
        near = torch.stack([(points - points[c]).square().sum(1) for c in chosen]).amin(0).tolist()
        left = [i for i in range(len(points)) if i not in chosen]
        chosen.append(max(left, key=lambda i: near[i]))  # max takes the first
    return chosen


@forms
@pytest.mark.parametrize(
    ("n", "d", "count", "origin"),
    [(200, 5, 30, 0), (200, 300, 30, 0), (40, 2, 40, 0), (1, 3, 1, 0), (9, 3, 0, 0), (200, 5, 30, 3000)],
)
def test_it_is_the_slow_one(form, n, d, count, origin, generator):
    """Also far from the origin, where |x|^2 - 2 x.c + |c|^2 would have lost every digit."""
    x = origin + torch.randn(n, d, generator=generator)
    assert form(x, count).tolist() == reference(x, count)


@forms
def test_copies_are_equally_far_and_the_first_is_taken(form, generator):
    """20 examples of 300 numbers, 8 copies each in a random order: once they are all there, the first of the rest."""
    x = torch.randn(20, 300, generator=generator).repeat(8, 1)[torch.randperm(160, generator=generator)]
    found = form(x, 40).tolist()
    assert found == reference(x, 40)
    assert len({tuple(x[i].tolist()) for i in found[:20]}) == 20
    assert found[20:] == [i for i in range(160) if i not in found[:20]][:20]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 5).flatmap(lambda k: st.lists(st.tuples(*[st.integers(-2, 2)] * 2), min_size=2**k, max_size=2**k))
)
def test_ties_go_to_the_first(points):
    """Few whole numbers, so that ties abound and are exact; 2^k of them, so that their mean is exact too."""
    x = torch.tensor(points, dtype=torch.float32)
    wanted = reference(x, len(x))
    for form in FORMS.values():
        assert form(x, len(x)).tolist() == wanted


def test_every_replica_has_its_own(generator):
    x = torch.randn(3, 100, 7, generator=generator)
    assert kcenter(x, 10).tolist() == [reference(one, 10) for one in x]
    assert torch.equal(eager(x, 10), kcenter(x, 10))


def test_few_are_measured_and_never_all_pairs(generator):
    pairs = []
    x = torch.rand(5000, 20, generator=generator)
    with heard("distances", lambda given: pairs.append(given["x"].shape[-2] * given["centres"].shape[-2])):
        kcenter(x[None], 100)
    assert max(pairs) <= 5000 + 2048 * 100
    assert sum(pairs) < 0.5 * 5000 * 100


def test_random_rows_are_the_replicas_own_and_the_others_are_the_rest():
    x = torch.zeros(1, 50, 2, 3)

    def sources(*seeds):
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    rows = choose("random", x, 20, sources(0, 1, 2))
    assert rows.shape == (3, 20)
    assert torch.equal(rows[1:2], choose("random", x, 20, sources(1)))
    assert len({tuple(row) for row in rows.tolist()}) == 3
    rest = others(rows, 50)
    for mine, left in zip(rows.tolist(), rest.tolist(), strict=True):
        assert left == sorted(set(range(50)) - set(mine))
        assert len(left) == 30
    share = torch.stack([choose("random", x, 20, sources(s))[0] for s in range(200)]).flatten().bincount(minlength=50)
    assert share.min() > 50  # each is drawn 80 times of 200, with a deviation of 7
    assert share.max() < 110


def test_k_center_of_shared_data_is_chosen_once(generator):
    x = torch.randn(1, 50, 2, 3, generator=generator)
    rows = choose("kcenter", x, 5, [torch.Generator()] * 4)
    assert rows.tolist() == [reference(x[0].flatten(1), 5)]
