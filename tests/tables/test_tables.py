"""One's own data, from files to predictions: formats, preprocessing, tasks, uncertainty, and what a person sees."""

from __future__ import annotations

import csv
import json
import sys
import tracemalloc
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from rich.console import Console
from tabular import learned, model_of

import evcl as package
from evcl import tables
from evcl.tables import Learning
from evcl.tables.arrow_file import ParquetFile
from evcl.tables.creating import create
from evcl.tables.csv_file import CsvFile
from evcl.tables.encoding import Encoder
from evcl.tables.fitting import EncoderFitting
from evcl.tables.image_folder import ImageFolder
from evcl.tables.parts import Category
from evcl.tables.rows import targets_of

FAST = ["--epochs", "20", "--hidden", "16", "--set", "lr=0.02"]


def people(rows=200, seed=0, shift=0.0):
    """Ages (some missing), incomes and cities, and whether they buy."""
    source = np.random.default_rng(seed)
    age, income = source.normal(40 + 10 * shift, 10, rows).round(1), source.normal(3, 1, rows).round(3)
    city = np.array(["bath", "hull", "york"])[source.integers(0, 3, rows)]
    buys = np.where((age - 40) / 10 + income - 3 + (city == "bath") > shift, "yes", "no")
    age[::17] = np.nan
    return pd.DataFrame({"age": age, "income": income, "city": city, "buys": buys})


def rows_of(path):
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


model = model_of(people, "january", "--target", "buys", *FAST)


def test_the_whole_way(model):
    out = learned(model, people(seed=1, shift=1), "february")
    for text in ("february: 180 examples of 2 classes learned in ", "20 held out", "% before), NLL ", "2 tasks)"):
        assert text in out
    people(seed=2).to_parquet("new.parquet")
    out = model.done("predict", "--model", "m", "--data", "new.parquet", "--out", "p.csv")
    found = rows_of("p.csv")
    assert list(found[0]) == [
        "age", "income", "city", "buys", "prediction", "probability_no", "probability_yes", "entropy", "epistemic",
        "unfamiliar",
    ]  # fmt: skip
    p = np.array([[float(row["probability_no"]), float(row["probability_yes"])] for row in found])
    assert p.sum(1) == pytest.approx(np.ones(200), abs=2e-6)
    entropy = np.array([float(row["entropy"]) for row in found])
    assert entropy == pytest.approx(-(p * np.log(np.maximum(p, 1e-9))).sum(1), abs=1e-4)
    epistemic = np.array([float(row["epistemic"]) for row in found])
    assert (epistemic >= 0).all()
    assert (epistemic <= entropy).all()
    right = np.mean([row["prediction"] for row in found] == people(seed=2).buys)
    assert right > 0.8
    assert f"accuracy {100 * right:.1f}% against its labels" in out
    assert f"200 predicted, mean entropy {entropy.mean():.3f}, epistemic {epistemic.mean():.3f}, unfamiliar " in out


def test_every_format_says_the_same(model):
    frame = people(seed=3)
    frame.to_csv("a.csv", index=False)
    frame.to_csv("b.tsv", index=False, sep="\t")
    frame[["buys", "city", "income", "age"]].to_csv("c.csv", index=False, sep=";")  # and another order
    Path("d.csv").write_text("\ufeff" + Path("a.csv").read_text().replace("\n", "\r\n\r\n", 3), encoding="utf-8")
    frame.to_parquet("e.parquet")
    frame.astype({"city": "category"}).to_parquet("f.parquet")
    np.savez_compressed("g.npz", **{name: frame[name].to_numpy(dtype=None if name in ("age", "income") else str)
                                    for name in frame})  # fmt: skip
    found = {}
    for name in ("a.csv", "b.tsv", "c.csv", "d.csv", "e.parquet", "f.parquet", "g.npz"):
        model.done("predict", "--model", "m", "--data", name, "--out", "p.csv", "--only-predictions")
        found[name] = Path("p.csv").read_text()
    assert len(set(found.values())) == 1


