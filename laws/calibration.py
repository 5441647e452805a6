"""An interval should be an interval: a learner's `epistemic` says how far its mean may be from the true function.

    python laws/calibration.py --methods evcl --set tempering=1

First, four functions of one input in [-2, 2] are learned from 30 to 1,000 rows with three noises, by an mlp with a
hidden layer of 50 units. `inside` is the fraction of a grid of 100 inputs, from the smallest to the largest learned
from, where the function is within 1.96 epistemic standard deviations of the mean: 0.95 if they are what they say, on
average over the functions that a prior expects; 0.90 to 0.98 is wanted. `width` is the mean of these deviations divided
by the root mean square error: below 1, they are too small. Mean ± deviation over the functions, noises and seeds.

Then, calibration by simulation: the 8 weights of a linear rule are drawn from the prior N(0, 1), and 64 rows of an
orthogonal design, in two parts, are learned with a known noise. There the posterior of independent weights is exact, so
the fraction of the posterior below the true weight is uniform: p is that of a Kolmogorov-Smirnov test, over the weights
of 25 rules per seed. `std` is the deviation of (true - mean) / std: 1 if they are what they say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from comparing import header, parsed, parser, row, save, settings_of, spread
from exact import CONVERGED, KnownNoise, weights
from scipy.stats import kstest, norm
from torch import nn

import evcl

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "bend": lambda x: np.abs(x) - 1,
    "sine": lambda x: np.sin(2 * x),
    "cubic": lambda x: x**3 - 2 * x,
    "wave": lambda x: x * np.sin(3 * x),
}
ROWS, NOISES, GRID = (30, 100, 300, 1000), (0.05, 0.2, 0.5), 100
RULES, WEIGHTS, PARTS, DESIGN_ROWS, NOISE = 25, 8, 2, 64, 1.0


def covered(function: Callable[[Array], Array], rows: int, noise: float, seed: int, learner: evcl.Learner) -> Array:
    """The fraction of the grid inside, and mean width over root mean square error."""
    source = np.random.default_rng([seed, rows, round(1000 * noise)])
    x = source.uniform(-2, 2, (rows, 1)).astype("float32")
    y = function(x[:, 0].astype(float)) + noise * source.standard_normal(rows)
    learner.learn((x, y.astype("float32")))
    grid = np.linspace(x.min(), x.max(), GRID).astype("float32")[:, None]
    found = learner.predictions(grid)
    error, width = (
        np.asarray(found.mean).ravel() - function(grid[:, 0].astype(float)),
        np.asarray(found.epistemic).ravel(),
    )
    inside = np.abs(error) <= norm.ppf(0.975) * width
    return np.array([inside.mean(), width.mean() / np.sqrt((error**2).mean())])


def orthogonal(seed: int) -> Array:
    """[rows, weights] whose parts each have orthogonal columns of mean square 1."""
    source = np.random.default_rng(seed)
    half = DESIGN_ROWS // PARTS
    return np.concatenate([np.linalg.qr(source.standard_normal((half, WEIGHTS)))[0] * half**0.5 for _ in range(PARTS)])


def z_scores(method: str, seed: int, **settings: Any) -> Array:
    """[weights]: (true - mean) / std."""
    source = np.random.default_rng([seed, 7])
    x, w = orthogonal(seed), source.standard_normal(WEIGHTS)
    y = (x @ w + NOISE * source.standard_normal(len(x)))[:, None]
    torch.manual_seed(seed)
    network = nn.Linear(WEIGHTS, 1, bias=False)
    learner = evcl.Learner(network, method, seed=seed, likelihood=KnownNoise(NOISE), **settings)
    for part in np.split(np.arange(len(x)), PARTS):
        learner.learn((x[part].astype("float32"), y[part].astype("float32")))
    found = weights(learner)
    return (w - found.mean) / found.std


def main() -> None:
    made = parser(__doc__, seeds=1)
    options = parsed(made)
    kept: dict[str, dict[str, Any]] = {"intervals": {}, "calibration": {}}
    header("method", "rows", "inside", "lowest", "width")
    for method in options.methods:
        own = kept["intervals"][method] = {}
        settings = settings_of(method, options.set)
        for rows in ROWS:
            each = []
            for seed in range(options.seeds):
                for noise in NOISES:
                    for function in FUNCTIONS.values():
                        network = evcl.nn.mlp(1, [50])
                        learner = evcl.Learner(network, method, seed=seed, likelihood="gaussian", **settings)
                        each.append(covered(function, rows, noise, seed, learner))
            inside, width = np.array(each).T
            own[str(rows)] = {"inside": inside.tolist(), "width": width.tolist()}
            row(method, f"{rows:,}", spread(inside), f"{inside.min():.2f}", spread(width))
    print()
    header("method", "weights", "std", "inside 95 %", "p")
    for method in options.methods:
        settings = settings_of(method, options.set, **CONVERGED)
        try:
            z = np.concatenate([z_scores(method, seed, **settings) for seed in range(RULES * options.seeds)])
        except evcl.EvclError as error:
            print(f"{method}: {error}", flush=True)
            continue
        p = float(kstest(norm.cdf(z), "uniform").pvalue)
        kept["calibration"][method] = {"z": z.tolist(), "p": p}
        row(method, str(len(z)), f"{z.std():.3f}", f"{np.mean(np.abs(z) <= norm.ppf(0.975)):.3f}", f"{p:.3f}")
    save(options, kept)


if __name__ == "__main__":
    main()
