"""Where the posterior is known exactly, a learner should have it: streams of linear models, in float64.

    python laws/exact.py --methods vcl evcl --set distill=0 one_softmax=true tempering=1

Each line compares a method at the end of a stream with two distributions over the same weights:

    exact        the posterior given all rows
    mean-field   the best that independent weights can do: after each part of the stream, the product of Gaussians that
                 maximises the ELBO, with that of the part before as the prior

`distance` is the root mean square over weights of the distance between the means, in standard deviations of the exact
marginals. `ratio` is the mean over weights of the learner's standard deviation divided by the other's. Mean ± deviation
over the seeds; the lines `mean-field` have the optimum itself. The streams, of correlated inputs:

    known noise  5 weights, 10 parts of 40 rows, targets with Gaussian noise of known variance
    numbers      the same and a bias, likelihood="gaussian": the variance is learned too (the noise has a distribution
                 beside that of the weights, in all three)
    labels       logistic regression with 4 weights, 5 parts of 20 rows, likelihood="bernoulli"
    classes      the same with two classes, so two outputs, of which the exact posterior knows the difference only
    contrasts    the same: the differences between the two outputs' weights, from 10,000 draws of the posterior

Every weight has the prior N(0, 1). The law is about the optimum and not about how soon it is reached: unless --set says
otherwise, each part has 300 epochs with a learning rate of 0.2, after which VCL is at the mean-field optimum. A
method that refuses a kind of target has dashes, as do the ratios of point weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from comparing import header, parsed, parser, row, save, settings_of, spread
from scipy.special import expit, log_expit
from torch import Tensor, nn

import evcl
from evcl.targets import Energy

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
CONVERGED = {"epochs": 300, "lr": 0.2, "prior_std": 1.0}
DRAWS = 10_000
NOISE, WEIGHTS, CORRELATION = 0.5, 5, 0.7
LINEAR_PARTS, LINEAR_ROWS = 10, 40
LOGISTIC_PARTS, LOGISTIC_ROWS, COLUMNS = 5, 20, 3


class Belief(NamedTuple):
    """Means and standard deviations [P] of weights."""

    mean: Array
    std: Array


class KnownNoise(Energy):
    """Numbers [N, 1] with Gaussian noise of this standard deviation, and its expected curvature."""

    def __init__(self, std: float = NOISE) -> None:
        super().__init__(lambda outputs, y: 0.5 * ((outputs - y) / std).square().sum(-1))
        self.std = std

    def fisher_targets(self, outputs: Tensor, y: Tensor, weights: Tensor, how: object) -> list[Tensor]:
        return [(weights.sqrt() / self.std * outputs[..., 0]).sum()]


# --- exact posteriors, and mean-field optima -------------------------------------------------------------------------


def linear_exact(x: Array, y: Array, noise: float, prior: Belief) -> tuple[Array, Array]:
    """The mean [P] and covariance [P, P] of the weights of y = x @ w + noise."""
    precision = np.diag(prior.std**-2.0) + x.T @ x / noise**2
    covariance = np.linalg.inv(precision)
    return covariance @ (prior.mean / prior.std**2 + x.T @ y / noise**2), covariance


def linear_mean_field(x: Array, y: Array, noise: float, prior: Belief) -> Belief:
    """The product of Gaussians with the largest ELBO: the exact mean given this prior, and 1 / diag(precision)."""
    mean, _ = linear_exact(x, y, noise, prior)
    return Belief(mean, (prior.std**-2.0 + (x**2).sum(0) / noise**2) ** -0.5)


def expected(mean: Array, std: Array, nodes: int = 40) -> tuple[Array, Array]:
    """E sigmoid(a) and E sigmoid'(a) for a ~ N(mean, std^2), by Gauss-Hermite quadrature."""
    z, weight = np.polynomial.hermite_e.hermegauss(nodes)
    p = expit(mean[:, None] + std[:, None] * z)
    weight = weight / weight.sum()
    return p @ weight, (p * (1 - p)) @ weight


