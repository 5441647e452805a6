"""The card of a learner: what it was trained on and when, with which method and settings, and how sure it is."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from evcl._core.errors import EvclError
from evcl._core.files import described, open_tensors
from evcl._core.version import __version__
from evcl.learner.saved import reading
from evcl.training import Given

Record = dict[str, Any]
"""What is known of one learned task."""

NUMBERS = ("accuracy", "nll", "ece")  # of a validation part


def versions() -> dict[str, str]:
    return {"evcl": __version__, "torch": str(torch.__version__).partition("+")[0], "python": platform.python_version()}


def now() -> str:
    """The time, to the minute, in UTC; or that of SOURCE_DATE_EPOCH, in seconds since 1970, for files that are the same
    whenever they are made.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH", "")[:11]
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(int(given) if given.isdecimal() else None))


def fingerprint(mean: Tensor) -> str:
    """A short hash of the posterior's means [R, P]: whether a model started from another (see merging.py)."""
    return hashlib.blake2b(mean.detach().cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def record(task: Given, epochs: int, mean: Tensor) -> Record:
    """The record of a task that has just been learned, with the posterior's means. It says nothing of this machine."""
    rows = task.rows()
    if isinstance(task.y, Tensor):  # targets that are not classes
        rows = {0: task.y.shape[0] * task.y.shape[1]}
    elif not any(task.y):  # no targets
        return record(task._replace(y=task.x), epochs, mean)
    return {
        "task": task.name,
        "learned": now(),
        "examples": sum(rows.values()) // max(1, len(task.y) if task.counts is None else 1),
        "classes": 0 if isinstance(task.y, Tensor) else len(rows),
        "epochs": epochs,
        "posterior": fingerprint(mean),
    }


def checked(saved: Any, tasks: Mapping[str, str]) -> list[Record]:
    """The records in a file; earlier files have none. Raises if they cannot be read."""
    if saved is None:
        return []
    try:
        for one in saved:
            numbers = [one["examples"], one["classes"], one["epochs"], *(one.get("validation") or {}).values()]
            if one["task"] not in tasks or not isinstance(one["learned"], str) or not all(map(_is_number, numbers)):
                raise ValueError
    except (TypeError, ValueError, KeyError, AttributeError):
        raise EvclError("the records of its tasks cannot be read") from None
    return list(saved)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def card(saved: Mapping[str, Any], now: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The card of a learner with this description (see `Learner.described`). `now`: the accuracy of tasks on the rows
    that are kept of them.
    """
    records = {one["task"]: one for one in saved.get("records") or ()}
    heads = {name: list(classes) for name, classes in saved["heads"]}
    tasks = []
    for name, head in saved["tasks"]:
        found = {"task": name, "head": head, **records.get(name, {})}
        if now is not None and name in now:
            found["now"] = now[name]
        tasks.append(found)
    about = {key: saved[key] for key in ("method", "seed", "settings", "dtype") if key in saved}
    weights = sum(math.prod(shape) for _, shape in saved["trunk"])
    outputs = sum(len(group[1]) for some in saved.get("groups", {}).values() for group in some)
    outputs = outputs or sum(map(len, heads.values()))
    return {
        **about,
        "weights": weights + (saved["features"] + 1) * outputs,
        **({"base": saved["base"]} if "base" in saved else {}),
        "heads": heads,
        "tasks": tasks,
        "versions": dict(saved.get("versions") or {}),
    }


def read_card(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The card of a saved learner, read without its network. What earlier tasks are at now is not in it: for that,
    load the learner.
    """
    with reading(path) as found, open_tensors(found) as file:
        saved = described(file, "evcl")
        if saved is None:
            raise EvclError("it was not saved by evcl")
        checked(saved.get("records"), dict(saved["tasks"]))
        return card(saved)
