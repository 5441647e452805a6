"""Generated streams: their labels follow River's rules, their drift comes where it should, reading begins anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from evcl import EvclError
from evcl._core.randomness import generator
from evcl.streams.sources import REPORTED, RULES, SOURCES, Drift, Source, drift, generated, get, register, table
from evcl.streams.sources.generators import LED, SEA, SEGMENTS, Agrawal, Hyperplane, above, agrawal_rules, steps
from evcl.streams.sources.source import ROWS_AT_ONCE


def whole(source, seed=0, stop=None):
    parts = list(source.read(ROWS_AT_ONCE, seed, stop=stop))
    return torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])


# Labels, beside River's


@pytest.fixture
def synth():
    return pytest.importorskip("river.datasets.synth")


def test_stagger_labels_are_rivers(synth):
    rules = synth.STAGGER()._functions
    x, y = whole(generated("stagger", Drift((0, 1, 2), (1000, 2000)), 3000))
    for row, (inputs, label) in enumerate(zip(x.view(-1, 3, 3).argmax(2).tolist(), y.tolist(), strict=True)):
        assert rules[row // 1000](*inputs) == label


@pytest.mark.parametrize("concept", range(4))
def test_sea_labels_are_rivers(synth, concept):
    rows = synth.SEA(variant=concept)._threshold
    x, y = whole(generated(SEA(noise=0.0), Drift((concept,)), 2000))
    assert [a + b > rows for a, b, _ in x.double().tolist()] == y.bool().tolist()
    assert float(x.min()) >= 0
    assert float(x.max()) <= 10


@pytest.mark.parametrize("concept", [0, 1, 2, 3, 5, 6, 7, 8, 9])  # River's 4 compares the salary with bounds of loans
def test_agrawal_labels_are_rivers(synth, concept):
    rule = synth.Agrawal()._classification_functions[concept]
    x, y = whole(generated(Agrawal(perturbation=0.0), Drift((concept,)), 2000))
    assert [rule(*row) for row in x.double().tolist()] == y.tolist()
    theirs = [list(row.values()) for row, _ in synth.Agrawal(concept, seed=1).take(500)]
    labels = agrawal_rules(torch.tensor(theirs, dtype=torch.float64))[concept]
    assert labels.long().tolist() == [label for _, label in synth.Agrawal(concept, seed=1).take(500)]


def test_hyperplane_labels_are_rivers(synth):
    stream = synth.Hyperplane(seed=3, n_features=10, mag_change=0.01, noise_percentage=0.0, n_drift_features=5)
    rows = iter(stream)
    first = next(rows)  # makes the weights, and moves them once
    weights, found, labels = [], [], []
    for _ in range(500):
        weights.append(list(stream._weights))
        x, y = next(rows)
        found.append(list(x.values()))
        labels.append(y)
    made = above(torch.tensor(found, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64))
    assert made.tolist() == labels
    assert len(first[0]) == 10


def test_led_digits_are_rivers(synth):
    assert SEGMENTS.long().tolist() == synth.LED._ORIGINAL_INSTANCES
    x, y = whole(generated(LED(noise=0.0), "none", 1000))
    assert bool((x[:, :7].bool() == SEGMENTS[y]).all())
    assert x[:, 7:].mean() == pytest.approx(0.5, abs=0.02)


def test_rbf_rows_lie_as_rivers(synth):
    """From River's own clusters, our steps make rows of the same mean and spread per class."""
    stream = synth.RandomRBF(seed_model=1, seed_sample=2, n_classes=3, n_features=4, n_centroids=6)
    theirs = list(stream.take(20_000))
    weights = torch.tensor(stream.centroid_weights, dtype=torch.float64)
    centres = torch.tensor([one.centre for one in stream.centroids], dtype=torch.float64)
    spreads = torch.tensor([one.std_dev for one in stream.centroids], dtype=torch.float64)
    kinds = torch.tensor([one.class_label for one in stream.centroids])
    source = generator(0, "test")
    cluster = torch.multinomial(weights, 20_000, replacement=True, generator=source)
    x, y = centres[cluster] + steps(spreads[cluster], 4, source), kinds[cluster]
    other_x = torch.tensor([list(row.values()) for row, _ in theirs], dtype=torch.float64)
    other_y = torch.tensor([label for _, label in theirs])
    for kind in kinds.unique().tolist():
        own, other = x[y == kind], other_x[other_y == kind]
        assert len(own) == pytest.approx(len(other), rel=0.05)
        torch.testing.assert_close(own.mean(0), other.mean(0), atol=0.03, rtol=0)
        torch.testing.assert_close(own.std(0), other.std(0), atol=0.03, rtol=0)


# Drift


def test_a_sudden_change_is_at_its_row():
    phase = Drift((0, 2, 1), (100, 250)).phase(torch.arange(400))
    concept = phase.drawn(generator(0, "test"))
    assert concept.tolist() == [0] * 100 + [2] * 150 + [1] * 150


