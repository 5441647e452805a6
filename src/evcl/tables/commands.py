"""The functions behind `evcl learn`, `evcl predict` and `evcl export`."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evcl._core.errors import EvclError
from evcl._core.files import check_regular, locked, write_atomically
from evcl.callbacks import Callback
from evcl.learner import INFER, NEW, load
from evcl.learner.export import export as export_learner
from evcl.tables.csv_file import CsvFile
from evcl.tables.encoding import Number
from evcl.tables.image_folder import PIXELS, ImageFolder
from evcl.tables.model import Model, create, is_table, load_model, read_rows
from evcl.tables.npz_file import NpzFile
from evcl.tables.parquet_file import ParquetFile
from evcl.tables.source import Source, bad

READERS: dict[str, Callable[[Path], Source]] = {
    ".csv": CsvFile,
    ".tsv": CsvFile,
    ".parquet": ParquetFile,
    ".npz": NpzFile,
}


def open_source(path: Path, model: Model | None = None, side: int | None = None) -> Source:
    """The reader for a file or an image folder. Images are scaled to the size of the model's first task."""
    try:
        if path.is_dir():
            size = None
            for column in () if model is None else model.encoder.columns:
                if isinstance(column, Number) and column.name == PIXELS and len(column.shape) == 3:
                    size = (column.shape[0], column.shape[1], column.shape[2])
            return ImageFolder(path, size, **({} if side is None else {"side": side}))
        if path.suffix.lower() not in READERS:
            bad(path, f"its name should end in {', '.join(READERS)}, or it should be a folder of images")
        if not path.exists():
            raise EvclError(f"there is no file {path}")
        check_regular(path)
        return READERS[path.suffix.lower()](path)
    except OSError as error:
        raise EvclError(f"cannot read {path}: {error.strerror or error}") from error


def learn(
    model: Path,
    data: Path,
    target: str | None = None,
    *,
    task: str | None = None,
    head: str | None = None,
    epochs: int | None = None,
    validation: float = 0.1,
    drop: Sequence[str] = (),
    lenient: bool = False,
    keep: int | None = None,
    callbacks: Sequence[Callback] = (),
    **new: Any,
) -> Model:
    """Learn a file as one more task, and write the model; `new` holds options for a model that is created now. `keep`:
    see `Learner.keep`.

    If learning fails or is interrupted, the model file is left unchanged. A long task is saved regularly to a folder
    beside the model, and the same call resumes from there.
    """
    with claimed(model):
        before = _fingerprint(model)
        side = new.pop("side", None)
        if before is None:
            source = open_source(data, side=side)
            if target is None and not source.images:
                raise EvclError(f"there is no model {model} yet: to create one, name its label column with --target")
            if target is not None and source.images:
                raise EvclError("--target is for tables: the class of an image is the name of its folder")
            found, rows = create(source, target, drop=drop, **new)
        else:
            found = load_model(model)
            _refuse(model, found, target, {**new, **({} if side is None else {"side": side})})
            source = open_source(data, found)
            found.check(source, drop)
            rows = read_rows(source, found.target)
        if keep is not None:
            found.learner.keep(keep)
        name = task or (data.name if data.stem in (NEW, INFER) else data.stem)
        found.learn(source, rows, name, head, epochs, validation, lenient, callbacks, checkpoint_folder(model))
        if _fingerprint(model) != before:
            raise EvclError(f"{model} was changed by another process meanwhile: nothing is written; learn it again")
        found.save(model)
        return found


def checkpoint_folder(model: Path) -> Path:
    """The folder for checkpoints of the task that a model is learning."""
    real = Path(os.path.realpath(model))
    return real.with_name(f"{real.name}.checkpoint")


def _refuse(path: Path, model: Model, target: str | None, new: Mapping[str, Any]) -> None:
    for name in new:
        option = {"settings": "set", "categories": "category", "side": "image-side"}.get(name, name)
        raise EvclError(f"{path} already exists, and --{option} is fixed when a model is created")
    if target is not None and target != model.target:
        raise EvclError(f"{path} learns {model.target or 'the folder of an image'!r}, not --target {target}")


