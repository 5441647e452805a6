"""evcl merge: models of several sites become one, and what cannot be merged is refused before anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from evcl import tables

FAST = ["--target", "label", "--epochs", "30", "--hidden", "16", "--set", "lr=0.02"]


def rows(seed, labels=("no", "yes"), count=200, cities=("bath", "hull"), centre=0.0):
    """Two classes that differ in x; a site differs from others in y."""
    source = np.random.default_rng(seed)
    which = source.integers(0, 2, count)
    x, y = 3 * which - 1.5 + source.normal(size=count), centre + source.normal(size=count)
    return pd.DataFrame({"x": x, "y": y, "city": source.choice(cities, count), "label": np.array(labels)[which]})


@pytest.fixture
def site(evcl, made_once):
    """Let a site learn a file of its own; the first call makes the base."""

    def make():
        rows(0, count=100).to_csv("start.csv", index=False)
        evcl.done("learn", "--model", "base.safetensors", "--data", "start.csv", *FAST)

    made_once(make)

    def learn(name, frame, *more, file=None):
        if not Path(f"{name}.safetensors").exists():
            shutil.copy("base.safetensors", f"{name}.safetensors")
        frame.to_csv(f"{file or name}.csv", index=False)
        evcl.done("learn", "--model", f"{name}.safetensors", "--data", f"{file or name}.csv", *more)

    return learn


def merge(evcl, *names, base="base.safetensors", out="merged.safetensors", more=()):
    return evcl("merge", *(f"{name}.safetensors" for name in names), "--base", base, "--out", out, *more)


def test_two_sites_become_one_model(evcl, site):
    site("north", rows(1))
    site("south", rows(2, centre=0.5))
    out = merge(evcl.done, "north", "south")
    assert "model: merged.safetensors (" in out
    assert "3 tasks, of 2 sites)" in out
    found = tables.load_model(Path("merged.safetensors"))
    assert [line["task"] for line in found.history] == ["start", "north", "south"]
    assert found.learner.tasks == ("start", "north", "south")
    seen = [tables.load_model(Path(f"{name}.safetensors")).encoder.columns[0].seen for name in ("north", "south")]
    assert found.encoder.columns[0].seen == (min(one[0] for one in seen), max(one[1] for one in seen))
    rows(3).to_csv("new.csv", index=False)
    predict = ["predict", "--model", "merged.safetensors", "--data", "new.csv", "--out", "p.csv", "--json"]
    assert json.loads(evcl.done(*predict))["accuracy"] > 0.9
    assert evcl("inspect", "merged.safetensors")[1].count("~") == 4  # three tasks, and what it means
    rows(4).to_csv("april.csv", index=False)
    evcl.done("learn", "--model", "merged.safetensors", "--data", "april.csv")


def test_sites_may_have_classes_and_task_names_of_their_own(evcl, site):
    """Each site numbers its classes in its own order."""
    site("north", rows(1, ("maybe", "never"), centre=4.0), file="february")
    site("south", rows(2, ("always", "maybe"), centre=-4.0), file="february")
    out = merge(evcl.done, "north", "south", more=["--json"])
    told = json.loads(out)
    assert [task["task"] for task in told["tasks"]] == ["start", "north: february", "south: february"]
    assert set(told["classes"]) == {"no", "yes", "maybe", "never", "always"}
    assert all(task["now"] > 0.8 for task in told["tasks"])
    for frame in (rows(5, ("maybe", "never"), centre=4.0), rows(6, ("always", "maybe"), centre=-4.0), rows(7)):
        frame.to_csv("new.csv", index=False)
        predict = ["predict", "--model", "merged.safetensors", "--data", "new.csv", "--out", "p.csv", "--json"]
        assert json.loads(evcl.done(*predict))["accuracy"] > 0.85


def test_what_cannot_be_merged_is_refused_and_nothing_is_written(evcl, site):
    site("north", rows(1))
    site("south", rows(2))
    site("keeping", rows(3), "--keep", "20")
    site("other", rows(4, cities=("bath", "oslo")))
    shutil.copy("south.safetensors", "copy.safetensors")
    rows(5).to_csv("elsewhere.csv", index=False)
    evcl.done("learn", "--model", "elsewhere.safetensors", "--data", "elsewhere.csv", *FAST)
    before = set(Path().iterdir())
    for names, message in (
        (["north"], "merge takes the files of at least two sites"),
        (["north", "north"], "merge takes each file once"),
        (["copy", "south"], "south is the same model as another site: its rows would count twice"),
        (["north", "base"], "merge takes each file once"),
        (["north", "keeping"], "keeping keeps rows, which would leave their site"),
        (["north", "other"], "other.safetensors encodes column 'city' in another way than base.safetensors"),
        (["north", "elsewhere"], "elsewhere.safetensors encodes column 'x' in another way"),
        (["north", "nobody"], "there is no file nobody.safetensors"),
    ):
        status, out, err = merge(evcl, *names)
        assert (status, out, err.count("\n")) == (1, "", 1), message
        assert message in err
        assert {path for path in Path().iterdir() if path.suffix != ".lock"} == before
    assert (
        "--out m.txt: it is a model file, whose name should end in .saf"
        in merge(evcl, "north", "south", out="m.txt")[2]
    )
    assert "does not continue north.safetensors" in merge(evcl, "south", "keeping", base="north.safetensors")[2]
    Path("merged.safetensors").write_text("mine")
    assert "merged.safetensors already exists" in merge(evcl, "north", "south")[2]
    assert Path("merged.safetensors").read_text() == "mine"


def test_a_site_may_lack_a_column(evcl, site):
    """Rows without it were learned there, so the merged model knows missing values as these."""
    site("north", rows(1).drop(columns="y"))
    site("south", rows(2))
    merge(evcl.done, "north", "south")
    parts = tables.load_model(Path("merged.safetensors")).encoder.columns
    assert [part.name for part in parts if getattr(part, "lacked", False)] == ["y"]