def test_the_encoder_is_what_a_few_lines_of_numpy_say(tmp_path, monkeypatch):
    """In pieces of seven rows: mean, deviation, missing values and categories of the whole file."""
    monkeypatch.setattr("evcl.tables.csv_file.ROWS_A_PIECE", 7)
    frame = people(50)
    frame["constant"] = 3
    frame.loc[3, "city"] = None
    frame.to_csv(tmp_path / "a.csv", index=False)
    source = CsvFile(tmp_path / "a.csv")
    names = ["age", "income", "city", "constant"]
    fitting = EncoderFitting(source, names, [])
    sizes = []
    for piece in source.pieces(names):
        fitting.see(piece)
        sizes.append(piece.rows)
    assert sizes == [7] * 7 + [1]
    encoder = Encoder.rebuilt(json.loads(json.dumps(fitting.encoder().described())))
    out = np.concatenate([encoder.encode(piece, source.path) for piece in source.pieces(names)])
    age = (frame.age - frame.age.mean()) / frame.age.std(ddof=0)
    income = (frame.income - frame.income.mean()) / frame.income.std(ddof=0)
    wanted = np.column_stack(
        [age.fillna(0), frame.age.isna(), income, *(frame.city == c for c in ("bath", "hull", "york")), np.zeros(50)]
    )
    assert out == pytest.approx(wanted, abs=1e-6)
    assert out[3, 3:6].tolist() == [0, 0, 0]
    assert isinstance(encoder.columns[2], Category)


def test_the_scale_of_the_first_task_is_applied_ever_after(model):
    frame = people(seed=5, shift=3)
    frame.to_csv("later.csv", index=False)
    before = tables.load_model(Path("m")).encoder.described()
    model.done("learn", "--model", "m", "--data", "later.csv")
    after = tables.load_model(Path("m")).encoder.described()
    assert after[0].pop("seen") == (people().age.min(), frame.age.max())  # only the range is that of both
    assert before[0].pop("seen") == (people().age.min(), people().age.max())
    assert [{**one, "seen": 0} for one in after] == [{**one, "seen": 0} for one in before]
    assert before[0]["mean"][0] == pytest.approx(people().age.mean())


@pytest.mark.full
def test_a_file_is_read_in_pieces(tmp_path):
    """The text of all rows is never in memory: reading and encoding need a third of it, and the inputs once."""
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(40_000, 10)), columns=[f"c{i}" for i in range(10)])
    frame["label"] = np.where(frame.c0 > 0, "a", "b")
    frame.to_csv(tmp_path / "a.csv", index=False, float_format="%.6f")
    source = CsvFile(tmp_path / "a.csv")
    tracemalloc.start()
    whole = [[cell for column in piece.cells.values() for cell in column] for piece in source.cells(frame.columns)]
    everything = tracemalloc.get_traced_memory()[1]
    del whole
    tracemalloc.reset_peak()
    model, rows = create(source, Learning("label"))
    train, held, _ = model.examples(source, rows, rows.targets(rows.names), Learning())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (len(train), len(held)) == (36_000, 4_000)
    assert peak < everything / 3


def test_what_is_held_out_is_not_learned_from_and_is_measured_on(model, tmp_path):
    frame = people(300, seed=4)
    frame.to_csv("b.csv", index=False)
    source = CsvFile(Path("b.csv"))
    made, rows = create(source, Learning("buys", seed=3))
    y = rows.targets(sorted(rows.names))
    train, held, _ = made.examples(source, rows, y, Learning(validation=0.2))
    assert (len(train), len(held)) == (240, 60)
    together = torch.cat([train.x, held.x]).numpy()
    whole = made.examples(source, rows, y, Learning(validation=0.0))
    assert whole[1] is None
    assert sorted(map(tuple, together.tolist())) == sorted(map(tuple, whole[0].x.tolist()))
    yes = sorted(rows.names).index("yes")
    assert abs((held.y == yes).double().mean() - (y == yes).double().mean()) < 0.02  # each class in proportion
    model.done("learn", "--model", "m", "--data", "b.csv", "--validation", "0")
    assert tables.load_model(Path("m")).history[-1]["held_out"] == 0
    assert " - " in model("inspect", "m")[1]


def test_the_same_commands_give_the_same_model(evcl):
    people().to_csv("january.csv", index=False)
    found = []
    for name in ("a", "b"):
        for task in ("one", "two"):
            made = ["--target", "buys", *FAST] if task == "one" else []
            evcl.done("learn", "--model", name, "--data", "january.csv", "--task", task, *made)
        found.append(tables.load_model(Path(name)))
    x = np.random.default_rng(0).normal(size=(9, found[0].encoder.inputs))
    assert (found[0].learner.predict_proba(x) == found[1].learner.predict_proba(x)).all()


