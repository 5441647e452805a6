"""What a column of labels is taken for: classes, numbers, truth values or dates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

FIRST = ["--target", "y", "--epochs", "1", "--hidden", "4"]


def table(y, rows=200):
    """Two columns and the labels."""
    source = np.random.default_rng(0)
    return pd.DataFrame({"a": source.normal(size=rows), "b": source.normal(size=rows), "y": y})


def learn(evcl, frame, *options, name="a"):
    frame.to_csv(f"{name}.csv", index=False)
    return evcl.done("learn", "--model", "m", "--data", f"{name}.csv", *options)


def test_numbers_that_would_be_classes_get_a_warning(evcl):
    ages = np.random.default_rng(0).integers(18, 99, 200)
    out = learn(evcl, table(ages), *FIRST)
    told = f"y has {len(set(ages))} different numbers, each of which is learned as a class: "
    assert out.startswith(f"warning: {told}--kind number or --kind count learns it as one")  # before it is trained
    assert out.count("different numbers") == 1
    out = learn(evcl, table(ages), "--epochs", "1", name="b")
    assert out.startswith(f"warning: {told}a new model with --kind number or --kind count learns it as one\n")
    assert json.loads(learn(evcl, table(ages), "--epochs", "1", "--json", name="c"))["notes"][0].startswith(told)
    Path("m").unlink()
    assert "different numbers" not in learn(evcl, table(ages), *FIRST, "--kind", "class")
    assert "different numbers" not in learn(evcl, table(ages), "--epochs", "1", name="b")
    Path("m").unlink()
    assert "different numbers" not in learn(evcl, table(np.arange(200) % 30), *FIRST)  # codes


def test_the_classes_of_held_out_rows_are_not_learned(evcl):
    assert "a: 180 examples of 180 classes learned in" in learn(evcl, table(np.arange(200)), *FIRST)


def test_amounts_of_money_are_numbers(evcl):
    amounts = [f"${amount:,.2f}" for amount in np.random.default_rng(0).normal(9000, 2000, 200)]
    out = learn(evcl, table(amounts), *FIRST)
    assert "note: y has numbers with fractions, so it is learned as a number" in out
    assert "RMSE" in out


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_dates_are_no_target(evcl, ending):
    frame = table(pd.date_range("2024-01-01", periods=200))
    frame.to_parquet("a.parquet")
    frame.to_csv("a.csv", index=False)
    assert (
        f"a.{ending}: column 'y': the target holds dates, which cannot be predicted: choose another --target"
        in evcl.refused("learn", "--model", "m", "--data", f"a.{ending}", *FIRST)
    )
    assert not Path("m").exists()


@pytest.mark.parametrize("spelt", [("false", "true"), ("FALSE", "TRUE"), ("0", "1"), ("0.0", "1.0")])
def test_a_truth_value_is_one_class_however_it_is_spelt(evcl, spelt):
    truth = np.arange(200) % 2
    learn(evcl, table(np.array(["False", "True"])[truth]), *FIRST)
    frame = table(np.array(spelt)[truth])
    out = learn(evcl, frame, "--epochs", "1", name="b")
    assert "new classes" not in out
    assert "classes  False, True\n" in evcl("inspect", "m")[1]
    _, out, _ = evcl("predict", "--model", "m", "--data", "b.csv", "--out", "p.csv")
    found = pd.read_csv("p.csv")
    assert f"accuracy {100 * (found.prediction == truth.astype(bool)).mean():.1f}% against its labels" in out


def test_truth_values_spelt_in_two_ways_in_the_first_file(evcl):
    learn(evcl, table(np.array(["False", "True", "false", "TRUE"])[np.arange(200) % 4]), *FIRST)
    assert "classes  False, True\n" in evcl("inspect", "m")[1]


def test_0_and_1_among_other_codes_are_no_truth_values(evcl):
    learn(evcl, table(np.arange(200) % 3), *FIRST)
    assert "new classes: True" in learn(evcl, table(["True"] * 200), "--epochs", "1", name="b")


def test_a_table_has_no_warning_of_scale(evcl):
    """A file that has a column almost constant: the encoder has scaled it, and the user cannot."""
    frame = table(np.arange(2400) % 2, 2400).assign(c=["z"] * 2 + ["x"] * 2398)
    learn(evcl, frame, *FIRST)
    Path("m").unlink()
    learn(evcl, frame, *FIRST, "--kind", "number")


def test_what_a_message_advises(evcl):
    def first(rows, *options):
        Path("a.csv").write_text("when,y\n" + rows)
        return evcl("learn", "--model", "m", "--data", "a.csv", "--target", "y", *options)[2]

    days = "".join(f"2024-01-{day:02},{day}\n" for day in range(1, 29))
    dear = first(days + "2024-02-01,dear\n", "--kind", "number")
    fix = "correct it, or leave the row out, or create the model with --kind class\n"
    assert dear == f"evcl: a.csv: line 30, column 'y': 'dear' is not a number, but the target is numeric: {fix}"
    odd = first(days + "2024-13-45,1\n")
    assert "'2024-13-45' is not a date, but the column holds dates: correct it, or create the model with" in odd
    assert "--missing" not in odd
    told = first("".join(f"{i},{label}\n" for i, label in enumerate(["EU", "NA"] * 10)))
    assert "every label is 'EU', and 10 rows without a label are left out (line 3: 'NA' means a missing" in told


def test_a_column_that_is_empty_from_now_on_is_named(evcl):
    frame = table(np.arange(200) % 2).assign(city=["bath", "york"] * 100)
    learn(evcl, frame, *FIRST)
    out = learn(evcl, frame.assign(a=None, city=None), "--epochs", "1", name="b")
    assert "note: there is nothing in column a, city: its values count as missing\n" in out
