"""Tables whose target is a number or a count, from files to predictions with intervals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tabular import learned, predicted

from evcl import tables

FAST = ["--epochs", "20", "--hidden", "16"]


def homes(rows=300, seed=0, shift=0.0):
    """Prices by size and city, with noise of deviation 10."""
    source = np.random.default_rng(seed)
    size = source.normal(80 + shift, 20, rows).round(1)
    city = np.array(["bath", "hull", "york"])[source.integers(0, 3, rows)]
    price = (2.5 * size + 40 * (city == "bath") + source.normal(0, 10, rows)).round(2)
    return pd.DataFrame({"size": size, "city": city, "price": price, "rooms": source.poisson(size / 20)})


@pytest.fixture
def model(evcl, made_once):
    def make():
        homes().to_csv("january.csv", index=False)
        options = ("--target", "price", "--drop", "rooms", *FAST)
        out = evcl.done("learn", "--model", "m", "--data", "january.csv", *options)
        assert "note: price has numbers with fractions, so it is learned as a number, not as classes" in out
        assert "270 examples learned" in out
        assert "on the held-out rows: RMSE " in out

    made_once(make)
    return evcl


def test_the_whole_way(model):
    assert " before); the target's deviation is " in learned(model, homes(seed=1, shift=10), "february")
    out = predicted(model, homes(seed=2), "new")
    assert "300 predicted, mean std " in out
    assert "within 95% intervals, against its labels" in out
    found = pd.read_csv("p.csv")
    assert list(found)[-6:] == ["prediction", "std", "low_95", "high_95", "epistemic", "unfamiliar"]
    written = pd.read_csv("p.csv", dtype=str).prediction
    assert max(len(text.replace(".", "").lstrip("0")) for text in written) <= 7
    assert np.sqrt(((found.prediction - found.price) ** 2).mean()) < 25  # the deviation is 53
    assert ((found.low_95 < found.price) & (found.price < found.high_95)).mean() > 0.85
    out = model.done("inspect", "m")
    assert "coverage" in out
    told = json.loads(model.done("predict", "--model", "m", "--data", "new.csv", "--out", "p.csv", "--json"))
    assert told["read"] == []
    assert told["rmse"] == pytest.approx(np.sqrt(((found.prediction - found.price) ** 2).mean()), rel=1e-4)
    loaded = tables.load_model(Path("m"))
    assert loaded.numeric
    assert loaded.learner.likelihood == "gaussian"


def test_rows_unlike_the_training_rows_get_a_note_and_wide_intervals(model):
    far = homes(10, seed=4)
    assert "unlike" not in said_and_found(model, far)[0]
    far.loc[:6, "size"] = 3000.0
    said, found = said_and_found(model, far)
    assert "note: 7 of 10 rows are unlike the training rows: such predictions mean little (epistemic above " in said
    assert (found.epistemic[:7] > 100).all()
    assert (found.epistemic[7:] < 53).all()
    assert (found.low_95[:7] < 0).all()  # as if the price stayed as it is at the largest size, and less
    said, _ = said_and_found(model, far[:1])
    assert "note: 1 of 1 row is unlike the training rows" in said


def said_and_found(model, frame):
    return predicted(model, frame, "new"), pd.read_csv("p.csv")


def test_counts_and_whole_numbers_are_asked_for(evcl):
    table = homes()
    table.to_csv("a.csv", index=False)
    status, out, _ = evcl("learn", "--model", "c", "--data", "a.csv", "--target", "rooms", "--drop", "price", "--kind",
                          "count", *FAST)  # fmt: skip
    assert status == 0
    status, out, _ = evcl("predict", "--model", "c", "--data", "a.csv", "--out", "p.csv")
    found = pd.read_csv("p.csv")
    assert (found.low_95 >= 0).all()
    assert found.prediction.mean() == pytest.approx(table.rooms.mean(), rel=0.2)
    table["whole"] = table.price.round().astype(int)
    table.drop(columns=["price", "rooms"]).to_parquet("b.parquet")
    out = evcl.done("learn", "--model", "n", "--data", "b.parquet", "--target", "whole", "--kind", "number", *FAST)
    assert "RMSE" in out


def test_decimal_commas_are_numbers_too(evcl):
    homes().drop(columns="rooms").to_csv("a.csv", index=False, sep=";", decimal=",")
    evcl.done("learn", "--model", "m", "--data", "a.csv", "--target", "price", "--kind", "number", *FAST)
    assert tables.load_model(Path("m")).history[0]["deviation"] == pytest.approx(homes().price.std(ddof=0))


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda t: t, ["--keep", "20"], "this model learns a number"),
        (lambda t: t, ["--kind", "class"], "--kind is fixed when a model is created"),
        (lambda t: t, ["--kind", "ratio"], "--kind must be class, number or count, not 'ratio'"),
        (lambda t: t.assign(price=["dear", *t.price[1:]]), [], "line 2, column 'price'"),
        (lambda t: t.assign(price=None), [], "column 'price': every label is missing"),
    ],
)
def test_bad_input_is_refused_and_the_model_stays(model, change, arguments, message):
    before = Path("m").read_bytes()
    change(homes(40, seed=3)).to_csv("next.csv", index=False)
    status, _, err = model("learn", "--model", "m", "--data", "next.csv", *arguments)
    assert (status > 0, err.count("\n"), message in err) == (True, 1, True), err
    assert Path("m").read_bytes() == before


def test_a_table_of_classes_stays_one(evcl):
    """1.5 among the labels of a later file is no reason to change what the model predicts."""
    table = homes().assign(label=lambda t: (t.price > 200).astype(int)).drop(columns=["price", "rooms"])
    learned(evcl, table, "a", "--target", "label", *FAST)
    table.assign(label=table.label + 0.5).to_csv("b.csv", index=False)
    assert "is a number with a fraction, but classes are expected" in evcl.refused(
        "learn", "--model", "m", "--data", "b.csv"
    )


def test_large_numbers_that_hardly_vary_keep_their_digits(evcl):
    table = homes().assign(price=lambda t: t.price + 1e9)
    learned(evcl, table.drop(columns="rooms"), "a", "--target", "price", *FAST)
    evcl.done("predict", "--model", "m", "--data", "a.csv", "--out", "p.csv")
    found = pd.read_csv("p.csv")
    assert found.prediction.nunique() > 250
    assert (found.high_95 - found.low_95).to_numpy() == pytest.approx(2 * 1.96 * found["std"].to_numpy(), rel=0.1)


def test_a_mistyped_target_is_named_and_does_little_harm(model):
    typed = homes(seed=1)
    typed.loc[40, "price"] = 1e6
    out = learned(model, typed, "february")
    told = "note: 1 row has a target far outside the others, learned as the largest or smallest of these: line 42 has "
    assert told + "1e+06" in out
    predicted(model, homes(seed=2), "new")
    found = pd.read_csv("p.csv")
    assert np.sqrt(((found.prediction - found.price) ** 2).mean()) < 25  # the deviation is 53
