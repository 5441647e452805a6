"""What one text can mean: a number, a date, or a missing value. `survey.py` decides for a column as a whole."""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache

from evcl.tables.source import as_number

# Texts that mean a missing value. In any column:
ABSENT = frozenset(("", "NA", "NaN", "nan", "NAN", "-nan", "null", "NULL", "Null", "NaT", "(null)"))
ABSENT |= {"N/A", "n/a", "#N/A", "#NA", "<NA>"}
MARKS = frozenset(("?", "-", "--", "---", ".", "..", "\u2026", "\u2013", "\u2014"))
MARKS |= {"#VALUE!", "#DIV/0!", "#REF!", "#NAME?", "#NUM!"}
NULLS = frozenset(("none", "nil", "na", "n.a.", "n/d", "missing", "unknown", "undefined"))  # in numbers and dates only
# What a text can be, as bits. As a date, it can be valid with the day first, with the month first, or with both.
POINT, COMMA, DAY_FIRST, MONTH_FIRST, IS_ABSENT, IS_MARK, IS_WORD = (1 << i for i in range(7))
NUMBER, DATE, MISSING = POINT | COMMA, DAY_FIRST | MONTH_FIRST, IS_ABSENT | IS_MARK | IS_WORD

_SPACES = " \u00a0\u202f'\u2019"  # may separate thousands, in every country


def _pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    groups = rf"(?:\{thousands}\d{{3}})+|(?:[{_SPACES}]\d{{3}})+"
    whole = rf"[1-9]\d{{0,2}}(?:{groups})|\d+"
    body = rf"(?:(?:{whole})(?:\{decimal}\d*)?|\{decimal}\d+)(?:[eE][+-]?\d+)?"
    return re.compile(rf"(?:[$€£¥]\s*)?([+\-\u2212]?)\s*(?:[$€£¥]\s*)?({body})\s*[%$€£¥]?", re.ASCII)


_NUMBERS = {".": _pattern(".", ","), ",": _pattern(",", ".")}


def number_of(text: str, decimal: str) -> float | None:
    """The number that a text represents with this decimal sign; None if it is not one. Thousands may be grouped, and a
    currency sign or a per cent sign is left out.
    """
    if decimal == "." and (number := as_number(text)) is not None:
        return number
    match = _NUMBERS[decimal].fullmatch(text)
    if match is None:
        return None
    sign, body = match.groups()
    for mark in _SPACES + ("," if decimal == "." else "."):
        body = body.replace(mark, "")
    number = float(body.replace(",", "."))
    return -number if sign in ("-", "\u2212") else number


def grouped(text: str, decimal: str) -> bool:
    """Whether a text is a number with grouped thousands."""
    match = _NUMBERS[decimal].fullmatch(text)
    return match is not None and any(mark in match[2] for mark in _SPACES + ("," if decimal == "." else "."))


_CLOCK = r"(\d{1,2}):(\d{2})(?::(\d{2})(?:[.,]\d+)?)?\s*([AaPp]\.?[Mm]\.?)?\s*(?:Z|UTC|GMT|[+-]\d{2}(?::?\d{2})?)?"
_TIME = rf"(?:[T ,]+{_CLOCK})?"
_YEAR_FIRST = re.compile(rf"(\d{{4}})([-/.])(\d{{1,2}})\2(\d{{1,2}}){_TIME}", re.ASCII)
_YEAR_MONTH = re.compile(r"(\d{4})[-/](\d{1,2})", re.ASCII)
_DIGITS = re.compile(
    r"(\d{4})(\d{2})(\d{2})(?:T(\d{2})(\d{2})(\d{2})?(?:[.,]\d+)?()(?:Z|[+-]\d{2}(?::?\d{2})?)?)?", re.ASCII
)
_YEAR_LAST = re.compile(
    rf"(?:(\d{{1,2}})([-/.])(\d{{1,2}})\2(\d{{4}})|"
    rf"(\d{{2}}(?=-)|\d{{1,2}}(?=[/.]))([-/.])(\d{{2}}(?=-)|\d{{1,2}}(?=[/.]))\6(\d{{2}})){_TIME}",  # 1-2-24 is a code
    re.ASCII,
)
_NAMED = re.compile(
    rf"(?:[A-Za-z]{{3,9}},? )?(?:(\d{{1,2}})[- ]([A-Za-z]{{3,9}})\.?[- ,]+|([A-Za-z]{{3,9}})\.? (\d{{1,2}}),? )"
    rf"(\d{{4}}|\d{{2}}){_TIME}",
    re.ASCII,
)
_NAMED_CLOCK = re.compile(rf"[A-Za-z]{{3}} ([A-Za-z]{{3}}) +(\d{{1,2}}) {_CLOCK} (?:[A-Z]{{3,4}} )?(\d{{4}})", re.ASCII)
_NAMED_MONTH = re.compile(r"([A-Za-z]{3,9})\.?(?:[- ](\d{4})|-(\d{2}))", re.ASCII)  # Mar-24 is a month; Mar 24, a day
_QUARTER = re.compile(r"(\d{4})[- ]?Q([1-4])|Q([1-4])[- ]?(\d{4})", re.ASCII)
_ONLY_CLOCK = re.compile(_CLOCK, re.ASCII)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WHOLE = " january february march april may june july august september october november december"
_EPOCH = datetime(1970, 1, 1)  # times are local ones: the hour of the day is that of the place