def logistic_mean_field(x: Array, y: Array, prior: Belief) -> Belief:
    """The product of Gaussians with the largest ELBO: where its gradient is 0, std^-2 is the prior's plus the expected
    curvature, and so is the mean, by Newton's steps.
    """
    mean, std = prior
    for _ in range(500):
        p, curvature = expected(x @ mean, np.sqrt(x**2 @ std**2))
        gradient = x.T @ (y - p) - (mean - prior.mean) / prior.std**2
        step = np.linalg.solve(np.diag(prior.std**-2.0) + (x.T * curvature) @ x, gradient)
        new = (prior.std**-2.0 + x.T**2 @ curvature) ** -0.5
        change = max(np.abs(step).max(), np.abs(new - std).max())
        mean, std = mean + step, new
        if change < 1e-10:
            return Belief(mean, std)
    raise RuntimeError("the mean-field optimum was not reached")


def logistic_exact(x: Array, y: Array, prior_std: float, nodes: int = 16) -> Belief:
    """Means and marginal deviations by quadrature over all weights, in the coordinates of Laplace's approximation."""
    mode = np.zeros(x.shape[1])
    for _ in range(100):
        p = expit(x @ mode)
        precision = np.eye(len(mode)) / prior_std**2 + (x.T * (p * (1 - p))) @ x
        mode = mode + np.linalg.solve(precision, x.T @ (y - p) - mode / prior_std**2)
    root = np.linalg.cholesky(np.linalg.inv(precision))
    z, weight = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(*[z] * len(mode), indexing="ij"), -1).reshape(-1, len(mode))
    log_w = np.stack(np.meshgrid(*[np.log(weight)] * len(mode), indexing="ij"), -1).reshape(-1, len(mode)).sum(1)
    w = mode + grid @ root.T
    a = w @ x.T
    log_p = (y * a + log_expit(-a)).sum(1) - 0.5 * (w**2).sum(1) / prior_std**2
    log_w = log_w + log_p + 0.5 * (grid**2).sum(1)
    share = np.exp(log_w - log_w.max())
    share /= share.sum()
    mean = share @ w
    return Belief(mean, np.sqrt(share @ (w - mean) ** 2))


def learned_noise(parts: list[tuple[Array, Array]], prior: Belief, exact: bool, beta: float = 1.0) -> Belief:
    """Numbers whose noise variance v has an inverse gamma distribution, to which each part's rows add their expected
    squared errors (see evcl.targets.numbers): weights and v in turn, until nothing changes. `exact`: the weights'
    posterior, given v; otherwise the mean-field optimum. A KL that counts `beta` times is the same as rows that count
    1 / beta times.
    """
    rows, v = 0, 1.0
    mean, covariance = prior.mean, np.diag(prior.std**2)
    for x, y in parts:
        precision = np.linalg.inv(covariance)
        before, n = v, len(y)
        v = float(y.var()) if rows == 0 else v
        for _ in range(1000):
            full = precision + x.T @ x / (beta * v)
            sharper = full if exact else precision + np.diag((x**2).sum(0)) / (beta * v)
            new_mean = np.linalg.solve(full, precision @ mean + x.T @ y / (beta * v))
            new_covariance = np.linalg.inv(sharper)
            errors = ((y - x @ new_mean) ** 2).sum() + np.einsum("ni,ij,nj->", x, new_covariance, x)
            last, v = v, (rows * before + errors) / (rows + n)
            if abs(v - last) < 1e-12 * v:
                break
        mean, covariance, rows = new_mean, new_covariance, rows + n
    return Belief(mean, np.sqrt(np.diag(covariance)))


# --- streams ---------------------------------------------------------------------------------------------------------


def correlated(source: np.random.Generator, rows: int, columns: int) -> Array:
    """[rows, columns]: Gaussian inputs of variance 1, each two of which have the same correlation."""
    shared = source.standard_normal((rows, 1))
    own = source.standard_normal((rows, columns))
    mixed: Array = np.sqrt(CORRELATION) * shared + np.sqrt(1 - CORRELATION) * own
    return mixed.astype("float32").astype("float64")


class Compared(NamedTuple):
    """Weights of a stream, as the learner has them, and what they should be."""

    name: str
    found: Callable[[evcl.Learner], Belief]
    exact: Belief
    mean_field: Belief


