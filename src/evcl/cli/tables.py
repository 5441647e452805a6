"""`evcl learn` and `predict`: models of your own data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evcl._core.errors import EvclError
from evcl._core.interrupts import Interrupted
from evcl._core.settings import SEED, VALIDATION, Setting, resolve
from evcl.cli.options import GivenSettings, OneDevice, Usage, a_method, checked_device, one_thread, settings, usage
from evcl.cli.progress import epochs_bar
from evcl.cli.say import AsJson, Quiet, Voice, columns_of, many, percent, shortened, size_of

if TYPE_CHECKING:
    from evcl import tables
    from evcl.tables.source import Dialect

HELD_OUT = replace(VALIDATION, default=0.1, high=0.5)
SIDE = Setting(64, "longest side of images", low=1, high=1000)

ModelFile = Annotated[Path, typer.Option("--model", help="The model file (.safetensors).")]
Data = Annotated[
    Path,
    typer.Option(help="A file (CSV, Excel, Parquet, Arrow, NumPy, DuckDB), or a folder with one folder per class."),
]
Drop = Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Leave this column out. May be repeated.")]
Separator = Annotated[str | None, typer.Option(help="What separates columns: ; or tab or space [detected].")]
Decimal = Annotated[str | None, typer.Option(help="The decimal sign, . or , [detected].")]
MissingValue = Annotated[
    list[str] | None,
    typer.Option("--missing", metavar="TEXT", help="A text or number that means a missing value. May be repeated."),
]
Query = Annotated[str | None, typer.Option(help="SQL that selects the rows, if the data is a DuckDB database.")]


def learn(
    model: ModelFile,
    data: Data,
    target: Annotated[str | None, typer.Option(help="The column of labels; needed to create the model.")] = None,
    task: Annotated[str | None, typer.Option(help="The task's name [the file's name].")] = None,
    head: Annotated[
        str | None, typer.Option(help="A task whose head this file shares, or new [the last task].")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="The method; see evcl list [evcl].", autocompletion=a_method)
    ] = None,
    hidden: Annotated[str | None, typer.Option(help="Widths of the hidden layers: 100,100 [100].")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the file.")] = None,
    set_: GivenSettings = None,
    seed: Annotated[int | None, typer.Option(help="Random seed [0].")] = None,
    validation: Annotated[float, typer.Option(help="Hold out this fraction of the file, and measure on it.")] = 0.1,
    keep: Annotated[
        int | None, typer.Option(help="Keep this many rows in all, balanced by class, and rehearse them [none].")
    ] = None,
    drop: Drop = None,
    category: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Treat this column as categorical, even if numeric. May be repeated."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="What the target is: class, number or count [number if it has fractions].")
    ] = None,
    image_side: Annotated[int | None, typer.Option(help="Longest side of images after scaling [64].")] = None,
    unknown: Annotated[
        str, typer.Option(help="What to do with new categories and columns: learn, missing or error.")
    ] = "learn",
    separator: Separator = None,
    decimal: Decimal = None,
    missing: MissingValue = None,
    query: Query = None,
    device: OneDevice = "cpu",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Learn a file as one more task.

    The first file creates the model; --target names its column of labels.
    """
    from evcl import methods, tables
    from evcl.methods.rehearsal import REHEARSAL
    from evcl.tables.rows import check_kind

    voice = Voice(as_json, quiet)
    with usage():
        HELD_OUT.check("--validation", validation)
        chosen = methods.get(method or "evcl")
        if chosen.jointly:
            raise Usage(f"{chosen.name} trains on all tasks at once, but evcl learn learns one task at a time")
        given = settings(set_ or [])
        if keep is not None:
            REHEARSAL["memory"].check("--keep", keep)
        if epochs is not None:
            epochs = int(chosen.known_settings["epochs"].check("--epochs", epochs))
        if given and not model.exists():
            resolve(chosen.name, methods.known_settings(chosen, given), given)
        options: dict[str, Any] = {
            "hidden": hidden and _widths(hidden),
            "seed": None if seed is None else SEED.check("--seed", seed),
            "side": None if image_side is None else SIDE.check("--image-side", image_side),
            "settings": given or None,
            "method": method,
            "categories": category or None,
            "kind": None if kind is None else check_kind(kind),
        }
        device = checked_device(device)
    one_thread()
    dialect = _dialect(separator, decimal, missing, query)
    lenient = _unknown(unknown, "learn", "missing", "error")
    try:
        with epochs_bar(task or data.stem, voice.silent) as callbacks:
            asked = tables.Learning(
                target,
                task,
                head,
                epochs,
                validation,
                drop or [],
                lenient,
                dialect,
                keep,
                callbacks,
                device,
                lambda text: voice.say(f"warning: {text}"),
                **options,
            )
            found = tables.learn_file(model, data, asked)
    except Interrupted:
        folder = tables.checkpoint_folder(model)
        saved = f"; the task is saved in {folder}, and the same command continues from there" if folder.is_dir() else ""
        raise Interrupted(f"the model is unchanged{saved}") from None
    _report(found, model, voice)