def test_a_model_is_a_learner_too(model):
    learner = package.load("m")
    assert learner.tasks == ("january",)
    assert learner.classes() == (0, 1)  # by number: the names are the table's
    assert tables.load_model(Path("m")).labels == ["no", "yes"]


def test_new_classes_may_come(model):
    frame = people(seed=1)
    frame.loc[frame.age > 50, "buys"] = "maybe"
    out = learned(model, frame, "february", "--epochs", "60")
    assert "new classes: maybe\n" in out  # so that a slip of the pen does not become one unseen
    model("predict", "--model", "m", "--data", "february.csv", "--out", "p.csv")
    found = rows_of("p.csv")
    assert list(found[0])[4:8] == ["prediction", "probability_no", "probability_yes", "probability_maybe"]
    assert "maybe" in {row["prediction"] for row in found}


def test_a_whole_number_is_one_class_however_it_is_spelt(evcl):
    """As pandas writes a column of numbers: 1, or 1.0 where one of them was missing once; and Parquet's are floats."""
    frame = pd.DataFrame({"x": np.arange(40.0), "y": np.arange(40) % 2})
    frame.to_csv("january.csv", index=False)
    frame.astype({"y": float}).to_csv("february.csv", index=False)
    frame.astype({"y": float}).to_parquet("march.parquet")
    assert ",1.0" in Path("february.csv").read_text()
    for month in ("january.csv", "february.csv", "march.parquet"):
        made = ["--target", "y"] if month == "january.csv" else []
        out = evcl.done("learn", "--model", "m", "--data", month, *made, "--epochs", "1")
        assert "new classes" not in out
    assert tables.load_model(Path("m")).labels == ["0", "1"]
    assert " against its labels" in evcl("predict", "--model", "m", "--data", "february.csv", "--out", "p.csv")[1]
    Path("april.csv").write_text("x,y\n1,1.e999\n2,1.\n")  # no number of ours: a text
    assert "new classes: 1.e999\n" in evcl("learn", "--model", "m", "--data", "april.csv", "--epochs", "1")[1]


LARGE = [2**53, 2**53 + 1, 2**53 + 2, 2**63 - 1]  # as float64 the first two are one number


def large(form, column):
    """A file whose `column` holds each of these ten times, the other column 0 and 1."""
    numbers, other = LARGE * 10, {"y" if column == "x" else "x": np.arange(40) % 2}
    if form == "npz":
        np.savez("f.npz", **{column: np.array(numbers, ">u8")}, **other)
        return "f.npz"
    if form in ("parquet", "missing"):
        numbers[0] = None if form == "missing" else numbers[0]
        pd.DataFrame({column: pd.array(numbers, dtype="Int64"), **other}).to_parquet("f.parquet")
        return "f.parquet"
    texts = [f"{number}.0" if form == "spelt" else str(number) for number in numbers]
    pd.DataFrame({column: texts, **other}).to_csv("f.csv", index=False)
    return "f.csv"


@pytest.mark.parametrize("form", ["npz", "parquet", "csv", "spelt"])
def test_whole_numbers_beyond_float64_stay_apart_as_labels(evcl, form):
    data = large(form, "y")
    evcl.done("learn", "--model", "m", "--data", data, "--target", "y", "--epochs", "1")
    assert sorted(tables.load_model(Path("m")).labels) == sorted(map(str, LARGE))
    assert " against its labels" in evcl("predict", "--model", "m", "--data", data, "--out", "p.csv")[1]


def test_labels_that_are_missing_leave_the_others_as_they_are(evcl):
    evcl("learn", "--model", "m", "--data", large("parquet", "y"), "--target", "y", "--epochs", "1")
    assert "against the 39 labels it has" in evcl.done(
        "predict", "--model", "m", "--data", large("missing", "y"), "--out", "p.csv"
    )


@pytest.mark.parametrize("form", ["npz", "parquet", "missing", "csv"])
def test_whole_numbers_beyond_float64_are_categories_but_no_inputs(evcl, form):
    data = large(form, "x")
    learn = ["learn", "--model", "m", "--data", data, "--target", "y", "--epochs", "1"]
    status, _, err = evcl(*learn)
    place = "line 3" if form == "csv" else "row 2"
    expected = f"evcl: {data}: {place}, column 'x': 9007199254740993 is an integer that float64 cannot represent"
    assert (status, err[: len(expected)]) == (1, expected)
    evcl.done(*learn, "--category", "x")
    assert len(tables.load_model(Path("m")).encoder.columns[0].texts) == 4


