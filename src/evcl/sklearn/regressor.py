"""`EVCLRegressor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from evcl._core.errors import EvclError, extra
from evcl.sklearn.estimator import Estimator, Rows
from evcl.sklearn.scaling import Inputs

with extra("tables", "evcl.sklearn needs scikit-learn"):
    from sklearn.base import RegressorMixin

if TYPE_CHECKING:
    from sklearn.utils import Tags


class Spread(NamedTuple):
    """How uncertain N predictions of numbers are, in their units; see `evcl.Numbers` for details.

    Attributes
    ----------
    std
        Standard deviation of new rows around the prediction.
    aleatoric
        The part that more data of this kind would not reduce: noise, and drift between tasks.
    epistemic
        The part due to uncertain weights. It grows with the distance of rows outside the range of the training rows.
    unfamiliar
        How far the row lies from all training rows: about 1 for a typical training row.
    """

    std: Inputs
    aleatoric: Inputs
    epistemic: Inputs
    unfamiliar: Inputs | None = None


class EVCLRegressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """A multilayer perceptron that learns numbers, one task after another, and says how sure it is.

    Its noise is learned, and its intervals follow targets that drift (docs/numbers.md). `fit`, `partial_fit` and all
    parameters and attributes are those of `EVCLClassifier`, except those that concern classes. y is [rows], or
    [rows, targets] for several targets at once.
    """

    likelihood = "gaussian"

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output = True
        tags.target_tags.multi_output = True
        return tags

    def partial_fit(
        self,
        X: ArrayLike,  # noqa: N803
        y: ArrayLike,
        task: str | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Learn more rows: a mini-batch of a stream, or with `task`, a task of this name (see `EVCLClassifier`)."""
        with self._unchanged_on_error():
            return self._partial_fit(self._checked(X, y, sample_weight, not hasattr(self, "_learner")), task)

    def _checked(self, x: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, reset: bool) -> Rows:
        rows = self._read(x, y, sample_weight, reset, y_numeric=True, multi_output=True)
        rows = rows._replace(y=rows.y.reshape(len(rows.y), -1))
        numbers, had = rows.y.shape[1], None if reset else len(self._learner.classes())
        if had is not None and numbers != had:
            raise EvclError(f"y must have {had} number{'s' * (had > 1)} per row, as in earlier calls, not {numbers}")
        return rows

    def predict(self, X: ArrayLike, return_std: bool = False) -> Inputs | tuple[Inputs, Inputs]:  # noqa: N803
        """The expected number for each row; with `return_std`, also the standard deviation of new rows around it."""
        predicted = self._predictions(X, spread=return_std)
        return (predicted.mean, predicted.std) if return_std else predicted.mean

    def predict_interval(self, X: ArrayLike, level: float = 0.95) -> Inputs:  # noqa: N803
        """[rows, 2], or [rows, targets, 2]: the ends of intervals that contain the number with this probability."""
        return np.stack(self._predictions(X).interval(level), -1)

    def uncertainty(self, X: ArrayLike) -> Spread:  # noqa: N803
        """How uncertain each prediction is, and why."""
        predicted = self._predictions(X)
        return Spread(predicted.std, predicted.aleatoric, predicted.epistemic, predicted.unfamiliar)
