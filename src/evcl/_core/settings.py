"""Every setting: its name, default, bounds and meaning. Python, `--set` and `result.json` use the same names."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from evcl._core.errors import EvclError, brief, unknown

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

    def check(self, name: str, value: Any) -> Value:
        """Return `value` converted to this setting's type; if it is invalid, raise an error saying what is expected."""
        if why := self.refuses.get(str(value).lower()):
            raise EvclError(f"{name}={value} cannot be used with this method: {why}", setting=name)
        if self.auto and isinstance(value, str) and value == "auto":
            return "auto"
        if isinstance(self.default, bool):
            words: dict[Any, bool] = {"false": False, "true": True}
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


TRAINING: dict[str, Setting] = {
    "lr": Setting(
        "auto",
        "the learning rate; auto: 0.04 times the standard deviation of initial weights in the layer with the most "
        "inputs, and up to 3 times that in a first task of fewer than 400 steps if the initial weights are random; "
        "with optimizer=sgd, 0.1 times (1 - momentum)",
        high=10.0,
        open_low=True,
        auto=True,
    ),
    "lr_schedule": Setting(
        "cosine",
        "how learning rates change within a task: not at all, or falling towards 0 along a cosine",
        choices=("constant", "cosine"),
    ),
    "optimizer": Setting(
        "adam",
        "how the weights are updated (for a Gaussian, its means): by Adam, or by stochastic gradient descent (sgd)",
        choices=("adam", "sgd"),
    ),
    "momentum": Setting(
        0.0, "with optimizer=sgd, the fraction of the last step's velocity that is kept; 0: no momentum", high=0.999
    ),
    "batch_size": Setting(64, "examples per step", low=1, high=1_000_000),
    "epochs": Setting(50, "maximum number of passes over a task's data", low=1, high=1_000_000),
    "stop_nll": Setting(
        0.0,
        "stop a task after the first epoch whose mean NLL is below this, before the network becomes over-confident",
        high=100.0,
    ),
    "film": Setting(
        False,
        "whether each task scales and shifts the units of every linear layer and convolution of the trunk (FiLM); its "
        "scales and shifts learn from that task alone, and predicting needs the task",
    ),
    "augment": Setting(
        False,
        "whether training crops each image at random, after padding it by 4 pixels, and flips half of the images from "
        "left to right, anew in every step",
    ),
}
VALIDATION = Setting(
    0.0, "fraction of each training set held out and used for evaluation in place of the test set", high=0.9
)
SEED = Setting(0, "random seed; every random generator is derived from it", high=2**63 - 1)
BAYESIAN: dict[str, Setting] = {
    "tempering": Setting(
        "auto",
        "beta, the weight of the KL term; auto: from 0.001 to 0.03, larger for more examples and for noisier labels; "
        "0.3 if the targets are numbers or counts, and 1 for an energy of your own or a generative model",
        high=1e6,
        auto=True,
    ),
    "init_std": Setting(
        "auto",
        "sigma_0, the posterior's initial standard deviation; auto: 0.02 times the value of prior_std=auto",
        low=1e-8,
        high=1e3,
        auto=True,
    ),
    "prior_std": Setting(
        "auto",
        "standard deviation of the first prior and of a new head's prior; auto: that of the initial weights, "
        "sqrt(2 / fan-in)",
        low=1e-8,
        high=1e6,
        auto=True,
    ),
    "std_lr_scale": Setting(10.0, "learning rate of log sigma, as a multiple of lr", high=1e3, open_low=True),
    "std_update": Setting(
        "natural",
        "how log sigma is updated: by Adam, or by a natural step towards the optimum that the curvature implies",
        choices=("adam", "natural"),
    ),
    "std_rate": Setting(
        "auto",
        "with std_update=natural, the fraction of the way to its optimum that log sigma moves per step; "
        "auto: 8 / number of steps in the task, limited to 0.01 to 0.5",
        high=1.0,
        open_low=True,
        auto=True,
    ),
    "predict_samples": Setting(32, "number of posterior draws averaged in a prediction", low=1, high=10_000),
}
ELASTIC: dict[str, Setting] = {
    "strength": Setting(3.0, "lambda, the weight of the elastic term", high=1e12),
    "strength_scale": Setting(
        "none",
        "whether strength and fisher_floor are used as given, or divided by the task's number of examples, as the "
        "weight of the KL term is",
        choices=("none", "examples"),
    ),
    "importance": Setting(
        "fisher",
        "how the importance of a weight is measured: by the Fisher; by the path integral of synaptic intelligence "
        "(si); by the sensitivity of the outputs, as in memory aware synapses (mas); or by a Kronecker-factored "
        "Fisher, a matrix per layer (kfac). si and mas are scaled to the Fisher's sum",
        choices=("fisher", "si", "mas", "kfac"),
    ),
    "fisher": Setting(
        "exact",
        "labels used to estimate the Fisher: all classes, weighted by the model's probabilities (exact); labels "
        "drawn from the model (sampled); or the true labels (empirical)",
        choices=("exact", "sampled", "empirical"),
    ),
    "fisher_examples": Setting(
        5000, "maximum number of training examples used to estimate the Fisher", low=1, high=100_000_000
    ),
    "fisher_draws": Setting(
        0,
        "number of posterior draws of the weights that the Fisher is averaged over; 0: the Fisher at the mean",
        high=1000,
    ),
    "fisher_temperature": Setting(
        2.0,
        "the Fisher uses the probabilities softmax(logits / temperature); above 1 they are less confident",
        high=1e3,
        open_low=True,
    ),
    "fisher_spread": Setting(
        0.2,
        "fraction of the mean Fisher of a weight's neighbours added to its own; protects weights of inactive units",
        high=1e3,
    ),
    "fisher_scale": Setting(
        "examples",
        "how each task's Fisher is scaled: not at all (none); to a mean of 1 (task); or by the task's number of "
        "examples and temperature^2, with the elastic term divided by the number of examples of the new task, so that "
        "strength 1 is Laplace's approximation (examples)",
        choices=("none", "task", "examples"),
    ),
    "fisher_decay": Setting(1.0, "gamma, the factor applied to the earlier tasks' Fisher at each new task", high=1.0),
    "fisher_floor": Setting(0.0, "added to strength * Fisher for every weight that an earlier task used", high=1e12),
}
"""The settings of the elastic penalty and of its Fisher."""
CORESET: dict[str, Setting] = {
    "coreset": Setting(
        "none",
        "examples of each task that are kept out of its training; the weights used for prediction are fine-tuned on "
        "them. Chosen at random, or by greedy k-center",
        choices=("none", "random", "kcenter"),
    ),
    "coreset_size": Setting(
        200, "number of examples kept per task, limited to half of the task's examples", low=1, high=100_000_000
    ),
}


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
    distill_temperature: Number
    coreset: str
    coreset_size: int

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


def resolve(owner: str, known: Mapping[str, Setting], given: Mapping[str, Any]) -> Settings:
    """Check the `given` values, and use the defaults of `known` for all other settings."""
    for name in given:
        if name not in known:
            raise unknown(f"setting of {owner}", name, known, setting=name)
    return Settings({name: setting.check(name, given.get(name, setting.default)) for name, setting in known.items()})


def stack(settings: Sequence[Settings], like: torch.Tensor) -> Settings:
    """Combine the settings of R replicas: real numbers that differ become [R, 1] tensors; all others must agree."""
    stacked: dict[str, Any] = {}
    for name, value in settings[0].items():
        values = [s[name] for s in settings]
        if all(v == value for v in values):
            stacked[name] = value
        elif all(isinstance(v, float) for v in values):
            stacked[name] = like.new_tensor(values).unsqueeze(1)
        else:
            raise EvclError(
                f"replicas that share a program must have the same {name}, but these have {values}", setting=name
            )
    return Settings(stacked)