def _report(learned: tables.Learned, path: Path, voice: Voice) -> None:
    """Say what a file taught the model."""
    from evcl.tables.earlier import unknown

    found, line, tasks = learned.model, learned.line, len(learned.model.history)
    new_labels = found.labels[line["known_before"] :] if tasks > 1 else []
    for told in learned.read:
        voice.say(told)
    if tasks == 1:
        voice.fact("columns", columns_of(found))
    elif new_labels:
        voice.say(f"new classes: {shortened(new_labels)}")
    held = f"; {line['held_out']:,} held out" if line["held_out"] else ""
    what = many(line["examples"], "example")
    what = what if found.numeric else f"{what} of {many(line['classes'], 'class', 'classes')}"
    voice.say(f"{line['task']}: {what} learned in {line['seconds']} s{held}")
    if line["held_out"] and found.numeric:
        before, inside = line["rmse_before"], percent(line["coverage"])
        was = "" if before is None else f" ({before:.4g} before)"
        spread = f"the target's deviation is {line['deviation']:.4g}"
        voice.say(f"on the held-out rows: RMSE {line['rmse']:.4g}{was}; {spread}; {inside} within 95% intervals")
    elif line["held_out"]:
        before = line["accuracy_before"]
        was = "" if before is None else f" ({percent(before)} before)"
        sure = f"entropy {line['entropy']:.3f}, epistemic {line['epistemic']:.3f}"
        voice.say(f"on the held-out rows: accuracy {percent(line['accuracy'])}{was}, NLL {line['nll']:.3f}, {sure}")
    for note in learned.notes:
        voice.say(f"note: {note}")
    now = {name: one for name, one in found.now.items() if name != line["task"]}
    for estimated, how in ((False, "on the rows kept of them"), (True, "estimated")):
        if shown := [f"{name} {percent(one.accuracy)}" for name, one in now.items() if one.estimated == estimated]:
            voice.say(f"earlier tasks now, {how}: {shortened(shown)}")
    for why, names in unknown(found, found.now).items():
        if earlier := [name for name in names if name != line["task"]]:
            voice.say(f"earlier tasks now, not known: {shortened(earlier)} ({why})")
    voice.say(f"model: {path} ({size_of(path)}, {many(tasks, 'task')})")
    facts: dict[str, object] = {
        "model": path,
        "tasks": tasks,
        "columns": found.encoder.names,
        "new_classes": new_labels,
    }
    more = {
        "read": learned.read,
        "notes": [*learned.doubts, *learned.notes],
        "now": {name: one._asdict() for name, one in now.items()},
    }
    voice.end({**facts, **line, **more})


