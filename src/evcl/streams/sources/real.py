"""Real streams, from package registries (`evcl data list` has their licences), in the order of their files.

Each is kept in memory as small numbers, and becomes indicators and float32 only piece by piece. `real.toml` has their
columns and classes.
"""

from __future__ import annotations

import io
import re
import tomllib
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evcl._core.catalogue import BENCHMARK_SUMMARIES
from evcl._core.errors import extra
from evcl.benchmarks.texts import FIRST_SPAM, MONTH_NAMES, readable
from evcl.data import load_arrays, load_texts
from evcl.streams.arrays import Values
from evcl.streams.sources.source import Rows, Source

ABOUT = tomllib.loads(Path(__file__).with_name("real.toml").read_text("utf-8"))
LATE_MINUTES = 15
BUCKETS = 128  # of words
DELIVERY_DATE = re.compile(r"^(?:From \S+|Delivery-Date:) +\w{3} +(\w{3}) +(\d+) ([\d:]{8}) (\d{4})", re.MULTILINE)
WORD = re.compile(r"[a-z]{3,20}|[$!%]")


class Table(NamedTuple):
    """A whole stream: one small array per column, the labels, and the times."""

    columns: dict[str, Values]
    labels: Values
    when: NDArray[np.datetime64] | None = None


def codes_of(name: str) -> dict[str, tuple[str, ...]]:
    """The columns of codes of a stream, and what the codes 0, 1 and so on of each stand for."""
    return {
        column: tuple(map(str, range(values[0], values[1] + 1) if isinstance(values[0], int) else values))
        for column, values in ABOUT[name].get("codes", {}).items()
    }


def real(name: str, rows: int | None = None) -> Source:
    """The real stream of this name. `rows`: how many it has, if they are not those of the package."""
    about, codes, table = ABOUT[name], codes_of(name), cache(READ[name])
    plain = tuple(about.get("columns", WORDS))
    names = (*plain, *(f"{column}={value}" for column, values in codes.items() for value in values))

    def part(start: int, stop: int, seed: int) -> Rows:
        data, own = table(), slice(start, stop)
        parts = [data.columns[one][own, None].astype(np.float32) for one in plain]
        parts += [np.eye(len(codes[one]), dtype=np.float32)[data.columns[one][own]] for one in codes]
        x = torch.from_numpy(np.concatenate(parts, 1))
        y = torch.from_numpy(data.labels[own].astype(np.int64))
        return Rows(x, y, names, None if data.when is None else data.when[own])

    classes = tuple(about["classes"])
    return Source(name, BENCHMARK_SUMMARIES[name], rows or about["rows"], names, classes, "real", False, part)


def _split(name: str, content: bytes, skip: int = 0) -> Table:
    """A table of numbers with one line of names, whose last column is the label. `skip`: columns that are left out."""
    table = np.loadtxt(io.BytesIO(content), delimiter=",", skiprows=1, dtype=np.float32, ndmin=2)[:, skip:]
    return Table({one: table[:, i] for i, one in enumerate(ABOUT[name]["columns"])}, table[:, -1].astype(np.int8))


def weather() -> Table:
    """Rain on this day or not, from its other measurements: 50 years at one site in Nebraska. The package's authors
    have standardised the columns over all years. The first column, the number of the day, is left out.
    """
    return _split("weather", load_arrays("weather")["rainfall"].tobytes(), 1)


def census() -> Table:
    """Employed or not, from 16 columns: age and schooling as numbers, the other codes as indicators. One year follows
    another, each in the order of the survey. The package's own predictions are left out.
    """
    with extra("tables", "the census needs pyarrow"):
        import pyarrow.parquet as pq

    tables = {name: pq.read_table(io.BytesIO(content.tobytes())) for name, content in load_arrays("census").items()}

    def whole(column: str) -> Values:
        parts = [tables[name][column].to_numpy(zero_copy_only=False) for name in ("reference", "analysis")]
        return np.concatenate(parts).astype(np.int16)

    labels = [tables["reference"]["employed"].to_numpy(), tables["analysis_target"]["employed"].to_numpy()]
    columns = {name: whole(name) - int(values[0]) for name, values in codes_of("census").items()}
    when = (whole("year") - 1970).astype("datetime64[Y]").astype("datetime64[s]")
    columns |= {name: whole(name) for name in ABOUT["census"]["columns"]}
    return Table(columns, np.concatenate(labels).astype(np.int8), when)


