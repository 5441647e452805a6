"""The streams of months: generated the same way each time, and learned by `evcl learn` as the documents say."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from made_up_cells import programs_of

GENERATED = ("shop", "shop-additive", "regions", "digits")  # without data to fetch


@pytest.fixture
def programs():
    with programs_of("months", "generated", "learners") as found:
        yield found


@pytest.mark.parametrize("name", GENERATED)
def test_a_stream_depends_on_its_seed_alone(programs, name):
    streams, _ = programs
    one, same, other = (streams.stream(name, seed) for seed in (100, 100, 101))
    for a, b, c in zip(one, same, other, strict=True):
        pd.testing.assert_frame_equal(a.train, b.train)
        pd.testing.assert_frame_equal(a.test, b.test)
        assert not a.train.equals(c.train)
        assert not a.train.head(100).equals(a.test.head(100))


def test_the_shop_has_what_the_documents_say(programs):
    streams, _ = programs
    months = streams.stream("shop", 100)
    channels = [set(month.train["channel"]) for month in months]
    assert [sorted(b - a) for a, b in pairwise(channels)] == [[], ["social"], [], ["partner"], []]
    for m, month in enumerate(months):
        dear = month.train["price"] > month.train["price"].median()
        buys = month.train["label"] == "buys"
        assert (buys[dear].mean() > buys[~dear].mean()) == (m < streams.TURN)
        assert 0.01 < month.train["age"].isna().mean() < 0.1


@pytest.mark.full
def test_new_classes_are_learned_and_old_ones_kept(programs, tmp_path):
    """A small version of the stream `digits`: above naive training, and above naive Bayes."""
    streams, learners = programs
    months = [(name, train.head(120), test) for name, train, test in streams.stream("digits", 100)[:3]]
    classes = sorted({label for _, train, _ in months for label in train["label"]})
    found = {}
    for name in ("evcl", "naive", "GaussianNB"):
        (tmp_path / name).mkdir()
        learner = learners.LEARNERS[name](learners.About(0, classes, tmp_path / name))
        found[name] = np.mean(learners.accuracies(learner, months)[-1])
    assert found["evcl"] > 0.9
    assert found["evcl"] > found["GaussianNB"] > found["naive"]
