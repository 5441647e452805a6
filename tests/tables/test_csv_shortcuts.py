"""The fast ways through a CSV file (pyarrow, columns of plain numbers) against the slow ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evcl._core.errors import EvclError
from evcl.tables import survey
from evcl.tables.csv_file import CsvFile
from evcl.tables.fitting import EncoderFitting

NUMBERS = ["1", "-2.5", " 3 ", "1e3", "+.5", "0"]
ODD = ["", "NA", "nan", "NAN", "-nan", "1_000", "inf", "-Infinity", "9007199254740993", "9007199254740992.5", "1e300"]
ODD += ["a", "٣", "0x10", "1,5", '"1"', '"a\nb"', "\x1f1", "é", "\0"]
LINES = ["1,2\n", "a,b\n", ",\n", "\n", "\r\n", " , \n", '"a,b",c\n', '"a\nb",c\n', 'a"b,c\n', '"a"b,c\n', "a\r,b\n"]
LINES += ["1\n", "1,2,3\n", "1,2\r\n", "é,\u2028\n", "\x85 x,NA\n", "\ufeff,null\n", "x" * 131_072 + ",1\n", "\0,1\n"]


def outcome(path):
    """What comes of reading, fitting and encoding a file: everything that a user could notice, or the error."""
    try:
        source = CsvFile(path)
        pieces = list(source.pieces(source.shapes))
        cells = [(p.place(i), repr(p.columns[name][i])) for p in pieces for i in range(p.rows) for name in p.columns]
        fitting = EncoderFitting(source, list(source.shapes), [])
        for piece in pieces:
            fitting.see(piece)
        encoder = fitting.encoder()
        inputs = [encoder.encode(piece, source.path) for piece in pieces]
        return cells, encoder.described(), [part.tobytes() for part in inputs]
    except EvclError as error:
        return str(error)


def same_both_ways(path, body):
    path.write_bytes(body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evcl.tables.csv_file.ROWS_A_PIECE", 3)
        patch.setattr("evcl.tables.arrow_csv.ROWS_A_PIECE", 3)
        fast = outcome(path)
        with pytest.MonkeyPatch.context() as arrow:
            arrow.setattr("evcl.tables.csv_file.LARGE_BYTES", 0)
            assert fast == outcome(path)
        patch.setattr(survey, "plain_numbers", lambda *_: None)
        assert fast == outcome(path)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("csv") / "a.csv"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*LINES[:3] * 4, *LINES]), max_size=12), st.booleans())
def test_lines_that_are_split(path, lines, ended):
    body = "x,y\n" + "".join(lines)
    same_both_ways(path, (body if ended else body.removesuffix("\n")).encode())


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*NUMBERS * 4, *ODD]), min_size=1, max_size=12))
def test_numbers_that_are_read_all_at_once(path, cells):
    same_both_ways(path, ("x,y\n" + "".join(f"{cell},1\n" for cell in cells)).encode())


def test_bytes_that_are_no_text_and_lines_that_are_too_long(path):
    same_both_ways(path, b"x,y\n1,2\n1,\xff\n")
    same_both_ways(path, b"x,y\n1,2\n1," + b" " * 1_000_000 + b"2\n")
