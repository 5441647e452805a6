"""`evcl learn`, `predict`, `inspect` and `export`: models of your own data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evcl._core.interrupts import Interrupted
from evcl._core.settings import SEED, VALIDATION, Setting, resolve
from evcl.cli.options import GivenSettings, Usage, one_thread, settings, usage
from evcl.cli.progress import console, epochs_bar

if TYPE_CHECKING:
    from evcl import tables

HELD_OUT = replace(VALIDATION, default=0.1, high=0.5)
SIDE = Setting(64, "longest side of images", low=1, high=1000)

ModelFile = Annotated[Path, typer.Option("--model", help="The model file (.safetensors).")]
Data = Annotated[Path, typer.Option(help="A .csv, .tsv, .parquet or .npz file, or a folder with one folder per class.")]
Drop = Annotated[list[str] | None, typer.Option(help="Leave this column out. May be repeated.")]
Unknown = Annotated[str, typer.Option(help="What a category is that the first task did not have: error or missing.")]


def learn(
    model: ModelFile,
    data: Data,
    target: Annotated[str | None, typer.Option(help="The column of labels; needed to create the model.")] = None,
    task: Annotated[str | None, typer.Option(help="The task's name [the file's name].")] = None,
    head: Annotated[
        str | None, typer.Option(help="An earlier task whose head to share, or new [the last task].")
    ] = None,
    method: Annotated[str | None, typer.Option(help="The method; see evcl list [evcl].")] = None,
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
        list[str] | None, typer.Option(help="Treat this column as categorical, even if it looks numeric.")
    ] = None,
    image_side: Annotated[int | None, typer.Option(help="Longest side of images after scaling [64].")] = None,
    unknown: Unknown = "error",
) -> None:
    """Learn a file as one more task; the first time, create the model."""
    from evcl import methods, tables
    from evcl.methods.rehearsal import REHEARSAL

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
        options = {
            "hidden": hidden and _widths(hidden),
            "seed": None if seed is None else SEED.check("--seed", seed),
            "side": None if image_side is None else SIDE.check("--image-side", image_side),
            "settings": given or None,
            "method": method,
            "categories": category or None,
        }
        new = {name: value for name, value in options.items() if value is not None}
    one_thread()
    lenient = _lenient(unknown)
    try:
        with epochs_bar(task or data.stem) as callbacks:
            found = tables.learn(
                model,
                data,
                target,
                task=task,
                head=head,
                epochs=epochs,
                validation=validation,
                drop=drop or [],
                lenient=lenient,
                keep=keep,
                callbacks=callbacks,
                **new,
            )
    except Interrupted:
        folder = tables.checkpoint_folder(model)
        saved = f"; the task is saved in {folder}, and the same command continues from there" if folder.is_dir() else ""
        raise Interrupted(f"the model is unchanged{saved}") from None
    line = found.history[-1]
    if len(found.history) == 1:
        _fact("columns", _columns(found))
    elif new_labels := found.labels[line["known_before"] :]:
        _say(f"new classes: {_shortened(new_labels)}")
    held = f"; {line['held_out']:,} held out" if line["held_out"] else ""
    what = f"{line['examples']:,} examples of {line['classes']} classes"
    _say(f"{line['task']}: {what} learned in {line['seconds']} s{held}")
    if line["held_out"]:
        before = line["accuracy_before"]
        was = "" if before is None else f" ({_percent(before)} before)"
        sure = f"entropy {line['entropy']:.3f}, epistemic {line['epistemic']:.3f}"
        _say(f"on the held-out rows: accuracy {_percent(line['accuracy'])}{was}, NLL {line['nll']:.3f}, {sure}")
    for note in found.notes:
        _say(f"note: {note}")
    if now := [(name, part) for name, part in found.learner.evaluate_kept().items() if name != line["task"]]:
        shown = [f"{name} {_percent(part)}" for name, part in now]
        _say(f"earlier tasks now, on the rows kept of them: {_shortened(shown)}")
    tasks = len(found.history)
    _say(f"model: {model} ({model.stat().st_size / 1000:,.0f} kB, {tasks} task{'' if tasks == 1 else 's'})")


def predict(
    model: ModelFile,
    data: Data,
    out: Annotated[Path, typer.Option(help="The CSV file to write predictions to.")],
    task: Annotated[str | None, typer.Option(help="Task whose head predicts, or infer [infer if several].")] = None,
    drop: Drop = None,
    unknown: Unknown = "error",
) -> None:
    """Predict every row of a file: its class, the class probabilities, how uncertain they are, how unfamiliar it is."""
    from evcl import tables

    one_thread()
    found = tables.predict(model, data, out, task=task, drop=drop or [], lenient=_lenient(unknown))
    far = "" if found.unfamiliar is None else f", unfamiliar {found.unfamiliar:.3f}"
    _say(f"{found.rows:,} predicted, mean entropy {found.entropy:.3f}, epistemic {found.epistemic:.3f}{far}")
    if found.unfamiliar is None:
        _say("there is no column unfamiliar: the version of evcl that created this model did not record what it needs")
    if found.labelled:
        part = "its labels" if found.labelled == found.rows else f"the {found.labelled:,} labels it has"
        _say(f"accuracy {_percent(found.right / found.labelled)} against {part}")
    _say(f"predictions: {out}")


def inspect(model: Annotated[Path, typer.Argument(help="A model file, of evcl learn or saved from Python.")]) -> None:
    """Show what a model has learned, when, how accurate it is, and how certain."""
    from rich.markup import escape
    from rich.table import Table

    from evcl import tables
    from evcl.learner import read_card

    card = read_card(model)
    if not tables.is_table(model):
        _inspect(model, card)
        return
    found = tables.load_model(model)
    learner = found.learner
    _head_lines(model, card)
    _fact("columns", _columns(found))
    _fact("target", found.target or "the folder of an image")
    _fact("classes", _shortened(found.labels))
    if found.drop:
        _fact("drop", _shortened(list(found.drop)))
    if learner.kept:
        _fact("keeps", f"{learner.kept:,} rows of earlier tasks, which it rehearses")
    if len(learner.heads) > 1:
        _fact("heads", _shortened(list(learner.heads)))
    table = Table(box=None, padding=(0, 2 if console().width >= 80 else 1, 0, 0), pad_edge=False)
    now = learner.evaluate_kept()
    columns = ("task", "learned", "rows", "accuracy", *(("now",) if now else ()), "ECE", "entropy", "epistemic")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i > 1 else "left", overflow="fold", no_wrap=i > 0)
    for line in found.history:
        measured = ["-"] * 4
        if line["held_out"]:
            ece = f"{line['ece']:.3f}" if "ece" in line else "-"  # files of earlier versions have none
            measured = [_percent(line["accuracy"]), ece, f"{line['entropy']:.3f}", f"{line['epistemic']:.3f}"]
        if now:
            measured.insert(1, _percent(now[line["task"]]) if line["task"] in now else "-")
        table.add_row(escape(line["task"]), line["learned"].partition(" ")[0], f"{line['examples']:,}", *measured)
    console().print(table)
    console().print("Measured on the rows held out of each file, when it was learned. Entropies are in nats.")
    if now:
        console().print("now: on the rows kept of each task, which the model has trained on.")
    elif len(found.history) > 1:
        console().print("No rows are kept, so what earlier tasks are at now is unknown.")


def _head_lines(model: Path, card: dict[str, Any]) -> None:
    """What the card of any model begins with."""
    from evcl import methods

    settings, tasks = card["settings"], len(card["tasks"])
    known = methods.known_settings(methods.get(card["method"]), settings)
    defaults = {name: setting.default for name, setting in known.items()}
    changed = [f"{name}={value}" for name, value in settings.items() if value != defaults.get(name, value)]
    _say(f"{model}: {model.stat().st_size / 1000:,.0f} kB, {tasks} task{'' if tasks == 1 else 's'}")
    _fact("method", f"{card['method']}, seed {card['seed']}" + "".join(f", {one}" for one in changed))
    if card["versions"]:
        _fact("saved by", ", ".join(f"{name} {version}" for name, version in card["versions"].items()))


def _inspect(model: Path, card: dict[str, Any]) -> None:
    """Show the card of a model that was saved from Python."""
    from rich.markup import escape
    from rich.table import Table

    _head_lines(model, card)
    _fact("weights", f"{card['weights']:,} that learn" + (", adapters of a base model" if "base" in card else ""))
    for name, classes in list(card["heads"].items())[:12]:
        _fact("head", f"{name}: {_shortened([str(label) for label in classes])}")
    table = Table(box=None, padding=(0, 2 if console().width >= 80 else 1, 0, 0), pad_edge=False)
    for i, column in enumerate(("task", "learned", "rows", "classes", "epochs", "accuracy", "NLL", "ECE")):
        table.add_column(column, justify="right" if i > 1 else "left", overflow="fold", no_wrap=i > 0)
    for line in card["tasks"]:
        held = line.get("validation")
        measured = (
            ["-"] * 3 if held is None else [_percent(held["accuracy"]), f"{held['nll']:.3f}", f"{held['ece']:.3f}"]
        )
        known = [f"{line[name]:,}" if name in line else "-" for name in ("examples", "classes", "epochs")]
        table.add_row(escape(line["task"]), line.get("learned", "-").partition(" ")[0], *known, *measured)
    console().print(table)
    console().print("Measured on the validation part of each task, when it was learned. learner.card() says more.")


def export(
    model: Annotated[Path, typer.Argument(help="A model file of evcl learn, or of an evcl.nn.mlp.")],
    out: Annotated[Path, typer.Argument(help="The file to write: .onnx, or .pt2 for torch.export.")],
    task: Annotated[str | None, typer.Option(help="The task whose head predicts; needed if there are several.")] = None,
    what: Annotated[
        str, typer.Option(help="predictive, with its uncertainty, or mean, the mean network.")
    ] = "predictive",
    samples: Annotated[
        int | None, typer.Option(help="Draws of the weights that the file holds [as many as predictions average].")
    ] = None,
) -> None:
    """Write a network that predicts without evcl, as ONNX or a torch.export program. It takes encoded rows."""
    from evcl import tables

    one_thread()
    tables.export(model, out, task=task, what=what, samples=samples)
    _say(f"{out}: {out.stat().st_size / 1000:,.0f} kB")


def _columns(model: tables.Model) -> str:
    """How each column was read; for example, a number written with a decimal comma shows up as a category."""
    from evcl.tables.encoding import Category

    return _shortened(
        [
            f"{c.name} ({len(c.texts)} categories)" if isinstance(c, Category) else c.name + _shape(c.shape)
            for c in model.encoder.columns
        ]
    )


def _shape(shape: tuple[int, ...]) -> str:
    return f" ({' x '.join(map(str, shape))} numbers)" if shape else ""


def _shortened(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _fact(name: str, text: str) -> None:
    _say(f"{name:<8} {text}")


def _percent(part: float) -> str:
    return f"{100 * part:.1f}%"


def _say(text: str) -> None:
    console().print(text, soft_wrap=True, markup=False)


def _widths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(Setting(1, "", low=1, high=100_000).check("--hidden", part)) for part in text.split(","))
    except ValueError:
        raise Usage(f"--hidden takes widths of at least 1, as in 100,100, not {text!r}") from None


def _lenient(unknown: str) -> bool:
    if unknown not in ("error", "missing"):
        raise Usage(f"--unknown must be error or missing, not {unknown!r}")
    return unknown == "missing"
