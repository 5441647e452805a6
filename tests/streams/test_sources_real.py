"""Real streams, from files in the packages' formats that the tests make."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
import torch

from evcl.streams.sources import real

FLIGHTS = """\
year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,origin,dest,\
air_time,distance,hour,minute,time_hour
2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z
2013,1,1,533,529,4,850,830,20,AA,1714,N24211,LGA,IAH,227,1416,5,29,2013-01-01T10:00:00Z
2013,1,1,NA,514,NA,NA,815,NA,9E,17,N1,JFK,BOS,NA,187,5,14,2013-01-01T10:00:00Z
2013,1,1,600,510,50,930,817,15,YV,17,N1,JFK,BOS,200,187,5,10,2013-01-01T10:00:00Z
2013,3,2,0,2359,1,430,445,-15,B6,17,N1,JFK,SJU,200,1598,23,59,2013-03-03T04:00:00Z
"""


def packed(name, text):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, text)
    return out.getvalue()


@pytest.fixture
def give(monkeypatch):
    """Let `load_arrays` return these files."""

    def _give(**files):
        arrays = {name: np.frombuffer(body, np.uint8) for name, body in files.items()}
        monkeypatch.setattr(real, "load_arrays", lambda name: arrays)

    return _give


def test_flights_are_in_scheduled_order_with_what_is_known_before_departure(give):
    pytest.importorskip("pyarrow")
    give(flights=packed("flights.csv", FLIGHTS))
    source = real.real("flights-monthly", rows=4)
    (rows,) = source.read()
    assert rows.y.tolist() == [1, 0, 1, 0]  # 15 minutes are late; the flight that never left is not among them
    assert [str(when) for when in rows.when] == [
        *("2013-01-01T05:10:00", "2013-01-01T05:15:00", "2013-01-01T05:29:00", "2013-03-02T23:59:00")
    ]
    x = dict(zip(rows.names, rows.x.T, strict=True))
    torch.testing.assert_close(x["scheduled departure"], torch.tensor([5 + 1 / 6, 5.25, 5 + 29 / 60, 23 + 59 / 60]))
    assert x["distance"].tolist() == [187, 1400, 1416, 1598]
    assert x["weekday=Tue"].tolist() == [1, 1, 1, 0]  # the first of January 2013
    assert x["weekday=Sat"].tolist() == [0, 0, 0, 1]
    assert x["carrier=YV"].tolist() == [1, 0, 0, 0]
    assert x["carrier=UA"].tolist() == [0, 1, 0, 0]
    assert x["origin=LGA"].tolist() == [0, 0, 1, 0]
    assert not {"dep_delay", "arr_time", "air_time", "dep_time"} & set(rows.names)


def test_census_codes_become_indicators(give):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    def parquet(**columns):
        out = io.BytesIO()
        pq.write_table(pa.table(columns), out)
        return out.getvalue()

    codes = {name: [values[0], values[-1]] for name, values in real.codes_of("census").items()}
    more = {"AGEP": [30.0, 61.0], "SCHL": ["16", "21"], "prediction": [0, 1]}
    give(
        reference=parquet(**codes, **more, year=[2015, 2015], employed=[0, 1]),
        analysis=parquet(**codes, **more, year=[2016, 2018]),
        analysis_target=parquet(id=[0, 1], employed=[1, 0]),
    )
    source = real.real("census", rows=4)
    (rows,) = source.read()
    assert rows.y.tolist() == [0, 1, 1, 0]
    assert rows.when.astype("datetime64[Y]").astype(str).tolist() == ["2015", "2015", "2016", "2018"]
    assert rows.x[:, :2].tolist() == [[30, 16], [61, 21]] * 2
    assert rows.x[0, 2:].sum() == len(codes)  # one indicator per column
    x = dict(zip(rows.names, rows.x.T, strict=True))
    assert x["RELP=17"].tolist() == x["SEX=2"].tolist() == [0, 1, 0, 1]
    assert "prediction" not in rows.names


def test_weather_leaves_out_the_number_of_the_day(give):
    give(rainfall=b",a,b,c,d,e,f,g,h,rain\n0,1,2,3,4,5,6,7,8,0\n1,2,3,4,5,6,7,8,9,1\n")
    (rows,) = real.real("weather", rows=2).read()
    assert rows.x.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7, 8, 9]]
    assert rows.y.tolist() == [0, 1]


def test_rivers_sets(give):
    values = ",".join(["0.5"] * 18)
    give(
        bananas=packed("banana.all.txt", "-1 1:1.5 2:-0.5 \n1 1:-2.0 2:1.0 \n"),
        segments=packed("segment.csv.zip", f"a,category\n{values},sky\n{values},brickface\n"),
        shuttle=b"f1,f2,f3,f4,f5,f6,f7,f8,f9,anomaly\n50,21,77,0,28,0,27,48,22,1\n",
    )
    bananas, segments, shuttle = real.bananas(), real.segments(), real.shuttle()
    assert bananas.columns["x"].tolist() == [1.5, -2.0]
    assert bananas.labels.tolist() == [0, 1]
    assert [real.ABOUT["segments"]["classes"][label] for label in segments.labels] == ["sky", "brickface"]
    assert shuttle.labels.tolist() == [1]
    assert shuttle.columns["f9"].tolist() == [22]


def test_mails_come_in_the_order_of_delivery_as_counts_of_words(monkeypatch):
    body = "Subject: money\n\nmoney money now!\n"
    texts = [
        f"From a@b  Tue Oct  1 10:00:00 2002\n{body}",
        f"Received: from x\nDelivery-Date: Thu Sep 26 16:44:35 2002\n{body.replace('money', 'linux')}",
        f"Received: undated\n{body}",
    ]
    monkeypatch.setattr(real, "load_texts", lambda name: (texts, np.array([3, 0, 4])))
    (rows,) = real.real("mails-by-date", rows=2).read()
    assert rows.y.tolist() == [0, 1]
    assert [str(when) for when in rows.when] == ["2002-09-26T16:44:35", "2002-10-01T10:00:00"]
    first, second = rows.x.exp() - 1
    assert first.sum().round() == second.sum().round() == 5  # three times a word, "now" and "!"
    assert not torch.equal(first, second)
