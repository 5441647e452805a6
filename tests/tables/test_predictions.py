"""The file of predictions: which columns it has, in which formats, and what is printed beside it."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

OURS = ["prediction", "probability_no", "probability_yes", "entropy", "epistemic", "unfamiliar"]


def orders(rows=60, seed=0):
    """Orders with a number, a price (some are missing), a shop, and whether they are returned."""
    source = np.random.default_rng(seed)
    price = source.normal(20, 5, rows).round(2)
    frame = pd.DataFrame(
        {
            "order": [f"A-{n:03}" for n in range(rows)],
            "price": price,
            "items": source.integers(1, 9, rows),
            "shop": np.where(source.random(rows) < 0.5, "north, east", "south"),
            "returned": np.where(price > 20, "yes", "no"),
        }
    )
    frame.loc[::7, "price"] = np.nan
    return frame


@pytest.fixture
def model(evcl, made_once):
    def make():
        orders().to_csv("orders.csv", index=False)
        options = ["--target", "returned", "--drop", "order", "--epochs", "5", "--hidden", "8"]
        evcl.done("learn", "--model", "m", "--data", "orders.csv", *options)
        orders(seed=1).to_csv("more.csv", index=False)

    made_once(make)
    predict = partial(evcl, "predict", "--model", "m", "--data", "more.csv")
    predict.done, predict.refused = (partial(one, *predict.args) for one in (evcl.done, evcl.refused))
    return predict


def test_the_files_own_columns_come_first_as_they_are(model):
    model.done("--out", "p.csv")
    found = pd.read_csv("p.csv", dtype=str, keep_default_na=False)
    given = pd.read_csv("more.csv", dtype=str, keep_default_na=False)
    assert list(found) == [*given, *OURS]
    pd.testing.assert_frame_equal(found[list(given)], given)


def test_a_key_that_looks_like_a_number_stays_as_it_is(model, evcl):
    orders(seed=1).assign(order=[f"{n:05}" for n in range(60)]).to_csv("new.csv", index=False)
    for out, read in (("p.csv", lambda path: pd.read_csv(path, dtype=str)), ("p.parquet", pd.read_parquet)):
        evcl.done("predict", "--model", "m", "--data", "new.csv", "--out", out)
        assert list(read(out).order) == [f"{n:05}" for n in range(60)]


def test_keys_or_no_columns_at_all(model):
    model.done("--out", "p.csv")
    whole = pd.read_csv("p.csv")
    for options, columns in (
        (["--key", "order"], ["order"]),
        (["--key", "shop", "--key", "order"], ["order", "shop"]),  # in the file's order
        (["--only-predictions"], []),
    ):
        model.done("--out", "q.csv", *options)
        pd.testing.assert_frame_equal(pd.read_csv("q.csv"), whole[[*columns, *OURS]])
    assert (
        "there is no column 'ordre' to use as a key; it has 'order', 'price', 'items', 'shop', 'returned'"
        in model.refused("--out", "q.csv", "--key", "ordre")
    )
    assert model("--out", "q.csv", "--key", "order", "--only-predictions")[0] == 2


def test_parquet_has_the_same_rows_with_types(model):
    assert model("--out", "p.csv")[0] == model("--out", "p.parquet")[0] == 0
    text, typed = pd.read_csv("p.csv"), pd.read_parquet("p.parquet")
    assert typed.price.dtype == typed.entropy.dtype == np.float64
    assert typed.price.isna().sum() == 9
    pd.testing.assert_frame_equal(text, typed, check_dtype=False)


def test_numbers_of_a_parquet_file_are_written_as_they_are(model, evcl):
    frame = orders(seed=1).assign(order=np.arange(60) + 2**60)
    frame["items"] = frame["items"].astype("Int64").where(frame["items"] != 3)
    frame.to_parquet("new.parquet")
    for out in ("p.csv", "p.parquet"):
        evcl.done("predict", "--model", "m", "--data", "new.parquet", "--out", out)
    text, typed = pd.read_csv("p.csv", dtype=str), pd.read_parquet("p.parquet")
    assert list(text.order) == [str(n) for n in frame.order]
    assert list(typed.order) == list(frame.order)
    assert list(text["items"].fillna("")) == ["" if pd.isna(n) else str(n) for n in frame["items"]]
    assert list(text.price.dropna().astype(float)) == list(frame.price.dropna())


def test_a_column_that_cannot_be_read_is_left_out(model, evcl):
    frame = orders(seed=1).drop(columns="order").assign(order=[[1, 2]] * 60)
    frame.to_parquet("new.parquet")
    evcl.done("predict", "--model", "m", "--data", "new.parquet", "--out", "p.csv")
    assert list(pd.read_csv("p.csv"))[:5] == ["price", "items", "shop", "returned", "prediction"]


def test_a_column_named_as_ours_is_refused(evcl):
    for name in ("orders", "new"):
        orders().rename(columns={"items": "entropy"}).to_csv(f"{name}.csv", index=False)
    evcl.done("learn", "--model", "m", "--data", "orders.csv", "--target", "returned", "--epochs", "1")
    assert "it has a column 'entropy', and so have the predictions; --key chooses columns" in evcl.refused(
        "predict", "--model", "m", "--data", "new.csv", "--out", "p.csv"
    )
    assert not Path("p.csv").exists()
    evcl.done("predict", "--model", "m", "--data", "new.csv", "--out", "p.csv", "--only-predictions")


def test_standard_output_holds_the_file_and_nothing_else(model):
    model.done("--out", "p.csv")
    status, out, err = model("--out", "-")
    assert (status, out) == (0, Path("p.csv").read_text())
    assert "60 predicted, mean entropy " in err
    assert "accuracy " in err
    assert model("--out", "-", "--quiet") == (0, out, "")
    assert not Path("-").exists()
    assert model("--out", "-", "--json")[0] == 2


@pytest.mark.parametrize("out", ["p", "p.txt", "p.xlsx", "p.tsv"])
def test_a_format_that_is_not_written_is_refused(model, out):
    status, _, err = model("--out", out)
    assert (status, err.count("\n")) == (2, 1)
    assert f"--out {out}: its name should end in .csv or .parquet; - writes CSV to standard output" in err
    assert not Path(out).exists()


def test_json_says_what_the_text_says_and_quiet_says_nothing(model, evcl):
    _, text, _ = model("--out", "p.csv")
    out = model.done("--out", "q.csv", "--json")
    found = json.loads(out)
    assert (found["predictions"], found["rows"], found["labelled"]) == ("q.csv", 60, 60)
    assert f"accuracy {100 * found['accuracy']:.1f}% against its labels" in text
    assert f"mean entropy {found['entropy']:.3f}, epistemic {found['epistemic']:.3f}, " in text
    assert model("--out", "q.csv", "--quiet") == (0, "", "")
    found = json.loads(evcl.done("learn", "--model", "m", "--data", "more.csv", "--epochs", "1", "--json"))
    assert (found["task"], found["examples"], found["held_out"], found["tasks"]) == ("more", 54, 6, 2)
    assert found["columns"] == ["price", "items", "shop"]
    learned = ["learn", "--model", "m", "--data", "more.csv", "--task", "again", "--epochs", "1", "--quiet"]
    assert evcl(*learned) == (0, "", "")
    found = json.loads(evcl.done("inspect", "m", "--json"))
    assert [task["task"] for task in found["tasks"]] == ["orders", "more", "again"]
    assert (found["target"], found["classes"], found["drop"]) == ("returned", ["no", "yes"], ["order"])
    assert found["tasks"][0]["accuracy"] <= 1


def test_a_head_that_is_not_there_is_refused_before_anything_is_learned(evcl):
    orders().to_csv("orders.csv", index=False)
    assert (
        evcl.refused("learn", "--model", "m", "--data", "orders.csv", "--target", "returned", "--head", "zz")
        == "--head zz: the model has learned no such task; this is its first task"
    )
    assert not Path("m").exists()


def test_missing_values_and_masks_are_empty_cells():
    from evcl.tables.output_file import Column, _Csv

    file = io.StringIO()
    masked = np.ma.masked_array([1, 2, 3], [False, True, False])
    texts = np.array([None, 'a "b"', "c,d"], dtype=object)
    columns = {"n": masked, "x": np.array([0.1, np.nan, 1e300]), "t": texts}
    _Csv(file).write({name: Column(values) for name, values in columns.items()})
    assert file.getvalue() == 'n,x,t\n1,0.1,\n,,"a ""b"""\n3,1e+300,"c,d"\n'
