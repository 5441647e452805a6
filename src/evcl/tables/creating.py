"""A new model for tables."""

from __future__ import annotations

import math
from collections.abc import Collection

from evcl import targets
from evcl._core.bounds import MOST_INPUTS
from evcl._core.settings import SEED, resolve
from evcl.learner import Learner
from evcl.methods import check_targets, known_settings
from evcl.methods import get as get_method
from evcl.nn import mlp
from evcl.tables.asked import Learning
from evcl.tables.fitting import EncoderFitting
from evcl.tables.model import Model
from evcl.tables.rows import DATES, LIKELIHOODS, Rows, read_rows
from evcl.tables.source import Json, Source, bad
from evcl.tables.texts import DATE, meanings, number_of

MAX_CLASS_NUMBERS = 20  # a target of more different numbers may be a number,
MIN_ROWS_PER_CLASS = 3  # if each is in fewer rows than this, on average, or if they are no codes
FIX = "--kind number or --kind count learns it as one, --kind class leaves out this note"


def create(source: Source, asked: Learning) -> tuple[Model, Rows]:
    """Create a model for files like this one, which has learned nothing yet; also returns the file's targets."""
    target, kind, given = asked.target, asked.kind or "class", asked.settings or {}
    hidden = (100,) if asked.hidden is None else asked.hidden
    method, categories = asked.method or "evcl", asked.categories or ()
    chosen = get_method(method)  # wrong options raise here, before the file is read
    resolved = resolve(chosen.name, known_settings(chosen, given), given)
    check_targets(chosen, resolved, targets.get(LIKELIHOODS[kind]))
    seed = int(SEED.check("seed", asked.seed or 0))
    mlp(1, hidden)
    for name in (*asked.drop, *categories):
        if name not in source.shapes:
            what = "leave out" if name in asked.drop else "take as a category"
            bad(source.path, f"there is no column {name!r} to {what}")
    names = [name for name in source.shapes if name != target and name not in asked.drop]
    if not names:
        bad(source.path, "no column is left to learn from")
    if (numbers := sum(math.prod(source.shapes[name]) for name in names)) > MOST_INPUTS:  # before any row is read
        fix = "a smaller --image-side" if source.images else "--drop leaves columns out"
        bad(source.path, f"{numbers:,} numbers in a row, but only 1 to {MOST_INPUTS:,} are possible; {fix}")
    source.expect(dict.fromkeys(categories, "text"))
    source.expect(dict.fromkeys([] if target is None else [target], "text" if kind == "class" else "number"), target)
    fitting = EncoderFitting(source, names, categories)
    rows = read_rows(source, target, kind, fitting)
    if kind == "class":
        if len(rows.names) < 2:
            left_out = f", and {rows.labelled.note}" if rows.labelled.note else ""
            bad(source.path, f"a classifier needs two classes, but every label is {rows.names[0]!r}{left_out}")
        if asked.kind is None and not source.images:
            if 2 * sum(meanings(name) & DATE != 0 for name in rows.names) > len(rows.names):
                bad(source.path, f"column {target!r}", DATES)
            rows.doubts = like_numbers(source, str(target), rows.names, len(rows.values))
    encoder = fitting.encoder()
    rows.notes, rows.ends = [*fitting.limited, *fitting.notes], fitting.ends
    about: Json = {"seed": seed, "likelihood": LIKELIHOODS[kind]}
    given = {"posterior": "diagonal", **given} if "posterior" in resolved else given  # tables get new columns
    learner = Learner(mlp(encoder.inputs, hidden), method, **about, **given)
    learner.state.run.account = None  # a month adds little to the file
    made = Model(encoder, None if source.images else target, drop=tuple(asked.drop), learner=learner)
    made.missing, made.kind_given = asked.dialect.missing, asked.kind is not None
    return made, rows


def later_doubts(model: Model, source: Source, rows: Rows) -> list[str]:
    """A note if the classes of a model, with those of one more file, look like numbers, unless the user chose them."""
    if model.target is None or model.kind_given or model.numeric:
        return []
    count = sum(line["examples"] + line["held_out"] for line in model.history) + len(rows.values)
    fix = "a new model with --kind number or --kind count learns it as one"
    return like_numbers(source, model.target, {*model.labels, *rows.names}, count, fix)


def like_numbers(source: Source, target: str, names: Collection[str], rows: int, fix: str = FIX) -> list[str]:
    """A note if the classes of these rows look like numbers: they hardly repeat, or are no codes from 0 or 1."""
    parsed = [number_of(name, source.decimal(target) or ".") for name in names]
    numbers = sorted(number for number in parsed if number is not None)
    if len(numbers) < len(names) or len(names) <= MAX_CLASS_NUMBERS:
        return []
    codes = numbers[0] in (0, 1) and numbers[-1] - numbers[0] == len(numbers) - 1
    if codes and MIN_ROWS_PER_CLASS * len(names) <= rows:
        return []
    return [f"{target} has {len(names):,} different numbers, each of which is learned as a class: {fix}"]
