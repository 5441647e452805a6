"""`evcl inspect`, `merge` and `export`: what is in a model file, and models in other forms."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evcl.cli.options import AsJson, Quiet, one_thread
from evcl.cli.progress import Voice, columns_of, console, many, percent, plain_table, shortened, size_of
from evcl.cli.stream import inspect_stream

if TYPE_CHECKING:
    from rich.table import Table

    from evcl import tables


Facts = dict[str, Any]  # as JSON has them


def inspect(
    model: Annotated[Path, typer.Argument(help="A model file, of evcl learn or stream, or saved from Python.")],
    as_json: AsJson = False,
) -> None:
    """Show what a model has learned, when and how well."""

    from evcl import tables
    from evcl.learner import read_card
    from evcl.streams.table import is_stream

    voice = Voice(as_json)
    if model.is_file() and is_stream(model):
        inspect_stream(model, voice, as_json)
        return
    card = read_card(model)
    if tables.is_table(model):
        tabular = tables.load_model(model)
        if not as_json:
            _head_lines(model, card, voice)
            _show_table(tabular, voice)
        voice.end(_facts(model, card, tabular))
        return
    if not as_json:
        _head_lines(model, card, voice)
        _show_learner(card, voice)
    voice.end({"model": model, **card})


def _show_table(found: tables.Model, voice: Voice) -> None:
    """Show what is known of a model of evcl learn."""
    from evcl.tables.earlier import standing, unknown

    learner = found.learner
    voice.fact("columns", columns_of(found))
    voice.fact("target", found.target or "the folder of an image")
    number = "a count" if learner.likelihood == "poisson" else "a number"
    voice.fact(*(("learns", number) if found.numeric else ("classes", shortened(found.labels))))
    options = {"drop": found.drop, "missing": found.missing}
    for name in (name for name, texts in options.items() if texts):
        voice.fact(name, shortened(list(options[name])))
    if learner.kept:
        voice.fact("keeps", f"{learner.kept:,} rows of earlier tasks, which it rehearses")
    if len(learner.heads) > 1:
        voice.fact("heads", shortened(list(learner.heads)))
    if found.numeric:
        _show_numbers(found)
        return
    now = standing(found)
    wide = console().width >= 80 or not now
    more = [*(["now"] if now else []), *(["ECE"] if wide else [])]
    table = _table("accuracy", *more, "entropy", "epistemic")
    for line in found.history:
        measured = ["-"] * 4
        if line["held_out"]:
            ece = f"{line['ece']:.3f}" if "ece" in line else "-"  # files of earlier versions have none
            measured = [percent(line["accuracy"]), ece, f"{line['entropy']:.3f}", f"{line['epistemic']:.3f}"]
        if not wide:
            del measured[1]
        if now:
            one = now.get(line["task"])
            measured.insert(1, "-" if one is None else ("~" if one.estimated else "") + percent(one.accuracy))
        table.add_row(line["task"], line["learned"].partition(" ")[0], f"{line['examples']:,}", *measured)
    console().print(table)
    console().print("Measured on the rows held out of each file, when it was learned. Entropies are in nats.")
    if any(not one.estimated for one in now.values()):
        console().print("now: on the rows kept of each task, which the model has trained on.")
    if any(one.estimated for one in now.values()):
        console().print("now, with ~: estimated from a summary of the task's rows, which is usually right to 5 points.")
    for why, tasks in unknown(found, now).items() if len(found.history) > 1 else ():
        console().print(f"Accuracy now, not known: {shortened(tasks)} ({why}).")


def _table(*columns: str) -> Table:
    """A table with a line for each task."""
    table = plain_table("task", "learned", "rows", *columns, left=2, wide=console().width >= 80)
    for column in table.columns[1:]:
        column.no_wrap = True
    return table


def _show_numbers(found: tables.Model) -> None:
    """Show what is known of the tasks of a model that learns a number."""
    table = _table("RMSE", "deviation", "coverage", "NLL")
    for line in found.history:
        held = ["-", f"{line['deviation']:.4g}", "-", "-"]
        if line["held_out"]:
            held = [f"{line['rmse']:.4g}", held[1], percent(line["coverage"]), f"{line['nll']:.3f}"]
        table.add_row(line["task"], line["learned"].partition(" ")[0], f"{line['examples']:,}", *held)
    console().print(table)
    console().print("Measured on the rows held out of each file, when it was learned; coverage: of 95% intervals.")


def _facts(path: Path, card: Facts, found: tables.Model) -> Facts:
    """What `inspect` shows, as a JSON object."""
    from evcl.tables.earlier import standing

    learner, now = found.learner, standing(found)
    known = {name: {"now": one.accuracy, "estimated": one.estimated} for name, one in now.items()}
    unknown = {"now": None, "estimated": None}
    return {
        "model": path,
        **{name: card[name] for name in ("method", "parts", "rules", "seed", "settings", "versions") if name in card},
        "columns": found.encoder.names,
        "target": found.target,
        "classes": found.labels,
        "drop": found.drop,
        "missing": found.missing,
        "kept": learner.kept,
        "heads": learner.heads,
        "tasks": [{**line, **known.get(line["task"], unknown)} for line in found.history],
    }


def _head_lines(model: Path, card: Facts, voice: Voice) -> None:
    """What the card of any model begins with."""
    from evcl import methods

    settings, tasks = card["settings"], len(card["tasks"])
    known = methods.known_settings(methods.get(card["method"]), settings)
    defaults = {name: setting.default for name, setting in known.items()}
    changed = [f"{name}={value}" for name, value in settings.items() if value != defaults.get(name, value)]
    voice.say(f"{model}: {size_of(model)}, {many(tasks, 'task')}")
    voice.fact("method", f"{card['method']}, seed {card['seed']}" + "".join(f", {one}" for one in changed))
    if card.get("parts"):
        voice.fact("parts", ", ".join(card["parts"]))
    if card["versions"]:
        voice.fact("saved by", ", ".join(f"{name} {version}" for name, version in card["versions"].items()))


def _show_learner(card: Facts, voice: Voice) -> None:
    """Show the card of a model that was saved from Python."""
    voice.fact("weights", f"{card['weights']:,} that learn" + (", adapters of a base model" if "base" in card else ""))
    for name, classes in list(card["heads"].items())[:12]:
        voice.fact("head", f"{name}: {shortened([str(label) for label in classes])}")
    table = _table("classes", "epochs", "accuracy", "NLL", "ECE")
    for line in card["tasks"]:
        held = line.get("validation")
        measured = (
            ["-"] * 3 if held is None else [percent(held["accuracy"]), f"{held['nll']:.3f}", f"{held['ece']:.3f}"]
        )
        known = [f"{line[name]:,}" if name in line else "-" for name in ("examples", "classes", "epochs")]
        table.add_row(line["task"], line.get("learned", "-").partition(" ")[0], *known, *measured)
    console().print(table)
    console().print("Measured on the validation part of each task, when it was learned. learner.card() says more.")


def merge(
    sites: Annotated[list[Path], typer.Argument(metavar="MODEL", help="The sites' model files, at least two.")],
    base: Annotated[Path, "The model file that every site started from."],
    out: Annotated[Path, "The model file to write."],
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Merge models that learned at several sites.

    Each site starts from a copy of the base, learns its own files, and hands over its model; no rows leave a site.
    """

    from evcl import tables

    voice = Voice(as_json, quiet)
    one_thread()
    model = tables.merge(base, sites, out)
    for one in model.history:
        now = model.now.get(one["task"])
        at = "" if now is None else f", now {percent(now.accuracy)} (estimated)"
        was = f": accuracy {percent(one['accuracy'])} when learned{at}" if one["held_out"] else ""
        voice.say(f"{one['task']}{was}")
    voice.say(f"model: {out} ({size_of(out)}, {many(len(model.history), 'task')}, of {len(sites)} sites)")
    tasks = [
        {**one, "now": model.now[one["task"]].accuracy if one["task"] in model.now else None} for one in model.history
    ]
    voice.end({"model": out, "base": base, "sites": sites, "classes": model.labels, "tasks": tasks})


def export(
    model: Annotated[Path, typer.Argument(help="A model file of evcl learn, or of an evcl.nn.mlp.")],
    out: Annotated[Path, typer.Argument(help="The file to write: .onnx, or .pt2 for torch.export.")],
    task: Annotated[str | None, "The task whose head predicts; needed if there are several."] = None,
    what: Annotated[str, "predictive (with uncertainty) or mean (the mean network)."] = "predictive",
    samples: Annotated[int | None, "Draws of the weights to store in the file [as predictions use]."] = None,
) -> None:
    """Write a network that predicts without evcl.

    The file is ONNX or a torch.export program. It takes encoded rows.
    """

    from evcl import tables

    one_thread()
    tables.export(model, out, task=task, what=what, samples=samples)
    Voice().say(f"{out}: {size_of(out)}")
