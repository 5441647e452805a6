"""Every setting: its name, default, bounds and meaning. The same words in Python, `--set` and `result.json`."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evcl._core.errors import EvclError, unknown

if TYPE_CHECKING:
    import torch

Value = float | int | str


@dataclass(frozen=True)
class Setting:
    """One setting. `low` and `high` bound numbers, `choices` lists the words of a text setting."""

    default: Value
    help: str
    low: float = 0.0
    high: float = math.inf
    open_low: bool = False  # the bound `low` itself is not allowed
    choices: tuple[str, ...] = ()
    auto: bool = False  # the word "auto" is allowed too: a rule decides

    def check(self, name: str, value: Any) -> Value:
        """`value` as this setting's type, or one line saying what was expected."""
        if self.auto and isinstance(value, str) and value == "auto":
            return "auto"
        if self.choices:
            if value in self.choices:
                return str(value)
            raise EvclError(f"{name} must be one of {', '.join(self.choices)}, not {value!r}", setting=name)
        whole = isinstance(self.default, int)
        number = _whole(value) if whole else _real(value)
        if number is None or isinstance(value, bool) or not self._inside(number):
            raise EvclError(f"{name} must be {self._wanted(whole)}, not {value!r}", setting=name)
        return number

    def _inside(self, number: float) -> bool:
        return (self.low < number if self.open_low else self.low <= number) and number <= self.high

    def _wanted(self, whole: bool) -> str:
        text = f"a {'whole' if whole else 'finite'} number {'above' if self.open_low else 'of at least'} {self.low:g}"
        text = text if self.high == math.inf else f"{text} and at most {self.high:g}"
        return f"{text}, or auto" if self.auto else text


def _whole(value: Any) -> int | None:
    """A whole number, exactly: not by way of a float, which rounds above 2**53."""
    try:
        return int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        pass
    number = _real(value)
    return int(number) if number is not None and number.is_integer() else None


def _real(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


TRAINING: dict[str, Setting] = {
    "lr": Setting(
        "auto",
        "Adam's learning rate; auto: 0.04 of the standard deviation of first weights in the layer with most inputs, "
        "up to 3 times that in a first task of fewer than 400 steps if weights were drawn",
        high=10.0,
        open_low=True,
        auto=True,
    ),
    "lr_schedule": Setting(
        "cosine", "within a task: Adam's rates as they are, or falling towards 0", choices=("constant", "cosine")
    ),
    "batch_size": Setting(64, "examples a step", low=1, high=1_000_000),
    "epochs": Setting(50, "passes over a task's data, at most", low=1, high=1_000_000),
    "stop_nll": Setting(0.0, "a task ends after an epoch whose mean NLL is below this: before certainty", high=100.0),
}
VALIDATION = Setting(0.0, "part of each training set held out and measured on, instead of the test set", high=0.9)
SEED = Setting(0, "what every generator is derived from", high=2**63 - 1)
BAYESIAN: dict[str, Setting] = {
    "tempering": Setting(
        "auto",
        "beta, the weight of the KL term; auto: by the task's rows and how doubtful their labels are, 0.001 to 0.03",
        high=1e6,
        auto=True,
    ),
    "init_std": Setting(
        "auto",
        "sigma_0, the posterior's standard deviation at the start; auto: 0.02 of prior_std's rule",
        low=1e-8,
        high=1e3,
        auto=True,
    ),
    "prior_std": Setting(
        "auto",
        "standard deviation of the first prior, and of a new head's; auto: that of first weights, sqrt(2 / fan-in)",
        low=1e-8,
        high=1e6,
        auto=True,
    ),
    "std_lr_scale": Setting(10.0, "learning rate of log sigma, as a multiple of lr", high=1e3, open_low=True),
    "std_update": Setting(
        "natural", "how log sigma moves: by Adam, or towards the optimum of its curvature", choices=("adam", "natural")
    ),
    "std_rate": Setting(
        "auto",
        "natural: how much of the way log sigma moves a step; auto: 8 / steps of the task, from 0.01 to 0.5",
        high=1.0,
        open_low=True,
        auto=True,
    ),
    "predict_samples": Setting(32, "posterior draws averaged in a prediction", low=1, high=10_000),
}
ELASTIC: dict[str, Setting] = {
    "strength": Setting(3.0, "lambda, the weight of the elastic term", high=1e12),
    "strength_scale": Setting(
        "none",
        "strength and fisher_floor as they are, or divided by the task's number of examples, as the KL's weight is",
        choices=("none", "examples"),
    ),
    "fisher": Setting(
        "exact",
        "labels of the Fisher: all, weighted by the model; drawn from it; or the true ones",
        choices=("exact", "sampled", "empirical"),
    ),
    "fisher_examples": Setting(5000, "training examples the Fisher is measured on", low=1, high=100_000_000),
    "fisher_draws": Setting(
        0, "weights drawn from the posterior that the Fisher is averaged over; 0: at its mean", high=1000
    ),
    "fisher_temperature": Setting(
        2.0, "the Fisher's predictions are softmax(logits / temperature): less sure above 1", high=1e3, open_low=True
    ),
    "fisher_spread": Setting(
        0.2, "how much of its neighbours' mean Fisher a weight is given: it holds what was silent", high=1e3
    ),
    "fisher_scale": Setting(
        "examples",
        "a task's share of the Fisher: as it is, scaled to a mean of 1, or times its examples and temperature^2, with "
        "the pull divided by the examples of the task that is learned: a strength of 1 is then Laplace's approximation",
        choices=("none", "task", "examples"),
    ),
    "fisher_decay": Setting(1.0, "gamma, what is kept of the earlier tasks' Fisher at each task", high=1.0),
    "fisher_floor": Setting(0.0, "added to strength x Fisher for every weight that an earlier task used", high=1e12),
}
CORESET: dict[str, Setting] = {
    "coreset": Setting(
        "none",
        "examples of each task, kept out of its training, that predictions are tuned on: drawn, or k-center",
        choices=("none", "random", "kcenter"),
    ),
    "coreset_size": Setting(200, "examples kept of each task, at most half of them", low=1, high=100_000_000),
}


class Settings(Mapping[str, Any]):
    """Resolved settings, read as attributes: `s.strength`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"no setting {name!r}") from None

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{k}={v!r}' for k, v in self.items())})"


def resolve(owner: str, known: Mapping[str, Setting], given: Mapping[str, Any]) -> Settings:
    """The defaults of `known` with the `given` values checked and put in their place."""
    for name in given:
        if name not in known:
            raise unknown(f"setting of {owner}", name, known, setting=name)
    return Settings({name: setting.check(name, given.get(name, setting.default)) for name, setting in known.items()})


def stack(settings: Sequence[Settings], like: torch.Tensor) -> Settings:
    """The settings of R replicas as one: real numbers that differ become [R, 1] tensors.

    What training itself reads must agree otherwise; other words that differ, and settings that some do not have, are a
    method's own affair and left out.
    """
    stacked: dict[str, Any] = {}
    for name, value in settings[0].items():
        if any(name not in s for s in settings):
            continue
        values = [s[name] for s in settings]
        if all(v == value for v in values):
            stacked[name] = value
        elif all(isinstance(v, float) for v in values):
            stacked[name] = like.new_tensor(values).unsqueeze(1)
        elif name in TRAINING or name in BAYESIAN:
            raise EvclError(f"replicas share one program, so {name} must agree; got {values}", setting=name)
    return Settings(stacked)
