"""Whatever is wrong with a file: one line that names it and the place, status 1, and the model file untouched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

import evcl as package
from evcl import tables

FAST = ["--epochs", "1"]
HEADER = "age,city,label\n"
GOOD = HEADER + "".join(f"{20 + i},{'bath' if i % 3 else 'york'},{'yes' if i % 2 else 'no'}\n" for i in range(40))


def image(path, size=(6, 5), mode="L", value=7):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


@pytest.fixture
def model(evcl, made_once):
    """A model that has learned a table, and the command, in one folder."""

    def make():
        Path("good.csv").write_text(GOOD)
        evcl.done("learn", "--model", "m", "--data", "good.csv", "--target", "label", *FAST)

    made_once(make)
    return evcl


def refused(call, *arguments, model="m"):
    """The one line of the error; nothing in the folder has changed but for what the test itself did."""
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    status, out, err = call(*arguments)
    assert (status, out, err[:6], err.count("\n")) == (1, "", "evcl: ", 1), err
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    return err.removeprefix("evcl: ").rstrip("\n")


NUMERIC = "new.csv: line 3, column 'age': 'old' is not a number, but the column is numeric"
CASES = {
    "other columns alone": ("year,town,label\n2,a,yes\n", "new.csv: there is no column 'age', 'city', which the model"),
    "text in a number column": (HEADER + "30,bath,yes\nold,bath,no\n", NUMERIC),
    "not UTF-8": (HEADER.encode() + b"30,b\xe4th,yes\n", "new.csv: line 2: byte 5 is not UTF-8"),
    "Excel's Unicode text": ("city,label\nbath,yes\n".encode("utf-16"), "new.csv: it is UTF-16; save it as UTF-8"),
    "infinity": (HEADER + "inf,bath,yes\n", "new.csv: line 2, column 'age': infinity"),
    "too large for a float": (HEADER + "1e300,bath,yes\n", "new.csv: line 2, column 'age': 1e+300 is too large"),
    "no number of Python's": (HEADER + "1_000,bath,yes\n", "line 2, column 'age': '1_000' is not a number"),
    "an empty file": ("", "new.csv: line 1: it is empty; a CSV file begins with a line of column names"),
    "a header alone": (HEADER, "new.csv: it holds no rows"),
    "no labels": (HEADER + "30,bath,\n31,york,\n", "column 'label': every label is missing; choose another --target"),
    "too few cells": (HEADER + "30,bath,yes\n\n31,york\n", "new.csv: line 4: 2 cells, but the header has 3"),
    "a name twice": ("age,age,label\n", "new.csv: line 1: two columns are called 'age'"),
    "a name missing": ("age,,label\n", "new.csv: line 1: column 2 has no name; name it"),
    "ends inside a quote": (HEADER + '30,"bath,yes\n', "new.csv: line 2: unexpected end of data; is a quote left open"),
    "a long line": (HEADER + "30,bath,yes\n" + "9" * 1_000_001, "new.csv: line 3: longer than 1,000,000 bytes"),
    "an open quote": (HEADER + '30,"bath,yes\n' + "31,bath,no\n" * 100_000, "new.csv: line 2: "),
    "too many columns": (",".join(f"c{i}" for i in range(10_001)), "line 1: 10001 columns, but the maximum is 10000"),
    "a fraction as a class": (HEADER + "30,bath,1.5\n", "line 2, column 'label': 1.5 is a number with a fraction, but"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_csv(model, name):
    text, message = CASES[name]
    Path("new.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in refused(model, "learn", "--model", "m", "--data", "new.csv", *FAST)


@pytest.mark.parametrize("name", ["other columns alone", "text in a number column", "an empty file", "a long line"])
def test_a_bad_csv_is_not_predicted_either_and_no_half_of_a_result_is_left(model, name):
    text, message = CASES[name]
    Path("new.csv").write_text(text)
    assert message in refused(model, "predict", "--model", "m", "--data", "new.csv", "--out", "p.csv")


STRANGE = {
    "a column went missing": ("age,label\n2,yes\n", "new.csv: there is no column 'city', which the model learned from"),
    "a column more": (
        "age,city,size,label\n2,bath,1,yes\n",
        "new.csv: the model does not know column 'size'; --unknown learn learns it, --drop leaves it out",
    ),
    "an unknown category": (
        GOOD + "30,leeds,yes\n",
        "new.csv: line 42, column 'city': 'leeds' was not in any earlier task (bath, york); --unknown learn learns it",
    ),
}


@pytest.mark.parametrize("name", STRANGE)
def test_what_is_new_is_an_error_on_request(model, name):
    text, message = STRANGE[name]
    Path("new.csv").write_text(text)
    strict = ["--model", "m", "--data", "new.csv", "--unknown", "error"]
    assert message in refused(model, "learn", *strict, *FAST)
    assert message in refused(model, "predict", *strict, "--out", "p.csv")


def write_arrow(**columns):
    table = pa.table(columns)
    with pa.OSFile("new.arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    ("texts", "index", "message"),
    [
        ([b"bath", b"b\xe4th"], 1, "row 3, column 'city': it holds a text that is not UTF-8"),
        ([b"bath"], 9, "it is damaged"),
    ],
)
def test_categories_of_an_arrow_file_that_are_wrong(model, texts, index, message):
    """pandas writes categories as a dictionary of texts, and where in it each row's is."""
    cities = pa.array(texts).view(pa.string())
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0, index], pa.int32()), cities, safe=False)
    write_arrow(age=[20, 30, 40], city=column, label=["yes", "no", "yes"])
    assert message in refused(model, "learn", "--model", "m", "--data", "new.arrow")


