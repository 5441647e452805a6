"""Every limit on what a user can hand in, in one place. The table in docs/SCALE.md is made from this file.

Each reader checks a limit before it does the work, or takes the memory, that the limit guards against. An error states
the limit. The limits of single settings, such as the number of epochs, are beside those settings.
"""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """A limit: of what, how much, and what happens beyond it if that is no error."""

    area: str
    what: str
    value: int
    unit: str
    beyond: str


BOUNDS: list[Bound] = []


def _bound(area: str, what: str, value: int, unit: str = "", beyond: str = "an error") -> int:
    BOUNDS.append(Bound(area, what, value, unit, beyond))
    return value


# --- model files and checkpoints ---
MOST_HEADER = _bound("models", "header of the file: names and shapes of its tensors, and texts", 32_000_000, "bytes")
MOST_DESCRIPTION = _bound("models", "each text that describes a model or a checkpoint", 8_000_000, "bytes")
MOST_TENSORS = _bound("models", "tensors in a file; each must be part of the model", 50_000)
MOST_HEADS = _bound("models", "heads", 10_000)
LONGEST_TASK = _bound("models", "the name of a task", 255, "characters")
MOST_LAYERS = _bound("models", "hidden layers of an mlp", 100)
MOST_WEIGHTS = _bound("models", "weights of an mlp", 10**9)
LARGEST_LOG_STD = _bound("models", "the logarithm of a standard deviation, in absolute value", 50)
LARGEST_MEAN = _bound("models", "a mean, in absolute value", 10**18)

# --- tables and images ---
MOST_COLUMNS = _bound("tables", "columns", 10_000)
MOST_CATEGORIES = _bound("tables", "categories of a column", 1_000, "", "an error; in later files, missing values")
MOST_CLASSES = _bound("tables", "classes", 1_000)
MOST_INPUTS = _bound("tables", "inputs of a row: one per number, pixel and category", 20_000)
MOST_TEXT = _bound("tables", "one text: a cell, a label or a column's name", 10_000, "characters")
MOST_LINE_BYTES = _bound("tables", "a line of a CSV file, or all lines of one row", 1_000_000, "bytes")
MOST_PIXELS = _bound("tables", "pixels of an image, before scaling", 16_000_000)
MOST_AXES = _bound("tables", "axes of an array in an NPZ file", 32)
ROWS_A_PIECE = _bound("tables", "rows that are read at a time", 4_096, "", "the next piece")
CELLS_A_PIECE = _bound("tables", "cells that are read at a time, at least one row", 1_000_000, "", "the next piece")
BYTES_A_PIECE = _bound("tables", "bytes that are read at a time, at least one row", 16_000_000, "", "the next piece")

# --- configurations and results ---
LONGEST_NAME = _bound("results", "names of methods, benchmarks, presets and settings", 200, "characters")
MOST_RESULT_BYTES = _bound("results", "result.json", 2**28, "bytes")
MOST_LISTS = _bound("results", "lists and tables in result.json, and one more per 64 bytes", 100_000)
MOST_NUMBERS = _bound("results", "numbers in result.json, and one more per 23 bytes", 4_300_000)
MOST_STORE_BYTES = _bound("results", "a file of a sweep's folder", 256_000_000, "bytes")
MOST_CONFIG_BYTES = _bound("results", "a sweep or search in TOML", 1_000_000, "bytes")
MOST_PARTS = _bound("results", "parts of a dotted key in TOML", 20)
MOST_CELLS = _bound("results", "cells of a sweep", 100_000)
MOST_TRIALS = _bound("results", "trials of a search, for all methods and benchmarks", 10_000)
MOST_SEEDS = _bound("results", "seeds of a run", 10_000)

# --- downloads and the cache ---
MOST_JSON_BYTES = _bound("data sets", "a JSON file in the cache", 100_000, "bytes")


def table() -> str:
    """The limits as a table in Markdown."""
    lines = ["| where | what | limit | beyond it |", "|---|---|---|---|"]
    lines += [
        f"| {one.area} | {one.what} | {one.value:,}{f' {one.unit}' if one.unit else ''} | {one.beyond} |"
        for one in BOUNDS
    ]
    return "\n".join(lines)


def rows_a_piece(width: int) -> int:
    """How many rows of this many cells are read at a time."""
    return max(1, min(ROWS_A_PIECE, CELLS_A_PIECE // max(1, width)))