def predict(
    model: ModelFile,
    data: Data,
    out: Annotated[Path, typer.Option(help="The file to write: .csv or .parquet; - is standard output, as CSV.")],
    task: Annotated[str | None, typer.Option(help="Task whose head predicts, or infer [infer if several].")] = None,
    drop: Drop = None,
    unknown: Annotated[
        str, typer.Option(help="What to do with unknown categories and columns: missing or error.")
    ] = "missing",
    separator: Separator = None,
    decimal: Decimal = None,
    missing: MissingValue = None,
    query: Query = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="Write only this column of the file beside the predictions [all]. May be repeated."
        ),
    ] = None,
    only_predictions: Annotated[
        bool, typer.Option("--only-predictions", help="Write no columns of the file beside the predictions.")
    ] = False,
    keep_formulas: Annotated[
        bool,
        typer.Option("--keep-formulas", help="Write texts that look like spreadsheet formulas unchanged."),
    ] = False,
    device: OneDevice = "cpu",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Predict every row of a file.

    Writes the file's own columns and, beside them, the predicted class, the probability of each class, how uncertain
    the prediction is, and how unfamiliar the row is. Of numbers: the mean, its standard deviation and a 95% interval.
    """
    from evcl import tables
    from evcl.streams.table import is_stream
    from evcl.tables.output_file import STANDARD, check_ending, fixed

    standard = out == STANDARD
    if standard and as_json:
        raise Usage("--out - and --json both write to standard output: name a file with --out")
    if key and only_predictions:
        raise Usage("--key and --only-predictions cannot be used together")
    with usage():
        check_ending(out)
        device = checked_device(device)
    voice = Voice(as_json, quiet, to_stderr=standard)
    one_thread()
    keys = [] if only_predictions else key
    options = {
        "task": task,
        "drop": drop or [],
        "keys": keys,
        "device": device,
        "keep_formulas": keep_formulas,
        "unknown": _unknown(unknown, "missing", "error"),
        "dialect": _dialect(separator, decimal, missing, query),
    }
    if model.is_file() and is_stream(model):
        from evcl.cli.stream import predict_stream  # it uses options of this file

        predict_stream(model, data, out, options, voice)
        return
    found = tables.predict(model, data, out, **options)
    for told in found.read:
        voice.say(told)
    for note in found.notes:
        voice.say(f"note: {note}")
    far = "" if found.unfamiliar is None else f", unfamiliar {fixed(found.unfamiliar, 3)} (1 is usual)"
    if found.std is not None:
        voice.say(f"{found.rows:,} predicted, mean std {found.std:.4g}, epistemic {found.epistemic:.4g}{far}")
    else:
        voice.say(f"{found.rows:,} predicted, mean entropy {found.entropy:.3f}, epistemic {found.epistemic:.3f}{far}")
    if found.unfamiliar is None:
        why = "the version of evcl that created this model did not record what it needs"
        voice.say(f"there is no column unfamiliar: {why}")
    if found.labelled:
        part = "its labels" if found.labelled == found.rows else f"the {found.labelled:,} labels it has"
        good = f"accuracy {percent(found.right / found.labelled)}"
        if found.std is not None:
            good = f"RMSE {found.squares**0.5:.4g}, {percent(found.inside / found.labelled)} within 95% intervals,"
        voice.say(f"{good} against {part}")
    if not standard:
        voice.say(f"predictions: {out}")
    accuracy = found.right / found.labelled if found.labelled else None
    means: dict[str, float | None] = {
        "entropy": found.entropy,
        "epistemic": found.epistemic,
        "unfamiliar": found.unfamiliar,
    }
    good_numbers: dict[str, object] = {"accuracy": accuracy}
    if found.std is not None:
        means = {"std": found.std, "epistemic": found.epistemic, "unfamiliar": found.unfamiliar}
        known = found.labelled or None
        good_numbers = {"rmse": known and found.squares**0.5, "coverage": known and found.inside / known}
    voice.end(
        {
            "predictions": out,
            "rows": found.rows,
            **means,
            "labelled": found.labelled,
            **good_numbers,
            "read": found.read,
            "notes": found.notes,
        }
    )


WIDTH = Setting(1, "units of a hidden layer", low=1, high=100_000)


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(WIDTH.check("--hidden", part)) for part in text.split(","))
    except EvclError:
        wanted = f"widths from 1 to {int(WIDTH.high):,}, separated by commas, as in 100,100"
        raise Usage(f"--hidden takes {wanted}, not {text!r}") from None


def _unknown(given: str, *known: str) -> Any:
    if given not in known:
        raise Usage(f"--unknown must be {' or '.join((', '.join(known[:-1]), known[-1]))}, not {given!r}")
    return given


def _dialect(separator: str | None, decimal: str | None, missing: list[str] | None, query: str | None) -> Dialect:
    from evcl.tables.source import Dialect

    separator = {"tab": "\t", "\\t": "\t", "space": " ", "comma": ","}.get(separator or "", separator)
    if separator is not None and (len(separator) != 1 or separator.isalnum() or separator in '."\n'):
        raise Usage(f"--separator takes one character, tab or space, not {separator!r}")
    if decimal not in (None, ".", ","):
        raise Usage(f"--decimal must be . or , not {decimal!r}")
    return Dialect(separator, decimal, tuple(missing or ()), query)