def test_times_that_are_no_midnight_are_read(model):
    """Arrow calls them invalid, and they do no harm."""
    days = pa.array([86_400_001, 2], pa.int64()).view(pa.date64())
    write_arrow(age=[20, 30], city=["bath", "york"], label=["yes", "no"], day=days)
    model.done("learn", "--model", "m", "--data", "new.arrow", *FAST)


def test_an_unknown_category_may_pass_as_a_missing_one(model):
    Path("new.csv").write_text(STRANGE["an unknown category"][0])
    for command in (["learn", "--unknown", "missing", *FAST], ["predict", "--out", "p.csv"]):
        assert "note: 'leeds' of city: not known, and counted as missing in 1 row\n" in model.done(
            *command, "--model", "m", "--data", "new.csv"
        )


def test_a_target_that_is_missing(model):
    Path("new.csv").write_text("age,city\n30,bath\n")
    wanted = "new.csv: there is no column 'label', the target; it has 'age', 'city'"
    assert refused(model, "learn", "--model", "m", "--data", "new.csv") == wanted
    assert model("predict", "--model", "m", "--data", "new.csv", "--out", "p.csv")[0] == 0  # it needs none
    found = refused(model, "learn", "--model", "new", "--data", "good.csv", "--target", "lable")
    assert found == "good.csv: there is no column 'lable', the target; it has 'age', 'city', 'label'"
    assert "name its label column with --target" in refused(model, "learn", "--model", "new", "--data", "good.csv")


def test_the_first_file_is_not_guessed_at(evcl):
    def first(text, *options):
        Path("first.csv").write_text(text)
        return refused(evcl, "learn", "--model", "m", "--data", "first.csv", "--target", "label", *options)

    rows = "".join(f"{i},{'yes' if i % 2 else 'no'}\n" for i in range(50))
    found = first("age,label\n" + rows + "12O,yes\n")
    assert "first.csv: line 52, column 'age': '12O' is not a number, but the column is numeric: correct it" in found
    assert "--missing '12O'" in found
    assert "--category age" in found
    assert "column 'age': all its values are missing" in first("age,x,label\n,1,yes\n,2,no\n")
    assert "every label is 'yes'" in first("age,label\n1,yes\n2,yes\n")
    assert "no column is left to learn from" in first("label\nyes\nno\n")
    assert "there is no column 'agee' to leave out" in first("age,label\n" + rows, "--drop", "agee")
    texts = "".join(f"name{i}x,{'yes' if i % 2 else 'no'}\n" for i in range(1001))
    assert "line 1002, column 'name': more than 1,000 distinct categories are too many" in first("name,label\n" + texts)
    classes = "".join(f"{i},c{i}x\n" for i in range(1001))
    assert "more than 1,000 different labels are too many classes" in first("age,label\n" + classes)


