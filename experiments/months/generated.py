"""Streams of months: tables with a column `label`, one to learn from and one to test on per month.

    shop            mixed columns, missing cells, new categories, and a rule with interactions of which one part turns
                    round after the third month. Nothing in a row tells its month
    shop-additive   the same columns and the same turn, with a rule that is a sum of one function per column
    regions         one rule, over a region of inputs that moves from month to month
    digits          scikit-learn's 8x8 digits; two new classes per month
    census          employment in Massachusetts, 2015 to 2018, one year at a time (`evcl data fetch census`)

A stream is a function of its name and a seed. Seeds 100 and up are for choosing, 0 to 4 for the tables.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd

MONTHS, ROWS = 6, 1000  # of shop and regions; as many rows to test on
TURN = 3  # the first month after the turn
COUNTRIES = {"DE": 0.8, "FR": -0.6, "IT": 0.3, "NL": -0.9, "PL": 0.6, "SE": -0.2}  # and what they add to the rule
CHANNELS = {"web": 0, "app": 0, "store": 0, "social": 2, "partner": 4}  # and the first month that has them
OF_CHANNEL = {"web": 0.0, "app": 0.5, "store": -0.5, "social": 0.8, "partner": -0.8}
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
YEARS, PER_YEAR, TESTED = (2015, 2016, 2017, 2018), 20_000, 10_000  # rows drawn from each year
NOT_INPUTS = ["id", "year", "prediction", "predicted_probability"]  # columns that the package adds to the census


class Month(NamedTuple):
    name: str
    train: pd.DataFrame
    test: pd.DataFrame


def stream(name: str, seed: int) -> list[Month]:
    return STREAMS[name](seed)


def _shop(seed: int, additive: bool = False) -> list[Month]:
    return [
        Month(f"month {m + 1}", *(_customers(np.random.default_rng([seed, m, part]), m, additive) for part in (0, 1)))
        for m in range(MONTHS)
    ]


def _customers(source: np.random.Generator, month: int, additive: bool) -> pd.DataFrame:
    age = source.normal(42, 13, ROWS).clip(18, 90).round()
    price = source.lognormal(3, 0.6, ROWS).round(2)
    visits = source.poisson(3, ROWS).astype(float)
    day = source.choice(DAYS, ROWS)
    country = source.choice(list(COUNTRIES), ROWS)
    channel = source.choice([name for name, first in CHANNELS.items() if first <= month], ROWS)
    newsletter = source.choice(["yes", "no"], ROWS)
    old, dear, busy = (age - 42) / 13, (np.log(price) - 3) / 0.6, (visits - 3) / 1.7
    weekend, subscribed = np.isin(day, ("Sat", "Sun")), newsletter == "yes"
    of_country = np.array([COUNTRIES[one] for one in country])
    of_channel = np.array([OF_CHANNEL[one] for one in channel])
    sign = 1 if month < TURN else -1
    if additive:
        logit = 0.8 * busy + 0.5 * old + 0.6 * (subscribed - 0.5) + of_country + of_channel + sign * 1.2 * dear
    else:
        logit = 1.2 * busy * np.where(subscribed, 1, -1) + np.where(weekend, 1, -1) * old + of_country + of_channel
        logit = logit + sign * 1.2 * dear
    label = np.where(source.random(ROWS) < 1 / (1 + np.exp(-2 * logit)), "buys", "leaves")
    frame = pd.DataFrame(
        {"age": age, "price": price, "visits": visits, "day": day, "country": country, "channel": channel}
        | {"newsletter": newsletter}
    )
    for column, share in (("age", 0.05), ("price", 0.03), ("newsletter", 0.1), ("country", 0.02)):
        frame[column] = frame[column].mask(source.random(ROWS) < share)
    return frame.assign(label=label)


def _regions(seed: int) -> list[Month]:
    """Eight columns. The centre of the first two moves along a circle; the rule waves over the whole plane."""
    months = []
    for m in range(MONTHS):
        parts = []
        for part in (0, 1):
            source = np.random.default_rng([seed, m, part])
            x = source.normal(size=(ROWS, 8))
            angle = 2 * np.pi * m / MONTHS
            x[:, 0] += 3 * np.cos(angle)
            x[:, 1] += 3 * np.sin(angle)
            height = np.sin(1.2 * x[:, 0]) + np.cos(1.2 * x[:, 1]) + 0.5 * x[:, 2] + 0.3 * x[:, 2] * x[:, 3]
            label = np.select([height < -0.5, height > 0.5], ["low", "high"], "middle")
            parts.append(pd.DataFrame(x.round(4), columns=[f"x{i}" for i in range(8)]).assign(label=label))
        months.append(Month(f"month {m + 1}", *parts))
    return months


def _digits(seed: int) -> list[Month]:
    """1,300 rows to learn from and 497 to test on; the seed also orders the classes."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    source = np.random.default_rng(seed)
    rows, classes = source.permutation(len(x)), source.permutation(10)
    frame = pd.DataFrame(x, columns=[f"pixel {i}" for i in range(64)]).assign(label=[f"digit {k}" for k in y])
    months = []
    for m in range(5):
        own = [part[np.isin(y[part], classes[2 * m : 2 * m + 2])] for part in (rows[:1300], rows[1300:])]
        parts = (frame.iloc[some].reset_index(drop=True) for some in own)
        months.append(Month(f"month {m + 1}", *parts))
    return months


def _census(seed: int) -> list[Month]:
    """20,000 rows of each year to learn from, and 10,000 to test on. The columns except the age are categories."""
    from evcl.data import load_arrays

    tables = {name: pd.read_parquet(io.BytesIO(content.tobytes())) for name, content in load_arrays("census").items()}
    later = tables["analysis"].merge(tables["analysis_target"], on="id", validate="one_to_one")
    every = pd.concat([tables["reference"], later])
    months = []
    for year in YEARS:
        own = every[every["year"] == year]
        rows = np.random.default_rng([seed, year]).permutation(len(own))
        own = own.drop(columns=NOT_INPUTS).rename(columns={"employed": "label"})
        own = own.astype({c: str for c in own.columns if c != "AGEP"})  # codes, as texts
        parts = (own.iloc[some].reset_index(drop=True) for some in (rows[:PER_YEAR], rows[PER_YEAR:][:TESTED]))
        months.append(Month(str(year), *parts))
    return months


STREAMS: dict[str, Callable[[int], list[Month]]] = {
    "shop": _shop,
    "shop-additive": lambda seed: _shop(seed, additive=True),
    "regions": _regions,
    "digits": _digits,
    "census": _census,
}