@dataclass(frozen=True)
class Stream:
    parts: list[tuple[Array, Array]]  # x and the learner's targets
    compared: list[Compared]
    likelihood: str | Energy = "categorical"

    def learner(self, method: str, seed: int, **settings: Any) -> evcl.Learner:
        heads = not isinstance(self.likelihood, Energy)
        torch.manual_seed(seed)
        network = nn.Identity() if heads else nn.Linear(self.parts[0][0].shape[1], 1, bias=False)
        given: Any = self.likelihood
        learner = evcl.Learner(network, method, seed=seed, likelihood=given, **settings)
        for k, (x, y) in enumerate(self.parts):
            head: dict[str, Any] = {"head": "0" if k else "new"} if heads else {}
            learner.learn((x.astype("float32"), y.astype("float32" if y.dtype == float else "int64")), str(k), **head)
        return learner


def weights(learner: evcl.Learner) -> Belief:
    """All weights, each output's bias after its weights."""
    q = learner.posterior
    layer = [q[name] for name in q]  # the weights, and the biases of a head
    mean = torch.cat([one.mean.view(len(layer[0].mean), -1) for one in layer], 1).double().numpy().ravel()
    if not learner.method.bayesian:
        return Belief(mean, np.full_like(mean, np.nan))
    std = torch.cat([one.std.view(len(layer[0].mean), -1) for one in layer], 1).double().numpy().ravel()
    return Belief(mean, std)


def contrasts(learner: evcl.Learner) -> Belief:
    """The weights of the second class minus those of the first."""
    found = weights(learner)
    half = len(found.mean) // 2
    q = learner.posterior
    if not learner.method.bayesian:
        return Belief(found.mean[half:] - found.mean[:half], found.std[half:])
    drawn = torch.cat([q["head 0.weight"].draw(DRAWS), q["head 0.bias"].draw(DRAWS, seed=1).unsqueeze(2)], 2)
    return Belief(found.mean[half:] - found.mean[:half], (drawn[:, 1] - drawn[:, 0]).double().std(0).numpy())


def known_noise(seed: int) -> Stream:
    source = np.random.default_rng(seed)
    w = source.standard_normal(WEIGHTS)
    parts = []
    for _ in range(LINEAR_PARTS):
        x = correlated(source, LINEAR_ROWS, WEIGHTS)
        parts.append((x, (x @ w + NOISE * source.standard_normal(LINEAR_ROWS)).astype("float32").astype("float64")))
    prior = Belief(np.zeros(WEIGHTS), np.ones(WEIGHTS))
    x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
    mean, covariance = linear_exact(x, y, NOISE, prior)
    for x, y in parts:
        prior = linear_mean_field(x, y, NOISE, prior)
    compared = [Compared("known noise", weights, Belief(mean, np.sqrt(np.diag(covariance))), prior)]
    return Stream([(x, y[:, None]) for x, y in parts], compared, KnownNoise())


def numbers(seed: int) -> Stream:
    """The learner's weights are those of targets standardised by what it has learned from so far, and its first prior
    those of the first part.
    """
    parts = [(x, y[:, 0] + 3) for x, y in known_noise(seed).parts]
    y, first = np.concatenate([y for _, y in parts]), parts[0][1]
    with_bias = [(np.column_stack([x, np.ones(len(x))]), y) for x, y in parts]
    centre = np.eye(WEIGHTS + 1)[-1] * first.mean()
    prior = Belief(centre, np.full(WEIGHTS + 1, first.std()))
    exact, mean_field = (learned_noise(with_bias, prior, exact) for exact in (True, False))

    def found(learner: evcl.Learner) -> Belief:
        mean, std = weights(learner)
        return Belief(mean * y.std() + np.eye(WEIGHTS + 1)[-1] * y.mean(), std * y.std())

    return Stream(parts, [Compared("numbers", found, exact, mean_field)], "gaussian")


