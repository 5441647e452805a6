"""The function behind `evcl merge`: models of several sites become one, without their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from evcl._core.errors import EvclError
from evcl.learner import Learner, rebuilt
from evcl.learner import merge as merge_learners
from evcl.tables.commands import claimed
from evcl.tables.earlier import MOST_SUMMARIES, standing
from evcl.tables.encoding import Encoder
from evcl.tables.model import Model, load_model
from evcl.tables.parts import Number, Part, Time


def merge(base: Path, sites: Sequence[Path], out: Path) -> Model:
    """Merge models of tables or images that started from the file `base`, and write the result: see `evcl.merge`.

    The sites are named after their files. If something cannot be merged, nothing is written.
    """
    if len(sites) < 2:
        raise EvclError("merge takes the files of at least two sites")
    if len({path.resolve() for path in (base, *sites)}) < 1 + len(sites):
        raise EvclError("merge takes each file once: what is in a file twice would count twice")
    if out.suffix.lower() not in ("", ".safetensors"):
        raise EvclError(f"--out {out}: it is a model file, whose name should end in .safetensors")
    with claimed(out):
        if out.exists():
            raise EvclError(f"{out} already exists: choose another name with --out")
        started, models = load_model(base), [load_model(path) for path in sites]
        names = _names(sites)
        for path, one in zip(sites, models, strict=True):
            _check(path, one, base, started)
        labels = list(dict.fromkeys(label for one in (started, *models) for label in one.labels))
        places = [{code: labels.index(label) for code, label in enumerate(one.labels)} for one in models]
        learners = [_relabelled(one.learner, place) for one, place in zip(models, places, strict=True)]
        merged = replace(started, learner=merge_learners(started.learner, learners, names), labels=labels)
        merged.encoder = _joined(started.encoder, [one.encoder for one in models])
        merged.history, merged.summaries = list(started.history), dict(started.summaries)
        for name, one, place in zip(names, models, places, strict=True):
            _add(merged, name, one, place, len(started.history))
        merged.summaries = dict(list(merged.summaries.items())[-MOST_SUMMARIES:])
        merged.now = standing(merged)
        merged.save(out)
        return merged


def _names(sites: Sequence[Path]) -> list[str]:
    """The sites' names: those of the files, with their folders if two files have the same."""
    stems = [path.stem for path in sites]
    return stems if len(set(stems)) == len(stems) else [str(path.with_suffix("")) for path in sites]


def _check(path: Path, site: Model, base: Path, started: Model) -> None:
    if site.target != started.target:
        raise EvclError(f"{path} learns {site.target!r}, but {base} learns {started.target!r}")
    ours, theirs = _inputs(site.encoder), _inputs(started.encoder)
    if ours != theirs:
        name = next(one.name for one in (*ours, *theirs) if one not in theirs or one not in ours)
        why = "its files had values that the base does not know, such as new categories, or it did not start there"
        fix = "let the base learn them first, or learn at the site with --unknown missing"
        raise EvclError(f"{path} encodes column {name!r} in another way than {base}: {why}; {fix}")
    if site.labels[: len(started.labels)] != started.labels or site.history[: len(started.history)] != started.history:
        raise EvclError(f"{path} does not continue {base}: let every site start from a copy of that file")


def _inputs(encoder: Encoder) -> list[Part]:
    """The parts of an encoder, without what its rows were like: their ranges, and whether some lacked a column."""
    plain = [replace(part, seen=None) if isinstance(part, Number) else part for part in encoder.columns]
    return [
        replace(part, lacked=False) if isinstance(part, (Number, Time)) and not part.missing else part for part in plain
    ]


def _joined(encoder: Encoder, others: Sequence[Encoder]) -> Encoder:
    """The encoder, with what the rows of all of them were like."""
    parts: list[Part] = []
    for i, part in enumerate(encoder.columns):
        same: list[Any] = [one.columns[i] for one in others]
        if isinstance(part, Number) and part.seen is not None:
            low, high = zip(part.seen, *(one.seen or part.seen for one in same), strict=True)
            part = replace(part, seen=(min(low), max(high)))
        if isinstance(part, (Number, Time)):
            part = replace(part, lacked=part.lacked or any(one.lacked for one in same))
        parts.append(part)
    return Encoder(parts)


def _relabelled(learner: Learner, place: Mapping[int, int]) -> Learner:
    """The learner with other numbers for its classes."""
    if all(old == new for old, new in place.items()):
        return learner
    description, tensors = learner.described()

    def changed(value: Any) -> Any:
        return [changed(one) for one in value] if isinstance(value, (list, tuple)) else place[value]

    description["heads"] = [[name, changed(classes)] for name, classes in description["heads"]]
    if "groups" in description:
        description["groups"] = {
            name: [[number, changed(classes), *domain] for number, classes, *domain in some]
            for name, some in description["groups"].items()
        }
        description["shown"] = {name: changed(some) for name, some in description["shown"].items()}
    return rebuilt(description, tensors)


def _add(merged: Model, name: str, site: Model, place: Mapping[int, int], known: int) -> None:
    """Add a site's tasks to the history, with the names that they have in the merged learner."""
    codes = torch.tensor(list(place.values()))
    for line in site.history[known:]:
        task = line["task"] if line["task"] in merged.learner.tasks else f"{name}: {line['task']}"
        merged.history.append({**line, "task": task})
        if (summary := site.summaries.get(line["task"])) is not None:
            merged.summaries[task] = replace(summary, codes=codes[summary.codes])