def test_decimals_without_a_fraction_are_whole_numbers(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = pa.array([Decimal(2**53), Decimal(2**53 + 1), None], pa.decimal128(20, 0))
    pq.write_table(pa.table({"y": whole}), tmp_path / "f.parquet")
    (piece,) = ParquetFile(tmp_path / "f.parquet").pieces(["y"])
    labels = targets_of(ParquetFile(tmp_path / "f.parquet"), piece, "y", "class")
    assert list(labels) == [str(2**53), str(2**53 + 1), None]


def test_whole_numbers_that_float64_does_hold_are_inputs(evcl):
    np.savez("f.npz", x=np.array([2**53, -(2**60), 2**63, 5] * 10, float).astype("f8"), y=np.arange(40) % 2)
    np.savez("g.npz", x=np.array([2**53, -(2**60), 2**62, 5] * 10), y=np.arange(40) % 2)
    evcl.done("learn", "--model", "m", "--data", "f.npz", "--target", "y", "--epochs", "1")
    evcl.done("learn", "--model", "m", "--data", "g.npz", "--epochs", "1")


def test_a_new_model_says_how_it_took_the_columns(evcl):
    rows = "".join(f"0,{i};{i};{'yes' if i % 2 else 'no'}\n" for i in range(40))
    Path("january.csv").write_text("price;age;label\n" + rows)
    out = evcl("learn", "--model", "m", "--data", "january.csv", "--target", "label", "--epochs", "1")[1]
    assert "read with semicolons; decimal commas: price\n" in out
    assert "columns  price, age\n" in out
    Path("february.csv").write_text("price;age;label\n" + rows)
    assert "columns" not in evcl.done("learn", "--model", "m", "--data", "february.csv", "--epochs", "1")


def test_heads_of_their_own_and_the_task_inferred(model):
    frame = people(seed=1, shift=6)
    frame["buys"] = np.where(frame.income > 3, "rent", "lease")
    learned(model, frame, "rents", "--head", "new", "--epochs", "60")
    model.done("predict", "--model", "m", "--data", "rents.csv", "--out", "known.csv", "--task", "rents")
    known = rows_of("known.csv")
    assert {row["prediction"] for row in known} <= {"rent", "lease"}
    assert "task" not in known[0]
    model.done("predict", "--model", "m", "--data", "rents.csv", "--out", "inferred.csv")
    inferred = rows_of("inferred.csv")
    assert {row["task"] for row in inferred} <= {"january", "rents"}
    for row in inferred:
        own = {"no", "yes"} if row["task"] == "january" else {"lease", "rent"}
        assert row["prediction"] in own
        assert sum(float(row[f"probability_{label}"]) for label in own) == pytest.approx(1, abs=5e-6)
    assert "heads    january, rents" in model("inspect", "m")[1]
    model.done("learn", "--model", "m", "--data", "january.csv", "--task", "again", "--head", "january")
    assert len(tables.load_model(Path("m")).learner.heads) == 2
    assert (
        model.refused("predict", "--model", "m", "--data", "rents.csv", "--out", "p.csv", "--task", "rent")
        == "unknown task 'rent'; did you mean 'rents'?"
    )


def test_columns_are_left_out_or_taken_as_categories(evcl):
    frame = people()
    frame["id"] = np.arange(200)
    frame["district"] = np.arange(200) % 4
    frame.to_csv("january.csv", index=False)
    learn = ["learn", "--model", "m", "--data", "january.csv", "--target", "buys", *FAST]
    evcl.done(*learn, "--drop", "id", "--category", "district")
    columns = {column.name: column for column in tables.load_model(Path("m")).encoder.columns}
    assert columns["district"].texts == ("0", "1", "2", "3")
    assert "id" not in columns
    frame.drop(columns="id").to_parquet("february.parquet")  # without it, and with whole numbers as they are
    evcl.done("learn", "--model", "m", "--data", "february.parquet")
    frame["note"] = "x"
    learned(evcl, frame, "march", "--drop", "note")


def test_a_quoted_cell_may_hold_lines_and_lines_are_still_counted(model):
    Path("new.csv").write_text('age,income,city,buys\n30,3,"bath",yes\n\n30,3,"ba\nth",no\n')
    err = model("predict", "--model", "m", "--data", "new.csv", "--out", "p.csv", "--unknown", "error")[2]
    assert "new.csv: line 4, column 'city': 'ba\\nth' was not in" in err


def test_arrays_of_an_npz(evcl):
    source = np.random.default_rng(0)
    y = np.arange(120) % 2
    x = source.normal(size=(120, 3)) * [1, 100, 0.01] + [0, 5, y.mean()]
    pictures = source.integers(0, 255, size=(120, 4, 5)).astype(np.uint8)
    x[:, 1] += 300 * y
    np.savez("a.npz", x=x, pictures=pictures, label=y)
    evcl.done("learn", "--model", "m", "--data", "a.npz", "--target", "label", *FAST)
    numbers, pixels = tables.load_model(Path("m")).encoder.columns
    assert numbers.mean == pytest.approx(x.mean(0))
    assert numbers.std == pytest.approx(x.std(0))
    assert pixels.mean == pytest.approx([pictures.mean()])
    assert pixels.std == pytest.approx([pictures.std()])
    evcl.done("predict", "--model", "m", "--data", "a.npz", "--out", "p.csv")
    assert np.mean([row["prediction"] for row in rows_of("p.csv")] == y.astype(str)) > 0.9
    assert "pictures (4 x 5 numbers)" in evcl("inspect", "m")[1]


def test_folders_of_images(evcl):
    source = np.random.default_rng(0)
    for label, level in (("dark", 60), ("light", 200)):
        Path("pictures", label).mkdir(parents=True)
        for i in range(30):
            size = (8, 6) if i == 0 else tuple(source.integers(5, 90, 2))
            pixels = source.normal(level, 20, size=(size[1], size[0])).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).convert("RGB" if i % 2 else "L").save(f"pictures/{label}/{i:02}.png")
    out = evcl.done("learn", "--model", "m", "--data", "pictures", *FAST)
    assert "pictures: 54 examples of 2 classes" in out
    assert tables.load_model(Path("m")).encoder.columns[0].shape == (6, 8, 1)  # the first image's, grey as it is
    Path("loose").mkdir()
    Image.new("RGB", (300, 100), (250, 250, 250)).save("loose/b.jpg")
    Image.new("L", (8, 6), 30).save("loose/a.png")
    out = evcl.done("predict", "--model", "m", "--data", "loose", "--out", "p.csv")
    assert [(row["file"], row["prediction"]) for row in rows_of("p.csv")] == [("a.png", "dark"), ("b.jpg", "light")]
    assert "accuracy" not in out  # nothing says what they are
    out = evcl("predict", "--model", "m", "--data", "pictures", "--out", "p.csv")[1]
    assert "accuracy 100.0% against its labels" in out
    Image.new("L", (400, 200)).save("pictures/dark/00.png")
    evcl.done("learn", "--model", "n", "--data", "pictures", "--image-side", "10", *FAST)
    assert tables.load_model(Path("n")).encoder.columns[0].shape == (5, 10, 1)


