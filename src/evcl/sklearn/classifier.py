"""`EVCLClassifier`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from evcl._core.errors import EvclError, ForgettingWarning, extra
from evcl._core.inputs import Label, positions
from evcl.learner import Learner
from evcl.sklearn.estimator import Estimator, Options, Rows, Targets, Uncertainty
from evcl.sklearn.scaling import Floats

with extra("tables", "evcl.sklearn needs scikit-learn"):
    from sklearn.base import ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import column_or_1d


@dataclass(eq=False, repr=False, kw_only=True)
class EVCLClassifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """A multilayer perceptron that learns one task after another without forgetting the earlier ones.

    `fit` starts over. `partial_fit` learns more rows, without those of earlier tasks. Calls without a task's name are
    mini-batches of one stream: up to 1,000 of their rows are kept and learned together, and then consolidated. A call
    with a name is a task, or more rows of the last one. A task may add new classes.

    `strength`, `tempering`, `init_std`, `prior_std`, `lr`, `batch_size`, `epochs` and `predict_samples` are settings of
    the method, as everywhere in evcl. None means the method's default; a setting that the method does not have is an
    error. `strength`, `tempering`, `lr`, `batch_size`, `epochs`, `predict_samples`, `memory`, `device` and all that is
    not a setting may be set between two tasks, with `set_params`; None then leaves a setting as it is. A change of
    another setting, of `method`, `hidden_layer_sizes` or `scale` is an error there.

    Parameters
    ----------
    hidden_layer_sizes
        Widths of the hidden layers; (): none, a linear classifier.
    method
        "evcl", "vcl", "ewc", "naive" or another method; see `evcl list`.
    memory
        Number of examples to keep, of all tasks together, equally many of each class; later tasks train on them beside
        their own. None: none, or the method's default if it always has a memory.
    scale
        Subtract from each column its mean and divide it by its standard deviation, both of the first task.
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
        A number, a numpy RandomState or None, as in scikit-learn. It counts where training starts over.
    device
        The device to train on: "cpu", "cuda" or "mps".
    verbose
        Print the loss of each epoch.

    Attributes
    ----------
    classes_
        The labels, sorted: the columns of `predict_proba`.
    tasks_
        The names of the learned tasks, in order.
    n_iter_
        The number of epochs of the last task.
    loss_curve_
        The mean NLL of each epoch of the last task.
    n_features_in_
        As in scikit-learn.
    feature_names_in_
        As in scikit-learn.
    learner_
        The underlying `evcl.Learner`. Its classes are indices into `labels_`.
    labels_
        The labels in the order in which they first appeared.
    """

    memory: int | None = None
    class_weight: Mapping[Label, float] | Literal["balanced"] | None = None

    # --- learning --------------------------------------------------------------------------------------------------

    def partial_fit(
        self,
        X: ArrayLike,  # noqa: N803
        y: ArrayLike,
        classes: ArrayLike | None = None,
        task: str | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Learn more rows: a mini-batch of a stream, or with `task`, a task of this name.

        `classes` lists labels that later calls will have, if you know them; it is needed only if the data of the first
        call has a single class. A call with the name of the last task adds rows to it: the task is learned again,
        exactly as if all its rows had come in one call. For this, the rows of a named task are kept in memory until the
        next task begins. Of calls without a name, at most 1,000 rows are kept: they are learned when a prediction is
        wanted, together, and again with the rows that follow. When there are 1,000, they are consolidated.
        """
        with self._unchanged_on_error():
            known = [] if classes is None else [np.unique(column_or_1d(classes))]
            return self._partial_fit(self._checked(X, y, sample_weight, not hasattr(self, "_learner"), known), task)

    def _checked(
        self,
        x: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None,
        reset: bool,
        more: Sequence[Targets] = (),
    ) -> Rows:
        """The rows, whose labels become classes, like those of `more`."""
        rows = self._read(x, y, sample_weight, reset)
        check_classification_targets(rows.y)
        rows = rows._replace(y=column_or_1d(rows.y, warn=True))
        labels = _in_order([*([] if reset else [self.labels_]), *more, np.unique(rows.y)])
        weight = self.class_weight
        if isinstance(weight, Mapping) and (unknown := [label for label in weight if label not in labels.tolist()]):
            raise EvclError(f"class_weight: {unknown[0]!r} is not among the classes {labels.tolist()}")
        self.labels_: Targets = labels
        self.classes_: Targets = np.sort(labels)
        return rows

    def _targets(self, y: Targets) -> ArrayLike:
        return positions(y.tolist(), self.labels_.tolist())

    def _options(self, learner: Learner) -> Options:
        names, weight = self.labels_.tolist(), self.class_weight
        if isinstance(weight, Mapping):
            weight = {names.index(label): value for label, value in weight.items()}
        return {"classes": range(len(names)), "class_weight": weight}

    def _told(self, learner: Learner, name: str) -> None:
        lacking = [repr(self.labels_.tolist()[int(place)]) for place in learner.lacking]
        if warning := learner.forgetting(name, lacking, "set_params(memory=200)"):
            warnings.warn(warning, ForgettingWarning, stacklevel=5)

    # --- prediction ------------------------------------------------------------------------------------------------

    def predict(self, X: ArrayLike) -> Targets:  # noqa: N803
        """The most probable class of each row."""
        best = self.predict_proba(X).argmax(1)
        labels: Targets = self.classes_[best]
        return labels

    def predict_proba(self, X: ArrayLike) -> Floats:  # noqa: N803
        """The probability of each class, in the order of `classes_`, averaged over draws from the posterior."""
        p = self._predictions(X).probabilities.astype(np.float64)[:, np.argsort(self.labels_)]
        normalised: Floats = p / p.sum(1, keepdims=True)
        return normalised

    def predict_log_proba(self, X: ArrayLike) -> Floats:  # noqa: N803
        """The logarithm of each class's probability, in the order of `classes_`."""
        return np.log(np.maximum(self.predict_proba(X), np.finfo(np.float64).tiny))

    def uncertainty(self, X: ArrayLike) -> Uncertainty:  # noqa: N803
        """How uncertain each prediction is, how much of that is due to uncertain weights (epistemic), and how far the
        row lies from all training data (unfamiliar).
        """
        predicted = self._predictions(X)
        return Uncertainty(predicted.entropy, predicted.aleatoric, predicted.epistemic, predicted.unfamiliar)


def _in_order(parts: list[Targets]) -> Targets:
    """The distinct labels of all parts, in order of first appearance."""
    if len({part.dtype.kind in "OSUT" for part in parts}) > 1:
        raise EvclError("labels must be all numbers or all text, but these are mixed")
    together = np.concatenate(parts)
    labels: Targets = together[np.sort(np.unique(together, return_index=True)[1])]
    if len(labels) < 2:
        raise EvclError(
            f"there is only 1 class, {labels[0]}: a classifier needs two, and partial_fit's classes can name them"
        )
    return labels
