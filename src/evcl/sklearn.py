"""`EVCLClassifier`, a scikit-learn estimator. This module needs scikit-learn; `import evcl` does not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from evcl._core.errors import EvclError, ForgettingWarning, extra
from evcl._core.inputs import positions
from evcl.benchmarks import Examples
from evcl.learner import Learner, Predictions, rebuilt
from evcl.methods import get as get_method
from evcl.nn import mlp

with extra("tables", "EVCLClassifier needs scikit-learn"):
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

__all__ = ["EVCLClassifier", "Uncertainty"]

SETTINGS = ("strength", "tempering", "init_std", "prior_std", "lr", "batch_size", "epochs", "predict_samples", "memory")


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

    entropy: Any
    aleatoric: Any
    epistemic: Any
    unfamiliar: Any = None


class _Open(NamedTuple):
    """A named task that later calls may add to: the learner before it (None for the first task) and its data so far."""

    name: str
    before: Learner | None
    x: Any
    y: Any


class EVCLClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A multilayer perceptron that learns one task after another without forgetting the earlier ones.

    `fit` starts over. Each call of `partial_fit` learns one more task, without the data of earlier tasks, and the
    method consolidates it. A task may add new classes. Inputs should be scaled, as for any perceptron.

    `strength`, `tempering`, `init_std`, `prior_std`, `lr`, `batch_size`, `epochs` and `predict_samples` are settings of
    the method, as everywhere in evcl. None means the method's default; a setting that the method does not have is an
    error.

    Parameters
    ----------
    hidden_layer_sizes
        Widths of the hidden layers.
    method
        "evcl", "vcl", "ewc", "naive" or another method; see `evcl list`.
    memory
        Number of examples to keep, of all tasks together, equally many of each class; later tasks train on them beside
        their own. None: none, or the method's default if it always has a memory. It may be set between two tasks, with
        `set_params`.
    early_stopping
        Hold out a stratified part of each task, stop the task after `n_iter_no_change` epochs without a lower NLL on
        that part, and restore the weights of the best epoch.
    validation_fraction
        The fraction of each task that early stopping holds out.
    n_iter_no_change
        How many epochs early stopping waits for a lower NLL.
    class_weight
        "balanced", or {label: weight}; within a task, only the ratios count. As in `evcl.Learner.learn`.
    settings
        A mapping of further settings, by name: {"coreset": "kcenter"}.
    random_state
        A number, a numpy RandomState or None, as in scikit-learn.
    device
        The device to train on: "cpu", "cuda" or "mps".

    Attributes
    ----------
    classes_
        The labels, sorted: the columns of `predict_proba`.
    tasks_
        The names of the learned tasks, in order.
    n_features_in_
        As in scikit-learn.
    feature_names_in_
        As in scikit-learn.
    learner_
        The underlying `evcl.Learner`. Its classes are indices into `labels_`.
    labels_
        The labels in the order in which they first appeared.
    """

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (100,),
        *,
        method: str = "evcl",
        strength: float | None = None,
        tempering: float | None = None,
        init_std: float | None = None,
        prior_std: float | None = None,
        lr: float | None = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        predict_samples: int | None = None,
        memory: int | None = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        class_weight: Mapping[Any, float] | str | None = None,
        settings: Mapping[str, Any] | None = None,
        random_state: Any = None,
        device: str = "cpu",
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.method = method
        self.strength = strength
        self.tempering = tempering
        self.init_std = init_std
        self.prior_std = prior_std
        self.lr = lr
        self.batch_size = batch_size
        self.epochs = epochs
        self.predict_samples = predict_samples
        self.memory = memory
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.class_weight = class_weight
        self.settings = settings
        self.random_state = random_state
        self.device = device

    # --- learning --------------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any) -> EVCLClassifier:  # noqa: N803
        """Start over and learn one task; everything learned before is discarded."""
        x, y = self._checked(X, y, reset=True)
        return self._learn(None, x, y, [], None)

    def partial_fit(
        self,
        X: Any,  # noqa: N803
        y: Any,
        classes: Any = None,
        task: str | None = None,
    ) -> EVCLClassifier:
        """Learn one more task.

        `classes` lists labels that later calls will have, if you know them; it is needed only if the data of the first
        call has a single class. `task` names the task. A call with the name of the last task adds rows to it: the task
        is learned again, exactly as if all its rows had come in one call. For this, the rows of a named task are kept
        in memory until the next task begins; rows of unnamed tasks are not.
        """
        learner, held = getattr(self, "learner_", None), getattr(self, "_open", None)
        x, y = self._checked(X, y, reset=learner is None)
        known = [] if learner is None else [self.labels_]
        if classes is not None:
            known.append(np.unique(column_or_1d(classes)))
        if held is not None and task == held.name:
            learner, x, y = held.before, np.concatenate([held.x, x]), np.concatenate([held.y, y])
        return self._learn(learner, x, y, known, task)

    def _learn(self, before: Learner | None, x: Any, y: Any, known: list[Any], task: str | None) -> EVCLClassifier:
        labels = _in_order([*known, np.unique(y)])
        names = labels.tolist()
        examples = Examples(torch.from_numpy(np.require(x, requirements="W")), positions(y.tolist(), names))
        learner = self._new(x.shape[1]) if before is None else _copied(before).to(self.device)
        if self.memory is not None and learner.settings.get("memory", 0) != self.memory:
            learner.keep(self.memory)
        weight: Any = self.class_weight
        if isinstance(weight, Mapping):
            if unknown := [label for label in weight if label not in names]:
                raise EvclError(f"class_weight: {unknown[0]!r} is not among the classes {names}")
            weight = {names.index(label): value for label, value in weight.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForgettingWarning)  # its labels are positions, and it names `keep`
            name = learner.learn(
                examples,
                str(len(learner.tasks)) if task is None else task,
                head=0 if learner.tasks else "new",
                classes=range(len(labels)),
                validation=self.validation_fraction if self.early_stopping else None,
                patience=self.n_iter_no_change if self.early_stopping else None,
                class_weight=weight,
            )
        lacking = [repr(names[int(place)]) for place in learner.lacking]
        if told := learner.forgetting(name, lacking, "set_params(memory=200)"):
            warnings.warn(told, ForgettingWarning, stacklevel=3)
        self.learner_, self.labels_, self.classes_, self.tasks_ = learner, labels, np.sort(labels), learner.tasks
        self._open = None if task is None else _Open(task, before, x, y)
        return self

    def _new(self, width: int) -> Learner:
        given = {name: getattr(self, name) for name in SETTINGS if getattr(self, name) is not None}
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        sizes = np.atleast_1d(self.hidden_layer_sizes).tolist()
        network = mlp(width, sizes)
        if get_method(self.method).jointly:
            raise EvclError(f"{self.method} trains on all tasks at once, but EVCLClassifier learns one at a time")
        return Learner(network, self.method, seed=seed, device=self.device, **{**given, **(self.settings or {})})

    def _checked(self, x: Any, y: Any, reset: bool) -> tuple[Any, Any]:
        x, y = validate_data(self, x, y, dtype=np.float32, reset=reset)
        check_classification_targets(y)
        return x, column_or_1d(y, warn=True)

    # --- prediction ------------------------------------------------------------------------------------------------

    def predict(self, X: Any) -> Any:  # noqa: N803
        """The most probable class of each row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def predict_proba(self, X: Any) -> Any:  # noqa: N803
        """The probability of each class, in the order of `classes_`, averaged over draws from the posterior."""
        p = self._predictions(X).probabilities.astype(np.float64)[:, np.argsort(self.labels_)]
        return p / p.sum(1, keepdims=True)

    def uncertainty(self, X: Any) -> Uncertainty:  # noqa: N803
        """How uncertain each prediction is, how much of that is due to uncertain weights (epistemic), and how far the
        row lies from all training data (unfamiliar).
        """
        found = self._predictions(X)
        return Uncertainty(found.entropy, found.aleatoric, found.epistemic, found.unfamiliar)

    def _predictions(self, x: Any) -> Predictions:
        check_is_fitted(self, "learner_")
        found: Predictions = self.learner_.predictions(validate_data(self, x, dtype=np.float32, reset=False))
        return found

    # --- pickling --------------------------------------------------------------------------------------------------

    def __getstate__(self) -> Any:
        # The learner is pickled as its description and tensors, as in its file; unpickled, it is on the CPU.
        state = super().__getstate__().copy()
        if "learner_" in state:
            state["learner_"] = state["learner_"].described()
        if state.get("_open") is not None and state["_open"].before is not None:
            state["_open"] = state["_open"]._replace(before=state["_open"].before.described())
        return state

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if "learner_" in state:
            self.learner_ = rebuilt(*state["learner_"])
        if state.get("_open") is not None and state["_open"].before is not None:
            self._open = state["_open"]._replace(before=rebuilt(*state["_open"].before))


def _in_order(parts: list[Any]) -> Any:
    """The distinct labels of all parts, in order of first appearance."""
    if len({part.dtype.kind in "OSUT" for part in parts}) > 1:
        raise EvclError("labels must be all numbers or all text, but these are mixed")
    together = np.concatenate(parts)
    labels = together[np.sort(np.unique(together, return_index=True)[1])]
    if len(labels) < 2:
        raise EvclError(
            f"there is only 1 class, {labels[0]}: a classifier needs two, and partial_fit's classes can name them"
        )
    return labels


def _copied(learner: Learner) -> Learner:
    return rebuilt(*learner.described())
