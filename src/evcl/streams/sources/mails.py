"""Mails in the order of their delivery, as counts of hashed words: a stream of texts for learners of rows."""

from __future__ import annotations

import re
import zlib
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from evcl._core.catalogue import BENCHMARK_SUMMARIES
from evcl.benchmarks.texts import FIRST_SPAM, NAMES, readable
from evcl.data import load_texts
from evcl.streams.sources.source import Rows, Source

BUCKETS = 128
DELIVERED = re.compile(r"^(?:From \S+|Delivery-Date:) +\w{3} +(\w{3}) +(\d+) ([\d:]{8}) (\d{4})", re.MULTILINE)
WORD = re.compile(r"[a-z]{3,20}|[$!%]")
COLUMNS = tuple(f"words {i}" for i in range(BUCKETS))


def delivered(mail: str) -> np.datetime64 | None:
    """When a mail was delivered, from its headers; None if they do not say."""
    found = DELIVERED.search(mail.partition("\n\n")[0])
    if found is None or found[1] not in NAMES:
        return None
    return np.datetime64(f"{found[4]}-{NAMES.index(found[1]) + 1:02d}-{int(found[2]):02d}T{found[3]}", "s")


def counted(text: str) -> NDArray[np.uint8]:
    """How often words of each bucket occur, up to 255 times."""
    places = [zlib.crc32(word.encode()) % BUCKETS for word in WORD.findall(text.lower())]
    return np.bincount(places, minlength=BUCKETS).clip(max=255).astype(np.uint8)


@cache
def _table() -> tuple[NDArray[np.uint8], NDArray[np.int8], NDArray[np.datetime64]]:
    """Counts [n, BUCKETS], labels [n] and times [n]. Mails without a date of delivery are left out."""
    texts, groups = load_texts("spam-assassin")
    dated = [(when, i) for i, text in enumerate(texts) if (when := delivered(text)) is not None]
    order = sorted(dated, key=lambda pair: pair[0])
    counts = np.stack([counted(readable(texts[i])) for _, i in order])
    labels = np.array([groups[i] >= FIRST_SPAM for _, i in order], np.int8)
    return counts, labels, np.array([when for when, _ in order])


def _part(start: int, stop: int, seed: int) -> Rows:
    (counts, labels, when), own = _table(), slice(start, stop)
    x = torch.from_numpy(np.log1p(counts[own].astype(np.float32)))
    return Rows(x, torch.from_numpy(labels[own].astype(np.int64)), COLUMNS, when[own])


MAILS = Source(
    "mails-by-date", BENCHMARK_SUMMARIES["mails-by-date"], 5_655, COLUMNS, ("ham", "spam"), "real", False, _part
)