@lru_cache(maxsize=65536)
def date_of(text: str, day_first: bool) -> int | None:
    """The date or time that a text represents, in seconds since 1970; None if it is not one. A time alone is one of
    1 January 1970. The hours are those that the text names: an offset from UTC is left out.
    """
    if len(text) < 4 or not any(c.isdigit() for c in text):
        return None
    try:
        parsed = _parsed(text, day_first)
    except ValueError:  # such as 31 February
        return None
    return None if parsed is None else int((parsed - _EPOCH).total_seconds())


def _parsed(text: str, day_first: bool) -> datetime | None:
    if match := _YEAR_FIRST.fullmatch(text):
        year, _, month, day, *clock = match.groups()
        return _made(year, month, day, clock)
    if match := _YEAR_LAST.fullmatch(text):
        a, mark, b, year, a2, mark2, b2, year2, *clock = match.groups()
        first, second, mark = a or a2, b or b2, mark or mark2
        month, day = (second, first) if day_first or mark == "." else (first, second)
        return _made(year or year2, month, day, clock)
    if match := _NAMED.fullmatch(text):
        day, name, name2, day2, year, *clock = match.groups()
        return _made(year, _month(name or name2), day or day2, clock)
    if match := _NAMED_CLOCK.fullmatch(text):
        name, day, *clock, year = match.groups()
        return _made(year, _month(name), day, clock)
    if (match := _NAMED_MONTH.fullmatch(text)) and f" {match[1].lower()}" in _WHOLE:
        return _made(match[2] or match[3], _month(match[1]), "1", [])
    if match := _QUARTER.fullmatch(text):
        return _made(match[1] or match[4], str(3 * int(match[2] or match[3]) - 2), "1", [])
    if match := _DIGITS.fullmatch(text):  # eight digits are a number, unless the column is known to hold dates
        year, month, day, *clock = match.groups()
        return _made(year, month, day, clock)
    if match := _YEAR_MONTH.fullmatch(text):
        return _made(match[1], match[2], "1", [])
    if match := _ONLY_CLOCK.fullmatch(text):
        return _made("1970", "1", "1", list(match.groups()))
    return None


def _month(name: str) -> str:
    """The number of a month; ValueError if there is none of this name."""
    return str(_MONTHS.index(name[:3].lower()) + 1)


def _made(year: str, month: str, day: str, clock: list[str | None]) -> datetime:
    hour, minute, second, half = clock or (None, None, None, None)
    hours = int(hour or 0)
    if half:
        hours = hours % 12 + (12 if half[0] in "Pp" else 0)
    years = int(year)
    if len(year) == 2:
        years += 1900 if years >= 69 else 2000
    return datetime(years, int(month), int(day), hours, int(minute or 0), min(int(second or 0), 59))


@lru_cache(maxsize=65536)
def meanings(text: str) -> int:
    """All that a text can mean, as bits; 0: it is a word."""
    if text in ABSENT:
        return IS_ABSENT
    if text in MARKS:
        return IS_MARK
    bits = POINT * (number_of(text, ".") is not None) | COMMA * (number_of(text, ",") is not None)
    if not bits:
        bits = DAY_FIRST * (date_of(text, True) is not None) | MONTH_FIRST * (date_of(text, False) is not None)
    return bits or IS_WORD * (text.lower() in NULLS)
