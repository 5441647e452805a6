"""Rows become inputs as they come: only from rows that have come, in a fixed number of inputs."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import numpy as np
import pytest

from evcl._core.errors import EvclError
from evcl.streams.files import batches
from evcl.tables.commands import open_source
from evcl.tables.encoding import Encoder
from evcl.tables.source import kind_of, piece_of


def encoder_for(rows):
    return Encoder.for_rows({name: kind_of(values) for name, values in piece_of(rows).columns.items()})


def encoded(encoder, rows):
    return encoder.encode(piece_of(rows), Path("rows"))


ROWS = [
    {"heat": float(i % 7) * 3 + 10, "sky": ["clear", "rain", "fog"][i % 3], "day": datetime.datetime(2024, 1, 1 + i)}
    for i in range(20)
]


def test_a_missing_number_is_the_mean_of_the_rows_that_have_come():
    encoder = encoder_for(ROWS)
    heat = [row["heat"] for row in ROWS]
    for i in range(1, 20):
        assert encoded(encoder, ROWS[i - 1 : i])[0, 0] == heat[i - 1]
        assert encoded(encoder, [{"sky": "clear", "heat": None}])[0, 0] == pytest.approx(np.mean(heat[:i]))


def test_later_rows_do_not_change_the_inputs_of_earlier_ones():
    other = [{**row, "heat": 1e6, "sky": "snow"} for row in ROWS[10:]]
    one, two = encoder_for(ROWS), encoder_for(ROWS)
    first = [encoded(encoder, ROWS[:10]) for encoder in (one, two)]
    encoded(two, other)
    assert np.array_equal(*first)


def test_each_text_has_an_input_of_its_own_until_all_are_taken():
    encoder = encoder_for(ROWS[:1])
    inputs = encoder.inputs
    many = [{"heat": 1.0, "sky": f"sky {i}", "day": None} for i in range(200)]
    found = encoded(encoder, many)
    assert found.shape == (200, inputs)
    spare = found[:, 7:]  # after a number and three circles
    own = {int(row[1:].argmax()) + 1 for row in spare[:10]}
    assert len(own) == 10
    assert (spare.sum(1) >= 1).all()  # later ones share
    assert "sky=sky 3" in encoder.inputs_of


def test_what_is_missing_is_marked_and_counts_as_the_mean():
    encoder = encoder_for(ROWS)
    encoded(encoder, ROWS)
    found = encoded(encoder, [{"heat": None, "sky": None, "day": None}, {"sky": "rain"}, ROWS[3]])
    names = encoder.inputs_of
    for row in found[:2]:
        assert row[0] == pytest.approx(np.mean([one["heat"] for one in (*ROWS, ROWS[3])]))
        assert {names[i] for i in np.flatnonzero(row)} >= {"heat missing", "day missing"}
    assert {names[i] for i in np.flatnonzero(found[1])} >= {"sky=rain"}
    assert not {names[i] for i in np.flatnonzero(found[2])} & {"heat missing", "day missing"}


def test_a_broken_sensor_cannot_spoil_a_column_for_long():
    encoder = encoder_for(ROWS)
    for _ in range(5):
        encoded(encoder, ROWS)
    heat = np.array([row["heat"] for row in ROWS])
    for value in (1e12, -1e300):
        assert abs(encoded(encoder, [{**ROWS[0], "heat": value}])[0, 0] - heat.mean()) <= 16 * heat.std()
    shifted = np.concatenate([encoded(encoder, [{**ROWS[0], "heat": 1000.0 + i % 2}]) for i in range(100)])
    assert shifted[-1, 0] == 1001  # a real change is followed


def test_a_column_that_comes_later_is_learned_from():
    encoder = encoder_for(ROWS)
    inputs = encoder.inputs
    encoded(encoder, ROWS)
    found = encoded(encoder, [{**ROWS[i], "wind": float(i), "sea": "calm"} for i in range(4)])
    assert found.shape[1] == inputs
    names = encoder.inputs_of
    assert found[3, names.index("wind")] == 3
    assert found[3, names.index("sea=calm")] == 1


def test_an_encoder_that_was_saved_goes_on_as_if_it_had_not_been():
    one = encoder_for(ROWS)
    encoded(one, ROWS[:12])
    two = Encoder.rows_rebuilt(json.loads(json.dumps(one.rows_described())))
    assert np.array_equal(encoded(one, ROWS[12:]), encoded(two, ROWS[12:]))
    assert one.inputs_of == two.inputs_of


@pytest.mark.parametrize(
    "change",
    [
        {"columns": []},
        {"columns": [["heat", "number", 0, [], [1.0], [float("inf")], [1.0]]]},
        {"columns": [["heat", "colour", 0, [], [1.0], [1.0], [1.0]]]},
        {"columns": [["heat", "number", 10_000, [], [1.0], [1.0], [1.0]]]},
        {"slots": [["sky", "clear", 99]]},
        {"spare": 10**9},
        {"first": "x"},
    ],
)
def test_a_damaged_description_is_refused(change):
    encoder = encoder_for(ROWS)
    encoded(encoder, ROWS)
    with pytest.raises(EvclError, match="is damaged"):
        Encoder.rows_rebuilt({**encoder.rows_described(), **change})


def test_batches_do_not_depend_on_how_a_file_is_read(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n" + "".join(f"{i},{'x' if i % 2 else 'y'}\n" for i in range(10_000)))
    source = open_source(path)

    def read(size, skip=0):
        return list(batches(source.pieces(["a", "b"]), lambda _: size, skip))

    assert [piece.rows for piece in read(3000)] == [3000, 3000, 3000, 1000]
    for skip in (0, 1, 4096, 9_999):
        found = np.concatenate([piece.columns["a"] for piece in read(7, skip)])
        assert np.array_equal(found, np.arange(skip, 10_000))
    assert read(7)[600].place(2) == f"line {600 * 7 + 2 + 2}"
    assert read(7, 10_000) == []
