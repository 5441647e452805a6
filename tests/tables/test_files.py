"""Files as they come: separators, decimal signs, dates, missing values, compression, other formats."""

from __future__ import annotations

import gzip
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tabular import learned

from evcl._core.errors import EvclError
from evcl.tables.commands import open_source
from evcl.tables.csv_file import CsvFile
from evcl.tables.source import Dialect, as_number
from evcl.tables.texts import date_of, meanings, number_of

WHEN = pd.date_range("2024-01-25 06:30", periods=30, freq="19h")


def sales(rows=30):
    source = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "price": source.normal(2000, 900, rows).round(2),
            "size": source.normal(0, 1, rows).round(3),
            "city": source.choice(["bath", "hull", "york"], rows),
            "when": WHEN[:rows],
            "label": source.choice(["no", "yes"], rows),
        }
    )


def german(value):
    return f"{value:,.2f}".translate(str.maketrans(",.", ".,"))


def write(form, frame):
    """Write the same table in another form."""
    path = Path(f"a.{form.partition(':')[2] or 'csv'}")
    if form.startswith("german"):
        frame = frame.assign(price=frame.price.map(german), when=frame.when.dt.strftime("%d.%m.%Y %H:%M"))
        frame.to_csv(path, index=False, sep=";", decimal=",")
    elif form.startswith("american"):
        when = frame.when.dt.strftime("%m/%d/%Y %I:%M %p")
        frame.assign(price=frame.price.map("${:,.2f}".format), when=when).to_csv(path, index=False)
    elif form.startswith("bars"):
        frame.to_csv(path, index=False, sep="|")
    elif form.startswith("spaces"):
        path.write_text(frame.assign(when=frame.when.dt.strftime("%Y-%m-%dT%H:%M")).to_string(index=False))
    elif form.startswith("excel's"):
        path.write_text("sep=;\n" + frame.to_csv(index=False, sep=";"))
    elif form.startswith("gzip"):
        path.write_bytes(gzip.compress(frame.to_csv(index=False, quoting=1).encode()))
    elif form.startswith("excel"):
        frame.to_excel(path, index=False)
    elif form.startswith("feather"):
        frame.to_feather(path)
    elif form.startswith("zone"):
        frame.assign(when=frame.when.dt.tz_localize("Europe/Berlin")).to_parquet(path)
    elif form.startswith("fields"):
        types = {"city": "U9", "label": "U9", "when": "datetime64[s]"}
        np.save(path, frame.to_records(index=False, column_dtypes=types))
    elif form.startswith("database"):
        with duckdb.connect(str(path)) as base:
            base.execute("create table sales as select * from frame")
    else:
        frame.to_csv(path, index=False)
    return path


