"""What a user asks of a command: one record per command, whose fields are the options of the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from evcl._core.errors import EvclError
from evcl.tables.source import Dialect, Json, Target, Unknown

if TYPE_CHECKING:
    from evcl.callbacks import Callback

CREATED = {  # fields that are fixed when a model is created, and their options
    "hidden": "hidden",
    "method": "method",
    "seed": "seed",
    "categories": "category",
    "kind": "kind",
    "side": "image-side",
    "settings": "set",
}


@dataclass(frozen=True)
class Learning:
    """Options of `evcl learn`. Of those in CREATED, None is the default of a new model, and all that a later call may
    say.
    """

    target: str | None = None
    task: str | None = None
    head: str | None = None  # an earlier task's name, "new", or None for the head of the last task
    epochs: int | None = None
    validation: float = 0.1
    drop: Sequence[str] = ()
    unknown: Unknown = "learn"
    dialect: Dialect = field(default_factory=Dialect)
    keep: int | None = None  # see `Learner.keep`
    callbacks: Sequence[Callback] = ()
    device: str = "cpu"
    warn: Callable[[str], None] = lambda text: None  # called before training, if the classes look like numbers
    hidden: Sequence[int] | None = None
    method: str | None = None
    seed: int | None = None
    categories: Sequence[str] | None = None
    kind: Target | None = None  # None: classes, with a note or an error if they look like something else
    side: int | None = None
    settings: Json | None = None

    def check_later(self, model: Path) -> None:
        """Raise if something is asked that was fixed when the model was created."""
        for name, option in CREATED.items():
            if getattr(self, name) is not None:
                raise EvclError(f"{model} already exists, and --{option} is fixed when a model is created")


@dataclass(frozen=True)
class Predicting:
    """Options of `evcl predict`."""

    task: str | None = None
    drop: Sequence[str] = ()
    unknown: Unknown = "missing"
    dialect: Dialect = field(default_factory=Dialect)
    keys: Sequence[str] | None = None  # the file's columns that are written; None: all
    device: str = "cpu"
    keep_formulas: bool = False  # write texts that look like formulas of a spreadsheet without a quote
