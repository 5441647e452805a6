"""Numbers that are absurdly far out, and columns whose unit changes: neither ruins a model in silence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tabular import learned, model_of, predicted

import evcl as library
from evcl import EvclError, tables
from evcl.tables.commands import open_source
from evcl.tables.fitting import EncoderFitting
from evcl.tables.outside import SAMPLE_NUMBERS, Ends, Sample
from evcl.targets.scale import far_outside, limited, usual_range

FAST = ["--epochs", "20", "--hidden", "16", "--set", "lr=0.02"]


def table(rows=300, seed=0, a=1.0, b=1.0):
    """Whether a + b > 0, each in its own unit."""
    x = np.random.default_rng(seed).normal(size=(rows, 2))
    return pd.DataFrame({"a": a * x[:, 0], "b": b * x[:, 1], "y": np.where(x.sum(1) > 0, "yes", "no")})


def fitted(path, names=("a", "b")):
    source = open_source(Path(path))
    source.expect({"y": "text"})
    fitting = EncoderFitting(source, names)
    for piece in source.pieces(names):
        fitting.see(piece)
    return fitting.encoder(), fitting


def accuracy(frame):
    frame.to_csv("p.csv", index=False)
    found = tables.predict(Path("m"), Path("p.csv"), Path("out.csv"))
    return found.right / found.labelled


model = model_of(table, "a", "--target", "y", *FAST)


@pytest.mark.parametrize("value", [1e5, -1e30, 1e300])
def test_a_mistyped_input_of_the_first_file_does_not_decide_the_scale(evcl, value):
    frame = table()
    frame.loc[100, "a"] = value
    out = learned(evcl, frame, "a", "--target", "y", *FAST)
    told = "column 'a': 1 value is far outside the others, learned as the largest or smallest of these: line 102 has"
    assert f"note: {told} {value:g}\n" in out
    part = tables.load_model(Path("m")).encoder.columns[0]
    assert part.std[0] == pytest.approx(table().a.std(), rel=0.1)
    assert max(map(abs, part.seen)) < 5  # or a later change of unit would not be noticed
    assert accuracy(table(seed=1)) > 0.9


def test_a_mistyped_input_of_a_later_file_is_limited_too(model):
    frame = table(seed=1)
    frame.loc[[3, 7], "b"] = 1e25
    out = learned(model, frame, "b", "--epochs", "20")
    assert "note: column 'b': 2 values are far outside the others" in out
    assert "line 5 has 1e+25\n" in out
    assert [part.kind for part in tables.load_model(Path("m")).encoder.columns] == ["number", "number"]
    assert accuracy(table(seed=2)) > 0.9


def test_a_mistyped_date_does_not_decide_the_scale(evcl):
    frame = table().assign(day=pd.date_range("2020-01-01", periods=300).strftime("%Y-%m-%d"))
    frame.loc[9, "day"] = "9999-12-31"
    out = learned(evcl, frame, "a", "--target", "y", *FAST)
    assert "note: column 'day': 1 value is far outside the others" in out
    assert "line 11 has 9999-12-31" in out
    assert tables.load_model(Path("m")).encoder.parts("day")[0].std < 2 * 366 * 86_400


def test_columns_without_mistakes_are_scaled_as_ever(tmp_path):
    """Heavy tails, rare ones and few rows: the mean and the deviation are those of all values, to the last bit."""
    source = np.random.default_rng(0)
    heavy, rare = np.exp(1.5 * source.normal(size=9000)), (source.random(9000) < 0.005).astype(float)
    columns = {"a": heavy, "b": 50.0 * rare}
    np.savez(tmp_path / "a.npz", **columns)
    encoder, fitting = fitted(tmp_path / "a.npz")
    assert fitting.limited == []
    for part, values in zip(encoder.columns, columns.values(), strict=True):
        assert (part.mean[0], part.std[0]) == pytest.approx((values.mean(), values.std()), rel=1e-12)
        assert part.seen == (values.min(), values.max())
    pd.DataFrame({"a": [1.0, 2, 3, 1e9], "b": [1, 2, 3, 4]}).to_csv(tmp_path / "few.csv", index=False)
    encoder, fitting = fitted(tmp_path / "few.csv")
    assert (fitting.limited, encoder.columns[0].seen) == ([], (1.0, 1e9))


def test_many_values_far_outside_a_sample_are_no_mistakes(tmp_path):
    """A sample that by accident shows a part of a column alone."""
    a = np.where(np.arange(3 * SAMPLE_NUMBERS) % 4 == 0, np.linspace(0, 1, 3 * SAMPLE_NUMBERS), 1e6)
    np.savez(tmp_path / "a.npz", a=a, b=a)
    encoder, fitting = fitted(tmp_path / "a.npz")
    assert fitting.limited == []
    assert encoder.columns[0].std[0] == pytest.approx(a.std())


@pytest.mark.parametrize("size", [1, 1000, 4096])
def test_a_sample_is_every_kth_number_whatever_the_pieces(size):
    numbers, sample = np.random.default_rng(0).normal(size=3 * SAMPLE_NUMBERS if size > 1 else 500), Sample()
    for start in range(0, len(numbers), size):
        sample.see(numbers[start : start + size])
    every = 4 if size > 1 else 1
    low, high = usual_range(torch.tensor(numbers[::every]))
    assert sample.ends() == (low, high)


def test_inputs_are_limited_as_targets_are():
    numbers = np.r_[np.random.default_rng(0).normal(size=500), 40.0, -1e9, np.nan]
    y = torch.tensor(numbers[:-1]).unsqueeze(1)
    low, high = usual_range(y)
    ends = Ends(float(low), float(high))
    assert ends.far(numbers).tolist() == [*far_outside(y).flatten().tolist(), False]
    assert ends.limited(numbers)[:-1].tolist() == limited(y).flatten().tolist()
    assert np.isnan(ends.limited(numbers)[-1])


@pytest.mark.parametrize("times", [1e3, 1e9, 1e30])
def test_another_unit_of_a_column_around_zero_gets_a_scale_on_both_sides(model, times):
    before = accuracy(table(seed=1))
    out = learned(model, table(seed=2, b=times), "b", "--epochs", "60")
    assert out.count("times as much as before, as in another unit: it gets a new scale\n") == 1
    parts = tables.load_model(Path("m")).encoder.parts("b")
    assert [part.kind for part in parts] == ["number", "beyond", "beyond"]
    assert parts[1].std > 0 > parts[2].std
    assert accuracy(table(seed=3, b=times)) > 0.85
    assert accuracy(table(seed=1)) > before - 0.1


def test_a_few_values_far_out_are_no_other_unit(model):
    frame = table(seed=1)
    frame.loc[0, "b"] = 160.0  # makes the deviation 9 times as large: not so many that it is limited
    assert "unit" not in learned(model, frame, "b", "--epochs", "1")
    frame.loc[1, "b"] = -160.0
    assert "unit" not in learned(model, frame, "b", "--task", "c", "--epochs", "1")


def test_a_column_that_hardly_varies_on_its_known_scale_is_named(model):
    out = learned(model, table(seed=1, b=1e-3), "b", "--epochs", "1")
    assert "note: column 'b' varies 9" in out or "note: column 'b' varies 1,0" in out
    assert "times less than before: if it has another unit, convert it\n" in out
    assert "times less" not in learned(
        model, table(seed=1).assign(b=0.5), "b", "--task", "c", "--epochs", "1"
    )  # a constant says nothing


def test_numbers_too_far_out_are_missing_if_there_is_no_new_scale(model):
    frame = table(seed=1)
    frame.loc[5, "b"] = 1e30
    out = learned(model, frame, "b", "--epochs", "20", "--unknown", "missing")
    told = "1 value is more than 1,000,000 standard deviations from what was learned, and counted as missing"
    assert f"note: {told}: line 7, column 'b' has 1e+30\n" in out
    assert accuracy(table(seed=2)) > 0.9
    assert f"note: {told}: line 7" in model("predict", "--model", "m", "--data", "b.csv", "--out", "p.csv")[1]
    found = pd.read_csv("p.csv")
    assert (found.entropy[5] > 0, found.unfamiliar[5] > 1e9) == (True, True)  # as if missing, but not familiar


def test_inputs_too_large_for_a_likelihood_per_class_are_one_line():
    x = np.random.default_rng(0).normal(size=(100, 3)).astype("float32")
    learner = library.EVCL(library.nn.mlp(3, [8]), seed=0, epochs=1)
    learner.learn((x, x[:, 0] > 0), task="a")
    with pytest.raises(EvclError, match=r"task 'b': .* too large beside the others"):
        learner.learn((x * np.float32([1e30, 1, 1]), x[:, 0] > 0), task="b", head="a")
    assert learner.tasks == ("a",)


def test_a_very_large_number_has_an_exponent(model):
    frame = table(seed=1)
    frame["a"] *= 1e30
    assert len(predicted(model, frame, "b").split("unfamiliar ")[1].split()[0]) < 12
    cells = pd.read_csv("p.csv", dtype=str).unfamiliar
    assert cells.str.fullmatch(r"\d\.\d{3}e\+\d\d").mean() > 0.9


def test_names_that_differ_by_case_or_blanks_are_named(model):
    out = learned(model, table(seed=1).rename(columns={"a": "A"}).assign(c=1), "b", "--epochs", "1")
    assert "note: there is no column a (new: A, c): its values count as missing\n" in out
    told = "'A' is not 'a', although only case or blanks differ: if it should be, rename it in the file"
    assert f"note: {told}\n" in out


def test_several_columns_that_vanished_are_plural(evcl):
    learned(evcl, table().assign(c=np.arange(300) % 3), "a", "--target", "y", *FAST)
    assert "there are no columns b, c: their values count as missing\n" in learned(
        evcl, table(seed=1).drop(columns="b"), "b", "--epochs", "1"
    )
