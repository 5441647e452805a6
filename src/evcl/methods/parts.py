"""A part: what is added to a method under a name of its own, with one equation and a record of its rules.

    EVCL = compose(evcl.EVCL, TEMPERING, distillation(Distil()), FORGETTING, task_inference(Infer()))

A record of rules is a frozen dataclass. Each field is a constant with its meaning, and the reason for its value:
`derived` from something else, `ablated` by a measurement, or a `bound` on time or memory. A rule is a setting of the
method, PREFIX.FIELD: `--set distill.temperature=3`. In `learn`, `Distil.of(s)` has the values in force.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from importlib.resources import files
from typing import Any, ClassVar, NamedTuple, Self

from evcl._core.settings import Setting, Settings, Value
from evcl.methods.method import Method


def rule(default: Value, meaning: str, why: str, **bounds: Any) -> Any:
    """A field of a record of rules; `bounds` are those of `Setting`."""
    return field(default=default, metadata={"setting": Setting(default, meaning, why=why, **bounds)})


@dataclass(frozen=True)
class Rules:
    """A record of rules without any. `prefix` begins the names of its settings."""

    prefix: ClassVar[str] = ""

    @property
    def settings(self) -> dict[str, Setting]:
        """The rules as settings, whose defaults are the values of this record."""
        return {
            f"{self.prefix}.{one.name}": replace(one.metadata["setting"], default=getattr(self, one.name))
            for one in fields(self)
        }

    @classmethod
    def of(cls, s: Mapping[str, Any]) -> Self:
        """The rules in force with these settings; a rule that they lack has its default."""
        names = {one.name: f"{cls.prefix}.{one.name}" for one in fields(cls)}
        return cls(**{name: s[key] for name, key in names.items() if key in s})


@dataclass(frozen=True)
class Part:
    """What `compose` adds to a method.

    Attributes:
        name: such as "task inference", as results, cards and tables show it
        equation: what it computes, in one line
        off: settings that switch it off, each by itself
        wrap: (method) -> the method with the part
        rules: its constants
        settings: its settings, beside the rules
    """

    name: str
    equation: str
    off: Mapping[str, Value]
    wrap: Callable[[Method], Method] | None = None
    rules: Rules = Rules()
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def on(self, s: Mapping[str, Any]) -> bool:
        """Whether it is in force with these settings."""
        return all(s.get(name, value) != value for name, value in self.off.items())


def compose(method: Method, *parts: Part, **changes: Any) -> Method:
    """The method with these parts, the first of them innermost. `changes`: other fields of `Method`."""
    for part in parts:
        method = method if part.wrap is None else part.wrap(method)
        settings = {**method.settings, **part.settings, **part.rules.settings}
        method = replace(method, settings=settings, parts=(*method.parts, part))
    return replace(method, **changes)


def without(method: Method, *names: str) -> list[Part]:
    """The method's parts except those of these names."""
    return [part for part in method.parts if part.name not in names]


def in_force(method: Method, s: Settings) -> dict[str, Any]:
    """What results and cards say: the parts that are on, and the values of their rules by the names of settings."""
    parts = [part for part in method.parts if part.on(s)]
    rules = {name: s[name] for part in parts for name in part.rules.settings}
    return {"parts": [part.name for part in parts], "rules": rules}


class Constant(NamedTuple):
    """A number of a method that is no setting of training; `name` is that of a setting if it is a rule of a part."""

    part: str
    name: str
    value: Any
    meaning: str
    why: str


def constants(method: Method) -> list[Constant]:
    """The rules of a method's parts, and the numbers of `constants.toml` that it uses."""
    parts = {name: part.name for part in method.parts for name in part.rules.settings}
    rules = {name: one for name, one in method.settings.items() if one is not None and one.why}
    found = [Constant(parts.get(name, "posterior"), name, s.default, s.help, s.why) for name, s in rules.items()]
    used = {one.part for one in found} | {"training", *(["sigma", "numbers"] if method.bayesian else [])}
    for part, entries in tomllib.loads(files("evcl._core").joinpath("constants.toml").read_text("utf-8")).items():
        for one in entries if part in used else ():
            module, _, name = one["at"].partition(":")
            found.append(Constant(part, name, getattr(import_module(module), name), one["meaning"], one["why"]))
    return found