def test_images_of_sixteen_bits_keep_their_upper_eight(tmp_path):
    values = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    for name in ("a/x.png", "a/y.tiff", "b/z.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(values).save(tmp_path / name)
    (piece,) = ImageFolder(tmp_path).pieces(["pixels"])
    assert piece.columns["pixels"].shape == (3, 8, 8, 1)
    assert (piece.columns["pixels"][..., 0] == values >> 8).all()
    coloured = next(ImageFolder(tmp_path, (8, 8, 3)).pieces(["pixels"])).columns["pixels"]
    assert (coloured == (values >> 8)[..., None]).all()


def test_parquet_without_pyarrow_says_what_to_install(model, monkeypatch):
    people().to_parquet("new.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert (
        model.refused("learn", "--model", "m", "--data", "new.parquet")
        == "new.parquet: Parquet needs pyarrow: pip install 'evcl[tables]'"
    )


def test_inspect_says_what_when_how_well_and_how_surely(model, monkeypatch):
    people(seed=1).to_csv("a file with a rather long name.csv", index=False)
    model.done("learn", "--model", "m", "--data", "a file with a rather long name.csv")
    history = tables.load_model(Path("m")).history
    assert all(line["learned"].startswith("20") for line in history)
    for width in (60, 100):
        for place in ("models", "progress"):
            console = Console(width=width, highlight=False)
            monkeypatch.setattr(f"evcl.cli.{place}.console", lambda console=console: console)
        out = model.done("inspect", "m")
        shown = ("method   evcl, seed 0, lr=0.02", "columns  age, income, city (3 categories)", "target   buys")
        for text in (*shown, "classes  no, yes", f"{100 * history[0]['accuracy']:.1f}%", "january"):
            assert text in out
        assert "…" not in out
        assert all(len(line) <= width for line in out.splitlines())
    found = " ".join(model("inspect", "m")[1].split())
    assert f"{history[0]['entropy']:.3f}" in found
    assert f"{history[0]['epistemic']:.3f}" in found


@pytest.mark.parametrize("method", ["vcl", "ewc", "naive", "vcl-kcenter-coreset"])
def test_other_methods_learn_tables_too(evcl, method):
    people().to_csv("january.csv", index=False)
    learn = ["learn", "--model", "m", "--data", "january.csv"]
    evcl.done(*learn, "--target", "buys", "--method", method, "--epochs", "5")
    evcl.done(*learn, "--task", "again", "--epochs", "5")
    assert f"method   {method}" in evcl("inspect", "m")[1]


# --- new classes, and rows that are kept -----------------------------------------------------------------------------


def digit_months():
    """Two new digits per month, and rows of all ten to test on; nothing of the inputs is scaled."""
    stream = package.benchmarks.get("split-digits", scenario="class")
    for k, task in enumerate(stream):
        frames = []
        for part in (task.train, task.test):
            frame = pd.DataFrame(part.x.numpy() * 16, columns=[f"p{i}" for i in range(64)])
            frames.append(frame.assign(digit=[f"d{label}" for label in part.y.tolist()]))
        frames[0].to_csv(f"month-{k}.csv", index=False)
        frames[1].to_csv("new.csv", index=False, mode="a" if k else "w", header=not k)


def accuracy(evcl):
    out = evcl.done("predict", "--model", "m", "--data", "new.csv", "--out", "p.csv")
    found = rows_of("p.csv")
    wanted = rows_of("new.csv")
    right = np.mean([a["prediction"] == b["digit"] for a, b in zip(found, wanted, strict=True)])
    assert f"accuracy {100 * right:.1f}%" in out
    return right


@pytest.mark.full
@pytest.mark.parametrize("keep", [None, 0, 2])
def test_two_new_classes_a_month(evcl, keep):
    """With the defaults, without any row of earlier months, and with 200 that are kept from some month on."""
    digit_months()
    for k in range(5):
        more = ["--target", "digit"] if k == 0 else []
        more += ["--keep", "200"] if k == keep else []
        out = evcl.done("learn", "--model", "m", "--data", f"month-{k}.csv", *more)
        assert "forget" not in out
        assert ("earlier tasks now, estimated: " in out) == (k > 0 and keep != 0)
        assert "note" not in out  # all is well
    assert accuracy(evcl) > 0.92
    now = "earlier tasks now, on the rows kept of them: "
    months = [f"month-{k}" for k in range(4) if keep is not None and k >= keep]
    assert (now in out) == bool(months)
    assert all(f"{month} " in out.partition(now)[2].splitlines()[0] for month in months)
    shown = evcl("inspect", "m")[1]
    assert ("keeps    200 rows of earlier tasks, which it rehearses" in shown) == (keep is not None)
    assert "  now  " in shown
    assert ("~" in shown) == (keep != 0)


def test_a_month_without_a_class_is_named(model):
    frame = people(seed=1)
    out = learned(model, frame[frame.buys == "yes"], "february")
    told = "note: task 'february' has no rows of 'no', which its head knows, and may make it forget them: "
    assert f"{told}--keep 200 would keep rows of every class" in out
    learned(model, people(seed=2), "march", "--keep", "80")
    out = learned(model, people(seed=3)[lambda frame: frame.buys == "no"], "april")
    assert "forget" not in out  # rows of the other class are kept
    assert "earlier tasks now, on the rows kept of them: march " in out


def test_keep_takes_a_number_of_rows(model):
    assert model("learn", "--model", "m", "--data", "january.csv", "--task", "x", "--keep", "-1")[0] == 2
    people().to_csv("other.csv", index=False)
    made = ["--data", "other.csv", "--target", "buys", "--method", "ekf", "--keep", "9"]
    status, _, err = model("learn", "--model", "n", *made)
    assert (status, Path("n").exists()) == (1, False)
    assert "ekf cannot have a memory of examples: a filter sees each row once" in err
