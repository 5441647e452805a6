"""Settings: what one is, how values are checked, and those of training and of the methods' common terms.

Python, `--set` and `result.json` use the names in settings.toml, which has each one's default, bounds and meaning.
"""

from __future__ import annotations

import math
import operator
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evcl._core.errors import EvclError, brief, retired, unknown

if TYPE_CHECKING:
    import torch

    Number = torch.Tensor | float

Value = float | int | str
Auto = Literal["auto"]


@dataclass(frozen=True)
class Setting:
    """One setting. `low` and `high` bound a number; `choices` lists the allowed values of a text setting.

    A setting whose default is True or False is a switch.
    """

    default: Value
    help: str
    low: float = 0.0
    high: float = math.inf
    open_low: bool = False  # True: values must be above `low`, not equal to it
    choices: tuple[str, ...] = ()
    auto: bool = False  # True: "auto" is allowed too, and a rule chooses the value
    refuses: Mapping[str, str] = field(default_factory=dict)  # values that other methods take -> why this one does not
    why: str = ""  # of a rule of a part: the reason for its default

    def check(self, name: str, value: object) -> Value:
        """Return `value` converted to this setting's type; if it is invalid, raise an error saying what is expected."""
        if why := self.refuses.get(str(value).lower()):
            raise EvclError(f"{name}={value} cannot be used with this method: {why}", setting=name)
        if self.auto and isinstance(value, str) and value == "auto":
            return "auto"
        if isinstance(self.default, bool):
            words: dict[object, bool] = {"false": False, "true": True}
            if isinstance(value, bool) or (isinstance(value, str) and value in words):
                return words.get(value, value)
            raise EvclError(f"{name} must be true or false, not {brief(value)}", setting=name)
        if self.choices:
            if value in self.choices:
                return str(value)
            raise EvclError(f"{name} must be one of {', '.join(self.choices)}, not {brief(value)}", setting=name)
        whole = isinstance(self.default, int)
        number = _whole(value) if whole else _real(value)
        inside = (
            number is not None and (self.low < number if self.open_low else self.low <= number) and number <= self.high
        )
        if number is None or isinstance(value, bool) or not inside:
            text = (
                f"a {'whole' if whole else 'finite'} number {'above' if self.open_low else 'of at least'} {self.low:g}"
            )
            text = text if self.high == math.inf else f"{text} and at most {self.high:g}"
            text = f"{text}, or auto" if self.auto else text
            raise EvclError(f"{name} must be {text}, not {brief(value)}", setting=name)
        return number

    @property
    def values(self) -> str:
        """The values that it takes, in a few words."""
        if isinstance(self.default, bool):
            return "true, false"
        if self.choices:
            return ", ".join(self.choices)
        sign = ">" if self.open_low else ">="
        text = f"{sign} {self.low:g}" if self.high == math.inf else f"{sign} {self.low:g}, <= {self.high:g}"
        return f"{text}, or auto" if self.auto else text


def _whole(value: Any) -> int | None:
    """Convert to an int exactly. Going through a float would round numbers above 2**53."""
    try:
        return int(_plain(value)) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        pass
    number = _real(value)
    return int(number) if number is not None and number.is_integer() else None


def _plain(text: str) -> str:
    """A text that may be a number as files have it. Python's own 1_000 and digits of other scripts are none there."""
    if "_" in text or not text.isascii() or text != text.strip():
        raise ValueError(text)
    return text


def _real(value: Any) -> float | None:
    try:
        number = float(_plain(value) if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def read(path: Path) -> dict[str, dict[str, Setting]]:
    """The groups of settings in a table in TOML."""
    groups = tomllib.loads(path.read_text("utf-8"))
    return {
        group: {name: Setting(**one | {"choices": tuple(one.get("choices", ()))}) for name, one in settings.items()}
        for group, settings in groups.items()
    }


TRAINING, BAYESIAN, _ELASTIC, CORESET, _EVERY_RUN = read(Path(__file__).with_name("settings.toml")).values()
ELASTIC = _ELASTIC
"""The settings of the elastic penalty and of its Fisher."""
VALIDATION, SEED = _EVERY_RUN.values()


RENAMED = {"distill_temperature": "distill.temperature"}
"""Old names of settings, which work until evcl 0.4, and their names now."""


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their names of now, such as those of a file."""
    return {RENAMED.get(name, name): value for name, value in given.items()}


class Settings(dict[str, Any]):
    """Resolved settings, read as attributes: `s.strength`. A method's own settings can be read too, as `Any`.

    Real numbers that differ between replicas are tensors [R, 1].
    """

    # What a type checker knows; `tests/test_settings.py` compares it with the tables above.
    lr: Number | Auto
    lr_schedule: str
    optimizer: str
    momentum: Number
    batch_size: int
    epochs: int
    stop_nll: Number
    film: bool
    augment: bool
    validation: float
    tempering: Number | Auto
    init_std: Number | Auto
    prior_std: Number | Auto
    std_lr_scale: Number
    std_update: str
    std_rate: Number | Auto
    predict_samples: int
    strength: Number
    strength_scale: str
    importance: str
    fisher: str
    fisher_examples: int
    fisher_draws: int
    fisher_temperature: Number
    fisher_spread: Number
    fisher_scale: str
    fisher_decay: Number
    fisher_floor: Number
    distill: Number
    coreset: str
    coreset_size: int

    def __missing__(self, name: str) -> Any:
        if name in RENAMED:
            return self[RENAMED[name]]
        raise KeyError(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no setting {name!r}") from None

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{k}={v!r}' for k, v in self.items())})"


def decided(value: Number | Auto) -> Number:
    """The value of a setting that is no longer `auto`; a rule has chosen it by now."""
    assert not isinstance(value, str)
    return value


def resolve(owner: str, known: Mapping[str, Setting], given: Mapping[str, object]) -> Settings:
    """Check the `given` values, and use the defaults of `known` for all other settings."""
    for name in given.keys() & RENAMED.keys() - known.keys():
        retired(f"the setting {name}", f"it is called {RENAMED[name]}")
    given = {RENAMED.get(name, name): value for name, value in given.items()}
    for name in given:
        if name not in known:
            raise unknown(f"setting of {owner}", name, known, setting=name)
    return Settings({name: setting.check(name, given.get(name, setting.default)) for name, setting in known.items()})