def flights() -> Table:
    """Whether a flight from New York arrives 15 or more minutes late, in 2013, from what is known before it departs:
    the scheduled times (hours of the day, local), the distance, the weekday, the carrier and the airport.

    Left out because they are known only later, or tell the same: actual times, delays and the time in the air. Also
    left out: flight and tail numbers, and the destination, which the distance nearly names. The rows are in order of
    the scheduled departure; that of the file is by actual departure. Flights that never arrived have no label.
    """
    with extra("tables", "the flights need pyarrow"):
        from pyarrow import csv

    table, codes = csv.read_csv(io.BytesIO(_member("flights", "flights", "flights.csv"))), codes_of("flights-monthly")
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
        "carrier": np.searchsorted(codes["carrier"], raw["carrier"].astype(str)),
        "origin": np.searchsorted(codes["origin"], raw["origin"].astype(str)),
    }
    small = {name: values[rows].astype(np.float32 if "sch" in name else np.int16) for name, values in columns.items()}
    return Table(small, (raw["arr_delay"][rows] >= LATE_MINUTES).astype(np.int8), when[rows].astype("datetime64[s]"))


def phishing() -> Table:
    """Whether a web page is phishing, from nine properties of it."""
    return _split("phishing", load_arrays("river")["phishing"].tobytes())


def shuttle() -> Table:
    """Whether a reading of nine sensors of a space shuttle is an anomaly (one of its rare classes)."""
    return _split("shuttle", load_arrays("river")["shuttle"].tobytes())


def bananas() -> Table:
    """Which of two curved shapes in the plane a point belongs to."""
    lines = _member("river", "bananas", "banana.all.txt").decode().splitlines()
    fields = [line.split() for line in lines if line.strip()]  # label 1:value 2:value
    table = np.array([[float(one.split(":")[1]) for one in line[1:3]] for line in fields], np.float32)
    return Table({"x": table[:, 0], "y": table[:, 1]}, np.array([line[0] == "1" for line in fields], np.int8))


def segments() -> Table:
    """What a piece of an outdoor image shows, from 18 measures of it."""
    lines = _member("river", "segments", "segment.csv.zip").decode().splitlines()[1:]
    fields = [line.split(",") for line in lines if line.strip()]
    table, about = np.array([line[:-1] for line in fields], np.float32), ABOUT["segments"]
    labels = np.array([about["classes"].index(line[-1]) for line in fields], np.int8)
    return Table({name: table[:, i] for i, name in enumerate(about["columns"])}, labels)


def _member(name: str, key: str, member: str) -> bytes:
    """A file of one of the zip archives of a data set."""
    with zipfile.ZipFile(io.BytesIO(load_arrays(name)[key].tobytes())) as archive:
        return archive.read(member)


def mails() -> Table:
    """Spam or not, from hashed words: log(1 + count) of each bucket, in the order of delivery. Mails without a date of
    delivery are left out.
    """
    texts, groups = load_texts("spam-assassin")
    dated = [(when, i) for i, text in enumerate(texts) if (when := delivered(text)) is not None]
    order = sorted(dated, key=lambda pair: pair[0])
    counts = np.log1p(np.stack([counted(readable(texts[i])) for _, i in order]).astype(np.float32))
    labels = np.array([groups[i] >= FIRST_SPAM for _, i in order], np.int8)
    return Table(dict(zip(WORDS, counts.T, strict=True)), labels, np.array([when for when, _ in order]))


def delivered(mail: str) -> np.datetime64 | None:
    """When a mail was delivered, from its headers; None if they do not say."""
    match = DELIVERY_DATE.search(mail.partition("\n\n")[0])
    if match is None or match[1] not in MONTH_NAMES:
        return None
    return np.datetime64(f"{match[4]}-{MONTH_NAMES.index(match[1]) + 1:02d}-{int(match[2]):02d}T{match[3]}", "s")


def counted(text: str) -> NDArray[np.uint8]:
    """How often words of each bucket occur, up to 255 times."""
    places = [zlib.crc32(word.encode()) % BUCKETS for word in WORD.findall(text.lower())]
    return np.bincount(places, minlength=BUCKETS).clip(max=255).astype(np.uint8)


WORDS = tuple(f"words {i}" for i in range(BUCKETS))
READ: dict[str, Callable[[], Table]] = {
    "weather": weather,
    "census": census,
    "flights-monthly": flights,
    "mails-by-date": mails,
    "phishing": phishing,
    "bananas": bananas,
    "segments": segments,
    "shuttle": shuttle,
}