@dataclass
class Predicted:
    """How many rows were predicted, how many of them have a label, and how many of those were predicted correctly."""

    rows: int = 0
    labelled: int = 0
    right: int = 0
    entropy: float = 0.0  # mean
    epistemic: float = 0.0
    unfamiliar: float | None = None  # mean; None if the model cannot tell


def predict(
    model: Path, data: Path, out: Path, *, task: str | None = None, drop: Sequence[str] = (), lenient: bool = False
) -> Predicted:
    """Predict every row of a file, piece by piece, and write a CSV file."""
    found = load_model(model)
    source = open_source(data, found)
    found.check(source, drop)
    learner, total = found.learner, Predicted()
    if task is None:
        task = INFER if len(learner.heads) > 1 else learner.tasks[0]
    for other in (model, data):
        if other.exists() and out.exists() and out.samefile(other):
            raise EvclError(f"--out {out} would overwrite a file that is read")
    classes = [found.labels[int(code)] for code in learner.classes(task)]
    header = [*(["file"] if source.images else []), "prediction", *(f"probability_{label}" for label in classes)]
    knows = learner.knows_unfamiliar  # otherwise the column `unfamiliar` is left out
    header += ["entropy", "epistemic", *(["unfamiliar"] if knows else []), *(["task"] if task == INFER else [])]
    total.unfamiliar = 0.0 if knows else None

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(header)
            for piece, given, places in found.predict(source, task, lenient):
                for i, code in enumerate(piece.labels.tolist()):
                    label = found.labels[code]
                    row = [label, *(f"{p:.6f}" for p in piece.probabilities[i].tolist())]
                    row += [f"{piece.entropy[i]:.6f}", f"{max(piece.epistemic[i], 0):.6f}"]
                    row += ["" if piece.unfamiliar is None else f"{piece.unfamiliar[i]:.3f}"] if knows else []
                    writer.writerow(
                        [*([places[i]] if source.images else []), *row, *([piece.tasks[i]] if task == INFER else [])]
                    )
                    total.labelled += given[i] is not None
                    total.right += given[i] == label
                total.rows += len(given)
                total.entropy += float(piece.entropy.sum(dtype=float))
                total.epistemic += float(piece.epistemic.sum(dtype=float))
                if total.unfamiliar is not None and piece.unfamiliar is not None:
                    total.unfamiliar += float(piece.unfamiliar.sum(dtype=float))

    write_atomically(out, write)
    total.entropy, total.epistemic = total.entropy / total.rows, total.epistemic / total.rows
    if total.unfamiliar is not None:
        total.unfamiliar /= total.rows
    return total


def export(
    model: Path, out: Path, *, task: str | None = None, what: str = "predictive", samples: int | None = None
) -> None:
    """Export a model: see `Learner.export`. The network takes encoded rows; how to encode them is in the file's
    metadata, as `evcl.columns`, in the order of the inputs.
    """
    if not is_table(model):
        export_learner(load(model), out, task=task, what=what, samples=samples)
        return
    found = load_model(model)
    classes = [found.labels[int(code)] for code in found.learner.classes(task)]
    notes = {"evcl.columns": json.dumps(found.encoder.described())}
    export_learner(found.learner, out, task=task, what=what, samples=samples, classes=classes, notes=notes)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Lock a model for one `learn` at a time. A second one raises, so that neither result is overwritten.

    The lock is beside the real file, so a model has only one, whatever links lead to it.
    """
    if not path.parent.is_dir():
        raise EvclError(f"cannot write {path}: there is no folder {path.parent}")
    with ExitStack() as stack:
        try:
            if path.exists():
                check_regular(path)
            real = Path(os.path.realpath(path))
            lock = real.with_name(f".{real.name}.lock")
            stack.enter_context(locked(lock, f"{path}: another evcl learn is at work on it"))
        except OSError as error:
            raise EvclError(f"cannot write {path}: {error.strerror or error}") from None
        yield


def _fingerprint(path: Path) -> tuple[int, ...] | None:
    """Values that change when the file is written; None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
