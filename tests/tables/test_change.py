"""What a later file brings: categories, columns, missing values, other scales. Old rows are predicted as before."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from tabular import learned, model_of, predicted

from evcl import Callback, EvclError, tables
from evcl._core.interrupts import Interrupted
from evcl.tables.commands import open_source
from evcl.tables.encoding import Encoder
from evcl.tables.fitting import EncoderFitting
from evcl.tables.model import TABLE_NOTE
from evcl.tables.saved import notes_of

FAST = ["--epochs", "20", "--hidden", "16", "--set", "lr=0.02"]


def shop(rows=300, seed=0, cities=("bath", "hull", "york"), shift=0.0, scale=1.0):
    source = np.random.default_rng(seed)
    x, city = source.normal(size=rows), source.choice(cities, rows)
    y = np.where(x + 2 * (city == cities[-1]) > 1, "yes", "no")
    return pd.DataFrame({"x": (x * scale + shift).round(3), "city": city, "y": y})


model = model_of(shop, "a", "--target", "y", *FAST)


def probabilities(call, data="a.csv"):
    call.done("predict", "--model", "m", "--data", data, "--out", "p.csv")
    return pd.read_csv("p.csv").probability_yes.to_numpy()


def test_a_new_category_is_learned(model):
    before = probabilities(model)
    shop(seed=1, cities=("bath", "leeds")).to_csv("b.csv", index=False)
    assert "note: new categories of city: leeds\n" in model.done(
        "learn", "--model", "m", "--data", "b.csv", "--epochs", "60"
    )
    assert "city (4 categories)" in model("inspect", "m")[1]
    later = shop(seed=2, cities=("bath", "leeds"))
    assert "unknown" not in predicted(model, later, "c")
    found = pd.read_csv("p.csv")
    assert (found.prediction == later.y).mean() > 0.85
    leeds = (later.city == "leeds").to_numpy()
    assert found.probability_yes[leeds].mean() > found.probability_yes[~leeds].mean() + 0.3
    assert np.abs(probabilities(model) - before).mean() < 0.2  # and the first month is known


def encoded(found, path):
    source = open_source(Path(path), found)
    found.check(source, (), "missing")
    (piece,) = source.pieces([name for name in found.encoder.names if name in source.shapes])
    return found.encoder.encode(piece, source.path)


def test_predictions_for_old_rows_stay_when_the_encoder_grows(model):
    """Without any training: new texts, columns, missing values and a new scale, all at once."""
    frame = shop(seed=1, cities=("bath", "leeds"), shift=5000, scale=40).assign(size=np.arange(300) % 7)
    frame.loc[::9, "x"] = np.nan
    frame.to_csv("b.csv", index=False)
    found = tables.load_model(Path("m"))
    before = encoded(found, "a.csv")
    logits = found.learner.mean_network()(torch.tensor(before))
    found.see(open_source(Path("b.csv"), found))
    kinds = [part.kind for part in found.encoder.columns]
    assert sorted(kinds) == ["beyond", "category", "category", "missing", "number", "number"]
    after = encoded(found, "a.csv")
    width = before.shape[1]
    assert (after[:, :width] == before).all()
    assert (after[:, width:] == 0).all()  # also the column `size`, which these rows lack
    again = found.learner.mean_network()(torch.tensor(after))
    assert again.detach().numpy() == pytest.approx(logits.detach().numpy(), abs=1e-6)


def test_what_lies_far_outside_gets_a_scale_of_its_own(model, tmp_path):
    frame = shop(seed=1, shift=5000, scale=40)
    frame.to_csv("b.csv", index=False)
    assert "note: column 'x' moved far from what was learned before" in model.done(
        "learn", "--model", "m", "--data", "b.csv", "--epochs", "60"
    )
    found = tables.load_model(Path("m"))
    inputs = encoded(found, "b.csv")
    assert np.abs(inputs).max() < 10
    assert inputs[:, -1] == pytest.approx(3 + (frame.x - frame.x.mean()) / frame.x.std(ddof=0), abs=1e-3)
    assert Encoder.rebuilt(found.encoder.described()).described() == found.encoder.described()
    later = shop(seed=3, shift=5000, scale=40)
    later.to_csv("c.csv", index=False)
    assert ((probabilities(model, "c.csv") > 0.5) == (later.y == "yes")).mean() > 0.8


@pytest.mark.parametrize(
    ("later", "scales"),
    [((70.0, 10.0), 0), ((0.07, 0.01), 1), ((70_000.0, 10_000.0), 1), ((140.0, 10.0), 0), ((200.0, 10.0), 1)],
)
def test_a_change_of_units_gets_another_scale_and_a_shift_of_some_deviations_none(evcl, later, scales):
    learned(evcl, shop(shift=70, scale=10), "a", "--target", "y", "--epochs", "1", "--hidden", "4")
    learned(evcl, shop(seed=1, shift=later[0], scale=later[1]), "b", "--epochs", "1")
    parts = tables.load_model(Path("m")).encoder.parts("x")
    assert [part.kind for part in parts] == ["number", *["beyond"] * scales]


def test_a_range_that_grows_slowly_keeps_its_scale(model):
    for month in range(1, 4):
        shop(seed=month, shift=1.5 * month).to_csv("b.csv", index=False)
        out = model("learn", "--model", "m", "--data", "b.csv", "--task", str(month), "--epochs", "1")[1]
        assert "moved far" not in out
    part = tables.load_model(Path("m")).encoder.columns[0]
    assert part.seen[1] > 6
    assert part.limits == (None, None)


def test_new_columns_are_learned_and_columns_that_vanish_are_missing(model):
    source = np.random.default_rng(5)
    frame = shop(400, seed=1).assign(member=source.choice(["gold", "none"], 400))
    frame["y"] = np.where((frame.x + 3 * (frame.member == "gold") > 1.5), "yes", "no")
    assert "note: new column: member\n" in learned(model, frame, "b", "--epochs", "60")
    found = pd.read_csv("b.csv", keep_default_na=False)
    p = probabilities(model, "b.csv")
    assert p[found.member == "gold"].mean() > p[found.member != "gold"].mean() + 0.3
    frame.drop(columns="city").to_csv("c.csv", index=False)
    assert "note: there is no column city: its values count as missing\n" in model.done(
        "learn", "--model", "m", "--data", "c.csv", "--epochs", "1"
    )
    out = predicted(model, frame.drop(columns=["city", "y"]).assign(more=1), "d")
    assert "note: there is no column city (new: more): its values count as missing\n" in out
    assert "note: column more is not used: the model has not learned it\n" in out


def test_missing_values_that_come_later_are_marked(model):
    frame = shop(seed=1)
    frame.loc[::5, "x"] = np.nan
    assert "note: missing values are new in x: an input marks them\n" in learned(model, frame, "b", "--epochs", "1")
    assert [p.kind for p in tables.load_model(Path("m")).encoder.parts("x")] == ["number", "missing"]


# For each file, what x, the number `late` and the date `day` are: full, with some empty cells, empty, or not there (-);
# after a colon, --unknown
SEQUENCES = {
    "late, with empty cells": ["full - -", "full some some", "full - -"],
    "late, then with empty cells": ["full - -", "full full full", "full some some"],
    "late, empty, then with empty cells": ["full - -", "full full full", "full empty empty", "full some some"],
    "vanished, then with empty cells": ["full - full", "- - full", "some - some"],
    "empty, then with empty cells": ["full - full", "empty - empty", "some - some"],
    "marked, then vanished": ["some - some", "- - full", "full - -"],
    "not marked, as nothing new is learned": ["full - full", "some - some:missing", "some - some"],
    "vanished, as nothing new is learned": ["full - full", "- - full:missing", "some - some"],
}


@pytest.mark.parametrize("files", SEQUENCES.values(), ids=SEQUENCES)
def test_rows_are_encoded_as_when_they_were_learned(evcl, files):
    """What came later is 0 in them: kept rows, summaries and all that a method remembers rely on it."""
    days = pd.Series(pd.date_range("2024-01-01", periods=60).strftime("%Y-%m-%d"))
    learned, found = [], None
    for i, file in enumerate(files):
        frame, (what, _, unknown) = shop(60, seed=i), file.partition(":")
        for name, values, how in zip(("x", "late", "day"), (frame.x, frame.x + 1, days), what.split(), strict=True):
            empty = {"some": [row % 7 == 3 for row in range(60)], "empty": [True] * 60}.get(how, [False] * 60)
            frame[name] = values.mask(empty)
            frame = frame.drop(columns=name) if how == "-" else frame
        frame.to_csv(f"{i}.csv", index=False)
        if found is None:
            small = ["--target", "y", "--hidden", "4", "--epochs", "1"]
            evcl.done("learn", "--model", "m", "--data", "0.csv", *small)
        else:
            found.see(open_source(Path(f"{i}.csv"), found), unknown=unknown or "learn")
            found.save(Path("m"))
        found = tables.load_model(Path("m"))  # as the next command reads it
        learned.append(encoded(found, f"{i}.csv"))
    for i, before in enumerate(learned):
        now = encoded(found, f"{i}.csv")
        np.testing.assert_array_equal(now[:, : before.shape[1]], before)
        assert not now[:, before.shape[1] :].any()


def test_a_file_without_a_column_is_one_with_empty_cells(model):
    frame = shop(seed=1).assign(late=np.arange(300) % 5)
    frame.loc[::5, "late"] = np.nan
    learned(model, frame, "b", "--epochs", "5")
    without = probabilities(model)
    shop().assign(late="").to_csv("e.csv", index=False)
    np.testing.assert_array_equal(probabilities(model, "e.csv"), without)
    shop()[:1].to_csv("one.csv", index=False)
    np.testing.assert_allclose(probabilities(model, "one.csv"), without[:1], atol=1e-6)


@pytest.mark.parametrize("keep", [(), ("--keep", "100")], ids=["none kept", "some kept"])
def test_a_file_without_a_late_column_and_without_a_class_costs_no_earlier_file(model, keep):
    """Rows from before the column came are of the same kind as rows of a file that lost it."""
    source = np.random.default_rng(3)
    frame = shop(seed=1)
    frame["late"] = np.where(frame.y == "yes", 1, -1) + 0.3 * source.normal(size=300)
    frame.loc[::10, "late"] = np.nan
    frame.to_csv("b.csv", index=False)
    model("learn", "--model", "m", "--data", "b.csv", *keep)
    out = json.loads(learned(model, shop(seed=2).query("y == 'yes'"), "c", "--json"))
    told = [note for note in out["notes"] if "has no rows of 'no'" in note]
    assert len(told) == (0 if keep else 1)  # kept rows are rows of every class
    found = json.loads(predicted(model, shop(seed=4), "d", "--json"))
    assert found["accuracy"] > 0.93
    assert out["now"]["a"]["accuracy"] == pytest.approx(found["accuracy"], abs=0.07)


def test_missing_tokens_are_remembered(evcl):
    frame = shop()
    frame.loc[::5, "x"] = -999
    frame.to_csv("a.csv", index=False)
    frame.to_parquet("b.parquet")
    evcl.done("learn", "--model", "m", "--data", "a.csv", "--target", "y", "--missing", "-999", *FAST)
    evcl.done("learn", "--model", "m", "--data", "b.parquet", "--epochs", "1")
    found = tables.load_model(Path("m"))
    assert found.missing == ("-999",)
    assert found.encoder.columns[0].seen[0] > -10


def test_columns_beside_predictions_stay_as_they_are(evcl):
    """Except that numbers have decimal points."""
    frame = shop().assign(id=[f"{i:05}" for i in range(300)], x=[f"{1000 * x:,.2f}" for x in shop().x])
    frame["x"] = frame.x.map(lambda text: text.translate(str.maketrans(",.", ".,")))
    frame["day"] = "01.02.2024"
    frame.to_csv("a.csv", index=False, sep=";")
    learn = ["learn", "--model", "m", "--data", "a.csv", "--target", "y", "--drop", "id", "--epochs", "1"]
    evcl.done(*learn)
    evcl.done("predict", "--model", "m", "--data", "a.csv", "--out", "p.csv")
    found = pd.read_csv("p.csv", dtype={"id": str, "day": str})
    assert list(found)[:5] == ["x", "city", "y", "id", "day"]
    assert found.x.to_numpy() == pytest.approx(1000 * shop().x.to_numpy(), abs=0.01)
    assert list(found.id) == list(frame.id)
    assert set(found.day) == {"01.02.2024"}


def test_a_whole_number_is_one_category_however_it_is_spelt(evcl):
    frame = shop().assign(district=np.arange(300) % 4)
    frame.to_csv("a.csv", index=False)
    learn = ["learn", "--model", "m", "--epochs", "1", "--data"]
    evcl.done(*learn, "a.csv", "--target", "y", "--category", "district")
    frame.astype({"district": float}).to_csv("b.csv", index=False)
    frame.astype({"district": float}).to_parquet("c.parquet")
    for data in ("b.csv", "c.parquet"):
        assert "new categories" not in evcl(*learn, data)[1]
    assert tables.load_model(Path("m")).encoder.texts("district") == {"0", "1", "2", "3"}


def test_room_for_categories_runs_out(model, monkeypatch):
    monkeypatch.setattr("evcl.tables.fitting.MOST_CATEGORIES", 4)
    out = learned(model, shop(seed=1, cities=("leeds", "ripon", "york")), "b", "--epochs", "1")
    assert "column 'city' has 4 categories, the maximum; others count as missing\n" in out
    assert "not known, and counted as missing in " in out
    monkeypatch.setattr("evcl.tables.fitting.MOST_INPUTS", 5)
    out = learned(model, shop(seed=1).assign(more=1), "c", "--epochs", "1")
    assert "column 'more' is new, but there is no room left" in out


def test_a_method_that_cannot_grow_says_so(evcl):
    shop().to_csv("a.csv", index=False)
    learn = ["learn", "--model", "m", "--epochs", "1"]
    evcl.done(*learn, "--data", "a.csv", "--target", "y", "--method", "progressive")
    shop(seed=1, cities=("bath", "leeds")).to_csv("b.csv", index=False)
    out = evcl.done(*learn, "--data", "b.csv")
    assert "what is new counts as missing: progressive cannot have more inputs" in out
    assert "'leeds' of city: not known, and counted as missing" in out


def test_dates_are_a_distance_and_points_on_circles(tmp_path):
    when = pd.date_range("2023-01-01", periods=400, freq="31h")
    pd.DataFrame({"when": when}).to_csv(tmp_path / "a.csv", index=False)
    source = open_source(tmp_path / "a.csv")
    fitting = EncoderFitting(source, ["when"])
    pieces = list(source.pieces(["when"]))
    for piece in pieces:
        fitting.see(piece)
    encoder = fitting.encoder()
    (part,) = encoder.columns
    assert part.cycles == ("year", "week", "day")
    out = encoder.encode(pieces[0], source.path)
    years = np.asarray((when - when[0]) / pd.Timedelta(days=365.2425))
    assert out[:, 0] == pytest.approx(years - years.mean(), abs=1e-4)
    hour = 2 * np.pi * (when.hour + when.minute / 60) / 24
    assert out[:, 5] == pytest.approx(np.sin(hour), abs=1e-4)
    assert out[:, 6] == pytest.approx(np.cos(hour), abs=1e-4)
    week = 2 * np.pi * (((when - pd.Timestamp("1970-01-01")) / pd.Timedelta(days=7)) % 1)
    assert out[:, 3] == pytest.approx(np.sin(week), abs=1e-4)
    short = pd.DataFrame({"when": when[:20].normalize()})
    short.to_csv(tmp_path / "b.csv", index=False)
    source = open_source(tmp_path / "b.csv")
    fitting = EncoderFitting(source, ["when"])
    for piece in source.pieces(["when"]):
        fitting.see(piece)
    assert fitting.encoder().columns[0].cycles == ("week",)  # three weeks of whole days


@pytest.mark.full
def test_a_damaged_description_is_refused_or_read_and_never_crashes(evcl):
    """Each field of each kind of part, in turn."""
    when = pd.date_range("2024-01-01", periods=300, freq="7h")
    learned(evcl, shop().assign(when=when), "a", "--target", "y", "--epochs", "1", "--hidden", "4")
    frame = shop(seed=1, cities=("bath", "leeds"), shift=5000).assign(when=when)
    frame.loc[::9, "x"] = np.nan
    learned(evcl, frame, "b", "--epochs", "1")
    notes, tensors = notes_of(Path("m")), load_file("m")
    saved = json.loads(notes[TABLE_NOTE.name])
    assert sorted({part["kind"] for part in saved["columns"]}) == ["beyond", "category", "missing", "number", "time"]
    refused = []
    for i, part in enumerate(saved["columns"]):
        for key in part:
            for value in (None, "x", [], [[]], {}, 0, [1e999], 1e999, -1, ["y", "y"]):
                columns = [{**one, key: value} if k == i else one for k, one in enumerate(saved["columns"])]
                save_file(tensors, "n", {**notes, TABLE_NOTE.name: json.dumps({**saved, "columns": columns})})
                try:
                    tables.load_model(Path("n"))
                except EvclError as error:
                    refused.append(str(error))
    assert len(refused) > 150
    assert all(line.startswith("cannot load n: ") and "\n" not in line for line in refused)
    for missing in (3, [3], [None], {"a": 1}):
        save_file(tensors, "n", {**notes, TABLE_NOTE.name: json.dumps({**saved, "missing": missing})})
        if missing != {"a": 1}:
            with pytest.raises(EvclError, match="cannot load n: "):
                tables.load_model(Path("n"))


def test_a_task_with_new_inputs_resumes(model):
    """Interrupted after some epochs, and continued: the same model as without the interruption."""
    shop(seed=1, cities=("bath", "leeds")).to_csv("b.csv", index=False)
    before = Path("m").read_bytes()

    class Stop(Callback):
        def end_epoch(self, epoch):
            if epoch.epoch == 2:
                signal.raise_signal(signal.SIGINT)

    tables.learn(Path("m"), Path("b.csv"), epochs=6)
    whole = {name: t.clone() for name, t in load_file("m").items()}
    Path("m").write_bytes(before)
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        tables.learn(Path("m"), Path("b.csv"), epochs=6, callbacks=[Stop()])
    assert Path("m").read_bytes() == before
    assert Path("m.checkpoint").is_dir()
    tables.learn(Path("m"), Path("b.csv"), epochs=6)
    again = load_file("m")
    assert whole.keys() == again.keys()
    assert all(t.equal(again[name]) for name, t in whole.items())