def test_a_parquet_file_cut_short_and_others(model):
    table = pa.table({"age": [30.0, 31.0], "city": ["bath", "york"], "label": ["yes", "no"]})
    pq.write_table(table, "new.parquet")
    content = Path("new.parquet").read_bytes()
    for cut in (len(content) // 2, 3, 0):
        Path("new.parquet").write_bytes(content[:cut])
        found = refused(model, "learn", "--model", "m", "--data", "new.parquet")
        assert found.startswith("new.parquet: it is truncated or not a Parquet file (")
    damaged = bytearray(content)
    damaged[4:60] = b"\xff" * 56
    Path("new.parquet").write_bytes(damaged)
    assert refused(model, "learn", "--model", "m", "--data", "new.parquet").startswith("new.parquet: ")
    for ages, message in (
        (pa.array(["30", "31"]), "row 1, column 'age': it holds text, but the model learned it as numbers"),
        (
            pa.array([1, 2], pa.timestamp("ms")),
            "row 1, column 'age': it holds dates, but the model learned it as numbers",
        ),
        (pa.array([[1], [2]]), "column 'age': it holds list<.*>, not numbers, text or dates; --drop leaves it out"),
    ):
        pq.write_table(table.set_column(0, "age", ages), "new.parquet")
        found = refused(model, "learn", "--model", "m", "--data", "new.parquet")
        assert re.fullmatch(f"new.parquet: {message}", found)


def test_a_bad_npz(model):
    y = np.array(["yes", "no"])
    for arrays, message in (
        ({"age": np.array([1, None]), "city": y, "label": y}, "new.npz: array 'age': it holds object"),
        ({"age": np.ones(3), "city": y, "label": y}, "new.npz: its arrays have different numbers of rows"),
        ({"age": np.ones((2, 2)), "city": y, "label": y}, "new.npz: column 'age': its values have shape (2,), not ()"),
        ({"age": np.float64(3), "label": y}, "new.npz: array 'age': it is a single number"),
        ({"age": np.asfortranarray(np.ones((2, 2)))}, "new.npz: array 'age': it is stored in column-major order"),
    ):
        np.savez("new.npz", **arrays)
        assert message in refused(model, "learn", "--model", "m", "--data", "new.npz")
    age, city = np.random.default_rng(0).normal(size=5000), np.repeat(["bath", "york"], 2500)
    np.savez("new.npz", age=age, city=city, label=np.repeat(y, 2500))
    content = Path("new.npz").read_bytes()
    wrong = "new.npz: it is truncated or not an NPZ file"
    for damaged in (content[:1000], content[:2000] + bytes([content[2000] ^ 255]) + content[2001:]):
        Path("new.npz").write_bytes(damaged)
        assert wrong in refused(model, "learn", "--model", "m", "--data", "new.npz")


def test_an_image_that_is_none(evcl):
    for i in range(6):
        image(f"pets/cat/{i}.png", value=i)
        image(f"pets/dog/{i}.png", value=100 + i)
    learn = ["learn", "--model", "m", "--data", "pets", *FAST]
    evcl.done(*learn)
    again = [*learn, "--task", "again"]
    for content in (b"this is no image", Path("pets/dog/1.png").read_bytes()[:50]):
        Path("pets/dog/9.png").write_bytes(content)
        assert refused(evcl, *again).startswith("pets/dog/9.png: it is not a readable image (")
    image("pets/dog/9.png", size=(5000, 4000))
    assert refused(evcl, *again) == "pets/dog/9.png: 5000 x 4000 pixels, but the maximum is 16,000,000 in all"
    Path("pets/dog/9.png").unlink()
    image("pets/dog/9.tiff", mode="F")
    assert refused(evcl, *again).startswith("pets/dog/9.tiff: its pixels have 32 bits, with no known range")
    Path("pets/dog/9.tiff").unlink()
    Path("pets/.hidden").write_text("the system's, passed over")
    image("pets/loose.png")
    assert refused(evcl, *again) == "pets: loose.png: the image is not in the folder of a class"
    Path("empty").mkdir()
    assert refused(evcl, "learn", "--model", "m", "--data", "empty") == "empty: the folder holds no images"
    Path("good.csv").write_text(GOOD)
    found = refused(evcl, "learn", "--model", "m", "--data", "good.csv")
    assert found == "good.csv: the model learns from images, but this is a table"


def test_a_model_file_that_is_none(model):
    learned = Path("m").read_bytes()
    Path("m").write_text("no model")
    predict = ["predict", "--data", "good.csv", "--out", "p.csv"]
    for command in (["learn", "--data", "good.csv", "--task", "b"], predict):
        assert "cannot load m: it is cut short or not a safetensors file" in refused(model, *command, "--model", "m")
    assert "cannot load m: it is cut short" in refused(model, "inspect", "m")
    Path("m").write_bytes(learned[: len(learned) // 2])
    assert "cannot load m: it is cut short" in refused(model, "inspect", "m")
    plain = package.EVCL(package.nn.mlp(4, [4]), epochs=1)
    plain.learn((np.random.default_rng(0).normal(size=(20, 4)), np.arange(20) % 2))
    plain.save("m")
    wanted = "cannot load m: it was saved from Python and does not say how to encode a table"
    assert wanted in refused(model, *predict, "--model", "m")
    for note in ("{", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "columns": []}'):
        plain.save("m", {"evcl.tables": note})
        assert refused(model, "inspect", "m").startswith("cannot load m: ")
    Path("m").write_bytes(learned)
    found = tables.load_model(Path("m"))
    for damage in ({"task": 3}, {"learned": None}, {"accuracy": "good"}, {"examples": []}):
        found.history[0] = {**found.history[0], **damage}
        found.save(Path("m"))
        assert refused(model, "inspect", "m").startswith("cannot load m: its ")
        Path("m").write_bytes(learned)
        found = tables.load_model(Path("m"))
    tensors = load_file("m")
    save_file(tensors, "m")
    assert refused(model, "inspect", "m") == "cannot load m: it was not saved by evcl"
    assert refused(model, "inspect", "nowhere") == "there is no file nowhere"


def test_what_a_model_was_made_with_stays(model):
    learn = ["learn", "--model", "m", "--data", "good.csv", "--task", "b"]
    options = {"--method": "vcl", "--hidden": "5", "--seed": "3", "--category": "age", "--set": "strength=3"}
    for option, value in {**options, "--image-side": "9"}.items():
        assert f"and {option} is fixed when a model is created" in refused(model, *learn, option, value)
    assert "m learns 'label', not --target age" in refused(model, *learn, "--target", "age")
    assert "--drop age: the model learns from this column" in refused(model, *learn, "--drop", "age")
    assert "'good' is already learned: if this is another task, name it with --task" in refused(model, *learn[:-2])


def test_files_that_are_not_there_or_not_known(model):
    learn = ["learn", "--model", "m", "--data"]
    assert refused(model, *learn, "nothing.csv") == "there is no file nothing.csv"
    assert refused(model, *learn, "img/nothere") == "there is no file or folder img/nothere"
    Path("table.doc").write_text("?")
    assert refused(model, *learn, "table.doc").startswith("table.doc: its name should end in .csv, ")
    found = refused(model, "predict", "--model", "m", "--data", "good.csv", "--out", "good.csv")
    assert found == "--out good.csv would overwrite a file that is read"
    found = refused(model, "learn", "--model", "no/where/m", "--data", "good.csv", "--target", "label")
    assert found == "cannot write no/where/m: there is no folder no/where"
    found = refused(model, "learn", "--model", ".", "--data", "good.csv", "--target", "label")
    assert found == "cannot write .: it is a folder, not a regular file"


def test_training_that_is_lost_leaves_the_model(model):
    Path("new.csv").write_text(GOOD)
    wild = ["--set", "lr=10", "--set", "std_update=adam", "--set", "std_lr_scale=1000", "--epochs", "5"]
    found = refused(model, "learn", "--model", "wild", "--data", "new.csv", "--target", "label", *wild)
    assert "the loss is not a number" in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "evlc"], "unknown method 'evlc'; did you mean 'evcl'?"),
        (["--method", "joint"], "joint trains on all tasks at once"),
        (["--set", "strenght=1"], "unknown setting of evcl 'strenght'"),
        (["--set", "strength"], "--set takes name=value"),
        (["--epochs", "0"], "--epochs must be a whole number of at least 1"),
        (["--hidden", "10,x"], "widths from 1 to 100,000, separated by commas, as in 100,100, not '10,x'"),
        (["--hidden", "100000000"], "--hidden takes widths from 1 to 100,000"),
        (
            ["--method", "evcl", "--method", "ewc"],
            "--method is given twice, but takes one value (see evcl learn --help)",
        ),
        (["--data", "other.csv"], "--data is given twice"),
        (["--json", "--quiet"], "--json and --quiet cannot be used together"),
        (["--device", "tpu"], "device must be auto, cpu, cuda or mps, not 'tpu'"),
        (["--validation", "0.9"], "--validation must be"),
        (["--unknown", "ignore"], "--unknown must be learn, missing or error"),
        (["--seed", "-1"], "--seed must be"),
    ],
)
def test_wrong_usage_is_status_2(evcl, options, message):
    Path("good.csv").write_text(GOOD)
    status, _, err = evcl("learn", "--model", "m", "--data", "good.csv", "--target", "label", *options)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
    assert not Path("m").exists()


