"""What both estimators share: their parameters, tasks, scaling and pickling."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evcl._core.errors import EvclError, ForgettingWarning, extra
from evcl._core.inputs import Label
from evcl._core.settings import Value, resolve
from evcl.callbacks import Callback, Epoch
from evcl.learner import Learner, rebuilt
from evcl.methods import get as get_method
from evcl.methods import known_settings
from evcl.nn import mlp
from evcl.sklearn.scaling import Floats, Inputs, Scaling, unscaled

with extra("tables", "evcl.sklearn needs scikit-learn"):
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

if TYPE_CHECKING:
    from scipy.sparse import csr_array
    from sklearn.utils import Tags

SETTINGS = ("strength", "tempering", "init_std", "prior_std", "lr", "batch_size", "epochs", "predict_samples", "memory")
BETWEEN_TASKS = ("strength", "tempering", "lr", "batch_size", "epochs", "predict_samples", "memory")  # may change there
MAX_ROWS_TOGETHER = 1000  # partial_fit calls without a task's name are learned together until they have this many rows
FEWEST_STEPS, SMALLEST_BATCH = 22, 8  # a first task has this many steps: its batches are smaller, but not below 8
_AVERAGE = "mini-batches are drawn from the rows, so weights and repetitions agree only on average"
STOCHASTIC = {
    "check_sample_weight_equivalence_on_dense_data": _AVERAGE,
    "check_sample_weight_equivalence_on_sparse_data": _AVERAGE,
}
"""Checks of scikit-learn that cannot hold exactly. It runs the dense one on its own networks with parameters that are
not their defaults: on MLPClassifier with `solver="lbfgs"`, which uses all rows in every step, and on MLPRegressor with
`solver="sgd"`, `tol=1e-2` and `random_state=42`.
"""

Targets = NDArray[np.generic]  # [rows], or [rows, targets] of numbers
RandomState = int | np.random.RandomState | None


class Options(TypedDict, total=False):
    """Options of `Learner.learn` that a classifier adds."""

    classes: Iterable[Label]
    class_weight: Literal["balanced"] | Mapping[Label, float] | None


class Uncertainty(NamedTuple):
    """How uncertain N predictions are, [N] each; see `evcl.Predictions` for details.

    Attributes
    ----------
    entropy
        Entropy of the predicted probabilities, in nats: aleatoric + epistemic.
    aleatoric
        Uncertainty that more data of this kind would not reduce, in nats.
    epistemic
        Uncertainty due to uncertain weights, in nats.
    unfamiliar
        How far the row lies from all training rows: about 1 for a typical training row.
    """

    entropy: Inputs
    aleatoric: Inputs
    epistemic: Inputs
    unfamiliar: Inputs | None = None


class Rows(NamedTuple):
    """Rows of a task, before scaling."""

    x: Inputs
    y: Targets
    weights: Floats | None  # None: all 1

    def joined(self, other: Rows) -> Rows:
        weights = None
        if self.weights is not None or other.weights is not None:
            each = [np.ones(len(one.x)) if one.weights is None else one.weights for one in (self, other)]
            weights = np.concatenate(each)
        return Rows(np.concatenate([self.x, other.x]), np.concatenate([self.y, other.y]), weights)


class Open(NamedTuple):
    """A task that later calls may add to: what was there before it, and its rows so far."""

    name: str | None  # None: calls without a name
    before: Learner | None  # None: it is the first task
    scaling: Scaling
    rows: Rows
    learned: bool = False  # False: when predictions are wanted
    spread: bool = False  # False: errors on new rows, which take several trainings, are measured when they are wanted


@dataclass(eq=False, repr=False)
class Estimator(BaseEstimator):  # type: ignore[misc]
    """A multilayer perceptron in scikit-learn's form, and its parameters: see `EVCLClassifier` and `EVCLRegressor`."""

    likelihood: ClassVar[Literal["categorical", "gaussian"]] = "categorical"

    hidden_layer_sizes: Sequence[int] = (100,)
    _: KW_ONLY
    method: str = "evcl"
    strength: float | None = None
    tempering: float | None = None
    init_std: float | None = None
    prior_std: float | None = None
    lr: float | None = None
    batch_size: int | None = None
    epochs: int | None = None
    predict_samples: int | None = None
    scale: bool = True
    early_stopping: bool = False
    validation_fraction: float = 0.1
    n_iter_no_change: int = 10
    settings: Mapping[str, Value] | None = None
    random_state: RandomState = None
    device: str = "cpu"
    verbose: bool = False

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_learner")

    # --- what was learned ------------------------------------------------------------------------------------------

    @property
    def learner_(self) -> Learner:
        """The underlying `evcl.Learner`. Rows that are waiting are learned first."""
        return self._settled(spread=True)

    @property
    def tasks_(self) -> tuple[str, ...]:
        """The names of the learned tasks, in order."""
        return self._settled(spread=False).tasks

    @property
    def n_iter_(self) -> int:
        """The number of epochs of the last task."""
        return len(self.loss_curve_)

    @property
    def loss_curve_(self) -> list[float]:
        """The mean NLL of each epoch of the last task."""
        learner = self._settled(spread=False)
        return [epoch.nll for epoch in learner.history.get(learner.tasks[-1], ())]

    # --- learning --------------------------------------------------------------------------------------------------

    @contextmanager
    def _unchanged_on_error(self) -> Iterator[None]:
        """Within this, an error leaves the estimator as it was."""
        before = self.__dict__.copy()
        try:
            yield
        except BaseException:
            self.__dict__ = before
            raise

    def _read(self, x: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, reset: bool, **options: bool) -> Rows:
        inputs, targets = validate_data(self, x, y, dtype=np.float32, accept_sparse="csr", reset=reset, **options)
        weights = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, inputs, ensure_non_negative=True)
        rows = Rows(_dense(inputs), targets, weights)
        if weights is None or weights.all() or not weights.any():  # a learner refuses weights that are all 0
            return rows
        used = weights > 0
        return Rows(rows.x[used], rows.y[used], weights[used])

    def _checked(self, x: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, reset: bool) -> Rows:
        """The rows as a task, once everything about them is as it should be."""
        raise NotImplementedError

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:  # noqa: N803
        """Start over and learn one task; everything learned before is discarded. `sample_weight` [rows] weights the
        NLL of each row; only ratios count, and a row of weight 0 is left out.
        """
        with self._unchanged_on_error():
            rows = self._checked(X, y, sample_weight, reset=True)
            self._learn(Open(None, None, unscaled(rows.x.shape[1]), rows), spread=True)
            self._open: Open | None = None  # closed: `partial_fit` begins another task
            return self

    def _partial_fit(self, rows: Rows, task: str | None) -> Self:
        """Add rows to the task of this name, if it is the last one, or begin another one."""
        opened = getattr(self, "_open", None)
        if opened is not None and opened.name == task:
            opened = opened._replace(rows=opened.rows.joined(rows), learned=False, spread=False)
        else:
            fitted = hasattr(self, "_learner")
            before = self._settled(spread=False) if fitted else None  # the next task measures the spread anew
            if before is not None and task in before.tasks:
                raise EvclError(f"{task!r} is already learned, and other rows have come since: choose another name")
            scaling = self._scaling if fitted else unscaled(rows.x.shape[1])
            opened = Open(task, before, scaling, rows)
        full = task is None and len(opened.rows.x) >= MAX_ROWS_TOGETHER
        if task is not None or full or not hasattr(self, "_learner"):
            opened = self._learn(opened, spread=full)
        self._open = None if full else opened
        return self

    def _settled(self, spread: bool) -> Learner:
        """The learner, after rows that are waiting. `spread`: whether its intervals are wanted, or only its means."""
        if not hasattr(self, "_learner"):
            raise AttributeError(f"this {type(self).__name__} is not fitted yet: call fit or partial_fit first")
        opened = getattr(self, "_open", None)
        if opened is not None and not (opened.learned and (opened.spread or not spread)):
            self._open = self._learn(opened, spread)
        return self._learner

    def _learn(self, opened: Open, spread: bool) -> Open:
        """Learn a task from its beginning, and note the result. Without `spread`, the means are the same, and a first
        task of numbers takes one training instead of six.
        """
        before, rows = opened.before, opened.rows
        spread = spread or before is not None or self.likelihood == "categorical"
        learner = self._new(opened) if before is None else self._next(before, opened.scaling)
        learner.state = replace(learner.state, trial=not spread)
        scaling = opened.scaling.after(rows.x) if self.scale else opened.scaling
        x = scaling(rows.x)
        name = _free(learner.tasks) if opened.name is None else opened.name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForgettingWarning)  # the classifier's labels are positions
            if not self.scale and (before is not None or opened.learned):
                warnings.filterwarnings("ignore", "the inputs are not scaled")
            learner.learn(
                (np.require(x, requirements="W"), self._targets(rows.y)),
                task=name,
                head=0 if learner.tasks else "new",
                validation=self.validation_fraction if self.early_stopping else None,
                patience=self.n_iter_no_change if self.early_stopping else None,
                sample_weight=rows.weights,
                callbacks=[_Printed()] if self.verbose and not opened.learned else (),
                **self._options(learner),
            )
        self._told(learner, name)
        learner.state = replace(learner.state, trial=False)
        self._learner, self._scaling = learner, scaling
        return opened._replace(learned=True, spread=spread)

    def _targets(self, y: Targets) -> ArrayLike:
        """The targets as the learner takes them."""
        return y

    def _options(self, learner: Learner) -> Options:
        """Further options of `Learner.learn`, for a learner that is about to learn."""
        return {}

    def _told(self, learner: Learner, name: str) -> None:
        """Say what the user should know after a task."""

    def _given(self) -> dict[str, Any]:
        """The settings of the method that the user has chosen, by name."""
        given = {name: getattr(self, name, None) for name in SETTINGS}
        return {name: value for name, value in given.items() if value is not None} | dict(self.settings or {})

    def _next(self, before: Learner, scaling: Scaling) -> Learner:
        """A copy of a learner that learns one more task, with the parameters as they are now."""
        description, tensors = before.described()
        given, has = self._given(), before.settings
        wanted = resolve(before.method.name, known_settings(before.method, given), given)
        changes = {name: (wanted[name], has.get(name)) for name in given if name != "memory"}
        fixed = {name: pair for name, pair in changes.items() if name not in BETWEEN_TASKS}
        fixed["method"] = get_method(self.method).name, before.method.name
        fixed["hidden_layer_sizes"] = self._widths(), description["mlp"]["hidden"]
        fixed["scale"] = bool(self.scale), scaling.known
        for name, (now, then) in fixed.items():
            if now != then:
                raise EvclError(
                    f"{name} cannot change between two tasks: set it back to {then!r}, or start over with fit"
                )
        description["settings"] |= {name: now for name, (now, _) in changes.items()}
        learner = rebuilt(description, tensors).to(self.device)
        if given.get("memory", (memory := learner.settings.get("memory", 0))) != memory:
            learner.keep(given["memory"])
        return learner

    def _widths(self) -> list[int]:
        widths: list[int] = np.atleast_1d(np.asarray(self.hidden_layer_sizes, dtype=int)).tolist()
        return widths

    def _new(self, opened: Open) -> Learner:
        """A learner for a first task."""
        (rows, width), given = opened.rows.x.shape, self._given()
        known = get_method(self.method).known_settings
        if "batch_size" in known and "batch_size" not in given:
            most, epochs = int(known["batch_size"].default), given.get("epochs", known["epochs"].default)
            if isinstance(epochs, int) and rows * epochs < FEWEST_STEPS * most:
                given["batch_size"] = min(most, max(SMALLEST_BATCH, rows * epochs // FEWEST_STEPS))
        if opened.learned:  # the same again, for its spread
            seed = self._learner.seed
        else:
            seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        network = mlp(width, self._widths())
        if get_method(self.method).jointly:
            raise EvclError(
                f"{self.method} trains on all tasks at once, but {type(self).__name__} learns one at a time"
            )
        return Learner(network, self.method, seed=seed, device=self.device, likelihood=self.likelihood, **given)

    # --- prediction ------------------------------------------------------------------------------------------------

    def _predictions(self, x: ArrayLike, spread: bool = True) -> Any:
        check_is_fitted(self)
        learner = self._settled(spread)
        inputs = _dense(validate_data(self, x, dtype=np.float32, accept_sparse="csr", reset=False))
        return learner.predictions(np.require(self._scaling(inputs), requirements="W"))


def _dense(x: Inputs | csr_array) -> Inputs:
    return x if isinstance(x, np.ndarray) else x.toarray()


def _free(tasks: Sequence[str]) -> str:
    """The name of the next task: its number, or the next number that is no task's name."""
    return next(name for name in map(str, count(len(tasks))) if name not in tasks)


class _Printed(Callback):
    """Prints the loss of each epoch, as scikit-learn's networks do."""

    def end_epoch(self, epoch: Epoch) -> bool:
        sys.stdout.write(f"Iteration {epoch.epoch}, loss = {epoch.nll:.8f}\n")
        return False