def test_a_gradual_change_is_linear_around_its_row():
    phase = Drift((0, 1), (1000,), width=500).phase(torch.arange(2000))
    assert float(phase.mix[:750].max()) == 0
    assert float(phase.mix[1000]) == pytest.approx(0.5, abs=0.01)
    assert float(phase.mix[1250:].min()) == 1
    drawn = phase.drawn(generator(0, "test"))
    assert float(drawn[800:1200].double().mean()) == pytest.approx(0.5, abs=0.1)


def test_the_kinds_of_drift():
    assert [drift(kind, 8000, 3).kind for kind in ("none", "sudden", "gradual", "recurring")] == [
        *("none", "sudden", "gradual", "recurring")
    ]
    assert drift("recurring", 8000, 3) == Drift((0, 1) * 4, tuple(range(1000, 8000, 1000)))
    assert drift("sudden", 9000, 3).at == (3000, 6000)
    assert drift("gradual", 9000, 3).width == 1500


def test_wrong_drifts_say_so():
    with pytest.raises(EvclError, match="drift must be one of none, sudden, gradual, recurring, not 'abrupt'"):
        generated("sea", "abrupt")
    with pytest.raises(EvclError, match="2 concepts need 1 rows in order"):
        Drift((0, 1), ())
    with pytest.raises(EvclError, match="must end before the next one begins"):
        Drift((0, 1, 2), (100, 200), width=150)
    with pytest.raises(EvclError, match=r"sea has the concepts 0 to 3, not \(0, 7\)"):
        generated("sea", Drift((0, 7), (10,)))
    with pytest.raises(EvclError, match="unknown generator 'seas'; did you mean 'sea'"):
        generated("seas")


@pytest.mark.parametrize("name", RULES)
def test_every_generator_drifts_in_every_way(name):
    """A change of the concept changes the relation of inputs and labels: a later concept would label rows otherwise."""
    for kind in ("none", "sudden", "gradual", "recurring"):
        source = generated(name, kind, 4000)
        x, y = whole(source)
        assert x.shape == (4000, len(source.names))
        assert x.dtype == torch.float32
        assert source.drift == kind
        assert set(y.tolist()) <= set(range(len(source.classes)))
        assert (kind == "none") == (source.changes == ())
    still, moved = (whole(generated(name, Drift(*one), 2000)) for one in (((0,), ()), ((0, 1), (1000,))))
    same = (still[0] == moved[0]).all(1) & (still[1] == moved[1])
    assert bool(same[:1000].all())
    assert not bool(same[1000:].all())


def test_a_hyperplane_moves_in_a_straight_line():
    """Half-way through a change, the labels follow the mean of both planes."""
    source = generated(Hyperplane(noise=0.0), Drift((0, 1), (10_000,), width=20_000), 20_000)
    x, y = whole(source)
    from evcl.streams.sources.generators import _numbers  # the weights of concepts 0 and 1

    weights = _numbers("hyperplane", 0, torch.tensor([0, 1]), 10)
    mix = (torch.arange(20_000).double() + 1)[:, None] / 20_000
    assert above(x.double(), weights[0] + mix * (weights[1] - weights[0])).tolist() == y.tolist()


# Reading


def test_reading_begins_anywhere_and_in_any_pieces():
    source = generated("led", "sudden", 5000)
    x, y = whole(source, seed=4)
    for size, start in ((1, 4990), (7, 1020), (1500, 3), (32, 0)):
        parts = list(source.read(size, 4, start))
        assert {len(part) for part in parts[:-1]} <= {size}
        assert torch.equal(torch.cat([part.x for part in parts]), x[start:])
        assert torch.equal(torch.cat([part.y for part in parts]), y[start:])
    assert len(whole(source, stop=100)[1]) == 100
    assert not torch.equal(whole(source, seed=5)[0], x)
    with pytest.raises(EvclError, match="1 or more rows at a time"):
        next(source.read(0))


def test_reading_a_long_stream_needs_no_memory():
    """Only the blocks in use are made: the millionth row comes at once."""
    source = generated("sea", "none", 10_000_000)
    (last,) = source.read(8, start=9_999_992)
    assert last.x.shape == (8, 3)


def test_the_reported_streams_cover_every_kind_of_drift():
    assert len(REPORTED) >= 12
    assert {one.drift for one in REPORTED} == {"none", "sudden", "gradual", "recurring", "real"}
    assert [row["name"] for row in table()] == [one.name for one in REPORTED]
    assert all(isinstance(get(one.name), Source) and one.summary for one in REPORTED)


def test_a_stream_of_your_own():
    own = register(replace(get("sea"), name="own-sea"))
    try:
        assert get("own-sea") is own
    finally:
        SOURCES.remove("own-sea")
    with pytest.raises(EvclError, match="stream 'seaa'"):
        get("seaa")