def test_a_second_learn_at_the_same_time_is_refused(model):
    """Another process holds the model, as a learn does while it works."""
    code = (
        "import sys, pathlib; from evcl.tables.commands import claimed\n"
        "with claimed(pathlib.Path('m')): print('held', flush=True); sys.stdin.readline()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes, text=True) as other:
        assert other.stdout.readline() == "held\n"
        found = refused(model, "learn", "--model", "m", "--data", "good.csv", "--task", "b")
        assert found.startswith(f"m: another evcl learn is at work on it (process {other.pid} on ")
        other.communicate("\n", timeout=60)
    model.done("learn", "--model", "m", "--data", "good.csv", "--task", "b", *FAST)
    assert sorted(path.name for path in Path().iterdir()) == ["good.csv", "m"]  # no lock is left


LARGE = "1e38,-1e38,2e38,-3e38,1e38,2e38"


@pytest.fixture
def deep(evcl):
    """A model whose network overflows where its inputs are large."""
    source = np.random.default_rng(0)
    lines = [",".join(f"{v:.3f}" for v in row) + f",{int(row[0] > 0)}\n" for row in source.normal(size=(40, 6))]
    Path("a.csv").write_text("a,b,c,d,e,f,y\n" + "".join(lines))
    learn = ["learn", "--model", "m", "--data", "a.csv", "--target", "y", "--hidden", "50,50,50", "--epochs", "3"]
    evcl.done(*learn)
    return evcl


@pytest.mark.parametrize("task", [[], ["--task", "infer"]])
def test_a_prediction_that_is_no_number_is_refused(deep, task):
    Path("p.csv").write_text("of yesterday")
    Path("b.csv").write_text(f"a,b,c,d,e,f\n1,2,3,4,5,6\n\n{LARGE}\n1,2,3,4,5,6\n")
    found = refused(deep, "predict", "--model", "m", "--data", "b.csv", "--out", "p.csv", *task)
    assert found == "b.csv: line 4: its probabilities are not finite: its inputs are too large for the network"


def test_numbers_too_far_from_a_scale_that_stays_are_missing_or_refused(deep):
    Path("b.csv").write_text("a,b,c,d,e,f,y\n" + f"{LARGE},0\n{LARGE},1\n" * 10)
    learn = ["learn", "--model", "m", "--data", "b.csv", "--unknown"]
    told = "more than 1,000,000 standard deviations from what was learned"
    found = refused(deep, *learn, "error")
    assert found == f"b.csv: line 2, column 'a': 1e+38 is {told}; --unknown learn or missing accepts it"
    out = deep.done(*learn, "missing", *FAST)
    assert f"note: 120 values are {told}, and counted as missing: line 2, column 'a' has 1e+38\n" in out


def test_a_model_and_a_link_to_it_are_one_model(model):
    Path("there").mkdir()
    Path("m").rename("there/m")
    Path("m").symlink_to("there/m")
    learn = ["learn", "--model", "m", "--data", "good.csv", "--task", "b", *FAST]
    with tables.commands.claimed(Path("there/m")):
        assert "m: another evcl learn is at work on it" in refused(model, *learn)
    assert "2 tasks" in model.done(*learn)
    assert Path("m").is_symlink()
    assert tables.load_model(Path("there/m")).learner.tasks == ("good", "b")
    assert [path.name for path in Path("there").iterdir()] == ["m"]


def test_predictions_and_models_replace_files_alone(model):
    os.mkfifo("it.csv")
    expected = "cannot write it.csv: it is a pipe, not a regular file"
    assert refused(model, "predict", "--model", "m", "--data", "good.csv", "--out", "it.csv") == expected
    assert refused(model, "learn", "--model", "it.csv", "--data", "good.csv", "--target", "label") == expected
    assert Path("it.csv").is_fifo()


def test_a_model_that_changed_under_a_learn_is_not_written_over(model):
    other = Path("m").read_bytes() + b"\0"

    class Meanwhile(package.Callback):
        def end_task(self, task, history):
            Path("m").write_bytes(other)

    with pytest.raises(package.EvclError, match="m was changed by another process meanwhile: nothing is written"):
        tables.learn(Path("m"), Path("good.csv"), task="b", epochs=1, callbacks=[Meanwhile()])
    assert Path("m").read_bytes() == other