FORMS = ["plain", "german", "american", "bars", "spaces:txt", "excel's", "gzip:csv.gz", "excel:xlsx", "feather:feather"]
FORMS += ["feather:arrow", "zone:parquet", "fields:npy", "database:duckdb"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_values(form):
    frame = sales()
    source = open_source(write(form, frame))
    source.expect({"label": "text"})
    (piece,) = source.pieces(list(frame))
    assert list(source.shapes) == list(frame)
    assert piece.columns["price"] == pytest.approx(frame.price.to_numpy(), abs=1e-9)
    assert piece.columns["size"] == pytest.approx(frame["size"].to_numpy(), abs=1e-9)
    assert list(piece.columns["city"]) == list(frame.city)
    assert (piece.columns["when"].astype("datetime64[s]") == frame.when.to_numpy().astype("datetime64[s]")).all()
    assert [len(list(source.pieces(["price"]))), piece.rows] == [1, 30]  # it can be read again


@pytest.mark.full
def test_a_model_learns_each_month_in_another_form(evcl):
    frame = sales()
    for form in FORMS:
        data = write(form, frame)
        first = ["--target", "label"] if form == "plain" else []
        out = evcl.done("learn", "--model", "m", "--data", data, "--task", form, "--epochs", "1", *first)
        assert "new" not in out
    assert "columns  price, size, city (3 categories), when (dates)\n" in evcl("inspect", "m")[1]


def told(text, *names, **dialect):
    Path("a.csv").write_text(text)
    source = CsvFile(Path("a.csv"), Dialect(**dialect))
    pieces = list(source.pieces(names or list(source.shapes)))
    return {name: [v for p in pieces for v in p.columns[name].tolist()] for name in pieces[0].columns}, source.told


def column(*cells, **dialect):
    """The values of one column, beside another, and what is said of them."""
    found, line = told("x;y\n" + "".join(f"{cell};a\n" for cell in cells), "x", **dialect)
    return found["x"], (line or "").removeprefix("read with semicolons").removeprefix("; ")


NAN = pytest.approx(float("nan"), nan_ok=True)


def test_a_column_is_read_as_a_whole():
    assert column("1", "?", "2.5") == ([1, NAN, 2.5], "missing: ?")
    assert column("1", "None", "N/A", "-", "2") == ([1, NAN, NAN, NAN, 2], "missing: None, N/A, -")
    words = ["none", "some", "None"]
    assert column(*words) == (words, "none is a category of x (--missing none if it means missing)")
    assert column("rye", "?", "oat", "N/A") == (["rye", None, "oat", None], "missing: ?, N/A")
    assert column("+", "-", "+") == (["+", "-", "+"], "")
    assert column("-", "a", "b") == ([None, "a", "b"], "missing: -")
    assert column("10A", "11", "12B", "7") == (["10A", "11", "12B", "7"], "")
    assert column("1.234", "5.678", "0,5") == ([1234, 5678, 0.5], "decimal commas: x; grouped thousands: x")
    assert column("1.234", "5.678") == ([1.234, 5.678], "")
    assert column("91%", "7.5 %") == ([91, 7.5], "per cent: x")
    assert column("1,234", "5,678") == ([1.234, 5.678], "decimal commas: x")  # beside semicolons
    assert column("1,234", "0.5") == ([1234, 0.5], "grouped thousands: x")
    assert column("-999", "3", "-999.0", missing=("-999",))[0] == [NAN, 3, NAN]
    assert column("1.5", "2.5", decimal=",")[0] == ["1.5", "2.5"]
    assert [str(d)[:10] for d in column("03/04/2024", "13/04/2024")[0]] == ["2024-04-03", "2024-04-13"]
    assert column("03/04/2024", "13/04/2024")[1] == "dates: x (day first)"
    assert column("03/04/2024", "04/13/2024")[1] == "dates: x (month first)"


def test_an_ambiguous_column_follows_the_others():
    found, line = told("a;b;c\n1.234;0,5;x\n2.345;1,25;y\n")
    assert (found["a"], found["b"]) == ([1234, 2345], [0.5, 1.25])
    assert line == "read with semicolons; decimal commas: b; grouped thousands: a"
    assert told("a;b;c\n1.234;0.5;x\n2.345;1.25;y\n")[0]["a"] == [1.234, 2.345]
    assert told('a,b\n"1,234",x\n"2,345",y\n')[0]["a"] == [1234, 2345]


def test_a_file_that_could_mean_two_is_read_like_the_last(evcl):
    """January's dates have the day first; those of the first days of February could be either."""

    def month(days, month):
        rows = "".join(f"{day:02}/{month:02}/2024;1.{day:03};{'yes' if day % 2 else 'no'}\n" for day in days)
        Path("a.csv").write_text("when;x;label\n" + rows)

    month(range(1, 31), 1)
    learn = ["learn", "--model", "m", "--data", "a.csv", "--epochs", "1", "--task"]
    assert "dates: when (day first)" in evcl(*learn, "a", "--target", "label")[1]
    month(range(1, 11), 2)
    assert "dates: when (day first)" in evcl(*learn, "b")[1]
    assert "dates: when (day first)" in evcl("predict", "--model", "m", "--data", "a.csv", "--out", "p.csv")[1]
    Path("m").unlink()
    assert "dates: when (month first)" in evcl(*learn, "b", "--target", "label")[1]


def test_the_separator_is_what_fits_the_rows():
    assert told("price, EUR;b\n1.5;x\n2.5;y\n")[0] == {"price, EUR": [1.5, 2.5], "b": ["x", "y"]}
    assert told("a|b\n1|x,y\n2|y,z\n")[0] == {"a": [1, 2], "b": ["x,y", "y,z"]}
    assert told("a  b\n1   x\n 2  y\n")[0] == {"a": [1, 2], "b": ["x", "y"]}
    assert told("one name\nx y\nz\n")[0] == {"one name": ["x y", "z"]}
    assert told("a:b\n1:x\n", separator=":")[0] == {"a": [1], "b": ["x"]}


@given(st.floats(-1e12, 1e12).map(lambda v: round(v, 3)))
def test_a_number_is_the_same_in_every_country(value):
    for text, decimal in ((f"{value:,.3f}", "."), (f"{value:,.3f}".translate(str.maketrans(",.", ".,")), ",")):
        assert number_of(text, decimal) == pytest.approx(value, abs=1e-3)
    for group in (" ", "\u00a0", "\u202f", "'"):
        assert number_of(f"{value:,.3f}".replace(",", group), ".") == pytest.approx(value, abs=1e-3)
    assert number_of(repr(value), ".") == as_number(repr(value)) == value


def test_what_is_no_number_and_no_date():
    words = [
        "1,23,4",
        "1.2.3",
        "12 34",
        "1_000",
        "0x10",
        "1e",
        "e5",
        "$",
        "%",
        ",",
        "2024-13-01",
        "31.02.2024",
        "25:00",
    ]
    for text in (*words, "1-2", "may", "Sat", "1/2", "10-12-14-16", "٣.٤"):
        assert meanings(text) == 0 or text == "٣.٤", text


@pytest.mark.parametrize(
    "text",
    ["2024-03-09", "2024/3/9", "9.3.2024", "09-Mar-2024", "9 March 2024", "Mar 9, 2024", "Sat, 9 Mar 2024", "09.03.24"],
)
def test_a_date_in_words_and_figures(text):
    assert date_of(text, True) == 1709942400
    assert date_of(f"{text} 13:45:10", True) == 1709942400 + 49510
    assert date_of(f"{text} 1:45:10 pm", True) == 1709942400 + 49510


def test_other_dates_and_times():
    day, quarter = 1709942400, 1704067200
    for text in ("3/9/24", "03/9/24"):
        assert (date_of(text, False), date_of(text, True)) == (day, 1725321600), text
    assert date_of("9.3.24", False) == day
    times = ["2024-03-09 13:45:00+00", "20240309T134500", "20240309T1345Z", "Sat Mar 09 13:45:00 2024"]
    for text in (*times, "Sat Mar  9 13:45:00 UTC 2024", "20240309T134500.250+0100"):
        assert date_of(text, True) == day + 49500, text
    for text in ("Mar-24", "March 2024", "Mar-2024", "2024-03"):
        assert date_of(text, True) == 1709251200, text
    for text in ("2024Q1", "2024-Q1", "Q1 2024"):
        assert date_of(text, True) == quarter, text
    words = ["3-9-24", "1.2.3", "Mar 24", "Mary-24", "Foo-24", "2024Q5", "20241309T134500", "Sat Foo 09 13:45:00 2024"]
    assert [text for text in words if date_of(text, True) is not None] == []
    assert column("3/9/24", "12/10/24", "1/31/25")[1] == "dates: x (month first)"


def test_text_of_digits_gets_a_note(evcl):
    """Such a column may be numbers or dates in a form that is not known."""
    rows = "".join(f"{i % 7};{i % 25}/{i % 25 + 3};{'yes' if i % 2 else 'no'}\n" for i in range(100))
    Path("a.csv").write_text("x;code;y\n" + rows)
    learn = ["learn", "--model", "m", "--data", "a.csv", "--target", "y", "--epochs", "1"]
    note = "note: column 'code' has 25 different texts such as '0/3', which are read as neither numbers nor dates: "
    assert note in evcl(*learn)[1]
    Path("m").unlink()
    assert "note: column" not in evcl(*learn, "--category", "code")[1]


def test_a_target_with_decimal_commas_is_a_number(evcl):
    rows = "".join(f"{i},5;{3 * i},25\n" for i in range(40))
    Path("a.csv").write_text("x;y\n" + rows)
    out = evcl.done("learn", "--model", "m", "--data", "a.csv", "--target", "y", "--epochs", "1")
    assert "note: y has numbers with fractions, so it is learned as a number, not as classes\n" in out
    Path("b.csv").write_text("x;y\n" + "".join(f"{i},5;{i % 2},0\n" for i in range(40)))
    evcl.done("learn", "--model", "n", "--data", "b.csv", "--target", "y", "--epochs", "1")
    assert "classes  0, 1\n" in evcl("inspect", "n")[1]


def test_digits_are_a_date_where_dates_are_expected():
    Path("a.csv").write_text("when,y\n20240309,a\n20231231,b\n")
    source = CsvFile(Path("a.csv"))
    assert next(source.pieces(["when"])).columns["when"].tolist() == [20240309, 20231231]
    source = CsvFile(Path("a.csv"))
    source.expect({"when": "date"})
    assert [str(d)[:10] for d in next(source.pieces(["when"])).columns["when"]] == ["2024-03-09", "2023-12-31"]


def test_a_file_that_cannot_be_what_it_is_called():
    frame = sales()
    for name in ("a.csv.gz", "a.xlsx", "a.feather", "a.npy", "a.duckdb"):
        Path(name).write_bytes(b"not this")
        with pytest.raises(EvclError, match=rf"^{name}: it is (truncated or )?not "):
            open_source(Path(name))
    whole = gzip.compress(frame.to_csv(index=False).encode())
    Path("a.csv.gz").write_bytes(whole[:-9])
    with pytest.raises(EvclError, match=r"it is truncated or not a gzip file"):
        list(CsvFile(Path("a.csv.gz")).pieces(["price"]))
    np.save("a.npy", np.zeros((3, 2, 2)))
    with pytest.raises(EvclError, match=r"its shape is \(3, 2, 2\), but an array \[rows, columns\]"):
        open_source(Path("a.npy"))
    np.save("a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(EvclError, match=r"a.npy: "):
        open_source(Path("a.npy"))
    frame.to_csv("a.csv", index=False)
    for dialect in (Dialect(query="select 1"), Dialect(separator=";")):
        path = Path("a.csv" if dialect.query else "a.parquet")
        frame.to_parquet("a.parquet")
        with pytest.raises(EvclError, match=r"--query is for|--separator and --decimal are for"):
            open_source(path, dialect=dialect)


def test_only_the_first_sheet_is_read_and_that_is_told():
    with pd.ExcelWriter("a.xlsx") as book:
        sales().to_excel(book, sheet_name="May", index=False)
        sales(5).to_excel(book, sheet_name="June", index=False)
    source = open_source(Path("a.xlsx"))
    assert [piece.rows for piece in source.pieces(["price", "city", "when"])] == [30]
    assert source.told == "read sheet 'May', the first of 2; dates: when"


def test_queries_of_a_database():
    path = write("database:duckdb", sales())
    with duckdb.connect(str(path)) as base:
        base.execute("create table other as select 1 as x")
    with pytest.raises(
        EvclError, match=r"--query says which rows to read, .* its tables are (sales, other|other, sales)"
    ):
        open_source(path)
    for query, wanted in (("selekt", "Parser Error"), ("select * from nothere", "nothere"), ("drop table other", "")):
        with pytest.raises(EvclError, match=f"a.duckdb: .*{wanted}"):
            open_source(path, dialect=Dialect(query=query))
    source = open_source(path, dialect=Dialect(query="select size, city = 'bath' as bath from sales where size > 0"))
    (piece,) = source.pieces(["size", "bath"])
    frame = sales()
    frame = frame[frame["size"] > 0]
    assert piece.columns["size"] == pytest.approx(frame["size"].to_numpy())
    assert list(piece.columns["bath"]) == [str(c == "bath") for c in frame.city]


def test_a_database_sees_nothing_but_itself():
    Path("secret.csv").write_text("a,label\n1,SECRET\n")
    rows = "with recursive t(a) as (select 1 union all select a + 1 from t{}) select * from t"
    with duckdb.connect("a.duckdb") as base:
        base.execute("create schema s; create table s.sales(a int); insert into s.sales values (1), (2)")
        for name, body in {
            "sales": "select * from read_csv('secret.csv')",
            "plain": "select * from 'secret.csv'",
            "endless": rows.format(""),
            "harmless": "select a + 1 as a from s.sales",
        }.items():
            base.execute(f"create view main.{name} as {body}")
        base.execute("create macro endless_too() as table " + rows.format(""))
        base.execute("create macro duckdb_tables() as table select 'sales' as table_name")
    local = 1  # noqa: F841  (a query could read a variable of Python)
    refused = {
        "select * from sales": "Permission Error",
        "select * from plain": "plain does not exist|Permission Error",
        "select * from read_text('secret.csv')": "Permission Error",
        "select * from local": "local does not exist",
        "copy s.sales to 'out.csv'": "Permission Error",
        "attach 'secret.csv' as more": "Permission Error",
        "load httpfs": "disabled",
        "set enable_external_access = true": "locked",
        "select * from endless": "is recursive, and may never end",
        "from endless_too()": "is recursive, and may never end",
    }
    for query, wanted in refused.items():
        with pytest.raises(EvclError, match=wanted):
            open_source(Path("a.duckdb"), dialect=Dialect(query=query))
    assert not Path("out.csv").exists()
    ends = rows.format(" where a < 3")
    for query, values in {None: [1, 2], "from harmless": [2, 3], ends: [1, 2, 3]}.items():
        source = open_source(Path("a.duckdb"), dialect=Dialect(query=query))
        (piece,) = source.pieces(["a"])
        assert list(piece.columns["a"]) == values


def test_stray_files_and_other_images_are_told(evcl):
    for label, level in (("dark", 30), ("light", 220)):
        Path("img", label).mkdir(parents=True)
        for i in range(6):
            Image.new("L", (8, 8), level + i).save(f"img/{label}/{i}.png")
    Path("img/dark/notes.txt").write_text("taken in May")
    Path("img/light/list").write_text("a,b")
    Image.new("RGB", (20, 20), (9, 9, 9)).save("img/dark/9.png")
    out = evcl.done("learn", "--model", "m", "--data", "img", "--epochs", "1")
    unlike = "read 1 image of another size and 1 image of another colour as 8 x 8, grey"
    assert f"{unlike}; without 2 other files: dark/notes.txt, light/list\n" in out


def test_columns_that_hardly_repeat_get_a_note(evcl):
    frame = sales().assign(id=range(30), name=[f"customer {i}" for i in range(30)])
    out = learned(evcl, frame, "a", "--target", "label", "--epochs", "1")
    assert "note: column 'id' only counts the rows: --drop id leaves it out\n" in out
    assert (
        "note: column 'name' has 30 different texts in 30 rows, which hardly repeat: --drop name leaves it out" in out
    )
    assert out.count("note: ") == 2
