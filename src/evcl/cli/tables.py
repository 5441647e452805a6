"""`evcl learn` and `predict`: models of your own data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from evcl._core.errors import EvclError
from evcl._core.interrupts import Interrupted
from evcl._core.settings import SEED, VALIDATION, Setting, resolve
from evcl.cli.options import (
    FileOptions,
    GivenSettings,
    OneDevice,
    Usage,
    a_method,
    checked_device,
    one_thread,
    settings,
    usage,
)
from evcl.cli.progress import Voice, columns_of, epochs_bar, many, percent, shortened, size_of

if TYPE_CHECKING:
    from evcl import tables

HELD_OUT = replace(VALIDATION, default=0.1, high=0.5)
SIDE = Setting(64, "longest side of images", low=1, high=1000)
LAYER_UNITS = Setting(1, "units of a hidden layer", low=1, high=100_000)

ModelFile = Annotated[Path, typer.Option("--model", help="The model file (.safetensors).")]
Data = Annotated[Path, "A file (CSV, Excel, Parquet, Arrow, NumPy, DuckDB), or a folder with one folder per class."]
Word = TypeVar("Word", bound=str)


@dataclass(frozen=True, kw_only=True)
class LearnOptions(FileOptions):
    model: ModelFile
    data: Data
    target: Annotated[str | None, "The column of labels; needed to create the model."] = None
    task: Annotated[str | None, "The task's name [the file's name]."] = None
    head: Annotated[str | None, "A task whose head this file shares, or new [the last task]."] = None
    method: Annotated[str | None, typer.Option(help="The method; see evcl list [evcl].", autocompletion=a_method)] = (
        None
    )
    hidden: Annotated[str | None, "Widths of the hidden layers: 100,100 [100]."] = None
    epochs: Annotated[int | None, "Passes over the file."] = None
    set_: GivenSettings = None
    seed: Annotated[int | None, "Random seed [0]."] = None
    validation: Annotated[float, "Hold out this fraction of the file, and measure on it."] = 0.1
    keep: Annotated[int | None, "Keep this many rows in all, balanced by class, and rehearse them [none]."] = None
    category: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Treat this column as categorical, even if numeric. May be repeated."),
    ] = None
    kind: Annotated[str | None, "What the target is: class, number or count [number if it has fractions]."] = None
    image_side: Annotated[int | None, "Longest side of images after scaling [64]."] = None
    unknown: Annotated[str, "What to do with new categories and columns: learn, missing or error."] = "learn"
    device: OneDevice = "cpu"


def learn(options: LearnOptions) -> None:
    """Learn a file as one more task.

    The first file creates the model; --target names its column of labels.
    """
    from evcl import tables

    voice = Voice(options.as_json, options.quiet)
    with usage():
        request = _asked(options)
    one_thread()
    request = replace(request, dialect=options.dialect(), unknown=_known(options.unknown, "learn", "missing", "error"))
    try:
        with epochs_bar(options.task or options.data.stem, voice.silent) as callbacks:
            request = replace(request, callbacks=callbacks, warn=lambda text: voice.say(f"warning: {text}"))
            learned = tables.learn_file(options.model, options.data, request)
    except Interrupted:
        folder = tables.checkpoint_folder(options.model)
        saved = f"; the task is saved in {folder}, and the same command continues from there" if folder.is_dir() else ""
        raise Interrupted(f"the model is unchanged{saved}") from None
    _report(learned, options.model, voice)


def _asked(options: LearnOptions) -> tables.Learning:
    """What is asked of the library, checked."""
    from evcl import methods, tables
    from evcl.methods.rehearsal import REHEARSAL
    from evcl.tables.rows import check_kind

    HELD_OUT.check("--validation", options.validation)
    chosen = methods.get(options.method or "evcl")
    if chosen.jointly:
        raise Usage(f"{chosen.name} trains on all tasks at once, but evcl learn learns one task at a time")
    given, epochs = settings(options.set_ or []), options.epochs
    if options.keep is not None:
        REHEARSAL["memory"].check("--keep", options.keep)
    if epochs is not None:
        epochs = int(chosen.known_settings["epochs"].check("--epochs", epochs))
    if given and not options.model.exists():
        resolve(chosen.name, methods.known_settings(chosen, given), given)
    return tables.Learning(
        target=options.target,
        task=options.task,
        head=options.head,
        epochs=epochs,
        validation=options.validation,
        drop=options.drop or [],
        keep=options.keep,
        hidden=_widths(options.hidden) if options.hidden else None,
        seed=None if options.seed is None else int(SEED.check("--seed", options.seed)),
        side=None if options.image_side is None else int(SIDE.check("--image-side", options.image_side)),
        settings=given or None,
        method=options.method,
        categories=options.category or None,
        kind=None if options.kind is None else check_kind(options.kind),
        device=checked_device(options.device),
    )


def _report(learned: tables.Learned, path: Path, voice: Voice) -> None:
    """Say what a file taught the model."""
    from evcl.tables.earlier import unknown

    model, line, tasks = learned.model, learned.line, len(learned.model.history)
    new_labels = model.labels[line["known_before"] :] if tasks > 1 else []
    for text in learned.read:
        voice.say(text)
    if tasks == 1:
        voice.fact("columns", columns_of(model))
    elif new_labels:
        voice.say(f"new classes: {shortened(new_labels)}")
    held = f"; {line['held_out']:,} held out" if line["held_out"] else ""
    what = many(line["examples"], "example")
    what = what if model.numeric else f"{what} of {many(line['classes'], 'class', 'classes')}"
    voice.say(f"{line['task']}: {what} learned in {line['seconds']} s{held}")
    if line["held_out"] and model.numeric:
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
    now = {name: one for name, one in model.now.items() if name != line["task"]}
    for estimated, how in ((False, "on the rows kept of them"), (True, "estimated")):
        if scores := [f"{name} {percent(one.accuracy)}" for name, one in now.items() if one.estimated == estimated]:
            voice.say(f"earlier tasks now, {how}: {shortened(scores)}")
    for why, names in unknown(model, model.now).items():
        if earlier := [name for name in names if name != line["task"]]:
            voice.say(f"earlier tasks now, not known: {shortened(earlier)} ({why})")
    voice.say(f"model: {path} ({size_of(path)}, {many(tasks, 'task')})")
    facts = {"model": path, "tasks": tasks, "columns": model.encoder.names, "new_classes": new_labels}
    more = {"read": learned.read, "notes": [*learned.doubts, *learned.notes]}
    voice.end({**facts, **line, **more, "now": {name: one._asdict() for name, one in now.items()}})


@dataclass(frozen=True, kw_only=True)
class PredictOptions(FileOptions):
    model: ModelFile
    data: Data
    out: Annotated[Path, "The file to write: .csv or .parquet; - is standard output, as CSV."]
    task: Annotated[str | None, "Task whose head predicts, or infer [infer if several]."] = None
    unknown: Annotated[str, "What to do with unknown categories and columns: missing or error."] = "missing"
    key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="Write only this column of the file beside the predictions [all]. May be repeated."
        ),
    ] = None
    only_predictions: Annotated[bool, "Write no columns of the file beside the predictions."] = False
    keep_formulas: Annotated[bool, "Write texts that look like spreadsheet formulas unchanged."] = False
    device: OneDevice = "cpu"


def predict(options: PredictOptions) -> None:
    """Predict every row of a file.

    Writes the file's own columns and, beside them, the predicted class, the probability of each class, how uncertain
    the prediction is, and how unfamiliar the row is. Of numbers: the mean, its standard deviation and a 95% interval.
    """
    from evcl import tables
    from evcl.streams.table import is_stream
    from evcl.tables.output_file import STANDARD, check_ending

    model, data, out = options.model, options.data, options.out
    standard = out == STANDARD
    if standard and options.as_json:
        raise Usage("--out - and --json both write to standard output: name a file with --out")
    if options.key and options.only_predictions:
        raise Usage("--key and --only-predictions cannot be used together")
    with usage():
        check_ending(out)
        device = checked_device(options.device)
    voice = Voice(options.as_json, options.quiet, to_stderr=standard)
    one_thread()
    request = tables.Predicting(
        task=options.task,
        drop=options.drop or [],
        unknown=_known(options.unknown, "missing", "error"),
        dialect=options.dialect(),
        keys=[] if options.only_predictions else options.key,
        device=device,
        keep_formulas=options.keep_formulas,
    )
    stream = model.is_file() and is_stream(model)
    if stream and request.task is not None:
        raise Usage(f"--task: {model} is a stream, which has no tasks")
    if stream:
        from evcl.streams import predicting

        predicted = predicting.predict_file(model, data, out, request)
    else:
        predicted = tables.predict_file(model, data, out, request)
    _say_predicted(predicted, out, voice, stream)


def _say_predicted(found: tables.Predicted, out: Path, voice: Voice, stream: bool) -> None:
    """Say what was predicted and, where there are labels, how well."""
    from evcl.tables.output_file import STANDARD, fixed

    for text in (*found.read, *(f"note: {note}" for note in found.notes)):
        voice.say(text)
    name, mean, digits = ("entropy", found.entropy, ".3f") if found.std is None else ("std", found.std, ".4g")
    means: dict[str, float | None] = {name: mean}
    more = ""
    if not stream:
        means |= {"epistemic": found.epistemic, "unfamiliar": found.unfamiliar}
        far = "" if found.unfamiliar is None else f", unfamiliar {fixed(found.unfamiliar, 3)} (1 is usual)"
        more = f", epistemic {found.epistemic:{digits}}{far}"
    voice.say(f"{found.rows:,} predicted, mean {name} {mean:{digits}}{more}")
    if not stream and found.unfamiliar is None:
        why = "the version of evcl that created this model did not record what it needs"
        voice.say(f"there is no column unfamiliar: {why}")
    labelled = found.labelled
    measured: dict[str, float | None] = dict.fromkeys(["accuracy"] if found.std is None else ["rmse", "coverage"])
    if labelled:
        part = "its labels" if labelled == found.rows else f"the {labelled:,} labels it has"
        part = many(labelled, "label" if found.std is None else "target") if stream else part
        if found.std is None:
            measured = {"accuracy": found.right / labelled}
            good = f"accuracy {percent(found.right / labelled)}"
        else:
            measured = {"rmse": found.squares**0.5, "coverage": found.inside / labelled}
            good = f"RMSE {found.squares**0.5:.4g}, {percent(found.inside / labelled)} within 95% intervals,"
        voice.say(f"{good} against {part}")
    if out != STANDARD:
        voice.say(f"predictions: {out}")
    facts = {"predictions": out, "rows": found.rows, **means, "labelled": labelled, **measured}
    voice.end({**facts, "read": found.read, "notes": found.notes})


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(LAYER_UNITS.check("--hidden", part)) for part in text.split(","))
    except EvclError:
        wanted = f"widths from 1 to {int(LAYER_UNITS.high):,}, separated by commas, as in 100,100"
        raise Usage(f"--hidden takes {wanted}, not {text!r}") from None


def _known(given: str, *known: Word) -> Word:
    for one in known:
        if one == given:
            return one
    raise Usage(f"--unknown must be {' or '.join((', '.join(known[:-1]), known[-1]))}, not {given!r}")
