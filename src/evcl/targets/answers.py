"""What predictions and measurements return."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from evcl._core.errors import EvclError
from evcl.targets.negative_binomial import count_interval

Array = Any  # of numbers or labels: a numpy array, a tensor or a list, as the inputs were


class Predictions(NamedTuple):
    """Predictions for N inputs, with their uncertainty in nats: entropy = aleatoric + epistemic.

    Attributes:
        labels: [N], the most probable label
        probabilities: [N, classes], averaged over draws from the posterior
        entropy: [N], the entropy of these probabilities
        aleatoric: [N], the mean entropy of each draw's prediction: uncertainty that more data of this kind would not
            reduce
        epistemic: [N], the rest, the mutual information of label and weights: how much the draws disagree
        tasks: [N], the first task of the head that predicted, or with film the task itself: useful with task="infer"
        unfamiliar: [N], how unlike everything learned from the input seems: the root of the mean of its squared
            distance from the training inputs and of its entropy, each relative to that of the training inputs. 0.7 to
            1 for a typical input, whatever the number of columns; larger where the input is far away, and where the
            prediction is much less certain than usual, as near the border of two classes. All tasks are described by
            one Gaussian, so an input between two far-apart tasks counts as near. None if unknown: for a model saved by
            an earlier release, and for inputs that are tokens or have several shapes

        draws: [S, N, classes], the probabilities by each of S draws of the weights, the same for all inputs: with
            predictions(x, draws=S)

    With likelihood="bernoulli", labels, probabilities and the three uncertainties are [N, D], for D labels.
    """

    labels: Array
    probabilities: Array
    entropy: Array
    aleatoric: Array
    epistemic: Array
    tasks: Array
    unfamiliar: Array = None
    draws: Array = None


class Outputs(NamedTuple):
    """The outputs of a network that is learned with an energy of one's own.

    Attributes:
        mean: [N, ...], over the draws
        std: [N, ...], their standard deviation
        draws: [S, N, ...], by each of S draws of the weights, the same for all inputs
    """

    mean: Array
    std: Array
    draws: Array


class Measures(NamedTuple):
    """How good predictions are.

    Attributes:
        accuracy: the fraction that is right
        nll: the mean negative log-likelihood, in nats
        ece: the expected calibration error
    """

    accuracy: float
    nll: float
    ece: float


class Numbers(NamedTuple):
    """Predictions of numbers or counts for N inputs, each [N], or [N, D] if there are several targets.

    Attributes:
        mean: the expected value
        std: the standard deviation around it of rows that come next: std^2 = aleatoric^2 + epistemic^2
        aleatoric: the part that more data of this kind would not reduce: noise. If targets drift from task to task, it
            includes how far the rows of the last tasks lay from what was predicted before they were learned
        epistemic: the part due to uncertain weights and, outside the range of the training rows, to the unknown
            function there: it grows with the distance
        tasks: [N], the first task of the head that predicted
        unfamiliar: [N], as in `Predictions`; the doubt is the share of the variance that uncertain weights have
        draws: [S, N], the expected values by each of S draws of the weights: with predictions(x, draws=S)
    """

    mean: Array
    std: Array
    aleatoric: Array
    epistemic: Array
    tasks: Array
    unfamiliar: Array = None
    counts: bool = False
    draws: Array = None

    def interval(self, level: float = 0.95) -> tuple[Array, Array]:
        """The lower and upper ends of intervals that contain the true value with this probability."""
        if not isinstance(level, (int, float)) or not 0 < level < 1:
            raise EvclError(f"the level of an interval must be between 0 and 1, such as 0.95, not {level!r}")
        if self.counts:
            return count_interval(self.mean, self.std, level)
        wide = NormalDist().inv_cdf(0.5 + level / 2) * self.std
        return self.mean - wide, self.mean + wide


class NumberMeasures(NamedTuple):
    """How good predictions of numbers are.

    Attributes:
        rmse: the root of the mean squared error, in the units of the targets
        nll: the mean negative log-likelihood, in nats, summed over the targets of an example
        coverage: the fraction of targets within their 95% interval
    """

    rmse: float
    nll: float
    coverage: float


class Outcome(Protocol):
    """What is predicted for N examples, averaged over draws of the weights."""

    @property
    def parts(self) -> list[Tensor]:
        """[N, D] each: the first fields of the answer."""
        ...

    @property
    def expected(self) -> Tensor:
        """[N, D]: the expected targets."""
        ...

    @property
    def doubt(self) -> Tensor:
        """[N], from 0 to 1: how unsure the prediction is."""
        ...

    def widened(self, rows: Tensor, edge: Outcome, far: Tensor, spread: Tensor) -> Outcome:
        """With more epistemic variance for rows that lie this `far` [n, 1] beyond the data, at whose edge the
        prediction is `edge`. The targets have the deviation `spread`.
        """
        ...

    def errors(self, y: Tensor) -> Tensor:
        """[N, D]: the squared errors, without the part that uncertain weights explain."""
        ...

    def answer(self, fields: list[Array]) -> Predictions | Numbers:
        """What the user gets: `parts` in the user's form, tasks, and how unfamiliar the inputs are."""
        ...

    def measure(self, y: Tensor) -> Measures | NumberMeasures:
        """How good the prediction is for targets y [N, D]."""
        ...
