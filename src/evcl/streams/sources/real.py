"""Real streams, from package registries (`evcl data list` has their licences), in the order of their files.

Each is kept in memory as small numbers, and becomes indicators and float32 only piece by piece.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evcl._core.catalogue import BENCHMARK_SUMMARIES
from evcl._core.errors import extra
from evcl.data import load_arrays
from evcl.streams.sources.source import Rows, Source, one_hot

Numbers = NDArray[Any]


class Codes(NamedTuple):
    """A column of the values 0 to `len(values)` - 1, which becomes an indicator for each."""

    column: str
    values: tuple[str, ...]


class Table(NamedTuple):
    """A whole stream: one small array per column, the labels, and the times."""

    columns: dict[str, Numbers]
    labels: Numbers
    when: NDArray[np.datetime64] | None = None


def _real(
    name: str, rows: int, columns: tuple[str | Codes, ...], classes: tuple[str, ...], read: Callable[[], Table]
) -> Source:
    names = tuple(
        label
        for one in columns
        for label in ((one,) if isinstance(one, str) else (f"{one.column}={value}" for value in one.values))
    )
    table = cache(read)

    def part(start: int, stop: int, seed: int) -> Rows:
        found, own = table(), slice(start, stop)
        parts = [
            found.columns[one][own, None].astype(np.float32)
            if isinstance(one, str)
            else one_hot(found.columns[one.column][own], len(one.values))
            for one in columns
        ]
        x = torch.from_numpy(np.concatenate(parts, 1))
        y = torch.from_numpy(found.labels[own].astype(np.int64))
        return Rows(x, y, names, None if found.when is None else found.when[own])

    return Source(name, BENCHMARK_SUMMARIES[name], rows, names, classes, "real", False, part)


def _csv(content: bytes, skip: int = 1) -> Numbers:
    """A table of numbers with one line of names."""
    return np.loadtxt(io.BytesIO(content), delimiter=",", skiprows=skip, dtype=np.float32, ndmin=2)


def _split(table: Numbers, names: tuple[str, ...]) -> Table:
    """The columns of a table whose last one is the label."""
    return Table({name: table[:, i] for i, name in enumerate(names)}, table[:, -1].astype(np.int8))


# Weather

_WEATHER = (
    *("temperature", "dew point", "sea-level pressure", "visibility", "average wind speed"),
    *("max sustained wind-speed", "minimum temperature", "maximum temperature"),
)


def _weather() -> Table:
    """Rain on this day or not, from its other measurements: 50 years at one site in Nebraska. The package's authors
    have standardised the columns over all years.
    """
    return _split(_csv(load_arrays("weather")["rainfall"].tobytes())[:, 1:], _WEATHER)


WEATHER = _real("weather", 18_159, _WEATHER, ("dry", "rain"), _weather)

# Census

_CODES = {  # first and last code of each column, from the survey's documents
    "MAR": (1, 5),
    "RELP": (0, 17),
    "DIS": (1, 2),
    "ESP": (0, 8),
    "CIT": (1, 5),
    "MIG": (0, 3),
    "MIL": (0, 4),
    "ANC": (1, 4),
    "NATIVITY": (1, 2),
    "DEAR": (1, 2),
    "DEYE": (1, 2),
    "DREM": (0, 2),
    "SEX": (1, 2),
    "RAC1P": (1, 9),
}
_CENSUS: tuple[str | Codes, ...] = (
    "AGEP",
    "SCHL",
    *(Codes(name, tuple(map(str, range(low, high + 1)))) for name, (low, high) in _CODES.items()),
)


def _census() -> Table:
    """Employed or not, from 16 columns: age and schooling as numbers, the other codes as indicators. One year follows
    another, each in the order of the survey. The package's own predictions are left out.
    """
    with extra("tables", "the census needs pyarrow"):
        import pyarrow.parquet as pq

    found = {name: pq.read_table(io.BytesIO(content.tobytes())) for name, content in load_arrays("census").items()}

    def whole(column: str) -> Numbers:
        parts = [found[name][column].to_numpy(zero_copy_only=False) for name in ("reference", "analysis")]
        return np.concatenate(parts).astype(np.int16)

    labels = [found["reference"]["employed"].to_numpy(), found["analysis_target"]["employed"].to_numpy()]
    columns = {name: whole(name) - low for name, (low, _) in _CODES.items()}
    when = (whole("year") - 1970).astype("datetime64[Y]").astype("datetime64[s]")
    return Table(
        {**columns, "AGEP": whole("AGEP"), "SCHL": whole("SCHL")}, np.concatenate(labels).astype(np.int8), when
    )


CENSUS = _real("census", 277_677, _CENSUS, ("not employed", "employed"), _census)

# Flights

LATE = 15  # minutes
_CARRIERS = ("9E", "AA", "AS", "B6", "DL", "EV", "F9", "FL", "HA", "MQ", "OO", "UA", "US", "VX", "WN", "YV")
_ORIGINS = ("EWR", "JFK", "LGA")
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_FLIGHTS: tuple[str | Codes, ...] = (
    *("scheduled departure", "scheduled arrival", "distance"),
    *(Codes("weekday", _DAYS), Codes("carrier", _CARRIERS), Codes("origin", _ORIGINS)),
)


def _flights() -> Table:
    """Whether a flight from New York arrives 15 or more minutes late, in 2013, from what is known before it departs:
    the scheduled times (hours of the day, local), the distance, the weekday, the carrier and the airport.

    Left out because they are known only later, or tell the same: actual times, delays and the time in the air. Also
    left out: flight and tail numbers, and the destination, which the distance nearly names. The rows are in order of
    the scheduled departure; that of the file is by actual departure. Flights that never arrived have no label.
    """
    with extra("tables", "the flights need pyarrow"):
        from pyarrow import csv

    with zipfile.ZipFile(io.BytesIO(load_arrays("flights")["flights"].tobytes())) as archive:
        table = csv.read_csv(io.BytesIO(archive.read("flights.csv")))
    wanted = ("month", "day", "sched_dep_time", "sched_arr_time", "distance", "carrier", "origin", "arr_delay")
    raw = {name: table[name].to_numpy(zero_copy_only=False) for name in wanted}
    minutes = [raw[name] // 100 * 60 + raw[name] % 100 for name in ("sched_dep_time", "sched_arr_time")]
    months = (np.datetime64("2013-01", "M") + (raw["month"] - 1)).astype("datetime64[D]")
    days = months + (raw["day"] - 1).astype("timedelta64[D]")
    when = days.astype("datetime64[m]") + minutes[0].astype("timedelta64[m]")
    landed = ~np.isnan(raw["arr_delay"].astype(np.float64))
    rows = np.flatnonzero(landed)[np.argsort(when[landed], kind="stable")]
    columns = {
        "scheduled departure": minutes[0] / 60,
        "scheduled arrival": minutes[1] / 60,
        "distance": raw["distance"],
        "weekday": (days.astype(np.int64) + 3) % 7,  # day 0, 1970-01-01, was a Thursday
        "carrier": np.searchsorted(_CARRIERS, raw["carrier"].astype(str)),
        "origin": np.searchsorted(_ORIGINS, raw["origin"].astype(str)),
    }
    small = {name: values[rows].astype(np.float32 if "sch" in name else np.int16) for name, values in columns.items()}
    return Table(small, (raw["arr_delay"][rows] >= LATE).astype(np.int8), when[rows].astype("datetime64[s]"))


FLIGHTS = _real("flights-monthly", 327_346, _FLIGHTS, ("on time", "late"), _flights)

# The sets inside River's wheel

_PHISHING = (
    *("empty_server_form_handler", "popup_window", "https", "request_from_other_domain", "anchor_from_other_domain"),
    *("is_popular", "long_url", "age_of_domain", "ip_in_url"),
)
_SHUTTLE = tuple(f"f{i}" for i in range(1, 10))
_SEGMENTS = (
    *("region-centroid-col", "region-centroid-row", "short-line-density-5", "short-line-density-2", "vedge-mean"),
    *("vegde-sd", "hedge-mean", "hedge-sd", "intensity-mean", "rawred-mean", "rawblue-mean", "rawgreen-mean"),
    *("exred-mean", "exblue-mean", "exgreen-mean", "value-mean", "saturation-mean", "hue-mean"),
)
_SURFACES = ("brickface", "cement", "foliage", "grass", "path", "sky", "window")


def _phishing() -> Table:
    """Whether a web page is phishing, from nine properties of it."""
    return _split(_csv(load_arrays("river")["phishing"].tobytes()), _PHISHING)


def _shuttle() -> Table:
    """Whether a reading of nine sensors of a space shuttle is an anomaly (one of its rare classes)."""
    return _split(_csv(load_arrays("river")["shuttle"].tobytes()), _SHUTTLE)


def _bananas() -> Table:
    """Which of two curved shapes in the plane a point belongs to."""
    lines = _member("bananas", "banana.all.txt").decode().splitlines()
    fields = [line.split() for line in lines if line.strip()]  # label 1:value 2:value
    table = np.array([[float(one.split(":")[1]) for one in line[1:3]] for line in fields], np.float32)
    return Table({"x": table[:, 0], "y": table[:, 1]}, np.array([line[0] == "1" for line in fields], np.int8))


def _segments() -> Table:
    """What a piece of an outdoor image shows, from 18 measures of it."""
    lines = _member("segments", "segment.csv.zip").decode().splitlines()[1:]
    fields = [line.split(",") for line in lines if line.strip()]
    table = np.array([line[:-1] for line in fields], np.float32)
    labels = np.array([_SURFACES.index(line[-1]) for line in fields], np.int8)
    return Table({name: table[:, i] for i, name in enumerate(_SEGMENTS)}, labels)


def _member(key: str, name: str) -> bytes:
    """A file of one of the zip archives inside the wheel."""
    with zipfile.ZipFile(io.BytesIO(load_arrays("river")[key].tobytes())) as archive:
        return archive.read(name)


PHISHING = _real("phishing", 1_250, _PHISHING, ("genuine", "phishing"), _phishing)
BANANAS = _real("bananas", 5_300, ("x", "y"), ("-1", "1"), _bananas)
SEGMENTS = _real("segments", 2_310, _SEGMENTS, _SURFACES, _segments)
SHUTTLE = _real("shuttle", 49_097, _SHUTTLE, ("normal", "anomaly"), _shuttle)