def logistic(seed: int) -> tuple[list[tuple[Array, Array]], list[tuple[Array, Array]]]:
    """The parts of a stream: x and y in {0, 1}; then the same with a column of ones."""
    source = np.random.default_rng(seed)
    w = 1.5 * source.standard_normal(COLUMNS)
    parts = []
    for _ in range(LOGISTIC_PARTS):
        x = correlated(source, LOGISTIC_ROWS, COLUMNS)
        parts.append((x, (source.random(LOGISTIC_ROWS) < expit(x @ w)).astype("int64")))
    return parts, [(np.column_stack([x, np.ones(len(x))]), y) for x, y in parts]


def labels(seed: int) -> Stream:
    parts, with_bias = logistic(seed)
    width = COLUMNS + 1
    mean_field = Belief(np.zeros(width), np.ones(width))
    for x, y in with_bias:
        mean_field = logistic_mean_field(x, y, mean_field)
    x, y = (np.concatenate(each) for each in zip(*with_bias, strict=True))
    compared = [Compared("labels", weights, logistic_exact(x, y, 1.0), mean_field)]
    return Stream([(x, y[:, None]) for x, y in parts], compared, "bernoulli")


def classes(seed: int) -> Stream:
    """The labels depend on the difference d of the two outputs' weights alone, whose prior is N(0, 2). So each output's
    weights are (s ± d) / 2, where their sum s still has its prior, N(0, 2).
    """
    parts, with_bias = logistic(seed)
    width = COLUMNS + 1
    both = Belief(np.zeros(2 * width), np.ones(2 * width))
    for x, y in with_bias:
        both = logistic_mean_field(np.column_stack([-x, x]), y, both)
    x, y = (np.concatenate(each) for each in zip(*with_bias, strict=True))
    mean, std = logistic_exact(x, y, 2**0.5)
    marginal = np.sqrt(2 + std**2) / 2
    exact = Belief(np.concatenate([-mean, mean]) / 2, np.tile(marginal, 2))
    contrast = Belief(both.mean[width:] - both.mean[:width], np.hypot(both.std[width:], both.std[:width]))
    return Stream(
        parts,
        [
            Compared("classes", weights, exact, both),
            Compared("contrasts", contrasts, Belief(mean, std), contrast),
        ],
    )


STREAMS: dict[str, Callable[[int], Stream]] = {
    "known noise": known_noise,
    "numbers": numbers,
    "labels": labels,
    "classes": classes,
}


# --- the comparison --------------------------------------------------------------------------------------------------


def figures(found: Belief, one: Compared) -> list[float]:
    """Distance and ratio from the exact posterior, then from the mean-field optimum."""
    each = []
    for other in (one.exact, one.mean_field):
        each.append(float(np.sqrt(np.mean(((found.mean - other.mean) / one.exact.std) ** 2))))
        each.append(float(np.mean(found.std / other.std)))
    return each


def compare(stream: Stream, method: str, seed: int, **settings: Any) -> dict[str, list[float]]:
    """The figures of each of a stream's comparisons."""
    learner = stream.learner(method, seed, **settings)
    return {one.name: figures(one.found(learner), one) for one in stream.compared}


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS), metavar="STREAM")
    options = parsed(made)
    kept: dict[str, dict[str, list[list[float]]]] = {}
    header("", "method", "distance from exact", "ratio", "distance from mean-field", "ratio")
    for name in options.streams:
        streams = [STREAMS[name](seed) for seed in range(options.seeds)]
        by_name: dict[str, dict[str, list[list[float]]]] = {
            one.name: {"mean-field": [figures(s.compared[i].mean_field, s.compared[i]) for s in streams]}
            for i, one in enumerate(streams[0].compared)
        }
        for method in options.methods:
            settings = settings_of(method, options.set, **CONVERGED)
            try:
                every = [compare(stream, method, seed, **settings) for seed, stream in enumerate(streams)]
            except evcl.EvclError as error:
                every = []
                print(f"{method}: {error}", flush=True)
            for of, own in by_name.items():
                own[method] = [one[of] for one in every]
        for of, own in by_name.items():
            for method, seeds in own.items():
                row(of, method, *([spread(each) for each in zip(*seeds, strict=True)] if seeds else ["-"] * 4))
        kept.update(by_name)
    save(options, kept)


if __name__ == "__main__":
    main()
