"""What reaches a screen or a spreadsheet: no control characters, no markup, no formulas."""

from __future__ import annotations

import csv
import json

import pytest

EVIL = "\x1b]0;pwned\x07\x1b[2J\x9b\u202e\u2066"


def clean(text):
    return not any((ord(c) < 32 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2066" for c in text)


@pytest.fixture
def model(evcl, tmp_path):
    lines = "".join(f'{i},"{EVIL if i % 2 else "[/red]b"}"\n' for i in range(20))
    (tmp_path / "t.csv").write_text(f"x,y\n{lines}", "utf-8")
    words = ("learn", "--model", "m.safetensors", "--data", "t.csv", "--target", "y", "--epochs", 1, "--hidden", 2)
    status, out, err = evcl(*words, "--task", f"one[/bold]{EVIL}")
    assert status == 0
    assert clean(out)
    return out, err


def test_escapes_in_a_model(evcl, model):
    """5.1: the class was printed as it is, by learn and by inspect."""
    status, out, err = evcl("inspect", "m.safetensors")
    assert status == 0
    assert "\\x1b]0;pwned\\x07\\x1b[2J\\x9b\\u202e\\u2066" in out.replace("\n", "")
    assert "[/red]b" in out
    assert clean(out)
    assert clean(err)
    status, out, err = evcl("predict", "--model", "m.safetensors", "--data", "t.csv", "--out", f"{EVIL}/p.csv")
    assert status == 1
    assert clean(err)
    assert clean(evcl("predict", "--model", "m.safetensors", "--data", "t.csv", "--out", "p.csv", "--task", EVIL)[2])


def test_markup_in_a_path(evcl):
    """5.2: the run ended with MarkupError, after all the work."""
    words = ("run", "split-digits", "--method", "naive", "--epochs", 1, "--tasks", 1, "--seeds", 1)
    status, out, err = evcl(*words, "--out", "out[/bold] [abc]")
    assert (status, err) == (0, "")
    assert "result: out[/bold] [abc]/result.json" in out
    assert "[abc] already holds this run" in evcl(*words, "--out", "out[/bold] [abc]")[1].replace("\n", " ")


def test_names_in_a_report(evcl, tmp_path):
    """5.1, 5.2: of methods and benchmarks."""
    import made_up

    made_up.write(tmp_path / "runs", made_up.result("a[/red]"), made_up.result("vcl"))
    path = tmp_path / "runs" / "0" / "result.json"
    status, _, err = evcl("report", "runs")
    assert (status, err) == (0, "")
    good = json.loads(path.read_text())
    for name in (EVIL, "a\ud800", "a\nb"):
        path.write_text(json.dumps({**good, "method": name}))
        status, out, err = evcl("report", "runs")
        assert status == 1
        assert err.count("\n") == 1
        assert err.startswith("evcl: runs/0/result.json is not a result of evcl (")
        assert clean(out + err)


def test_escapes_of_a_command_line(evcl):
    for words in (
        ("run", EVIL),
        ("run", "split-digits", "--method", EVIL),
        ("report", EVIL),
        ("status", EVIL),
        (EVIL,),
    ):
        status, out, err = evcl(*words)
        assert status in (1, 2)
        assert clean(out + err)
        assert err.count("\n") == 1
    status, _, err = evcl("report", "two\nlines")
    assert err == "evcl: there is no folder two\\nlines\n"


# --- formulas: 5.3 -------------------------------------------------------------------------------------------------

FORMULAS = ["=cmd|calc!A1", "@SUM(1)", "+1+cmd", "-2+3+cmd", "\t=1"]


def predicted(evcl, tmp_path, *more):
    names = [FORMULAS[i % 4] for i in range(16)]
    text = "".join(f'{i},"{name}",{-i}\n' for i, name in enumerate(names))
    (tmp_path / "t.csv").write_text(f"x,=word,below\n{text}")
    words = ("--target", "=word", "--epochs", 1, "--hidden", 2)
    assert evcl("learn", "--model", "m.safetensors", "--data", "t.csv", *words)[0] == 0
    assert evcl("predict", "--model", "m.safetensors", "--data", "t.csv", "--out", "p.csv", *more)[0] == 0
    with (tmp_path / "p.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_formulas_are_quoted(evcl, tmp_path):
    header, *rows = predicted(evcl, tmp_path)
    assert "'=word" in header
    place = header.index("prediction")
    assert {row[place][0] for row in rows} == {"'"}
    assert [row[header.index("below")] for row in rows] == [str(-i) for i in range(16)]  # numbers stay numbers
    for row in [header, *rows]:
        for cell in row:
            assert not cell.startswith(("=", "@", "\t", "\r"))


def test_formulas_are_kept_on_request(evcl, tmp_path):
    header, *rows = predicted(evcl, tmp_path, "--keep-formulas")
    assert "=word" in header
    assert {row[header.index("prediction")] for row in rows} <= set(FORMULAS)
