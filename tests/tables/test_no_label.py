"""Rows without a label are left out, as if the file did not have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from evcl import tables

FAST = ["--epochs", "3", "--hidden", "8"]


def rows(seed=0, count=200):
    source = np.random.default_rng(seed)
    a, b = source.normal(size=(2, count)).round(3)
    city = np.array(["bath", "york"])[source.integers(0, 2, count)]
    return pd.DataFrame({"a": a, "b": b, "city": city, "class": np.where(a > 0, "yes", "no"), "price": a + b + 0.005})


def learn(evcl, frame, ending, model, *options):
    frame.to_csv("t.csv", index=False) if ending == "csv" else frame.to_parquet("t.parquet", index=False)
    return evcl.done("learn", "--model", model, "--data", f"t.{ending}", *options)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize(("target", "other"), [("class", "price"), ("price", "class")])
def test_a_file_with_gaps_is_learned_as_without_those_rows(evcl, target, other, ending, monkeypatch):
    for reader in ("csv", "arrow"):  # some pieces have no labels at all
        monkeypatch.setattr(f"evcl.tables.{reader}_file.rows_a_piece", lambda columns: 64 // columns)
    frame, later = rows().drop(columns=other), rows(1, 60).drop(columns=other)
    gaps, gone = frame.copy(), np.r_[0, 5:70, 199]
    gaps.loc[gone, target] = None
    gaps.loc[gone, "a"] = 1e6  # must not count in the scale of the column
    gaps.loc[gone, "city"] = "leeds"
    out = learn(evcl, gaps, ending, "gaps", "--target", target, *FAST)
    assert "note: 67 rows without a label are left out\n" in out
    assert "120 examples" in out
    out = learn(evcl, frame.drop(index=gone), ending, "whole", "--target", target, *FAST)
    assert "without a label" not in out
    later_gaps = later.copy()
    later_gaps.loc[3, target] = None
    assert "note: 1 row without a label is left out\n" in learn(evcl, later_gaps, ending, "gaps", "--task", "b")
    learn(evcl, later.drop(index=3), ending, "whole", "--task", "b")
    one, other_one = (tables.load_model(Path(name)) for name in ("gaps", "whole"))
    for ours, wanted in zip(one.encoder.described(), other_one.encoder.described(), strict=True):
        about = {name: pytest.approx(wanted[name]) for name in ("mean", "std") if name in wanted}  # rounding
        assert ours == {**wanted, **about}
    x = np.random.default_rng(2).normal(size=(9, one.encoder.inputs)).astype("float32")
    np.testing.assert_allclose(one.learner.predictions(x, 0)[1], other_one.learner.predictions(x, 0)[1], atol=1e-4)


def test_a_target_far_outside_is_named_by_its_line_in_the_file(evcl):
    frame = rows().drop(columns="class")
    frame.loc[:9, "price"] = None
    frame.loc[20, "price"] = 1e7
    out = learn(evcl, frame, "csv", "m", "--target", "price", *FAST)
    assert "1 row has a target far outside the others, learned as the largest or smallest of these: line 22 has" in out


def test_a_word_that_means_missing_is_named(evcl):
    frame = rows().drop(columns="price")
    frame.loc[4, "class"] = "NA"
    out = learn(evcl, frame, "csv", "m", "--target", "class", *FAST)
    assert "note: 1 row without a label is left out (line 6: 'NA' means a missing value; if it is a class here" in out
